"""The scheduler: who computes how many tokens in the next step. Plain Python, no tensor in sight.

    waiting  [ D  E ]          one token budget per step, for prompts and single decode tokens alike
    running  [ A  B  C ]
                               step budget 8:   A 1   B 1   C 1   D 5 (of 9: the rest next step, "chunked prefill")

1. RUNNING requests first, in order: each wants all tokens that it has not computed yet (one, if it is decoding). If the
   pool has no block for it, the last one running is preempted: its blocks are freed, and it will be recomputed later.
2. Then, only if nobody was preempted, WAITING requests in order, while budget, seats and blocks last. The first that
   does not fit ends the scan, so nobody overtakes for ever ("head-of-line blocking").

The algorithm is vLLM V1's (`v1/core/sched/scheduler.py`); chunked prefill is from Sarathi-Serve (Agrawal et al., OSDI
2024), iteration-level scheduling from Orca (Yu et al., OSDI 2022).
Owns: the two queues, the budget, preemption, finishing. Does not own: blocks (`block_manager.py`), the model.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tutorial_engine.block_manager import KVCacheBlock, KVCacheManager
from tutorial_engine.config import EngineConfig
from tutorial_engine.request import Request, RequestStatus


@dataclass
class ScheduledRequest:
    """One request's share of a step: compute tokens [start, start + num_tokens).

    `new_block_ids` are appended to its block table, or are the whole table if `is_first` (admitted or resumed now).
    `samples`: the chunk reaches the last known token, so that its logits choose a new one.
    """

    request: Request
    start: int
    num_tokens: int
    new_block_ids: list[int]
    is_first: bool
    samples: bool


@dataclass
class SchedulerOutput:
    """One step's plan, in batch order. `waiting_reasons` says why each request at the head of the queue still waits."""

    budget_left: int
    time: float = field(default_factory=time.monotonic)  # when it was made
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    dropped_req_ids: list[str] = field(default_factory=list)  # finished or preempted since the plan before
    newly_cached: list[KVCacheBlock] = field(default_factory=list)  # may be found from now on, filled in this step
    waiting_reasons: dict[str, str] = field(default_factory=dict)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {request_id: s.num_tokens for request_id, s in self.scheduled.items()}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled.values())


