"""`/dashboard`: the engine at work, in a browser, with no other service.

    page --- GET /dashboard/state, every half second ---> what the last steps were like, as numbers
                                                          (from a Trace that runs while somebody asks)

An engine that is watched plans one step at a time, so that nobody sees the queues a step too early. So recording begins
with the first question and ends some seconds after the last one; a page that is hidden asks nothing.

The page learns how many tokens a request has, not which ones; requests have numbers there, not the ids that would let
somebody end them.

Owns: when to record, what the page is told. Does not own: recording (`trace.py`), drawing (`dashboard.html`).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.server.errors import json_response
from tutorial_engine.server.serving import answer
from tutorial_engine.trace import StepRecord, Trace
from tutorial_engine.viz.activity import activities
from tutorial_engine.viz.occupancy import describe
from tutorial_engine.viz.palette import DARK, LIGHT, NAMES
from tutorial_engine.viz.pool_state import PoolState, pool_state

WINDOW = 64  # steps that the page shows
PATIENCE_S = 3.0  # recording ends so long after the last question
MAX_ROWS, MAX_CELLS = 40, 2048  # requests and blocks that are drawn one by one
FREE, CACHED, SHARED = 0, -1, -2  # what a block is, if not of one request
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                      "connect-src 'self'", "Cache-Control": "no-store"}
router = APIRouter()


@router.get("/dashboard", include_in_schema=False)
async def page() -> Response:
    """The page: one file, nothing loaded from elsewhere."""
    themes = [";".join(f"--{name}:{color}" for name, color in zip(NAMES, colors)) for colors in (LIGHT, DARK)]
    text = (Path(__file__).parent / "dashboard.html").read_text(encoding="utf-8")
    for name, theme in zip(("LIGHT", "DARK"), themes):
        text = text.replace(f"/* {name} */", theme)
    return Response(text, media_type="text/html", headers=HEADERS)


@router.get("/dashboard/state", include_in_schema=False)
async def state(request: Request) -> Response:
    """What the page shows. Asking keeps the recording going."""
    async def work() -> Response:
        return json_response(await request.app.state.dashboard.state())

    return await answer(request, work())


class Dashboard:
    """Records an engine while somebody asks.

    Args:
        llm: the engine. name: of its model, as it is shown.
    """

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self.llm, self.name = llm, name
        self._trace: Trace | None = None  # while recording
        self._asked = 0.0
        self._gate = threading.Lock()  # between "nobody asked" and "so stop" nobody may ask
        self._numbers: dict[str, int] = {}  # request -> how the page calls it
        self._drawing = asyncio.Lock()
        self._answer: tuple[tuple[Trace, int], dict[str, Any]] | None = None

    @property
    def is_recording(self) -> bool:
        return self._trace is not None

    async def state(self) -> dict[str, Any]:
        """The last steps as JSON. Those who ask at the same time share the work.

        Raises:
            EngineDeadError: there will be no further steps.
        """
        await self.llm.check_health()
        trace = self._watch()
        async with self._drawing:
            key = trace, trace.records[-1].step if trace.records else -1
            if self._answer is None or self._answer[0] != key:
                self._answer = key, await asyncio.to_thread(self._describe, trace)
        scheduler = self.llm.llm_engine.scheduler  # as it is now: requests also end between steps
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return self._answer[1] | {"running": len(scheduler.running), "waiting": len(scheduler.waiting),
                                  "in_use": self.llm.llm_engine.num_gpu_blocks - 1 - free}

    # Recording

    def _watch(self) -> Trace:
        with self._gate:
            self._asked = time.monotonic()
            listeners = self.llm.llm_engine.listeners
            if self._trace is None or self._record not in listeners:  # the engine drops a listener that failed
                self._trace = Trace(self.llm)
                listeners.append(self._record)
            return self._trace

    def _record(self, *step: Any) -> None:
        """The engine's thread calls this after each step."""
        with self._gate:
            if time.monotonic() - self._asked > PATIENCE_S:
                self.llm.llm_engine.listeners.remove(self._record)
                self._trace = None
                return
            self._trace.record(*step)
            if len(self._trace) >= 16 * WINDOW:
                self._trace.forget(WINDOW)

    # What the page is told

    def _describe(self, trace: Trace) -> dict[str, Any]:
        engine = self.llm.llm_engine
        answer: dict[str, Any] = {
            "model": self.name, "num_blocks": engine.num_gpu_blocks, "block_size": engine.config.block_size,
            "max_num_seqs": engine.config.max_num_seqs, "steps": [], "rows": [], "says": "Nothing was computed since "
            "this page was opened."}
        window = copy.copy(trace)
        window.forget(WINDOW)
        if not window.records:
            return answer
        last, rows = window.records[-1], activities(window)
        self._number(rows)
        pool = pool_state(window, -1)
        steps = [_step(record, before) for before, record in zip([None, *window.records], window.records)]
        return answer | {
            "says": describe(last), "step": last.step, "budget": last.budget, "steps": steps,
            "rows": [[self._numbers[request], [[i, c.kind, c.tokens, int(c.preempted)] for i, c in cells.items()]]
                     for request, cells in list(rows.items())[-MAX_ROWS:]],
            "more_rows": max(len(rows) - MAX_ROWS, 0), "shared": pool.num_shared,
            "cached": len(pool.hashed - pool.owners.keys()), **self._blocks(pool), **_latencies(window)}

    def _number(self, requests: Any) -> None:
        """Requests that the window has left lose their numbers, and newcomers get the next ones."""
        known = {request: self._numbers[request] for request in requests if request in self._numbers}
        following = itertools.count(max(self._numbers.values(), default=0) + 1)
        self._numbers = {request: known[request] if request in known else next(following) for request in requests}

    def _blocks(self, pool: PoolState) -> dict[str, Any]:
        """The map as [[what a cell is, how many such cells follow each other], ...]. Of a large pool, a cell stands for
        several blocks and shows the first of them that is in use."""
        size = -(-pool.num_blocks // MAX_CELLS)

        def kind(block: int) -> int:
            owners = pool.owners.get(block, [])
            if len(owners) == 1:
                return self._numbers.get(owners[0], SHARED)
            return SHARED if owners else CACHED if block in pool.hashed else FREE

        cells = (next((k for k in map(kind, range(i, min(i + size, pool.num_blocks))) if k != FREE), FREE)
                 for i in range(0, pool.num_blocks, size))
        return {"blocks_per_cell": size, "blocks": [[k, len(list(group))] for k, group in itertools.groupby(cells)]}


def _step(record: StepRecord, before: StepRecord | None) -> list[float]:
    """[milliseconds, prompt and output tokens computed, requests in it]; a step lasts from the end of the one before,
    or from its own begin if the engine was idle."""
    began = max(record.started, before.time if before else 0.0)
    return [round(1000 * (record.time - began), 3), record.num_tokens, len(record.scheduled)]


def _latencies(trace: Trace) -> dict[str, Any]:
    """Milliseconds in this window: TTFT by the position of the step that brought the first token, ITL of all tokens,
    tokens per second."""
    arrived: dict[str, list[float]] = {}
    last: dict[str, float] = {}
    ttfts: list[list[float]] = []
    itls: list[float] = []
    for i, record in enumerate(trace.records):
        arrived |= record.arrived
        for request, ids in record.sampled.items():
            if not ids:
                continue
            start, tokens = record.scheduled[request]
            came, prompt = arrived.get(request, (0.0, -1))
            if start + tokens == prompt:  # after a preemption it would be more: the answer is computed again, too
                ttfts.append([i, round(1000 * (record.time - came), 3)])
            elif request in last:
                itls += [1000 * (record.time - last[request]) / len(ids)] * len(ids)
            last[request] = record.time
    seconds = trace.records[-1].time - trace.records[0].started
    generated = sum(len(ids) for record in trace.records for ids in record.sampled.values())
    return {"ttfts": ttfts, "ttft_ms": _spread([ms for _, ms in ttfts]), "itl_ms": _spread(itls),
            "tokens_per_s": round(generated / seconds, 1) if seconds > 0 else 0.0}


def _spread(values: list[float]) -> list[float] | None:
    """[median, 99th percentile]; the nearest of the values, so that each of them really was."""
    if not values:
        return None
    values = sorted(values)
    return [round(values[min(int(p * len(values)), len(values) - 1)], 2) for p in (0.5, 0.99)]
