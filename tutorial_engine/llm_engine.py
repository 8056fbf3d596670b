"""`LLMEngine`: the loop. Everything else in this package serves the few lines of `step()`.

    add_request -> [ waiting ] -> schedule -> execute -> update -> outputs
                                     ^                     |
                                     +---------------------+   until the request is finished

With async scheduling (on a GPU) the engine plans and starts step N + 1 while the GPU still computes step N. It does not
know the tokens of step N by then, only that there will be some; the GPU has them when step N + 1 needs them:

    host    | schedule 1 | schedule 2 | update 1 | schedule 3 | update 2 | ...
    GPU                  | step 1 ............. | step 2 .............. | step 3 ...     never waits for the host

Owns: the order of things, and that nothing is lost when one of them fails. Does not own: any of the work itself.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tutorial_engine.block_manager import KVCacheManager
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from tutorial_engine.input_processor import InputProcessor
from tutorial_engine.interrupts import HeldInterrupts
from tutorial_engine.kv_events import KVCacheEvent
from tutorial_engine.metrics import IterationStats, Metric, StatLogger
from tutorial_engine.model_runner import AsyncModelRunnerOutput, ModelRunner, ModelRunnerOutput, load_model
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.default_model import DEFAULT_MODEL
from tutorial_engine.models.loader import resolve_model, resolve_tokenizer
from tutorial_engine.output_processor import OutputProcessor, ParentRequest
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.request import RequestStatus
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

# Steps in a row that may compute nothing before the engine calls it a deadlock. One is normal: a lone request that
# preempts itself is admitted again in the next step.
MAX_IDLE_STEPS = 3

SLEEP_TAGS = ("weights", "kv_cache", "scheduling")


@dataclass
class StepInFlight:
    """A step that the model runner has begun with.

    Attributes:
        pending: what `execute_model` returned. tables: the block tables in this step, if somebody listens.
    """

    plan: SchedulerOutput
    pending: ModelRunnerOutput | AsyncModelRunnerOutput
    listeners: list[Callable]
    tables: dict[str, list[int]]


class LLMEngine:
    """The synchronous engine: add requests, call `step()` until they are finished.

    Args:
        model_runner: executes steps. tokenizer: of the model, None with skip_tokenizer_init.
        generation_config: the model's sampling recommendations.

    Use `LLMEngine.from_engine_args(EngineArgs(...))`, or `LLM`, which wraps it. Its repr shows the queues, the block
    tables and why someone waits.

    Attributes:
        last_plan: what the scheduler decided for the newest step; None before the first.
        listeners: called after each step that began since they were added, with (scheduler, plan, tables, kept tokens);
            see `trace.Trace`. One that raises is reported in the log and dropped: a broken picture must not cost an
            answer.
    """

    def __init__(self, config: EngineConfig, model_runner: Any, tokenizer: Any, vocab_size: int,
                 generation_config: dict[str, Any]) -> None:
        self.config = config = config.with_max_model_len(model_runner.max_model_len)
        self.model_runner = model_runner
        self.tokenizer = tokenizer
        self.num_gpu_blocks: int = model_runner.num_gpu_blocks
        self.input_processor = InputProcessor(config, tokenizer, vocab_size, generation_config)
        self.stat_logger = None if config.args.disable_log_stats else StatLogger(
            config.args.served_model_names[0], config.max_model_len, config.device)
        self.listeners: list[Callable] = []
        self.reserved_ids: set[str] = set()  # of requests that LLM waits for: their outputs must not be mixed up
        self.last_plan: SchedulerOutput | None = None
        self._asleep: set[str] = set()  # of SLEEP_TAGS
        self._idle_steps = 0
        self._in_flight: deque[StepInFlight] = deque()  # at most two, the older one first
        self._start_empty()

    def _start_empty(self) -> None:
        """Empty queues, and a pool whose blocks are all free."""
        c = self.config
        self._in_flight.clear()
        self.scheduler = Scheduler(c, KVCacheManager(
            self.num_gpu_blocks, c.block_size, c.max_model_len, c.enable_prefix_caching, c.args.watermark,
            c.args.kv_events_config.enable_kv_cache_events))
        self.output_processor = OutputProcessor(self.tokenizer, log_stats=not c.args.disable_log_stats)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Find the model, load it, size the cache.

        Raises:
            ModelLoadError: no such model, or not a kind that this engine can load.
            VLLMValidationError: arguments that contradict each other, the model or the device.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        capability = torch.cuda.get_device_capability() if device == "cuda" else None
        source = resolve_model(args.model, args.revision)
        generation_config = source.generation_config
        if args.generation_config not in ("auto", "vllm"):
            generation_config = _read_generation_config(Path(args.generation_config))
        tokenizer, model_max_len = None, _model_max_len(source.config)
        if args.skip_tokenizer_init:
            # The tokenizer would have said where an answer ends.
            generation_config = {"eos_token_id": source.config.eos_token_id, **generation_config}
        else:
            tokenizer = source.tokenizer() if args.tokenizer is None else resolve_tokenizer(
                args.tokenizer, args.tokenizer_revision)
            # transformers writes a huge number where a tokenizer has no limit.
            model_max_len = min(model_max_len, tokenizer.model_max_length or sys.maxsize)
        config = EngineConfig.resolve(args, model_max_len, device, capability)
        model_runner = ModelRunner(config, partial(load_model, config, source))
        return cls(config, model_runner, tokenizer, source.config.vocab_size, generation_config)

    # ------------------------------------------------------------------ requests

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, arrival_time: float | None = None,
                    lora_request: Any = None, tokenization_kwargs: dict[str, Any] | None = None, priority: int = 0
                    ) -> str:
        """Check a prompt and put it into the waiting queue.

        Args:
            request_id: yours; it comes back in the outputs.
            prompt: text, token ids, or a dict with either (see `inputs.py`).
            priority: lower goes first, with scheduling_policy="priority".

        Returns:
            The request id.

        Raises:
            TypeError: wrong types. VLLMValidationError: this model or engine cannot do it. Nothing was queued then.
        """
        self.check_alive()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}.")
        if request_id in self.reserved_ids:
            raise VLLMValidationError(f"request_id {request_id!r} belongs to a request that LLM has queued (it numbers "
                                      "them '0', '1', ...); take another one.", parameter="request_id",
                                      value=request_id)
        if lora_request is not None:
            raise VLLMValidationError(f"Got lora_request {lora_request} but LoRA is not enabled! This engine does not "
                                      "have it.", parameter="lora_request")
        text, requests = self.input_processor.make_requests(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority,
            tokenization_kwargs=tokenization_kwargs)
        with HeldInterrupts():
            self.output_processor.add_parent(ParentRequest(request_id, text, requests))
            for request in requests:
                self.scheduler.add_request(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step for everyone who can run, and return what became ready. With async scheduling the step after
        it has begun by then.

        Raises:
            EngineGenerateError: the model failed; the requests of this step are ended, the others can go on.
        """
        self.check_alive()
        if self._asleep or not self.scheduler.has_unfinished_requests():
            return []
        with self._guarded() as interrupts:
            if not self._in_flight:
                self._start_step(interrupts)
            if self._in_flight and self._may_run_ahead():
                self._start_step(interrupts)
            return self._finish_step(interrupts) if self._in_flight else []

    def _start_step(self, interrupts: HeldInterrupts) -> None:
        """Plan a step and have the model runner begin with it."""
        plan = self.scheduler.schedule()
        if plan.scheduled or not self._in_flight:
            self.last_plan = plan
        if not plan.scheduled:
            self.scheduler.discard_step(plan)
            self._check_progress(plan)
            return
        try:
            with interrupts.let_through():
                pending = self.model_runner.execute_model(plan)
        except BaseException as error:
            self._fail_steps([plan], error)
            return
        listeners = list(self.listeners)  # another thread may add one meanwhile; it hears of the next step
        self._in_flight.append(StepInFlight(plan, pending, listeners, self._block_tables() if listeners else {}))

    def _finish_step(self, interrupts: HeldInterrupts) -> list[RequestOutput]:
        """Wait for the oldest step in flight, and write into the books what it brought."""
        step = self._in_flight[0]
        try:
            with interrupts.let_through():
                result = step.pending.get_output()
        except BaseException as error:
            failed = [s.plan for s in self._in_flight]  # what came after it began with its tokens
            self._in_flight.clear()
            self._fail_steps(failed, error)
            return []
        self._in_flight.popleft()
        self._idle_steps = 0
        kept = self.scheduler.update_from_output(step.plan, result.sampled_token_ids)
        outputs, stopped = self.output_processor.process(step.plan, result, kept)
        self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        self._tell(step, kept)
        self._record(step.plan, self.output_processor.iteration_stats)
        return outputs

    def _may_run_ahead(self) -> bool:
        """Whether to start the next step before this one is finished: if its tokens are not here yet anyway, and nobody
        watches, who would see the queues one step too early."""
        return (len(self._in_flight) == 1 and isinstance(self._in_flight[0].pending, AsyncModelRunnerOutput)
                and not self.listeners)

    @contextmanager
    def _guarded(self) -> Iterator[HeldInterrupts]:
        """Around a step: interrupts wait while the books are written, and if the books themselves go wrong, which would
        be a fault of this engine, nothing in them can be trusted and it starts anew."""
        with HeldInterrupts() as interrupts:
            try:
                yield interrupts
            except EngineGenerateError:
                raise
            except Exception as error:
                ended = self._unfinished_ids()
                dropped = [*self.scheduler.dropped_req_ids, *self.scheduler.requests]
                self._start_empty()
                self.scheduler.dropped_req_ids = dropped  # the runner still knows them
                raise EngineGenerateError(f"The engine failed outside of the model: {type(error).__name__}: {error}. "
                                          f"All {len(ended)} requests were ended; it can take new ones.", ended
                                          ) from error

    def _fail_steps(self, plans: list[SchedulerOutput], error: BaseException) -> None:
        """End the requests of steps that failed, and with each the other completions of its prompt: without their
        sibling they could never be handed out. Raises, unless all of them were ended while the step was in flight."""
        states = self.output_processor.states
        parents = dict.fromkeys(states[i].parent for plan in plans for i in plan.scheduled if i in states)
        ended = [state for i, state in states.items() if state.parent in parents]
        for plan in reversed(plans):
            self.scheduler.discard_step(plan)
        self._end([state.request.request_id for state in ended], RequestStatus.FINISHED_ERROR)
        outputs = self.output_processor.last_outputs(ended)
        if not isinstance(error, Exception):
            raise error  # an interrupt from the keyboard stays one
        if not ended:
            logger.error("A step failed whose requests were all ended already.", exc_info=error)
            return
        raise EngineGenerateError(f"The model failed in a step, and its {len(ended)} request(s) are ended: "
                                  f"{type(error).__name__}: {error}", [p.request_id for p in parents], outputs
                                  ) from error

    def _check_progress(self, plan: SchedulerOutput) -> None:
        """Turn waiting for ever into an error that says who waits for what."""
        if self._in_flight:
            return  # whoever is left waits for what it brings
        self._idle_steps += 1
        if self._idle_steps < MAX_IDLE_STEPS:
            return
        self._idle_steps = 0
        stuck = str([*self.scheduler.running, *self.scheduler.waiting])  # as they are now, before they are aborted
        manager = self.scheduler.kv_cache_manager
        reasons = "; ".join(f"{i}: {why}" for i, why in plan.waiting_reasons.items())
        ended = self._unfinished_ids()
        self.abort_request(ended)
        raise EngineGenerateError(
            f"No request could make progress in {MAX_IDLE_STEPS} steps. Stuck: {stuck}. Pool: "
            f"{manager.block_pool.get_num_free_blocks()} of {self.num_gpu_blocks - 1} blocks free. {reasons}. "
            "The stuck requests were aborted.", ended)

    def _tell(self, step: StepInFlight, kept: dict[str, list[int]]) -> None:
        for listener in step.listeners:
            try:
                listener(self.scheduler, step.plan, step.tables, kept)
            except Exception:
                logger.exception("A listener failed; it will not be called again.")
                with suppress(ValueError):  # another thread was quicker
                    self.listeners.remove(listener)

    def _block_tables(self) -> dict[str, list[int]]:
        manager = self.scheduler.kv_cache_manager
        return {request_id: manager.get_block_ids(request_id) for request_id in manager.req_to_blocks}

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests by the ids they were added with, and free their blocks at once. Unknown ids are ignored.

        Returns:
            The last outputs of these requests: what was said so far, with the finish_reason "abort".
        """
        outputs: list[RequestOutput] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            internal_ids = self.output_processor.internal_ids(request_id)
            states = [self.output_processor.states[i] for i in internal_ids]
            self._end(internal_ids, RequestStatus.FINISHED_ABORTED)
            outputs += self.output_processor.last_outputs(states)
        return outputs

    def _end(self, internal_ids: list[str], status: RequestStatus) -> None:
        with HeldInterrupts():
            self.scheduler.finish_requests(internal_ids, status)
            self._record(None, self.output_processor.forget(internal_ids, status.finish_reason))

    def is_in_use(self, request_id: str) -> bool:
        """True while an unfinished request has this id."""
        return bool(self.output_processor.internal_ids(request_id))

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Prompts that are not finished; n completions of one prompt count once."""
        return self.output_processor.num_unfinished_prompts()

    def _unfinished_ids(self) -> list[str]:
        return list(dict.fromkeys(state.parent.request_id for state in self.output_processor.states.values()))

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model. Raises VLLMValidationError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise VLLMValidationError("Unable to get tokenizer because `skip_tokenizer_init=True`.",
                                      parameter="skip_tokenizer_init", value=True)
        return getattr(self.tokenizer, "full", self.tokenizer)

    # ------------------------------------------------------------------ what it tells

    def _record(self, plan: SchedulerOutput | None, stats: IterationStats) -> None:
        if self.stat_logger is not None:
            self.stat_logger.record(self.scheduler, plan, stats)

    def get_metrics(self) -> list[Metric]:
        """All metrics, see `metrics.py`. Raises AssertionError if the engine keeps none."""
        assert self.stat_logger is not None, "Stat logging disabled: build the engine with disable_log_stats=False."
        return self.stat_logger.get_metrics()

    def do_log_stats(self) -> None:
        """Write the line with the throughput since the last one to the log now."""
        if self.stat_logger is not None:
            self.stat_logger.log()

    def take_kv_events(self) -> list[KVCacheEvent]:
        """What entered and left the prefix cache since the last call; needs `kv_events_config`."""
        return self.scheduler.kv_cache_manager.block_pool.take_events()

    @property
    def vllm_config(self) -> SimpleNamespace:
        """The numbers the engine runs with, where vLLM keeps them."""
        c = self.config
        return SimpleNamespace(
            model_config=SimpleNamespace(model=c.args.model or DEFAULT_MODEL, dtype=getattr(torch, c.dtype),
                                         max_model_len=c.max_model_len),
            cache_config=SimpleNamespace(block_size=c.block_size, num_gpu_blocks=self.num_gpu_blocks,
                                         enable_prefix_caching=c.enable_prefix_caching),
            scheduler_config=SimpleNamespace(max_num_seqs=c.max_num_seqs, policy=c.args.scheduling_policy,
                                             max_num_batched_tokens=c.max_num_batched_tokens,
                                             enable_chunked_prefill=c.enable_chunked_prefill))

    # ------------------------------------------------------------------ memory

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks. False, with a warning, if requests hold some; `reset_running_requests` preempts
        them first."""
        self.check_alive()
        if reset_connector:
            raise VLLMValidationError("reset_connector: this engine has no KV connector; leave it False.",
                                      parameter="reset_connector", value=True)
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1, mode: str = "abort") -> list[RequestOutput]:
        """Stop computing and give memory back, until `wake_up`. Requests may still be added; they wait.

        Args:
            level: 0 keeps all memory; 1 drops the KV cache and moves the weights to the CPU's memory; 2 drops the
                weights too, and reads them from the file again later.
            mode: unfinished requests are ended ("abort"), finished first ("wait"), or frozen ("keep": they go on
                afterwards; what the cache held of them is computed again).

        Returns:
            What became ready while waiting, or the last outputs of those that were ended.
        """
        self.check_alive()
        check_sleep(level, mode)
        outputs: list[RequestOutput] = []
        while mode == "wait" and not self._asleep and self.has_unfinished_requests():
            outputs += self.step()
        if mode == "abort":
            outputs = self.abort_request(self._unfinished_ids())
        self._asleep.add("scheduling")
        if level > 0:
            self.release_kv_cache_memory()
            self.model_runner.release_weights(keep_copy=level == 1)
            self._asleep.add("weights")
        self._show_sleep()
        return outputs

    def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back, until `wake_up(["kv_cache"])`. Running requests are preempted: they keep
        their tokens, and nothing is computed meanwhile."""
        self.check_alive()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.model_runner.release_kv_cache()
        self._asleep.add("kv_cache")
        self._show_sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo `sleep`, wholly or by parts: "weights", "kv_cache", "scheduling". True if fully awake now."""
        self.check_alive()
        tags = SLEEP_TAGS if tags is None else tags
        if isinstance(tags, str) or (unknown := [tag for tag in tags if tag not in SLEEP_TAGS]):
            raise VLLMValidationError(f"wake_up: tags must be a list of {SLEEP_TAGS}, got "
                                      f"{tags if isinstance(tags, str) else unknown!r}.", parameter="tags", value=tags)
        for tag in self._asleep.intersection(tags):
            if tag == "weights":
                self.model_runner.restore_weights()
            elif tag == "kv_cache":
                self.model_runner.restore_kv_cache()
            self._asleep.discard(tag)
        self._show_sleep()
        return not self._asleep

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def _show_sleep(self) -> None:
        if self.stat_logger is not None:
            self.stat_logger.sleeping.set(bool(self._asleep))

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of each worker, by name, or a function with each worker as its first argument. There is one
        worker here, the model runner, in this process; so the list has one result, and no time can run out."""
        self.check_alive()
        if timeout is not None:
            raise VLLMValidationError("collective_rpc: timeout must be None: the call runs in this process, and "
                                      "nothing could end it early.", parameter="timeout", value=timeout)
        if callable(method):
            return [method(self.model_runner, *args, **(kwargs or {}))]
        if not hasattr(self.model_runner, method):
            raise VLLMValidationError(f"collective_rpc: the worker has no method {method!r}.", parameter="method",
                                      value=method)
        return [getattr(self.model_runner, method)(*args, **(kwargs or {}))]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` of each worker's model: one."""
        return self.collective_rpc(lambda worker: func(worker.model))

    def close(self) -> None:
        """End all requests and give the memory back. Closing twice does no harm."""
        runner, self.model_runner = self.model_runner, None
        self._in_flight.clear()
        if runner is not None:
            try:
                self.abort_request(self._unfinished_ids())
            finally:
                runner.close()

    def check_alive(self) -> None:
        """Raises EngineDeadError after `close`."""
        if self.model_runner is None:
            raise EngineDeadError("This engine was closed by close(); build a new one.")

    def __repr__(self) -> str:
        if self.model_runner is None:
            return "LLMEngine(closed)"
        s, pool, plan = self.scheduler, self.scheduler.kv_cache_manager.block_pool, self.last_plan
        head = (f"LLMEngine: {len(s.running)} running, {len(s.waiting)} waiting, {pool.get_num_free_blocks()} of "
                f"{pool.num_gpu_blocks - 1} blocks free")
        if plan is not None:
            budget = plan.budget_left + plan.total_num_scheduled_tokens
            head += f"; last step computed {plan.total_num_scheduled_tokens} of at most {budget} tokens"
        if self._asleep:
            head += f"; asleep: {', '.join(sorted(self._asleep))}"
        lines = [head]
        for request in s.running:
            lines.append(f"  {request!r}, blocks {s.kv_cache_manager.get_block_ids(request.request_id)}")
        for request in s.waiting:
            why = plan.waiting_reasons.get(request.request_id) if plan else None
            lines.append(f"  {request!r}" + (f": {why}" if why else ""))
        return "\n".join(lines)


def check_sleep(level: int, mode: str) -> None:
    """Raises VLLMValidationError unless `LLMEngine.sleep` knows both."""
    for name, value, choices in (("level", level, (0, 1, 2)), ("mode", mode, ("abort", "wait", "keep"))):
        if value not in choices:
            raise VLLMValidationError(f"sleep: {name} must be one of {choices}, got {value!r}.", parameter=name,
                                      value=value)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        raise VLLMValidationError(f"generation_config names a folder without a generation_config.json: {folder}. Use "
                                  "'auto' for the model's own file, or 'vllm' for neutral defaults.",
                                  parameter="generation_config", value=str(folder))
    return json.loads(path.read_text())


def _model_max_len(model: ModelConfig) -> int:
    """Longest sequence that the model allows, stretched RoPE included."""
    length = model.max_position_embeddings
    rope = model.rope_scaling or {}
    if rope.get("rope_type") == "linear":
        length = int(length * rope["factor"])
    elif rope.get("rope_type") == "yarn":
        length = int(rope["original_max_position_embeddings"] * rope["factor"])
    return length
