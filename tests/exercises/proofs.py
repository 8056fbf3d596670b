"""Run an exercise's cells without a kernel, and look at what its checks said.

Milliseconds instead of seconds, so that every exercise can be proved on every run; that the committed outputs agree is
nbval's part.
"""

import ast
import contextlib
import io
from pathlib import Path
from typing import Any

from tools.build_exercises import assemble
from tutorial_engine.checks import Result


def run(source: Path, kind: str, root: Path) -> list[tuple[set[str], Any]]:
    """Execute one notebook's code cells. Returns, per cell, its tags and the value of its last line (or None)."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in assemble(source, kind, root).cells:
        tags = set(cell.metadata.get("tags", []))
        if cell.cell_type == "code" and "setup" not in tags:
            with contextlib.redirect_stdout(io.StringIO()):
                values.append((tags, _value(cell.source, scope)))
    return values


def _value(code: str, scope: dict[str, Any]) -> Any:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope) if last else None


def problems(source: Path, root: Path) -> list[str]:
    """What is wrong with an exercise: one message for each proof that fails.

        (a) the answers pass                  (b) the gaps are met with advice, and the notebook runs to its end
        (c) in step: see `test_exercises.py`  (d) each known wrong answer is rejected, with a message of its own
    """
    answers, gaps = run(source, "solutions", root), run(source, "exercises", root)
    found = []
    passed, open_, wrong = _results(answers, "check"), _results(gaps, "check"), _results(answers, "wrong")
    if not passed or len(passed) != len(open_):
        found.append("(a) there must be cells tagged 'check' whose last line is the result of a check")
    found += [f"(a) the course's own answer does not pass:\n{result}" for result in passed if not result]
    for result in open_:
        if result.status != "to do" or not result.look_at or "Not written yet: " not in str(result):
            found.append(f"(b) a gap must be met with 'Not written yet' and advice:\n{result}")
        if result.answer is result.reference:
            found.append(f"(b) the check looks at the course's own {result.name}, not at the learner's")
    if len(wrong) < 2 or {result.name for result in wrong} != {result.name for result in passed}:
        found.append("(d) there must be two cells tagged 'wrong', and one for each task, which end in a check")
    found += [f"(d) a wrong answer passes:\n{result}" for result in wrong if result]
    stories = [(result.name, result.look_at) for result in wrong]
    found += [f"(d) two wrong answers get the same advice: {story[1]}" for story in {*stories}
              if stories.count(story) > 1]
    return found


def _results(values: list[tuple[set[str], Any]], tag: str) -> list[Result]:
    return [value for tags, value in values if tag in tags and isinstance(value, Result)]
