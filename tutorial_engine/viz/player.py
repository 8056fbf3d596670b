"""`Player`: a picture that moves. One self-contained piece of HTML; no kernel, no network, no extension of Jupyter.

    <div data-te="5f3a...">              named by a hash of its content: the same trace gives the same bytes
      <img src="data:...">               one step: all that an untrusted clone, GitHub or an e-mail shows
      <style> <script>                   replaces the image by a slider, buttons and a drawing made from data

The script knows one kind of view: {svg(i), say(i), tip(target, i, root)}: the drawing, the sentence and what hovering
says, for frame i. `block_table.js` makes one that redraws everything, `strip.js` one that moves a line over a drawing.

Owns: what is around the picture. Does not own: the views.
"""

from __future__ import annotations

import bisect
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutorial_engine.trace import Trace
from tutorial_engine.viz.axis import num_steps_up_to
from tutorial_engine.viz.palette import PAGE_CSS
from tutorial_engine.viz.picture import HATCH, Picture

MAX_FRAMES, MIN_FRAMES = 400, 20  # of a longer trace, one step in two, three ... is shown
MAX_BYTES = 100_000  # of HTML: a notebook stores it, and a page holds several
HINT = "hover for details; keys: ← → step, Home End, Space play"


class Player(Picture):
    """All steps of a trace; as an image, one of them.

    Args:
        svg, text: of that one.
        view: the name of the JavaScript file that draws.
        num_frames: how many there are. start: the one that the image shows, and the player at first.
        label: what a screen reader says, also in front of `text`.
        payload: what the view needs, as JSON. Width "w" and height "h" of the drawing are among it.
    """

    def __init__(self, svg: str, text: str, view: str, num_frames: int, label: str, payload: dict[str, Any],
                 start: int | None = None) -> None:
        super().__init__(svg, f"{label}\n{text}")
        self._view, self._label = view, label
        self._payload = payload | {"num": num_frames, "at": num_frames - 1 if start is None else start,
                                   "ms": max(66, min(400, 15_000 // num_frames)), "hatch": HATCH, "hint": HINT}

    def shows_one_in(self, stride: int) -> None:
        """Say in the label, and below the picture, that steps are left out."""
        if words := one_in(stride):
            self._label += f", {words}"
            self.text = f"{self._label}\n{self.text.partition(chr(10))[2]}"
            self._payload["hint"] = f"{words}; {HINT}"

    @property
    def html(self) -> str:
        """The piece of HTML."""
        script = _script(self._view)
        short = {name: sentences(self._payload[name]) for name in ("say", "tips") if name in self._payload}
        content = json.dumps(self._payload | short, separators=(",", ":"), ensure_ascii=False)
        ident = hashlib.sha256(f"{script}{content}{self.svg}".encode()).hexdigest()[:10]
        content = f'{{"id":"{ident}",{content[1:]}'.replace("<", "\\u003c").replace("\u2028", "\\u2028")
        # Lumino, which JupyterLab is made of, would take the arrow keys for itself.
        return (f'<div data-te="{ident}" tabindex="0" role="group" aria-label="{html.escape(self._label)}" '
                f'data-lm-suppress-shortcuts="true">{self.image()}<style>{PAGE_CSS}'
                '.te .on>rect{stroke:var(--i);stroke-width:3}[data-te]:focus-visible{outline:2px solid #1f6fa3}</style>'
                f'<script>(P=>{{{script}}})({content})</script></div>')

    def save(self, path: str | Path) -> None:
        """Write the player as a page if the name ends in ".html", else the image as SVG."""
        if not str(path).endswith(".html"):
            return super().save(path)
        Path(path).write_text('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" '
                              f'content="light dark"><title>{html.escape(self._label)}</title></head><body>{self.html}'
                              "</body></html>\n", encoding="utf-8")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


def _script(view: str) -> str:
    """The two files as one, without the comments and the indentation."""
    lines = [line.strip() for name in (view, "player")
             for line in (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8").splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def fitting_player(trace: Trace, make: Callable[[list[int]], Player]) -> Player:
    """`make(steps)` for as many steps of the trace as MAX_FRAMES and MAX_BYTES allow. If steps are missing, it says so.

    At least MIN_FRAMES are shown, whatever that takes.
    """
    stride = -(-len(trace) // MAX_FRAMES)
    longest = max(stride, len(trace) // MIN_FRAMES)
    while True:
        player = make(steps_to_show(trace, stride))
        player.shows_one_in(stride)
        size = len(player.html.encode())
        if size < MAX_BYTES or stride == longest:
            return player
        stride = min(max(stride + 1, math.ceil(stride * size / MAX_BYTES)), longest)


def steps_to_show(trace: Trace, stride: int) -> list[int]:
    """Evenly spaced steps; the last one always."""
    return sorted({*range(0, len(trace), stride), len(trace) - 1})


def one_in(stride: int) -> str:
    """What a picture says that leaves steps out; "" if it shows all."""
    return f"one step in {stride} is shown" if stride > 1 else ""


def frame_of(trace: Trace, steps: list[int], start: int | None) -> int:
    """Which of the frames `steps` shows the step `start` (negative: from the end; None: the last), or comes just
    before it. Raises ValueError if the trace has no such step."""
    return bisect.bisect_right(steps, num_steps_up_to(trace, start) - 1) - 1


def sentences(lines: Sequence[str]) -> list[list[Any]]:
    """Lines that differ mostly in their numbers, made short: [forms], and for each line [its form, its numbers ...].

    A form is a line with "\u0001" in place of each number. `strip.js` puts them together again.
    """
    forms: dict[str, int] = {}
    rows = [[forms.setdefault(_NUMBER.sub("\u0001", line), len(forms)), *map(_short, _NUMBER.findall(line))]
            for line in lines]
    return [list(forms), rows]


_NUMBER = re.compile(r"[0-9][0-9,.]*(?<=[0-9])")


def _short(number: str) -> int | str:
    """As an integer if JavaScript writes that the same way."""
    return int(number) if number.isdecimal() and len(number) < 16 and str(int(number)) == number else number
