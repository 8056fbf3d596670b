"""The block table: who holds which physical block, beside each request's logical -> physical table.

    with Trace(llm) as trace:
        llm.generate(prompts, params)
    block_table(trace)              as a cell's last line: a player with all steps; text in a terminal
    block_table(trace, step=3)      one of them as a picture

The player does not hold pictures. It holds what changes from step to step, and `block_table.js` draws from that what
`_svg` draws here, character by character (a test compares the two).

Owns: what the state of the pool looks like. Does not own: the state (`pool_state.py`), moving (`player.py`).
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutorial_engine.trace import Names, Trace
from tutorial_engine.viz.axis import num_steps_up_to
from tutorial_engine.viz.palette import NUM_COLORS
from tutorial_engine.viz.picture import Picture, box, document, text
from tutorial_engine.viz.player import Player, fitting_player, frame_of
from tutorial_engine.viz.pool_state import PoolState, pool_state, pool_states

COLUMNS, TABLE_COLUMNS = 8, 6  # blocks in a row of the pool, and of a request's table
MAX_ROWS, MAX_TABLES = 16, 8  # of a larger pool only rows in use are drawn; further requests are counted
MAX_CELLS = 4 * TABLE_COLUMNS  # of a longer table only the beginning and the end are drawn
ALL_ROWS = 8  # a pool of so many rows is drawn in full
IN_LINE = 10  # so many of the free queue's blocks are named below the pool
CELL, PITCH, MARGIN, TOP = 52, 56, 16, 62  # pixels
TABLES_X = MARGIN + COLUMNS * PITCH + 28
WIDTH = TABLES_X + TABLE_COLUMNS * PITCH + MARGIN


def block_table(trace: Trace, step: int | None = None, *, names: Names = None, start: int | None = None) -> Picture:
    """Draw the block pool and the block tables.

    Args:
        trace: a recorded run.
        step: which of its steps; negative ones count from the end. None: all of them, as a player that begins with
            the one in which most blocks are in use.
        names: what the requests are called: ``{"33": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        start: the step at which the player opens; None: the fullest.

    Returns:
        A `Picture`. Tables are as they were while the model ran in a step; "#", the free queue and "waits" are as they
        were after it.

    Raises:
        ValueError: the trace has no such step, or both `step` and `start` are given.
    """
    trace = trace.named(names)
    num_steps = num_steps_up_to(trace, step, start)
    if step is not None:
        state = pool_state(trace, step)
        layout = Layout.of([state])
        return Picture(layout.document(state), layout.text(state))

    def player(steps: list[int]) -> Player:
        states = list(pool_states(trace, steps))
        layout = Layout.of(states)
        at = (max(range(len(states)), key=lambda i: len(states[i].owners)) if start is None
              else frame_of(trace, steps, start))
        return Player(layout.document(states[at]), layout.text(states[at]), "block_table", len(states),
                      f"Block table, {num_steps:,} steps{', from the fullest' * (start is None)}",
                      _payload(states, layout), at)

    return fitting_player(trace, player)


# ---------------------------------------------------------------------- words


def holder(state: PoolState, block: int) -> str:
    """Who holds a block, in at most eight letters."""
    requests = state.owners.get(block, [])
    if not requests:
        return "free" if block else "null"
    names = "+".join(requests)
    return f"req {names}" if len(names) <= 4 else names if len(names) <= 8 else f"{len(requests)} req"


def fill(state: PoolState, block: int) -> str:
    """"5/16" for a block in use that has room left, "in line 3" for a free one, else nothing."""
    if block not in state.owners:
        return f"in line {state.free.index(block) + 1}" if block in state.free else ""
    tokens = state.filled[block]
    return f"{tokens}/{state.block_size}" if tokens < state.block_size else ""


def request_title(state: PoolState, request: str) -> str:
    blocks = len(state.tables[request])
    return f"request {request}: {state.lengths[request]:,} tokens in {blocks:,} block{'s' * (blocks != 1)}"


def cells_shown(length: int) -> list[int | None]:
    """Which entries of a table are drawn; None stands for those in between."""
    if length <= MAX_CELLS:
        return list(range(length))
    return [*range(MAX_CELLS - TABLE_COLUMNS - 1), None, *range(length - TABLE_COLUMNS, length)]


def remarks(state: PoolState) -> list[str]:
    """Lines about requests that have no table in the picture, each short enough to be drawn."""
    lines = [f"and {len(state.tables) - MAX_TABLES} more requests"] if len(state.tables) > MAX_TABLES else []
    reasons = [f"request {request} waits: {reason}" for request, reason in state.waiting.items() if reason]
    behind = len(state.waiting) - len(reasons)
    lines += reasons[:3] + ([f"and {behind + len(reasons[3:])} more wait"] if behind or reasons[3:] else [])
    return [part for line in lines for part in textwrap.wrap(line, 52)]


def queue_line(state: PoolState) -> str:
    """How the free queue begins; "" if the trace does not say. Requests that finish in a step give their blocks back
    after it."""
    if not state.free and len(state.owners) < state.num_blocks - 1:
        return ""
    named = " → ".join(map(str, state.free[:IN_LINE])) or "empty"
    return f"free queue after it: {named}{' → …' if state.num_free > IN_LINE else ''}"


# ---------------------------------------------------------------------- where things are


@dataclass(frozen=True)
class Layout:
    """Which rows of the pool are drawn, and how high the picture is; the same for all steps of a player.

    Attributes:
        rows: (first block, last block, drawn), top to bottom. Rows that are not drawn are joined and only named.
    """

    rows: list[tuple[int, int, bool]]
    height: int

    @classmethod
    def of(cls, states: Sequence[PoolState]) -> Layout:
        num_blocks = states[0].num_blocks
        used = {0} | {block // COLUMNS for state in states for block in state.owners}
        if num_blocks > ALL_ROWS * COLUMNS:
            shown = set(sorted(used)[:MAX_ROWS])
        else:
            shown = set(range(ALL_ROWS))
        rows: list[tuple[int, int, bool]] = []
        for drawn, group in itertools.groupby(range(-(-num_blocks // COLUMNS)), shown.__contains__):
            numbers = list(group)
            for first, last in ((n, n) for n in numbers) if drawn else [(numbers[0], numbers[-1])]:
                rows.append((first * COLUMNS, min((last + 1) * COLUMNS, num_blocks) - 1, drawn))
        pool = TOP + sum(PITCH if drawn else 26 for _, _, drawn in rows) + 22
        tables = max(TOP + _tables_height(state) for state in states)
        return cls(rows, max(pool, tables) + 44)

    def text(self, state: PoolState) -> str:
        lines = [state.title, "", f"pool of {state.num_blocks:,} blocks, {state.block_size} tokens each "
                 "(# can be found by its content)"]
        for first, last, drawn in self.rows:
            cells = (f"{b:>4} {holder(state, b)} {fill(state, b) if b in state.owners else ''}"
                     f"{'#' if b in state.hashed else ''}" for b in range(first, last + 1))
            lines.append("".join(cell.ljust(17) for cell in cells).rstrip() if drawn
                         else f"   ⋮ {_idle_text(state, first, last)}")
        lines += [line for line in (queue_line(state),) if line] + [""]
        for request in list(state.tables)[:MAX_TABLES]:
            lines.append(f"{request_title(state, request)} {state.tables[request]}")
        return "\n".join([*lines, *remarks(state)]).rstrip()

    def document(self, state: PoolState) -> str:
        return document(WIDTH, self.height, state.title, _svg(state, self))


def _tables_height(state: PoolState) -> int:
    cells = [len(cells_shown(len(table))) for table in list(state.tables.values())[:MAX_TABLES]]
    return sum(28 + 44 * -(-n // TABLE_COLUMNS) for n in cells) + 18 * len(remarks(state))


def _idle_text(state: PoolState, first: int, last: int) -> str:
    def count(blocks: Any) -> int:
        return sum(first <= block <= last for block in blocks)

    used, findable = count(state.owners), count(state.hashed)
    return (f"blocks {first:,} to {last:,}: {f'{used:,} in use' if used else 'free'}"
            + (f" ({findable:,} of them #)" if findable else ""))


# ---------------------------------------------------------------------- as SVG; block_table.js does the same


def _svg(state: PoolState, layout: Layout) -> str:
    parts = [text(MARGIN, 26, state.title, "t"),
             text(MARGIN, 50, f"the pool: {state.num_blocks:,} physical blocks of {state.block_size} tokens", "h"),
             text(TABLES_X, 50, "block tables: logical block → physical block", "h")]
    y = TOP
    for first, last, drawn in layout.rows:
        if drawn:
            parts += [_pool_cell(state, first + i, MARGIN + i * PITCH, y) for i in range(last - first + 1)]
        else:
            parts.append(text(MARGIN, y + 14, f"⋮  {_idle_text(state, first, last)}", "h"))
        y += PITCH if drawn else 26
    if line := queue_line(state):
        parts.append(text(MARGIN, y + 14, line, "h"))
    y = TOP
    for request in list(state.tables)[:MAX_TABLES]:
        parts += [f'<rect class="p{_color(state, request)}" x="{TABLES_X}" y="{y + 1}" width="12" height="12" rx="2"/>',
                  text(TABLES_X + 18, y + 12, request_title(state, request), "s")]
        y += 20
        table = state.tables[request]
        cells = cells_shown(len(table))
        for place, i in enumerate(cells):
            left, top = TABLES_X + place % TABLE_COLUMNS * PITCH, y + place // TABLE_COLUMNS * 44
            parts.append(text(left + 26, top + 24, f"{len(table) - MAX_CELLS + 1:,} more", "g") if i is None
                         else _table_cell(state, i, table[i], left, top))
        y += -(-len(cells) // TABLE_COLUMNS) * 44 + 8
    for line in remarks(state):
        parts.append(text(TABLES_X, y + 12, line, "h"))
        y += 18
    return "".join(parts) + _legend(layout.height - 34)


def _pool_cell(state: PoolState, block: int, x: int, y: int) -> str:
    used = block in state.owners
    return (_open(state, block, x, y, CELL) + f'<text class="n {"b" if used else "g"}" x="26" y="19">{block}</text>'
            + f'<text{"" if used else _GREY} x="26" y="32">{html.escape(holder(state, block), quote=False)}</text>'
            + (f'<text{"" if used else _GREY} x="26" y="44">{words}</text>' if (words := fill(state, block)) else "")
            + "</g>")


def _table_cell(state: PoolState, i: int, block: int, x: int, y: int) -> str:
    return (_open(state, block, x, y, 40) + f'<text x="16" y="12">{i} →</text>'
            f'<text class="n b" x="26" y="32">{block}</text></g>')


_GREY = ' class="g"'


def _open(state: PoolState, block: int, x: int, y: int, height: int) -> str:
    """A block's box: one band of colour per holder, as wide as it is full; dashed if free and findable."""
    requests, findable = state.owners.get(block, [])[:4], block in state.hashed
    style = "c" if requests else "c d" if findable else "c z" if block == 0 else "c l"
    parts = [f'<g transform="translate({x},{y})" data-b="{block}"><rect class="{style}" width="52" height="{height}" '
             'rx="3"/>']
    band = 50 * state.filled.get(block, 0) // state.block_size // max(len(requests), 1)
    for n, request in enumerate(requests):
        parts.append(f'<path class="p{_color(state, request)}" d="M{1 + n * band} 1h{band}v{height - 2}h-{band}z"/>')
    return "".join(parts) + ('<text class="b" x="45" y="13">#</text>' if findable else "")


def _color(state: PoolState, request: str) -> int:
    return state.requests.index(request) % NUM_COLORS


def _legend(y: int) -> str:
    """The four things that need a word."""
    parts, x = [], MARGIN
    for kind, words in (("shared", "shared: in several tables"), ("part", "partly filled: tokens / size"),
                        ("full", "# full, can be found by its content"), ("free", "# free, can still be found")):
        parts.append(box(x, y + 4, 14, 14, "c d" if kind == "free" else "c", radius=3))
        for style, start, width in {"shared": [("p0", 1, 6), ("p1", 7, 6)], "part": [("p0", 1, 4)],
                                    "full": [("p0", 1, 12)], "free": []}[kind]:
            parts.append(box(x + start, y + 5, width, 12, style))
        parts.append(text(x + 20, y + 15, words, "h"))
        x += 44 + 6 * len(words)
    return "".join(parts)


# ---------------------------------------------------------------------- what the player replays


def _payload(states: Sequence[PoolState], layout: Layout) -> dict[str, Any]:
    """The states as differences, each from the one before.

    frames: [step, tables, lengths, hashed, free, number of free blocks, remarks], where
        tables is a list of [request, blocks in common with the old table, further blocks ...], [request, -1] if gone;
        lengths is a flat list request, tokens, request, tokens ... of what changed;
        hashed is a list of blocks that changed sides;
        free is [] if it is the same, else [gone from the old list, come before it, come after it];
        remarks is 0 if they are the same, else a list of indices into `lines`.
    """
    number = {request: i for i, request in enumerate(states[-1].requests)}
    lines: dict[str, int] = {}
    frames: list[list[Any]] = []
    tables: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    hashed: frozenset[int] = frozenset()
    free: list[int] = []
    said: list[int] = []
    for state in states:
        changes: list[list[int]] = [[number[r], -1] for r in tables if r not in state.tables]
        for request, table in state.tables.items():
            old = tables.get(request, [])
            kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, table)))
            if request not in tables or kept < max(len(old), len(table)):
                changes.append([number[request], kept, *table[kept:]])
        grown = [x for r, n in state.lengths.items() if lengths.get(r) != n for x in (number[r], n)]
        say = [lines.setdefault(line, len(lines)) for line in remarks(state)]
        frames.append([state.step, changes, grown, sorted(hashed ^ state.hashed), _moves(free, state.free),
                       state.num_free, 0 if say == said else say])
        tables, lengths, hashed, free, said = state.tables, lengths | state.lengths, state.hashed, state.free, say
    return {"n": states[0].num_blocks, "s": states[0].block_size, "r": list(number), "rows": layout.rows,
            "w": WIDTH, "h": layout.height, "foot": _legend(layout.height - 34), "lines": list(lines),
            "frames": frames}


def _moves(old: list[int], new: list[int]) -> list[list[int]]:
    """[gone, come at the front, come at the back] that make `new` of `old`."""
    if old == new:
        return []
    kept = [block for block in old if block in new]
    if not kept:
        return [old, new, []]
    first = new.index(kept[0])
    if new[first:first + len(kept)] != kept:  # some block left the queue and came back in one step
        return [old, new, []]
    return [[block for block in old if block not in new], new[:first], new[first + len(kept):]]
