"""The scheduler, step by step: who computes how many tokens, who waits and why, who loses its blocks."""

from __future__ import annotations

import pytest

from tests.core.support import Steps, make_params, make_request
from tutorial_engine.request import Request, RequestStatus
from tutorial_engine.scheduler import SchedulerOutput


def tokens(plan: SchedulerOutput) -> dict[str, int]:
    return plan.num_scheduled_tokens


# One budget


def test_prefill_and_decode_share_one_budget() -> None:
    """The picture at the top of scheduler.py: three decode, the fourth gets what is left of 8."""
    s = Steps(max_num_batched_tokens=8)
    s.add(*(make_request(i, 2) for i in "ABC"))
    assert tokens(s.step()) == {"A": 2, "B": 2, "C": 2}
    s.add(make_request("D", 9), make_request("E", 3))
    plan = s.step()
    assert tokens(plan) == {"A": 1, "B": 1, "C": 1, "D": 5} and plan.budget_left == 0
    assert plan.total_num_scheduled_tokens == 8
    assert s.sampled == ["A", "B", "C"]
    assert plan.waiting_reasons == {"E": "the token budget of this step is spent"}
    assert tokens(s.step()) == {"A": 1, "B": 1, "C": 1, "D": 4, "E": 1}
    assert tokens(s.step()) == {"A": 1, "B": 1, "C": 1, "D": 1, "E": 2}
    assert tokens(s.step()) == dict.fromkeys("ABCDE", 1)


def test_running_requests_come_first_and_in_order() -> None:
    s = Steps(max_num_batched_tokens=8)
    s.add(make_request("A", 20))
    assert tokens(s.step()) == {"A": 8}
    s.add(make_request("B", 1))
    assert tokens(s.step()) == {"A": 8}  # the whole budget: nobody is admitted
    plan = s.step()
    assert tokens(plan) == {"A": 4, "B": 1} and list(plan.scheduled) == ["A", "B"]
    assert [x.is_first for x in plan.scheduled.values()] == [False, True]


