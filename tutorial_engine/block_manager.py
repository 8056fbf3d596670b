"""Blocks: who owns which piece of the KV cache, what is free, what can be shared.

    request "a"  table [3, 7]  ------+          physical blocks (block_size tokens each)
    request "b"  table [3, 5]  --+   |          0     1    2    3     4    5    6    7
                                 |   |        [null][free][..][a,b ][..][ b ][..][ a ]
                                 +---+------------------------ ref_cnt 2: a shared prefix

Three layers, each small:

* `FreeKVCacheBlockQueue`: free blocks in the order in which they will be reused; any block can be taken out of the
  middle in O(1), because a prefix hit revives a block that was waiting to be reused.
* `BlockPool`: takes, shares and frees blocks, and finds a full block by the hash of its content. A freed block keeps
  its hash until it is handed out again, so a later request can still find it: the free queue *is* the cache, in LRU
  order.
* `KVCacheManager`: the tables of the requests, and `allocate_slots`, the one function that does the accounting.

Block 0 is the null block: never owned, never cached; padding may write to it.
The design is vLLM V1's; PagedAttention is from Kwon et al., SOSP 2023 (arXiv 2309.06180), section 4.
Does not own: tensors (`kv_cache.py`) or the decision who runs (`scheduler.py`).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tutorial_engine.kv_events import MAX_KEPT_EVENTS, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tutorial_engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)

NONE_HASH = bytes(32)  # the "parent" of a first block


def hash_block_tokens(parent_hash: bytes, token_ids: Sequence[int], extra_keys: tuple | None = None) -> bytes:
    """Identity of a full block: its tokens, everything before them (through the parent's hash), and extra keys."""
    digest = hashlib.sha256(parent_hash)
    digest.update(array("q", token_ids).tobytes())
    digest.update(repr(extra_keys).encode())
    return digest.digest()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class KVCacheBlock:
    """One physical block. `key` holds the content behind `block_hash`; a hit compares both, see `get_cached_block`."""

    __slots__ = ("block_id", "ref_cnt", "block_hash", "key", "prev_free", "next_free")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.key: tuple | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {'hashed' if self.block_hash else 'not hashed'})"


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves: nothing is allocated, removal from the middle is O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        # Two sentinels spare every operation its special case at the ends.
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def _insert_after(self, at: KVCacheBlock, block: KVCacheBlock) -> None:
        block.prev_free, block.next_free = at, at.next_free
        at.next_free.prev_free = block
        at.next_free = block
        self.num_free_blocks += 1

    def append(self, block: KVCacheBlock) -> None:
        self._insert_after(self._tail.prev_free, block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` in front, keeping their order."""
        for block in reversed(blocks):
            self._insert_after(self._head, block)

    def remove(self, block: KVCacheBlock) -> None:
        block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        block = self._head.next_free
        if block is self._tail:
            raise RuntimeError("No free block left: check num_free_blocks before taking one.")
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, the next one to be reused first."""
        at = self._head.next_free
        while at is not self._tail:
            yield at
            at = at.next_free

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, the next one to be reused first."""
        return list(self)


class BlockPool:
    """All physical blocks, and the map from content hash to the blocks that hold it.

    Args:
        num_gpu_blocks: number of blocks, the null block included; at least 2.
        enable_caching: whether full blocks can be found again.
        enable_kv_cache_events: note what enters and leaves the cache, for `take_events`.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, enable_kv_cache_events: bool = False) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.events: deque[KVCacheEvent] | None = deque(maxlen=MAX_KEPT_EVENTS) if enable_kv_cache_events else None
        self.blocks = [KVCacheBlock(i) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        # Two requests may compute the same content at the same time, so a hash can have several blocks.
        self.cached_block_hash_to_block: dict[bytes, dict[int, KVCacheBlock]] = {}
        self.null_block = self.free_block_queue.popleft()

    def get_cached_block(self, block_hash: bytes, key: tuple) -> KVCacheBlock | None:
        """A block with this content, or None. The tokens are compared as well: a hash alone is a promise."""
        for block in self.cached_block_hash_to_block.get(block_hash, {}).values():
            if block.key == key:
                return block
        return None

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, key: tuple) -> None:
        """Let others find `block` by its content."""
        block.block_hash, block.key = block_hash, key
        self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Forget the content of `block`, if it is known."""
        if block.block_hash is not None:
            same = self.cached_block_hash_to_block[block.block_hash]
            del same[block.block_id]
            if not same:
                del self.cached_block_hash_to_block[block.block_hash]
                if self.events is not None:
                    self.events.append(BlockRemoved([block.block_hash]))
            block.block_hash = block.key = None

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue, evicting whatever they still cached."""
        new = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in new:
            self.uncache_block(block)
            block.ref_cnt = 1
        return new

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table names these blocks; a free one leaves the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One table less names these blocks. Those that nobody names any more become free, in the given order: to the
        back if their content may still be found, to the front if not, since nothing is lost by reusing them first."""
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.prepend_n([b for b in freed if b.block_hash is None])
        for block in freed:
            if block.block_hash is not None:
                self.free_block_queue.append(block)

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Fraction of the usable blocks that some table names."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Refused (False, with a warning) while any block is in use."""
        in_use = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        if in_use:
            logger.warning("The prefix cache cannot be reset while %d blocks are in use.", in_use)
            return False
        self.cached_block_hash_to_block.clear()
        for block in self.blocks:
            block.block_hash = block.key = None
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, the oldest first."""
        taken = list(self.events or ())
        if self.events:
            self.events.clear()
        return taken


@dataclass
class PrefixCacheStats:
    """Tokens looked up in the prefix cache and tokens found, by requests that were not preempted before: a request
    that finds its own blocks again after a preemption says nothing about sharing."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class KVCacheManager:
    """The block tables of all requests.

    Args:
        num_gpu_blocks: size of the pool, the null block included.
        block_size: tokens per block.
        max_model_len: no table grows past ceil(max_model_len / block_size) blocks.
        enable_caching: share blocks of equal prefixes.
        watermark: fraction of the blocks kept free when a request is admitted while others run.
        enable_kv_cache_events: see `BlockPool`.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, max_model_len: int, enable_caching: bool = True,
                 watermark: float = 0.0, enable_kv_cache_events: bool = False) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.block_pool = BlockPool(num_gpu_blocks, enable_caching, enable_kv_cache_events)
        self.prefix_cache_stats = PrefixCacheStats()
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_blocks: dict[str, int] = {}  # per request: leading blocks already registered by content
        self.newly_cached: list[KVCacheBlock] = []  # registered for a plan that is being made, so not yet filled

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Longest chain of cached full blocks at the start of `request`: (blocks, tokens they hold).

        At least one token is always left to compute, since the logits of the last token are what we want: a fully
        cached prompt computes its last block again.
        """
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return [], 0
        self._hash_full_blocks(request)
        blocks: list[KVCacheBlock] = []
        for i in range((request.num_tokens - 1) // self.block_size):
            block = self.block_pool.get_cached_block(request.block_hashes[i], request.block_keys[i])
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def record_lookup(self, request: Request, num_hits: int) -> None:
        """Count a lookup, once, when its request is admitted: a waiting request looks again in every step."""
        if self.enable_caching and not request.sampling_params.skip_reading_prefix_cache:
            self.prefix_cache_stats.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)

    def allocate_slots(self, request: Request, num_new_tokens: int, new_computed_blocks: Sequence[KVCacheBlock] = (),
                       num_lookahead_tokens: int = 0, full_sequence_must_fit: bool = False,
                       others_running: bool = False) -> list[KVCacheBlock] | None:
        """Make room for the next tokens of `request`; nothing is touched unless everything fits.

            | computed before | hit in the cache    | new tokens  | lookahead (drafts) |
            | in its table    | new_computed_blocks | blocks to be taken from the pool |

        Args:
            num_new_tokens: tokens to be computed in this step.
            new_computed_blocks: blocks found by `get_computed_blocks`, for a request that has none yet.
            num_lookahead_tokens: slots for tokens that may not be kept.
            full_sequence_must_fit: require room for all known tokens of the request, not only for this step's.
            others_running: keep the watermark free if this request is being admitted.

        Returns:
            The new blocks (perhaps none), or None if the pool is short.
        """
        num_owned = len(self.req_to_blocks.get(request.request_id, ())) + len(new_computed_blocks)
        num_computed = request.num_computed_tokens + len(new_computed_blocks) * self.block_size
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        if num_slots <= num_owned * self.block_size and not new_computed_blocks and not full_sequence_must_fit:
            return []  # the common case: a decoding request whose last block is not full
        num_new_blocks = max(0, cdiv(num_slots, self.block_size) - num_owned)
        num_wanted = num_new_blocks
        if full_sequence_must_fit:
            num_wanted = max(num_wanted, cdiv(request.num_tokens, self.block_size) - num_owned)
        # A hit on a block that waits in the free queue takes it out of there.
        num_wanted += sum(block.ref_cnt == 0 for block in new_computed_blocks)
        reserve = self.watermark_blocks if others_running and request.status != RequestStatus.RUNNING else 0
        if num_wanted + reserve > self.block_pool.get_num_free_blocks():
            return None

        self.block_pool.touch(new_computed_blocks)
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        self.req_to_blocks.setdefault(request.request_id, []).extend([*new_computed_blocks, *new_blocks])
        self.num_cached_blocks.setdefault(request.request_id, len(new_computed_blocks))
        return new_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Register the full blocks among the first `num_computed_tokens` tokens.

        Called once it is certain that this step computes them: a block whose request is preempted in the same step
        must never be found by another.
        """
        first = self.num_cached_blocks[request.request_id]
        if not self.enable_caching or num_computed_tokens < (first + 1) * self.block_size:
            return
        self._hash_full_blocks(request)
        table = self.req_to_blocks[request.request_id]
        last = max(first, min(num_computed_tokens, request.num_tokens) // self.block_size)
        for i in range(first, last):
            self._note_stored(request, i)
            self.block_pool.cache_block(table[i], request.block_hashes[i], request.block_keys[i])
        self.newly_cached += table[first:last]
        self.num_cached_blocks[request.request_id] = last

    def _note_stored(self, request: Request, i: int) -> None:
        """An event for logical block i, if its content is new to the cache. Neighbours share one."""
        events, block_hash = self.block_pool.events, request.block_hashes[i]
        if events is None or block_hash in self.block_pool.cached_block_hash_to_block:
            return
        tokens = request.all_token_ids[i * self.block_size:(i + 1) * self.block_size]
        parent = request.block_hashes[i - 1] if i else None
        if events and isinstance(events[-1], BlockStored) and events[-1].block_hashes[-1] == parent:
            events[-1].block_hashes.append(block_hash)
            events[-1].token_ids.extend(tokens)
        else:
            events.append(BlockStored([block_hash], parent, tokens, self.block_size))

    def take_newly_cached(self) -> list[KVCacheBlock]:
        """Blocks registered since the last call: the model has yet to fill them."""
        taken, self.newly_cached = self.newly_cached, []
        return taken

    def uncache(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The model failed to fill these blocks: nobody may find them."""
        for block in blocks:
            self.block_pool.uncache_block(block)

    def free(self, request: Request) -> None:
        """Give back all blocks, the tail first: the head of a sequence is the most likely to be asked for again, so
        it should be evicted last."""
        self.num_cached_blocks.pop(request.request_id, None)
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request.request_id, [])))

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table: physical block of each logical block."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, [])]

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is in use."""
        done = self.block_pool.reset_prefix_cache()
        if done:
            self.prefix_cache_stats = PrefixCacheStats()
        return done

    def _content(self, request: Request, i: int) -> tuple:
        """What logical block i holds: its tokens, and the extra keys of its hash."""
        tokens = tuple(request.all_token_ids[i * self.block_size:(i + 1) * self.block_size])
        # The salt goes into the first block only; the chain of hashes carries it on.
        return tokens, (("cache_salt", request.cache_salt),) if request.cache_salt and i == 0 else None

    def _hash_full_blocks(self, request: Request) -> None:
        hashes = request.block_hashes
        for i in range(len(hashes), request.num_tokens // self.block_size):
            tokens, extra_keys = key = self._content(request, i)
            hashes.append(hash_block_tokens(hashes[-1] if hashes else NONE_HASH, tokens, extra_keys))
            request.block_keys.append(key)

    def check_invariants(self) -> None:
        """Raise AssertionError unless free + used + null = total, every reference is counted and every cached block
        can be found. Meant for tests and for the curious: it walks the whole pool."""
        pool = self.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        free_ids = [block.block_id for block in free]
        named: dict[int, int] = {}
        for request_id, table in self.req_to_blocks.items():
            ids = [block.block_id for block in table]
            assert len(set(ids)) == len(ids), f"request {request_id} names a block twice: {ids}"
            for block_id in ids:
                named[block_id] = named.get(block_id, 0) + 1
        assert len(free) == pool.get_num_free_blocks(), "the free queue has lost count"
        assert len(set(free_ids)) == len(free_ids), "a block is in the free queue twice"
        assert not named.keys() & set(free_ids), "a table names a free block"
        assert 0 not in named and 0 not in free_ids, "the null block was handed out or freed"
        assert len(free) + len(named) + 1 == pool.num_gpu_blocks, "free + used + null is not the total"
        for block in pool.blocks:
            num_tables = named.get(block.block_id, 0)
            assert block.ref_cnt == num_tables, f"{block}, but {num_tables} tables name it"
            if block.block_hash is not None:
                assert block.block_id in pool.cached_block_hash_to_block[block.block_hash], f"{block} cannot be found"
        cached = sum(len(same) for same in pool.cached_block_hash_to_block.values())
        assert cached == sum(block.block_hash is not None for block in pool.blocks), "a cached entry has no block"
