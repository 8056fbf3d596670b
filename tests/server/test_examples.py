"""Every script in examples/, run as a reader would run it, against a real server that asks for a key."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.support import TIMEOUT, Live, events, serve_letters

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".sh", ".py"))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with serve_letters("hello world", options={"api_key": ["sesame"]}, max_model_len=128, max_num_seqs=64,
                       num_gpu_blocks=513) as live:
        yield live


@pytest.fixture
def said(server: Live, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the script printed. The Python ones run in this process, which has imported openai already."""
    path = FOLDER / request.node.callspec.params["name"]
    monkeypatch.setenv("BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    if path.suffix == ".py":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(path), run_name="__main__")
        return printed.getvalue()
    if shutil.which("curl") is None:
        pytest.skip("No curl is installed.")
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(["sh", str(path)], env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WANTED = {
    "chat.py": r"hello worldd*\n\(\d+ tokens read, 40 written, finish_reason length\)\n",
    "stream.py": r"hello worldd*\n\(40 tokens\)\n",
    "logprobs.py": r"(?s) +'h'   of 'h' 100%, '.*'e'   of 'e' 100%.*",
    "many_at_once.py": r"one alone: [\d.]+ s; 40 together: [\d.]+ s, [\d.]+ times as long\n",
    "chat.sh": r'\{.*"content":"hello worldd*".*\}', "completion.sh": r'\{.*"index":1,"text":"hello worldd*".*\}',
    "stream.sh": r"(?s)data: .*data: \[DONE\]\n\n",
    "look_inside.sh": r'(?s)\{.*"token_strs":\["A".*\nvllm:prompt_tokens_total.*vllm:generation_tokens_total.*'}


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(said: str, name: str) -> None:
    assert re.fullmatch(WANTED[name], said), said
    if name == "stream.sh":
        chunks = events(said)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]).startswith("hello world")
        assert chunks[-1]["usage"]["completion_tokens"] == 40
    elif name in ("chat.sh", "completion.sh"):
        assert len(json.loads(said)["choices"]) == (1 if name == "chat.sh" else 2)


def test_every_example_is_explained() -> None:
    assert set(re.findall(r"\]\((\w+\.(?:sh|py))\)", (FOLDER / "README.md").read_text())) == set(SCRIPTS) == set(WANTED)
