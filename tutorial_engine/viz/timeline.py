"""The timeline of each request: how long it queued, when its first token came, and how evenly the others followed.

    arrives        admitted     first token                     last token
       |---- queue ----|-- prefill --|- decode -|- decode -|-----|
       |------------- TTFT ----------|-- ITL ---|-- ITL ---|

TTFT is the time to first token, ITL the inter-token latency; both are what a user of a streaming server sees. With
clock="steps" they are counted in steps of the engine, which are the same on every machine; with clock="seconds" they
are times, measured or simulated.

Owns: these numbers and this picture. Does not own: what a request did in a step (`activity.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from tutorial_engine.trace import Names, Trace
from tutorial_engine.viz.activity import activities
from tutorial_engine.viz.axis import LEFT, num_steps_up_to, rectangle
from tutorial_engine.viz.occupancy import STYLES, describe, runs
from tutorial_engine.viz.picture import Picture, box, document, text
from tutorial_engine.viz.player import Player, fitting_player, frame_of

CLOCKS = {"steps": "steps", "seconds": "s"}
TOP, MAX_ROWS, WIDTH, PLOT, COLUMNS = 48, 60, 844, 560, 60  # pixels; the plot is between LEFT and LEFT + PLOT


@dataclass
class RequestTimes:
    """When things happened to a request, in seconds or steps since recording began.

    Attributes:
        arrived: when it came (0 if it was there before). admitted: when its first step began; None: it still waits.
        tokens: when each of its output tokens was there.
        finished: why it ended, "" if it has not.
    """

    request: str
    arrived: float = 0.0
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    finished: str = ""

    @property
    def queued(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.tokens[0] - self.arrived if self.tokens else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: one less than there are tokens. Tokens of one step come together: 0."""
        return [b - a for a, b in itertools.pairwise(self.tokens)]


