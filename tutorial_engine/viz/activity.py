"""What each request did in each step of a trace: the rows of the batch occupancy and of the timeline.

    request 0   prefill 16   prefill 7   decode 1   decode 1   finished: length
    request 1   waits        prefill 9   decode 1   preempted  waits   recompute 10   decode 1 ...

Owns: telling the kinds apart. Does not own: drawing (`occupancy.py`, `timeline.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tutorial_engine.trace import StepRecord, Trace


@dataclass(frozen=True)
class Activity:
    """One request in one step.

    Attributes:
        kind: "prefill": its prompt, or a chunk of it, is computed. "decode": a token that it wrote is read.
            "recompute": what a preemption threw away is computed again. "waiting": it is in the queue. "held": it has
            a seat and blocks, and the step has no budget left for it.
        tokens: computed. cached: found in the prefix cache, if it was admitted in this step.
        preempted: it lost its blocks in this step.
        remark: why it waits, or the reason it finished for.
    """

    kind: str
    tokens: int = 0
    cached: int = 0
    preempted: bool = False
    remark: str = ""


def activities(trace: Trace) -> dict[str, dict[int, Activity]]:
    """request, in order of arrival -> {position of the record in the trace: what it did}."""
    rows: dict[str, dict[int, Activity]] = {}
    prompts: dict[str, int] = {}
    computed: dict[str, int] = {}  # request -> tokens in its table
    redo: dict[str, int] = {}  # request -> tokens that it had when it was preempted
    for i, record in enumerate(trace.records[:]):
        prompts |= {request: int(prompt) for request, (_, prompt) in record.arrived.items()}
        for request in [*record.arrived, *record.scheduled, *record.running, *record.waiting]:
            rows.setdefault(request, {})
        for request in record.preempted:
            redo[request] = max(redo.get(request, 0), computed.get(request, 0))
        for request in dict.fromkeys([*record.scheduled, *record.running, *record.waiting]):
            rows[request][i] = _activity(record, request, prompts.get(request, 0), redo.get(request, 0))
        computed |= record.lengths
    return rows


def _activity(record: StepRecord, request: str, prompt: int, redo: int) -> Activity:
    if request in record.scheduled:
        start, tokens = record.scheduled[request]
        kind = "recompute" if start < redo else "prefill" if start < prompt else "decode"
        return Activity(kind, tokens, record.cached.get(request, 0), remark=record.finished.get(request, ""))
    if request in record.waiting:
        return Activity("waiting", preempted=request in record.preempted,
                        remark=record.waiting[request] or "behind others")
    return Activity("held", remark="no budget left in this step")
