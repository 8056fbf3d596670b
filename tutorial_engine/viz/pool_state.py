"""What a trace says about every block of the pool at one step.

A record says what changed in its step: how long the requests are that it computed, which blocks became findable. This
module adds that up, from the first record to the one that is asked for.

Owns: the state, and the words for it. Does not own: drawing (`block_table.py`, `memory_map.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tutorial_engine.trace import Trace
from tutorial_engine.viz.axis import num_steps_up_to


@dataclass(frozen=True)
class PoolState:
    """The pool at one step.

    Attributes:
        requests: every request that the trace gives a table, in order of appearance; its place decides its colour.
        tables: request -> its physical blocks while the model ran. lengths: request -> tokens in them.
        owners: physical block -> the requests whose tables name it. filled: physical block -> tokens in it.
        hashed: blocks that can be found by their content. free: first free blocks after the step, in the order in
            which they will be reused; num_free: how many there are in all.
        waiting: request -> reason, after the step.
    """

    step: int
    num_blocks: int
    block_size: int
    requests: list[str]
    tables: dict[str, list[int]]
    lengths: dict[str, int]
    owners: dict[int, list[str]]
    filled: dict[int, int]
    hashed: frozenset[int]
    free: list[int]
    num_free: int
    waiting: dict[str, str]

    @property
    def num_shared(self) -> int:
        return sum(len(requests) > 1 for requests in self.owners.values())

    @property
    def slots(self) -> int:
        """Tokens that the blocks in use have room for."""
        return len(self.owners) * self.block_size

    @property
    def tokens(self) -> int:
        """Tokens that they hold; what is shared counts once."""
        return sum(self.filled.values())

    @property
    def title(self) -> str:
        return (f"Step {self.step}: {len(self.owners):,} block{'s' * (len(self.owners) != 1)} in use "
                f"({self.num_shared} shared), {self.num_blocks - 1 - len(self.owners):,} free")


def pool_state(trace: Trace, step: int) -> PoolState:
    """Look one step up; it may be negative. Raises ValueError if the trace has no such step."""
    return next(pool_states(trace, [num_steps_up_to(trace, step) - 1]))


def pool_states(trace: Trace, steps: Iterable[int]) -> Iterator[PoolState]:
    """The states at several steps, which must ascend."""
    records = trace.records[:]  # an engine may append meanwhile, from another thread
    order = dict.fromkeys(request for record in records for request in record.tables)
    known: dict[str, int] = {}
    hashed: set[int] = set()
    position = 0
    for step in steps:
        for record in records[position:step + 1]:
            known |= record.lengths
            hashed = (hashed | set(record.hashed)) - set(record.unhashed)
        position = step + 1
        record, size = records[step], trace.block_size
        # A request that this step did not compute is as long as it last was.
        tables = {request: record.tables[request] for request in order if request in record.tables}
        lengths = {request: known.get(request, len(table) * size) for request, table in tables.items()}
        owners: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        for request, table in tables.items():
            for i, block in enumerate(table):
                owners.setdefault(block, []).append(request)
                filled[block] = max(filled.get(block, 0), min(max(lengths[request] - i * size, 0), size))
        yield PoolState(record.step, trace.num_blocks, size, list(order), tables, lengths, owners, filled,
                        frozenset(hashed), record.free, record.num_free, record.waiting)
