"""A trace in the trace-event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

    process "engine"     one slice per step; counters: tokens, blocks in use, requests
    process "requests"   one track per request:   [queue][prefill 32][decode][decode] ...

The format is Google's: "Trace Event Format", events of the phases X (a slice), i (an instant), C (a counter) and M (a
name); times are in microseconds.
Owns: the mapping. Does not own: what is in a trace (`trace.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorial_engine.trace import StepRecord, Trace

ENGINE, REQUESTS = 1, 2  # process ids


def trace_events(trace: Trace) -> dict[str, Any]:
    """The trace as a dict that is ready for `json.dump`."""
    events = [_name("process_name", ENGINE, 0, "engine"), _name("thread_name", ENGINE, 0, "steps"),
              _name("process_name", REQUESTS, 0, "requests")]
    tracks: dict[str, int] = {}  # request -> thread id, in order of arrival
    prompts: dict[str, int] = {}
    since: dict[str, int] = {}  # request in the queue -> when it came there
    for record in trace:
        for request, (arrived, prompt) in record.arrived.items():
            prompts[request] = int(prompt)
            since[request] = _microseconds(max(arrived, 0.0))
            if request not in tracks:
                tracks[request] = len(tracks)
                events.append(_name("thread_name", REQUESTS, tracks[request], f"request {request}"))
        begin, end = _microseconds(record.started), _microseconds(record.time)
        events += _step(trace, record, begin, end)
        for request, (start, num_tokens) in record.scheduled.items():
            if request in since:
                queued = since.pop(request)
                events.append(_slice("queue", REQUESTS, tracks[request], queued, begin))
            kind = "prefill" if start < prompts.get(request, 0) else "decode"
            details = {"step": record.step, "first token": start, "tokens": num_tokens,
                       "from the prefix cache": record.cached.get(request, 0)}
            events.append(_slice(kind, REQUESTS, tracks.setdefault(request, len(tracks)), begin, end, details))
        for request in record.preempted:
            since[request] = end
            events.append(_instant("preempted", tracks.setdefault(request, len(tracks)), begin))
        for request, reason in record.finished.items():
            events.append(_instant(f"finished: {reason}", tracks[request], end))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(trace: Trace, record: StepRecord, begin: int, end: int) -> list[dict[str, Any]]:
    counters = {"tokens in the step": {"tokens": record.num_tokens},
                "blocks": {"in use": len({b for table in record.tables.values() for b in table})},
                "requests": {"running": len(record.running), "waiting": len(record.waiting)}}
    work = {"tokens": record.num_tokens, "budget": record.budget}
    return [_slice(f"step {record.step}", ENGINE, 0, begin, end, work),
            *({"name": name, "ph": "C", "pid": ENGINE, "tid": 0, "ts": begin, "args": values}
              for name, values in counters.items())]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, process: int, thread: int, begin: int, end: int, details: dict[str, Any] | None = None
           ) -> dict[str, Any]:
    return {"name": name, "cat": "tutorial_engine", "ph": "X", "pid": process, "tid": thread, "ts": begin,
            "dur": max(end - begin, 0), "args": details or {}}


def _instant(name: str, thread: int, when: int) -> dict[str, Any]:
    return {"name": name, "cat": "tutorial_engine", "ph": "i", "s": "t", "pid": REQUESTS, "tid": thread, "ts": when}
