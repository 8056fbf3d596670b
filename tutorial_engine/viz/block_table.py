"""The block table of one step: who holds which physical block, beside each request's logical -> physical table.

    with Trace(llm) as trace:
        llm.generate(prompts, params)
    block_table(trace, step=0)        as a cell's last line: a picture, or the same as text in a terminal

The picture is SVG written by hand, so the same trace gives the same bytes on every machine, and the stored output of a
notebook can be compared. It travels as an <img>: a notebook that is opened without being trusted shows images but no
inline SVG. Whatever a colour says is also said by a number or a word.

Owns: what one step of a trace says about each block, and drawing it. Does not own: recording (`trace.py`).
"""

from __future__ import annotations

import base64
import html
import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutorial_engine.trace import Trace

# Okabe and Ito's colours for the colour-blind, those on which black text is readable, a little lighter.
PALETTE = ("#74c3ec", "#f2b134", "#4fc3a1", "#dd9cbf", "#f3e868", "#ee9a5b")
COLUMNS, TABLE_COLUMNS = 8, 6  # blocks in a row of the pool, and of a request's table
MAX_POOL_ROWS, MAX_TABLES = 8, 8  # of a larger pool only rows in use are drawn; further requests are counted
CELL, PITCH, MARGIN = 52, 56, 16  # pixels
TABLES_X = MARGIN + COLUMNS * PITCH + 28
WIDTH = TABLES_X + TABLE_COLUMNS * PITCH + MARGIN
INK, GREY, PALE = "#1a1a1a", "#5f5f5f", "#c4c4c4"


@dataclass(frozen=True)
class PoolState:
    """What a trace says about every block at one step.

    Attributes:
        tables: request -> its physical blocks. lengths: request -> tokens whose K and V they hold.
        owners: physical block -> the requests whose tables name it. filled: physical block -> tokens in it.
        hashed: blocks that can be found by their content. waiting: request -> reason.
        colors: request -> colour, the same in every step of the trace.
    """

    step: int
    num_blocks: int
    block_size: int
    tables: dict[str, list[int]]
    lengths: dict[str, int]
    owners: dict[int, list[str]]
    filled: dict[int, int]
    hashed: set[int]
    waiting: dict[str, str]
    colors: dict[str, str]

    @classmethod
    def of(cls, trace: Trace, step: int) -> PoolState:
        """Look one step up. Raises ValueError if the trace has no such step."""
        if not -len(trace) <= step < len(trace):
            raise ValueError(f"There is no step {step} in this trace of {len(trace)} steps. Record some with `with "
                             "Trace(llm) as trace: llm.generate(...)`; count from 0, or from the end with -1.")
        past = trace.records[:step % len(trace) + 1]
        record, size = past[-1], trace.block_size
        # A step says how long the requests are that it computed; the others are as long as they last were.
        known = {request: length for r in past for request, length in r.lengths.items()}
        lengths = {request: known.get(request, len(table) * size) for request, table in record.tables.items()}
        owners: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        for request, table in record.tables.items():
            for i, block in enumerate(table):
                owners.setdefault(block, []).append(request)
                filled[block] = max(filled.get(block, 0), min(max(lengths[request] - i * size, 0), size))
        seen = dict.fromkeys(request for r in trace for request in r.tables)
        return cls(record.step, trace.num_blocks, size, record.tables, lengths, owners, filled, set(record.hashed),
                   record.waiting, dict(zip(seen, itertools.cycle(PALETTE))))

    @property
    def title(self) -> str:
        shared = sum(len(requests) > 1 for requests in self.owners.values())
        free = self.num_blocks - 1 - len(self.owners)
        return f"Step {self.step}: {len(self.owners)} blocks in use ({shared} shared), {free:,} free"

    def pool_rows(self) -> list[tuple[range, bool]]:
        """The blocks row by row, and whether to draw them: in a large pool, idle rows are joined and only named."""
        rows = [range(i, min(i + COLUMNS, self.num_blocks)) for i in range(0, self.num_blocks, COLUMNS)]
        if len(rows) <= MAX_POOL_ROWS:
            return [(row, True) for row in rows]
        result: list[tuple[range, bool]] = []
        for drawn, group in itertools.groupby(rows, lambda row: 0 in row or any(b in self.owners for b in row)):
            some = list(group)
            result += [(row, True) for row in some] if drawn else [(range(some[0].start, some[-1].stop), False)]
        return result

    def idle_text(self, blocks: range) -> str:
        findable = len(self.hashed.intersection(blocks))
        return f"blocks {blocks[0]:,} to {blocks[-1]:,}: free" + (f" ({findable:,} of them #)" if findable else "")

    def holder(self, block: int) -> str:
        """Who holds a block, in at most eight letters."""
        requests = self.owners.get(block, [])
        if not requests:
            return "free" if block else "null"
        names = "+".join(requests)
        return f"req {names}" if len(names) <= 4 else names if len(names) <= 8 else f"{len(requests)} req"

    def fill(self, block: int) -> str:
        """"5/16" for a block in use that has room left, else nothing."""
        tokens = self.filled.get(block, self.block_size)
        return f"{tokens}/{self.block_size}" if tokens < self.block_size else ""

    def request_title(self, request: str) -> str:
        blocks = len(self.tables[request])
        return f"request {request}: {self.lengths[request]:,} tokens in {blocks} block{'s' * (blocks != 1)}"

    def more(self) -> list[str]:
        """Lines about requests that have no table in the picture."""
        lines = [f"and {len(self.tables) - MAX_TABLES} more requests"] if len(self.tables) > MAX_TABLES else []
        reasons = [f"request {request} waits: {reason}" for request, reason in self.waiting.items() if reason]
        behind = len(self.waiting) - len(reasons)
        return lines + reasons + ([f"and {behind} more wait"] if behind else [])


