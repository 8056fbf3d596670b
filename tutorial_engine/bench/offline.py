"""`bench throughput` and `bench latency`: the engine in this process, without HTTP.

Throughput asks how much gets done when all requests are there from the start. Latency asks how long one batch takes,
again and again.

Owns: running, the lines that are printed. Does not own: the workload.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm.auto import trange

from tutorial_engine.bench.workload import Job, check
from tutorial_engine.llm import LLM
from tutorial_engine.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def generate(llm: LLM, jobs: Sequence[Job], progress: bool = False) -> float:
    """Answer all of them, each to its full length. Returns the seconds that it took."""
    prompts: list[Any] = [{"prompt_token_ids": job.prompt} for job in jobs]
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=job.output_len) for job in jobs]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=progress)
    return time.perf_counter() - began


def throughput(llm: LLM, jobs: Sequence[Job], progress: bool = False) -> dict[str, Any]:
    """Requests and tokens per second, under vLLM's names."""
    seconds = generate(llm, jobs, progress)
    prompt, output = sum(len(job.prompt) for job in jobs), sum(job.output_len for job in jobs)
    return {"elapsed_time": seconds, "num_requests": len(jobs), "total_num_tokens": prompt + output,
            "num_prompt_tokens": prompt, "num_output_tokens": output, "requests_per_second": len(jobs) / seconds,
            "tokens_per_second": (prompt + output) / seconds, "output_tokens_per_second": output / seconds}


def throughput_text(result: dict[str, Any]) -> str:
    return (f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total "
            f"tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s\n"
            f"Total num prompt tokens:  {result['num_prompt_tokens']}\n"
            f"Total num output tokens:  {result['num_output_tokens']}")


def latency(llm: LLM, jobs: Sequence[Job], num_warmups: int, num_iters: int, progress: bool = False) -> dict[str, Any]:
    """Seconds that a batch takes; the prefix cache is emptied before each, so that every prompt is computed.

    Raises:
        VLLMValidationError: no iterations.
    """
    check("num_iters", num_iters >= 1, num_iters, "at least 1")
    check("num_iters_warmup", num_warmups >= 0, num_warmups, "at least 0")
    seconds = []
    for i in trange(num_warmups + num_iters, disable=not progress):
        llm.reset_prefix_cache()
        took = generate(llm, jobs)
        if i >= num_warmups:
            seconds.append(took)
    return {"avg_latency": float(np.mean(seconds)), "latencies": seconds,
            "percentiles": {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES}}


def latency_text(result: dict[str, Any]) -> str:
    return "\n".join([f"Avg latency: {result['avg_latency']} seconds", *(
        f"{p}% percentile latency: {seconds} seconds" for p, seconds in result["percentiles"].items())])
