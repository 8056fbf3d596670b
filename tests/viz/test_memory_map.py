"""The memory map: every slot counted, and who was where."""

import pytest

from tests.viz.support import TWO_STEPS, crowded_trace, record, trace_of, words
from tutorial_engine.simulation import Job, simulate
from tutorial_engine.viz import memory_map


def test_slots_are_counted_one_by_one() -> None:
    """The slow twin: walk over every slot of every block in every step."""
    trace, held, slots, known = crowded_trace(), 0, 0, {}
    for r in trace:
        known |= r.lengths
        occupied: dict[int, list[bool]] = {}
        for request, table in r.tables.items():
            for position in range(len(table) * trace.block_size):
                block = occupied.setdefault(table[position // trace.block_size], [False] * trace.block_size)
                block[position % trace.block_size] |= position < known[request]
        slots += sum(map(len, occupied.values()))
        held += sum(map(sum, occupied.values()))
    assert memory_map(trace).text.splitlines()[1] == (
        f"{100 * (slots - held) / slots:.3g} % of the memory in use was wasted: of {slots:,} slots × steps, {held:,} "
        "held a token")


def test_text_has_a_letter_for_each_block_and_step() -> None:
    assert memory_map(TWO_STEPS, 1).text.splitlines()[1:] == [
        "",
        "a letter for each request, + shared, # free and can still be found; one column is a step",
        "block 1 |++",
        "block 2 |00",
        "block 3 |1#",
        "block 4 | 2"]  # fmt: skip
    assert memory_map(TWO_STEPS, 0).text.splitlines()[3:] == ["block 1 |+", "block 2 |0", "block 3 |1"]


def test_a_reservation_for_each_request() -> None:
    trace = trace_of(record(0, tables={"0": [1, 2], "1": [1, 3]}, lengths={"0": 7, "1": 5}))
    lines = memory_map(trace, reserve=16).text.splitlines()
    assert lines[1].startswith("33.3 % of the memory in use was wasted: of 12 slots × steps, 8 held")
    assert lines[2] == "with 16 slots reserved for each request: 62.5 % wasted of 32 slots × steps"  # 32 - 7 - 5
    with pytest.raises(ValueError, match="reserve is 6 tokens for each request, and one has 7"):
        memory_map(trace, reserve=6)


def test_smaller_blocks_waste_less() -> None:
    """C3: the last block of a request is half full on average, whatever its size."""
    def waste(block_size: int) -> float:
        trace = simulate([Job(5, 50)] * 3, block_size=block_size, num_blocks=1 + 1024 // block_size)
        return float(memory_map(trace, -1).text.partition(" ")[0])

    assert 0 == waste(1) < waste(4) < waste(16) < waste(64)


def test_player_says_where_the_memory_went() -> None:
    player = memory_map(TWO_STEPS, reserve=8)
    assert player._payload["say"][0] == ("Step 0: 3 blocks are 12 slots, 8 hold a token: 33.3 % wasted; reserved would "
                                         "be 16: 25 %")
    assert player._payload["tips"] == ["block 1, step 0: requests 0, 1", "block 1, step 1: requests 0, 2",
                                       "block 2, steps 0 to 1: request 0", "block 3, step 0: request 1",
                                       "block 4, step 1: request 2"]
    assert player.svg.count('class="r ') == 5


def test_nothing_in_use_and_very_much() -> None:
    assert memory_map(trace_of(record()), 0).text.startswith("0 % of the memory in use was wasted")
    table = list(range(1, 200))
    picture = memory_map(trace_of(record(tables={"0": table}, lengths={"0": 796}), num_blocks=300), 0)
    assert "and 103 more blocks" in words(picture.svg) and picture.text.endswith("and 167 more blocks")
