"""`tutorial-engine bench`: arrivals against their distribution, numbers against hand-made ones, and real runs."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.support import Live
from tutorial_engine.bench import client as bench_client
from tutorial_engine.bench import report
from tutorial_engine.bench.client import Result
from tutorial_engine.bench.workload import Job, arrival_times, random_jobs
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.server import cli

# Arrivals

CUMULATIVE = {0.5: lambda x: math.erf(math.sqrt(x)), 1.0: lambda x: 1 - math.exp(-x),
              2.0: lambda x: 1 - math.exp(-x) * (1 + x)}  # of gamma distributions with scale 1


@pytest.mark.parametrize("burstiness", CUMULATIVE)
def test_gaps_follow_their_distribution(burstiness: float) -> None:
    """Kolmogorov and Smirnov's test at 0.1 %; and it would reject each of the other two."""
    n, rate = 4000, 7.5
    gaps = np.diff(arrival_times(n, rate, burstiness, seed=3), prepend=0.0)
    assert abs(gaps.mean() * rate - 1) < 5 / math.sqrt(n * burstiness)

    def distance(shape: float) -> float:
        wanted = np.array([CUMULATIVE[shape](x) for x in np.sort(gaps) * rate * shape])
        return max((np.arange(1, n + 1) / n - wanted).max(), (wanted - np.arange(n) / n).max())

    limit = 1.95 / math.sqrt(n)
    assert {shape: bool(distance(shape) < limit) for shape in CUMULATIVE} == {
        shape: shape == burstiness for shape in CUMULATIVE}


def test_a_poisson_process_forgets() -> None:
    """Counts of disjoint seconds: variance as large as the mean, and no correlation of neighbours."""
    counts = np.bincount(arrival_times(20_000, 10.0, 1.0, seed=5).astype(int))[:-1]
    assert abs(counts.mean() - 10) < 0.4 and abs(counts.var() / counts.mean() - 1) < 0.12
    assert abs(np.corrcoef(counts[:-1], counts[1:])[0, 1]) < 0.08


def test_seeds() -> None:
    ids = list(range(100))
    assert (arrival_times(50, 2.0, 1.0, 0) == arrival_times(50, 2.0, 1.0, 0)).all()
    assert not (arrival_times(50, 2.0, 1.0, 0) == arrival_times(50, 2.0, 1.0, 1)).any()
    assert np.allclose(arrival_times(50, 2.0, 1.0, 0), 2 * arrival_times(50, 4.0, 1.0, 0)), "only faster"
    assert not arrival_times(3, math.inf, 1.0, 0).any(), "all at once"
    assert random_jobs(ids, 9, 20, 5, 0.5, 2, 0) == random_jobs(ids, 9, 20, 5, 0.5, 2, 0)
    assert random_jobs(ids, 9, 20, 5, 0.5, 2, 0) != random_jobs(ids, 9, 20, 5, 0.5, 2, 1)


def test_prompts() -> None:
    """Lengths within the range and over all of it, ids of those given, a prefix that all share and nothing else."""
    jobs = random_jobs([5, 7, 9], 300, 10, 4, 0.5, 3, 0)
    assert {len(job.prompt) - 3 for job in jobs} == set(range(5, 16)) and {job.output_len for job in jobs} == {
        2, 3, 4, 5, 6}
    assert {i for job in jobs for i in job.prompt} == {5, 7, 9}
    assert len({tuple(job.prompt[:3]) for job in jobs}) == 1 < len({tuple(job.prompt[3:8]) for job in jobs})
    assert {(len(job.prompt), job.output_len) for job in random_jobs([1], 9, 10, 4, 0.0, 0, 0)} == {(10, 4)}


# Measures

RESULTS = [Result(0.0, [0.1, 0.2, 0.4], 5, 3), Result(0.5, [0.7], 6, 1), Result(0.6, [0.9, 1.9], 7, 5),
           Result(0.1, error="status 503"), Result(0.1, [0.2], error="the stream ended before the answer did")]


