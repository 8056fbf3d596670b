"""The player as a file: small, the same every time, nothing in it that could break out. What it does in a browser is
tested in `tests/browser`."""

import functools
import json
import re
from pathlib import Path

import pytest

from tests.viz.support import TWO_STEPS, busy_trace, crowded_trace, record, trace_of
from tutorial_engine.simulation import simulate, workload
from tutorial_engine.trace import StepRecord, Trace
from tutorial_engine.viz import batch_occupancy, block_table, memory_map, timeline
from tutorial_engine.viz import player as player_module
from tutorial_engine.viz.palette import DARK, LIGHT, NAMES, NUM_COLORS
from tutorial_engine.viz.player import MAX_BYTES, MAX_FRAMES, MIN_FRAMES, sentences, steps_to_show

VIEWS = [block_table, batch_occupancy, memory_map, timeline]


def payload(page: str) -> dict:
    return json.loads(re.search(r"\}\)\((\{.*\})\)</script>", page, re.DOTALL)[1])


@pytest.mark.parametrize("view", VIEWS)
def test_two_hundred_steps_are_less_than_100_kb(view, tmp_path: Path) -> None:
    trace = busy_trace(200, 65)
    assert len(trace) == 200 and all(len(r.scheduled) >= 1 for r in trace)
    assert max(len(r.scheduled) for r in trace) == 8
    page = view(trace).html
    assert len(page.encode()) < 100_000
    trace.save(tmp_path / "trace.json")
    assert view(Trace.load(tmp_path / "trace.json")).html == page  # byte for byte


@pytest.mark.parametrize("view", VIEWS)
def test_another_trace_has_another_name(view) -> None:
    def ident(trace: Trace) -> str:
        return re.match(r'<div data-te="([0-9a-f]{10})" tabindex="0" ', view(trace).html)[1]

    assert ident(busy_trace(40)) == ident(busy_trace(40)) != ident(busy_trace(41))


@pytest.mark.parametrize("view", VIEWS)
def test_one_piece_of_html_with_an_image_and_a_text(view) -> None:
    player = view(busy_trace(40))
    bundle = player._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and bundle["text/plain"] == repr(player)
    assert "40 steps" in bundle["text/plain"].splitlines()[0]
    page = bundle["text/html"]
    assert [page.count(tag) for tag in ("<img ", "<script>", "</script>", "<style>", "</style>")] == [1] * 5
    assert page.index("<img ") < page.index("<style>") < page.index("<script>") and 'aria-label="' in page
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "import(" not in page  # nothing comes from elsewhere
    assert payload(page)["num"] == 40


def test_ids_cannot_break_out() -> None:
    name = "</script><b>\u2028'\"&"
    trace = trace_of(record(tables={name: [1]}, lengths={name: 4}, scheduled={name: [0, 4]}, waiting={name: name}))
    for view in VIEWS:
        page = view(trace).html
        assert page.count("</script>") == 1 and "<b>" not in page and "\u2028" not in page
    assert payload(block_table(trace).html)["r"] == [name]


def test_long_traces_are_thinned_out() -> None:
    assert steps_to_show(busy_trace(40), 1) == list(range(40)) and steps_to_show(busy_trace(40), 13) == [0, 13, 26, 39]
    trace = trace_of(*[record(i, tables={"0": [1 + i % 7]}, lengths={"0": 4}) for i in range(1000)])
    page = payload(block_table(trace).html)
    assert page["num"] == len(page["frames"]) == 334 <= MAX_FRAMES and page["frames"][-1][0] == 999


@functools.cache
def full_trace() -> Trace:
    """400 steps of 64 blocks with up to 24 requests, who come and go all the time."""
    trace = simulate(workload(220), num_blocks=65, max_num_seqs=24, max_num_batched_tokens=64)
    del trace.records[400:]
    assert len(trace) == 400 and max(len(r.tables) for r in trace) > 16
    return trace


@pytest.mark.parametrize("trace", [lambda: busy_trace(400, 65), lambda: busy_trace(400, 33), full_trace])
@pytest.mark.parametrize("view", VIEWS)
def test_four_hundred_steps_are_less_than_100_kb(view, trace) -> None:
    """Steps are left out until the player is small enough; then it says so, and its last step is the run's."""
    player = view(trace())
    page = player.html
    assert len(page.encode()) < MAX_BYTES == 100_000
    shown = payload(page)
    left_out = shown["num"] < 400
    assert left_out == ("one step in " in player.text.splitlines()[0]) == shown["hint"].startswith("one step in ")
    assert "400 steps" in player.text.splitlines()[0] and shown["num"] >= MIN_FRAMES
    if view is block_table:
        assert shown["frames"][-1][0] == 399
    else:
        assert shown["say"][0][shown["say"][1][-1][0]].startswith("Step \1") and shown["say"][1][-1][1] == 399


def test_a_memory_map_that_leaves_steps_out_still_counts_them() -> None:
    player, whole = memory_map(full_trace()), memory_map(full_trace(), -1)
    assert player.text.splitlines()[1:] == whole.text.splitlines()  # the sums and the letters
    assert "one step in " in player.svg and "one step in " not in whole.svg
    assert player.svg.count('class="r ') < whole.svg.count('class="r ')
    assert "one step in " not in memory_map(busy_trace(40)).svg


