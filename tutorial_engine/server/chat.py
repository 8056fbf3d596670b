"""POST /v1/chat/completions: conversations answered.

    messages --template--> text --> ids --> engine --> text --reasoning parser--> content --tool parser--> calls

The parsers work on pieces, and a whole answer is one piece to them: so a stream and a whole answer always agree.

Owns: what the answers look like, whole and as chunks. Does not own: anything before or after that (`serving.py`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from tutorial_engine.logprobs import Logprob
from tutorial_engine.outputs import CompletionOutput, RequestOutput
from tutorial_engine.server.completions import finite, prompt_logprobs, token_name
from tutorial_engine.server.errors import json_response
from tutorial_engine.server.protocol import ChatCompletionRequest, fail
from tutorial_engine.server.reasoning import REASONING_PARSERS, ReasoningParser
from tutorial_engine.server.serving import Serving, Usage, answer, blaming_client, new_id, stream
from tutorial_engine.server.tool_parsers import TOOL_PARSERS, HermesToolParser

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    job = ChatJob(request.app.state.serving, body, new_id("chatcmpl", body, request.headers))
    return await (stream(request, job.chunks()) if body.stream else answer(request, job.whole()))


class Choice:
    """One of the n answers while it grows: its text goes through the parsers.

    Attributes:
        begun: its first chunk was sent.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: HermesToolParser | None, body: ChatCompletionRequest
                 ) -> None:
        self.reasoning, self.tools, self.body = reasoning, tools, body
        self.begun = False

    def feed(self, completion: CompletionOutput) -> dict[str, Any]:
        """What more of the text adds to the message: OpenAI's delta, {} for nothing."""
        text, final = completion.text, completion.finished()
        reasoning, calls = "", []
        if self.reasoning:
            reasoning, text = self.reasoning.feed(text, final)
        if self.tools:
            parsed = self.tools.feed(text, final)
            text, calls = parsed.content, parsed.calls
            if self.body.parallel_tool_calls is False:
                calls = [call for call in calls if call["index"] == 0]
        delta: dict[str, Any] = {}
        if reasoning and self.body.include_reasoning:
            delta["reasoning"] = reasoning
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = calls
        return delta

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """A call is what made the model stop, unless the client had named it (OpenAI then says "stop")."""
        by_choice = not self.body.forces_tool or self.body.tool_choice == "required"
        if completion.finish_reason == "stop" and self.tools and self.tools.num_calls and by_choice:
            return "tool_calls"
        return completion.finish_reason


class ChatJob:
    """One request to /v1/chat/completions."""

    def __init__(self, serving: Serving, body: ChatCompletionRequest, job_id: str) -> None:
        self.serving, self.body, self.id = serving, body, job_id
        self.created = int(time.time())
        self.usage = Usage(serving.options.enable_prompt_tokens_details)
        self._choices: dict[int, Choice] = {}

    async def whole(self) -> Response:
        choices = []
        async with aclosing(await self._outputs()) as outputs:
            async for i, output in outputs:
                self.usage.add(i, output)
                for completion in output.outputs:
                    said = self._choice(completion.index).feed(completion)
                    for call in said.get("tool_calls", ()):
                        del call["index"]
                    message = {"role": "assistant", "content": None if said else "", **said}
                    choices.append(self._record(completion, {"message": message}))
        result = {**self._head("chat.completion"), "choices": choices, "usage": self.usage.as_dict(),
                  "prompt_logprobs": prompt_logprobs(output) if self.body.prompt_logprobs is not None else None}
        if self.body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return json_response(result)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(await self._outputs()) as outputs:
            async for i, output in outputs:
                self.usage.add(i, output)
                for completion in output.outputs:
                    choice = self._choice(completion.index)
                    if not choice.begun:
                        choice.begun = True
                        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                        yield self._chunk([{"index": completion.index, **role}], output)
                    delta = choice.feed(completion)
                    silent = choice.reasoning or choice.tools  # a parser holds something back
                    if delta or completion.finished() or not silent or self._has_more(completion):
                        content = {"content": ""} if not delta and not silent else {}
                        yield self._chunk([self._record(completion, {"delta": delta or content})])
        if self.body.includes_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage.as_dict()}

    def _has_more(self, completion: CompletionOutput) -> bool:
        """Whether a chunk has something to tell although its text is held back."""
        return bool(self.body.return_token_ids or completion.logprobs)

    # Into the engine

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body, serving = self.body, self.serving
        self.model = serving.check_model(body.model)
        if body.tool_choice == "auto" and not serving.options.enable_auto_tool_choice:
            fail('tool_choice "auto" needs a server that was started with --enable-auto-tool-choice and '
                 "--tool-call-parser.", "tool_choice")
        serving.check_count(body.n or 1)
        text = await serving.render(body)
        token_ids = await serving.tokenize(text, body.add_special_tokens, body)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        with blaming_client():
            params = body.sampling_params(serving.defaults, serving.max_tokens(asked, len(token_ids)), logprobs,
                                          body.prompt_logprobs)
        if self._looks_for_tools():
            params.skip_special_tokens = False  # the tags are special tokens of some models
        return serving.generate(body, self.id, [{"prompt_token_ids": token_ids}], [params])

    def _looks_for_tools(self) -> bool:
        return bool(self.body.tools) and (
            self.body.forces_tool or (self.body.tool_choice != "none" and self.serving.options.enable_auto_tool_choice))

    def _choice(self, index: int) -> Choice:
        if index not in self._choices:
            options = self.serving.options
            thinks = options.reasoning_parser and self.body.constraints() is None
            reasoning = ReasoningParser(REASONING_PARSERS[options.reasoning_parser]) if thinks else None
            tools = TOOL_PARSERS[options.tool_call_parser or "hermes"]() if self._looks_for_tools() else None
            self._choices[index] = Choice(reasoning, tools, self.body)
        return self._choices[index]

    # Out of it

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], first: RequestOutput | None = None) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        if self.body.includes_usage_always:
            chunk["usage"] = self.usage.as_dict()
        if first is not None and self.body.return_token_ids:
            chunk["prompt_token_ids"] = first.prompt_token_ids
        return chunk

    def _record(self, completion: CompletionOutput, said: dict[str, Any]) -> dict[str, Any]:
        """A choice, or a piece of one."""
        logprobs = None
        if completion.logprobs is not None:
            logprobs = {"content": [self._token(i, entry) for i, entry in zip(
                completion.token_ids, completion.logprobs)]}
        finish_reason = self._choice(completion.index).finish_reason(completion)
        record = {"index": completion.index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        if completion.finished():
            record["stop_reason"] = completion.stop_reason
        if self.body.return_token_ids:
            record["token_ids"] = completion.token_ids
        return record

    def _token(self, token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
        """OpenAI's record of one token, and of the most likely ones in its place."""
        def described(i: int, p: Logprob) -> dict[str, Any]:
            name = token_name(i, p.decoded_token, bool(self.body.return_tokens_as_token_ids))
            return {"token": name, "logprob": finite(p.logprob), "bytes": list(name.encode("utf-8", "replace"))}

        most = self.body.top_logprobs or 0
        top = [(i, p) for i, p in entry.items() if most == -1 or p.rank <= most]
        top.sort(key=lambda item: item[1].rank)
        return {**described(token_id, entry[token_id]), "top_logprobs": [described(i, p) for i, p in top]}
