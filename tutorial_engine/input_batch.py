"""The input batch: one row for each running request, with what the device needs to know about it from step to step.

                 block_table            knobs, top_k, seed     last_token_ids (on the device only)
    row 0   "c"  [ 7 | 3 | 9 | 0 | ]    0.6 ...                   17
    row 1   (free)
    row 2   "a"  [ 2 | 5 | 0 | 0 | ]    0.0 ...                    8

A request keeps its row while it runs, so a step sends only what changed: a new block here and there, not all tables.

`last_token_ids` is what lets a step begin before the host has seen the tokens of the step before: each step leaves what
it sampled in the rows of its requests, on the device, and the next one takes it from there.

Owns: the rows and who has which. Does not own: who runs (`scheduler.py`), what is done with a row (`model_runner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tutorial_engine.sampler import MASK64, plain_from
from tutorial_engine.scheduler import ScheduledRequest, SchedulerOutput

# In place of an input id: the newest token of that row, which only the device may know yet.
LAST_TOKEN = -1


class InputBatch:
    """Rows of the running requests.

    Args:
        max_num_seqs: most requests at once. max_blocks: columns of a block table.
        device: where `last_token_ids` lives, and `device_block_table` if `use_kernels`.

    Attributes:
        block_table: [max_num_seqs, max_blocks] int64, on the host; rows of absent requests are stale.
        knobs: [3, max_num_seqs] float32: temperature, min_p, top_p. top_k: [max_num_seqs] int64.
        seed: [max_num_seqs] uint64. plain_from: [max_num_seqs] int64, see `sampler.plain_from`.
        padding_row: a row that no request ever has: its block table is the null block, and whoever writes to it does
            no harm.
        last_token_ids: [max_num_seqs + 1] int64 on the device, the newest token of each row.
        device_block_table: [max_num_seqs + 1, max_blocks] int32 on the device, a copy of `block_table`.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, use_kernels: bool = False) -> None:
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.knobs = np.zeros((3, max_num_seqs), dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.plain_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.padding_row = max_num_seqs
        self.device = device
        self.last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.device_block_table: torch.Tensor | None = None
        if use_kernels:
            self.device_block_table = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._row: dict[str, int] = {}
        self._num_blocks = [0] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, out: SchedulerOutput) -> np.ndarray:
        """Apply a step's changes. Returns the rows of the scheduled requests, in batch order."""
        for request_id in out.dropped_req_ids:
            if request_id in self._row:
                self._free_rows.append(self._row.pop(request_id))
        cells: list[int] = []  # of the block table, counted row by row
        blocks: list[int] = []
        max_blocks = self.block_table.shape[1]
        for request_id, s in out.scheduled.items():
            if s.is_first:
                self._add(request_id, s)
            if s.new_block_ids:
                row = self._row[request_id]
                first = row * max_blocks + self._num_blocks[row]
                cells += range(first, first + len(s.new_block_ids))
                blocks += s.new_block_ids
                self._num_blocks[row] += len(s.new_block_ids)
        if cells:
            self._write_blocks(np.array([cells, blocks]))
        return np.array([self._row[request_id] for request_id in out.scheduled], dtype=np.int64)

    def _add(self, request_id: str, s: ScheduledRequest) -> None:
        row = self._row[request_id] = self._free_rows.pop()
        self._num_blocks[row] = 0
        # What lies behind a table's end is read as padding: it must be the null block, not a stranger's.
        self.block_table[row] = 0
        p = s.request.sampling_params
        self.knobs[:, row], self.top_k[row] = (p.temperature, p.min_p, p.top_p), p.top_k
        self.seed[row] = s.request.seed & MASK64
        self.plain_from[row] = plain_from(s.request)

    def _write_blocks(self, cells_and_blocks: np.ndarray) -> None:
        self.block_table.reshape(-1)[cells_and_blocks[0]] = cells_and_blocks[1]
        if self.device_block_table is not None:
            cells, blocks = to_device(cells_and_blocks, self.device)
            self.device_block_table.view(-1).index_copy_(0, cells, blocks.int())


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device. To a GPU through pinned memory: then the copy waits for the GPU, not the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def input_token_ids(steps: Sequence[ScheduledRequest]) -> list[int]:
    """Flat input ids of a step; LAST_TOKEN where a step that is still in flight has sampled the token."""
    ids: list[int] = []
    for s in steps:
        known = s.request.all_token_ids
        if s.start == len(known):
            ids.append(LAST_TOKEN)
        else:
            ids += known[s.start:s.start + s.num_tokens]
    return ids
