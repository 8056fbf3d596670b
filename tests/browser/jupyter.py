"""JupyterLab for tests: a server with settings of its own, and what one does with a notebook in it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat

from tests.browser.chromium import Tab, stop, wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
TOKEN = "of-this-test"


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """A notebook of these code cells, not yet run."""
    nbformat.write(nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source.strip()) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}), path)


def output(cell: int, number: int = 0) -> str:
    """JavaScript for the place where one output of a code cell is shown."""
    return (f"(document.querySelectorAll('.jp-CodeCell')[{cell}]"
            f"?.querySelectorAll('.jp-OutputArea-output')[{number}])")


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """A server for this folder, with settings of its own; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {f"JUPYTER_{name}_DIR": str(folder / ".jupyter" / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TUTORIAL_"))}
    settings = folder / ".jupyter/config/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    environment = {**kept, **own, "IPYTHONDIR": str(folder / ".ipython"), "PYTHONPATH": str(ROOT),
                   "JUPYTER_PREFER_ENV_PATH": "1", "TUTORIAL_LIVE": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
         f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}",
         "--expose-app-in-browser", *(f"--ServerApp.jpserver_extensions={name}=False" for name in
                                      ("jupyter_lsp", "jupyter_server_terminals", "jupyterlab_jupytext"))],
        env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "server.log").open("w"))  # fmt: skip

    def answers() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(
                f"http://127.0.0.1:{port}/api/status?token={TOKEN}", timeout=5) as answer:
            return answer.status == 200
        return False

    try:
        wait_for(answers, "JupyterLab to start", patience=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def open_notebook(tab: Tab, address: str, name: str) -> None:
    tab.open(f"{address}/doc/tree/{name}?token={TOKEN}&reset")
    tab.wait("window.jupyterapp && document.querySelectorAll('.jp-CodeCell').length > 1", patience=60)
    tab.click("document.querySelector('.jp-InputPrompt')")


def command(tab: Tab, name: str, **args: Any) -> None:
    tab.js(f"window.jupyterapp.commands.execute({name!r}, {json.dumps(args)}).then(() => 1)")


def run_all(tab: Tab) -> None:
    """Begin to run all cells, once the kernel is there: before that, JupyterLab would ask which one to start."""
    tab.wait("window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.connectionStatus === 'connected'",
             patience=60)
    tab.wait("window.jupyterapp.commands.isEnabled('notebook:run-all-cells') && "
             "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'", patience=60)
    tab.js("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
