"""Grading: what students hand in is run, judged by the course's checks, and written into a table."""

import csv
import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.exercises.test_exercises import SOURCES
from tutorial_engine.checks import Check
from tutorial_engine.exercises import getting_started
from tutorial_engine.grading import COLUMNS, grade, tasks

ADA = """\
%matplotlib inline
1 / 0
---
from tutorial_engine.exercises import getting_started as course
def fits(weights, bytes_per_token, tokens, gib): return True
---
def kv_bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return 2 * layers * kv_heads * head_dim * bytes_per_number
num_blocks = course.num_blocks
"""
BOB = """\
from tutorial_engine.exercises import getting_started
def num_blocks(cache_bytes, bytes_per_token, block_size):
    raise NotImplementedError("Return the number of whole blocks.")
---
def fits(weights, bytes_per_token, tokens, gib):
    return 2 * weights + tokens * bytes_per_token <= gib * 2**30
print("marks of this notebook: {}")
"""


def hand_in(folder: Path, cells: str) -> None:
    folder.mkdir(parents=True)
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells.split("---\n")])
    nbformat.write(notebook, folder / "05_getting_started (1).ipynb")


def run(folder: Path, *arguments: str) -> int:
    return pytest.main(["-q", "-p", "no:cacheprovider", "-p", "tutorial_engine.grading",
                        "--rootdir", str(folder), "-c", os.devnull, str(folder), *arguments])  # fmt: skip


def test_submissions_become_tests_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_in(tmp_path / "ada", ADA)
    hand_in(tmp_path / "bob", BOB)
    (tmp_path / "bob" / "notes.txt").write_text("no notebook")
    status = run(tmp_path, "--marks", str(tmp_path / "marks.csv"))
    printed = capsys.readouterr().out
    assert status == 1 and "4 failed, 2 passed" in printed, printed
    assert "✗ fits: not yet" in printed and "Traceback" not in printed
    with (tmp_path / "marks.csv").open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("ada", "kv_bytes_per_token", "passed"), ("ada", "num_blocks", "passed"), ("ada", "fits", "not yet"),
        ("bob", "kv_bytes_per_token", "missing"), ("bob", "num_blocks", "to do"), ("bob", "fits", "not yet"),
    ]  # fmt: skip
    assert "only 92 % may be used" in " ".join(rows[-1][5].split())


def test_a_notebook_of_something_else_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_in(tmp_path / "eve", "1 + 1\n")
    assert run(tmp_path) not in (0, 5) and "is no exercise of this course" in capsys.readouterr().out


def test_grade_knows_all_tasks() -> None:
    names = {"kv_bytes_per_token": getting_started.kv_bytes_per_token, "fits": None}
    verdicts = {name: verdict for name, (verdict, _) in grade("getting_started", names).items()}
    assert verdicts == {"kv_bytes_per_token": "passed", "num_blocks": "missing", "fits": "not yet"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_exercise_can_be_graded(source: Path) -> None:
    """The module has the source's name, and the references pass their own checks."""
    checks = tasks(source.stem.partition("_")[2])
    assert checks and all(isinstance(check, Check) and check(check.reference) for check in checks.values())
