"""What clients may send: the bodies of all requests, and how they become `SamplingParams`.

    {"model": ..., "messages": [...], "temperature": null, "top_k": 5}      JSON
      --pydantic-->  ChatCompletionRequest                                  types, ranges, what contradicts what
      --sampling_params(...)-->  SamplingParams                             null: the model's recommendation

Fields are OpenAI's, and vLLM's further ones, which the openai package sends in `extra_body`. Three kinds of fields are
not declared: those that vLLM knows and this engine does not have (any but their neutral value is refused), those that
vLLM has removed (a warning, once), and those nobody knows (ignored, as all servers of this kind do).

Owns: names and rules of fields. Does not own: ranges that `SamplingParams` checks, anything that needs the model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tutorial_engine.server.tool_parsers import tool_grammar

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = int(os.environ.get("VLLM_MAX_STOP_STRINGS", 4))
MAX_TOKEN_LIST = 1024  # entries of logit_bias, allowed_token_ids, stop_token_ids
MAX_GRAMMAR = 2**17  # characters of whatever is compiled to a grammar, which the engine's thread does

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_LIST)]
# Part of log lines and of answers, so nothing that could be taken for more than a name.
RequestId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,256}$")]

# Fields of vLLM's that are not in this engine, with the values that ask for nothing.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, None), "logprob_token_ids": (None,), "use_beam_search": (False, None),
    "length_penalty": (1, None), "thinking_token_budget": (None, -1), "repetition_detection": (None,),
    "stream_interval": (None, 1), "prompt_embeds": (None,), "suffix": (None, ""), "documents": (None, []),
    "return_prompt_text": (False, None), "mm_processor_kwargs": (None, {}), "kv_transfer_params": (None,),
}
_REMOVED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
            "guided_whitespace_pattern", "best_of")
_warned: set[str] = set()

# Sampling fields that the model may have a recommendation for, where the client says nothing.
_WITH_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                  "frequency_penalty")
_AS_THEY_ARE = ("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
                "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words")


def fail(message: str, parameter: str, value: Any = None) -> None:
    raise VLLMValidationError(message, parameter=parameter, value=value)


class StreamOptions(BaseModel):
    """include_usage: one more chunk at the end, with the numbers of tokens; continuous_usage_stats: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            fail("response_format of type json_schema needs a schema in json_schema.schema.", "response_format")
        return self


