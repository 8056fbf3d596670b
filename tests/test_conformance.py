"""The contract with vLLM: each of its rows has one check, which holds, and stands in docs/conformance.md.

`pytest tests/test_conformance.py` ends with a table of all rows; `-k S5-` runs one of them.
"""

import inspect
from collections import Counter

import pytest

from tests.api.conftest import llm, shared_llm, tiny_model  # noqa: F401
from tests.conformance import ROWS, TOPICS, Row
from tests.server.conftest import letters, letters_server  # noqa: F401
from tools.write_conformance import DOCUMENT, write


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.row_id}-{row.subject}")
def test_row(row: Row, request: pytest.FixtureRequest) -> None:
    request.node.user_properties.append(("row", row))
    row.check(**{name: request.getfixturevalue(name) for name in inspect.signature(row.check).parameters})


def test_every_row_is_there_once() -> None:
    listed = [row_id for row_ids in TOPICS.values() for row_id in row_ids]
    assert Counter(row.row_id for row in ROWS) == Counter(listed) and max(Counter(listed).values()) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row_id)
def test_row_says_something(row: Row) -> None:
    assert row.verdict in ("same", "differs", "not here")
    assert row.sentence.endswith(".") and 15 < len(row.sentence) < 400, row.sentence


def test_document_is_what_the_script_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == write(), "run: python tools/write_conformance.py"