def test_positions_of_chunks_follow_each_other() -> None:
    s = Steps(max_num_batched_tokens=8)
    s.add(make_request("A", 18))
    plans = [(s.step(), s.sampled) for _ in range(4)]
    assert [(p.scheduled["A"].start, p.scheduled["A"].num_tokens, sampled) for p, sampled in plans] == [
        (0, 8, []), (8, 8, []), (16, 2, ["A"]), (18, 1, ["A"])]
    assert [p.scheduled["A"].new_block_ids for p, _ in plans] == [[1, 2], [3, 4], [5], []]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    s = Steps(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    s.add(make_request("A", 10), make_request("B", 7), make_request("C", 1))
    plan = s.step()
    assert tokens(plan) == {"A": 10}  # C would fit, but nobody overtakes B
    assert plan.waiting_reasons == {"B": "the token budget of this step is spent"} and plan.budget_left == 6
    assert tokens(s.step()) == {"A": 1, "B": 7, "C": 1}


def test_threshold_caps_each_request_unless_it_is_alone() -> None:
    s = Steps(long_prefill_token_threshold=4, max_num_batched_tokens=32)
    s.add(make_request("A", 20))
    assert tokens(s.step()) == {"A": 20}
    s.add(make_request("B", 10), make_request("C", 5))
    assert tokens(s.step()) == {"A": 1, "B": 4, "C": 4}
    assert tokens(s.step()) == {"A": 1, "B": 4, "C": 1}


def test_max_num_seqs_limits_those_that_run() -> None:
    s = Steps(max_num_seqs=2)
    s.add(make_request("A", 2, max_tokens=2), make_request("B", 2), make_request("C", 2))
    plan = s.step()
    assert tokens(plan) == {"A": 2, "B": 2}
    assert plan.waiting_reasons == {"C": "all 2 seats (max_num_seqs) taken"}
    assert tokens(s.step()) == {"A": 1, "B": 1}  # A finishes here
    assert tokens(s.step()) == {"B": 1, "C": 2}


# Head of the line


def test_the_first_that_finds_no_blocks_ends_the_scan() -> None:
    s = Steps(num_gpu_blocks=7, max_model_len=24)  # 6 blocks of 4
    s.add(make_request("A", 15), make_request("B", 12), make_request("C", 2))
    plan = s.step()
    assert tokens(plan) == {"A": 15} and plan.waiting_reasons == {"B": "not enough free blocks"}
    assert s.waiting == ["B", "C"]


def test_reserve_full_isl_admits_only_if_the_whole_sequence_fits() -> None:
    for reserve, admitted in ((True, {"A": 8}), (False, {"A": 8, "B": 4})):
        s = Steps(num_gpu_blocks=7, max_model_len=24, max_num_batched_tokens=12, scheduler_reserve_full_isl=reserve)
        s.add(make_request("A", 8), make_request("B", 20))  # B: 5 blocks, 4 free
        assert tokens(s.step()) == admitted


def test_watermark_keeps_blocks_free_only_while_others_run() -> None:
    s = Steps(num_gpu_blocks=11, max_model_len=40, watermark=0.2)  # 2 of 10
    s.add(make_request("A", 40 - 1, max_tokens=1), make_request("B", 4))
    plan = s.step()
    assert tokens(plan) == {"A": 39}, "alone, it may take the last block"
    assert plan.waiting_reasons == {"B": "not enough free blocks"}
    assert tokens(s.step()) == {"B": 4}


# Preemption


def two_that_grow(policy: str, priority_a: int, priority_b: int, **args: object) -> tuple[Steps, SchedulerOutput]:
    """Pool of 4 blocks; both hold 2 full blocks and want a third."""
    s = Steps(num_gpu_blocks=5, max_model_len=16, scheduling_policy=policy, **args)
    a, b = make_request("A", 8, priority=priority_a), make_request("B", 8, priority=priority_b, arrival_time=1.0)
    s.add(a)
    s.step()
    a.all_token_ids.pop()  # so that both are at the same point
    a.num_computed_tokens -= 1
    s.add(b)
    assert len(s.step().scheduled) == 2
    return s, s.step()


def test_fcfs_preempts_the_last_one_running() -> None:
    s, plan = two_that_grow("fcfs", 0, 0)
    assert tokens(plan) == {"A": 1} and [r.request_id for r in plan.preempted] == ["B"]
    victim = plan.preempted[0]
    assert victim.status == RequestStatus.PREEMPTED and victim.num_computed_tokens == 0 and victim.num_preemptions == 1
    assert victim.num_output_tokens == 1, "what was generated is kept"
    assert s.running == ["A"] and s.waiting == ["B"] and s.manager.get_block_ids("B") == []
    assert plan.waiting_reasons == {"B": "preempted in this step"} and plan.dropped_req_ids == ["B"]


@pytest.mark.parametrize(("priority_a", "priority_b", "victim"), [(0, 1, "B"), (1, 0, "A"), (0, 0, "B")])
def test_priority_preempts_the_least_important_then_the_latest(priority_a: int, priority_b: int, victim: str) -> None:
    s, plan = two_that_grow("priority", priority_a, priority_b)
    survivor = "A" if victim == "B" else "B"
    assert tokens(plan) == {survivor: 1} and [r.request_id for r in plan.preempted] == [victim]
    assert s.running == [survivor] and s.waiting == [victim]


def test_a_victim_whose_turn_was_still_to_come_is_gone() -> None:
    s = Steps(num_gpu_blocks=8, max_model_len=28)
    s.add(*(make_request(i, 6) for i in "ABC"))  # 2 of 7 blocks each
    for _ in range(3):
        assert len(s.step().scheduled) == 3
    # Each needs a third block: A takes the last one, B one of C's.
    plan = s.step()
    assert [r.request_id for r in plan.preempted] == ["C"] and tokens(plan) == {"A": 1, "B": 1}


def test_a_request_may_preempt_itself_and_the_step_goes_on() -> None:
    s = Steps(num_gpu_blocks=5, max_model_len=16, scheduling_policy="priority")
    low, high = make_request("low", 11, priority=9), make_request("high", 2, priority=0)
    s.add(low)
    s.step()
    s.add(high)
    assert tokens(s.step()) == {"low": 1, "high": 2}  # 3 + 1 blocks: full, and those of "low" are full too
    plan = s.step()
    assert plan.preempted == [low] and tokens(plan) == {"high": 1} and s.running == ["high"]


def test_victim_that_was_scheduled_in_this_step_gives_its_budget_back() -> None:
    """A (first in the list, least important) has its token when B needs a block and takes A's."""
    s = Steps(num_gpu_blocks=6, max_model_len=20, scheduling_policy="priority", max_num_batched_tokens=8)
    a, b = make_request("A", 5, priority=5), make_request("B", 8, priority=0)
    s.add(a)
    s.step()
    s.add(b)
    assert tokens(s.step()) == {"A": 1, "B": 7}
    assert tokens(s.step()) == {"A": 1, "B": 1}  # A: 7 of 8 slots used. B: 8 of 8
    s.manager.block_pool.get_new_blocks(1)  # the pool is full now
    plan = s.scheduler.schedule()
    assert [r.request_id for r in plan.preempted] == ["A"]
    assert tokens(plan) == {"B": 1} and plan.budget_left == 7
    assert a.num_computed_tokens == 0 and a.status == RequestStatus.PREEMPTED


def test_blocks_that_a_victim_was_given_in_this_step_are_never_findable() -> None:
    """A would fill its second block and begin a third, but B needs one: it gets the third, and the second, which nobody
    has computed, stays in the free queue."""
    s = Steps(num_gpu_blocks=6, max_model_len=20, scheduling_policy="priority", long_prefill_token_threshold=5)
    a, b = make_request("A", 14, priority=5), make_request("B", 9, priority=9)
    s.add(a, b)
    assert tokens(s.step()) == {"A": 5, "B": 5}
    b.priority = 0  # A was admitted first, and is the victim all the same
    table = s.manager.get_block_ids("A")
    plan = s.scheduler.schedule()
    assert tokens(plan) == {"B": 4} and plan.preempted == [a]
    blocks = [s.manager.block_pool.blocks[i] for i in table]
    assert blocks[0].block_hash is not None, "it was computed in an earlier step"
    assert blocks[1].block_hash is None and blocks[1].ref_cnt == 0, "it was not computed, and is nobody's"
    assert s.manager.get_computed_blocks(a)[1] == 4


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    s, _ = two_that_grow("fcfs", 0, 0, max_num_seqs=2)
    # B waits at the front, behind it a small newcomer. Fill the pool again until A preempts once more.
    s.add(make_request("C", 1))
    plan = s.step()
    assert plan.waiting_reasons == {"B": "not enough free blocks"} and s.waiting == ["B", "C"]


def test_first_in_line_has_a_reason_when_someone_else_was_preempted() -> None:
    s = Steps(num_gpu_blocks=5, max_model_len=16, scheduling_policy="priority", max_num_seqs=2)
    s.add(make_request("A", 7, priority=1), make_request("B", 7, priority=2))
    for _ in range(2):
        s.step()
    s.add(make_request("urgent", 1, priority=0))
    plan = s.step()
    assert [r.request_id for r in plan.preempted] == ["B"] and s.waiting == ["urgent", "B"]
    assert plan.waiting_reasons == {"B": "preempted in this step",
                                    "urgent": "nobody is admitted in a step that preempts"}


def test_preempted_requests_return_to_the_front_in_their_order() -> None:
    s = Steps(num_gpu_blocks=9, max_model_len=32)
    s.add(*(make_request(i, 4, max_tokens=99) for i in "ABCD"))
    s.add(make_request("E", 20))
    s.step()
    s.scheduler.running[0].all_token_ids += [7] * 22  # A suddenly needs 7 of the 8 blocks
    plan = s.step()
    assert [r.request_id for r in plan.preempted] == ["D", "C", "B"]
    assert s.waiting == ["B", "C", "D", "E"] and s.running == ["A"]


def test_priority_queue_is_ordered_by_priority_arrival_and_id() -> None:
    s = Steps(scheduling_policy="priority", max_num_seqs=1)
    for request_id, priority, arrival in (("d", 1, 0.0), ("c", 0, 2.0), ("b", 0, 1.0), ("a", 0, 1.0), ("e", -1, 9.0)):
        s.add(make_request(request_id, 2, priority=priority, arrival_time=arrival))
    assert s.waiting == ["e", "a", "b", "c", "d"]


def test_a_waiting_request_never_takes_a_seat_or_a_block_away() -> None:
    s = Steps(scheduling_policy="priority", max_num_seqs=1)
    s.add(make_request("low", 2, priority=9))
    s.step()
    s.add(make_request("high", 2, priority=0))
    plan = s.step()
    assert tokens(plan) == {"low": 1} and s.waiting == ["high"] and not plan.preempted


def test_a_resumed_request_computes_prompt_and_output_again_and_shows_its_whole_table() -> None:
    """B13, B16: it is no decode step, and its output is not asked for twice."""
    s, _ = two_that_grow("fcfs", 0, 0, enable_prefix_caching=False)
    s.scheduler.finish_requests(["A"], RequestStatus.FINISHED_ABORTED)
    (share,) = s.step().scheduled.values()
    assert share.request.request_id == "B" and (share.start, share.num_tokens) == (0, 9) and share.is_first
    assert share.new_block_ids == s.manager.get_block_ids("B") and len(share.new_block_ids) == 3
    assert share.request.num_output_tokens == 2


# Prefix cache


def test_a_second_identical_prompt_hits_in_the_same_step() -> None:
    s = Steps()
    s.add(make_request("A", [1] * 9), make_request("B", [1] * 9))
    plan = s.step()
    assert tokens(plan) == {"A": 9, "B": 1} and plan.scheduled["B"].start == 8
    assert plan.scheduled["B"].new_block_ids == [*plan.scheduled["A"].new_block_ids[:2], 4]


def test_same_step_hit_covers_only_what_this_step_computes() -> None:
    s = Steps(max_num_batched_tokens=10)
    s.add(make_request("A", [1] * 13, max_tokens=1), make_request("B", [1] * 13, max_tokens=1))
    assert tokens(s.step()) == {"A": 10}
    assert tokens(s.step()) == {"A": 3, "B": 1}  # B finds A's three full blocks


def test_a_running_request_is_found_in_the_step_that_completes_its_block() -> None:
    s = Steps()
    s.add(make_request("A", [1, 2, 3]))
    s.step(token_id=4)
    s.add(make_request("B", [1, 2, 3, 4, 5]))
    plan = s.step()
    assert tokens(plan) == {"A": 1, "B": 1} and plan.scheduled["B"].start == 4


def test_num_cached_tokens_is_the_hit_of_the_first_scheduling_only() -> None:
    s, plan = two_that_grow("fcfs", 0, 0)
    (victim,) = plan.preempted
    assert victim.num_cached_tokens == 0
    s.scheduler.finish_requests(["A"], RequestStatus.FINISHED_ABORTED)
    share = s.step().scheduled["B"]
    assert share.start == 4 and victim.num_cached_tokens == 0, "it finds its own blocks again, which is no news"
    fresh = make_request("C", victim.prompt_token_ids)
    assert fresh.num_cached_tokens == -1
    s.add(fresh)
    s.step()
    assert fresh.num_cached_tokens == 4


def test_statistics_leave_out_lookups_of_preempted_requests() -> None:
    """B23: prompts without a common prefix; every hit is a request finding itself."""
    s, _ = two_that_grow("fcfs", 0, 0)
    s.scheduler.finish_requests(["A"], RequestStatus.FINISHED_ABORTED)
    s.step()
    stats = s.manager.prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (2, 16, 0)
    assert (stats.preempted_queries, stats.preempted_hits) == (9, 4), "A has taken one of its two full blocks"


def test_a_lookup_is_counted_once_however_long_the_request_waits() -> None:
    s = Steps(num_gpu_blocks=5, max_model_len=16)
    s.add(make_request("A", 9), make_request("B", 9))
    for _ in range(4):
        s.step()
    assert s.manager.prefix_cache_stats.requests == 1


# Ends


def finish(s: Steps, request: Request, *token_ids: int) -> dict[str, list[int]]:
    s.add(request)
    return s.scheduler.update_from_output(s.scheduler.schedule(), {request.request_id: list(token_ids)})


@pytest.mark.parametrize(("params", "sampled", "reason", "stop_reason"), [
    ({"ignore_eos": False}, 2, "stop", None),
    ({"ignore_eos": True}, 2, None, None),
    ({"stop_token_ids": [5]}, 5, "stop", 5),
    ({"ignore_eos": True, "stop_token_ids": [2]}, 2, "stop", 2),
    ({"ignore_eos": False, "stop_token_ids": [2]}, 2, "stop", None),
    ({"max_tokens": 1}, 9, "length", None),
    ({"max_tokens": 1, "ignore_eos": False}, 2, "stop", None),
    ({"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [5]}, 5, None, None),
    ({}, 9, None, None),
])
def test_the_first_rule_that_applies_gives_the_reason(params: dict, sampled: int, reason: str | None,
                                                      stop_reason: int | None) -> None:
    s = Steps()
    request = make_request("A", 3, params=make_params(**params), eos_token_id=2)
    assert finish(s, request, sampled) == {"A": [sampled]}
    assert request.status.finish_reason == reason and request.stop_reason == stop_reason
    assert request.status.is_finished == (reason is not None) == (not s.scheduler.has_unfinished_requests())
    assert (s.manager.usage == 0.0) == (reason is not None)


def test_tokens_after_a_stop_are_not_kept() -> None:
    s = Steps()
    request = make_request("A", 3, params=make_params(stop_token_ids=[5]))
    assert finish(s, request, 4, 5, 6) == {"A": [4, 5]}
    assert request.output_token_ids == [4, 5] and request.prompt_token_ids == request.all_token_ids[:3]


def test_the_context_limit_ends_a_request() -> None:
    s = Steps(max_model_len=8)
    request = make_request("A", 6, max_tokens=100)
    s.add(request)
    s.step()
    assert not request.status.is_finished
    s.step()
    assert request.num_tokens == 8 and request.status.finish_reason == "length"


def test_finish_requests_ignores_unknown_ids_and_frees_at_once() -> None:
    s = Steps(max_num_seqs=1)
    s.add(make_request("A", 9), make_request("B", 9))
    s.step()
    s.scheduler.finish_requests(["A", "B", "nobody", "A"], RequestStatus.FINISHED_ABORTED)
    assert not s.scheduler.has_unfinished_requests() and s.manager.usage == 0.0
    assert s.running == s.waiting == []
    assert s.step().dropped_req_ids == ["A", "B"]
    assert s.step().dropped_req_ids == []


def test_a_discarded_step_ends_its_requests_forgets_their_blocks_and_repeats_what_to_drop() -> None:
    s = Steps(max_num_seqs=2)
    s.add(make_request("gone", 2, max_tokens=1), make_request("A", [1] * 9), make_request("B", 5))
    s.step()  # "gone" finishes here
    plan = s.scheduler.schedule()
    assert list(plan.scheduled) == ["A", "B"] and plan.dropped_req_ids == ["gone"]
    s.scheduler.discard_step(plan)
    s.manager.check_invariants()
    assert not s.scheduler.has_unfinished_requests() and s.manager.usage == 0.0
    assert all(x.request.status == RequestStatus.FINISHED_ERROR for x in plan.scheduled.values())
    s.add(make_request("C", [1] * 9))
    plan = s.step()
    assert plan.dropped_req_ids == ["gone", "A", "B"], "the runner may not have heard the first time"
    assert plan.scheduled["C"].start == 8, "A's blocks are from a step that did run"


def test_reset_prefix_cache_preempts_everything_if_asked_to() -> None:
    s = Steps()
    s.add(*(make_request(i, 9) for i in "ABC"))
    s.step()
    assert s.scheduler.reset_prefix_cache() is False and s.running == ["A", "B", "C"]
    assert s.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert s.running == [] and s.waiting == ["A", "B", "C"] and s.manager.usage == 0.0
    assert not s.manager.block_pool.cached_block_hash_to_block
    plan = s.step()
    assert plan.dropped_req_ids == ["C", "B", "A"] and tokens(plan) == {"A": 10, "B": 10, "C": 10}


def test_repr_says_who_runs_and_who_waits() -> None:
    s = Steps(num_gpu_blocks=11, max_model_len=40, max_num_seqs=1)
    s.add(make_request("A", 8), make_request("B", 8))
    s.step()
    assert repr(s.scheduler) == "Scheduler(running=['A'], waiting=['B'], KV cache usage 20%)"
    assert repr(s.scheduler.running[0]) == "Request('A', RUNNING, 8/9 tokens computed, 1 of at most 16 output)"


def test_arrival_time_defaults_to_now() -> None:
    first, second = (Request(i, [1], make_params()) for i in "ab")
    assert 0 < first.arrival_time <= second.arrival_time
    assert first.bad_words_token_ids == [] and first.masked_stop_ids == frozenset()
