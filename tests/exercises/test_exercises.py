"""Every exercise is proved: (a) to (d) of `proofs.py`, and each of the proofs can fail."""

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from tests.exercises.proofs import problems
from tools.build_exercises import KINDS, ROOT, assemble, sources, target

SOURCES = sources()


def relative(path: Path) -> str:
    return path.relative_to(ROOT / "solutions").as_posix()


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_exercise_is_proved(source: Path) -> None:
    found = problems(source, ROOT)
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_notebook_is_in_step_with_its_source(source: Path, kind: str) -> None:
    """Proof (c): rebuild in memory, without running anything, and compare every cell's type, id and text."""
    built, committed = assemble(source, kind), nbformat.read(target(source, kind), as_version=4)
    wanted = [(cell.cell_type, cell.id, cell.metadata, cell.source) for cell in built.cells]
    found = [(cell.cell_type, cell.id, cell.metadata, cell.source) for cell in committed.cells]
    assert found == wanted, f"solutions/{relative(source)} was changed and not built: make exercises"


def test_every_exercise_has_a_source() -> None:
    notebooks = {path for kind in KINDS for path in (ROOT / kind).rglob("*.ipynb")
                 if ".ipynb_checkpoints" not in path.parts}
    assert notebooks == {target(source, kind) for source in SOURCES for kind in KINDS}
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", source.stem) for source in SOURCES)
    assert not list((ROOT / "exercises").rglob("*.py")), "exercises/ is generated; write in solutions/"


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_teachers_are_told_of_it(source: Path) -> None:
    minutes, stars = re.search(r"(\d+) minutes · difficulty ([●○]+)", source.read_text(encoding="utf-8")).groups()
    page = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    link = re.escape(f"(../exercises/{Path(relative(source)).with_suffix('.ipynb').as_posix()})")
    assert re.search(rf"{link} \| {stars} \| {minutes} \|", page), "add a line to the table in docs/teaching.md"


# ---------------------------------------------------------------------- the proofs themselves

GOOD = '''\
# %% [markdown]
# # Doubling

# %%
from tutorial_engine.checks import check

def double(x):
    return 2 * x

@check(double)
def check_double(answer):
    """Twice is twice."""
    answer(0).gives(0, "nothing")
    answer(3).gives(6, "three")

# %% tags=["exercise"]
def double(x):
    # BEGIN SOLUTION
    return x + x
    # END SOLUTION todo: Return twice x.

# %% tags=["check"]
check_double(double)

# %% tags=["wrong"]
def double(x):
    return x * x
check_double(double)

# %% tags=["wrong"]
def double(x):
    return x + 3
check_double(double)
'''


def found_in(text: str, root: Path) -> list[str]:
    source = root / "solutions" / "01_double.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(text)
    return problems(source, root)


def test_a_good_exercise_has_no_problem(tmp_path: Path) -> None:
    assert found_in(GOOD, tmp_path) == []


@pytest.mark.parametrize("old, new, proof", [
    ("return x + x", "return x", r"\(a\) the course's own answer does not pass:\n✗ double: not yet"),
    ("check_double(double)\n\n# %% tags=[\"wrong\"]\ndef double(x):\n    return x * x", "1\n\n# %% tags=[\"wrong\"]\n"
     "def double(x):\n    return x * x", r"\(a\) there must be cells tagged 'check'"),
    ("    answer(0).gives", "    if answer.name: return\n    answer(0).gives", r"\(b\) a gap must be met"),
    ("# %% tags=[\"check\"]\ncheck_double(double)", "# %% tags=[\"check\"]\ncheck_double(check_double.reference)",
     r"\(b\) the check looks at the course's own double"),
    ("    answer(3).gives(6, \"three\")", "", r"\(d\) a wrong answer passes"),
    ("return x + 3", "return 2 * x", r"\(d\) a wrong answer passes"),
    ("return x + 3", "return x * x * x", r"\(d\) two wrong answers get the same advice: three"),
    ("# %% tags=[\"wrong\"]\ndef double(x):\n    return x + 3\ncheck_double(double)\n", "", r"\(d\) there must be two"),
], ids=range(8))  # fmt: skip
def test_each_proof_can_fail(old: str, new: str, proof: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    found = found_in(GOOD.replace(old, new), tmp_path)
    assert any(re.match(proof, message) for message in found), found


def test_gaps_hide_the_answer_and_say_what_to_do(tmp_path: Path) -> None:
    found_in(GOOD, tmp_path)
    stub, answers = (assemble(tmp_path / "solutions" / "01_double.py", kind, tmp_path) for kind in KINDS)
    code = [cell.source for cell in stub.cells if "exercise" in cell.metadata.get("tags", [])]
    assert code == ["def double(x):\n    # YOUR CODE HERE, in place of the next line\n"
                    '    raise NotImplementedError("Return twice x.")']
    assert not any("wrong" in cell.metadata.get("tags", []) for cell in stub.cells)
    assert not any("SOLUTION" in cell.source for cell in [*stub.cells, *answers.cells])
    assert "def double(x):\n    return x + x" in [cell.source for cell in answers.cells]


@pytest.mark.parametrize("spoil", [
    lambda text: text.replace("    # END SOLUTION todo: Return twice x.\n", ""),
    lambda text: text.replace(" todo: Return twice x.", ""),
    lambda text: text.replace("    # BEGIN", "# BEGIN").replace("    # END", "# END"),
    lambda text: text.replace('tags=["exercise"]', ""),
    lambda text: text.replace('# %% tags=["check"]', '# %% tags=["exercise"]'),
], ids=["no end", "no todo", "not inside a function", "no tag", "no gap"])  # fmt: skip
def test_a_malformed_gap_is_an_error(spoil: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="01_double.py, in the cell .*: (a gap needs|gaps belong)"):
        found_in(spoil(GOOD), tmp_path)