def test_a_picture_that_no_thinning_makes_small_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player_module, "MAX_BYTES", 10)
    assert MIN_FRAMES <= batch_occupancy(busy_trace(200))._payload["num"] <= MIN_FRAMES + 1


def test_the_block_table_begins_where_most_is_to_be_seen() -> None:
    player = block_table(trace_of(*TWO_STEPS.records, record(2, tables={"2": [1]}, lengths={"2": 3})))
    assert player._payload["at"] == 0 and "Step 0: 3 blocks in use" in player.text and "Step 0: 3 blocks" in player.svg
    assert block_table(trace_of(record(0), *TWO_STEPS.records))._payload["at"] == 1
    assert batch_occupancy(TWO_STEPS)._payload["at"] == 1  # the whole picture is there from the beginning


@pytest.mark.parametrize("view", VIEWS)
def test_a_player_opens_at_a_step(view) -> None:
    trace = crowded_trace()
    assert view(trace, start=5)._payload["at"] == 5 and view(trace, start=-2)._payload["at"] == len(trace) - 2
    with pytest.raises(ValueError, match="no step 1000 in this trace"):
        view(trace, start=1000)
    with pytest.raises(ValueError, match="give one of the two"):
        view(trace, 3, start=5)
    long = trace_of(*[record(i, tables={"0": [1]}, lengths={"0": 4}) for i in range(1000)])
    steps = steps_to_show(long, 3)
    at = view(long, start=500)._payload["at"]
    assert steps[at] <= 500 < steps[at + 1]


@pytest.mark.parametrize("view", VIEWS)
def test_names_in_place_of_ids(view) -> None:
    """Like a trace whose ids were the names; pictures of a step, too."""
    record = {"scheduled": {"33": [0, 4], "34": [0, 5]}, "tables": {"33": [1], "34": [2, 3]}, "running": ["33", "34"],
              "lengths": {"33": 4, "34": 5}, "arrived": {"33": [0, 4], "34": [0, 5]}, "sampled": {"33": [1], "34": [2]}}

    def named(first: str, second: str) -> Trace:
        text = json.dumps(record).replace("33", first).replace("34", second)
        return trace_of(StepRecord(step=0, time=0.0, budget=64, budget_left=55, **json.loads(text)))

    trace = named("33", "34")
    for names, called in ((["Ada", "Ben"], ("Ada", "Ben")), ({"34": "Ben"}, ("0", "Ben")), (None, ("0", "1")),
                          (["Ada"], ("Ada", "1")), ({"33": "33", "34": "34"}, ("33", "34"))):
        assert called == ("33", "34") or view(trace, names=names).html == view(named(*called)).html
        shown = view(trace, 0, names=names)
        assert all(name in shown.text + shown.svg for name in called)
    assert list(trace.records[0].tables) == ["33", "34"]


def test_sentences_are_stored_short() -> None:
    lines = ["Step 1: 12.5 % of 1,024", "Step 2: 100 % of 007.", "no number", "Step 3: 1 % of 2"]
    forms, rows = sentences(lines)
    assert forms == ["Step \1: \1 % of \1", "Step \1: \1 % of \1.", "no number"]
    assert rows == [[0, 1, "12.5", "1,024"], [1, 2, 100, "007"], [2], [0, 3, 1, 2]]


def test_saved_as_a_page_or_as_an_image(tmp_path: Path) -> None:
    player = block_table(TWO_STEPS)
    player.save(tmp_path / "run.html")
    player.save(tmp_path / "run.svg")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and player.html in page
    assert (tmp_path / "run.svg").read_text(encoding="utf-8") == player.svg + "\n"


# Colours


def linear(color: str) -> list[float]:
    values = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def luminance(color: str) -> float:
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(color)))


def contrast(a: str, b: str) -> float:
    """WCAG 2.1's contrast ratio."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_can_be_read_on_every_ground(theme: tuple[str, ...]) -> None:
    colors = dict(zip(NAMES, theme, strict=True))
    for ground in ["p", "f", *map(str, range(NUM_COLORS))]:
        assert contrast(colors["i"], colors[ground]) >= 4.5, ground
    assert contrast(colors["g"], colors["p"]) >= 4.5


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1.0, for linear RGB.
DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b* of linear RGB, white D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * v for m, v in zip(row, rgb)) / white for row, white in zip(matrix, (0.9505, 1.0, 1.089))]
    f = [v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in xyz]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_the_colour_blind_can_tell_the_colours_apart(theme: tuple[str, ...], deficiency: str) -> None:
    """The distance (CIE 1976) of any two colours; about 2.3 is just noticeable."""
    seen = {}
    for name, color in zip(NAMES, theme):
        if name.isdigit():
            rgb = [min(max(sum(m * v for m, v in zip(row, linear(color))), 0), 1) for row in DEFICIENCIES[deficiency]]
            seen[name] = lab(rgb)
    close = {(a, b): d for a in seen for b in seen if a < b
             and (d := sum((x - y) ** 2 for x, y in zip(seen[a], seen[b])) ** 0.5) < 9}
    assert not close
