"""The environment every test runs in. Set before anything imports torch, which reads it once."""

import os
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread sums in one order: floats agree on every machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks a hub for anything fails at once, not after a timeout
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c in one instruction, as every compiler for GPUs does


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What became of the rows of the contract (`tests/test_conformance.py`): all of them if they were asked for, else
    those that failed."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    rows = [(dict(report.user_properties)["row"], report.passed) for report in reports
            if report.when == "call" and "row" in dict(report.user_properties)]
    if not any("test_conformance" in argument for argument in config.args):
        rows = [(row, passed) for row, passed in rows if not passed]
    if rows:
        terminalreporter.section("the contract with vLLM")
    for row, passed in sorted(rows, key=lambda entry: entry[0].place):
        verdict = "FAILED" if not passed else "not in this engine" if row.verdict == "not here" else "passed"
        terminalreporter.line(f"{row.row_id:4} {row.subject:45} {verdict}")
