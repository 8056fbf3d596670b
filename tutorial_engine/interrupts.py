"""Ctrl-C between two lines of bookkeeping must not leave half of it done.

A notebook's "interrupt" raises KeyboardInterrupt wherever Python happens to be: in the model, where it is welcome, or
between taking a block from the free queue and writing it into a table, where it would lose the block for ever.

Owns: when an interrupt may arrive. Does not own: what is done about it (`llm_engine.py`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class HeldInterrupts:
    """While the context is open, SIGINT waits; it is delivered at the end, or inside `let_through()`.

    Python delivers signals to the main thread only, so in any other thread there is nothing to do.
    """

    def __enter__(self) -> HeldInterrupts:
        self._waiting: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGINT)
        if callable(self._handler):  # else interrupts are ignored, or not Python's to hold
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self._waiting = signum, frame

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Here an interrupt may arrive."""
        if not callable(self._handler):
            yield
            return
        try:
            signal.signal(signal.SIGINT, self._handler)
            yield
        finally:
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *exc_info: Any) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._waiting and exc_info[0] is None:  # an error on its way says enough
                self._handler(*self._waiting)
