"""E12: events of the prefix cache. A reader that applies them knows exactly what can be found."""

import random

import pytest

from tests.core.support import make_engine, make_params
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventsConfig

ENABLED = {"enable_kv_cache_events": True}


def test_a_sequence_is_stored_in_one_event() -> None:
    engine = make_engine(kv_events_config=ENABLED)
    engine.add_request("a", list(range(10)), make_params(3))
    engine.step()
    (stored,) = engine.take_kv_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(8)) and stored.block_size == 4
    assert len(stored.block_hashes) == 2 and stored.parent_block_hash is None
    engine.step()
    assert engine.take_kv_events() == []
    engine.step()
    (more,) = engine.take_kv_events()
    assert more.parent_block_hash == stored.block_hashes[1], "the chain goes on"
    assert more.token_ids == [8, 9, 110, 111]
    assert engine.reset_prefix_cache() and engine.take_kv_events() == [AllBlocksCleared()]


def test_a_reader_of_the_events_knows_the_cache() -> None:
    rng, seen, kinds = random.Random(0), set(), set()
    engine = make_engine(num_gpu_blocks=17, max_model_len=40, kv_events_config=KVEventsConfig(**ENABLED))
    pool = engine.scheduler.kv_cache_manager.block_pool
    for i in range(150):
        if rng.random() < 0.3:
            engine.add_request(str(i), [rng.randrange(2) for _ in range(rng.randint(1, 24))], make_params(12))
        if rng.random() < 0.03 and engine.reset_prefix_cache(reset_running_requests=True):
            pass
        engine.step()
        for event in engine.take_kv_events():
            kinds.add(type(event))
            if isinstance(event, BlockStored):
                assert not seen & set(event.block_hashes), "stored once, however many blocks hold it"
                seen |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                seen -= set(event.block_hashes)
            else:
                seen.clear()
        assert seen == set(pool.cached_block_hash_to_block)
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}


def test_off_unless_asked_for() -> None:
    engine = make_engine()
    engine.add_request("a", list(range(10)), make_params(1))
    engine.step()
    assert engine.take_kv_events() == []


@pytest.mark.parametrize("value", [{"publisher": "zmq"}, {"topic": "x"}, True, {"enable_kv_cache_events": 1}])
def test_what_it_cannot_do_is_refused(value: object) -> None:
    with pytest.raises(VLLMValidationError, match="kv_events_config"):
        make_engine(kv_events_config=value)
