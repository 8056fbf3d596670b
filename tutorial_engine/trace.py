"""The trace: one flat record per step, from which every picture is drawn.

    record.scheduled   {"0": [start, num_tokens], ...}     who computed what
    record.tables      {"0": [3, 7], ...}                  which physical blocks each request holds
    record.waiting     {"5": "not enough free blocks"}     who waits, and why

Pictures are made from records, never from the live engine: a run recorded on a GPU replays on a laptop. Recording costs
nothing while nobody listens, and little while somebody does: of the cached blocks a record says what changed, and of
the free queue how it begins.

Owns: records, saving, loading. Does not own: drawing (`viz/`), other formats (`perfetto.py`).
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorial_engine.scheduler import Scheduler, SchedulerOutput

FORMAT_VERSION = 2
Names = Mapping[str, str] | Sequence[str] | None
MAX_FREE = 64  # so many of the free blocks are recorded, the next one to be reused first


@dataclass
class StepRecord:
    """State of the engine after one step. Requests go by their public ids; child i of a prompt is "i_<id>".

    Attributes:
        step: 0, 1, 2 ...
        started, time: seconds since recording began, when the step was planned and when it ended.
        budget, budget_left: tokens this step could compute, and those it did not use.
        arrived: request -> [when it came (seconds since recording began), tokens of its prompt], for those that no
            earlier record names.
        scheduled: request -> [first token computed, number of tokens].
        cached: request -> tokens found in the prefix cache, for those admitted in this step.
        sampled: request -> new token ids.
        preempted: requests that lost their blocks in this step. finished: request -> finish reason.
        running, waiting: after the step; a waiting request maps to its reason, "" behind the first in line.
        tables: request -> its physical blocks, as they were while the model ran.
        lengths: request -> tokens whose K and V are in those blocks.
        num_free: free blocks after the step. free: the first 64 of them, the next one to be reused first.
        hashed, unhashed: blocks that since the last record became findable by their content, and that ceased to be.
    """

    step: int
    time: float
    budget: int
    budget_left: int
    started: float = 0.0
    arrived: dict[str, list[float]] = field(default_factory=dict)
    scheduled: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    num_free: int = 0
    free: list[int] = field(default_factory=list)
    hashed: list[int] = field(default_factory=list)
    unhashed: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.budget - self.budget_left

    @property
    def blocks_held(self) -> int:
        """Blocks that somebody held while the model ran. A block that several share counts once."""
        return len({block for table in self.tables.values() for block in table})

    @property
    def seconds(self) -> float:
        """How long the step took, planning included."""
        return self.time - self.started


class Trace:
    """Records the steps of an engine: ``with Trace(llm) as trace: llm.generate(...)``.

    Args:
        llm: an LLM, LLMEngine or AsyncLLM; None for a trace that is loaded from a file.
        clock: returns seconds; a simulation brings its own, which its requests' `arrival_time` must follow.
        names: what pictures call the requests, see `named`.

    Raises:
        TypeError: something else than an engine, or than names.

    Attributes:
        records: one per step. num_blocks, block_size: of the pool. names: as given.
    """

    def __init__(self, llm: Any = None, clock: Callable[[], float] | None = None, names: Names = None) -> None:
        self.records: list[StepRecord] = []
        self.names = _checked(names)
        self.num_blocks = self.block_size = 0
        self._clock = clock or time.monotonic
        self._began = self._clock()
        self._began_on_the_wall = self._began if clock else time.time()
        self._seen: set[str] = set()  # internal ids
        self._hashed: set[int] = set()
        self._engine = getattr(llm, "llm_engine", llm)
        if self._engine is not None:
            if not hasattr(self._engine, "listeners"):
                raise TypeError(f"Trace records an LLM, LLMEngine or AsyncLLM, got {type(llm).__name__}.")
            self.num_blocks = self._engine.num_gpu_blocks
            self.block_size = self._engine.config.block_size

    def __enter__(self) -> Trace:
        if self._engine is None:
            raise ValueError("This trace belongs to no engine, so there is nothing to record: use Trace(llm).")
        self._engine.listeners.append(self.record)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        # An engine that this listener broke has dropped it already, and said so in its log.
        if self.record in self._engine.listeners:
            self._engine.listeners.remove(self.record)

    def record(self, scheduler: Scheduler, plan: SchedulerOutput, tables: dict[str, list[int]],
               kept: dict[str, list[int]]) -> None:
        """Append the record of one step. The engine calls this.

        Args:
            plan: of the step. tables: internal id -> blocks, as they were while the model ran.
            kept: internal id -> tokens sampled in this step.
        """
        pool = scheduler.kv_cache_manager.block_pool
        scheduled = plan.scheduled.values()
        hashed = set(itertools.chain.from_iterable(pool.cached_block_hash_to_block.values()))
        self.records.append(StepRecord(
            step=self.records[-1].step + 1 if self.records else 0, started=round(plan.time - self._began, 6),
            time=round(self._clock() - self._began, 6),
            budget=scheduler.config.max_num_batched_tokens, budget_left=plan.budget_left,
            arrived=self._newcomers(scheduler, plan),
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
            num_free=pool.get_num_free_blocks(),
            free=[b.block_id for b in itertools.islice(pool.free_block_queue, MAX_FREE)],
            hashed=sorted(hashed - self._hashed), unhashed=sorted(self._hashed - hashed)))
        self._hashed = hashed

    def _newcomers(self, scheduler: Scheduler, plan: SchedulerOutput) -> dict[str, list[float]]:
        known = itertools.chain((s.request for s in plan.scheduled.values()), scheduler.requests.values())
        new = {r.request_id: r for r in known if r.request_id not in self._seen}
        self._seen.update(new)
        return {public_id(i): [round(r.arrival_time - self._began_on_the_wall, 6), r.num_prompt_tokens]
                for i, r in new.items()}

    def forget(self, keep: int) -> None:
        """Drop all records but the last `keep`. What the others say about the present, the first one kept says from
        here on: blocks that can be found, lengths and arrivals of the requests that it names."""
        dropped, records = self.records[:-keep], self.records[-keep:]
        if dropped:
            first = records[0]
            present = {*first.scheduled, *first.running, *first.waiting, *first.tables, *first.finished}
            hashed: set[int] = set()
            lengths: dict[str, int] = {}
            arrived: dict[str, list[float]] = {}
            for record in [*dropped, first]:
                hashed = (hashed | set(record.hashed)) - set(record.unhashed)
                lengths |= record.lengths
                arrived |= record.arrived
            records[0] = dataclasses.replace(
                first, hashed=sorted(hashed), unhashed=[], lengths={i: n for i, n in lengths.items() if i in present},
                arrived={i: when for i, when in arrived.items() if i in present})
            unfinished = {*records[-1].running, *records[-1].waiting}
            self._seen = {i for i in self._seen if public_id(i) in unfinished}
        self.records = records

    def named(self, names: Names = None) -> Trace:
        """This trace with names in place of ids. Every picture is drawn from it; the records here keep their ids.

        Ids that an LLM gave, "33", "34", "35", count all requests it ever had. In a picture they count from 0, as the
        prompts of a call do. So do all ids that are consecutive whole numbers; any others stay as they are.

        Args:
            names: ``{"33": "Ada"}``, or a list in order of arrival; None: `self.names`. Requests without a name are
                called as if there were no names at all; names without a request are not used. Answer i of the request
                that is called Ada is "i_Ada".

        Raises:
            TypeError: neither a mapping nor a list of strings.
            ValueError: two requests would have the same name.
        """
        names = self.names if names is None else _checked(names)
        records = self.records[:]  # an engine may append meanwhile, from another thread
        requests = list(dict.fromkeys(i for r in records for i in [*r.arrived, *r.scheduled, *r.running, *r.waiting,
                                                                   *r.tables]))
        given = names if isinstance(names, Mapping) else dict(zip(requests, names or ()))
        called = _count_from_zero(requests)
        for request in requests:
            child = _CHILD.fullmatch(request)
            if request in given:
                called[request] = given[request]
            elif child and child["parent"] in given:
                called[request] = f"{child['number']}_{given[child['parent']]}"
        if len(set(called.values())) < len(called):
            name, _ = Counter(called.values()).most_common(1)[0]
            raise ValueError(f"Each request needs a name of its own, and more than one would be called {name!r}.")
        if all(request == name for request, name in called.items()):
            return self
        renamed = Trace()
        renamed.num_blocks, renamed.block_size = self.num_blocks, self.block_size
        renamed.records = [_renamed(record, called) for record in records]
        return renamed

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, compressed if the name ends in ".gz". Perfetto's format: see `export_perfetto`."""
        text = json.dumps({"version": FORMAT_VERSION, "num_blocks": self.num_blocks, "block_size": self.block_size,
                           **({"names": self.names} if self.names else {}), "records": _shrink(self.records)},
                          separators=(",", ":"))
        data = text.encode()
        # mtime=0: the same trace gives the same file
        Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace back. Raises ValueError if the file is not one, or of another version."""
        trace = cls()
        try:
            data = Path(path).read_bytes()
            content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            version = content["version"]
            if version == FORMAT_VERSION:
                trace.num_blocks, trace.block_size = int(content["num_blocks"]), int(content["block_size"])
                trace.names = _checked(content.get("names"))
                trace.records = _expand(content["records"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, EOFError, zlib.error,
                gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a trace: Trace.save() did not write it, or it was changed since "
                             f"({type(error).__name__}: {error}).") from error
        if version != FORMAT_VERSION:
            raise ValueError(f"{path} is a trace of version {version}, and this package reads version "
                             f"{FORMAT_VERSION}: record it again.")
        return trace

    def export_perfetto(self, path: str | Path) -> None:
        """Write the trace in the trace-event format: open it at https://ui.perfetto.dev or in chrome://tracing."""
        from tutorial_engine.perfetto import trace_events

        Path(path).write_text(json.dumps(trace_events(self), separators=(",", ":")), encoding="utf-8")

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the model, in all steps together."""
        return sum(record.num_tokens for record in self.records)

    @property
    def seconds(self) -> float:
        """How long all steps took together; what passed between them does not count."""
        return sum(record.seconds for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return (f"Trace({len(self.records):,} steps, {self.tokens_computed:,} tokens computed, "
                f"{self.num_blocks:,} blocks of {self.block_size} tokens)")


def public_id(internal_id: str) -> str:
    """"0-0000002a" -> "0": the user's id without the suffix that makes it unique."""
    return internal_id.rpartition("-")[0] or internal_id


