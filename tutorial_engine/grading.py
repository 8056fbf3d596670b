"""Grade exercises with pytest: every task of every notebook that was handed in is one test.

    python -m pytest -p tutorial_engine.grading submissions --marks marks.csv

    submissions/ada/05_getting_started.ipynb     one folder for each student; how a file is called does not matter
    submissions/bob/05_getting_started(1).ipynb

A notebook is run from top to bottom in a kernel of its own, cells that fail included; what it then calls
`kv_bytes_per_token`, say, goes to that task's check. Its stored outputs and its own check cells do not count.

Owns: running what was handed in, and the table of marks. Does not own: the verdicts (`exercises/`).
It runs other people's code: do that on a machine, or in a container, where nothing else lies. And code that runs can
also change what judges it, so the marks are as honest as those who handed in.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutorial_engine.checks import Check

CELL_TIMEOUT_S = 60
MARK = "marks of this notebook: "
COLUMNS = ("student", "file", "exercise", "task", "verdict", "message")
_IMPORT = re.compile(r"^\s*from tutorial_engine\.exercises import (\w+)", re.MULTILINE)


def tasks(exercise: str) -> dict[str, Check]:
    """The checks of an exercise, by the name of the function or class that each is about.

    Raises:
        ModuleNotFoundError: the course has no such exercise.
    """
    module = importlib.import_module(f"tutorial_engine.exercises.{exercise}")
    return {check.name: check for check in vars(module).values() if isinstance(check, Check)}


def grade(exercise: str, names: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """(verdict, message) of each task; `names` is what a notebook has defined, by name."""
    marks = {}
    for name, check in tasks(exercise).items():
        if name in names:
            result = check(names[name])
            marks[name] = (result.status, repr(result))
        else:
            marks[name] = ("missing", f"The notebook does not define {name}, or the cell that does failed.")
    return marks


def run_notebook(path: Path, exercise: str) -> dict[str, tuple[str, str]]:
    """Run a notebook in a kernel, then grade what it has defined."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(
        f"import json as _json\nfrom tutorial_engine.grading import MARK as _mark, grade as _grade\n"
        f"print('\\n' + _mark + _json.dumps(_grade({exercise!r}, dict(globals()))))"))
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, interrupt_on_timeout=True, allow_errors=True,
                            kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute()
    except DeadKernelError:
        return dict.fromkeys(tasks(exercise), ("no verdict", "The kernel died: the notebook may need too much memory."))
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].get("outputs", ()))
    for line in printed.splitlines():
        if line.startswith(MARK):
            return {name: (verdict, message) for name, (verdict, message) in json.loads(line[len(MARK):]).items()}
    return dict.fromkeys(tasks(exercise), ("no verdict", "The notebook ended before it could be graded."))


class Submission(pytest.File):
    """One notebook that was handed in."""

    exercise = ""
    marks: dict[str, tuple[str, str]] | None = None

    def collect(self) -> Iterator[Task]:
        """One item for each task of the exercise that the notebook imports."""
        import nbformat

        source = "\n".join(c.source for c in nbformat.read(self.path, as_version=4).cells if c.cell_type == "code")
        found = _IMPORT.search(source)
        if found is None:
            raise self.CollectError(f"{self.path} is no exercise of this course: none of its cells begins with "
                                    "'from tutorial_engine.exercises import ...'")
        self.exercise = found[1]
        for name in tasks(self.exercise):
            yield Task.from_parent(self, name=name)


class Task(pytest.Item):
    """One task in it. It passes if its check does."""

    verdict = message = ""

    def runtest(self) -> None:
        submission: Any = self.parent
        if submission.marks is None:
            submission.marks = run_notebook(self.path, submission.exercise)
        self.verdict, self.message = submission.marks[self.name]
        if self.verdict != "passed":
            raise NotPassed(self.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The check's own words, without a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, NotPassed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.parent.name}: {self.name}"


class NotPassed(Exception):
    """A check did not pass; the message is what it said."""


# ---------------------------------------------------------------------- pytest's hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--marks", type=Path, metavar="FILE", help="write one line for each student and task, as CSV")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Submission | None:
    """Every notebook, except the copies that Jupyter keeps."""
    if file_path.suffix == ".ipynb" and ".ipynb_checkpoints" not in file_path.parts:
        return Submission.from_parent(parent, path=file_path)
    return None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table."""
    target = session.config.getoption("--marks")
    if target is None:
        return
    done = [item for item in session.items if isinstance(item, Task)]
    with target.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for item in done:
            parent: Any = item.parent
            table.writerow((item.path.parent.name, item.path.name, parent.exercise, item.name, item.verdict,
                            item.message))
