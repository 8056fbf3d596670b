"""The KV memory map: which request was in which block, from the first step to the last, and how much of it was waste.

    memory_map(trace)                   one row for each block, one column for each step
    memory_map(trace, reserve=512)      beside it, what it would be like if 512 tokens were set aside for each request

A slot is room for one token's K and V. What a request holds beyond its tokens is waste; with blocks it is less than one
block for each request, with a reservation it is everything that is not written yet (PagedAttention, Kwon et al., SOSP
2023, figure 2).

Owns: this picture. Does not own: the state of the pool (`pool_state.py`).
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

from tutorial_engine.trace import Names, Trace
from tutorial_engine.viz.axis import LEFT, WIDTH, Steps, num_steps_up_to, rectangle
from tutorial_engine.viz.palette import NUM_COLORS
from tutorial_engine.viz.picture import Picture, box, document, text
from tutorial_engine.viz.player import Player, fitting_player, frame_of, one_in
from tutorial_engine.viz.pool_state import PoolState, pool_states

TOP, BARS, MAX_ROWS, MAX_TEXT_ROWS = 48, 70, 96, 32
USED, EMPTY, STILL_THERE = "u", "o", "c d"  # grey, ink, dashed: a colour always means a request
FREE, FINDABLE, SHARED = " ", "#", "+"
LETTERS = string.digits + string.ascii_letters  # in the text, for requests in order of appearance


def memory_map(trace: Trace, step: int | None = None, *, reserve: int | None = None,
               names: Names = None, start: int | None = None) -> Picture:
    """Draw who was in which block when, and the share of the memory in use that held nothing.

    Args:
        trace: a recorded run.
        step: draw the trace only up to this step; negative ones count from the end. None: a player over all steps.
        reserve: compare with an engine that sets this many slots aside for each request as long as it has a table.
        names: what the requests are called: ``{"33": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        start: the step at which the player opens; None: the last.

    Raises:
        ValueError: the trace has no such step, or a request is longer than `reserve`.
    """
    trace = trace.named(names)
    num_steps = num_steps_up_to(trace, step, start)
    states = list(pool_states(trace, range(num_steps)))
    if step is not None:
        chart = _Chart(states, reserve, range(num_steps))
        return Picture(chart.svg, chart.text)

    def player(steps: list[int]) -> Player:
        chart = _Chart(states, reserve, steps)
        return Player(chart.svg, chart.text, "strip", len(steps), f"KV memory map, {num_steps:,} steps",
                      {"w": WIDTH, "h": chart.height, "xs": [round(chart.steps.x(i), 1) for i in [*steps, num_steps]],
                       "y0": TOP, "y1": chart.bottom, "say": [chart.describe(states[i]) for i in steps],
                       "tips": chart.tips}, frame_of(trace, steps, start))

    return fitting_player(trace, player)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


class _Chart:
    """Args: states: of all steps; the sums are over them. steps: those that are drawn, each until the next one."""

    def __init__(self, states: list[PoolState], reserve: int | None, steps: Sequence[int]) -> None:
        self.states, self.reserve, self.stride = states, reserve, steps[1] - steps[0] if len(steps) > 2 else 1
        self.drawn = [states[i] for i, end in zip(steps, [*steps[1:], len(states)]) for _ in range(i, end)]
        if reserve is not None:
            longest = max((n for s in states for n in s.lengths.values()), default=0)
            if longest > reserve:
                raise ValueError(f"reserve is {reserve} tokens for each request, and one has {longest}.")
        self.steps = Steps(len(states))
        self.blocks = sorted({block for state in states for block in state.owners})
        shown = min(len(self.blocks), MAX_ROWS)
        self.row = 14 if shown <= 32 else max(5, 450 // shown)
        self.first_row = TOP + BARS + 34
        self.bottom = self.first_row + shown * self.row + 4
        self.height = self.bottom + 56
        self.tips: list[str] = []
        self.svg = self._svg()
        self.text = self._text()

    @property
    def slots(self) -> int:
        """Slots times steps that were in use."""
        return sum(state.slots for state in self.states)

    @property
    def title(self) -> str:
        held = sum(state.tokens for state in self.states)
        return (f"{percent(self.slots - held, self.slots)} of the memory in use was wasted: of {self.slots:,} slots × "
                f"steps, {held:,} held a token")

    @property
    def comparison(self) -> str:
        """What a reservation would have wasted; requests would then share nothing."""
        reserved = sum(self.reserve * len(state.tables) for state in self.states)
        held = sum(sum(state.lengths.values()) for state in self.states)
        return (f"with {self.reserve:,} slots reserved for each request: {percent(reserved - held, reserved)} wasted "
                f"of {reserved:,} slots × steps")

    def describe(self, state: PoolState) -> str:
        words = (f"Step {state.step}: {len(state.owners):,} blocks are {state.slots:,} slots, {state.tokens:,} hold a "
                 f"token: {percent(state.slots - state.tokens, state.slots)} wasted")
        if self.reserve:
            reserved, held = self.reserve * len(state.tables), sum(state.lengths.values())
            words += f"; reserved would be {reserved:,}: {percent(reserved - held, reserved)}"
        return words

    # As SVG

    def _svg(self) -> str:
        parts = [text(16, 26, self.title, "t"), *self._bars(), *self.steps.labels(self.first_row - 6), *self._rows()]
        if self.reserve:
            parts.append(text(16, 44, self.comparison, "h"))
        return document(WIDTH, self.height, self.title, "".join([*parts, *self._legend()]))

    def _bars(self) -> Iterator[str]:
        """Slots in use in each step, and how many of them hold a token."""
        reserved = [self.reserve * len(s.tables) if self.reserve else 0 for s in self.drawn]
        most = max(max(s.slots for s in self.drawn), *reserved, 1)
        base, scale = TOP + BARS, (BARS - 12) / most
        yield text(LEFT - 8, base - 30, "slots", "e")
        yield text(LEFT - 8, base - 18, f"most {most:,}", "e g")
        yield text(LEFT - 8, base - 6, f"pool {(self.states[0].num_blocks - 1) * self.states[0].block_size:,}", "e g")
        yield self.steps.stairs(reserved, "w", base, scale)  # each covers a part of the one before
        yield self.steps.stairs([s.slots for s in self.drawn], EMPTY, base, scale)
        yield self.steps.stairs([s.tokens for s in self.drawn], USED, base, scale)

    def _rows(self) -> Iterator[str]:
        y = self.first_row
        for block in self.blocks[:MAX_ROWS]:
            if self.row >= 10:
                yield text(LEFT - 8, y + self.row / 2 + 3, f"block {block}", "e")
            findable = [((1, 2) if _holder(state, block) == FINDABLE else (0, 0)) for state in self.drawn]
            yield self.steps.area(findable, STILL_THERE, y + self.row - 1, (self.row - 2) / 2)
            first = 0
            for holder, group in itertools.groupby(_holder(state, block) for state in self.drawn):
                last = first + len(list(group)) - 1
                if holder not in (FREE, FINDABLE):
                    yield self._run(block, holder, first, last, y)
                first = last + 1
            y += self.row
        if len(self.blocks) > MAX_ROWS:
            yield text(LEFT, self.bottom + 10, f"and {len(self.blocks) - MAX_ROWS} more blocks", "h")

    def _run(self, block: int, holder: str, first: int, last: int, y: float) -> str:
        x, width = self.steps.x(first), (last - first + 1) * self.steps.column
        requests = self.states[first].requests
        names = holder.split("\n")
        part = rectangle(f"p{requests.index(names[0]) % NUM_COLORS}", x, y, width - 0.8, self.row - 2)
        if len(names) > 1 and self.row >= 8:  # a band in the second holder's colour
            part += rectangle(f"p{requests.index(names[1]) % NUM_COLORS}", x, y + self.row / 2 - 1, width - 0.8,
                        self.row / 2 - 1, hover=False)
        label = "+".join(names)
        if self.row >= 12 and 6 * len(label) + 4 < width:
            part += text(x + width / 2, y + self.row / 2 + 2.5, label)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        self.tips.append(f"block {block}, {steps}: request{'s' * (len(names) > 1)} {', '.join(names)}")
        return part

    def _legend(self) -> Iterator[str]:
        x, y = 16.0, self.height - 34
        kinds = [(USED, "slots with a token"), (EMPTY, "empty slots in use: waste"),
                 *([("w", "would be reserved")] if self.reserve else []), (STILL_THERE, "free, can still be found")]
        for style, words in kinds:
            yield box(x, y + 4, 14, 14, style) + text(x + 20, y + 15, words, "h")
            x += 40 + 6 * len(words)
        yield text(x, y + 15, "a colour is a request", "h")
        if words := one_in(self.stride):
            yield text(16, y + 29, words, "h")

    # As text

    def _text(self) -> str:
        requests, every = self.states[-1].requests, self.steps.per_letter
        mark = {request: LETTERS[i % len(LETTERS)] for i, request in enumerate(requests)}
        key = ", ".join(f"{letter} {name}" for name, letter in mark.items() if name != letter)
        key = f" ({key})" if key else ""
        lines = [self.title, *([self.comparison] if self.reserve else []), "",
                 f"a letter for each request{key}, {SHARED} shared, {FINDABLE} free and can still be found; one "
                 "column is " + ("a step" if every == 1 else f"{every} steps")]
        width = len(str(self.blocks[-1])) if self.blocks else 1
        for block in self.blocks[:MAX_TEXT_ROWS]:
            holders = [_holder(state, block) for state in self.states[::every]]
            letters = "".join(h if h in (FREE, FINDABLE) else SHARED if "\n" in h else mark[h] for h in holders)
            lines.append(f"block {block:>{width}} |{letters.rstrip()}")
        more = len(self.blocks) - MAX_TEXT_ROWS
        return "\n".join([*lines, *([f"and {more} more blocks"] if more > 0 else [])])


def _holder(state: PoolState, block: int) -> str:
    """FREE, FINDABLE, or the holders, one a line."""
    if block in state.owners:
        return "\n".join(state.owners[block])
    return FINDABLE if block in state.hashed else FREE
