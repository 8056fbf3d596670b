"""What the core's tests share: configs, requests and an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorial_engine.block_manager import KVCacheManager
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.model_runner import ModelRunnerOutput
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.scheduler import Scheduler, SchedulerOutput


class FakeTokenizer:
    """Ids are their own text: 7 is "<7>". Enough for an engine that is fed with token ids."""

    bos_token_id = None
    chat_template = None

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{i}>" for i in ids)


class FakeRunner:
    """A model that answers with `next_token(request)`; `before` is called with each plan and may raise."""

    def __init__(self, num_gpu_blocks: int, max_model_len: int, next_token: Callable[[Request], int] | None = None,
                 before: Callable[[SchedulerOutput], None] | None = None) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.max_model_len = max_model_len
        self.next_token = next_token or (lambda request: 100 + request.num_tokens)
        self.before = before or (lambda plan: None)
        self.plans: list[SchedulerOutput] = []
        self.closed = 0

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        self.before(plan)
        return ModelRunnerOutput({i: [self.next_token(s.request)] for i, s in plan.scheduled.items() if s.samples})

    def close(self) -> None:
        self.closed += 1


def make_config(max_model_len: int = 64, **args: Any) -> EngineConfig:
    """A config for the CPU. Small blocks (4 tokens) unless said, so that a few tokens fill several."""
    args = {"block_size": 4, "max_num_seqs": 8, **args}
    return EngineConfig.resolve(EngineArgs(max_model_len=max_model_len, **args), max_model_len, "cpu", None)


def make_engine(num_gpu_blocks: int = 65, max_model_len: int = 64, *, eos_token_id: int | None = None,
                next_token: Callable[[Request], int] | None = None,
                before: Callable[[SchedulerOutput], None] | None = None, **args: Any) -> LLMEngine:
    runner = FakeRunner(num_gpu_blocks, max_model_len, next_token, before)
    return LLMEngine(make_config(max_model_len, **args), runner, FakeTokenizer(eos_token_id), 1000, {})


def make_params(max_tokens: int = 16, **kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **kwargs})


def make_request(request_id: str, prompt: list[int] | int, max_tokens: int = 16, **kwargs: Any) -> Request:
    """A request outside of any engine. A number as prompt: that many tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [hash((sum(map(ord, request_id)), i)) % 100_000 for i in range(prompt)]
    params = kwargs.pop("params", None) or make_params(max_tokens)
    return Request(request_id, prompt, params, **{"arrival_time": 0.0, **kwargs})


class Steps:
    """A scheduler driven by hand: `step()` plans, pretends that the model ran, and returns the plan.

    Args:
        num_gpu_blocks: of the pool, the null block included.
        args: of the config; block_size is 4 unless said.

    Attributes:
        sampled: ids of the requests that got a token in the last step.
    """

    def __init__(self, num_gpu_blocks: int = 65, **args: Any) -> None:
        self.config = make_config(**args)
        self.manager = KVCacheManager(num_gpu_blocks, self.config.block_size, self.config.max_model_len,
                                      self.config.enable_prefix_caching, self.config.args.watermark)
        self.scheduler = Scheduler(self.config, self.manager)
        self.sampled: list[str] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def step(self, token_id: int = 7) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self.manager.check_invariants()
        self.sampled = [i for i, s in plan.scheduled.items() if s.samples]
        self.scheduler.update_from_output(plan, {i: [token_id] for i in self.sampled})
        self.manager.check_invariants()
        return plan

    @property
    def running(self) -> list[str]:
        return [r.request_id for r in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [r.request_id for r in self.scheduler.waiting]


def assert_clean(engine: LLMEngine) -> None:
    """Nothing of any request is left: not in the queues, not in the pool, not in the outputs."""
    manager = engine.scheduler.kv_cache_manager
    manager.check_invariants()
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    assert not engine.scheduler.running and not len(engine.scheduler.waiting) and not engine.output_processor.states
    assert not manager.req_to_blocks and not manager.num_cached_blocks and not manager.newly_cached
    assert manager.usage == 0.0
