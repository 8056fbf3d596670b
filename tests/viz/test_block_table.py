"""The picture of a block table: the right numbers in the right boxes, the same bytes every time."""

import base64
import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.viz.support import TWO_STEPS, crowded_trace, record, trace_of, words
from tools.draw_readme_picture import PICTURE, first_picture
from tutorial_engine.trace import Trace
from tutorial_engine.viz import block_table
from tutorial_engine.viz.block_table import ALL_ROWS, COLUMNS, MAX_ROWS, MAX_TABLES, Layout
from tutorial_engine.viz.pool_state import pool_state, pool_states


def test_same_trace_same_bytes() -> None:
    first, second = block_table(TWO_STEPS, 0), block_table(TWO_STEPS, 0)
    assert first.svg == second.svg and first.text == second.text
    assert first._repr_mimebundle_() == second._repr_mimebundle_()


def test_a_saved_trace_draws_the_same(tmp_path: Path) -> None:
    TWO_STEPS.save(tmp_path / "trace.json")
    assert block_table(Trace.load(tmp_path / "trace.json")).html == block_table(TWO_STEPS).html


def test_text_says_everything() -> None:
    assert block_table(TWO_STEPS, 0).text.splitlines() == [
        "Step 0: 3 blocks in use (1 shared), 4 free",
        "",
        "pool of 8 blocks, 4 tokens each (# can be found by its content)",
        "   0 null           1 req 0+1 #      2 req 0 3/4      3 req 1 1/4"
        "      4 free           5 free           6 free           7 free",
        "free queue after it: 5 → 6 → 7 → 4",
        "",
        "request 0: 7 tokens in 2 blocks [1, 2]",
        "request 1: 5 tokens in 2 blocks [1, 3]",
        "request 2 waits: not enough free blocks",
        "and 1 more wait",
    ]


def test_svg_says_the_same_as_the_text() -> None:
    picture = block_table(TWO_STEPS, 0)
    shown = words(picture.svg)
    assert [word for word in shown if word in {"req 0+1", "req 0", "req 1", "free", "null"}] == [
        "null", "req 0+1", "req 0", "req 1", "free", "free", "free", "free"]  # fmt: skip
    assert "3/4" in shown and "1/4" in shown
    assert "request 1: 5 tokens in 2 blocks" in shown and "request 2 waits: not enough free blocks" in shown
    assert shown.count("#") == 3  # block 1 in the pool, and in two tables


def test_shared_block_has_a_band_for_each_holder() -> None:
    cell = re.search(r'<g transform="[^"]+" data-b="1">(.*?)</g>', block_table(TWO_STEPS, 0).svg)[1]
    bands = re.findall(r'<path class="(p\d)" d="([^"]+)"/>', cell)
    assert bands == [("p0", "M1 1h25v50h-25z"), ("p1", "M26 1h25v50h-25z")]


def test_band_is_as_wide_as_the_block_is_full() -> None:
    assert '<path class="p0" d="M1 1h37v50h-37z"/>' in block_table(TWO_STEPS, 0).svg  # 3 tokens of 4, of 50 pixels


def test_free_blocks_that_can_be_found_are_dashed() -> None:
    picture = block_table(TWO_STEPS, 1)
    assert "   3 free #" in picture.text
    assert picture.svg.count('class="c d"') == 2  # block 3 and the legend
    assert "in line 4" in words(picture.svg)


def test_lengths_come_from_the_last_step_that_says_them() -> None:
    """In step 1 request 2 is not scheduled and was never seen: its blocks count as full. Request 0 has grown."""
    assert "request 0: 8 tokens in 2 blocks [1, 2]" in block_table(TWO_STEPS, 1).text
    assert "request 2: 8 tokens in 2 blocks [1, 4]" in block_table(TWO_STEPS, 1).text
    later = trace_of(TWO_STEPS.records[0], record(1, tables={"1": [1, 3]}))
    assert "request 1: 5 tokens in 2 blocks [1, 3]" in block_table(later).text


def test_a_request_keeps_its_colour() -> None:
    third = '<path class="p2"'  # request 2 is the third that the trace names
    assert third not in block_table(TWO_STEPS, 0).svg and third in block_table(TWO_STEPS, 1).svg
    assert '<path class="p0"' in block_table(TWO_STEPS, 1).svg


def test_the_queue_is_named_only_if_it_was_recorded() -> None:
    assert "free queue" not in block_table(trace_of(record(tables={"0": [1]}, lengths={"0": 4})), 0).text
    full = trace_of(record(tables={"0": [1, 2]}, lengths={"0": 8}), num_blocks=3)
    assert "free queue after it: empty" in block_table(full, 0).text


def test_empty_record() -> None:
    picture = block_table(trace_of(record(3)), 0)
    assert picture.text.splitlines()[0] == "Step 3: 0 blocks in use (0 shared), 7 free"
    assert words(picture.svg).count("free") == 7
    assert "request" not in picture.text


@pytest.mark.parametrize("step", [2, -3])
def test_a_step_that_is_not_there(step: int) -> None:
    with pytest.raises(ValueError, match=f"no step {step} in this trace of 2 steps"):
        block_table(TWO_STEPS, step)
    with pytest.raises(ValueError, match="no step -1 in this trace of 0 steps"):
        block_table(trace_of())


