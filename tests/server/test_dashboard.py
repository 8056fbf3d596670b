"""The live page: records only while somebody asks, and tells what a full trace would tell."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from tests.server.support import Live, serve_letters, wait_until
from tests.viz.support import busy_trace, record, trace_of
from tutorial_engine.server import dashboard
from tutorial_engine.server.dashboard import CACHED, FREE, SHARED, Dashboard
from tutorial_engine.trace import Trace
from tutorial_engine.viz.activity import activities
from tutorial_engine.viz.pool_state import pool_state


def state_of(live: Live) -> dict[str, Any]:
    return live.http.get("/dashboard/state").json()


def dashboard_of(live: Live) -> Dashboard:
    """The one that the server has put among the engine's listeners."""
    (listener,) = live.llm.llm_engine.listeners
    return listener.__self__


def test_the_page_is_complete(letters: Live) -> None:
    """One file, in light and dark; the browser is told to load nothing else."""
    answer = letters.http.get("/dashboard")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "--p:#ffffff" in answer.text and "prefers-color-scheme:dark){:root{--p:#1b1e22" in answer.text
    assert not re.search(r"https?://|\bsrc=|@import|url\((?!#)", answer.text)


def test_records_only_while_somebody_asks(letters: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched engine plans one step at a time, so nobody may stay by mistake."""
    listeners = letters.llm.llm_engine.listeners
    letters.complete(max_tokens=2)
    assert not listeners
    assert state_of(letters)["steps"] == [] and len(listeners) == 1
    letters.complete(max_tokens=3)
    wait_until(lambda: len(state_of(letters)["steps"]) == 3)
    assert dashboard_of(letters).is_recording and len(listeners) == 1, "two who ask share one recording"
    monkeypatch.setattr(dashboard, "PATIENCE_S", -1.0)
    letters.complete(max_tokens=3)
    wait_until(lambda: not listeners)
    monkeypatch.undo()
    assert state_of(letters)["steps"] == [], "what happened meanwhile is not known"
    listeners.clear()  # as the engine does with a listener that failed
    state_of(letters)
    letters.complete(max_tokens=2)
    wait_until(lambda: len(state_of(letters)["steps"]) == 2)
    listeners.clear()


def test_says_what_a_full_trace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when old steps were dropped, from the page and from the recording."""
    monkeypatch.setattr(dashboard, "WINDOW", 5)
    with serve_letters("a", num_gpu_blocks=33, max_num_seqs=3, max_num_batched_tokens=8, block_size=4) as live:
        state_of(live)
        with Trace(live.llm) as full:
            for k in range(4):
                live.complete(["p" * 9, "p" * 6 + "qrs", f"{k}" * 7, "late"], max_tokens=11, ignore_eos=True)
        wait_until(lambda: state_of(live)["step"] == full.records[-1].step)
        found, kept = state_of(live), dashboard_of(live)
        assert len(full) > 16 * 5 and len(kept._trace) < 16 * 5, "the recording has forgotten some"
        assert len(found["steps"]) == 5
        assert [step[1:] for step in found["steps"]] == [
            [r.budget - r.budget_left, len(r.scheduled)] for r in full.records[-5:]]
        begin = len(full) - 5
        wanted = [[[i - begin, c.kind, c.tokens, int(c.preempted)] for i, c in cells.items() if i >= begin]
                  for cells in activities(full).values()]
        assert sorted(cells for _, cells in found["rows"]) == sorted(cells for cells in wanted if cells)
        pool = pool_state(full, -1)
        cells = [kind for kind, count in found["blocks"] for _ in range(count)]
        assert len(cells) == found["num_blocks"] == 33
        for block, kind in enumerate(cells):
            owners = pool.owners.get(block, [])
            assert kind == (SHARED if len(owners) > 1 else kept._numbers[owners[0]] if owners else
                            CACHED if block in pool.hashed else FREE)
        assert (found["running"], found["waiting"], found["in_use"]) == (0, 0, 0), "as it is now"
        live.llm.llm_engine.listeners.clear()


def test_a_request_keeps_its_number() -> None:
    """And so its colour, while others come and go."""
    board = Dashboard(None, "")
    for seen, wanted in ((["a", "b"], [1, 2]), (["b", "c"], [2, 3]), (["c", "a"], [3, 4]), ([], []), (["x"], [1])):
        board._number(seen)
        assert list(board._numbers.values()) == wanted and list(board._numbers) == seen


def test_a_large_pool_is_drawn_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_CELLS", 4)
    trace = trace_of(record(0, tables={"a": [4], "b": [4, 9]}, lengths={"a": 1, "b": 3}, hashed=[1]), num_blocks=11)
    board = Dashboard(None, "")
    board._number(["a", "b"])
    assert board._blocks(pool_state(trace, 0)) == {"blocks_per_cell": 3, "blocks": [[CACHED, 1], [SHARED, 1], [FREE, 1],
                                                                                    [2, 1]]}


def test_latencies() -> None:
    """TTFT ends with the last chunk of the prompt, ITL is from token to token; a preempted request's second prefill is
    no first token."""
    def step(number: int, ends: float, scheduled: dict[str, list[int]], **more: Any) -> Any:
        sampled = {request: [1] for request in scheduled if request != "chunk"}
        return dataclasses.replace(record(number), started=ends - 0.1, time=ends, scheduled=scheduled, sampled=sampled,
                                   **more)

    trace = trace_of(step(0, 1.0, {"a": [0, 4], "chunk": [0, 3]}, arrived={"a": [0.5, 4], "chunk": [-1.0, 9]}),
                     step(1, 1.2, {"a": [4, 1]}), step(2, 2.0, {"a": [0, 6]}), step(3, 2.1, {"a": [6, 1]}))
    found = dashboard._latencies(trace)
    assert found["ttfts"] == [[0, 500.0]] and found["ttft_ms"] == [500.0, 500.0]
    assert found["itl_ms"] == [200.0, 800.0], "of 100, 200 and 800 ms"
    assert found["tokens_per_s"] == round(4 / 1.2, 1)
    assert [dashboard._step(b, a)[0] for a, b in zip([None, *trace], trace)] == pytest.approx([100, 100, 100, 100])


@pytest.mark.parametrize("keep", [1, 7, 30, 1000])
def test_forgetting_changes_nothing_that_is_shown(keep: int) -> None:
    """Pool and activities of the records that stay are as they were; the original records are not touched."""
    full, short = busy_trace(60), busy_trace(60)
    before = json.dumps([dataclasses.asdict(r) for r in short])
    records = list(short.records)
    short.forget(keep)
    assert len(short) == min(keep, len(full)) and short.records[-1].step == full.records[-1].step
    begin = len(full) - len(short)
    for i in range(len(short)):
        one, other = pool_state(full, begin + i), pool_state(short, i)
        for name in ("tables", "lengths", "owners", "filled", "hashed", "free", "waiting"):
            assert getattr(one, name) == getattr(other, name), name
    rows = {r: {i - begin: c for i, c in cells.items() if i >= begin} for r, cells in activities(full).items()}
    assert {r: cells for r, cells in activities(short).items() if cells} == {r: c for r, c in rows.items() if c}
    assert json.dumps([dataclasses.asdict(r) for r in records]) == before


def test_forgetting_keeps_no_block_that_was_overwritten() -> None:
    trace = trace_of(record(0, hashed=[1, 2, 3]), record(1, unhashed=[1]), record(2, unhashed=[2], hashed=[1]),
                     record(3))
    trace.forget(2)
    assert (trace.records[0].hashed, trace.records[0].unhashed) == ([1, 3], [])
    trace.forget(1)
    assert trace.records[0].hashed == [1, 3] and pool_state(trace, 0).hashed == {1, 3}


def test_who_may_look() -> None:
    """As at /metrics: without a key. It gives away neither prompts nor ids that requests could be ended by."""
    with serve_letters("hello", options={"api_key": ["sesame"]}) as live:
        live.http.headers.pop("authorization")
        assert live.http.get("/v1/models").status_code == 401
        assert live.http.get("/dashboard").status_code == live.http.get("/dashboard/state").status_code == 200
        live.http.headers["authorization"] = "Bearer sesame"
        live.complete("mypromptzz", request_id="myidzz", max_tokens=5)
        wait_until(lambda: state_of(live)["steps"])
        text = live.http.get("/dashboard/state").text
        assert "zz" not in text and "hello" not in text
        live.llm.llm_engine.listeners.clear()
