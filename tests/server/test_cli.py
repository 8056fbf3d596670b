"""The command line: flags from dataclasses, and a server in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support import TIMEOUT
from tutorial_engine import AsyncEngineArgs
from tutorial_engine.server import cli
from tutorial_engine.server.serving import ServerOptions

KINDS = (AsyncEngineArgs, ServerOptions)


def parse(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[argparse.Namespace, AsyncEngineArgs, ServerOptions]:
    caught: list[argparse.Namespace] = []
    text, arguments, _ = cli.COMMANDS["serve"]
    monkeypatch.setitem(cli.COMMANDS, "serve", (text, arguments, caught.append))
    cli.main(["serve", *argv])
    return caught[0], cli.made(AsyncEngineArgs, caught[0]), cli.made(ServerOptions, caught[0])


def test_without_flags_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    args, engine, options = parse(monkeypatch)
    assert engine == AsyncEngineArgs() and options == ServerOptions()
    assert (args.host, args.port, args.model_tag) == ("127.0.0.1", 8000, None)


@pytest.mark.parametrize("argv, field, value", [
    (["--max-model-len", "2k"], "max_model_len", 2000), (["--max-model-len", "2K"], "max_model_len", 2048),
    (["--max_model_len=auto"], "max_model_len", -1), (["--max-model-len", "-1"], "max_model_len", -1),
    (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5), (["--dtype", "half"], "dtype", "float16"),
    (["--enable-prefix-caching"], "enable_prefix_caching", True), (["--generation-config", "vllm"], "generation_config",
                                                                   "vllm"),
    (["--no-enable-prefix-caching"], "enable_prefix_caching", False), (["--seed", "7"], "seed", 7),
    (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
    (["--override-generation-config", '{"temperature": 0.5}'], "override_generation_config", {"temperature": 0.5}),
    (["--kv-cache-memory-bytes", "1.5G"], "kv_cache_memory_bytes", 1610612736), (["--model", "x"], "model", "x"),
    (["--api-key", "a", "--api-key", "b", "c"], "api_key", ["a", "b", "c"]),
    (["--allowed-origins", '["http://a"]'], "allowed_origins", ["http://a"]),
    (["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], "enable_auto_tool_choice", True)])
def test_r10_flags(monkeypatch: pytest.MonkeyPatch, argv: list[str], field: str, value: Any) -> None:
    """vLLM's names and notations."""
    _, engine, options = parse(monkeypatch, *argv)
    assert getattr(engine if hasattr(engine, field) else options, field) == value


@pytest.mark.parametrize("argv, message", [
    (["serve", "--flavour", "mint"], "unrecognized arguments: --flavour"), (["serve", "--max-model"], "unrecognized"),
    (["serve", "--max-model-len", "12x"], "no number"), (["serve", "--override-generation-config", "{"], "not JSON"),
    (["serve", "--port", "70000"], "--port"), (["boil"], "invalid choice"), ([], "required"),
    (["serve", "--quantization", "awq"], "quantization is not in this engine"),
    (["serve", "--enable-auto-tool-choice"], "tool_call_parser"), (["serve", "/no/such/model"], "/no/such/model"),
    (["serve", "--block-size", "0"], "block_size must be at least 1")])
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what is wrong, and exit status 2; no traceback."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and "Traceback" not in error


def test_every_field_has_a_flag_and_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    neutral = re.findall(r'"(\w+)": \(', Path(sys.modules["tutorial_engine.config"].__file__).read_text())
    for kind in KINDS:
        for field in dataclasses.fields(kind):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.name in cli.field_texts(kind) or field.name in neutral, f"{field.name} is not explained"


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(SystemExit):
        cli.main(["serve", "--port", str(sock.getsockname()[1])])
    assert "Cannot listen at 127.0.0.1" in capsys.readouterr().err


def test_a_server_in_a_process(tiny_model: Path) -> None:
    """`python -m tutorial_engine.server`: it says where it listens; SIGTERM lets a stream come to its end."""
    command = [sys.executable, "-m", "tutorial_engine.server", str(tiny_model), "--port", "0", "--served-model-name",
               "tiny", "--max-model-len", "256", "--num-gpu-blocks-override", "33"]
    environment = {**os.environ, "VLLM_LOG_STATS_INTERVAL": "0.05"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            log = ""
            while "startup complete" not in log:
                line = process.stderr.readline()
                assert line, log
                log += line
            url = re.search(r"Serving tiny at (http://127.0.0.1:\d+)", log)[1]
            body = {"prompt": "the", "max_tokens": 200, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=TIMEOUT) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            log += process.communicate(timeout=TIMEOUT)[1]
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM), log
    assert "Engine 000: Avg prompt throughput:" in log and "Traceback" not in log
