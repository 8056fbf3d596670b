"""The build, end to end: source -> notebook -> strict nbval, on a small course of its own."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import run_demo
from tools.build_notebooks import ROOT, SETUP_CELL, assemble, build

SOURCE = """\
# ---
# jupyter:
#   kernelspec: {name: private, display_name: Private}
# ---
# %% [markdown]
# # Counting
#
# Words about counting.

# %% tags=["parameters"]
N = 3

# %% [markdown]
# Some text.

# %% tags=["demo-output"] editable=true
import sys
from tqdm.auto import tqdm
total = sum(tqdm(range(N)))
print("a warning", file=sys.stderr)
print("total", end=" ")
print("again", file=sys.stderr)
print(total)

# %% tags=["timing"]
import time
print(f"{time.perf_counter():.3f} ms at {time.perf_counter():.1f} tok/s")

# %%
import ipywidgets
ipywidgets.IntSlider(3)

# %%
N

# %%
N
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built notebook; the fixture is its source."""
    folder = tmp_path_factory.mktemp("course") / "notebooks"
    folder.mkdir()
    path = folder / "01_counting.py"
    path.write_text(SOURCE)
    build(path, root=folder.parent)
    return path


def replay(notebook: Path) -> subprocess.CompletedProcess[str]:
    """Strict nbval with the project's own settings, as ``make test`` runs it."""
    command = f"-m pytest -q -p no:cacheprovider --confcutdir {ROOT} --nbval --nbval-current-env -p conftest"
    sanitize = ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg")]
    return subprocess.run(
        [sys.executable, *command.split(), *sanitize, "--rootdir", str(notebook.parent), str(notebook)],
        cwd=ROOT, env={**os.environ, "TUTORIAL_LIVE": "0"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_assembled_cells(source: Path) -> None:
    cells = assemble(source, root=source.parent.parent).cells
    assert [cell.cell_type for cell in cells[:4]] == ["markdown", "code", "code", "markdown"]
    title, badge, rest = cells[0].source.split("\n\n")
    assert title == "# Counting" and rest == "Words about counting."
    assert badge.endswith("/blob/main/notebooks/01_counting.ipynb)")
    assert cells[1].source == SETUP_CELL and cells[1].metadata == {"tags": ["setup"]}
    assert cells[4].metadata == {"tags": ["demo-output"]}  # other metadata is dropped


def test_ids_survive_an_inserted_cell(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    longer = tmp_path / "notebooks" / source.name
    longer.write_text(SOURCE.replace('# %% tags=["parameters"]', '# %%\n"new"\n\n# %% tags=["parameters"]'))
    before = [cell.id for cell in assemble(source, root=source.parent.parent).cells]
    after = [cell.id for cell in assemble(longer, root=tmp_path).cells]
    assert len(set(after)) == len(after)
    assert [cell_id for cell_id in after if cell_id in before] == before


def test_stored_outputs_hold_nothing_of_one_run(source: Path) -> None:
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    outputs = {cell.source.split("\n")[0]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert [(output.name, output.text) for output in outputs["import sys"]] == [("stdout", "total 3\n")]
    (slider,) = outputs["import ipywidgets"]
    assert set(slider.data) == {"text/plain"} and slider.metadata == {}


def test_building_again_changes_nothing_but_times(source: Path) -> None:
    def stable(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if "tok/s" not in line)

    first = source.with_suffix(".ipynb").read_text()
    assert stable(build(source, root=source.parent.parent).read_text()) == stable(first)


@pytest.mark.timeout(600)  # two kernels that import torch
def test_strict_replay_passes_and_can_fail(source: Path, tmp_path: Path) -> None:
    committed = source.with_suffix(".ipynb")
    result = replay(committed)
    assert result.returncode == 0 and "7 passed" in result.stdout, result.stdout + result.stderr
    rotten = tmp_path / committed.name
    rotten.write_text(committed.read_text().replace("total 3", "total 4"))
    result = replay(rotten)
    assert result.returncode == 1 and "1 failed, 6 passed" in result.stdout, result.stdout + result.stderr


def test_a_source_must_begin_with_its_title(tmp_path: Path) -> None:
    path = tmp_path / "01_bad.py"
    path.write_text("# %%\n1\n")
    with pytest.raises(ValueError, match="first cell must be markdown"):
        assemble(path, root=tmp_path)


def test_demo_repeats_what_its_cells_printed(source: Path) -> None:
    assert run_demo.generated_text(nbformat.read(source.with_suffix(".ipynb"), as_version=4)) == "total 3"
