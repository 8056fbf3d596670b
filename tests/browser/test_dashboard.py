"""The server's live page in a browser."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.browser.chromium import Tab
from tests.server.support import serve_letters, wait_until
from tutorial_engine.server import dashboard

TIPS = "[...document.querySelectorAll('#%s title')].map(t => t.textContent)"


def test_live_page(browser: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows requests while they run, in light and dark, loads nothing else, and lets go when it is left."""
    def slowly(plan: Any) -> None:
        time.sleep(0.02)

    with serve_letters("hello world", paced=False, before=slowly, max_num_seqs=2, block_size=4) as live:
        browser.open(live.url + "/dashboard")
        browser.wait("document.getElementById('says').textContent.includes('Nothing was computed')")
        listeners = live.llm.llm_engine.listeners
        wait_until(lambda: len(listeners) == 1)
        live.complete(["one prompt", "another one", "the third"], max_tokens=20, ignore_eos=True)
        browser.wait("document.querySelectorAll('#occupancy .decode').length >= 95")  # 3 x 19, steps, the legend
        tips = browser.js(TIPS % "occupancy")
        tips = [re.sub(r"step \d+", "step", tip) for tip in browser.js(TIPS % "occupancy")]
        assert {"request 1, step: prefill 10", "request 2, step: prefill 11", "request 3, step: prefill 9"} <= set(tips)
        assert tips.count("request 2, step: decode 1") == 19 and "request 3, step: waiting" in tips
        assert len(browser.js(TIPS % "blocks")) == 129 and "block 0: the null block" in browser.js(TIPS % "blocks")
        assert len([tip for tip in browser.js(TIPS % "latency") if tip.startswith("TTFT")]) == 3
        browser.wait("document.getElementById('tiles').textContent.includes('0 of 2running0waiting')")
        loaded = browser.js("JSON.stringify(performance.getEntriesByType('resource').map(e => e.name))")
        assert set(json.loads(loaded)) <= {live.url + "/dashboard/state", live.url + "/favicon.ico"}
        colors = []
        for dark in (False, True):
            browser.dark(dark)
            colors.append(browser.js("getComputedStyle(document.body).backgroundColor"))
        browser.dark(False)
        assert colors == ["rgb(255, 255, 255)", "rgb(27, 30, 34)"]
        browser.open("data:text/html,left")
        monkeypatch.setattr(dashboard, "PATIENCE_S", 0.1)
        time.sleep(0.2)
        live.complete(max_tokens=3)
        wait_until(lambda: not listeners)


def test_the_engine_has_stopped(browser: Tab) -> None:
    """The page says so."""
    with serve_letters("a") as live:
        live.llm.shutdown()
        browser.open(live.url + "/dashboard")
        browser.wait("document.getElementById('says').textContent === "
                     "'No news from the server: the engine has stopped.'")
        browser.open("data:text/html,left")
