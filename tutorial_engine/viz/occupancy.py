"""Batch occupancy: one row for each request, one column for each step, and above them what each step computed.

    batch_occupancy(trace)       who waited and why, whose prompt was cut into chunks, who was put off, where seats
                                 stayed empty: continuous batching at a glance

Owns: this picture. Does not own: what each request did (`activity.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tutorial_engine.trace import Names, StepRecord, Trace
from tutorial_engine.viz.activity import Activity, activities
from tutorial_engine.viz.axis import LEFT, WIDTH, Steps, num_steps_up_to, rectangle
from tutorial_engine.viz.palette import CACHED, DECODE, PREFILL, RECOMPUTE
from tutorial_engine.viz.picture import Picture, box, document, text
from tutorial_engine.viz.player import Player, fitting_player, frame_of

STYLES = {"prefill": f"p{PREFILL}", "decode": f"p{DECODE}", "recompute": f"p{RECOMPUTE}", "waiting": "w", "held": "z"}
LETTERS = {"prefill": "P", "decode": "D", "recompute": "R", "waiting": ".", "held": "-"}
TOP, STRIP = 56, 44  # pixels
MAX_ROWS = 120


@dataclass
class Run:
    """The same activity in consecutive steps, first to last."""

    first: int
    last: int
    activity: Activity
    tokens: int = 0

    def says(self, request: str) -> str:
        a = self.activity
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        words = {"waiting": f"waits: {a.remark}", "held": a.remark}.get(
            a.kind, f"{a.kind}, {self.tokens:,} token{'s' * (self.tokens != 1)}")
        if a.cached:
            words += f", {a.cached:,} found in the cache"
        if a.preempted:
            words += ", preempted: its blocks were taken away"
        if a.remark and a.tokens:
            words += f", finished: {a.remark}"
        return f"request {request}, {steps}: {words}"


def batch_occupancy(trace: Trace, step: int | None = None, *, names: Names = None,
                    start: int | None = None) -> Picture:
    """Draw who is in which step.

    Args:
        trace: a recorded run.
        step: draw the trace only up to this step; negative ones count from the end. None: a player over all steps.
        names: what the requests are called: ``{"33": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        start: the step at which the player opens; None: the last.

    Raises:
        ValueError: the trace has no such step, or both `step` and `start` are given.
    """
    trace = trace.named(names)
    num_steps = num_steps_up_to(trace, step, start)
    chart = _Chart(trace, num_steps)
    if step is not None:
        return Picture(chart.svg, chart.text)

    def player(steps: list[int]) -> Player:
        xs = [round(chart.steps.x(i), 1) for i in [*steps, num_steps]]
        return Player(chart.svg, chart.text, "strip", len(steps), f"Batch occupancy, {num_steps:,} steps",
                      {"w": WIDTH, "h": chart.height, "xs": xs, "y0": TOP - 4, "y1": chart.bottom,
                       "say": [describe(trace.records[i]) for i in steps], "tips": chart.tips},
                      frame_of(trace, steps, start))

    return fitting_player(trace, player)


def describe(record: StepRecord) -> str:
    """One step in one sentence."""
    words = (f"Step {record.step}: {len(record.scheduled)} request{'s' * (len(record.scheduled) != 1)}, "
             f"{record.num_tokens:,} of {record.budget:,} tokens")
    if record.waiting:
        why = next((f" ({reason})" for reason in record.waiting.values() if reason), "")
        words += f"; {len(record.waiting)} wait{why}"
    if record.preempted:
        words += f"; preempted: {', '.join(record.preempted[:4])}"
    return words


def runs(cells: dict[int, Activity], num_steps: int, join: bool) -> Iterator[Run]:
    """The cells of one row, equal neighbours joined. A chunk of a prompt stays alone unless `join`."""
    run: Run | None = None
    for i in range(num_steps):
        cell = cells.get(i)
        same = (run is not None and cell is not None and cell.kind == run.activity.kind and not cell.preempted
                and not cell.cached and (cell.kind == "decode" or cell.remark == run.activity.remark)
                and (join or cell.tokens <= 1 and run.activity.tokens <= 1))
        if same:
            run.last, run.tokens = i, run.tokens + cell.tokens
            if cell.remark != run.activity.remark:
                run.activity = cell  # the last of them says how the request ended
            continue
        if run is not None:
            yield run
        run = Run(i, i, cell, cell.tokens) if cell is not None else None
    if run is not None:
        yield run


class _Chart:
    """The drawing of the first steps of a trace.

    Attributes:
        svg, text: as of a `Picture`. height, bottom: of the picture, and where the rows end.
        tips: what each of the boxes of class "r" says, in the order in which they are drawn.
    """

    def __init__(self, trace: Trace, num_steps: int) -> None:
        self.records, self.num_steps = trace.records[:num_steps], num_steps
        rows = activities(trace)
        self.rows = {request: cells for request, cells in rows.items() if any(i < num_steps for i in cells)}
        self.steps = Steps(num_steps)
        shown = min(len(self.rows), MAX_ROWS)
        self.row = 20 if shown <= 24 else max(5, 480 // shown)
        self.first_row = TOP + 2 * STRIP + 22
        self.bottom = self.first_row + shown * self.row + 4
        self.height = self.bottom + 62
        self.tips: list[str] = []
        self.svg = self._svg()
        self.text = self._text()

    @property
    def title(self) -> str:
        tokens = sum(r.num_tokens for r in self.records)
        mean = sum(len(r.scheduled) for r in self.records) / self.num_steps
        again = len([1 for r in self.records for _ in r.preempted])
        return (f"{len(self.rows):,} requests in {self.num_steps:,} steps: {mean:.3g} in a step on average, "
                f"{tokens:,} tokens computed" + (f", {again} preemption{'s' * (again != 1)}" if again else ""))

    def _svg(self) -> str:
        parts = [text(16, 26, self.title, "t"), *self._strips(), *self._rows(), *self.steps.labels(self.first_row - 6),
                 *self._legend()]
        return document(WIDTH, self.height, self.title, "".join(parts))

    def _strips(self) -> Iterator[str]:
        """Two bars for each step: the tokens it computed by kind, and the requests in it and behind it."""
        most = max(max(r.num_tokens for r in self.records), 1)
        base = TOP + STRIP - 8
        yield text(LEFT - 8, base - 20, "tokens", "e")
        yield text(LEFT - 8, base - 8, f"most {most:,}", "e g")
        yield text(LEFT - 8, base + 4, f"of {max(r.budget for r in self.records):,}", "e g")
        for kind in ("prefill", "recompute", "decode"):
            yield self._bars(kind, base, most)
        base += STRIP
        crowd = [(len(r.scheduled), len(r.waiting)) for r in self.records]
        most = max(max(map(sum, crowd)), 1)
        yield text(LEFT - 8, base - 20, "requests", "e")
        yield text(LEFT - 8, base - 8, f"most {max(n for n, _ in crowd):,} run", "e g")
        yield text(LEFT - 8, base + 4, f"{max(n for _, n in crowd):,} wait", "e g")
        yield self.steps.area([(0, n) for n, _ in crowd], f"p{DECODE}", base, (STRIP - 14) / most)
        yield self.steps.area([(n, n + m) for n, m in crowd], "w", base, (STRIP - 14) / most)

    def _bars(self, kind: str, base: int, most: int) -> str:
        order = ("decode", "recompute", "prefill")
        spans: list[tuple[float, float]] = []
        for i in range(self.num_steps):
            sums = dict.fromkeys(order, 0)
            for cells in self.rows.values():
                if (cell := cells.get(i)) and cell.tokens:
                    sums[cell.kind] += cell.tokens
            below = sum(sums[k] for k in order[:order.index(kind)])
            spans.append((below, below + sums[kind]))
        return self.steps.area(spans, STYLES[kind], base, (STRIP - 14) / most)

    def _rows(self) -> Iterator[str]:
        y = self.first_row
        for request, cells in itertools.islice(self.rows.items(), MAX_ROWS):
            if self.row >= 10:
                name = f"req {request}"
                yield text(LEFT - 8, y + self.row / 2 + 3, name if len(name) <= 13 else name[:12] + "…", "e")
            for run in runs(cells, self.num_steps, join=self.steps.column < 6):
                yield self._run(run, y)
                self.tips.append(run.says(request))
            y += self.row
        if len(self.rows) > MAX_ROWS:
            yield text(LEFT, self.bottom + 10, f"and {len(self.rows) - MAX_ROWS} more requests", "h")

    def _run(self, run: Run, y: float) -> str:
        x, width = self.steps.x(run.first), (run.last - run.first + 1) * self.steps.column
        height, gap = self.row - 3, int(self.steps.column > 3)
        a = run.activity
        parts = [rectangle(STYLES[a.kind], x, y, width - gap, height)]
        if a.cached and a.tokens:  # the part of the prompt that need not be computed
            part = round(height * a.cached / (a.cached + a.tokens))
            parts.append(rectangle(f"p{CACHED}", x, y + height - part, width - gap, part, hover=False))
        if a.preempted:
            parts.append(f'<path class="k" d="M{x + 1:.1f} {y:g}l{height / 2:g} {height}m0 {-height}l{-height / 2:g} '
                         f'{height}" pointer-events="none"/>')
        word = f"{run.tokens}" if run.tokens else a.remark if a.kind == "waiting" else ""
        room = width - (height / 2 + 4 if a.preempted else 0)
        if word and self.row >= 14 and 5.6 * len(word) + 3 <= room:
            parts.append(f'<text x="{x + width - room / 2 - gap / 2:.1f}" y="{y + height / 2 + 3.5:g}" '
                         f'pointer-events="none">{word}</text>')
        return "".join(parts)

    def _legend(self) -> Iterator[str]:
        x, y = 16.0, self.height - 36
        for style, words in ((STYLES["prefill"], "prefill: prompt tokens"), (STYLES["decode"], "decode: one a step"),
                             (f"p{CACHED}", "found in the cache"), (STYLES["recompute"], "computed again"),
                             ("w", "waits"), ("×", "preempted")):
            yield text(x + 6, y + 15, "×", "n b") if style == "×" else box(x, y + 4, 14, 14, style)
            yield text(x + 20, y + 15, words, "h")
            x += 40 + 6.2 * len(words)

    def _text(self) -> str:
        """One letter for each request and step; of a long trace, for each few steps."""
        every = self.steps.per_letter
        width = max((len(request) for request in self.rows), default=1)
        lines = [self.title, "", "P prefill, D decode, R computed again, . waits, x preempted, - has a seat; "
                 "one column " + ("is a step" if every == 1 else f"is {every} steps")]
        for request, cells in itertools.islice(self.rows.items(), MAX_ROWS):
            letters = ""
            for i in range(0, self.num_steps, every):
                some = [cells[k] for k in range(i, min(i + every, self.num_steps)) if k in cells]
                best = next((c for c in some if c.preempted), None) or next((c for c in some if c.tokens), None)
                best = best or (some[0] if some else None)
                letters += " " if best is None else "x" if best.preempted else LETTERS[best.kind]
            lines.append(f"req {request:<{width}} |{letters.rstrip()}")
        return "\n".join(lines)
