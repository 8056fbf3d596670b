"""The course as it is committed: every notebook keeps the rules and is in step with its source."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebook_meta.links import broken_links
from tests.notebook_meta.rules import Page, breaches
from tools.build_notebooks import ROOT, assemble, sources

FOLDERS = ("notebooks", "exercises", "solutions")
NOTEBOOKS = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_notebook_keeps_the_rules(path: Path) -> None:
    found = breaches(Page(nbformat.read(path, as_version=4), path, ROOT))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("source", sources(), ids=relative)
def test_notebook_is_in_step_with_its_source(source: Path) -> None:
    """Rebuild in memory, without running anything, and compare every cell's type, id and text."""
    built, committed = assemble(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    wanted = [(cell.cell_type, cell.id, cell.metadata, cell.source) for cell in built.cells]
    found = [(cell.cell_type, cell.id, cell.metadata, cell.source) for cell in committed.cells]
    assert found == wanted, f"{relative(source)} was changed and not built: make notebooks"


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.is_relative_to(ROOT / "notebooks")], ids=relative)
def test_notebook_has_a_source(path: Path) -> None:
    assert path.with_suffix(".py").is_file(), "written by hand? The .py file beside a notebook is its source"
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem), "a notebook is called NN_name: the number is its place"


@pytest.mark.parametrize("path", MARKDOWN, ids=relative)
def test_links_in_markdown_resolve(path: Path) -> None:
    assert list(broken_links(path.read_text(encoding="utf-8"), path, ROOT)) == []
