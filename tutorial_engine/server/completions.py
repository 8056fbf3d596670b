"""POST /v1/completions: texts continued.

    prompts 0, 1, ...; n completions of each          choices[prompt * n + completion]

Owns: what the answers look like, whole and as chunks. Does not own: anything before or after that (`serving.py`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from tutorial_engine.logprobs import Logprob
from tutorial_engine.outputs import CompletionOutput, RequestOutput
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.server.errors import json_response
from tutorial_engine.server.protocol import CompletionRequest, fail
from tutorial_engine.server.serving import Serving, Usage, answer, blaming_client, new_id, stream

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    job = CompletionJob(request.app.state.serving, body, new_id("cmpl", body, request.headers))
    return await (stream(request, job.chunks()) if body.stream else answer(request, job.whole()))


@dataclass
class Prompt:
    """text: None unless it came as text or is to be echoed."""

    token_ids: list[int]
    text: str | None
    params: SamplingParams


class CompletionJob:
    """One request to /v1/completions."""

    def __init__(self, serving: Serving, body: CompletionRequest, job_id: str) -> None:
        self.serving, self.body, self.id = serving, body, job_id
        self.created = int(time.time())
        self.usage = Usage(serving.options.enable_prompt_tokens_details)
        # Echo with max_tokens=0 asks for nothing but the prompt (and its logprobs). The engine always makes a token.
        self.only_prompt = bool(body.echo) and body.max_tokens == 0
        self.decode = serving.tokenizer.decode
        self.offsets: dict[int, int] = {}  # of each choice that has begun: characters that its logprobs have covered

    async def whole(self) -> Response:
        prompts = await self._prompts()
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self._outputs(prompts)) as outputs:
            async for i, output in outputs:
                self._count(i, output)
                for completion in output.outputs:
                    choice = self._choice(prompts[i], i, output, completion)
                    choice["prompt_logprobs"] = self._prompt_logprobs(output)
                    choices[choice["index"]] = choice
        return json_response({**self._head(), "choices": [choices[index] for index in sorted(choices)],
                              "usage": self.usage.as_dict()})

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        prompts = await self._prompts()
        async with aclosing(self._outputs(prompts)) as outputs:
            async for i, output in outputs:
                self._count(i, output)
                for completion in output.outputs:
                    choice = self._choice(prompts[i], i, output, completion)
                    yield self._chunk([choice], self.body.includes_usage_always)
        if self.body.includes_usage:
            yield self._chunk([], True)

    # Into the engine

    async def _prompts(self) -> list[Prompt]:
        self.model = self.serving.check_model(self.body.model)
        prompts = self.body.prompts()
        self.serving.check_count(len(prompts) * (self.body.n or 1))
        return [await self._prompt(prompt) for prompt in prompts]

    async def _prompt(self, prompt: str | list[int]) -> Prompt:
        body, serving = self.body, self.serving
        token_ids = await serving.tokenize(prompt, body.add_special_tokens, body)
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if asked < 1 and not self.only_prompt:
            fail(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
        max_tokens = serving.max_tokens(max(asked, 1), len(token_ids))
        of_prompt = body.prompt_logprobs
        if of_prompt is None and body.echo:
            of_prompt = body.logprobs
        with blaming_client():
            params = body.sampling_params(serving.defaults, max_tokens, body.logprobs, of_prompt)
        text = prompt if isinstance(prompt, str) else None
        if body.echo and text is None:
            in_vocabulary = all(i < serving.llm.llm_engine.input_processor.vocab_size for i in token_ids)
            text = await serving.llm.detokenize(token_ids) if in_vocabulary else ""  # else it will be refused
        return Prompt(token_ids, text, params)

    def _outputs(self, prompts: list[Prompt]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self.serving.generate(self.body, self.id, [{"prompt_token_ids": p.token_ids} for p in prompts],
                                     [p.params for p in prompts])

    def _count(self, prompt: int, output: RequestOutput) -> None:
        self.usage.add(prompt, output)
        if self.only_prompt:
            self.usage.completion_tokens = 0

    # Out of it

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        return {**self._head(), "choices": choices, **({"usage": self.usage.as_dict()} if with_usage else {})}

    def _choice(self, prompt: Prompt, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A choice, or the next piece of one."""
        body, index = self.body, i * prompt.params.n + completion.index
        is_first = index not in self.offsets
        echo, said = is_first and bool(body.echo), not self.only_prompt
        logprobs = Logprobs(self.decode, bool(body.return_tokens_as_token_ids), self.offsets.get(index, 0))
        if echo:
            logprobs.add(prompt.token_ids, output.prompt_logprobs or [])
        if said:
            logprobs.add(completion.token_ids, completion.logprobs or [])
        self.offsets[index] = logprobs.offset
        choice = {"index": index, "text": (prompt.text or "" if echo else "") + (completion.text if said else ""),
                  "logprobs": logprobs.as_dict() if body.logprobs is not None else None,
                  "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids if said else []
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None] | None:
        return prompt_logprobs(output) if self.body.prompt_logprobs is not None else None


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's form: one entry per prompt token, the first null; an entry maps token ids to logprob, rank and text."""
    if output.prompt_logprobs is None:
        return None
    return [None if entry is None else {
        str(token_id): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for token_id, p in entry.items()} for entry in output.prompt_logprobs]


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def token_name(token_id: int, text: str | None, as_id: bool) -> str:
    """How an answer calls a token: its text, or "token_id:7" for clients who must tell equal texts apart."""
    return f"token_id:{token_id}" if as_id else text or ""


class Logprobs:
    """OpenAI's record of a text's tokens: four lists of the same length.

    Args:
        decode: of the tokenizer. as_ids: see `token_name`. offset: of the first token in its text, in characters.
    """

    def __init__(self, decode: Any, as_ids: bool, offset: int) -> None:
        self.decode, self.as_ids, self.offset = decode, as_ids, offset
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_ids: list[int], entries: list[dict[int, Logprob] | None]) -> None:
        """Tokens and what is known about each; None: nothing, as about the first of a prompt."""
        for token_id, entry in zip(token_ids, entries):
            text = self.decode([token_id]) if entry is None else entry[token_id].decoded_token
            self.tokens.append(token_name(token_id, text, self.as_ids))
            self.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
            self.top_logprobs.append(None if entry is None else {
                token_name(i, p.decoded_token, self.as_ids): finite(p.logprob) for i, p in entry.items()})
            self.text_offset.append(self.offset)
            self.offset += len(text or "")

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "token_logprobs": self.token_logprobs, "top_logprobs": self.top_logprobs,
                "text_offset": self.text_offset}
