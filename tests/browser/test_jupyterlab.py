"""A notebook in a real JupyterLab: pictures move while the engine runs, then obey slider, button, keyboard and mouse;
knobs turn; and whoever opens the saved file without trusting it still sees the pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.browser.chromium import Tab, find_chromium, open_browser, wait_for
from tests.browser.jupyter import command, jupyterlab, open_notebook, output, run_all, write_notebook
from tutorial_engine.viz.palette import DARK

# A model that counts, twenty times a second, behind the real scheduler and block manager.
CELLS = [
    """
import asyncio, time
from unittest import mock
from tests.core.support import make_engine, make_params
from tutorial_engine import LLM, LLMEngine
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.viz import batch_occupancy, block_table, knobs, watch

def slow_engine():
    return make_engine(17, block_size=4, max_num_seqs=3, before=lambda plan: time.sleep(0.05))

def prompt(length):
    return {"prompt_token_ids": [7] * 8 + [length] * length}
""",
    """
with mock.patch.object(LLMEngine, "from_engine_args", return_value=slow_engine()):
    llm = LLM()
with watch(llm) as trace:
    llm.generate([prompt(n) for n in (3, 5, 8, 4)], make_params(24))
""",
    """
engine = AsyncLLM(slow_engine())

async def ask(name, length):
    async for output in engine.generate(prompt(length), make_params(12), name):
        pass

with watch(engine, block_table) as live:
    await asyncio.gather(ask("one", 3), ask("two", 6))
engine.shutdown()
""",
    "knobs(num_blocks=20)",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tab, str, Path]]:
    if find_chromium() is None:
        pytest.skip("No Chromium is installed, and these tests look at pictures in a browser.")
    pytest.importorskip("jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "run.ipynb", CELLS)
    with jupyterlab(folder) as address, open_browser(folder / ".profile") as tab:
        open_notebook(tab, address, "run.ipynb")
        yield tab, address, folder


def steps_seen(tab: Tab, cell: int, number: int, patience: float) -> list[int]:
    """The steps that an output's image shows, one after the other, until the player takes its place."""
    seen: list[int] = []

    def look() -> bool:
        alt = tab.js(f"{output(cell, number)}?.querySelector('img')?.alt || ''")
        words = alt.split()
        if alt.startswith("Step ") and (step := int(words[1].rstrip(":"))) not in seen[-1:]:
            seen.append(step)
        return tab.js(f"!!{output(cell, number)}?.querySelector('[data-on] svg')")

    wait_for(look, f"cell {cell} to become a player", patience)
    return seen


def test_frames_advance_while_the_engine_runs(lab: tuple[Tab, str, Path]) -> None:
    tab, _, _ = lab
    run_all(tab)
    tab.wait(f"{output(1)}", patience=120)
    seen = steps_seen(tab, 1, 0, patience=30)
    assert len(seen) >= 4 and seen == sorted(seen), seen
    from_the_thread = steps_seen(tab, 2, 0, patience=30)
    assert len(from_the_thread) >= 3 and from_the_thread == sorted(from_the_thread), from_the_thread
    tab.wait(f"{output(3)}?.querySelector('.widget-slider, .jupyter-widgets')", patience=30)
    assert tab.js("document.querySelectorAll('[data-on] svg').length") == 3


