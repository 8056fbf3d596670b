"""Blocks: the order of the free queue, sharing by content, and accounting that is all or nothing."""

from __future__ import annotations

import logging

import pytest

from tests.core.support import make_params, make_request
from tutorial_engine import block_manager
from tutorial_engine.block_manager import (
    NONE_HASH,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheManager,
    PrefixCacheStats,
    cdiv,
    hash_block_tokens,
)
from tutorial_engine.request import Request, RequestStatus

BLOCK = 4


def make_manager(num_gpu_blocks: int = 9, **kwargs: object) -> KVCacheManager:
    return KVCacheManager(num_gpu_blocks, BLOCK, kwargs.pop("max_model_len", 64), **kwargs)


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[int]:
    """Look up, allocate and register, as the scheduler does for a waiting request. Returns its block table."""
    blocks, hits = manager.get_computed_blocks(request)
    num_tokens = request.num_tokens - hits if num_tokens is None else num_tokens
    assert manager.allocate_slots(request, num_tokens, blocks) is not None
    request.num_computed_tokens = hits
    manager.cache_blocks(request, hits + num_tokens)
    request.num_computed_tokens += num_tokens
    request.status = RequestStatus.RUNNING
    manager.take_newly_cached()
    manager.check_invariants()
    return manager.get_block_ids(request.request_id)


def num_hits(manager: KVCacheManager, request: Request) -> int:
    return manager.get_computed_blocks(request)[1]


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


# The free queue


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_free_queue_keeps_order_and_count() -> None:
    blocks = [KVCacheBlock(i) for i in range(5)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert ids(queue) == [0, 1, 2, 3, 4] and queue.num_free_blocks == 5
    assert queue.popleft() is blocks[0]
    queue.remove(blocks[2])
    assert ids(queue) == [1, 3, 4] and queue.num_free_blocks == 3
    assert blocks[2].prev_free is None and blocks[2].next_free is None
    queue.append(blocks[2])
    queue.prepend_n([blocks[0]])
    assert ids(queue) == [0, 1, 3, 4, 2] and queue.num_free_blocks == 5
    queue.remove(blocks[2])
    queue.remove(blocks[0])
    assert ids(queue) == [1, 3, 4]
    queue.prepend_n([blocks[2], blocks[0]])
    assert ids(queue) == [2, 0, 1, 3, 4]


def test_free_queue_drained_and_refilled() -> None:
    blocks = [KVCacheBlock(i) for i in range(2)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert [queue.popleft().block_id, queue.popleft().block_id] == [0, 1]
    assert ids(queue) == [] and queue.num_free_blocks == 0
    with pytest.raises(RuntimeError, match="No free block left"):
        queue.popleft()
    assert queue.num_free_blocks == 0
    queue.append(blocks[1])
    assert ids(queue) == [1] and queue.popleft() is blocks[1]


# The pool


def test_block_0_is_the_null_block() -> None:
    pool = BlockPool(4, enable_caching=True)
    assert pool.null_block.block_id == 0 and pool.get_num_free_blocks() == 3 and pool.get_usage() == 0.0
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 2, 3]
    assert pool.get_usage() == 1.0
    with pytest.raises(RuntimeError):
        pool.get_new_blocks(1)


def test_freed_blocks_go_to_the_front_without_a_hash_and_to_the_back_with_one() -> None:
    pool = BlockPool(7, enable_caching=True)
    taken = pool.get_new_blocks(4)  # 1 2 3 4; 5 6 stay free
    pool.cache_block(taken[0], b"h1", ((1,), None))
    pool.cache_block(taken[1], b"h2", ((2,), None))
    pool.free_blocks(reversed(taken))  # tail first: 4 3 2 1
    assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == [4, 3, 5, 6, 2, 1]


def test_a_free_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"h", ((1, 2), None))
    assert block.__repr__() == "KVCacheBlock(1, ref_cnt=1, hashed)"
    pool.free_blocks([block])
    assert pool.get_cached_block(b"h", ((1, 2), None)) is block
    assert [b.block_id for b in pool.get_new_blocks(2)] == [2, 1]  # the other one first: LRU
    assert pool.get_cached_block(b"h", ((1, 2), None)) is None and block.key is None
    assert pool.cached_block_hash_to_block == {}
    assert repr(block) == "KVCacheBlock(1, ref_cnt=1, not hashed)"


