"""A browser for tests: Debian's Chromium without a window, driven through its DevTools protocol.

A dozen calls of the protocol are enough to open a page, look at it, click, drag and type; so there is no driver to
install beside the browser, and none that must fit its version. Input goes the way of a person's: through the window,
at coordinates.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, " ": 32}
PATIENCE_S = 20.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_browser(profile: Path, width: int = 1000, height: int = 900) -> Iterator[Tab]:
    """Start a browser with a fresh profile in the folder `profile`, and end it afterwards."""
    process = subprocess.Popen(
        [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
         "--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        wait_for(lambda: port_file.exists() and "\n" in port_file.read_text(), "the browser to start")
        port = port_file.read_text().split("\n")[0]

        def pages() -> list[dict[str, Any]]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                return [target for target in json.load(answer) if target["type"] == "page"]

        wait_for(pages, "the browser to open a page")
        tab = Tab(pages()[0]["webSocketDebuggerUrl"])
        try:
            tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=False)
            yield tab
        finally:
            tab.close()
    finally:
        stop(process)


def stop(process: subprocess.Popen) -> None:
    """Ask it to end, and insist."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(condition: Any, what: str, patience: float = PATIENCE_S) -> Any:
    """Ask again and again until the answer is true, and return it."""
    end = time.monotonic() + patience
    while not (answer := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {patience:g} s for {what}")
        time.sleep(0.03)
    return answer


class Tab:
    """One page of the browser."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=PATIENCE_S, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.call("Page.enable")

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            pass  # an event that nobody asked for
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression[:200]}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, expression: str, patience: float = PATIENCE_S) -> None:
        """Wait until a JavaScript expression is true."""
        wait_for(lambda: self.js(f"!!({expression})"), expression, patience)

    def place(self, element: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Where an element (a JavaScript expression) is in the window, after it was scrolled into view."""
        box = self.js(f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
                      f"return [r.left, r.top, r.width, r.height]; }})({element})")
        return box[0] + across * box[2], box[1] + down * box[3]

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if kind != "mouseMoved" else "none",
                  buttons=int(pressed), clickCount=int(kind != "mouseMoved"))

    def hover(self, element: str, across: float = 0.5, down: float = 0.5) -> None:
        self.mouse("mouseMoved", *self.place(element, across, down))

    def click(self, element: str) -> None:
        x, y = self.place(element)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, pressed=True)
        self.mouse("mouseReleased", x, y)

    def drag(self, element: str, start: float, end: float) -> None:
        """Drag over an element, from one part of its width to another."""
        (x, y), (to, _) = self.place(element, start), self.place(element, end)
        self.mouse("mousePressed", x, y, pressed=True)
        for part in range(1, 9):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + (to - x) * part / 8, y=y, button="left",
                      buttons=1)
        self.mouse("mouseReleased", to, y)

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code="Space" if name == " " else name,
                      windowsVirtualKeyCode=KEYS[name])

    def dark(self, on: bool) -> None:
        """The reader's system asks for dark pages, or for light ones."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                           "value": "dark" if on else "light"}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
