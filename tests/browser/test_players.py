"""The players in a browser, without Jupyter: what JavaScript draws is what Python draws, and the controls work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.chromium import Tab
from tests.viz.support import TWO_STEPS, busy_trace, crowded_trace, record, trace_of
from tutorial_engine.trace import Trace
from tutorial_engine.viz import Picture, batch_occupancy, block_table, memory_map, timeline
from tutorial_engine.viz.block_table import Layout, _svg
from tutorial_engine.viz.palette import DARK, LIGHT
from tutorial_engine.viz.player import steps_to_show
from tutorial_engine.viz.pool_state import pool_states

SLIDER = "document.querySelector('input[aria-label=step]')"
DRAWING = "document.querySelector('[data-te] svg')"
NOTE = "document.querySelector('[data-te] svg').nextElementSibling.textContent"
WHERE = "document.querySelector('[data-te] span').textContent"


def show(browser: Tab, folder: Path, picture: Picture) -> None:
    picture.save(folder / "player.html")
    browser.open(f"file://{folder / 'player.html'}")
    browser.wait("document.querySelector('[data-on] svg')")


def button(label: str) -> str:
    return f"document.querySelector('button[aria-label=\"{label}\"]')"


def awkward_trace() -> Trace:
    """Ids that must be escaped, a long table, a block with many holders, a large pool, thousands of tokens."""
    long = list(range(100, 140))
    many = {f"<{i}>": [1, 50 + i] for i in range(9)}
    return trace_of(
        record(0, tables={"a&b": [1]}, lengths={"a&b": 3}, free=[2, 3], num_free=2),
        record(1, tables={**many, "a&b": [1, 7]}, lengths=dict.fromkeys(many, 6) | {"a&b": 8}, hashed=[1, 7],
               waiting={"x": "a reason that is so long that it has to be wrapped into several lines of text", "y": ""}),
        record(2, tables={"long": long}, lengths={"long": 40 * 100 - 1}, hashed=long[:-1], unhashed=[7],
               free=list(range(2, 40)), num_free=1300),
        record(3, tables={}, free=[], num_free=0), num_blocks=2000, block_size=100)


@pytest.mark.parametrize("make", [lambda: busy_trace(80), crowded_trace, lambda: TWO_STEPS, awkward_trace],
                         ids=["busy", "crowded", "two steps", "awkward"])
def test_javascript_draws_what_python_draws(browser: Tab, tmp_path: Path, make: Callable[[], Trace]) -> None:
    """Every frame of the block table, character by character."""
    trace = make()
    show(browser, tmp_path, block_table(trace))
    states = list(pool_states(trace, steps_to_show(trace, 1)))
    layout = Layout.of(states)
    wanted = [_svg(state, layout) for state in states]
    differ = browser.js(f"""(wanted => {{
        const slider = {SLIDER}, plain = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
        return wanted.map((svg, i) => {{
            slider.value = i; slider.oninput();
            plain.innerHTML = svg;
            const drawn = {DRAWING}.innerHTML, ground = drawn.indexOf('class="bg"');
            return drawn.slice(drawn.indexOf('</rect>', ground) + 7) === plain.innerHTML ? null
                : [i, plain.innerHTML, drawn];
        }}).filter(x => x);
    }})({json.dumps(wanted)})""")
    assert not differ, differ[0]


@pytest.mark.parametrize("view", [block_table, batch_occupancy, memory_map, timeline])
def test_controls(browser: Tab, tmp_path: Path, view: Callable[[Trace], Picture]) -> None:
    trace = crowded_trace()
    last = len(trace)
    show(browser, tmp_path, view(trace))
    begins = next(i for i in range(last) if f">{i + 1}/{last}<" in browser.js("document.body.innerHTML"))
    assert begins == last - 1 or view is block_table  # the block table begins with the fullest pool
    browser.drag(SLIDER, (begins + 0.5) / last, 0.5)
    middle = int(browser.js(WHERE).partition("/")[0])
    assert 0.4 * last < middle < 0.6 * last
    browser.key("ArrowLeft")
    browser.key("ArrowLeft")
    browser.key("ArrowRight")
    assert browser.js(WHERE) == f"{middle - 1}/{last}"
    browser.key("Home")
    assert browser.js(WHERE) == f"1/{last}"
    said = browser.js(f"{DRAWING}.getAttribute('aria-label')")
    assert "Step 0" in said and browser.js(f"{SLIDER}.getAttribute('aria-valuetext')") == said
    browser.click(button("play"))
    browser.wait(f"parseInt({WHERE}) > 3", patience=5)
    browser.click(button("pause"))
    stopped = browser.js(WHERE)
    browser.click(button("one step on"))
    assert int(browser.js(WHERE).partition("/")[0]) == int(stopped.partition("/")[0]) + 1
    browser.key("End")
    assert browser.js(WHERE) == f"{last}/{last}"
    browser.js(f"{DRAWING}.closest('[data-te]').focus()")
    browser.key(" ")  # plays again from the beginning
    browser.wait(f"parseInt({WHERE}) < {last} / 2", patience=5)
    browser.key(" ")
    assert browser.js(f"!!{button('play')}")


def test_hovering_over_a_block_shows_all_its_places(browser: Tab, tmp_path: Path) -> None:
    show(browser, tmp_path, block_table(TWO_STEPS))
    browser.key("Home") if browser.js(f"{SLIDER}.focus(), 1") else None
    browser.hover("document.querySelector('[data-b=\"1\"]')")
    assert browser.js(NOTE) == ("Block 1: held by requests 0 (logical 0), 1 (logical 0); 4 of 4 tokens; ref_cnt 2; can "
                                "be found by its content")
    assert browser.js("document.querySelectorAll('.on').length") == 3  # in the pool, and in two tables
    browser.hover("document.querySelector('[data-b=\"5\"]')")
    assert browser.js(NOTE) == "Block 5: free, number 1 in the free queue; not hashed"


def test_hovering_over_a_run_says_what_it_was(browser: Tab, tmp_path: Path) -> None:
    player = batch_occupancy(crowded_trace())
    show(browser, tmp_path, player)
    for k in (0, 5):
        browser.hover(f"document.querySelectorAll('.r')[{k}]")
        assert browser.js(NOTE) == player._payload["tips"][k]


def test_themes(browser: Tab, tmp_path: Path) -> None:
    """The reader's system decides, unless the page around the picture knows better."""
    def ground() -> str:
        red, green, blue = (int(part) for part in
                            browser.js("getComputedStyle(document.querySelector('svg .bg')).fill")[4:-1].split(","))
        return f"#{red:02x}{green:02x}{blue:02x}"

    show(browser, tmp_path, block_table(TWO_STEPS))
    try:
        browser.dark(True)
        assert ground() == DARK[0]
        browser.js("document.body.setAttribute('data-jp-theme-light', 'true')")
        assert ground() == LIGHT[0]
        browser.dark(False)
        browser.js("document.body.setAttribute('data-jp-theme-light', 'false')")
        assert ground() == DARK[0]
        browser.js("document.body.removeAttribute('data-jp-theme-light')")
        assert ground() == LIGHT[0]
    finally:
        browser.dark(False)


def test_twice_on_a_page_and_without_scripts(browser: Tab, tmp_path: Path) -> None:
    page = block_table(TWO_STEPS).html
    (tmp_path / "twice.html").write_text(f'<meta charset="utf-8">{page}{page}{batch_occupancy(crowded_trace()).html}',
                                         encoding="utf-8")
    browser.open(f"file://{tmp_path / 'twice.html'}")
    assert browser.js("document.querySelectorAll('[data-on] svg').length") == 3
    assert browser.js("document.querySelectorAll('[data-te] img').length") == 0
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.reload")
        browser.wait("document.readyState === 'complete' && document.images.length === 3")
        assert browser.js("[...document.images].every(i => i.naturalWidth > 400 && i.alt)")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