def test_n4_measures() -> None:
    """TPOT without requests of one token, ITL pools all gaps, goodput counts who met every goal."""
    found = report.summarize(RESULTS, 2.0, {"ttft": 250.0, "tpot": 260.0}, list(report.MEASURES), [50, 99])
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (
        3, 2, 18, 9)
    assert found["request_throughput"] == 1.5 and found["output_throughput"] == 4.5
    assert found["total_token_throughput"] == 13.5 and found["request_goodput"] == 1.0, "one has a TTFT of 300 ms"
    assert found["max_concurrent_requests"] == 2 and found["max_output_tokens_per_s"] == pytest.approx(6.5)
    for name, ms in {"ttft": [100, 200, 300], "tpot": [150, 250], "itl": [100, 200, 1000],
                     "e2el": [400, 200, 1300]}.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(ms))
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(ms)) == found[f"p50_{name}_ms"]
        assert found[f"p99_{name}_ms"] == pytest.approx(np.percentile(ms, 99))
    assert report.summarize(RESULTS, 2.0, {}, [], [])["request_goodput"] is None
    with pytest.raises(VLLMValidationError, match="All 2 requests failed. The first one: status 503"):
        report.summarize(RESULTS[3:], 2.0, {}, [], [])


def test_n4_table() -> None:
    """vLLM's words, in its order."""
    summary = {"max_concurrency": 8, "request_rate": 2.5, **report.summarize(
        RESULTS, 2.0, {"ttft": 250.0}, ["ttft", "tpot", "itl"], [99])}
    lines = report.table(summary, ["ttft", "tpot", "itl"], [99]).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "============ Serving Benchmark Result ============", "Successful requests:", "Failed requests:",
        "Maximum request concurrency:", "Request rate configured (RPS):", "Benchmark duration (s):",
        "Total input tokens:", "Total generated tokens:", "Request throughput (req/s):", "Request goodput (req/s):",
        "Output token throughput (tok/s):", "Peak output token throughput (tok/s):", "Peak concurrent requests:",
        "Total token throughput (tok/s):", "---------------Time to First Token----------------", "Mean TTFT (ms):",
        "Median TTFT (ms):", "P99 TTFT (ms):", "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):", "Median TPOT (ms):", "P99 TPOT (ms):", "---------------Inter-token Latency----------------",
        "Mean ITL (ms):", "Median ITL (ms):", "P99 ITL (ms):", "=" * 50]
    assert "Mean TTFT (ms):                          200.00    " in lines


# The client


@pytest.mark.parametrize("status, body, error", [
    (503, '{"error": {"message": "full"}}', "status 503"), (200, "data: {oops\n\n", "JSONDecodeError"),
    (200, 'data: {"choices": [{"text": "a"}]}\n\n', "ended before"), (200, "data: [DONE]\n\n", "ended before"),
    (200, 'data: {"choices": [{}]}\n\ndata: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n', "broken")])
def test_answers_that_are_none(status: int, body: str, error: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))

    async def main() -> Result:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await bench_client.send(client, Job([1], 2), {}, 0.0)

    assert error in asyncio.run(main()).error


def test_goes_only_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of the environment, no redirect."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    client = bench_client.open_client("http://127.0.0.1:1")
    assert not client.trust_env and not client.follow_redirects and not client._mounts
    assert client.headers["authorization"] == "Bearer k"


def test_open_and_closed_loop(letters: Live) -> None:
    """Without a limit everybody is on the way at once, at the time asked for; with one, never more than that."""
    async def main(limit: int | None) -> list[Result]:
        async with bench_client.open_client(letters.url) as client:
            model, token_ids = await bench_client.ask_server(client, None)
            assert model and len(token_ids) > 20
            jobs = random_jobs(token_ids, 6, 8, 5, 0.0, 0, 0)
            results, duration = await bench_client.run(
                client, jobs, [0.02 * i for i in range(6)], {"model": model, "temperature": 0}, limit)
            assert duration >= max(r.chunks[-1] for r in results)
            return results

    results = asyncio.run(main(None))
    assert all(r.error == "" and r.prompt_len == 8 and r.output_len == 5 for r in results)
    assert all(r.sent >= 0.02 * i for i, r in enumerate(results))
    assert report._peak_concurrency(asyncio.run(main(1))) == 1


# The commands


