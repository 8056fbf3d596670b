"""vLLM's public behaviour, row by row: what is the same here, what differs and why, and what is not here.

Each row has a short check, written as a user of the package would write it. The thorough tests are in `tests/api` and
`tests/core`; these are the ones that a table can be made of.
"""

from tests.conformance import async_engine, engine, interactions, llm, outputs, sampling_params, server  # noqa: F401
from tests.conformance.registry import DIFFERS, NOT_HERE, ROWS, SAME, TOPICS, Row

__all__ = ["DIFFERS", "NOT_HERE", "ROWS", "SAME", "TOPICS", "Row"]
