"""`watch`: see the engine at work, then play it back.

    with watch(llm) as trace:
        llm.generate(prompts, params)

While the engine runs, each picture shows the step that has just ended, at most 15 times a second and never for more
than a tenth of the time. When the block ends, the pictures become players of all steps; `trace` holds the steps. It
works alike with `LLM`, `LLMEngine` and `AsyncLLM`, whose thread then paints.

Where nobody is watching (a test or a build replays the notebook, or there is none), only the end is shown, once: the
stored output is then the same in every run.

Owns: when a picture is painted. Does not own: the pictures, recording (`trace.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tutorial_engine.notebook import is_live
from tutorial_engine.trace import Names, Trace
from tutorial_engine.viz.block_table import block_table
from tutorial_engine.viz.occupancy import batch_occupancy
from tutorial_engine.viz.picture import Picture

FRAMES_PER_SECOND = 15
MAX_SHARE = 0.1  # of the time may go into painting

View = Callable[..., Picture]  # view(trace, step=-1): a picture of one step; view(trace), view(trace, start=5): of all


@contextmanager
def watch(llm: Any, *views: View, names: Names = None, start: int | None = None) -> Iterator[Trace]:
    """Record what an engine does inside a ``with`` block, and show it.

    Args:
        llm: an LLM, LLMEngine or AsyncLLM.
        views: functions of this package that draw a trace, as `block_table`. None given: `block_table` and
            `batch_occupancy`.
        names: what the requests are called: ``{"33": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        start: the step at which the players open; of a shorter run, its last. None: each view decides.

    Yields:
        The `Trace`, which grows while the engine runs.

    Raises:
        TypeError: something else than an engine, than functions, or than names.
    """
    if not all(callable(view) for view in views):
        raise TypeError(f"watch(llm, view, ...) needs functions that draw a trace, as block_table; got {views!r}.")
    trace = Trace(llm, names=names)
    listeners = getattr(llm, "llm_engine", llm).listeners
    painter = Painter(trace, views or (block_table, batch_occupancy), start)
    with trace:
        listeners.append(painter)
        try:
            yield trace
        finally:
            if painter in listeners:  # an engine drops a listener that failed
                listeners.remove(painter)
            painter.finish()


class Painter:
    """Shows the newest step of a trace, if the last picture is long enough ago."""

    def __init__(self, trace: Trace, views: Sequence[View], start: int | None = None) -> None:
        self._trace, self._views, self._start = trace, views, start
        self._handles = [_display({"text/plain": "nothing computed yet"}, live=True) for _ in views
                         ] if is_live() and _in_notebook() else []
        self._heights = [0] * len(views)
        self._next = 0.0
        self._finished = False
        self._lock = threading.Lock()  # the engine's thread must not paint over the end

    def __call__(self, *step: Any) -> None:
        """The engine calls this after each step."""
        began = time.monotonic()
        if not self._handles or began < self._next:
            return
        with self._lock:
            if not self._finished:
                for i, (handle, view) in enumerate(zip(self._handles, self._views)):
                    handle.update(self._frame(i, view(self._trace, step=-1)), raw=True)
        ended = time.monotonic()
        self._next = max(began + 1 / FRAMES_PER_SECOND, ended + (ended - began) * (1 / MAX_SHARE - 1))

    def _frame(self, i: int, picture: Picture) -> dict[str, str]:
        """As high as the highest so far: the page below should not jump."""
        self._heights[i] = max(self._heights[i], picture.height)
        return {"text/html": f'<div style="min-height: {self._heights[i]}px">{picture.image()}</div>',
                "text/plain": picture.text}

    def finish(self) -> None:
        """Show all steps."""
        with self._lock:
            self._finished = True
        if not self._trace.records:
            return
        last = len(self._trace) - 1
        where = {} if self._start is None else {"start": min(max(self._start, -1 - last), last)}
        for i, view in enumerate(self._views):
            bundle = view(self._trace, **where)._repr_mimebundle_()
            if self._handles:
                self._handles[i].update(bundle, raw=True)
            else:
                _display(bundle)


def _in_notebook() -> bool:
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def _display(bundle: dict[str, str], live: bool = False) -> Any:
    """Show something; with `live`, return a handle to replace it."""
    from IPython.display import display

    if not live and not _in_notebook():
        print(bundle["text/plain"])
        return None
    return display(bundle, raw=True, display_id=True) if live else display(bundle, raw=True)