def test_a_large_pool_shows_the_rows_in_use() -> None:
    trace = trace_of(record(tables={"0": [1, 900]}, lengths={"0": 8}, hashed=[500]), num_blocks=1456)
    lines = block_table(trace, 0).text.splitlines()
    assert lines[3].startswith("   0 null           1 req 0")
    assert lines[4] == "   ⋮ blocks 8 to 895: free (1 of them #)"
    assert lines[5].startswith(" 896 free") and " 900 req 0" in lines[5]
    assert lines[6] == "   ⋮ blocks 904 to 1,455: free"
    assert "⋮  blocks 904 to 1,455: free" in words(block_table(trace, 0).svg)
    assert len(block_table(trace).svg) < 10_000


@pytest.mark.parametrize("num_blocks", [2, COLUMNS, COLUMNS + 1, 8 * COLUMNS, 8 * COLUMNS + 1, 1000])
def test_every_block_is_accounted_for(num_blocks: int) -> None:
    used = [1, num_blocks - 1] if num_blocks > 2 else [1]
    trace = trace_of(record(tables={"0": used}, lengths={"0": 4}), num_blocks=num_blocks)
    rows = Layout.of([pool_state(trace, 0)]).rows
    assert [block for first, last, _ in rows for block in range(first, last + 1)] == list(range(num_blocks))
    assert all(any(first <= b <= last and drawn for first, last, drawn in rows) for b in [0, *used])


def test_a_huge_batch_is_cut_and_says_so() -> None:
    """More rows in use than anybody wants to see: the last ones are only counted."""
    table = list(range(1, 1000))
    trace = trace_of(record(tables={"0": table}, lengths={"0": 4 * 999}), num_blocks=1001)
    picture = block_table(trace)
    assert f"⋮ blocks {MAX_ROWS * COLUMNS} to 1,000: {999 - MAX_ROWS * COLUMNS + 1} in use" in picture.text
    assert MAX_ROWS > ALL_ROWS and "976 more" in words(picture.svg) and len(picture.html) < 100_000


def test_all_steps_of_a_player_have_the_same_rows() -> None:
    trace = trace_of(record(0, tables={"0": [1]}, lengths={"0": 4}), record(1, tables={"1": [900]}, lengths={"1": 4}),
                     num_blocks=1456)
    assert [row for *row, drawn in Layout.of(list(pool_states(trace, [0, 1]))).rows if drawn] == [[0, 7], [896, 903]]


def test_many_requests_are_counted_not_drawn() -> None:
    many = {str(i): [i + 1] for i in range(MAX_TABLES + 3)}
    picture = block_table(trace_of(record(tables=many, lengths=dict.fromkeys(many, 4)), num_blocks=32))
    assert picture.text.endswith("and 3 more requests")
    assert picture.text.count("tokens in 1 block") == MAX_TABLES


def test_many_holders_are_counted() -> None:
    many = {str(i): [1] for i in range(9)}
    assert "1 9 req #" in block_table(trace_of(record(tables=many, lengths=dict.fromkeys(many, 4), hashed=[1]))).text


def test_ids_are_escaped() -> None:
    picture = block_table(trace_of(record(tables={'<&"': [1]}, lengths={'<&"': 4})))
    assert 'request <&": 4 tokens in 1 block' in words(picture.svg)
    assert html.escape('request <&"') in picture._repr_mimebundle_()["text/html"]


def test_it_travels_as_an_image(tmp_path: Path) -> None:
    picture = block_table(TWO_STEPS, 0)
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    image = r'<img alt="([^"]+)" style="[^"]+" src="data:image/svg\+xml;base64,([^"]+)"/>'
    found = re.fullmatch(image, bundle["text/html"])
    assert found and found[1].startswith("Step 0: 3 blocks in use (1 shared), 4 free; pool of 8 blocks")
    assert base64.b64decode(found[2]).decode() == picture.svg
    assert bundle["text/plain"] == repr(picture) == picture.text
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == picture.svg + "\n"
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().attrib["role"] == "img"


def test_states_add_up_what_the_records_say() -> None:
    """The slow twin: each step looked up from the first record on, and the pool's own accounting."""
    trace = crowded_trace()
    hashed: set[int] = set()
    for step, state in enumerate(pool_states(trace, range(len(trace)))):
        assert state == pool_state(trace, step) or state.requests != pool_state(trace, step).requests
        hashed = (hashed | set(trace.records[step].hashed)) - set(trace.records[step].unhashed)
        assert state.hashed == hashed
        assert state.num_free == len(state.free)  # a small pool: the whole queue is recorded
        assert state.tokens <= state.slots and set(state.filled) == set(state.owners)
        for request, table in state.tables.items():
            assert len(table) == -(-state.lengths[request] // state.block_size)


def test_readme_shows_what_the_notebook_shows() -> None:
    assert PICTURE.read_text(encoding="utf-8") == first_picture(), "run python tools/draw_readme_picture.py"


def test_pictures_of_the_readme_are_small() -> None:
    readme = (PICTURE.parent.parent.parent / "README.md").read_text(encoding="utf-8")
    for path in PICTURE.parent.iterdir():
        assert f"(docs/images/{path.name})" in readme and path.stat().st_size < 150_000