def test_touch_revives_a_free_block_from_the_middle_of_the_queue() -> None:
    pool = BlockPool(5, enable_caching=True)
    taken = pool.get_new_blocks(3)
    for i, block in enumerate(taken):
        pool.cache_block(block, bytes([i]), ((i,), None))
    pool.free_blocks(reversed(taken))
    pool.touch([taken[1]])
    assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == [4, 3, 1]
    pool.touch([taken[1]])
    assert taken[1].ref_cnt == 2 and pool.get_num_free_blocks() == 3
    pool.free_blocks([taken[1]])
    assert taken[1].ref_cnt == 1 and pool.get_num_free_blocks() == 3
    pool.free_blocks([taken[1]])
    assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == [4, 3, 1, 2]


def test_one_hash_may_have_several_blocks() -> None:
    pool = BlockPool(4, enable_caching=True)
    first, second = pool.get_new_blocks(2)
    for block in (first, second):
        pool.cache_block(block, b"h", ((1,), None))
    assert pool.get_cached_block(b"h", ((1,), None)) is first
    pool.uncache_block(first)
    assert pool.get_cached_block(b"h", ((1,), None)) is second
    pool.uncache_block(second)
    assert pool.get_cached_block(b"h", ((1,), None)) is None
    pool.uncache_block(second)  # nothing known: nothing to forget


# Hashes


def test_hash_depends_on_parent_tokens_and_extra_keys_only() -> None:
    one = hash_block_tokens(NONE_HASH, (1, 2))
    assert one == hash_block_tokens(NONE_HASH, [1, 2], None) and len(one) == 32
    others = [hash_block_tokens(one, (1, 2)), hash_block_tokens(NONE_HASH, (2, 1)),
              hash_block_tokens(NONE_HASH, (1, 2), (("cache_salt", "a"),)),
              hash_block_tokens(NONE_HASH, (1, 2), (("cache_salt", "b"),))]
    assert len({one, *others}) == 5


def test_chain_is_extended_as_the_request_grows_and_salt_is_in_the_first_block_only() -> None:
    manager = make_manager()
    plain, salted = make_request("p", [1] * 9), make_request("s", [1] * 9, cache_salt="secret")
    for request in (plain, salted):
        admit(manager, request)
    assert len(plain.block_hashes) == 2
    first = hash_block_tokens(NONE_HASH, (1,) * 4)
    assert plain.block_hashes == [first, hash_block_tokens(first, (1,) * 4)]
    first = hash_block_tokens(NONE_HASH, (1,) * 4, (("cache_salt", "secret"),))
    assert salted.block_hashes == [first, hash_block_tokens(first, (1,) * 4)]
    plain.all_token_ids += [5, 6, 7]
    manager.allocate_slots(plain, 3)
    manager.cache_blocks(plain, 12)
    assert plain.block_hashes[2] == hash_block_tokens(plain.block_hashes[1], (1, 5, 6, 7))


def test_salts_are_kept_apart_at_every_block() -> None:
    manager = make_manager()
    admit(manager, make_request("a", [1] * 9, cache_salt="a"))
    assert num_hits(manager, make_request("b", [1] * 9, cache_salt="b")) == 0
    assert num_hits(manager, make_request("c", [1] * 9)) == 0
    assert num_hits(manager, make_request("d", [1] * 9, cache_salt="a")) == 8


