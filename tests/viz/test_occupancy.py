"""The batch occupancy: what a request did in a step, told from the records alone, and drawn."""

import re

import pytest

from tests.viz.support import crowded_trace, record, trace_of, words
from tutorial_engine.viz import batch_occupancy
from tutorial_engine.viz.activity import Activity, activities
from tutorial_engine.viz.occupancy import MAX_ROWS, runs

LIFE = trace_of(
    record(0, arrived={"a": [0.0, 6], "b": [0.0, 2]}, scheduled={"a": [0, 4]}, budget=4, budget_left=0,
           waiting={"b": "the token budget of this step is spent"}, running=["a"], lengths={"a": 4}),
    record(1, scheduled={"a": [4, 2], "b": [1, 1]}, cached={"b": 1}, budget=4, budget_left=1, running=["a", "b"],
           lengths={"a": 6, "b": 2}),
    record(2, scheduled={"a": [6, 1]}, budget=1, budget_left=0, running=["a", "b"], lengths={"a": 7}),
    record(3, scheduled={"b": [2, 1]}, budget=4, budget_left=3, preempted=["a"], running=["b"],
           waiting={"a": "preempted in this step"}, lengths={"b": 3}, finished={"b": "stop"}),
    record(4, scheduled={"a": [0, 4]}, budget=4, budget_left=0, running=["a"], lengths={"a": 4}),
    record(5, scheduled={"a": [4, 4]}, budget=4, budget_left=0, running=["a"], lengths={"a": 8}),
    record(6, scheduled={"a": [8, 1]}, budget=4, budget_left=3, lengths={"a": 9}, finished={"a": "length"}),
)


def test_a_life_in_a_row() -> None:
    assert activities(LIFE) == {
        "a": {0: Activity("prefill", 4), 1: Activity("prefill", 2), 2: Activity("decode", 1),
              3: Activity("waiting", preempted=True, remark="preempted in this step"), 4: Activity("recompute", 4),
              5: Activity("recompute", 4), 6: Activity("decode", 1, remark="length")},
        "b": {0: Activity("waiting", remark="the token budget of this step is spent"),
              1: Activity("prefill", 1, cached=1), 2: Activity("held", remark="no budget left in this step"),
              3: Activity("decode", 1, remark="stop")}}  # fmt: skip


def test_text_is_a_letter_for_each_step() -> None:
    assert batch_occupancy(LIFE, 6).text.splitlines() == [
        "2 requests in 7 steps: 1.14 in a step on average, 18 tokens computed, 1 preemption",
        "",
        "P prefill, D decode, R computed again, . waits, x preempted, - has a seat; one column is a step",
        "req a |PPDxRRD",
        "req b |.P-D"]
    assert batch_occupancy(LIFE, 2).text.splitlines()[3:] == ["req a |PPD", "req b |.P-"]


def test_every_token_and_step_is_in_the_picture() -> None:
    trace = crowded_trace()
    rows = activities(trace)
    assert sum(cell.tokens for cells in rows.values() for cell in cells.values()) == sum(
        n for r in trace for _, n in r.scheduled.values())
    for cells in rows.values():
        joined = list(runs(cells, len(trace), join=False))
        assert [i for run in joined for i in range(run.first, run.last + 1)] == sorted(cells)
        assert sum(run.tokens for run in joined) == sum(cell.tokens for cell in cells.values())
    kinds = {cell.kind for cells in rows.values() for cell in cells.values()}
    assert kinds >= {"prefill", "decode", "recompute", "waiting"}
    for request, cells in rows.items():  # what was recomputed is what a preemption had thrown away
        again = [i for i, cell in cells.items() if cell.kind == "recompute"]
        assert all(any(request in r.preempted for r in trace.records[:i]) for i in again)


def test_hovering_says_what_happened() -> None:
    player = batch_occupancy(LIFE)
    tips = player._payload["tips"]
    assert len(tips) == player.svg.count('class="r ')  # one for each box, in the same order
    assert tips[0] == "request a, step 0: prefill, 4 tokens"
    assert "request a, step 3: waits: preempted in this step, preempted: its blocks were taken away" in tips
    assert "request b, step 1: prefill, 1 token, 1 found in the cache" in tips
    assert "request b, step 3: decode, 1 token, finished: stop" in tips
    assert player._payload["say"][0] == ("Step 0: 1 request, 4 of 4 tokens; 1 wait (the token budget of this step is "
                                         "spent)")
    xs = player._payload["xs"]
    assert len(xs) == 8 and xs == sorted(xs)


def test_numbers_stand_in_the_cells() -> None:
    shown = words(batch_occupancy(LIFE, 6).svg)
    assert {"req a", "req b", "4", "2", "1"} <= set(shown) and "most 4" in shown and "of 4" in shown


def test_the_bars_add_up_to_what_was_computed() -> None:
    """The heights of the bars above the rows, as a share of the highest: tokens by kind."""
    svg = batch_occupancy(LIFE, 6).svg

    def area(style: str) -> float:
        path = re.search(rf'<path class="{style}" d="([^"]+)"/>', svg)[1]
        return sum(float(w) * -float(h) for w, h in re.findall(r"h([\d.]+)v(-?[\d.]+)", path))

    per_token = 26 * 30 / 4  # a column's width, times the bars' height over the most tokens in a step
    assert area("p0") == pytest.approx(7 * per_token, rel=0.02)
    assert area("p5") == pytest.approx(8 * per_token, rel=0.02)


def test_many_requests_and_no_steps() -> None:
    crowd = {f"a request with quite a long name {i}": [0, 1] for i in range(MAX_ROWS + 5)}
    picture = batch_occupancy(trace_of(record(scheduled=crowd)), 0)
    assert "and 5 more requests" in words(picture.svg)
    assert picture.svg.count('class="r ') == MAX_ROWS
    with pytest.raises(ValueError, match="no step -1 in this trace of 0 steps"):
        batch_occupancy(trace_of())
    with pytest.raises(ValueError, match="no step 7"):
        batch_occupancy(LIFE, 7)