class RequestQueue:
    """Waiting requests: first come first served, or ordered by (priority, arrival time, id)."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        if self._by_priority:
            bisect.insort(self._requests, request, key=lambda r: r.sort_key)
        else:
            self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Return a preempted request: to the front, or to its place by priority."""
        if self._by_priority:
            self.add(request)
        else:
            self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def popleft(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class Scheduler:
    """Decides each step; see the module's picture.

    Args:
        config: budget, seats, policy.
        kv_cache_manager: the block tables.
    """

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.policy = config.args.scheduling_policy
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(self.policy)
        self.running: list[Request] = []
        self._num_preemptions = 0
        # Finished or preempted, for the runner to forget: the next plan says so.
        self.dropped_req_ids: list[str] = []

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Plan one step and count its tokens as computed.

        The step before may still be running ("in flight"): then the tokens that it samples are counted on, though
        nobody knows yet which they are.
        """
        out = SchedulerOutput(budget_left=self.config.max_num_batched_tokens)
        blocks_come_back = self._schedule_running(out)
        # Only now is it certain that these are computed in this step: their blocks may be found from here on.
        for s in out.scheduled.values():
            self.kv_cache_manager.cache_blocks(s.request, s.start + s.num_tokens)
        if out.preempted:
            out.waiting_reasons.update((r.request_id, "preempted in this step") for r in out.preempted)
            out.waiting_reasons.setdefault(self.waiting.peek().request_id, "nobody is admitted in a step that preempts")
        elif blocks_come_back:
            if self.waiting:
                out.waiting_reasons[self.waiting.peek().request_id] = "blocks come back with the step in flight"
        else:
            self._schedule_waiting(out)
        for s in out.scheduled.values():
            s.request.num_computed_tokens += s.num_tokens
            s.request.num_output_placeholders += s.samples
        out.newly_cached = self.kv_cache_manager.take_newly_cached()
        out.dropped_req_ids, self.dropped_req_ids = self.dropped_req_ids, []
        return out

    def _schedule_running(self, out: SchedulerOutput) -> bool:
        """True if someone waits for blocks that the step in flight is about to give back: better that than to take
        another's away."""
        i = 0
        while i < len(self.running) and out.budget_left > 0:
            request = self.running[i]
            if self._ends_in_flight(request):
                i += 1  # nothing is left to compute for it
                continue
            num_wanted = (len(request.all_token_ids) + request.num_output_placeholders
                          - request.num_computed_tokens)
            num_new = min(self._cap(num_wanted), out.budget_left)
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            while new_blocks is None:
                if any(map(self._ends_in_flight, self.running)):
                    return True
                victim = self._pick_victim()
                i -= self.running.index(victim) < i
                self._preempt(victim, out)
                if victim is request:
                    break
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            else:
                self._add(out, request, num_new, new_blocks, is_first=False, samples=num_new == num_wanted)
                i += 1
        return False

    def _ends_in_flight(self, request: Request) -> bool:
        """The step in flight samples the last token that it may have."""
        in_flight = request.num_output_placeholders
        return in_flight > 0 and request.is_full(self.config.max_model_len, in_flight)

    def _schedule_waiting(self, out: SchedulerOutput) -> None:
        kv = self.kv_cache_manager
        while self.waiting:
            request = self.waiting.peek()
            if len(self.running) >= self.config.max_num_seqs:
                out.waiting_reasons[request.request_id] = f"all {self.config.max_num_seqs} seats (max_num_seqs) taken"
                return
            if request.num_output_placeholders:
                out.waiting_reasons[request.request_id] = "preempted while its last token was in flight"
                return
            hit_blocks, num_hits = kv.get_computed_blocks(request)
            num_wanted = request.num_tokens - num_hits
            num_new = self._cap(num_wanted)
            if out.budget_left == 0 or (num_new > out.budget_left and not self.config.enable_chunked_prefill):
                out.waiting_reasons[request.request_id] = "the token budget of this step is spent"
                return
            num_new = min(num_new, out.budget_left)
            new_blocks = kv.allocate_slots(
                request, num_new, hit_blocks, full_sequence_must_fit=self.config.args.scheduler_reserve_full_isl,
                others_running=bool(self.running))
            if new_blocks is None:
                out.waiting_reasons[request.request_id] = "not enough free blocks"
                return
            self.waiting.popleft()
            kv.record_lookup(request, num_hits)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_hits
            request.num_computed_tokens = num_hits
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self._add(out, request, num_new, [*hit_blocks, *new_blocks], is_first=True, samples=num_new == num_wanted)
            # Nobody is preempted any more in this step, so the next waiting request may already share these blocks:
            # in every layer all K and V are written before attention reads them.
            kv.cache_blocks(request, num_hits + num_new)

    def _cap(self, num_new: int) -> int:
        """At most the per-request threshold, if others are there to profit from it."""
        threshold = self.config.args.long_prefill_token_threshold
        return min(num_new, threshold) if threshold and len(self.requests) > 1 else num_new

    def _add(self, out: SchedulerOutput, request: Request, num_tokens: int, blocks: Sequence, is_first: bool,
             samples: bool) -> None:
        out.scheduled[request.request_id] = ScheduledRequest(
            request, request.num_computed_tokens, num_tokens, [b.block_id for b in blocks], is_first, samples)
        out.budget_left -= num_tokens

    def _pick_victim(self) -> Request:
        """Least important running request: the last admitted, or the one that priority puts last."""
        return self.running[-1] if self.policy == "fcfs" else max(self.running, key=lambda r: r.sort_key)

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        """Take all blocks away. Its tokens are kept; their K and V are computed again when it resumes."""
        if withdrawn := out.scheduled.pop(request.request_id, None):
            out.budget_left += withdrawn.num_tokens
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.dropped_req_ids.append(request.request_id)
        self.waiting.put_back(request)
        out.preempted.append(request)

    def take_num_preemptions(self) -> int:
        """Preemptions since the last call, those of plans that were never carried out included."""
        taken, self._num_preemptions = self._num_preemptions, 0
        return taken

    def update_from_output(self, out: SchedulerOutput, sampled_token_ids: dict[str, list[int]]) -> dict[str, list[int]]:
        """Append what was sampled, and finish those that are done.

        Args:
            sampled_token_ids: per request id, the new tokens of this step.

        Returns:
            Per request id, the tokens that were kept (those after a stop are not, nor what a grammar refuses: it
            ends the request as an error).
        """
        kept: dict[str, list[int]] = {}
        for request_id, token_ids in sampled_token_ids.items():
            request = out.scheduled[request_id].request
            if request.status.is_finished:  # while the step was in flight
                continue
            request.num_output_placeholders -= 1
            new = kept[request_id] = []
            for token_id in token_ids:
                if request.grammar is not None and not request.grammar.accept_token(token_id):
                    request.status = RequestStatus.FINISHED_ERROR
                    self._remove(request)
                    break
                new.append(token_id)
                is_finished = request.append_output_token(token_id, self.config.max_model_len)
                self._cache_filled_block(request)
                if is_finished:
                    self._remove(request)
                    break
        return kept

    def _cache_filled_block(self, request: Request) -> None:
        """A block that ends with a token which was in flight when its step was planned could not be named then."""
        kv = self.kv_cache_manager
        if request.request_id in kv.req_to_blocks:  # else it was preempted meanwhile
            kv.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            kv.take_newly_cached()  # the model has filled it already

    def discard_step(self, out: SchedulerOutput) -> None:
        """The step was not run: whatever was planned is not in the cache. Finish its requests as errors."""
        self.kv_cache_manager.uncache(out.newly_cached)
        self.dropped_req_ids = [*out.dropped_req_ids, *self.dropped_req_ids]  # the runner may not have heard
        self.finish_requests(out.scheduled, RequestStatus.FINISHED_ERROR)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside (abort, stop string, error). Unknown or finished ids are ignored."""
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                request.status = status
                self._remove(request)

    def _remove(self, request: Request) -> None:
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self.dropped_req_ids.append(request.request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached content; with `reset_running_requests`, preempt everything first so that it can be done."""
        if reset_running_requests:
            out = SchedulerOutput(budget_left=0)
            while self.running:
                self._preempt(self.running[-1], out)
        return self.kv_cache_manager.reset_prefix_cache()

    def __repr__(self) -> str:
        return (f"Scheduler(running={[r.request_id for r in self.running]}, "
                f"waiting={[r.request_id for r in self.waiting]}, KV cache usage {self.kv_cache_manager.usage:.0%})")
