"""Input processor: from what the user passed to requests the scheduler can trust.

    prompt (any form) -> token ids -> checked against the context limit and the vocabulary
    SamplingParams    -> a private copy, checked against the model, completed with the model's stop ids

Everything that can be refused is refused here, before a block is taken: a bad request must cost the others nothing.
Owns: tokenising, chat templates, admission checks. Does not own: the forms of prompts (`inputs.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import numbers
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutorial_engine.config import GENERATION_KEYS, EngineConfig
from tutorial_engine.exceptions import ChatTemplateResolutionError, VLLMClientError, VLLMValidationError
from tutorial_engine.inputs import parse_prompt
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.structured_outputs import StructuredOutputManager

logger = logging.getLogger(__name__)

MAX_BAD_WORDS_SEQUENCES = 128


class InputProcessor:
    """Makes `Request`s.

    Args:
        config: limits.
        tokenizer: transformers' fast tokenizer of the model; None to work with token ids only.
        vocab_size: rows of the embedding; ids beyond it do not exist.
        generation_config: the content of generation_config.json, {} if there is none.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any, vocab_size: int, generation_config: dict[str, Any]
                 ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)
        extra = generation_config.get("eos_token_id")
        extra = [] if extra is None else extra
        if not all(isinstance(i, int) for i in ([extra] if isinstance(extra, int) else extra)):
            raise VLLMValidationError("generation_config.json: eos_token_id must be a token id or a list of them, got "
                                      f"{extra!r}.", parameter="eos_token_id", value=extra)
        self.extra_eos_ids = [i for i in ([extra] if isinstance(extra, int) else extra or [])
                              if i != self.eos_token_id and 0 <= i < vocab_size]
        self.structured_outputs = StructuredOutputManager(
            config.args.structured_outputs_config or {}, tokenizer, vocab_size, self.eos_token_id)
        use_file = config.args.generation_config != "vllm"
        chosen = {**(generation_config if use_file else {}), **config.args.override_generation_config}
        self._defaults = {ours: chosen[theirs] for theirs, ours in GENERATION_KEYS.items()
                          if chosen.get(theirs) is not None}
        self._rng = random.Random(config.args.seed)
        self._internal_ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that passes no SamplingParams: the model's recommendation, or neutral values."""
        try:
            return SamplingParams.from_optional(**self._defaults)
        except (TypeError, VLLMValidationError) as error:
            raise VLLMValidationError(f"The model's generation_config has a value that cannot be used: {error} Pass "
                                      "SamplingParams, or build the engine with generation_config='vllm'.",
                                      parameter="generation_config", value=self._defaults) from error

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Those fields of SamplingParams that the model recommends something for."""
        return dict(self._defaults)

    def make_requests(self, request_id: str, prompt: Any, params: SamplingParams, *, arrival_time: float | None = None,
                      priority: int = 0, tokenization_kwargs: dict[str, Any] | None = None
                      ) -> tuple[str | None, list[Request]]:
        """Requests for one prompt: one, or n of them if params.n > 1.

        n completions are n independent requests with seeds seed, seed + 1, ...; the prefix cache lets them share the
        prompt's blocks.

        Returns:
            (the prompt's text if it is known, the requests).

        Raises:
            TypeError: wrong form. VLLMValidationError: anything this model or engine cannot do.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}.")
        if arrival_time is not None and not isinstance(arrival_time, numbers.Real):
            raise TypeError(f"arrival_time must be seconds, got {arrival_time!r}.")
        if not isinstance(priority, numbers.Integral):
            raise VLLMValidationError(f"priority must be an integer, got {priority!r}.", parameter="priority",
                                      value=priority)
        if priority and self.config.args.scheduling_policy != "priority":
            raise VLLMValidationError(f"Got priority {priority} but priority scheduling is not enabled: build the "
                                      "engine with scheduling_policy='priority'.", parameter="priority", value=priority)
        parsed = parse_prompt(prompt)
        token_ids = self.tokenize(parsed, tokenization_kwargs or {})
        self._check_prompt(token_ids)
        params = self._check_params(params, len(token_ids))
        # All stop ids, so that none is chosen before min_tokens: EOS too, even if ignore_eos lets it pass later.
        masked = frozenset([*params.stop_token_ids, *self.extra_eos_ids] + [self.eos_token_id] * (
            self.eos_token_id is not None))
        bad_words = self._tokenize_bad_words(params.bad_words)
        self._check_something_allowed(params, masked, bad_words)
        grammars = self.structured_outputs.make_grammars(params.structured_outputs, masked, params.n)
        base_seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        internal_id = f"{request_id}-{next(self._internal_ids):08x}"
        requests = [Request(internal_id if params.n == 1 else f"{i}_{internal_id}", token_ids, params,
                            seed=base_seed + i, eos_token_id=self.eos_token_id, masked_stop_ids=masked,
                            priority=priority, arrival_time=arrival_time, cache_salt=parsed.get("cache_salt"),
                            bad_words_token_ids=bad_words, grammar=grammars[i])
                    for i in range(params.n)]
        return parsed.get("prompt"), requests

    def tokenize(self, parsed: dict[str, Any], tokenization_kwargs: dict[str, Any]) -> list[int]:
        """Token ids of a parsed prompt. A text gets special tokens (a BOS, if the tokenizer has one).

        tokenization_kwargs: add_special_tokens (bool; for texts), truncate_prompt_tokens (int; -1: what fits),
        truncation_side ("left" or "right": the side that is cut off).
        """
        kwargs = dict(tokenization_kwargs)
        add_special_tokens = kwargs.pop("add_special_tokens", True)
        keep = kwargs.pop("truncate_prompt_tokens", None)
        side = kwargs.pop("truncation_side", None) or getattr(self.tokenizer, "truncation_side", "right")
        if kwargs:
            raise TypeError(f"tokenization_kwargs has keys that this engine does not have: {sorted(kwargs)}.")
        if side not in ("left", "right"):
            raise VLLMValidationError(f"truncation_side must be 'left' or 'right', got {side!r}.",
                                      parameter="truncation_side", value=side)
        is_text = "prompt_token_ids" not in parsed
        if is_text and any("\ud800" <= c <= "\udfff" for c in parsed["prompt"]):
            raise VLLMValidationError("The prompt holds half of a surrogate pair, which is no valid Unicode; was its "
                                      "text cut in the middle of a character?", parameter="prompt")
        if is_text:
            self._check_tokenizer("a text as prompt", "pass {'prompt_token_ids': [...]}")
        ids = (self.tokenizer.encode(parsed["prompt"], add_special_tokens=add_special_tokens) if is_text
               else parsed["prompt_token_ids"])
        ids = [int(i) for i in ids]
        if keep is not None:
            keep = self.config.max_model_len - 1 if keep == -1 else keep
            if not isinstance(keep, int) or not 1 <= keep <= self.config.max_model_len:
                raise VLLMValidationError(f"truncate_prompt_tokens must be -1 or between 1 and max_model_len="
                                          f"{self.config.max_model_len}, got {keep!r}.",
                                          parameter="truncate_prompt_tokens", value=keep)
            ids = ids[-keep:] if side == "left" else ids[:keep]
        bos = getattr(self.tokenizer, "bos_token_id", None)
        if is_text and add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            logger.warning("The prompt starts with two BOS tokens: its text has one, and tokenising added another. Use "
                           "chat(), or tokenization_kwargs={'add_special_tokens': False}.")
        return ids

    def _check_tokenizer(self, what: str, instead: str) -> None:
        if self.tokenizer is None:
            raise VLLMValidationError(f"This engine was built with skip_tokenizer_init=True, so it cannot take {what}: "
                                      f"{instead}.", parameter="skip_tokenizer_init", value=True)

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        limit, length = self.config.max_model_len, len(token_ids)
        if length == 0:
            raise VLLMValidationError("The decoder prompt cannot be empty: it must hold at least one token.",
                                      parameter="prompt")
        if length > limit:
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
                f"{length} input tokens, which exceeds this limit even without any output tokens. Shorten the prompt, "
                "or raise max_model_len if the model allows it.", parameter="input_tokens", value=length)
        if length == limit:
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens. Your prompt contains {length} input tokens; "
                "the prompt plus the number of requested output tokens (at least 1) is longer than the maximum model "
                "length. Shorten the prompt.", parameter="input_tokens", value=length)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise VLLMValidationError(f"Token id {token_id} is out of vocabulary: ids go from 0 to "
                                          f"{self.vocab_size - 1}.", parameter="prompt_token_ids", value=token_id)

    def _check_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A copy of `params` that fits this model, with max_tokens set and the model's further EOS ids added."""
        # Fields may have been set since the object was made, so they are checked once more.
        params = dataclasses.replace(params)
        self._check_with_processors(params)
        if params.stop or params.bad_words or params.structured_outputs:
            self._check_tokenizer("stop strings, bad_words or structured_outputs", "use what speaks of token ids")
        if params.prompt_logprobs is not None:
            params.skip_reading_prefix_cache = True  # what a hit spares us is the very thing that is asked for
        for name in ("logprobs", "prompt_logprobs"):
            asked, cap = getattr(params, name), self.config.args.max_logprobs
            if asked is not None and cap != -1 and (asked == -1 or asked > cap):
                raise VLLMValidationError(f"Requested {name} of {asked} is more than max_logprobs={cap}; ask for less, "
                                          "or build the engine with a larger max_logprobs (-1: no limit).",
                                          parameter=name, value=asked)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < self.vocab_size:
                    raise VLLMValidationError(f"{name} contains token id {token_id}, which is out of vocabulary: ids "
                                              f"go from 0 to {self.vocab_size - 1}.", parameter=name, value=token_id)
        if params.max_tokens is None:
            params.max_tokens = self.config.max_model_len - prompt_len
            if params.min_tokens > params.max_tokens:
                raise VLLMValidationError(f"min_tokens={params.min_tokens} is more than the {params.max_tokens} tokens "
                                          f"that a prompt of {prompt_len} leaves in a context of "
                                          f"{self.config.max_model_len}.", parameter="min_tokens",
                                          value=params.min_tokens)
        if not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*params.stop_token_ids, *self.extra_eos_ids]))
        return params

    def _check_with_processors(self, params: SamplingParams) -> None:
        """Let the engine's logits processors look at the parameters, and refuse what only they could read."""
        processors = self.config.args.logits_processors or []
        if params.extra_args and not processors:
            raise VLLMValidationError("extra_args is read by custom logits processors only, and this engine has none: "
                                      "build it with logits_processors=[...], or leave extra_args None.",
                                      parameter="extra_args", value=params.extra_args)
        for processor in processors:
            try:
                processor.validate_params(params)
            except VLLMClientError:
                raise
            except Exception as error:  # whatever the processor raises, it is these parameters that it refuses
                raise VLLMValidationError(f"The logits processor {processor.__name__} refuses the parameters: {error}",
                                          parameter="extra_args", value=params.extra_args) from error

    def _check_something_allowed(self, params: SamplingParams, masked: frozenset[int], bad_words: list[list[int]]
                                 ) -> None:
        forbidden = {word[0] for word in bad_words if len(word) == 1} | (masked if params.min_tokens else set())
        allowed = range(self.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if forbidden.issuperset(allowed):
            raise VLLMValidationError("All of allowed_token_ids are bad_words, or stop tokens that min_tokens forbids "
                                      "at first: no token could be chosen.", parameter="allowed_token_ids",
                                      value=params.allowed_token_ids)

    def _tokenize_bad_words(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Each word as it stands at the start of a text, and as it stands after a space.

        The second form is kept only if it differs in its first id and has the same length, which is vLLM's rule, with
        vLLM's gap: a word that is one token after a space and two without can still slip through in its short form.
        """
        sequences: list[list[int]] = []
        for word in bad_words:
            plain, spaced = (list(self.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
                             for prefix in ("", " "))
            if not plain:
                raise VLLMValidationError(f"bad_words: {word!r} is no token at all without its leading white space; "
                                          "forbid a token of white space with logit_bias.", parameter="bad_words",
                                          value=word)
            sequences.append(plain)
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        if len(sequences) > MAX_BAD_WORDS_SEQUENCES:
            raise VLLMValidationError(f"bad_words makes {len(sequences)} token sequences, the limit is "
                                      f"{MAX_BAD_WORDS_SEQUENCES}.", parameter="bad_words", value=len(sequences))
        return sequences

    def render_chat(self, messages: Sequence[dict[str, Any]], *, chat_template: str | None,
                    add_generation_prompt: bool, continue_final_message: bool, tools: list[dict] | None,
                    chat_template_kwargs: dict[str, Any] | None) -> str:
        """One conversation as the text that the model was trained on.

        Raises:
            ChatTemplateResolutionError: no template. VLLMValidationError: the template refuses, or bad messages.
        """
        self._check_tokenizer("conversations", "render them yourself, and pass token ids to generate()")
        if chat_template is not None and not isinstance(chat_template, str):
            raise TypeError(f"chat_template must be text, got {type(chat_template).__name__}.")
        template = _read_template(chat_template or self.config.args.chat_template)
        if template is None and self.tokenizer.chat_template is None:
            raise ChatTemplateResolutionError(
                "This tokenizer has no chat template, and as of transformers v4.44, default chat template is no longer "
                "allowed. Pass chat_template=..., or use generate() with a text that you lay out yourself.")
        if add_generation_prompt and continue_final_message:
            raise VLLMValidationError("continue_final_message and add_generation_prompt are not compatible: the one "
                                      "continues the last message, the other starts a new one. Set one of them False.",
                                      parameter="add_generation_prompt", value=True)
        if not isinstance(messages, (list, tuple)) or not messages:
            raise VLLMValidationError("A conversation must be a list of at least one message, such as "
                                      f"[{{'role': 'user', 'content': 'Hello'}}]; got {messages!r}.",
                                      parameter="messages")
        checked = [_check_message(m) for m in messages]
        try:
            return self.tokenizer.apply_chat_template(
                checked, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, tools=tools, **(chat_template_kwargs or {}))
        except Exception as error:  # templates raise whatever Jinja raises
            raise VLLMValidationError(f"The chat template failed: {error}", parameter="messages") from error


def _read_template(template: str | None) -> str | None:
    """A template given as text or as the path of a file; None if none was given."""
    if template is None or any(mark in template for mark in "{}\n"):
        return template
    if not Path(template).is_file():
        raise VLLMValidationError(f"chat_template is neither a Jinja template nor a file: {template!r}.",
                                  parameter="chat_template", value=template)
    return Path(template).read_text(encoding="utf-8")


def _check_message(message: Any) -> dict[str, Any]:
    """A message whose content is text; a list of text parts is joined by newlines."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise VLLMValidationError("A message must be a dictionary with 'role' and 'content', such as "
                                  f"{{'role': 'user', 'content': 'Hello'}}; got {message!r}.", parameter="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif isinstance(part, str):
                texts.append(part)
            else:
                raise VLLMValidationError(f"This engine serves text only; got a content part {part!r}.",
                                          parameter="messages")
        return {**message, "content": "\n".join(texts)}
    if content is not None and not isinstance(content, str):
        raise VLLMValidationError(f"The content of a message must be text, got {type(content).__name__}.",
                                  parameter="messages")
    return {**message, "content": content or ""}
