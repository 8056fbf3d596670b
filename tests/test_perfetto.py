"""The trace-event export: what the format asks for, and every token and second where it belongs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.viz.support import crowded_trace, record, trace_of
from tutorial_engine.perfetto import ENGINE, REQUESTS, trace_events
from tutorial_engine.simulation import simulate, workload

REQUIRED = {"X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}, "M": {"name", "ph", "pid", "tid", "args"},
            "C": {"name", "ph", "pid", "tid", "ts", "args"}, "i": {"name", "cat", "ph", "s", "pid", "tid", "ts"}}


def slices(events: list[dict[str, Any]], process: int, name: str = "") -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["pid"] == process and (not name or e["name"] == name)]


def test_structure(tmp_path: Path) -> None:
    """Trace Event Format: the phases, their fields and types; complete events of one thread nest or do not touch."""
    trace = simulate(workload(9, rate=20.0), num_blocks=17, max_num_seqs=3)
    trace.export_perfetto(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert set(content) == {"traceEvents", "displayTimeUnit"} and content["displayTimeUnit"] in {"ms", "ns"}
    events = content["traceEvents"]
    for event in events:
        assert set(event) == REQUIRED[event["ph"]], event
        assert all(isinstance(event[k], int) and event[k] >= 0 for k in ("pid", "tid", "ts", "dur") if k in event)
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(v, int) for v in event["args"].values())
    assert Counter(e["ph"] for e in events).keys() == REQUIRED.keys()
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(names)
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))


def test_every_token_is_there() -> None:
    trace = simulate(workload(9, rate=20.0), num_blocks=17, max_num_seqs=3)
    events = trace_events(trace)["traceEvents"]
    computed = sum(r.budget - r.budget_left for r in trace)
    work = [e for e in slices(events, REQUESTS) if e["name"] != "queue"]
    assert sum(e["args"]["tokens"] for e in work) == computed == sum(e["args"]["tokens"] for e in
                                                                     slices(events, ENGINE))
    assert len(slices(events, ENGINE)) == len(trace)
    steps = slices(events, ENGINE)
    assert [e["ts"] for e in steps] == [round(r.started * 1e6) for r in trace]
    assert [e["ts"] + e["dur"] for e in steps] == [round(r.time * 1e6) for r in trace]
    assert sum(e["args"]["tokens"] for e in slices(events, REQUESTS, "prefill")) == sum(
        job.prompt_tokens for job in workload(9, rate=20.0))


def test_the_queue_before_and_after_a_preemption() -> None:
    events = trace_events(crowded_trace())["traceEvents"]
    preempted = [e for e in events if e["ph"] == "i" and e["name"] == "preempted"]
    assert len(preempted) == sum(len(r.preempted) for r in crowded_trace()) > 0
    for event in preempted:
        assert any(e["tid"] == event["tid"] and e["ts"] >= event["ts"] for e in slices(events, REQUESTS, "queue"))
    finished = [e["name"] for e in events if e["ph"] == "i" and e["name"].startswith("finished")]
    assert finished == ["finished: length"] * 6


def test_requests_that_were_there_before() -> None:
    """Recording may begin in the middle: no arrival was seen."""
    events = trace_events(trace_of(record(scheduled={"old": [7, 1]}, started=0.5, time=0.6)))["traceEvents"]
    assert [e["name"] for e in slices(events, REQUESTS)] == ["decode"]
    assert trace_events(trace_of())["traceEvents"][0]["ph"] == "M"
