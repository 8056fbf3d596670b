"""The horizontal axis that the pictures of a whole trace share: one column for each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tutorial_engine.trace import Trace
from tutorial_engine.viz.picture import text

LEFT, RIGHT, WIDTH, MAX_COLUMN = 92, 16, 844, 26  # pixels
MAX_TEXT_COLUMNS = 100


def rectangle(style: str, x: float, y: float, width: float, height: float, hover: bool = True) -> str:
    """A rectangle, as short as can be: there are many. `hover`: it has an entry in the player's list of tips."""
    width = max(width, 0.7)
    return (f'<path class="{"r " if hover else ""}{style}" d="M{_short(x)} {_short(y)}h{_short(width)}v{_short(height)}'
            f'h{_short(-width)}z"{"" if hover else _NO_HOVER}/>')


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


_NO_HOVER = ' pointer-events="none"'


class Steps:
    """Where the steps are.

    Args:
        num_steps: how many columns.

    Attributes:
        column: the width of one.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.column = min(MAX_COLUMN, (WIDTH - LEFT - RIGHT) / num_steps)

    def x(self, step: int) -> float:
        return LEFT + step * self.column

    def labels(self, y: float) -> Iterator[str]:
        """Numbers above the columns, as many as there is room for."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if n * self.column >= 26)
        for step in range(0, self.num_steps, every):
            yield text(self.x(step) + min(self.column, 24) / 2, y, str(step), "g")
        yield text(LEFT - 8, y, "step", "e g")

    def area(self, spans: Sequence[tuple[float, float]], style: str, base: float, scale: float) -> str:
        """One bar in each column, from low to high, as a single path; equal neighbours are joined."""
        path, i = [], 0
        for (low, high), group in itertools.groupby(spans):
            n = len(list(group))
            if high > low:
                path.append(f"M{self.x(i):.1f} {base - scale * low:.1f}h{n * self.column:.1f}"
                            f"v{-scale * (high - low):.1f}h{-n * self.column:.1f}z")
            i += n
        return f'<path class="{style}" d="{"".join(path)}"/>' if path else ""

    def stairs(self, heights: Sequence[float], style: str, base: float, scale: float) -> str:
        """One bar in each column, all standing on `base`, as the outline of all of them."""
        if not any(heights):
            return ""
        path, i = [], 0
        for height, group in itertools.groupby(heights):
            i += len(list(group))
            path.append(f"V{_short(base - scale * height)}H{_short(self.x(i))}")
        return f'<path class="{style}" d="M{LEFT} {_short(base)}{"".join(path)}V{_short(base)}z"/>'

    @property
    def per_letter(self) -> int:
        """Steps that one letter stands for where the picture is shown as text."""
        return -(-self.num_steps // MAX_TEXT_COLUMNS)


def num_steps_up_to(trace: Trace, step: int | None, start: int | None = None) -> int:
    """How many steps there are up to this one; None: all.

    Raises:
        ValueError: the trace has no such step, or it is to be one picture (`step`) and a player (`start`) at once.
    """
    if step is not None and start is not None:
        raise ValueError(f"step={step} draws one picture, and start={start} says where a player opens: give one of "
                         "the two.")
    if not trace.records or (step is not None and not -len(trace) <= step < len(trace)):
        raise ValueError(f"There is no step {-1 if step is None else step} in this trace of {len(trace)} steps. Record "
                         "some with `with Trace(llm) as trace: llm.generate(...)`; count from 0, or from the end "
                         "with -1.")
    return len(trace) if step is None else step % len(trace) + 1
