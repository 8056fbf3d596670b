"""Recordings replay without the GPU that made them."""

from pathlib import Path

import pytest

from tutorial_engine import recordings
from tutorial_engine.recordings import RECORDINGS, load
from tutorial_engine.viz import batch_occupancy


def test_each_is_described_and_each_description_has_its_file() -> None:
    files = {path.name.removesuffix(".json.gz") for path in Path(recordings.__file__).parent.glob("*.gz")}
    assert files == set(RECORDINGS)


@pytest.mark.parametrize("name", RECORDINGS)
def test_replays(name: str) -> None:
    trace = load(name)
    assert all(record.time > record.started for record in trace)
    assert f"Batch occupancy, {len(trace)} steps" in batch_occupancy(trace).text


def test_a_long_prompt_holds_up_sixteen_that_write_and_chunks_spread_it() -> None:
    def longest(name: str) -> tuple[int, float]:
        record = max(load(name).records[1:], key=lambda r: r.time - r.started)
        return record.num_tokens, record.time - record.started

    (whole, stall), (chunk, short) = longest("llama-8b-stall"), longest("llama-8b-chunks")
    assert (whole, chunk) == (4016, 512) and stall > 5 * short


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="no recording 'a100'. There are: llama-8b-stall, "):
        load("a100")
