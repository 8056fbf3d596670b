"""What a run of `bench serve` was like: vLLM's measures, its table, its JSON; and a picture of a sweep.

    TTFT   time to first token: queueing and prefill
    TPOT   time per output token, of each request: (latency - TTFT) / (tokens - 1); requests of one token have none
    ITL    inter-token latency: every gap between two pieces of an answer, of all requests in one pool
    goodput  requests per second that met all of the promised times ("Goodput", DistServe, Zhong et al., OSDI 2024)

Owns: measures and how they are shown. Does not own: time stamps (`client.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tutorial_engine.bench.client import Result
from tutorial_engine.exceptions import VLLMValidationError

MEASURES = {"ttft": ("TTFT", "Time to First Token"), "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
            "itl": ("ITL", "Inter-token Latency"), "e2el": ("E2EL", "End-to-end Latency")}
GOALS = ("ttft", "tpot", "e2el")
WIDTH = 50


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] as {"ttft": 200.0, "tpot": 50.0}, in milliseconds.

    Raises:
        VLLMValidationError: something else.
    """
    goals = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] >= 0:
            raise VLLMValidationError(f"--goodput takes NAME:MILLISECONDS, with a name of {', '.join(GOALS)} (got "
                                      f"{pair!r}).", parameter="goodput", value=pair)
    return goals


def summarize(results: Sequence[Result], duration: float, goals: dict[str, float], measures: Sequence[str],
              percentiles: Sequence[float]) -> dict[str, Any]:
    """All numbers of a run, under vLLM's names in its JSON.

    Args:
        duration: of the run in seconds. goals: measure -> milliseconds that are promised.
        measures: of `MEASURES`, which of them to sum up.

    Raises:
        VLLMValidationError: no request succeeded.
    """
    done = [r for r in results if not r.error]
    if not done:
        raise VLLMValidationError(f"All {len(results)} requests failed. The first one: {results[0].error[:300]}")
    prompt, output = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    summary: dict[str, Any] = {
        "duration": duration, "completed": len(done), "failed": len(results) - len(done), "total_input_tokens": prompt,
        "total_output_tokens": output, "request_throughput": len(done) / duration,
        "request_goodput": sum(meets(r, goals) for r in done) / duration if goals else None,
        "output_throughput": output / duration, "total_token_throughput": (prompt + output) / duration,
        "max_output_tokens_per_s": _peak_throughput(done), "max_concurrent_requests": _peak_concurrency(done)}
    values = {"ttft": [r.ttft for r in done], "tpot": [r.tpot for r in done if r.output_len > 1],
              "itl": [gap for r in done for gap in r.itls], "e2el": [r.latency for r in done]}
    for name in measures:
        ms = np.array(values[name] or [0.0]) * 1000
        summary |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms)),
                    f"std_{name}_ms": float(ms.std())}
        summary |= {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    return summary


def meets(result: Result, goals: dict[str, float]) -> bool:
    """Whether a request kept all promises."""
    took = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
    return all(took[name] * 1000 <= limit for name, limit in goals.items())


def _peak_concurrency(results: Sequence[Result]) -> int:
    """The most requests that were on their way at one time."""
    changes = [(r.sent, 1) for r in results] + [(r.chunks[-1], -1) for r in results]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def _peak_throughput(results: Sequence[Result]) -> float:
    """Tokens in the best of the run's seconds; the pieces of an answer count alike."""
    seconds = np.array([int(t) for r in results for t in r.chunks])
    return float(np.bincount(seconds, [r.output_len / len(r.chunks) for r in results for _ in r.chunks]).max())


def table(summary: dict[str, Any], measures: Sequence[str], percentiles: Sequence[float]) -> str:
    """The lines that `vllm bench serve` prints."""
    limit, rate, goodput = summary["max_concurrency"], summary["request_rate"], summary["request_goodput"]
    counts = [("Successful requests:", summary["completed"]), ("Failed requests:", summary["failed"]),
              *([("Maximum request concurrency:", limit)] if limit else []),
              *([("Request rate configured (RPS):", rate)] if rate != "inf" else []),
              ("Benchmark duration (s):", summary["duration"]),
              ("Total input tokens:", summary["total_input_tokens"]),
              ("Total generated tokens:", summary["total_output_tokens"]),
              ("Request throughput (req/s):", summary["request_throughput"]),
              *([("Request goodput (req/s):", goodput)] if goodput is not None else []),
              ("Output token throughput (tok/s):", summary["output_throughput"]),
              ("Peak output token throughput (tok/s):", summary["max_output_tokens_per_s"]),
              ("Peak concurrent requests:", float(summary["max_concurrent_requests"])),
              ("Total token throughput (tok/s):", summary["total_token_throughput"])]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(_line(*count) for count in counts)]
    for name in measures:
        short, words = MEASURES[name]
        rows = [("Mean", "mean"), ("Median", "median"), *((f"P{p:g}", f"p{p:g}") for p in percentiles)]
        lines.append(words.center(WIDTH, "-"))
        lines += [_line(f"{word} {short} (ms):", summary[f"{key}_{name}_ms"]) for word, key in rows]
    return "\n".join([*lines, "=" * WIDTH])


def _line(words: str, value: float) -> str:
    return f"{words:<40} {value:<10.2f}" if isinstance(value, float) else f"{words:<40} {value:<10}"


def plot(summaries: Sequence[dict[str, Any]], goals: dict[str, float], path: Any) -> None:
    """Rate against P99 TTFT, and against throughput and goodput, as a picture.

    Args:
        summaries: of one run each, with finite rates and P99 among the percentiles.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global

    rates = [s["request_rate"] for s in summaries]
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(rates, [s["p99_ttft_ms"] for s in summaries], "o-", color="#0072b2", label="P99 TTFT")
    above.set_ylabel("P99 TTFT (ms)")
    above.set_yscale("log")
    if "ttft" in goals:
        above.axhline(goals["ttft"], color="#595959", linestyle=":", label=f"promised: {goals['ttft']:g} ms")
    below.plot(rates, rates, color="#c4c4c4", linestyle="--", label="as asked for")
    below.plot(rates, [s["request_throughput"] for s in summaries], "s-", color="#e69f00", label="throughput")
    if goals:
        words = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in goals.items())
        below.plot(rates, [s["request_goodput"] for s in summaries], "o-", color="#009e73", label=f"goodput: {words}")
    below.set_xlabel("request rate (req/s)")
    below.set_ylabel("answered (req/s)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
