"""`LLMEngine`: the loop. Everything else in this package serves the few lines of `step()`.

    add_request -> [ waiting ] -> schedule -> execute -> update -> outputs
                                     ^                     |
                                     +---------------------+   until the request is finished

Owns: the order of things, and that nothing is lost when one of them fails. Does not own: any of the work itself.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tutorial_engine.block_manager import KVCacheManager
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from tutorial_engine.input_processor import InputProcessor
from tutorial_engine.model_runner import ModelRunner, load_model
from tutorial_engine.models.config import ModelConfig
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


class LLMEngine:
    """The synchronous engine: add requests, call `step()` until they are finished.

    Args:
        model_runner: executes steps. tokenizer: of the model.
        generation_config: the model's sampling recommendations.

    Use `LLMEngine.from_engine_args(EngineArgs(...))`, or `LLM`, which wraps it.
    """

    def __init__(self, config: EngineConfig, model_runner: Any, tokenizer: Any, vocab_size: int,
                 generation_config: dict[str, Any]) -> None:
        config = config.with_max_model_len(model_runner.max_model_len)
        self.config = config
        self.model_runner = model_runner
        self.tokenizer = tokenizer
        self.num_gpu_blocks: int = model_runner.num_gpu_blocks
        self.scheduler = Scheduler(config, KVCacheManager(
            self.num_gpu_blocks, config.block_size, config.max_model_len, config.enable_prefix_caching,
            config.args.watermark))
        self.input_processor = InputProcessor(config, tokenizer, vocab_size, generation_config)
        self.output_processor = OutputProcessor(tokenizer, log_stats=not config.args.disable_log_stats)
        # Called after each step with (scheduler, plan, tables, kept tokens); see `trace.Trace`.
        self.listeners: list[Callable] = []
        self._idle_steps = 0

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
        tokenizer = source.tokenizer() if args.tokenizer is None else resolve_tokenizer(
            args.tokenizer, args.tokenizer_revision)
        # transformers writes a huge number where a tokenizer has no limit.
        model_max_len = min(_model_max_len(source.config), tokenizer.model_max_length or sys.maxsize)
        config = EngineConfig.resolve(args, model_max_len, device, capability)
        generation_config = source.generation_config
        if args.generation_config not in ("auto", "vllm"):
            generation_config = _read_generation_config(Path(args.generation_config))
        model_runner = ModelRunner(config, load_model(config, source))
        return cls(config, model_runner, tokenizer, source.config.vocab_size, generation_config)

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
        self._check_alive()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}.")
        if lora_request is not None:
            raise VLLMValidationError(f"Got lora_request {lora_request} but LoRA is not enabled! This engine does not "
                                      "have it.", parameter="lora_request")
        text, requests = self.input_processor.make_requests(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority,
            tokenization_kwargs=tokenization_kwargs)
        self.output_processor.add_parent(ParentRequest(request_id, text, requests))
        for request in requests:
            self.scheduler.add_request(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step for everyone who can run, and return what became ready.

        Raises:
            EngineGenerateError: the model failed; the requests of this step are ended, the others can go on.
        """
        self._check_alive()
        if not self.scheduler.has_unfinished_requests():
            return []
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            self._check_progress(plan)
            return []
        self._idle_steps = 0
        try:
            result = self.model_runner.execute_model(plan)
        except BaseException as error:
            failed = self._fail_step(plan)
            if isinstance(error, Exception):
                raise EngineGenerateError(f"The model failed in a step of {len(plan.scheduled)} request(s), which are "
                                          f"ended: {type(error).__name__}: {error}", failed) from error
            raise  # an interrupt from the keyboard stays one
        tables = self._block_tables(plan) if self.listeners else {}
        kept = self.scheduler.update_from_output(plan, result.sampled_token_ids)
        outputs, stopped = self.output_processor.process(plan, result, kept)
        self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        for listener in self.listeners:
            listener(self.scheduler, plan, tables, kept)
        return outputs

    def _fail_step(self, plan: SchedulerOutput) -> list[str]:
        """End the requests of a step that failed, and with each the other completions of its prompt: without their
        sibling they could never be handed out. Returns the ids they were added with."""
        parents = dict.fromkeys(self.output_processor.states[i].parent for i in plan.scheduled)
        self.scheduler.discard_step(plan)
        internal_ids = [request.request_id for parent in parents for request in parent.requests]
        self.scheduler.finish_requests(internal_ids, RequestStatus.FINISHED_ERROR)
        self.output_processor.forget(internal_ids)
        return [parent.request_id for parent in parents]

    def _check_progress(self, plan: SchedulerOutput) -> None:
        """Turn waiting for ever into an error that says who waits for what."""
        self._idle_steps += 1
        if self._idle_steps < MAX_IDLE_STEPS:
            return
        self._idle_steps = 0
        stuck = str([*self.scheduler.running, *self.scheduler.waiting])  # as they are now, before they are aborted
        manager = self.scheduler.kv_cache_manager
        reasons = "; ".join(f"{i}: {why}" for i, why in plan.waiting_reasons.items())
        aborted = self.abort_request(state.parent.request_id for state in self.output_processor.states.values())
        raise EngineGenerateError(
            f"No request could make progress in {MAX_IDLE_STEPS} steps. Stuck: {stuck}. Pool: "
            f"{manager.block_pool.get_num_free_blocks()} of {self.num_gpu_blocks - 1} blocks free. {reasons}. "
            "The stuck requests were aborted.", dict.fromkeys(output.request_id for output in aborted))

    def _block_tables(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        manager = self.scheduler.kv_cache_manager
        return {request_id: manager.get_block_ids(request_id) for request_id in manager.req_to_blocks}

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests by the ids they were added with, and free their blocks at once. Unknown ids are ignored.

        Returns:
            The last outputs of these requests: what was said so far, with the finish_reason "abort".
        """
        outputs: list[RequestOutput] = []
        for request_id in list(request_ids):
            internal_ids = self.output_processor.internal_ids(request_id)
            self.scheduler.finish_requests(internal_ids, RequestStatus.FINISHED_ABORTED)
            outputs += self.output_processor.abort(internal_ids)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Prompts that are not finished; n completions of one prompt count once."""
        return self.output_processor.num_unfinished_prompts()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model."""
        return getattr(self.tokenizer, "full", self.tokenizer)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks. False, with a warning, if requests hold some; `reset_running_requests` preempts
        them first."""
        if reset_connector:
            raise VLLMValidationError("reset_connector: this engine has no KV connector; leave it False.",
                                      parameter="reset_connector", value=True)
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def close(self) -> None:
        """End all requests and give the memory back. Closing twice does no harm."""
        runner, self.model_runner = self.model_runner, None
        if runner is not None:
            try:
                self.abort_request(state.parent.request_id for state in self.output_processor.states.values())
            finally:
                runner.close()

    def _check_alive(self) -> None:
        if self.model_runner is None:
            raise EngineDeadError("This engine was closed; build a new one.")

    def __repr__(self) -> str:
        if self.model_runner is None:
            return "LLMEngine(closed)"
        s, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        lines = [f"LLMEngine: {len(s.running)} running, {len(s.waiting)} waiting, "
                 f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} blocks free"]
        for request in [*s.running, *s.waiting]:
            table = s.kv_cache_manager.get_block_ids(request.request_id)
            lines.append(f"  {request!r}, blocks {table}")
        return "\n".join(lines)


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
