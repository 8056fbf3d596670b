"""`AsyncLLM`: one engine for many askers at once, each of whom reads an answer while it is being written.

    your event loop                                            one thread, which alone touches the LLMEngine

    async for output in llm.generate(...):                     until it is told to stop:
        add, abort, pause ...  ---- queue of commands ---->        run the commands that have come (idle: wait for one)
                                                                   engine.step()
        collector  <---- loop.call_soon_threadsafe --------        send each output to its collector

A step takes long and an event loop must not wait, so the two live in different threads; torch lets go of the
interpreter's lock while it computes. Nothing is shared: what one side wants of the other goes through the queue or
through the loop, so that there is no lock around the engine, and every request is served between two steps, never in
the middle of one. All who ask are in the same engine, and so in the same batches.

vLLM (`v1/engine/async_llm.py`) has the same two sides, in two processes: there, tokenizing and detokenizing need not
share an interpreter with the scheduler.

Owns: the thread, the way back of each output, pausing, and who is told what when something fails. Does not own: the
loop of the engine (`llm_engine.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from tutorial_engine.config import AsyncEngineArgs
from tutorial_engine.exceptions import (
    EngineDeadError,
    EngineGenerateError,
    EnginePausedError,
    VLLMError,
    VLLMValidationError,
)
from tutorial_engine.inputs import parse_prompt
from tutorial_engine.llm_engine import LLMEngine, check_sleep
from tutorial_engine.metrics import Metric
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "wait", "keep")
CALLERS_ERRORS = (VLLMError, TypeError, ValueError)  # what a command may raise without harm to the engine


class RequestOutputCollector:
    """The way back of one request, from the engine's thread to the event loop that it was made in.

    It holds one output, not a queue: if the consumer is slower than the engine, the next output is merged into it.
    Deltas are joined; of cumulative outputs the newest is kept, for each of the n completions.
    """

    def __init__(self, request_id: str, aggregate: bool) -> None:
        self.request_id = request_id
        self.aggregate = aggregate
        self.engine_id: str | None = None  # the engine's name for the request, see `EngineThread.add`
        self._loop = asyncio.get_running_loop()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._something = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> bool:
        """Send an output, or the error that ends the request. From any thread. False: nobody is there any more."""
        try:
            self._loop.call_soon_threadsafe(self._receive, item)
        except RuntimeError:  # the loop was closed, and the generators in it were not
            return False
        return True

    def _receive(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            self._output.add(item, self.aggregate)
        self._something.set()

    async def get(self) -> RequestOutput:
        """What has come since the last call; waits until there is something. An error comes after the last output."""
        while self._output is None:
            if self._error is not None:
                raise _fresh(self._error)
            self._something.clear()
            await self._something.wait()
        output, self._output = self._output, None
        return output


class EngineThread:
    """The thread that owns an `LLMEngine`. The event loop's side calls `call`, `post` and `shutdown`; all other
    methods run in the thread.

    Attributes:
        dead_error: what everyone is told once the thread has ended; None while it runs.
        pause_mode: "abort", "wait" or "keep" while paused, else None.
    """

    def __init__(self, engine: LLMEngine, log_requests: bool) -> None:
        self.engine = engine
        self.log_requests = log_requests
        self.dead_error: EngineDeadError | None = None
        self.pause_mode: str | None = None
        self._collectors: dict[str, RequestOutputCollector] = {}  # unfinished requests by the engine's id
        self._drained: list[Future[None]] = []  # resolved when no request is left, or the engine is resumed
        self._suffixes = itertools.count(2)
        self._open = True
        self._commands: queue.SimpleQueue[tuple[Future[Any] | None, Callable[[], Any]]] = queue.SimpleQueue()
        # Between "it is alive" and "so the command is in the queue" it must not die. Reentrant, because the garbage
        # collector may call `shutdown` anywhere.
        self._gate = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="AsyncLLM", daemon=True)
        self._thread.start()

    # The event loop's side

    def post(self, function: Callable[..., Any], *args: Any, future: Future[Any] | None = None) -> None:
        """Have the thread call `function(*args)` before its next step. The future gets what it returns or raises. An
        error that is not the caller's fault, or that nobody waits for, is the end of the engine.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._gate:
            if self.dead_error is not None:
                raise _fresh(self.dead_error)
            self._commands.put((future, partial(function, *args)))

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`post`, and wait for the answer. If the caller is cancelled before the thread comes to it, it is skipped."""
        future: Future[Any] = Future()
        self.post(function, *args, future=future)
        return await asyncio.wrap_future(future)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its step, and wait for that (at most `timeout` seconds)."""
        with contextlib.suppress(EngineDeadError):
            self.post(self._stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from there
            self._thread.join(timeout)

    # The thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._open:
                self._run_commands()
                if self._open and self._can_step():
                    self._step()
        except BaseException as error:
            logger.exception("The engine has failed and stops.")
            cause = error
        self._die(cause)

    def _can_step(self) -> bool:
        return (self.pause_mode != "keep" and not self.engine.is_sleeping()
                and self.engine.has_unfinished_requests())

    def _run_commands(self) -> None:
        """Those that are there now, not those that come meanwhile: newcomers must not keep the others from a step."""
        if not self.engine.has_unfinished_requests():
            self._resolve_drained()
        for _ in range(self._commands.qsize() or (0 if self._can_step() else 1)):  # an idle thread sleeps in get()
            future, command = self._commands.get()
            if future is None:
                command()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, CALLERS_ERRORS):
                        raise

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except EngineGenerateError as error:
            if not error.request_ids:
                raise  # nobody would be told, and somebody would wait for ever
            for engine_id in error.request_ids:
                self._collectors.pop(engine_id).put(error)
        else:
            self._send(outputs)

    def _send(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is None:
                continue  # dropped a moment ago, when another of its n completions found nobody
            if output.finished:
                del self._collectors[output.request_id]
            output.request_id = collector.request_id
            if not collector.put(output):
                self.drop(collector)

    def _stop(self) -> None:
        self._open = False

    def _die(self, cause: BaseException | None) -> None:
        """Give the memory back, then tell everyone. `cause`: None for an orderly end."""
        error = EngineDeadError("This engine was shut down; build a new one." if cause is None else
                                f"The engine has failed and stopped, build a new one. {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with self._gate:
            self.dead_error = error  # from here on nothing is put into the queue
        try:
            self.engine.close()
        except Exception:
            logger.exception("The engine could not be closed in good order.")
        while not self._commands.empty():
            future, _ = self._commands.get()
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(_fresh(error))
        self._resolve_drained(error)
        for collector in self._collectors.values():
            collector.put(error)
        self._collectors.clear()

    # Commands

    def add(self, collector: RequestOutputCollector, prompt: Any, params: SamplingParams, arrival_time: float,
            **kwargs: Any) -> None:
        """Queue a request. The engine knows it by the user's id, or by "id#2" if that is taken, so that two users'
        requests of one name stay apart.

        Raises:
            As `LLMEngine.add_request`. EnginePausedError: not now. EngineGenerateError: an error that nobody foresaw.
        """
        if self.pause_mode in ("abort", "wait"):
            raise EnginePausedError(f"Generation is paused (mode={self.pause_mode!r}), and requests are refused until "
                                    "resume_generation() is called. Pause with mode='keep' to have them wait.")
        engine_id = collector.request_id
        while engine_id in self._collectors:
            engine_id = f"{collector.request_id}#{next(self._suffixes)}"
        try:
            self.engine.add_request(engine_id, prompt, params, arrival_time, **kwargs)
        except CALLERS_ERRORS:
            raise
        except Exception as error:
            self.engine.abort_request([engine_id])
            raise EngineGenerateError(f"Request {collector.request_id!r} could not be prepared: "
                                      f"{type(error).__name__}: {error}", [engine_id]) from error
        collector.engine_id = engine_id
        self._collectors[engine_id] = collector
        if self.log_requests:
            logger.info("Received request %s: prompt %r, %s, %s", collector.request_id, prompt, params, kwargs)

    def abort(self, request_ids: set[str] | None = None) -> None:
        """End requests by the users' ids (None: all), and send their last outputs."""
        self._send(self.engine.abort_request(
            engine_id for engine_id, collector in self._collectors.items()
            if request_ids is None or collector.request_id in request_ids))

    def drop(self, collector: RequestOutputCollector) -> None:
        """Its consumer has left: end the request, if it has not ended or was never added."""
        if self._collectors.get(collector.engine_id) is collector:  # else the name may be another's by now
            del self._collectors[collector.engine_id]
            self.engine.abort_request([collector.engine_id])

    def pause(self, mode: str) -> Future[None]:
        """Returns a future for the moment when the engine stands still."""
        self.pause_mode = mode
        if mode == "abort":
            self.abort()
        drained: Future[None] = Future()
        if mode == "keep":
            drained.set_result(None)
        else:
            self._drained.append(drained)
        return drained

    def resume(self) -> None:
        self.pause_mode = None
        self._resolve_drained()

    def _resolve_drained(self, error: EngineDeadError | None = None) -> None:
        for future in self._drained:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(_fresh(error))
        self._drained.clear()


class AsyncLLM:
    """The engine for asyncio: streaming answers, and requests that come and go at any time.

    Args:
        engine: from now on it belongs to this object; its state may be looked at while nothing runs.
        log_requests: write each request's arrival and parameters to the log.

    It belongs to no event loop: use it from a notebook, or from one `asyncio.run` after another.

    >>> engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    >>> async for output in engine.generate("The capital of France is", SamplingParams(), "my-request"):
    ...     print(output.outputs[0].text)
    """

    def __init__(self, engine: LLMEngine, log_requests: bool = False) -> None:
        self.llm_engine = engine
        self._thread = EngineThread(engine, log_requests)
        # Texts are worked on beside the engine, so that a long prompt delays neither the loop nor a step; one at a
        # time, since a tokenizer is not made for several threads.
        self._texts = ThreadPoolExecutor(1, "texts")
        # The thread does not know this object, so that dropping the last reference ends the thread.
        weakref.finalize(self, self._thread.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Load the model and start the thread. Raises what `LLMEngine.from_engine_args` raises."""
        if not isinstance(engine_args, AsyncEngineArgs):
            raise TypeError(f"engine_args must be AsyncEngineArgs, got {type(engine_args).__name__}.")
        return cls(LLMEngine.from_engine_args(engine_args), engine_args.enable_log_requests)

    async def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, *,
                       lora_request: Any = None, priority: int = 0, tokenization_kwargs: dict[str, Any] | None = None
                       ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt, and yield what there is of it as it grows.

        `sampling_params.output_kind` decides what comes: all so far (CUMULATIVE, the default), what is new (DELTA), or
        only the end (FINAL_ONLY). With n > 1 an output of the first two kinds holds those of the completions that have
        grown: look at their `index`. The last output has `finished` set.

        To leave early, cancel the task or close the generator (`aclose()`): the request ends before the next step, and
        its blocks are free.

        Args:
            prompt: text, token ids, or a dict with either (see `inputs.py`).
            request_id: yours, for `abort` and the outputs. It need not be unique.
            priority: lower goes first (scheduling_policy="priority").
            tokenization_kwargs: as in `LLM.generate`.

        Raises (from the first `__anext__` on):
            TypeError, VLLMValidationError: a bad prompt or parameter.
            EnginePausedError: requests are refused until `resume_generation`.
            EngineGenerateError: this request failed; the engine goes on.
            EngineDeadError: the engine has failed or was shut down.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}.")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling_params).__name__}.")
        # A copy now: the thread will read it later, and the caller may change his in between.
        params = sampling_params.clone()
        collector = RequestOutputCollector(request_id, params.output_kind == RequestOutputKind.DELTA)
        try:
            await self._thread.call(partial(self._thread.add, lora_request=lora_request, priority=priority,
                                            tokenization_kwargs=tokenization_kwargs),
                                    collector, prompt, params, time.time())
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        except BaseException:
            # Not awaited: whoever is cancelled or closed shall not wait for a step. The queue keeps the order, so the
            # request is dropped even if the thread has not come to its `add` yet.
            with contextlib.suppress(EngineDeadError):
                self._thread.post(self._thread.drop, collector)
            raise

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End all requests of this id, or of these. Each gets a last output with finish_reason "abort". Unknown ids are
        ignored."""
        await self._thread.call(self._thread.abort, {request_id} if isinstance(request_id, str) else set(request_id))

    async def abort_all(self) -> None:
        """End every request. Each gets a last output with finish_reason "abort"."""
        await self._thread.call(self._thread.abort)

    async def run_between_steps(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, called by the engine's thread while no step runs: the way to look at the engine, or to
        change something in it, that all methods here take. What it raises is raised here; an error that is neither a
        VLLMError nor a TypeError or ValueError is taken for the engine's own, and ends it."""
        return await self._thread.call(function, *args)

    async def tokenize(self, prompt: Any, tokenization_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt of any form (see `inputs.py`), as `generate` would see them.

        Args:
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens, truncation_side.
        """
        return await self._on_texts(self.llm_engine.input_processor.tokenize, parse_prompt(prompt),
                                    tokenization_kwargs or {})

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of some token ids."""
        return await self._on_texts(partial(self.get_tokenizer().decode, skip_special_tokens=skip_special_tokens),
                                    list(token_ids))

    async def render_chat(self, messages: Sequence[dict[str, Any]], *, chat_template: str | None = None,
                          add_generation_prompt: bool = True, continue_final_message: bool = False,
                          tools: list[dict[str, Any]] | None = None,
                          chat_template_kwargs: dict[str, Any] | None = None) -> str:
        """One conversation as text; arguments and errors as in `LLM.chat`. The text has its special tokens: generate
        from it with tokenization_kwargs={"add_special_tokens": False}."""
        return await self._on_texts(partial(
            self.llm_engine.input_processor.render_chat, messages, chat_template=chat_template,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, tools=tools,
            chat_template_kwargs=chat_template_kwargs))

    async def _on_texts(self, function: Callable[..., Any], *args: Any) -> Any:
        await self.check_health()
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *args)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Bring the engine to a stand, for instance to change the model's weights.

        Args:
            mode: what becomes of the requests. "abort": they end now. "wait": they are finished first. "keep": they
                stay as they are, and go on after `resume_generation`. Requests that come while the engine is paused
                are refused by the first two, and wait with "keep".
            clear_cache: forget the prefix cache; kept requests compute theirs again.
        """
        if mode not in PAUSE_MODES:
            raise VLLMValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}.", parameter="mode",
                                      value=mode)
        await asyncio.wrap_future(await self._thread.call(self._thread.pause, mode))
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=mode == "keep")

    async def resume_generation(self) -> None:
        """End a pause. Harmless without one."""
        await self._thread.call(self._thread.resume)

    async def is_paused(self) -> bool:
        """True from the call of `pause_generation` on, also while it still waits."""
        return self._thread.pause_mode is not None

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False if requests hold some. See `LLMEngine.reset_prefix_cache`."""
        return await self._thread.call(self.llm_engine.reset_prefix_cache, reset_running_requests, reset_connector)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`; what comes meanwhile waits. See `LLMEngine.sleep`."""
        check_sleep(level, mode)
        paused = self._thread.pause_mode
        if mode == "abort":
            await self.abort_all()
        elif mode == "wait":
            await self.pause_generation(mode="wait", clear_cache=False)
        await self._thread.call(self.llm_engine.sleep, level, "keep")
        if mode == "wait" and paused is None:
            await self.resume_generation()  # asleep, nothing runs, so newcomers may wait instead of being refused

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`, wholly or by parts; fully awake, the engine takes up its requests again."""
        await self._thread.call(self.llm_engine.wake_up, tags)

    async def is_sleeping(self) -> bool:
        return await self._thread.call(self.llm_engine.is_sleeping)

    async def do_log_stats(self) -> None:
        """Write the line with the throughput since the last one to the log now."""
        await self._thread.call(self.llm_engine.do_log_stats)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms as they are now. Raises AssertionError if the engine keeps none."""
        return self.llm_engine.get_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's recommended sampling, or neutral values. See `LLM.get_default_sampling_params`."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        if (error := self.dead_error) is not None:
            raise error

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model."""
        return self.llm_engine.get_tokenizer()

    @property
    def is_running(self) -> bool:
        """False once the engine has failed or was shut down."""
        return self._thread.dead_error is None

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why it does not run any more."""
        return _fresh(self._thread.dead_error) if self.errored else None

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop after the step that is running, and give the memory back. Unfinished requests get an EngineDeadError.
        Shutting down twice does no harm.

        Args:
            timeout: seconds to wait for the step; None: as long as it takes.
        """
        self._thread.shutdown(timeout)
        self._texts.shutdown(wait=False)


AsyncLLMEngine = AsyncLLM  # vLLM's older name


def _fresh(error: Exception) -> Any:
    """A copy to raise: an exception that is raised in several tasks would collect the tracebacks of all."""
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh
