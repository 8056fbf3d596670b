"""Build the exercises: one hand-written source makes the notebook with gaps and the notebook with answers.

    python tools/build_exercises.py                                              # every source under solutions/
    python tools/build_exercises.py solutions/1_core_concepts/03_name.py         # these only

Owns what differs between the two; everything else about a notebook is `build_notebooks.py`'s.

    solutions/<stage>/NN_name.py  --->  exercises/<stage>/NN_name.ipynb    gaps; no cells tagged `solution` or `wrong`
                                  --->  solutions/<stage>/NN_name.ipynb    everything

A gap is a region of a function's body. What lies between the two lines is the answer; the end says what to do there:

    # BEGIN SOLUTION
    return -(-num_tokens // block_size)
    # END SOLUTION todo: Return the number of blocks.
"""

import os
import re
import sys
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, only tools/ is on the path

from tools import build_notebooks
from tools.build_notebooks import ROOT, dress, finish

KINDS = ("exercises", "solutions")
ANSWERS_ONLY = {"solution", "wrong"}
GAP = "raise NotImplementedError"  # what Python programmers write there; a check takes it for "not written yet"
HOW_IT_WORKS = f"""

**How it works.** Each task has a gap, and below it a cell that checks what you wrote. Replace the line
`{GAP}(...)` with your code, run that cell, then run the check. A check never breaks the notebook: it says what it
tried, what came back, and what to look at. Then mend and run again, as often as you like."""
COMPARE = """\
## Compare

[The answers]({}) also show the usual mistakes, and what the checks say about them. Look there when yours pass, or when
the last hint has not helped."""
THESE_ARE_ANSWERS = """

**These are the answers.** The notebook with the gaps is [here]({})."""
_REGION = re.compile(
    r"^(?P<indent>[ \t]+)# BEGIN SOLUTION\n(?P<answer>.*?)^(?P=indent)# END SOLUTION todo: (?P<todo>[^\n]+)$",
    re.M | re.S,
)


def sources(root: Path = ROOT) -> list[Path]:
    """Every exercise's source, in reading order."""
    return sorted((root / "solutions").rglob("*.py"))


def target(source: Path, kind: str, root: Path = ROOT) -> Path:
    """Where the notebook of one kind lies."""
    return root / kind / source.relative_to(root / "solutions").with_suffix(".ipynb")


def assemble(source: Path, kind: str, root: Path = ROOT) -> NotebookNode:
    """One of the two notebooks that ``source`` describes, not yet executed.

    Raises:
        ValueError: a gap is not well formed, or is not in a cell tagged ``exercise``.
    """
    draft = jupytext.read(source, fmt="py:percent")
    kept = [cell for cell in draft.cells
            if kind == "solutions" or not ANSWERS_ONLY & set(cell.metadata.get("tags", []))]
    for cell in kept:
        if cell.cell_type == "code":
            cell.source = _with_gaps(cell, kind, source)
    _introduce(kept, kind, _link(source, kind, root))
    draft.cells = kept
    return dress(draft, target(source, kind, root), root)


def _introduce(cells: list[NotebookNode], kind: str, other: str) -> None:
    """Say in the first cell what kind of notebook this is, and lead to the other one."""
    if cells and cells[0].cell_type == "markdown":
        cells[0].source += HOW_IT_WORKS if kind == "exercises" else THESE_ARE_ANSWERS.format(other)
    if kind == "exercises":
        cells.append(new_markdown_cell(COMPARE.format(other)))


def _link(source: Path, kind: str, root: Path) -> str:
    """How one notebook of a source refers to the other."""
    other = KINDS[1 - KINDS.index(kind)]
    return Path(os.path.relpath(target(source, other, root), target(source, kind, root).parent)).as_posix()


def _with_gaps(cell: NotebookNode, kind: str, source: Path) -> str:
    """A code cell's text for one kind of notebook."""
    found = len(_REGION.findall(cell.source))
    place = f"{source}, in the cell that begins with {cell.source[:60]!r}"
    if cell.source.count("# BEGIN SOLUTION") != found or cell.source.count("# END SOLUTION") != found:
        raise ValueError(f"{place}: a gap needs an indented '# BEGIN SOLUTION', and '# END SOLUTION todo: ...' with "
                         "the same indent")
    if bool(found) != ("exercise" in cell.metadata.get("tags", [])):
        raise ValueError(f"{place}: gaps belong into cells tagged 'exercise', and each of those needs one")
    return _REGION.sub(_gap if kind == "exercises" else _filled, cell.source)


def _gap(region: re.Match[str]) -> str:
    todo = region["todo"].replace('"', "'")
    return f'{region["indent"]}# YOUR CODE HERE, in place of the next line\n{region["indent"]}{GAP}("{todo}")'


def _filled(region: re.Match[str]) -> str:
    return region["answer"].rstrip("\n")


def build(source: Path, root: Path = ROOT, run: bool = False) -> None:
    """Assemble, run and write both notebooks of one source. `run`: even if only words have changed."""
    for kind in KINDS:
        finish(assemble(source, kind, root), target(source, kind, root), run)


if __name__ == "__main__":
    sys.exit(build_notebooks.main(sys.argv[1:], build, sources))
