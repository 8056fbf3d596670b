"""The registry of the contract: which rows there are, and which check proves each.

    @row("S5", "temperature", SAME)
    def check() -> None:
        '''What a user of vLLM should know about it, in a sentence or two.'''

Owns: the list of rows, and their order in the document. Does not own: running the checks (`tests/test_conformance.py`)
or writing the document (`tools/write_conformance.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SAME, DIFFERS, NOT_HERE = "same", "differs", "not here"


def numbered(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}{i}" for i in range(first, last + 1)]


# Every row, by the topic under which the document shows it.
TOPICS = {
    "Importing": numbered("O", 4, 5),
    "Sampling parameters": numbered("S", 1, 32),
    "How they work together": [*numbered("X", 1, 8), *numbered("P", 9, 13)],
    "Arguments of LLM": numbered("L", 1, 31),
    "Methods of LLM": numbered("L", 40, 60),
    "What comes back": numbered("O", 1, 3),
    "The asynchronous engine": numbered("A", 1, 7),
    "Inside the engine": numbered("E", 1, 22),
    "The server's routes": numbered("R", 1, 10),
    "What clients may ask for": numbered("Q", 1, 10),
    "What the server answers": numbered("W", 1, 14),
    "Metrics and benchmarks": numbered("N", 1, 5),
}


@dataclass(frozen=True)
class Row:
    """One row: `check` raises if the row does not hold; its docstring is the sentence that users read."""

    row_id: str
    subject: str
    verdict: str
    check: Callable[..., None]

    @property
    def sentence(self) -> str:
        return " ".join((self.check.__doc__ or "").split())

    @property
    def place(self) -> int:
        """Among all rows."""
        return [row_id for row_ids in TOPICS.values() for row_id in row_ids].index(self.row_id)


ROWS: list[Row] = []


def row(row_id: str, subject: str, verdict: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the check of a row. Its arguments are pytest fixtures by name."""
    def register(check: Callable[..., None]) -> Callable[..., None]:
        ROWS.append(Row(row_id, subject, verdict, check))
        return check

    return register