class Body(BaseModel):
    """Any body; it says so if a client asks for what is not here."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None

    @model_validator(mode="after")
    def _check_undeclared(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_HERE and value not in _NOT_HERE[name]:
                fail(f"{name} is not in this engine; leave it out.", name)
            elif name in _REMOVED and name not in _warned:
                _warned.add(name)
                logger.warning("A client sent %s, which vLLM has removed: it is ignored%s.", name, (
                    ", and the output is not constrained; structured_outputs is its successor"
                    if name.startswith("guided") else ""))
            else:
                logger.debug("A client sent the unknown field %r; it is ignored.", name[:64])
        return self


class GenerationRequest(Body):
    """What the two kinds of generation have in common."""

    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_TOKEN_LIST)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=128)] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)
    request_id: RequestId | None = None
    cache_salt: Annotated[str, StringConstraints(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_generation(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            fail("stream_options can only be given together with stream=true.", "stream_options")
        if self.prompt_logprobs is not None:
            if self.stream and (self.prompt_logprobs > 0 or self.prompt_logprobs == -1):
                fail("prompt_logprobs cannot be streamed; leave out stream.", "prompt_logprobs")
            if self.prompt_logprobs < -1:
                fail("prompt_logprobs must be at least 0, or -1 for the whole vocabulary.", "prompt_logprobs")
        for name in ("structured_outputs", "response_format", "tools"):
            value = getattr(self, name, None)
            if value is not None and len(str(value)) > MAX_GRAMMAR:
                fail(f"{name} is longer than the {MAX_GRAMMAR} characters that this server takes.", name)
        self.constraints()
        return self

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_usage_always(self) -> bool:
        return self.includes_usage and bool(self.stream_options.continuous_usage_stats)

    def constraints(self) -> StructuredOutputsParams | None:
        """The form that the output must have, from whichever field asks for one."""
        given = [made for made in self._constraints() if made is not None]
        if len(given) > 1:
            fail("Only one of response_format, structured_outputs and a forced tool_choice can be given.",
                 "structured_outputs")
        return given[0] if given else None

    def _constraints(self) -> Iterator[StructuredOutputsParams | None]:
        if self.response_format is not None and self.response_format.type == "json_object":
            yield StructuredOutputsParams(json_object=True)
        elif self.response_format is not None and self.response_format.type == "json_schema":
            yield StructuredOutputsParams(json=self.response_format.json_schema.schema_)
        if self.structured_outputs is not None:
            unknown = self.structured_outputs.keys() - StructuredOutputsParams.__dataclass_fields__.keys()
            if unknown:
                fail(f"structured_outputs has no field {min(unknown)!r}.", "structured_outputs")
            yield StructuredOutputsParams(**self.structured_outputs)

    def sampling_params(self, defaults: dict[str, Any], max_tokens: int, logprobs: int | None,
                        prompt_logprobs: int | None) -> SamplingParams:
        """What the engine gets.

        Args:
            defaults: the model's recommendations, by the names of SamplingParams.

        Raises:
            VLLMValidationError, TypeError: a value out of range.
        """
        fields = {name: getattr(self, name) for name in _AS_THEY_ARE}
        for name in _WITH_DEFAULTS:
            fields[name] = defaults.get(name) if getattr(self, name) is None else getattr(self, name)
        return SamplingParams.from_optional(
            **fields, n=self.n, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
            structured_outputs=self.constraints(), extra_args=self.vllm_xargs,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One or several, each as a text or as token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    @model_validator(mode="after")
    def _check_logprobs(self) -> CompletionRequest:
        if self.logprobs is not None and self.logprobs < 0:
            fail("logprobs must be at least 0.", "logprobs")
        return self


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ContentPart:
        if self.type != "text" or self.text is None:
            fail("This engine serves text only: a part of a message must be {\"type\": \"text\", \"text\": ...}.",
                 "messages")
        return self


class Message(BaseModel):
    """One message of a conversation. What it has besides role and content goes to the template as it is."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: tool calls with parsed arguments, and reasoning under both of its names."""
        message = self.model_dump()
        for old, new in (("reasoning_content", "reasoning"), ("reasoning", "reasoning_content")):
            if isinstance(message.get(old), str):
                message.setdefault(new, message[old])
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"] or "{}")
                except ValueError:
                    fail("The arguments of a tool call must be JSON.", "messages")
        return message


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class Conversation(Body):
    """What both a chat and its tokenization need."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Conversation:
        if self.add_generation_prompt and self.continue_final_message:
            fail("continue_final_message and add_generation_prompt are not compatible: the one continues the last "
                 "message, the other starts a new one. Set one of them false.", "add_generation_prompt")
        return self

    def template_arguments(self) -> dict[str, Any]:
        """Arguments of `AsyncLLM.render_chat`."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return {"messages": [message.for_template() for message in self.messages],
                "chat_template": self.chat_template, "add_generation_prompt": self.add_generation_prompt,
                "continue_final_message": self.continue_final_message, "chat_template_kwargs": kwargs,
                "tools": [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None}


class ChatCompletionRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    echo: bool | None = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.echo:
            fail("echo of a conversation is not in this engine; leave it out.", "echo")
        if self.top_logprobs is not None:
            if self.top_logprobs < 0 and self.top_logprobs != -1:
                fail("top_logprobs must be at least 0, or -1 for the whole vocabulary.", "top_logprobs")
            if self.top_logprobs != 0 and not self.logprobs:
                fail("top_logprobs needs logprobs=true.", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            fail("tool_choice needs tools to choose from.", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in self.tool_names():
            fail("tool_choice names a tool that is not among tools.", "tool_choice")
        return self

    def tool_names(self) -> list[str]:
        return [tool.function.name for tool in self.tools or []]

    @property
    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def template_arguments(self) -> dict[str, Any]:
        arguments = super().template_arguments()
        if self.tool_choice == "none":
            arguments["tools"] = None
        return arguments

    def _constraints(self) -> Iterator[StructuredOutputsParams | None]:
        yield from super()._constraints()
        if self.forces_tool:
            named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
            chosen = [tool.function for tool in self.tools or [] if named in (None, tool.function.name)]
            several = named is None and self.parallel_tool_calls is not False
            yield StructuredOutputsParams(grammar=tool_grammar(
                {function.name: function.parameters for function in chosen}, several))


class TokenizeCompletionRequest(Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(Conversation):
    """POST /tokenize with a conversation."""

    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[TokenId]