def test_slider_play_keyboard_and_mouse(lab: tuple[Tab, str, Path]) -> None:
    tab, _, _ = lab
    player = f"{output(1)}.querySelector('[data-te]')"
    where = f"parseInt({player}.querySelector('span').textContent)"
    slider, play = f"{player}.querySelector('input')", f"{player}.querySelector('button[aria-label=play]')"
    cells = tab.js("document.querySelectorAll('.jp-Cell').length")
    tab.drag(slider, float(tab.js(f"({where} - 0.5) / {slider}.max")), 0.25)
    quarter = tab.js(where)
    last = int(tab.js(f"{slider}.max")) + 1
    assert 0.15 * last < quarter < 0.35 * last
    tab.key("ArrowRight")
    tab.key("ArrowRight")
    assert tab.js(where) == quarter + 2
    tab.key("ArrowUp")  # JupyterLab would go to another cell
    assert tab.js(where) == quarter + 3
    tab.click(play)
    tab.wait(f"{where} > {quarter + 5}", patience=10)
    tab.key("Home")
    assert tab.js(where) == 1 and tab.js(f"!!{play}")
    tab.hover(f"{player}.querySelector('[data-b=\"1\"]')")
    said = tab.js(f"{player}.querySelector('svg').nextElementSibling.textContent")
    assert said.startswith("Block 1: held by request")
    tab.js(f"{player}.focus()")
    tab.key(" ")
    tab.wait(f"{where} > 2", patience=10)
    tab.key(" ")
    assert tab.js("document.querySelectorAll('.jp-Cell').length") == cells


def test_a_knob_changes_the_picture(lab: tuple[Tab, str, Path]) -> None:
    tab, _, _ = lab
    board = output(3)
    picture = f"{board}.querySelector('.widget-html img, .jupyter-widgets img')"
    tab.wait(picture, patience=20)
    before = tab.js(f"{picture}.alt")
    tab.js(f"""(e => {{ e.value = [...e.options].find(o => o.text.startsWith('static')).value;
               e.dispatchEvent(new Event('change', {{bubbles: true}})); }})({board}.querySelector('select'))""")
    tab.wait(f"{picture}.alt !== {json.dumps(before)}")
    static = tab.js(f"{picture}.alt")
    tab.click(f"{board}.querySelectorAll('.noUi-handle')[2]")  # arrivals a second
    for _ in range(12):
        tab.key("ArrowLeft")
    tab.wait(f"{picture}.alt !== {json.dumps(static)}")


def test_the_theme_of_jupyterlab_counts(lab: tuple[Tab, str, Path]) -> None:
    tab, _, folder = lab
    ground = "getComputedStyle(document.querySelector('[data-on] svg .bg')).fill"
    light = tab.js(ground)
    command(tab, "apputils:change-theme", theme="JupyterLab Dark")
    red, green, blue = (int(DARK[0][i:i + 2], 16) for i in (1, 3, 5))
    tab.wait(f"{ground} === 'rgb({red}, {green}, {blue})'")
    assert light == "rgb(255, 255, 255)"
    command(tab, "apputils:change-theme", theme="JupyterLab Light")
    tab.wait(f"{ground} === 'rgb(255, 255, 255)'")


def test_an_untrusted_copy_shows_images(lab: tuple[Tab, str, Path]) -> None:
    tab, address, folder = lab
    command(tab, "docmanager:save")
    wait_for(lambda: "data-te" in (folder / "run.ipynb").read_text(), "the file to be saved")
    notebook = nbformat.read(folder / "run.ipynb", as_version=4)
    displays = [o for cell in notebook.cells for o in cell.outputs if "data-te" in str(o.get("data"))]
    assert [o.data["text/plain"].partition(",")[0] for o in displays] == [
        "Block table", "Batch occupancy", "Block table"]
    notebook.cells.append(nbformat.v4.new_markdown_cell("Somebody else's file: no signature of ours fits it."))
    nbformat.write(notebook, folder / "copy.ipynb")
    open_notebook(tab, address, "copy.ipynb")
    tab.wait("document.querySelectorAll('.jp-OutputArea-output img[src^=\"data:image/svg\"]').length >= 3", patience=30)
    assert tab.js("document.querySelectorAll('[data-on]').length") == 0  # no script has run
    assert tab.js("document.querySelectorAll('.jp-OutputArea-output script').length") == 0
    assert tab.js("[...document.querySelectorAll('.jp-OutputArea-output img')]"
                  ".every(i => i.naturalWidth > 400 && i.alt)")