def _checked(names: Names) -> Names:
    if names is None:
        return None
    words = [*names, *names.values()] if isinstance(names, Mapping) else names
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise TypeError(f'names must be {{"33": "Ada"}}, by id, or ["Ada", "Ben"], in order of arrival; got {names!r}.')
    return names


_CHILD = re.compile(r"(?P<number>\d+)_(?P<parent>.+)")  # answer i of a request with n > 1


def _count_from_zero(requests: Iterable[str]) -> dict[str, str]:
    """request -> the number that it has in its call, or its id if the ids are not consecutive numbers."""
    called = {request: request for request in requests}
    parents = {request: child["parent"] if (child := _CHILD.fullmatch(request)) else request for request in called}
    numbers = {int(parent) for parent in parents.values() if parent.isdecimal()}
    if not numbers or not all(parent.isdecimal() for parent in parents.values()) \
            or max(numbers) - min(numbers) >= len(numbers):
        return called
    return {request: request.removesuffix(parents[request]) + str(int(parents[request]) - min(numbers))
            for request in called}


def _renamed(record: StepRecord, called: Mapping[str, str]) -> StepRecord:
    changes: dict[str, Any] = {name: {called.get(i, i): value for i, value in getattr(record, name).items()}
                               for name in _BY_REQUEST}
    changes |= {name: [called.get(i, i) for i in getattr(record, name)] for name in ("preempted", "running")}
    return dataclasses.replace(record, **changes)