def test_equal_tokens_after_another_beginning_are_not_shared() -> None:
    manager = make_manager()
    admit(manager, make_request("a", [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert num_hits(manager, make_request("b", [9, 9, 9, 9, 2, 2, 2, 2, 3])) == 0
    assert num_hits(manager, make_request("c", [1, 1, 1, 1, 9, 9, 9, 9, 3])) == 4


def test_a_collision_of_hashes_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "hash_block_tokens", lambda parent, tokens, extra=None: b"all the same")
    manager = make_manager()
    admit(manager, make_request("a", [1, 1, 1, 1, 2]))
    assert num_hits(manager, make_request("b", [2, 2, 2, 2, 2])) == 0
    assert num_hits(manager, make_request("c", [1, 1, 1, 1, 3])) == 4
    assert num_hits(manager, make_request("d", [1, 1, 1, 1, 3], cache_salt="x")) == 0


# Lookups


@pytest.mark.parametrize(("num_tokens", "hits"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_leaves_at_least_one_token(num_tokens: int, hits: int) -> None:
    """B13, B14: sent twice, a prompt of exactly n blocks computes its last block again."""
    manager = make_manager()
    first = make_request("a", num_tokens)
    admit(manager, first)
    manager.free(first)
    again = make_request("b", first.prompt_token_ids)
    assert num_hits(manager, again) == hits
    admit(manager, again)
    assert again.num_computed_tokens == num_tokens


def test_output_tokens_are_found_by_the_next_turn() -> None:
    manager = make_manager()
    first = make_request("a", [1, 2, 3])
    admit(manager, first)
    first.all_token_ids += [4, 5, 6]
    manager.allocate_slots(first, 2)
    manager.cache_blocks(first, 5)
    manager.free(first)
    assert num_hits(manager, make_request("b", [1, 2, 3, 4, 5, 6, 7, 8])) == 4


def test_a_chain_ends_at_its_first_gap() -> None:
    manager = make_manager()
    request = make_request("a", 13)
    table = admit(manager, request)
    manager.free(request)
    manager.block_pool.uncache_block(manager.block_pool.blocks[table[1]])
    assert num_hits(manager, make_request("b", request.prompt_token_ids)) == 4


def test_no_lookup_without_caching_or_when_the_request_declines() -> None:
    manager = make_manager(enable_caching=False)
    request = make_request("a", [1] * 9)
    admit(manager, request)
    assert request.block_hashes == [] and num_hits(manager, make_request("b", [1] * 9)) == 0
    manager = make_manager()
    admit(manager, make_request("a", [1] * 9))
    declines = make_request("b", [1] * 9, params=make_params(prompt_logprobs=1))
    assert num_hits(manager, declines) == 0  # B19
    admit(manager, declines)  # but what it computes is registered, beside the block that is there already
    assert [len(same) for same in manager.block_pool.cached_block_hash_to_block.values()] == [2, 2]


def test_only_what_was_really_computed_is_registered() -> None:
    manager = make_manager()
    request = make_request("a", 12)
    admit(manager, request, num_tokens=7)
    assert num_hits(manager, make_request("b", request.prompt_token_ids)) == 4
    manager.allocate_slots(request, 3)
    manager.cache_blocks(request, 100)  # never more than there are tokens
    assert manager.num_cached_blocks["a"] == 3


def test_shared_blocks_are_counted_and_outlive_their_first_owner() -> None:
    manager = make_manager()
    a, b = make_request("a", [1] * 9), make_request("b", [1] * 9)
    table_a, table_b = admit(manager, a), admit(manager, b)
    assert table_a[:2] == table_b[:2] and table_a[2] != table_b[2]
    assert [manager.block_pool.blocks[i].ref_cnt for i in table_a] == [2, 2, 1]
    manager.free(a)
    manager.check_invariants()
    assert [manager.block_pool.blocks[i].ref_cnt for i in table_b] == [1, 1, 1]
    manager.free(b)
    manager.check_invariants()
    assert manager.usage == 0.0
    manager.free(b)  # it has none: nothing happens
    manager.check_invariants()


def test_duplicates_stay_and_tables_are_not_rewritten() -> None:
    """Both computed the same content in the same step, neither could find the other: two blocks with one hash."""
    manager = make_manager()
    a, b = make_request("a", [1] * 4), make_request("b", [1] * 4)
    for request in (a, b):
        assert manager.allocate_slots(request, 4) is not None
    for request in (a, b):
        manager.cache_blocks(request, 4)
    manager.check_invariants()
    assert manager.get_block_ids("a") == [1] and manager.get_block_ids("b") == [2]
    assert [sorted(same) for same in manager.block_pool.cached_block_hash_to_block.values()] == [[1, 2]]


def test_tail_is_freed_first_so_that_heads_are_evicted_last() -> None:
    manager = make_manager()
    request = make_request("a", 14)  # blocks 1 2 3 full, 4 half full
    assert admit(manager, request) == [1, 2, 3, 4]
    manager.free(request)
    assert free_ids(manager) == [4, 5, 6, 7, 8, 3, 2, 1]
    admit(manager, make_request("b", 22))  # takes 4 5 6 7 8 and evicts 3
    assert num_hits(manager, make_request("c", request.prompt_token_ids)) == 8


# allocate_slots


def snapshot(manager: KVCacheManager) -> tuple:
    return (free_ids(manager), [(b.ref_cnt, b.block_hash) for b in manager.block_pool.blocks],
            {i: manager.get_block_ids(i) for i in manager.req_to_blocks}, dict(manager.num_cached_blocks))


def test_allocates_as_many_blocks_as_the_tokens_need() -> None:
    manager = make_manager()
    request = make_request("a", 30)
    sizes = []
    for num_new in (3, 1, 1, 8, 3):
        sizes.append(len(manager.allocate_slots(request, num_new)))
        request.num_computed_tokens += num_new
    assert sizes == [1, 0, 1, 2, 0] and manager.get_block_ids("a") == [1, 2, 3, 4]


def test_lookahead_slots_are_allocated_up_to_max_model_len() -> None:
    manager = make_manager(max_model_len=12)
    request = make_request("a", 5)
    assert len(manager.allocate_slots(request, 5, num_lookahead_tokens=4)) == 3
    request.num_computed_tokens = 5
    assert manager.allocate_slots(request, 5, num_lookahead_tokens=50) == []
    manager.cache_blocks(request, 10)
    assert manager.num_cached_blocks["a"] == 1  # 5 tokens are known: what may come later is not registered


def test_all_or_nothing_when_the_pool_is_short() -> None:
    manager = make_manager(num_gpu_blocks=5)  # 4 usable
    first = make_request("a", [1] * 9)
    admit(manager, first)
    manager.free(first)  # 2 cached in the free queue
    other = make_request("b", 5)
    admit(manager, other)  # takes 2 of 4, evicting nothing that is cached
    before = snapshot(manager)
    again = make_request("c", [1] * 12)
    blocks, hits = manager.get_computed_blocks(again)
    assert hits == 8
    # One new block is wanted and "2 are free", but both are the hit itself.
    assert manager.get_computed_blocks(again)[0] == blocks
    assert manager.allocate_slots(again, 4, blocks) is None
    assert snapshot(manager) == before
    manager.check_invariants()
    manager.free(other)
    assert len(manager.allocate_slots(again, 4, blocks)) == 1
    manager.check_invariants()


def test_hit_blocks_that_others_hold_cost_nothing() -> None:
    manager = make_manager(num_gpu_blocks=5)
    admit(manager, make_request("a", [1] * 9))  # 3 of 4
    assert len(admit(manager, make_request("b", [1] * 9))) == 3  # 2 shared, 1 new
    assert manager.usage == 1.0


def test_full_sequence_must_fit() -> None:
    manager = make_manager(num_gpu_blocks=5)
    request = make_request("a", 17)  # 5 blocks, 4 usable
    before = snapshot(manager)
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert snapshot(manager) == before
    assert len(manager.allocate_slots(request, 4)) == 1
    fits = make_request("b", 12)
    assert len(manager.allocate_slots(fits, 4, full_sequence_must_fit=True)) == 1


def test_full_sequence_counts_what_is_hit() -> None:
    manager = make_manager(num_gpu_blocks=6)  # 5 usable
    admit(manager, make_request("a", [1] * 9))  # 3 taken
    request = make_request("b", [1] * 15)  # 4 blocks, 2 of them shared
    blocks, _ = manager.get_computed_blocks(request)
    assert len(manager.allocate_slots(request, 1, blocks, full_sequence_must_fit=True)) == 1
    longer = make_request("c", [1] * 17)  # 5 blocks, 2 shared; 3 wanted, 1 free
    blocks, _ = manager.get_computed_blocks(longer)
    assert manager.allocate_slots(longer, 1, blocks, full_sequence_must_fit=True) is None


def test_watermark_holds_for_admission_while_others_run() -> None:
    manager = make_manager(num_gpu_blocks=11, watermark=0.25)  # 2 of 10 usable stay free
    assert manager.watermark_blocks == 2
    request = make_request("a", 36)  # 9 blocks
    assert manager.allocate_slots(request, 36, others_running=True) is None
    request.status = RequestStatus.PREEMPTED
    assert manager.allocate_slots(request, 36, others_running=True) is None
    assert manager.allocate_slots(request, 32, others_running=True) is not None  # 8: exactly what may be taken
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 32
    assert manager.allocate_slots(request, 4, others_running=True) is not None
    alone = make_request("b", 4)
    assert manager.allocate_slots(alone, 4, others_running=False) is not None


# Steps that fail, and resets


def test_rollback_forgets_what_the_step_registered_and_nothing_else() -> None:
    manager = make_manager()
    old = make_request("a", [1] * 5)
    admit(manager, old)
    new = make_request("b", [1] * 13)
    blocks, hits = manager.get_computed_blocks(new)
    manager.allocate_slots(new, 9, blocks)
    manager.cache_blocks(new, 13)
    registered = manager.take_newly_cached()
    assert [b.block_id for b in registered] == manager.get_block_ids("b")[1:3]
    assert num_hits(manager, make_request("c", [1] * 13)) == 12  # same-step hit
    manager.uncache(registered)
    manager.check_invariants()
    assert manager.take_newly_cached() == [] and num_hits(manager, make_request("c", [1] * 13)) == 4
    manager.uncache(registered)  # twice does no harm
    assert num_hits(manager, make_request("c", [1] * 13)) == 4


def test_reset_prefix_cache_is_refused_while_blocks_are_in_use(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager()
    request = make_request("a", [1] * 9)
    admit(manager, request)
    manager.record_lookup(request, 0)
    with caplog.at_level(logging.WARNING):
        assert manager.reset_prefix_cache() is False
    assert "3 blocks are in use" in caplog.text
    assert manager.prefix_cache_stats.queries == 9 and num_hits(manager, make_request("b", [1] * 9)) == 8
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    manager.check_invariants()
    assert num_hits(manager, make_request("b", [1] * 9)) == 0
    assert manager.prefix_cache_stats == PrefixCacheStats()
    assert all(b.block_hash is None and b.key is None for b in manager.block_pool.blocks)


def test_lookups_are_counted_apart_for_preempted_requests_and_not_at_all_for_those_that_decline() -> None:
    manager = make_manager()
    request = make_request("a", 9)
    manager.record_lookup(request, 4)
    request.num_preemptions = 1
    manager.record_lookup(request, 8)
    manager.record_lookup(make_request("b", 9, params=make_params(skip_reading_prefix_cache=True)), 0)
    assert manager.prefix_cache_stats == PrefixCacheStats(1, 9, 4, 9, 8)
    off = make_manager(enable_caching=False)
    off.record_lookup(request, 0)
    assert off.prefix_cache_stats == PrefixCacheStats()


def test_cdiv() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


# check_invariants must be able to fail


@pytest.mark.parametrize(("damage", "says"), [
    (lambda m: m.block_pool.free_block_queue.popleft(), "free . used . null"),
    (lambda m: setattr(m.block_pool.free_block_queue, "num_free_blocks", 3), "lost count"),
    (lambda m: m.req_to_blocks["a"].append(m.req_to_blocks["a"][0]), "names a block twice"),
    (lambda m: m.req_to_blocks["a"].append(m.block_pool.blocks[8]), "names a free block"),
    (lambda m: m.req_to_blocks["a"].append(m.block_pool.null_block), "null block"),
    (lambda m: setattr(m.req_to_blocks["a"][0], "ref_cnt", 2), "ref_cnt=2"),
    (lambda m: setattr(m.block_pool.blocks[8], "ref_cnt", 1), "0 tables name it"),
    (lambda m: m.block_pool.cached_block_hash_to_block.clear(), "'|KeyError"),
    (lambda m: next(iter(m.block_pool.cached_block_hash_to_block.values())).clear(), "cannot be found"),
    (lambda m: setattr(m.req_to_blocks["a"][0], "block_hash", None), "a cached entry has no block"),
])
def test_check_invariants_sees_damage(damage: object, says: str) -> None:
    manager = make_manager()
    admit(manager, make_request("a", 9))
    damage(manager)
    with pytest.raises((AssertionError, KeyError), match=says):
        manager.check_invariants()


def test_check_invariants_sees_a_block_that_is_free_twice() -> None:
    manager = make_manager()
    queue = manager.block_pool.free_block_queue
    queue._tail.prev_free.next_free = copy = KVCacheBlock(3)
    copy.next_free = queue._tail
    queue.num_free_blocks += 1
    with pytest.raises(AssertionError, match="free queue twice"):
        manager.check_invariants()
