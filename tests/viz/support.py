"""What the tests of the pictures share: traces written by hand, and one of a busy engine."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ElementTree
from typing import Any

from tests.core.support import make_engine, make_params
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.trace import StepRecord, Trace

SVG = "{http://www.w3.org/2000/svg}"


def record(step: int = 0, **changes: Any) -> StepRecord:
    """A step in which nothing happened, but for `changes`."""
    return StepRecord(step=step, **{"time": 0.0, "budget": 64, "budget_left": 64, **changes})


def trace_of(*records: StepRecord, num_blocks: int = 8, block_size: int = 4) -> Trace:
    trace = Trace()
    trace.num_blocks, trace.block_size, trace.records = num_blocks, block_size, list(records)
    return trace


TWO_STEPS = trace_of(
    record(0, tables={"0": [1, 2], "1": [1, 3]}, lengths={"0": 7, "1": 5}, hashed=[1], free=[5, 6, 7, 4], num_free=4,
           waiting={"2": "not enough free blocks", "3": ""}, running=["0", "1"]),
    record(1, tables={"0": [1, 2], "2": [1, 4]}, lengths={"0": 8}, hashed=[2, 3], free=[5, 6, 7, 3], num_free=4,
           running=["0"]),
)  # fmt: skip


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def busy_engine(num_gpu_blocks: int = 65, **args: Any) -> LLMEngine:
    return make_engine(num_gpu_blocks, 256, **{"block_size": 16, "max_num_batched_tokens": 64, **args})


def add_request(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int) -> None:
    engine.add_request(name, {"prompt_token_ids": prompt}, make_params(max_tokens), arrival_time=0.0)


@functools.cache
def busy_trace(num_steps: int = 200, num_gpu_blocks: int = 65) -> Trace:
    """Eight seats, always taken; prompts with a common beginning, chunks, and waiting. Small pools bring preemption."""
    engine, number = busy_engine(num_gpu_blocks), 0
    with Trace(engine) as trace:
        while len(trace) < num_steps:
            while len(engine.scheduler.waiting) < 3:
                prompt = [5] * 32 + [number % 900 + 1] * (8 + 13 * number % 71)
                add_request(engine, str(number), prompt, 10 + 17 * number % 49)
                number += 1
            engine.step()
    return trace


@functools.cache
def crowded_trace() -> Trace:
    """Six requests in a pool that is too small for them: chunks, cache hits, preemption, all of them finished."""
    engine = busy_engine(14, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    with Trace(engine) as trace:
        for i in range(6):
            add_request(engine, str(i), [5] * 8 + [i + 1] * (4 + 3 * i), 12)
        while engine.has_unfinished_requests():
            engine.step()
    return trace
