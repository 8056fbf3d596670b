"""`Picture`: a drawing that shows itself in a notebook, and as text in a terminal.

SVG written by hand, so that the same trace gives the same bytes on every machine and the stored output of a notebook
can be compared. It travels as an <img>: a notebook that is opened without being trusted shows images but no inline
SVG. The functions below keep the SVG short; what they draw is dressed by `palette.py`.
"""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from typing import Any

from tutorial_engine.viz.palette import IMAGE_CSS

HATCH = ('<defs><pattern id="te-w" width="5" height="5" patternUnits="userSpaceOnUse" '
         'patternTransform="rotate(45)"><path class="wl" d="M0 0V5"/></pattern></defs>')


class Picture:
    """A drawing and what it says.

    Attributes:
        svg: a complete SVG document. text: what it shows, in words.
    """

    def __init__(self, svg: str, text: str) -> None:
        self.svg, self.text = svg, text

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg + "\n", encoding="utf-8")

    @property
    def height(self) -> int:
        """In pixels."""
        return int(float(re.search(r'height="([\d.]+)"', self.svg)[1]))

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.image(), "text/plain": self.text}

    def image(self) -> str:
        """An <img> that holds the drawing; its alternative text is the first lines of `text`."""
        data = base64.b64encode(self.svg.encode()).decode()
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        alt = html.escape("; ".join(lines[:12]))
        return f'<img alt="{alt}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}"/>'


def document(width: float, height: float, label: str, body: str) -> str:
    """A complete SVG document. `label` is what a screen reader says."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="te" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label)}">'
            f'<style>{IMAGE_CSS}</style>{HATCH}'
            f'<rect class="bg" width="{width:g}" height="{height:g}" rx="8"/>{body}</svg>')


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Text; without a style it is small, and x is its middle."""
    return f'<text{_style(style)} x="{x:g}" y="{y:g}">{html.escape(words, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, style: str = "c", radius: int = 0) -> str:
    """A rectangle."""
    return (f'<rect{_style(style)} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            + (f' rx="{radius}"' if radius else "") + "/>")


def _style(style: str) -> str:
    return f' class="{style}"' if style else ""
