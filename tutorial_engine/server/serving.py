"""What all routes share: the engine, the names of its model, the way of a prompt into it, and of outputs out of it.

    prompts --tokenized--> checked --> generate --+
                                       generate --+--merge--> (which prompt, output) --> JSON, or events
                                       generate --+               |
                                                                  +-- the client leaves: all of them end

A request's work is one chain of asynchronous generators. Whatever ends it (a client that left, an error, a shutdown)
closes the chain, and closing a `generate` ends its request in the engine before the next step.

Nothing in it waits in a queue: an output is fetched when the last one was written, and what the engine says meanwhile
is joined to one output (`RequestOutputCollector`). So a client that reads slowly costs one output's memory, and nobody
else any time.

Owns: admission, merging, server-sent events, disconnects. Does not own: how answers look (`completions.py`, `chat.py`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from tutorial_engine.models.default_model import DEFAULT_MODEL
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.server.errors import ModelNotFoundError, QueueFullError, describe, dump, error_response
from tutorial_engine.server.protocol import Conversation, GenerationRequest
from tutorial_engine.server.reasoning import REASONING_PARSERS
from tutorial_engine.server.tool_parsers import TOOL_PARSERS

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it, but the metrics count it


@dataclass
class ServerOptions:
    """How the server behaves, apart from its engine.

    Attributes:
        api_key: clients must send one of these; none: anyone may ask. VLLM_API_KEY adds one.
        allowed_origins: web pages that may ask, as a JSON list.
        enable_auto_tool_choice: let the model decide whether it calls a tool; needs tool_call_parser.
        tool_call_parser: the format of its calls: hermes.
        reasoning_parser: split off what the model thinks aloud: qwen3 or deepseek_r1.
        enable_prompt_tokens_details: report in usage how much of the prompt was cached.
        trust_request_chat_template: let clients bring a template of their own, a program that runs here.
        max_queued_requests: answers being waited for beyond max_num_seqs; more are refused with status 503.
    """

    api_key: list[str] = field(default_factory=list)
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_prompt_tokens_details: bool = False
    trust_request_chat_template: bool = False
    max_queued_requests: int = 1024

    def __post_init__(self) -> None:
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise VLLMValidationError(f"{name} must be one of {', '.join(known)}, got {value!r}.", parameter=name,
                                          value=value)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise VLLMValidationError("enable_auto_tool_choice needs a tool_call_parser, which knows how this model "
                                      "writes its calls.", parameter="tool_call_parser")
        if self.max_queued_requests < 0:
            raise VLLMValidationError(f"max_queued_requests must be at least 0, got {self.max_queued_requests}.",
                                      parameter="max_queued_requests", value=self.max_queued_requests)


class Serving:
    """The engine as the routes see it.

    Args:
        llm: the engine. options: the server's.

    Attributes:
        tokenizer: transformers'. names: of the model; the first one is told to clients who name none.
        created: when this server began, in seconds since 1970.
    """

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.tokenizer = llm.get_tokenizer()  # which may take seconds to set up, so not while somebody waits
        self.created = int(time.time())
        config = llm.llm_engine.config
        self.root = config.args.model or DEFAULT_MODEL
        self.names = config.args.served_model_names
        self.max_model_len = config.max_model_len
        self.defaults = llm.llm_engine.input_processor.get_diff_sampling_param()
        self.most_output = config.args.override_generation_config.get("max_new_tokens")
        self.capacity = config.max_num_seqs + options.max_queued_requests
        self.num_in_flight = 0  # answers that clients wait for; a prompt with n completions counts n times

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")
        return name or self.names[0]

    def check_count(self, count: int) -> None:
        """Before any work is put into them. Raises VLLMValidationError for more answers than there is ever room for."""
        if count > self.capacity:
            raise VLLMValidationError(f"This server takes at most {self.capacity} answers at a time, and the request "
                                      f"asks for {count}: send fewer prompts, or a smaller n.", parameter="n",
                                      value=count)

    # Prompts

    async def tokenize(self, prompt: str | list[int], add_special_tokens: bool,
                       request: GenerationRequest | None = None) -> list[int]:
        """Token ids, cut if the request wants that.

        Raises:
            VLLMValidationError: so long that it need not even be tokenized.
        """
        kwargs: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        if request is not None:
            kwargs |= {"truncate_prompt_tokens": request.truncate_prompt_tokens,
                       "truncation_side": request.truncation_side}
        if isinstance(prompt, str) and kwargs.get("truncate_prompt_tokens") is None:
            most = self.max_model_len * self._longest_token
            if len(prompt) > most:
                raise VLLMValidationError(
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                    f"{len(prompt)} characters, and {most} are more than fit. Shorten the prompt.",
                    parameter="input_text", value=len(prompt))
        with blaming_client():
            return await self.llm.tokenize(prompt, kwargs)

    @cached_property
    def _longest_token(self) -> int:
        """In characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    async def render(self, request: Conversation) -> str:
        """A conversation as text.

        Raises:
            VLLMValidationError: a template of the client's own, or the template refuses the conversation.
        """
        if request.chat_template is not None:
            if not self.options.trust_request_chat_template:
                raise VLLMValidationError("A chat_template in a request is only used if the server was started with "
                                          "--trust-request-chat-template.", parameter="chat_template")
            if not any(mark in request.chat_template for mark in "{}\n"):  # it would be taken for the name of a file
                raise VLLMValidationError("chat_template must be a Jinja template.", parameter="chat_template")
        with blaming_client():
            return await self.llm.render_chat(**request.template_arguments())

    def max_tokens(self, asked: int | None, prompt_len: int) -> int:
        """How many tokens an answer may have: what was asked for or recommended, what fits, what the server allows."""
        if asked is not None and asked > self.max_model_len:
            raise VLLMValidationError(f"max_tokens={asked} cannot be greater than max_model_len={self.max_model_len}. "
                                      "Please request fewer output tokens.", parameter="max_tokens", value=asked)
        asked = self.defaults.get("max_tokens") if asked is None else asked
        room = max(self.max_model_len - prompt_len, 1)  # too long a prompt is the engine's to refuse, in clearer words
        return min(limit for limit in (asked, room, self.most_output) if limit is not None)

    # Outputs

    async def generate(self, request: GenerationRequest, request_id: str, prompts: Sequence[dict[str, Any]],
                       params: Sequence[SamplingParams]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of one or several prompts as they come, each with the number of its prompt.

        Raises (from the first `__anext__` on):
            QueueFullError: too many wait already. Else as `AsyncLLM.generate`.
        """
        count = sum(p.n for p in params)
        if self.num_in_flight + count > self.capacity:
            raise QueueFullError("The server's queue is full; try again later.")
        self.num_in_flight += count
        try:
            streams = [self.llm.generate({**prompt, "cache_salt": request.cache_salt}, p, request_id,
                                         priority=request.priority) for prompt, p in zip(prompts, params)]
            async with aclosing(merge(streams)) as merged:
                with blaming_client():
                    async for item in merged:
                        yield item
        finally:
            self.num_in_flight -= count


@contextmanager
def blaming_client() -> Iterator[None]:
    """Around calls of the engine with a client's values: a TypeError or ValueError is about these."""
    try:
        yield
    except VLLMError:
        raise
    except (TypeError, ValueError) as error:
        raise VLLMClientError(str(error)) from error


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, each with the generator's number. Closing it closes all of them."""
    pending: dict[asyncio.Future[T], int] = {}
    try:
        for i, stream in enumerate(streams):
            pending[asyncio.ensure_future(anext(stream))] = i
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield i, item
                pending[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
        await _cancel(pending)
        for stream in streams:
            await stream.aclose()


# What happens when the client leaves


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def unless_client_leaves(receive: Receive, work: Any) -> Any:
    """Await `work`, and cancel it if the client disconnects first.

    Raises:
        ClientLeftError: it did. Else whatever `work` raises.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        await _cancel((task, left))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What `work` returns, as long as the client waits for it."""
    try:
        return await unless_client_leaves(request.receive, work)
    except ClientLeftError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        return error_response(error)


async def stream(request: Request, chunks: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Chunks as server-sent events. The headers wait for the first chunk, so that a request that is refused, or fails
    at once, has a status that says so."""
    try:
        first = await unless_client_leaves(request.receive, anext(chunks))
    except BaseException as error:
        await chunks.aclose()
        if isinstance(error, ClientLeftError):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if isinstance(error, Exception):
            return error_response(error)
        raise
    return EventStream(first, chunks)


class EventStream(Response):
    """Server-sent events: each chunk as ``data: {json}``, then ``data: [DONE]``. An error on the way is an event, too;
    the status has long been sent."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.first, self.chunks = first, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.chunks):
            with suppress(ClientLeftError):
                await unless_client_leaves(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        yield dump(self.first)
        try:
            async for chunk in self.chunks:
                yield dump(chunk)
        except Exception as error:
            yield dump(describe(error)[1])
        yield b"[DONE]"


# Pieces of answers


def new_id(prefix: str, request: GenerationRequest, headers: Any) -> str:
    """The id of an answer, from the client if it brings one."""
    given = request.request_id
    header = headers.get("x-request-id", "")
    if given is None and 0 < len(header) <= 256 and header.isascii() and header.isprintable() and " " not in header:
        given = header
    return f"{prefix}-{given or uuid.uuid4().hex}"


class Usage:
    """Counts tokens: those of each prompt once, those of all its completions."""

    def __init__(self, with_details: bool) -> None:
        self.with_details = with_details
        self.prompt_tokens: dict[int, int] = {}
        self.cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Take in an output: a delta, or the only one."""
        self.prompt_tokens[prompt] = len(output.prompt_token_ids)
        self.cached_tokens[prompt] = output.num_cached_tokens or 0
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        prompt_tokens = sum(self.prompt_tokens.values())
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + self.completion_tokens,
                                 "completion_tokens": self.completion_tokens}
        if self.with_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self.cached_tokens.values())}
        return usage
