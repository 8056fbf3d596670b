"""The build, end to end: source -> notebook -> strict nbval, on a small course of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import build_notebooks, run_demo, run_fast
from tools.build_notebooks import ROOT, SETUP_CELL, assemble, build
from tools.mutation_check import Fault, plant

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
N = 3  # how far; fast: 2
NAME = "fast:"
LIST = [1, 2]  # fast: [1]

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
from pathlib import Path
began = time.perf_counter()
time.sleep(0.3 if Path("slow").exists() else 0)
seconds = time.perf_counter() - began
print(f"{seconds * 1000:.3f} ms at {total / seconds:,.1f} tok/s")

# %%
from tutorial_engine.block_manager import BlockPool
from tutorial_engine.exercises.paged_attention import draw
pool = BlockPool(8, enable_caching=True)
pool.free_blocks(pool.get_new_blocks(2))
draw(8, 4, {"a": [block.block_id for block in pool.get_new_blocks(3)]}, {"a": 10})

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


def replay(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Strict nbval of a folder with the project's own settings, as ``make test`` runs it."""
    command = f"-m pytest -q -p no:cacheprovider --confcutdir {ROOT} --nbval --nbval-current-env -p conftest"
    sanitize = ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg")]
    return subprocess.run(
        [sys.executable, *command.split(), *sanitize, "--rootdir", str(folder), str(folder)],
        cwd=ROOT, env={**os.environ, "TUTORIAL_LIVE": "0", **environment}, capture_output=True, text=True, timeout=240,
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
    assert stable(build(source, root=source.parent.parent, run=True).read_text()) == stable(first)


def test_other_words_run_nothing_and_other_code_does(source: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []
    monkeypatch.setattr(build_notebooks, "execute", lambda notebook, folder: ran.append(folder))
    (tmp_path / "notebooks").mkdir()
    path = Path(shutil.copy(source, tmp_path / "notebooks"))
    shutil.copy(source.with_suffix(".ipynb"), path.parent)
    stored = nbformat.read(path.with_suffix(".ipynb"), as_version=4)

    path.write_text(SOURCE.replace("Some text.", "Some better text.\n\n# %% [markdown]\n# And one cell more."))
    kept = nbformat.read(build(path, root=tmp_path), as_version=4)
    assert not ran and "Some better text." in [cell.source for cell in kept.cells]
    assert ([cell for cell in kept.cells if cell.cell_type == "code"]
            == [cell for cell in stored.cells if cell.cell_type == "code"])
    build(path, root=tmp_path, run=True)
    assert len(ran) == 1
    build(path, root=tmp_path)  # what lies there now was never run
    assert len(ran) == 2
    shutil.copy(source.with_suffix(".ipynb"), path.parent)
    path.write_text(SOURCE.replace("N = 3", "N = 4"))
    build(path, root=tmp_path)
    assert len(ran) == 3


@pytest.mark.timeout(600)  # three kernels that import torch
def test_strict_replay_sees_a_changed_engine_and_no_clock(source: Path, tmp_path: Path) -> None:
    """Twice in a row with other timings: green. Blocks handed out in another order: red, by the picture."""
    for name in ("first", "slow"):
        (tmp_path / "same" / name).mkdir(parents=True)
        shutil.copy(source.with_suffix(".ipynb"), tmp_path / "same" / name)
    (tmp_path / "same" / "slow" / "slow").touch()
    result = replay(tmp_path / "same")
    assert result.returncode == 0 and "16 passed" in result.stdout, result.stdout + result.stderr

    engine = shutil.copytree(ROOT / "tutorial_engine", tmp_path / "changed" / "tutorial_engine")
    plant(Fault("the block that was freed last is reused first", "block_manager.py",
                "block = self._head.next_free\n", "block = self._tail.prev_free\n", ()), engine)
    result = replay(tmp_path / "same" / "first", PYTHONPATH=str(engine.parent))
    assert result.returncode == 1 and "1 failed, 7 passed" in result.stdout, result.stdout + result.stderr
    assert "request a: 10 tokens in 3 blocks [4, 3, 2]" in result.stdout  # the picture says it in words, too


def test_a_source_must_begin_with_its_title(tmp_path: Path) -> None:
    path = tmp_path / "01_bad.py"
    path.write_text("# %%\n1\n")
    with pytest.raises(ValueError, match="first cell must be markdown"):
        assemble(path, root=tmp_path)


def test_fast_values_are_injected(source: Path, tmp_path: Path) -> None:
    run_fast.run(source.with_suffix(".ipynb"), tmp_path / "fast.ipynb")
    injected, = (cell.source for cell in nbformat.read(tmp_path / "fast.ipynb", as_version=4).cells
                 if "injected-parameters" in cell.metadata.get("tags", []))
    assert injected.splitlines()[1:] == ["N = 2", "LIST = [1]"]
    assert run_demo.generated_text(nbformat.read(tmp_path / "fast.ipynb", as_version=4)) == "total 1"


def test_demo_repeats_what_its_cells_printed(source: Path) -> None:
    assert run_demo.generated_text(nbformat.read(source.with_suffix(".ipynb"), as_version=4)) == "total 3"
