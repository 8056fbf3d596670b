"""PagedAttention's bookkeeping: where a token's K and V lie, and who may have which block."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tutorial_engine.checks import Answer, Instance, check
from tutorial_engine.trace import StepRecord, Trace
from tutorial_engine.viz import Picture, block_table


def slot_mapping(block_table: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
    """The slot of each position of a request: physical block * block_size + offset inside the block."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


class BlockAllocator:
    """Numbered blocks. `queue`: the free ones, in the order of reuse. `readers`: how many tables name each block."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(num_blocks))
        self.readers = dict.fromkeys(range(num_blocks), 0)

    def allocate(self, n: int) -> list[int] | None:
        """n blocks from the front of the queue; None, and nothing taken, if there are fewer."""
        if n > len(self.queue):
            return None
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            self.readers[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more table names these blocks."""
        for block in blocks:
            self.readers[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One table less names these blocks; whoever nobody names goes to the back of the queue.

        Raises:
            ValueError: a block is free already.
        """
        for block in blocks:
            if self.readers[block] == 0:
                raise ValueError(f"block {block} is free already")
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.queue.append(block)


@check(slot_mapping)
def check_slot_mapping(answer: Answer) -> None:
    """Any free block will do for any request, because this one line of arithmetic finds its tokens again."""
    answer([0], [0, 1, 2], 4).gives(
        [0, 1, 2], "the simplest table: logical block 0 is physical block 0, so position and slot are the same.")
    answer([3], [0, 1, 2], 4).gives(
        [12, 13, 14], "the block table: position 0 lies in physical block 3, after three blocks of 4 slots each.")
    answer([3], [2], 4).gives(
        [14], "a decode step, which has one token. Its position is 2, although it is the first in the list.")
    answer([3, 1], [4, 5], 4).gives(
        [4, 5], "the second logical block: position 4 is its first token, and the table says that it is physical "
                "block 1.")
    answer([7, 2, 5], [9, 3, 0], 4).gives(
        [21, 31, 28], "the order: one slot for each position, in the order asked for.")
    answer([6, 4], [], 16).gives([], "a request that computes nothing in this step.")
    answer([9, 8, 7], [0, 1, 2], 1).gives([9, 8, 7], "blocks of one token: each position is a block of its own.")
    answer([40, 2], [15, 16, 31], 16).gives(
        [655, 32, 47], "blocks of 16 tokens: 15 is the last position of the first block, 16 the first of the second.")


@check(BlockAllocator)
def check_block_allocator(answer: Answer) -> None:
    """No block is lost, none is handed out twice, and shared ones stay as long as somebody reads them."""
    pool = answer.make("pool", 4)
    pool.call("allocate", 2).gives([0, 1], "the front of the queue: it is [0, 1, 2, 3] at the beginning.")
    pool.call("allocate", 3).gives(None, "a request that does not fit: only two blocks are left in the queue.")
    pool.call("allocate", 2).gives([2, 3], "the call that was refused: it must leave the queue as it was.")
    pool.call("allocate", 0).gives([], "a request for no block at all. That is no reason to refuse it.")

    pool = answer.make("pool", 4)
    pool.call("allocate", 2).gives([0, 1], "the front of the queue.")
    pool.call("free", [1]).works()
    pool.call("allocate", 1).gives([2], "the back of the queue: a block that was just freed is reused last, because "
                                        "what is in it may be useful again.")
    pool.call("allocate", 2).gives([3, 1], "the queue after free([1]): it is [2, 3, 1].")

    pool = answer.make("pool", 4)
    pool.call("allocate", 2).gives([0, 1], "the front of the queue.")
    pool.call("share", [0]).works()
    pool.call("free", [0, 1]).works()
    pool.call("allocate", 4).gives(None, "the readers: two tables named block 0, and one of them still does. It must "
                                         "not be handed out.")
    pool.call("allocate", 3).gives([2, 3, 1], "block 1: nobody names it any more, so it is free.")
    pool.call("free", [0]).works()
    pool.call("allocate", 1).gives([0], "block 0: now its last reader has gone.")

    pool = answer.make("pool", 2)
    pool.call("allocate", 1).gives([0], "the front of the queue.")
    pool.call("free", [0]).works()
    pool.call("free", [0]).raises(ValueError, "freeing a block that is free already. If that goes unnoticed, the block "
                                              "is in the queue twice, and two requests write to it.")
    for seed in range(100):
        _random_work(answer, random.Random(seed))


def _random_work(answer: Answer, rng: random.Random) -> None:
    """A few random calls, each compared with the course's allocator."""
    num_blocks = rng.randint(1, 6)
    course, pool = BlockAllocator(num_blocks), answer.make("pool", num_blocks)
    tables: list[list[int]] = []
    look_at = "these calls, line by line, with a pencil: which blocks are in the queue after each, in which order?"
    for _ in range(rng.randint(3, 12)):
        kind = rng.choice(["allocate", "share", "free"])
        if kind == "allocate" or not tables:
            n = rng.randint(0, num_blocks)
            table = course.allocate(n)
            pool.call("allocate", n).gives(table, look_at)
            tables += [table] if table else []
            continue
        table = tables.pop(rng.randrange(len(tables)))
        if kind == "share":
            tables.append(table)
            table = table[:rng.randint(1, len(table))]
            tables.append(table)
        _both(course, pool, kind, table)


def _both(course: BlockAllocator, pool: Instance, kind: str, table: list[int]) -> None:
    getattr(course, kind)(table)
    pool.call(kind, table).works()


def draw(num_blocks: int, block_size: int, tables: Mapping[str, Sequence[int]], lengths: Mapping[str, int]) -> Picture:
    """The pool and the block tables, as the lessons show them.

    Args:
        tables: request -> its physical blocks. lengths: request -> its tokens.
    """
    trace = Trace()
    trace.num_blocks, trace.block_size = num_blocks, block_size
    trace.records = [StepRecord(
        step=0, time=0.0, budget=0, budget_left=0, running=list(tables),
        tables={request: list(table) for request, table in tables.items()}, lengths=dict(lengths))]
    return block_table(trace, step=0)
