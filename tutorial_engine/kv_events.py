"""KV-cache events: what entered the prefix cache and what left it. Names are vLLM's (`vllm.distributed.kv_events`).

    BlockStored   a content can be found from now on       a router that sends requests where their prefix is cached,
    BlockRemoved  its last copy was evicted                 or a picture of the cache, keeps a set of hashes up to date
    AllBlocksCleared  everything was forgotten              with these three

Owns: the records and the argument that turns them on. Does not own: when they happen (`block_manager.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tutorial_engine.exceptions import VLLMValidationError

# Events that nobody fetches are kept up to this number; then the oldest are dropped.
MAX_KEPT_EVENTS = 100_000


@dataclass(frozen=True)
class BlockStored:
    """Full blocks joined the prefix cache.

    Attributes:
        block_hashes: one per block, in the order of the sequence. parent_block_hash: of the block before the first one;
            None at the start of a sequence.
        token_ids: the tokens of all these blocks. block_size: tokens per block.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int


@dataclass(frozen=True)
class BlockRemoved:
    """Contents that can no longer be found."""

    block_hashes: list[bytes]


@dataclass(frozen=True)
class AllBlocksCleared:
    """The whole prefix cache was forgotten."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class KVEventsConfig:
    """Argument `kv_events_config` of `LLM(...)`; a dict with these keys does as well.

    Attributes:
        enable_kv_cache_events: keep events, for `LLMEngine.take_kv_events()` to fetch.
        publisher: "null". vLLM can also send events to other machines over ZMQ; this engine cannot.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "null"

    @classmethod
    def from_argument(cls, value: dict | KVEventsConfig | None) -> KVEventsConfig:
        """Raises VLLMValidationError for anything but None, a dict with the keys above, or a KVEventsConfig."""
        if value is None or isinstance(value, cls):
            config = value or cls()
        elif isinstance(value, dict) and value.keys() <= cls.__dataclass_fields__.keys():
            config = cls(**value)
        else:
            raise VLLMValidationError(f"kv_events_config must be a dict with the keys {list(cls.__dataclass_fields__)}"
                                      f" (got {value!r}).", parameter="kv_events_config", value=value)
        if not isinstance(config.enable_kv_cache_events, bool) or config.publisher != "null":
            raise VLLMValidationError("kv_events_config: enable_kv_cache_events must be True or False, and publisher "
                                      f"'null', since this engine sends events to no other machine (got {value!r}).",
                                      parameter="kv_events_config", value=value)
        return config