def request_times(trace: Trace, clock: str = "steps") -> dict[str, RequestTimes]:
    """When each request came, was admitted and got its tokens; in order of arrival.

    Args:
        clock: "steps" or "seconds".

    Raises:
        ValueError: another clock.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock must be one of {', '.join(map(repr, CLOCKS))}, got {clock!r}.")
    times: dict[str, RequestTimes] = {}
    for i, record in enumerate(trace.records[:]):
        began, ended = (i, i + 1) if clock == "steps" else (record.started, record.time)
        for request, (arrived, _) in record.arrived.items():
            times[request] = RequestTimes(request, i if clock == "steps" else max(arrived, 0.0))
        for request in record.scheduled:
            entry = times.setdefault(request, RequestTimes(request))
            entry.admitted = began if entry.admitted is None else entry.admitted
            entry.tokens += [ended] * len(record.sampled.get(request, []))
            entry.finished = record.finished.get(request, "")
    return times


def timeline(trace: Trace, step: int | None = None, *, clock: str = "steps", names: Names = None,
             start: int | None = None) -> Picture:
    """Draw each request from its arrival to its last token, with its TTFT and its longest ITL.

    Args:
        trace: a recorded run.
        step: draw the trace only up to this step; negative ones count from the end. None: a player over all steps.
        clock: "steps" counts steps of the engine; "seconds" measures, so no two runs of a real engine agree.
        names: what the requests are called: ``{"33": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        start: the step at which the player opens; None: the last.

    Raises:
        ValueError: the trace has no such step, or there is no such clock.
    """
    trace = trace.named(names)
    num_steps = num_steps_up_to(trace, step, start)
    part = Trace()
    part.num_blocks, part.block_size, part.records = trace.num_blocks, trace.block_size, trace.records[:num_steps]
    chart = _Chart(part, clock)
    if step is not None:
        return Picture(chart.svg, chart.text)

    def player(steps: list[int]) -> Player:
        xs = [*(round(chart.x(chart.began(i)), 1) for i in steps), round(chart.x(chart.end), 1)]
        return Player(chart.svg, chart.text, "strip", len(steps), f"Timeline of the requests, {num_steps:,} steps",
                      {"w": WIDTH, "h": chart.height, "xs": xs, "y0": TOP, "y1": chart.bottom,
                       "say": [describe(trace.records[i]) for i in steps], "tips": chart.tips},
                      frame_of(trace, steps, start))

    return fitting_player(trace, player)


def amount(value: float | None, clock: str) -> str:
    """Three digits and s or ms; whole steps."""
    if value is None:
        return "–"
    if clock == "steps":
        return f"{value:g}"
    return f"{value:.3g} s" if value >= 0.9995 else f"{1000 * value:.3g} ms"


class _Chart:
    def __init__(self, trace: Trace, clock: str) -> None:
        self.trace, self.clock = trace, clock
        self.times = request_times(trace, clock)
        self.rows = activities(trace)
        self.end = self.ended(len(trace) - 1)
        shown = min(len(self.rows), MAX_ROWS)
        self.row = 22 if shown <= 24 else max(9, 520 // shown)
        self.first_row = TOP + 30
        self.bottom = self.first_row + shown * self.row + 4
        self.height = self.bottom + 56
        self.tips: list[str] = []
        self.svg = self._svg()
        self.text = self._text()

    def began(self, i: int) -> float:
        return i if self.clock == "steps" else self.trace.records[i].started

    def ended(self, i: int) -> float:
        return i + 1 if self.clock == "steps" else self.trace.records[i].time

    def x(self, when: float) -> float:
        return LEFT + PLOT * when / self.end if self.end else LEFT

    @property
    def title(self) -> str:
        return "; ".join(self._headline())

    def _headline(self) -> list[str]:
        """How many, and what they felt."""
        first = sorted(t.ttft for t in self.times.values() if t.ttft is not None)
        gaps = sorted(gap for t in self.times.values() for gap in t.itl)
        took = amount(self.end, self.clock) + " steps" * (self.clock == "steps")
        felt = [f"{name}: {self._spread(values)}" for name, values in (("TTFT", first), ("ITL", gaps)) if values]
        return [f"{len(self.rows):,} request{'s' * (len(self.rows) != 1)} in {took}", *felt]

    def _spread(self, ascending: list[float]) -> str:
        return (f"median {amount(ascending[len(ascending) // 2], self.clock)}, longest "
                f"{amount(ascending[-1], self.clock)}")

    def _svg(self) -> str:
        how_many, *felt = self._headline()
        parts = [text(16, 26, how_many, "t"), text(16, 46, "; ".join(felt), "h")]
        for n, name in enumerate(("queued", "TTFT", "longest ITL")):
            parts.append(text(LEFT + PLOT + COLUMNS * (n + 1) - 2, self.first_row - 8, name, "e g"))
        parts += [*self._axis(), *self._rows(), *self._legend()]
        return document(WIDTH, self.height, self.title, "".join(parts))

    def _axis(self) -> Iterator[str]:
        """Round numbers above the rows, about 12 of them."""
        raw = max(self.end / 12, 1e-9, 1.0 if self.clock == "steps" else 0.0)
        power = 10.0 ** math.floor(math.log10(raw))
        every = next(power * n for n in (1, 2, 5, 10) if power * n >= raw)
        for n in range(int(self.end / every) + 1):
            x = self.x(n * every)
            yield text(x, self.first_row - 8, f"{n * every:.6g}", "g")
            yield f'<path class="l" d="M{x:.1f} {self.first_row - 4}V{self.bottom}"/>'
        yield text(LEFT - 8, self.first_row - 8, CLOCKS[self.clock], "e g")

    def _rows(self) -> Iterator[str]:
        y = self.first_row
        for request, cells in itertools.islice(self.rows.items(), MAX_ROWS):
            times, height = self.times.get(request, RequestTimes(request)), self.row - 4
            name = f"req {request}"
            yield text(LEFT - 8, y + self.row / 2 + 2, name if len(name) <= 13 else name[:12] + "…", "e")
            for run in runs(cells, len(self.trace), join=True):
                begin = self.began(run.first)
                if run.first == min(cells) and run.activity.kind == "waiting":
                    begin = times.arrived
                x, width = self.x(begin), self.x(self.ended(run.last)) - self.x(begin)
                yield rectangle(STYLES[run.activity.kind], x, y, width, height)
                self.tips.append(run.says(request))
            yield self._ticks(times, y, height)
            longest = max(times.itl, default=None)
            for n, value in enumerate((times.queued, times.ttft, longest)):
                yield text(LEFT + PLOT + COLUMNS * (n + 1) - 2, y + self.row / 2 + 2, amount(value, self.clock), "e")
            y += self.row
        if len(self.rows) > MAX_ROWS:
            yield text(LEFT, self.bottom + 12, f"and {len(self.rows) - MAX_ROWS} more requests", "h")

    def _ticks(self, times: RequestTimes, y: float, height: float) -> str:
        """A line for each token, if there is room between them."""
        places = [self.x(when) for when in dict.fromkeys(times.tokens)]
        if not places or (places[-1] - places[0]) / len(places) < 4 < len(places):
            return ""
        lines = "".join(f"M{x:.1f} {y:g}v{height}" for x in places)
        return f'<path class="k" opacity=".55" d="{lines}" pointer-events="none"/>'

    def _legend(self) -> Iterator[str]:
        x, y = 16.0, self.height - 34
        for kind, words in (("waiting", "in the queue"), ("prefill", "prefill"), ("decode", "decode"),
                            ("recompute", "computed again after a preemption")):
            yield box(x, y + 4, 14, 14, STYLES[kind]) + text(x + 20, y + 15, words, "h")
            x += 44 + 6 * len(words)
        yield f'<path class="k" d="M{x:g} {y + 4}v14"/>' + text(x + 8, y + 15, "a token comes", "h")

    def _text(self) -> str:
        head = ("request", "queued", "TTFT", "longest ITL", "tokens", "finished")
        table = [head]
        for request in itertools.islice(self.rows, MAX_ROWS):
            t = self.times.get(request, RequestTimes(request))
            table.append((request, amount(t.queued, self.clock), amount(t.ttft, self.clock),
                          amount(max(t.itl, default=None), self.clock), f"{len(t.tokens):,}", t.finished or "–"))
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in table)
        return "\n".join([self.title, f"(in {self.clock})", "", *lines])
