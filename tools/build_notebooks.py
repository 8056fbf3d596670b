"""Build the course's notebooks from the py:percent sources beside them.

    python tools/build_notebooks.py                                        # every source under notebooks/
    python tools/build_notebooks.py notebooks/1_core_concepts/01_name.py   # these only
    python tools/build_notebooks.py --run                                  # run all cells in any case

If only words have changed, the stored outputs are kept and nothing runs. Whoever has changed the engine says --run.

Owns everything about an ``.ipynb`` file that its author should not have to think about: the set-up cell (the same in
every notebook), the Colab badge under the title, cell ids, metadata, and outputs that are the same on every machine.
The words and the code are the source's. One source makes one notebook, and always the same one:

    name.py --assemble--> cells, ids, tags --execute--> outputs --clean--> name.ipynb

``assemble`` runs nothing, so a test can rebuild each notebook in memory and compare it with the committed file.
"""

import hashlib
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
CELL_TIMEOUT_S = 120

SETUP_CELL = f"""\
import os

if "COLAB_RELEASE_TAG" in os.environ:  # Colab has every dependency; --no-deps leaves its torch as it is
    %pip install -q --no-deps "tutorial-engine @ git+{REPOSITORY}"

from tutorial_engine.notebook import setup

setup(seed=0)"""

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources(root: Path = ROOT) -> list[Path]:
    """Every notebook source of the course, in reading order."""
    return sorted((root / "notebooks").rglob("*.py"))


def assemble(source: Path, root: Path = ROOT) -> NotebookNode:
    """The notebook that ``source`` describes, not yet executed.

    Raises:
        ValueError: the source does not begin with a markdown cell, where title and badge belong.
    """
    return dress(jupytext.read(source, fmt="py:percent"), source.with_suffix(".ipynb"), root)


def dress(draft: NotebookNode, target: Path, root: Path = ROOT) -> NotebookNode:
    """Add to an author's cells what every notebook has: badge, set-up cell, ids; drop all metadata but tags.

    Args:
        target: where the notebook will lie, inside ``root``.

    Raises:
        ValueError: the draft does not begin with a markdown cell.
    """
    if not draft.cells or draft.cells[0].cell_type != "markdown":
        raise ValueError(f"{target.with_suffix('.py')}: the first cell must be markdown, with the notebook's title as "
                         "its first line")
    title, _, rest = draft.cells[0].source.partition("\n")
    draft.cells[0].source = f"{title}\n\n{colab_badge(target, root)}\n\n{rest.strip()}".rstrip()
    first_code = next((i for i, cell in enumerate(draft.cells) if cell.cell_type == "code"), len(draft.cells))
    draft.cells.insert(first_code, nbformat.v4.new_code_cell(SETUP_CELL, metadata={"tags": ["setup"]}))

    notebook = nbformat.v4.new_notebook(cells=draft.cells, metadata=METADATA)
    notebook.nbformat_minor = 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        cell.metadata = NotebookNode({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
        cell.id = _cell_id(cell, seen)
    return notebook


def colab_badge(target: Path, root: Path = ROOT) -> str:
    """Markdown for the button that opens the committed notebook in Colab."""
    page = REPOSITORY.removeprefix("https://github.com/")
    path = target.relative_to(root).as_posix()
    return (
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{page}/blob/main/{path})"
    )


def _cell_id(cell: NotebookNode, seen: Counter[str]) -> str:
    """An id made from the cell's own text: inserting a cell leaves the ids of all others, and so the diff, alone."""
    text = f"{cell.cell_type}\n{cell.source}"
    seen[text] += 1
    return hashlib.sha256(f"{text}\n{seen[text]}".encode()).hexdigest()[:12]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell in order, in ``folder``, as a replay: no progress bars, pictures in their final state."""
    environment = {**os.environ, "TUTORIAL_LIVE": "0"}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        record_timing=False,
    )
    client.execute(env=environment)


def clean(notebook: NotebookNode) -> None:
    """Keep of the outputs what is the same in every run: no stderr, no widget handles, no metadata."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        kept: list[NotebookNode] = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text  # how a long print arrives in pieces is a matter of timing
                continue
            if "data" in output:
                output.metadata = NotebookNode()
                output.data.pop("application/vnd.jupyter.widget-view+json", None)
            kept.append(output)
        cell.outputs = kept


def build(source: Path, root: Path = ROOT, run: bool = False) -> Path:
    """Assemble, run and write one notebook beside its source; returns the notebook's path. `run`: see `finish`."""
    return finish(assemble(source, root), source.with_suffix(".ipynb"), run)


def finish(notebook: NotebookNode, target: Path, run: bool = False) -> Path:
    """Run an assembled notebook in the folder where it will lie, and write it there; returns ``target``.

    If the notebook that lies there has the same code, its outputs are taken over instead, unless ``run`` is true.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if run or not keep_outputs(notebook, target):
        execute(notebook, target.parent)
    clean(notebook)
    nbformat.write(notebook, target)
    return target


def keep_outputs(notebook: NotebookNode, target: Path) -> bool:
    """Copy the outputs of ``target`` if all its code cells were run and are those of ``notebook``; say whether."""
    if not target.is_file():
        return False
    old, new = ([cell for cell in book.cells if cell.cell_type == "code"]
                for book in (nbformat.read(target, as_version=4), notebook))
    if [(cell.source, cell.metadata.get("tags")) for cell in old] != [
            (cell.source, cell.metadata.get("tags")) for cell in new] or any(
            cell.execution_count is None for cell in old):
        return False
    for before, cell in zip(old, new):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return True


def main(arguments: list[str], build: Callable[..., object] = build,
         sources: Callable[[], list[Path]] = sources) -> int:
    """Build the sources named on the command line, or all; ``--run``: run them even if their code is as before."""
    run = "--run" in arguments
    chosen = [Path(argument).resolve() for argument in arguments if argument != "--run"] or sources()
    for source in chosen:
        if source.suffix != ".py" or not source.is_file():
            print(f"{source} is not a notebook source: give the .py file, not the .ipynb", file=sys.stderr)
            return 2
        print(f"building {source.relative_to(ROOT)}", flush=True)
        build(source, run=run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