class Picture:
    """A drawing that shows itself in a notebook, and as text in a terminal.

    Attributes:
        svg: a complete SVG document. text: what it shows, in words.
    """

    def __init__(self, svg: str, text: str) -> None:
        self.svg, self.text = svg, text

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        data = base64.b64encode(self.svg.encode()).decode()
        alt = html.escape("; ".join(line.strip() for line in self.text.splitlines() if line.strip()))
        return {"text/html": f'<img alt="{alt}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}"/>',
                "text/plain": self.text}


def block_table(trace: Trace, step: int = -1) -> Picture:
    """Draw the block pool and the block tables at one step.

    Args:
        trace: a recorded run.
        step: which of its steps; negative ones count from the end.

    Returns:
        A `Picture`. Tables are as they were while the model ran in that step; "#" and "waits" are after it.

    Raises:
        ValueError: the trace has no such step.
    """
    state = PoolState.of(trace, step)
    return Picture(_svg(state), _text(state))


# ---------------------------------------------------------------------- as text


def _text(state: PoolState) -> str:
    lines = [state.title, "", f"pool of {state.num_blocks:,} blocks, {state.block_size} tokens each "
             "(# can be found by its content)"]
    for blocks, drawn in state.pool_rows():
        cells = (f"{b:>4} {state.holder(b)} {state.fill(b)}{'#' if b in state.hashed else ''}" for b in blocks)
        lines.append("".join(cell.ljust(17) for cell in cells).rstrip() if drawn else f"   ⋮ {state.idle_text(blocks)}")
    lines.append("")
    for request in list(state.tables)[:MAX_TABLES]:
        lines.append(f"{state.request_title(request)} {state.tables[request]}")
    return "\n".join([*lines, *state.more()]).rstrip()


# ---------------------------------------------------------------------- as SVG


def _svg(state: PoolState) -> str:
    pool, pool_bottom = _pool(state)
    tables, tables_bottom = _tables(state)
    bottom = max(pool_bottom, tables_bottom) + 10
    height = bottom + 34
    title = html.escape(state.title)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{title}" font-family="Helvetica, Arial, sans-serif" font-size="10" fill="{INK}" '
        'text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        _label(MARGIN, 26, state.title, 15, weight="bold", anchor="start"),
        _label(MARGIN, 50, f"the pool: {state.num_blocks:,} physical blocks of {state.block_size} tokens", 12,
               GREY, anchor="start"),
        _label(TABLES_X, 50, "block tables: logical block → physical block", 12, GREY, anchor="start"),
        *pool, *tables, *_legend(bottom), "</svg>"])


