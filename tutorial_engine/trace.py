"""The trace: one flat record per step, from which every picture is drawn.

    record.scheduled   {"0": [start, num_tokens], ...}     who computed what
    record.tables      {"0": [3, 7], ...}                  which physical blocks each request holds
    record.waiting     {"5": "not enough free blocks"}     who waits, and why

Pictures are made from records, never from the live engine: a run recorded on a GPU replays on a laptop. Recording costs
nothing while nobody listens.

Owns: records, saving, loading. Does not own: drawing (`viz/`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorial_engine.scheduler import Scheduler, SchedulerOutput

FORMAT_VERSION = 1


@dataclass
class StepRecord:
    """State of the engine after one step. Requests go by their public ids; child i of a prompt is "i_<id>".

    Attributes:
        step: 0, 1, 2 ...  time: seconds since recording began, when the step ended.
        budget, budget_left: tokens this step could compute, and those it did not use.
        scheduled: request -> [first token computed, number of tokens].
        cached: request -> tokens found in the prefix cache, for those admitted in this step.
        sampled: request -> new token ids.
        preempted: requests that lost their blocks in this step. finished: request -> finish reason.
        running, waiting: after the step; a waiting request maps to its reason, "" behind the first in line.
        tables: request -> its physical blocks, as they were while the model ran.
        lengths: request -> tokens whose K and V are in those blocks.
        free: free blocks after the step, the next one to be reused first. hashed: blocks that hold findable content.
    """

    step: int
    time: float
    budget: int
    budget_left: int
    scheduled: dict[str, list[int]]
    cached: dict[str, int]
    sampled: dict[str, list[int]]
    preempted: list[str]
    finished: dict[str, str]
    running: list[str]
    waiting: dict[str, str]
    tables: dict[str, list[int]]
    lengths: dict[str, int]
    free: list[int]
    hashed: list[int]


class Trace:
    """Records the steps of an engine: ``with Trace(llm) as trace: llm.generate(...)``.

    Args:
        llm: an LLM or LLMEngine; None for a trace that is loaded from a file.

    Attributes:
        records: one per step. num_blocks, block_size: of the pool.
    """

    def __init__(self, llm: Any = None) -> None:
        self.records: list[StepRecord] = []
        self.num_blocks = self.block_size = 0
        self._began = time.monotonic()
        self._engine = getattr(llm, "llm_engine", llm)
        if self._engine is not None:
            self.num_blocks = self._engine.num_gpu_blocks
            self.block_size = self._engine.config.block_size

    def __enter__(self) -> Trace:
        if self._engine is None:
            raise ValueError("This trace belongs to no engine, so there is nothing to record: use Trace(llm).")
        self._engine.listeners.append(self._record)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._engine.listeners.remove(self._record)

    def _record(self, scheduler: Scheduler, plan: SchedulerOutput, tables: dict[str, list[int]],
                kept: dict[str, list[int]]) -> None:
        pool = scheduler.kv_cache_manager.block_pool
        scheduled = plan.scheduled.values()
        self.records.append(StepRecord(
            step=len(self.records), time=round(time.monotonic() - self._began, 6),
            budget=scheduler.config.max_num_batched_tokens, budget_left=plan.budget_left,
            scheduled={public_id(s.request.request_id): [s.start, s.num_tokens] for s in scheduled},
            cached={public_id(s.request.request_id): s.start for s in scheduled if s.is_first},
            sampled={public_id(i): list(ids) for i, ids in kept.items()},
            preempted=[public_id(r.request_id) for r in plan.preempted],
            finished={public_id(s.request.request_id): s.request.status.finish_reason for s in scheduled
                      if s.request.status.is_finished},
            running=[public_id(r.request_id) for r in scheduler.running],
            waiting={public_id(r.request_id): plan.waiting_reasons.get(r.request_id, "") for r in scheduler.waiting},
            tables={public_id(i): table for i, table in tables.items()},
            lengths={public_id(s.request.request_id): s.start + s.num_tokens for s in scheduled},
            free=[b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            hashed=sorted(i for same in pool.cached_block_hash_to_block.values() for i in same)))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps({
            "version": FORMAT_VERSION, "num_blocks": self.num_blocks, "block_size": self.block_size,
            "records": [dataclasses.asdict(r) for r in self.records]}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace back. Raises ValueError if the file is not one, or of another version."""
        trace = cls()
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["version"] != FORMAT_VERSION:
                raise ValueError(f"version {data['version']}")
            trace.num_blocks, trace.block_size = data["num_blocks"], data["block_size"]
            trace.records = [StepRecord(**r) for r in data["records"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a trace of version {FORMAT_VERSION}; record it again with this package."
                             ) from error
        return trace

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        tokens = sum(n for r in self.records for _, n in r.scheduled.values())
        return (f"Trace({len(self.records):,} steps, {tokens:,} tokens computed, {self.num_blocks:,} blocks of "
                f"{self.block_size} tokens)")


def public_id(internal_id: str) -> str:
    """"0-0000002a" -> "0": the user's id without the suffix that makes it unique."""
    return internal_id.rpartition("-")[0] or internal_id