def test_bench_serve(letters: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep: a table and a file for each rate, a picture of both; the server has counted the same tokens."""
    before = letters.metrics()
    cli.main(["bench", "serve", "--base-url", letters.url, "--num-prompts", "8", "--input-len", "12", "--output-len",
              "6", "--request-rate", "50", "100", "--num-warmups", "2", "--burstiness", "2", "--goodput", "ttft:60000",
              "tpot:0", "--ignore-eos", "--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"),
              "--disable-tqdm"])
    text = capsys.readouterr().out
    assert text.count("Serving Benchmark Result") == 2 and text.count("Saved") == 3
    files = {f.suffix: f for f in sorted((tmp_path / "new").iterdir())}
    assert files.keys() == {".json", ".png"} and files[".png"].read_bytes().startswith(b"\x89PNG")
    found = [json.loads(f.read_text()) for f in (tmp_path / "new").glob("*.json")]
    assert sorted(f["request_rate"] for f in found) == [50, 100]
    for f in found:
        assert f["completed"] == 8 and f["input_lens"] == [12] * 8 and f["output_lens"] == [6] * 8
        assert f["request_goodput"] == 0 and f["p99_ttft_ms"] > 0 and len(f["ttfts"]) == len(f["itls"]) == 8
        assert f["start_times"] == sorted(f["start_times"])
    after = letters.metrics()
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 18 * 12
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 18 * 6


@pytest.mark.parametrize("argv, message", [
    (["--request-rate", "0"], "--request-rate must be a number above 0"),
    (["--request-rate", "nan"], "--request-rate must be"), (["--burstiness", "-1"], "--burstiness must be"),
    (["--goodput", "ttft"], "NAME:MILLISECONDS"), (["--goodput", "itl:5"], "NAME:MILLISECONDS"),
    (["--percentile-metrics", "ttft,what"], "--percentile-metrics must be of ttft, tpot, itl, e2el"),
    (["--metric-percentiles", "101"], "--metric-percentiles must be"), (["--num-prompts", "0"], "at least 1"),
    (["--max-concurrency", "0"], "at least 1"), (["--random-range-ratio", "1"], "below 1"), (["--seed", "-1"], "seed"),
    (["--request-rate", "1", "2", "--result-filename", "x"], "left out for several rates"),
    (["--save-result", "--result-dir", "/dev/null/x"], "a folder that can be written to"),
    (["--input-len", "1000"], "All 1 requests failed. The first one: status 400")])
def test_wrong_flags(letters: Live, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what is wrong, no traceback."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", "--base-url", letters.url, "--num-prompts", "1", "--disable-tqdm", *argv])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and "Traceback" not in error


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--port", "1"])
    assert "http://127.0.0.1:1 does not answer as a server for this benchmark" in capsys.readouterr().err


def engine_flags(tiny_model: Path, tmp_path: Path) -> list[str]:
    return ["--model", str(tiny_model), "--max-model-len", "64", "--num-gpu-blocks-override", "65", "--disable-tqdm",
            "--output-json", str(tmp_path / "result.json")]


def saved(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "result.json").read_text())


def test_n5_bench_throughput(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", "throughput", "--num-prompts", "5", "--input-len", "10", "--output-len", "4",
              *engine_flags(tiny_model, tmp_path)])
    text, found = capsys.readouterr().out, saved(tmp_path)
    assert f"Throughput: {found['requests_per_second']:.2f} requests/s, " in text and " output tokens/s" in text
    assert "Total num prompt tokens:  50" in text and "Total num output tokens:  20" in text
    assert found["tokens_per_second"] == pytest.approx(70 / found["elapsed_time"])


def test_n5_bench_latency(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", "latency", "--batch-size", "2", "--input-len", "20", "--output-len", "3", "--num-iters-warmup",
              "1", "--num-iters", "4", *engine_flags(tiny_model, tmp_path)])
    text, found = capsys.readouterr().out, saved(tmp_path)
    assert len(found["latencies"]) == 4 and found["avg_latency"] == pytest.approx(np.mean(found["latencies"]))
    assert [line.partition(" latency:")[0] for line in text.splitlines()] == [
        "Avg", *(f"{p}% percentile" for p in (10, 25, 50, 75, 90, 99))]
    assert found["percentiles"]["50"] == pytest.approx(np.median(found["latencies"]))
