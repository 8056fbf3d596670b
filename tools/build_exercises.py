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

import re
import sys
from pathlib import Path

import jupytext
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, only tools/ is on the path

from tools import build_notebooks
from tools.build_notebooks import ROOT, dress, finish

KINDS = ("exercises", "solutions")
ANSWERS_ONLY = {"solution", "wrong"}
_REGION = re.compile(
    r"^(?P<indent>[ \t]+)# BEGIN SOLUTION\n(?P<answer>.*?)^(?P=indent)# END SOLUTION todo: (?P<todo>.+)$", re.M | re.S
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
    kept = []
    for cell in draft.cells:
        tags = set(cell.metadata.get("tags", []))
        if kind == "exercises" and tags & ANSWERS_ONLY:
            continue
        if cell.cell_type == "code":
            found = len(_REGION.findall(cell.source))
            if cell.source.count("# BEGIN SOLUTION") != found or cell.source.count("# END SOLUTION") != found:
                raise ValueError(f"{source}: a gap needs an indented '# BEGIN SOLUTION', and '# END SOLUTION todo: ...' "
                                 f"with the same indent, in the cell that begins with {cell.source[:60]!r}")
            if bool(found) != ("exercise" in tags):
                raise ValueError(f"{source}: gaps belong into cells tagged 'exercise', and each of those needs one; see "
                                 f"the cell that begins with {cell.source[:60]!r}")
            cell.source = _REGION.sub(_gap if kind == "exercises" else _filled, cell.source)
        kept.append(cell)
    draft.cells = kept
    return dress(draft, target(source, kind, root), root)


def _gap(region: re.Match[str]) -> str:
    return f"{region['indent']}# YOUR CODE HERE, in place of this line and the next\n{region['indent']}todo({region['todo']!r})"


def _filled(region: re.Match[str]) -> str:
    return region["answer"].rstrip("\n")


def build(source: Path, root: Path = ROOT) -> None:
    """Assemble, run and write both notebooks of one source."""
    for kind in KINDS:
        finish(assemble(source, kind, root), target(source, kind, root))


if __name__ == "__main__":
    sys.exit(build_notebooks.main(sys.argv[1:], build, sources))