# In the file, a table is [blocks that it has in common with the step before, further blocks ...], and what is empty is
# left out: most of a trace is repetition.


def _shrink(records: list[StepRecord]) -> list[dict[str, Any]]:
    small: list[dict[str, Any]] = []
    before: dict[str, list[int]] = {}
    for record in records:
        entry = {name: value for name, value in vars(record).items() if value or name in _REQUIRED}
        if record.tables:
            entry["tables"] = {request: _tail(before.get(request, []), table)
                               for request, table in record.tables.items()}
        before = record.tables
        small.append(entry)
    return small


def _tail(old: list[int], new: list[int]) -> list[int]:
    kept = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    return [kept, *new[kept:]]


def _expand(entries: list[dict[str, Any]]) -> list[StepRecord]:
    """Raises TypeError, ValueError or AttributeError for anything that `_shrink` does not write."""
    records: list[StepRecord] = []
    before: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        record = StepRecord(**entry)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(record, name), kind):
                raise TypeError(f"{name} of step {number} is {getattr(record, name)!r}")
        record.tables = {request: [*before.get(request, [])[:tail[0]], *tail[1:]]
                         for request, tail in record.tables.items()}
        before = record.tables
        records.append(record)
    return records


_REQUIRED = {f.name for f in dataclasses.fields(StepRecord) if f.default is f.default_factory}
_KINDS = {name: (int, float) if kind == "float" else {"int": int, "list": list, "dict": dict}[kind.partition("[")[0]]
          for name, kind in StepRecord.__annotations__.items()}
_BY_REQUEST = [name for name, kind in StepRecord.__annotations__.items() if kind.startswith("dict[str")]