def _legend(y: int) -> list[str]:
    """SVG of the four things that need a word."""
    parts, x = [], MARGIN
    for kind, text in (("shared", "shared: in several tables"), ("part", "partly filled: tokens / size"),
                       ("full", "# full, can be found by its content"), ("free", "# free, can still be found")):
        parts.append(_box(x, y + 4, 14, 14, PALETTE[0] if kind in ("shared", "full") else "#ffffff", GREY,
                          ' stroke-dasharray="3 2"' if kind == "free" else ""))
        if kind in ("shared", "part"):
            fill, start, width = (PALETTE[1], x + 7, 7) if kind == "shared" else (PALETTE[0], x, 5)
            parts.append(f'<rect x="{start}" y="{y + 4}" width="{width}" height="14" fill="{fill}"/>')
        parts.append(_label(x + 20, y + 15, text, 11, GREY, anchor="start"))
        x += 44 + 6 * len(text)
    return parts


def _pool(state: PoolState) -> tuple[list[str], int]:
    """SVG of the grid of physical blocks, and where it ends."""
    parts, y = [], 62
    for blocks, drawn in state.pool_rows():
        if not drawn:
            parts.append(_label(MARGIN, y + 14, f"⋮  {state.idle_text(blocks)}", 12, GREY, anchor="start"))
            y += 26
            continue
        for column, block in enumerate(blocks):
            x = MARGIN + column * PITCH
            parts += _cell(state, block, x, y, CELL)
            parts += [_label(x + CELL // 2, y + 19, str(block), 15, INK if block in state.owners else GREY,
                             weight="bold" if block in state.owners else "normal"),
                      _label(x + CELL // 2, y + 32, state.holder(block),
                             color=INK if block in state.owners else GREY)]
            if text := state.fill(block):
                parts.append(_label(x + CELL // 2, y + 44, text))
        y += PITCH
    return parts, y


def _tables(state: PoolState) -> tuple[list[str], int]:
    """SVG of one table per request and of who waits, and where it ends."""
    parts, y = [], 62
    for request in list(state.tables)[:MAX_TABLES]:
        parts += [f'<rect x="{TABLES_X}" y="{y + 1}" width="12" height="12" rx="2" fill="{state.colors[request]}"/>',
                  _label(TABLES_X + 18, y + 12, state.request_title(request), 12, anchor="start")]
        y += 20
        for i, block in enumerate(state.tables[request]):
            x, top = TABLES_X + i % TABLE_COLUMNS * PITCH, y + i // TABLE_COLUMNS * 44
            parts += [*_cell(state, block, x, top, 40),
                      _label(x + 6, top + 12, f"{i} →", anchor="start"),
                      _label(x + CELL // 2, top + 32, str(block), 15, weight="bold")]
        y += -(-len(state.tables[request]) // TABLE_COLUMNS) * 44 + 8
    for line in (part for text in state.more() for part in textwrap.wrap(text, 52)):
        parts.append(_label(TABLES_X, y + 12, line, 12, GREY, anchor="start"))
        y += 18
    return parts, y


def _cell(state: PoolState, block: int, x: int, y: int, height: int) -> list[str]:
    """A block's box: one band of colour per holder, as wide as it is full; dashed if free and findable."""
    requests = state.owners.get(block, [])[:4]
    free, findable = not requests, block in state.hashed
    parts = [_box(x, y, CELL, height, "#e9e9e9" if block == 0 else "#ffffff", PALE)]
    band = CELL * state.filled.get(block, 0) / state.block_size / max(len(requests), 1)
    for n, request in enumerate(requests):
        parts.append(f'<rect x="{x + n * band:g}" y="{y}" width="{band:g}" height="{height}" '
                     f'fill="{state.colors[request]}"/>')
    if not free or findable:
        parts.append(_box(x, y, CELL, height, "none", GREY, ' stroke-dasharray="3 2"' if free else ""))
    return parts + ([_label(x + CELL - 7, y + 13, "#", 11, weight="bold")] if findable else [])


def _box(x: int, y: int, width: int, height: int, fill: str, stroke: str, more: str = "") -> str:
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="1.2"{more}/>')


def _label(x: int, y: int, text: str, size: int = 10, color: str = INK, weight: str = "normal", anchor: str = "middle"
           ) -> str:
    """A text; what is as in the root element is left out."""
    given = {"font-size": (size, 10), "fill": (color, INK), "font-weight": (weight, "normal"),
             "text-anchor": (anchor, "middle")}
    more = "".join(f' {name}="{value}"' for name, (value, default) in given.items() if value != default)
    return f'<text x="{x}" y="{y}"{more}>{html.escape(text)}</text>'
