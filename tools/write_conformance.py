"""Write docs/conformance.md from the registry of the contract: ``python tools/write_conformance.py``.

The registry is `tests/conformance`. What a table says about a row is the docstring of the check that holds it;
`tests/test_conformance.py` runs the checks, and fails if the document is not what this script writes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "conformance.md"
sys.path.insert(0, str(ROOT))

from tests.conformance import DIFFERS, NOT_HERE, ROWS, SAME, TOPICS, Row  # noqa: E402
from tests.conformance.outputs import IMPORTS  # noqa: E402

MARKS = {SAME: "same", DIFFERS: "**differs**", NOT_HERE: "*not here*"}

INTRODUCTION = """\
# Conformance with vLLM

This engine has vLLM's public interface: the same names, arguments, defaults and errors, so that a notebook moves over
by changing its import, in either direction. The reference is vLLM 0.33. This page goes through that interface row by
row. Each row has a check that runs with the tests, and its text below is that check's own description:

    pytest tests/test_conformance.py

* **same**: a program sees the same here as with vLLM, apart from its speed.
* **differs**: it works, but something about it is not the same; the row says what, and why.
* **not here**: this engine does not have it. Asking for it is an error that says so; nothing that would
  change an answer is accepted and ignored.
"""

DIFFERENCES = """\
## What differs, in short

* **Sampled tokens are other tokens.** Both engines draw reproducibly from the same distribution, but with other random
  numbers. Greedy tokens can be compared, and sampled ones by their distribution only.
* **A CPU computes in float32**, and takes no more than 2 GiB for the KV cache unless it is told to: on a laptop, greedy
  tokens should not depend on who else is in the batch, and other programs want memory too.
* **Errors name the parameter.** `VLLMValidationError` has `.parameter` and `.value` as in vLLM. Here it is also a
  `ValueError`, as it was in vLLM's older releases, so that `except` clauses written for either keep working.
* **A stored output does not change.** What `LLMEngine.step()` returned is a snapshot; in vLLM the `token_ids` of
  cumulative outputs may be one list that goes on growing.
* **Whatever is not here is refused by name**, at the latest when a request is added, and before any other request could
  notice.
"""

IMPORTING = "Write `tutorial_engine` in place of `vllm`; these paths lead to the same names:\n"
# Topics whose subjects are names in a program.
CODE = ("Sampling parameters", "Arguments of LLM", "Methods of LLM", "What comes back")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def counted() -> str:
    """How many rows of each topic have which verdict."""
    rows = []
    total: Counter[str] = Counter()
    for topic in TOPICS:
        count = Counter(row.verdict for row in rows_of(topic))
        total += count
        rows.append([topic, *(str(count[verdict]) for verdict in MARKS)])
    rows.append(["**all**", *(f"**{total[verdict]}**" for verdict in MARKS)])
    return table(["", *MARKS], rows)


def rows_of(topic: str) -> list[Row]:
    by_id = {row.row_id: row for row in ROWS}
    return [by_id[row_id] for row_id in TOPICS[topic]]


def subject(row: Row, topic: str) -> str:
    """Names in code style, words as they are."""
    parts = row.subject.split(", ")
    is_code = topic in CODE and all(" " not in part for part in parts)
    return ", ".join(f"`{part}`" for part in parts) if is_code else row.subject


def imports() -> str:
    def statement(module: str, names: list[str]) -> list[str]:
        path = f"vllm.{module}".rstrip(".")
        return [f"`{path}`", f"`tutorial_engine{path.removeprefix('vllm')}`", ", ".join(f"`{n}`" for n in names)]

    return table(["vLLM", "here", "names"], [statement(module, names) for module, names in IMPORTS.items()])


def write() -> str:
    """The document."""
    parts = [INTRODUCTION, counted(), DIFFERENCES]
    for topic in TOPICS:
        parts.append(f"## {topic}\n")
        if topic == "Importing":
            parts += [IMPORTING, imports()]
        parts.append(table(["row", "subject", "", "what a user of vLLM should know"],
                           [[row.row_id, subject(row, topic), MARKS[row.verdict], row.sentence]
                            for row in rows_of(topic)]))
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(write(), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
