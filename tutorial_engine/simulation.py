"""`simulate`: the real scheduler and the real block manager, with a model that takes no time to compute anything.

    jobs  = workload(20, rate=5.0)                               20 requests, five a second on average
    trace = simulate(jobs, num_blocks=33, max_num_seqs=4)        thousands of steps a second, on any machine
    batch_occupancy(trace)

Who runs, who waits and which blocks are taken depends on lengths alone, never on what the text says. So everything
about scheduling and memory can be tried out without weights, and an experiment with a thousand requests takes a second.
Time is simulated as well: a step takes as long as `step_seconds` says, so the same jobs give the same trace everywhere.

Owns: fake requests, the fake clock, static batching. Does not own: a single decision of continuous batching
(`scheduler.py`, `block_manager.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tutorial_engine.block_manager import KVCacheManager, cdiv
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.scheduler import Scheduler, SchedulerOutput
from tutorial_engine.trace import Trace

MAX_IDLE_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A request, as far as a scheduler cares.

    Attributes:
        prompt_tokens, output_tokens: how many.
        arrival: seconds after the beginning.
        prefix_tokens: the first tokens of the prompt that it has in common with all other jobs.
        priority: lower goes first, with scheduling_policy="priority".
    """

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    prefix_tokens: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"A job needs at least one prompt token and one output token, and a prefix that is no "
                             f"longer than the prompt; got {self}.")


def workload(num_requests: int, prompt_tokens: tuple[int, int] = (16, 64), output_tokens: tuple[int, int] = (8, 48),
             rate: float | None = None, prefix_tokens: int = 0, seed: int = 0) -> list[Job]:
    """Made-up jobs; the same for the same arguments, on every machine.

    Args:
        prompt_tokens, output_tokens: (least, most), evenly distributed.
        rate: arrivals per second, at random and independent of each other (a Poisson process); None: all at once.
        prefix_tokens: see `Job`; prompts that are shorter are wholly in common.
    """
    if rate is not None and rate <= 0:
        raise ValueError(f"rate must be arrivals per second, more than 0, or None for all at once; got {rate!r}.")
    numbers, now, jobs = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now += numbers.expovariate(rate) if rate else 0.0
        prompt = numbers.randint(*prompt_tokens)
        jobs.append(Job(prompt, numbers.randint(*output_tokens), round(now, 6), min(prefix_tokens, prompt)))
    return jobs


def step_seconds(num_tokens: int) -> float:
    """How long a step takes that computes so many tokens: the weights must be read in any case (20 ms), and from 40
    tokens on computing takes longer than that (0.5 ms each). About what a model of 135M parameters does on a laptop;
    the shape is the roofline's (Williams, Waterman and Patterson, CACM 2009)."""
    return max(0.020, 0.0005 * num_tokens)


def simulate(jobs: Iterable[Job], *, num_blocks: int = 65, block_size: int = 16, static: bool = False,
             seconds: Callable[[int], float] = step_seconds, **engine_args: Any) -> Trace:
    """Run jobs through the scheduler, until all are finished.

    Args:
        num_blocks: of the pool, block 0 (which nobody owns) included.
        static: batch as before Orca: whoever is in the batch stays until all are done, and nobody gets on meanwhile.
        seconds: number of tokens -> how long such a step takes.
        engine_args: more arguments of `LLM(...)`: max_num_seqs, max_num_batched_tokens, scheduling_policy,
            enable_prefix_caching, enable_chunked_prefill ...

    Returns:
        The `Trace`. Requests are named "0", "1", ... in the order of `jobs`; times are simulated seconds.

    Raises:
        ValueError: a job that does not fit into the pool even when it is alone, or an argument that `LLM` refuses.
    """
    jobs = list(jobs)
    longest = max((job.prompt_tokens + job.output_tokens for job in jobs), default=1)
    if cdiv(longest, block_size) > num_blocks - 1:
        raise ValueError(f"A job of {longest} tokens needs {cdiv(longest, block_size)} blocks of {block_size}, and the "
                         f"pool has {num_blocks - 1} (block 0 is nobody's): give it more, or shorter jobs.")
    args = EngineArgs(max_model_len=longest, block_size=block_size, **engine_args)
    config = EngineConfig.resolve(args, longest, "cpu", None)
    manager = KVCacheManager(num_blocks, block_size, longest, config.enable_prefix_caching, args.watermark)
    return _Simulation(config, (StaticScheduler if static else Scheduler)(config, manager), jobs, seconds).run()


class StaticScheduler(Scheduler):
    """Requests get on together, and off together: once the first of a batch writes, the door stays shut until the last
    has finished. This is what a loop over fixed batches does."""

    def _schedule_waiting(self, out: SchedulerOutput) -> None:
        if not any(request.num_output_tokens for request in self.running):
            super()._schedule_waiting(out)
        elif self.waiting:
            out.waiting_reasons[self.waiting.peek().request_id] = "static batching: the batch has left"


class _Simulation:
    def __init__(self, config: EngineConfig, scheduler: Scheduler, jobs: list[Job], seconds: Callable[[int], float]
                 ) -> None:
        self.config, self.scheduler, self.seconds = config, scheduler, seconds
        self.now = 0.0
        # The first to come is the last in the list; of those who come together, the first of the jobs.
        order = sorted(range(len(jobs)), key=lambda i: jobs[i].arrival)
        self.to_come = [self._request(i, jobs[i]) for i in reversed(order)]
        self.trace = Trace(clock=lambda: self.now)
        self.trace.num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.trace.block_size = config.block_size

    @staticmethod
    def _request(number: int, job: Job) -> Request:
        """Its tokens are unlike those of any other job, except for the prefix, so that only that can be shared."""
        own = (number + 1) * 10**6
        prompt = [*range(job.prefix_tokens), *range(own + job.prefix_tokens, own + job.prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
        return Request(str(number), prompt, params, arrival_time=job.arrival, priority=job.priority)

    def run(self) -> Trace:
        idle = 0
        while self.to_come or self.scheduler.has_unfinished_requests():
            if not self.scheduler.has_unfinished_requests():
                self.now = max(self.now, self.to_come[-1].arrival_time)
            while self.to_come and self.to_come[-1].arrival_time <= self.now:
                self.scheduler.add_request(self.to_come.pop())
            idle = 0 if self._step() else idle + 1
            if idle == MAX_IDLE_STEPS:
                raise RuntimeError(f"Nobody can go on: {self.scheduler}")
        return self.trace

    def _step(self) -> bool:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        plan.time = self.now
        manager = scheduler.kv_cache_manager
        tables = {request_id: manager.get_block_ids(request_id) for request_id in manager.req_to_blocks}
        self.now += self.seconds(plan.total_num_scheduled_tokens)
        said = {i: [_token(s.request)] for i, s in plan.scheduled.items() if s.samples}
        kept = scheduler.update_from_output(plan, said)
        if plan.scheduled:
            self.trace.record(scheduler, plan, tables, kept)
        return bool(plan.scheduled)


def _token(request: Request) -> int:
    """What the model "says": something that nobody else has."""
    return (int(request.request_id) + 1) * 10**6 + request.num_tokens
