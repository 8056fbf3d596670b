"""The KV oracle: a model whose keys and values are hashes, so that every cache slot can be checked exactly.

    token at position p of a request   ->   slot holds  hash(salt, token 0, token 1, ..., token p)

Real attention reads every slot from 0 to p when it computes position p. So does this model: before it "samples", it
walks each scheduled request's block table and compares every slot with the hash of exactly that prefix. A block that
was shared with the wrong request, freed too early, found before it was computed or not computed at all holds another
number. The next token is a function of the prefix hash and the request's seed, so the right output of a request is
known without any engine: `solo_run`.

`run_workload(seed)` builds a random engine (tiny pool, tiny budget) and a random crowd of requests (shared prefixes,
duplicates, salts, priorities, n > 1), disturbs it (aborts, failing models, cache resets) and checks each plan and each
state on the way. All checks raise AssertionError.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.core.support import FakeTokenizer, assert_clean, make_config
from tutorial_engine.block_manager import cdiv
from tutorial_engine.config import EngineConfig
from tutorial_engine.exceptions import EngineGenerateError
from tutorial_engine.input_batch import InputBatch
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.model_runner import AsyncModelRunnerOutput, ModelRunnerOutput
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams
from tutorial_engine.scheduler import ScheduledRequest, SchedulerOutput

NEVER_WRITTEN = -1
EOS = 0


def extend_hashes(hashes: list[int], token_ids: list[int]) -> list[int]:
    """Append hash(prefix up to and including token p) for each p that `hashes` lacks; hashes[0] stands for the salt."""
    for token_id in token_ids[len(hashes) - 1:]:
        hashes.append(hash((hashes[-1], token_id)))
    return hashes


def salt_hash(cache_salt: str | None) -> int:
    return zlib.crc32((cache_salt or "").encode())


def next_token(prefix_hash: int, seed: int, vocab_size: int) -> int:
    return (hash((prefix_hash, seed)) >> 9) % vocab_size


def solo_run(prompt: list[int], params: SamplingParams, seed: int, salt: str | None, *, vocab_size: int,
             max_model_len: int, eos_token_id: int | None) -> tuple[list[int], str]:
    """(output ids, finish reason) of a request that has the machine for itself."""
    hashes = extend_hashes([salt_hash(salt)], prompt)
    output: list[int] = []
    while True:
        output.append(next_token(hashes[-1], seed, vocab_size))
        hashes.append(hash((hashes[-1], output[-1])))
        if len(output) >= params.min_tokens:
            if output[-1] in params.stop_token_ids or (output[-1] == eos_token_id and not params.ignore_eos):
                return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"


class LateOutput(AsyncModelRunnerOutput):
    """Tokens that come, or an error that comes, only when somebody waits for them."""

    error: BaseException | None = None

    def get_output(self) -> ModelRunnerOutput:
        if self.error is not None:
            raise self.error
        return super().get_output()


class OracleRunner:
    """Stands in for `ModelRunner`.

    Attributes:
        fail: raised instead of a result, once; "when" says whether before, in the middle of, or after the writes, or
            when the result is waited for.
        newest: request id -> the last token sampled for it, and its position: with async scheduling the engine may not
            know it yet.
        stats: what happened, to prove that the workloads exercise what they are meant to.
    """

    def __init__(self, config: EngineConfig, num_gpu_blocks: int, vocab_size: int, stats: Counter) -> None:
        self.config, self.vocab_size, self.stats = config, vocab_size, stats
        self.num_gpu_blocks, self.max_model_len = num_gpu_blocks, config.max_model_len
        self.input_batch = InputBatch(config.max_num_seqs, cdiv(config.max_model_len, config.block_size),
                                      torch.device("cpu"))
        self.slots = [[NEVER_WRITTEN] * config.block_size for _ in range(num_gpu_blocks)]
        self.hashes: dict[str, list[int]] = {}
        self.newest: dict[str, tuple[int, int]] = {}
        self.fail: tuple[str, BaseException] | None = None
        self.late_error: BaseException | None = None  # the last one that a result in flight will raise
        self.check_plan: Any = lambda plan: None

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        self.check_plan(plan)
        (when, error), self.fail = self.fail or ("never", None), None
        if when == "before":
            raise error
        rows = self.input_batch.update(plan)
        steps = [(s, self.input_batch.block_table[row].tolist()) for row, s in zip(rows, plan.scheduled.values())]
        written: set[tuple[int, int]] = set()
        for i, (s, table) in enumerate(steps):
            if when == "middle" and i == len(steps) // 2:
                raise error
            self._write(s, table, written, garbage=when == "middle")
        if when == "after":
            raise error
        # All writes of a layer come before its reads, so a request may read what another one computes in this step.
        for s, table in steps:
            self._read(s, table)
        sampled = {s.request.request_id: self._sample(s) for s, _ in steps if s.samples}
        if self.config.async_scheduling:
            output = LateOutput(ModelRunnerOutput(), list(sampled), torch.tensor(list(sampled.values())))
            if when == "late":
                output.error = self.late_error = error
            return output
        if when == "late":
            raise error
        return ModelRunnerOutput({i: [t] for i, t in sampled.items()})

    def _prefix_hashes(self, s: ScheduledRequest) -> list[int]:
        request, end = s.request, s.start + s.num_tokens
        hashes = self.hashes.setdefault(request.request_id, [salt_hash(request.cache_salt)])
        token_ids = request.all_token_ids
        if end > len(token_ids):  # it was sampled in the step before, and is not in the engine's books yet
            position, token_id = self.newest[request.request_id]
            assert position == end - 1 == len(token_ids), f"{request} computes a token that nobody has sampled"
            token_ids = [*token_ids, token_id]
            self.stats["tokens in flight"] += 1
        return extend_hashes(hashes, token_ids)

    def _write(self, s: ScheduledRequest, table: list[int], written: set[tuple[int, int]], garbage: bool) -> None:
        hashes = self._prefix_hashes(s)
        for p in range(s.start, s.start + s.num_tokens):
            block, offset = table[p // self.config.block_size], p % self.config.block_size
            assert block != 0, f"{s.request} writes position {p} into the null block"
            assert (block, offset) not in written, f"two requests of a step write slot {(block, offset)}"
            written.add((block, offset))
            self.slots[block][offset] = NEVER_WRITTEN if garbage else hashes[p + 1]

    def _read(self, s: ScheduledRequest, table: list[int]) -> None:
        size, end = self.config.block_size, s.start + s.num_tokens
        right = self._prefix_hashes(s)[1:]
        for i in range(cdiv(end, size)):
            num = min(size, end - i * size)
            assert self.slots[table[i]][:num] == right[i * size:i * size + num], (
                f"wrong KV: {s.request} at tokens {s.start} to {end} reads block {table[i]} as its logical block {i}")

    def _sample(self, s: ScheduledRequest) -> int:
        end = s.start + s.num_tokens
        token_id = next_token(self._prefix_hashes(s)[end], s.request.seed, self.vocab_size)
        self.newest[s.request.request_id] = end, token_id
        return token_id

    def close(self) -> None:
        self.slots = []


@dataclass
class Expected:
    """A prompt in flight: what it must answer, and what it has answered so far."""

    prompt: list[int]
    params: SamplingParams
    right: list[tuple[list[int], str]]  # (ids, finish reason) of each child
    so_far: list[list[int]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


class Workload:
    """One random engine and its crowd.

    Args:
        seed: decides everything.
        invariants: also call `check_invariants` after each step.
        stats: counts what happens.
    """

    def __init__(self, seed: int, invariants: bool = True, stats: Counter | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.invariants = invariants
        self.stats = Counter() if stats is None else stats
        self.crowded = rng.random() < 0.4  # many at once, in the smallest pool
        self.later_is_urgent = rng.random() < 0.5
        self.block_size = rng.randint(1, 5)
        self.max_model_len = rng.randint(4, 36)
        self.vocab_size = max(3, rng.randint(2, 6))  # EOS, a stop token, and one that min_tokens leaves to choose
        self.eos_token_id = rng.choice([EOS, None])
        fewest = cdiv(self.max_model_len, self.block_size)  # the pool must hold one longest request
        num_gpu_blocks = 1 + fewest + (0 if self.crowded else rng.choice([0, 1, rng.randint(0, 2 * fewest)]))
        self.stats["smallest pools"] += num_gpu_blocks == 1 + fewest
        self.config = config = make_config(self.max_model_len, block_size=self.block_size, **self._random_args())
        self.runner = OracleRunner(config, num_gpu_blocks, self.vocab_size, self.stats)
        self.runner.check_plan = self.check_plan
        self.engine = LLMEngine(config, self.runner, FakeTokenizer(self.eos_token_id), self.vocab_size, {})
        self.scheduler = self.engine.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.stems = [self._random_tokens(self.max_model_len) for _ in range(rng.randint(1, 3))]
        self.in_flight: dict[str, Expected] = {}
        self.history: list[list[int]] = []  # prompts and finished conversations, to be sent again
        self.num_added = 0
        self.first_hit: dict[str, int] = {}
        self.lookups = Counter()
        self.running_before: list[Request] = []

    def _random_args(self) -> dict[str, Any]:
        rng, args = self.rng, {}
        args["max_num_seqs"] = seats = rng.randint(4 if self.crowded else 1, 6)
        args["enable_chunked_prefill"] = chunked = rng.random() < 0.75
        least = seats if chunked else max(seats, self.max_model_len)
        args["max_num_batched_tokens"] = least + rng.choice([0, rng.randint(0, 12), rng.randint(0, 40)])
        args["long_prefill_token_threshold"] = rng.choice([0, 0, rng.randint(1, min(6, self.max_model_len))])
        args["scheduling_policy"] = rng.choice(["fcfs", "priority"])
        args["enable_prefix_caching"] = rng.random() < 0.9
        args["watermark"] = rng.choice([0.0, 0.0, 0.1, 0.4])
        args["scheduler_reserve_full_isl"] = rng.random() < 0.5
        args["async_scheduling"] = rng.random() < 0.5
        return args

    def _random_tokens(self, num: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(num)]

    # The crowd

    def add_request(self) -> None:
        rng = self.rng
        if self.history and rng.random() < 0.4:
            prompt = rng.choice(self.history) + self._random_tokens(rng.choice([0, 0, 1, 3]))
        else:
            stem = rng.choice(self.stems)[:rng.randint(0, self.max_model_len)]
            prompt = stem + self._random_tokens(rng.randint(1, 4))
        # Most stay short, some fill the context to the last token.
        prompt = prompt[:self.max_model_len - 1 if rng.random() < 0.2 else rng.randint(1, self.max_model_len - 1)]
        salt = rng.choice([None, None, "a", "b"])
        max_tokens = rng.choice([1, rng.randint(1, 8), rng.randint(1, 40), None])
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]), seed=rng.choice([0, 0, 1]), max_tokens=max_tokens,
            min_tokens=0 if max_tokens is None else rng.choice([0, rng.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.5, stop_token_ids=rng.choice([[], [], [1]]), detokenize=False,
            output_kind=rng.choice(list(RequestOutputKind)), skip_reading_prefix_cache=rng.random() < 0.05 or None)
        request_id = str(self.num_added)
        self.num_added += 1
        self.stats["salts"] += salt is not None
        self.stats["duplicates"] += any(e.prompt == prompt for e in self.in_flight.values())
        right = [solo_run(prompt, params, params.seed + i, salt, vocab_size=self.vocab_size,
                          max_model_len=self.max_model_len, eos_token_id=self.eos_token_id) for i in range(params.n)]
        self.in_flight[request_id] = Expected(prompt, params, right, [[] for _ in right])
        self.history.append(prompt)
        priority = 0
        if self.scheduler.policy == "priority":
            priority = -self.num_added if self.later_is_urgent else rng.randint(-1, 2)
        self.stats["priorities"] += priority != 0
        self.engine.add_request(request_id, {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}),
                                params, priority=priority, arrival_time=float(self.num_added))

    def disturb(self) -> None:
        """Now and then: an abort, a cache reset, or a model that will fail in the next step."""
        dice = self.rng.random()
        if dice < 0.03 and self.in_flight:
            request_id = self.rng.choice(list(self.in_flight))
            self.engine.abort_request([request_id, "unknown"])
            del self.in_flight[request_id]
            self.stats["aborts"] += 1
        elif dice < 0.05:
            preempt = self.rng.random() < 0.5
            free = not self.scheduler.running
            assert self.engine.reset_prefix_cache(reset_running_requests=preempt) == (preempt or free)
            if preempt or free:
                self.lookups.clear()
                self.stats["resets"] += 1
        elif dice < 0.06:
            error = self.rng.choice([RuntimeError("planned"), KeyboardInterrupt()])
            self.runner.fail = self.rng.choice(["before", "middle", "after", "late"]), error

    # The run

    def run(self) -> None:
        num_requests = self.rng.randint(1, 9) + 4 * self.crowded
        num_steps, rush = 0, 0.8 if self.crowded else 0.4
        while self.num_added < num_requests or self.engine.has_unfinished_requests():
            while self.num_added < num_requests and (self.rng.random() < rush or not self.in_flight):
                self.add_request()
            self.disturb()
            self.step()
            num_steps += 1
            # Every step computes a token of somebody, and no request is thrown back as often as it has tokens.
            assert num_steps < 20 * (1 + num_requests) * self.max_model_len, f"starvation: {self.engine!r}"
        self.stats["steps"] += num_steps
        self.check_end()

    def step(self) -> None:
        self.running_before = list(self.scheduler.running)
        busy, planned = self.engine.has_unfinished_requests(), self.runner.fail
        try:
            outputs = self.engine.step()
        except (EngineGenerateError, KeyboardInterrupt) as error:
            expected = (planned[1] if planned else None, self.runner.late_error)
            if not any(e is not None and e in (error, error.__cause__) for e in expected):
                raise error.__cause__ or error from None  # found by the runner's checks, or by the engine's own
            self.stats["failures"] += 1
            alive = {state.parent.request_id for state in self.engine.output_processor.states.values()}
            self.in_flight = {i: e for i, e in self.in_flight.items() if i in alive}
            outputs = []
        else:
            assert self.config.async_scheduling or not (busy and planned), "a step without any request in it"
        self.runner.fail = None
        self.check_state()
        for output in outputs:
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        """Compare what a request says with its solo run."""
        expected = self.in_flight[output.request_id]
        assert output.prompt_token_ids == expected.prompt
        kind = expected.params.output_kind
        for completion in output.outputs:
            said, (right, reason) = expected.so_far[completion.index], expected.right[completion.index]
            now = said + completion.token_ids if kind == RequestOutputKind.DELTA else completion.token_ids
            assert now == right[:len(now)], f"wrong tokens: {now} instead of {right}"
            assert len(now) > len(said) and completion.index not in expected.reasons
            expected.so_far[completion.index] = now
            if completion.finish_reason is not None:
                assert now == right and completion.finish_reason == reason, (completion, right, reason)
                expected.reasons[completion.index] = reason
        assert output.finished == (len(expected.reasons) == len(expected.right))
        if output.finished:
            del self.in_flight[output.request_id]
            self.history.append(expected.prompt + expected.right[0][0])
            self.stats["finished"] += 1

    # What must hold

    def check_plan(self, plan: SchedulerOutput) -> None:
        """The rules of scheduling, checked on the plan before the model runs."""
        config, args, scheduled = self.config, self.config.args, list(plan.scheduled.values())
        budget = config.max_num_batched_tokens
        assert 0 <= plan.budget_left == budget - plan.total_num_scheduled_tokens, f"budget of {budget} tokens: {plan}"
        assert len(self.scheduler.running) <= config.max_num_seqs, "more running than seats"
        for s in scheduled:
            assert s.num_tokens >= 1, f"nothing left to compute: {s}"
            in_flight = s.request.num_output_placeholders - s.samples
            assert 0 <= in_flight <= self.config.async_scheduling, f"{in_flight} steps are in flight: {s}"
            assert s.start + s.num_tokens <= s.request.num_tokens + in_flight, f"more tokens than there are: {s}"
            if args.long_prefill_token_threshold and len(self.scheduler.requests) > 1:
                assert s.num_tokens <= args.long_prefill_token_threshold, f"over the threshold: {s}"
            elif not config.enable_chunked_prefill:
                assert s.samples, f"a split prompt although enable_chunked_prefill is off: {s}"
        self._check_order(plan, scheduled)
        for s in scheduled:
            if s.is_first:
                self._check_lookup(plan, s)
        self.running_before = list(self.scheduler.running)
        self.stats["chunks"] += sum(not s.samples for s in scheduled)
        self.stats["preemptions"] += len(plan.preempted)

    def _check_order(self, plan: SchedulerOutput, scheduled: list[ScheduledRequest]) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        new = [s.is_first for s in scheduled]
        assert new == sorted(new), "a newcomer before a running one"
        if plan.budget_left:
            done = [r for r in running if r.request_id not in plan.scheduled
                    and r.is_full(self.max_model_len, r.num_output_placeholders)]
            # While someone ends in flight, others may wait for his blocks.
            ready = [r for r in running if r not in done]
            assert done or [s.request for s in scheduled] == ready, "budget is left, but a running request got nothing"
        if waiting:
            assert waiting[0].request_id in plan.waiting_reasons, "the first in line waits for no reason"
        by_arrival = [r.arrival_time for r in [*running, *waiting]]
        if self.scheduler.policy == "fcfs":
            assert by_arrival == sorted(by_arrival), "first come, not first served"
            victims = self.running_before[len(self.running_before) - len(plan.preempted):]
        else:
            assert waiting == sorted(waiting, key=lambda r: r.sort_key), "the queue is not in order of priority"
            victims = sorted(self.running_before, key=lambda r: r.sort_key)[-len(plan.preempted):]
        if plan.preempted:
            assert plan.preempted == victims[::-1], "the wrong request was preempted"
            assert not any(new), "someone was admitted although someone was preempted"

    def _check_lookup(self, plan: SchedulerOutput, s: ScheduledRequest) -> None:
        """The hit that is reported is the first one; requests that were preempted are not in the statistics."""
        request = s.request
        first_hit = self.first_hit.setdefault(request.request_id, s.start)
        assert request.num_cached_tokens == first_hit, f"num_cached_tokens is not {first_hit} any more"
        if request.num_preemptions == 0 and not request.sampling_params.skip_reading_prefix_cache:
            self.lookups["queries"] += request.num_tokens
            self.lookups["hits"] += s.start
        self.stats["hits"] += s.start > 0
        hit = s.new_block_ids[:s.start // self.block_size]
        self.stats["hits in the same step"] += any(block.block_id in hit for block in plan.newly_cached)

    def check_state(self) -> None:
        if self.invariants:
            self.manager.check_invariants()
        running = self.scheduler.running
        assert self.manager.req_to_blocks.keys() == {r.request_id for r in running}, "only running requests hold blocks"
        for request in running:
            num_blocks = len(self.manager.req_to_blocks[request.request_id])
            assert num_blocks == cdiv(request.num_computed_tokens, self.block_size), f"{num_blocks} blocks: {request}"
        if self.config.enable_prefix_caching:
            stats, lookups = self.manager.prefix_cache_stats, self.lookups
            assert (stats.queries, stats.hits) == (lookups["queries"], lookups["hits"]), f"lookups: {stats}, {lookups}"

    def check_end(self) -> None:
        assert not self.in_flight, f"never answered: {list(self.in_flight)}"
        assert_clean(self.engine)
        leaked = self.runner.input_batch._row.keys() - set(self.scheduler.dropped_req_ids)
        assert not leaked, f"rows of the runner's block table that nobody will ever free: {leaked}"
        assert self.engine.reset_prefix_cache() and not self.manager.block_pool.cached_block_hash_to_block


def run_workload(seed: int, invariants: bool = True, stats: Counter | None = None) -> None:
    """Run one random workload; raises AssertionError if anything is wrong on the way."""
    Workload(seed, invariants, stats).run()
