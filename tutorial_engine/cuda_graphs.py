"""Whole decode steps as CUDA graphs: one launch instead of several hundred.

    step of n requests, one token each      graph of the next larger size, recorded once
    ids, positions, rows  --copy-->  fixed buffers  --replay-->  all layers, LM head, sampling  -->  ids, fixed too
                                     n.. is padding: position 0 of the null block

A GPU finishes a small model's kernel faster than Python can launch the next one (10 to 17 microseconds each), so an
eager step is launch-bound. A graph replays the recorded launches without Python; the price is that shapes and addresses
are frozen. So there is a graph for each of a few sizes, and everything that changes lives in buffers that do not move.

Owns: the buffers, recording, replaying. Does not own: what a step computes (`models/decoder.py`), who runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tutorial_engine.config import EngineConfig
from tutorial_engine.input_batch import InputBatch
from tutorial_engine.kv_cache import KVCache

if TYPE_CHECKING:
    from tutorial_engine.models.decoder import Decoder


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8, ending exactly at `max_num_seqs`."""
    sizes = [n for n in (1, 2, 4) if n < max_num_seqs]
    return [*sizes, *range(8, max_num_seqs, 8), max_num_seqs]


# In place of an input id: the newest token of that row, which only the device may know yet.
LAST_TOKEN = -1


class DecodeGraphs:
    """Records and replays.

    Args:
        model, kv_cache, input_batch: whose addresses the graphs remember: none may be replaced.
    """

    def __init__(self, config: EngineConfig, model: Decoder, kv_cache: KVCache, input_batch: InputBatch) -> None:
        self.model, self.kv_cache, self.input_batch = model, kv_cache, input_batch
        self.block_size = config.block_size
        self.use_dot = torch.cuda.get_device_capability(model.device) >= (8, 0)
        self.sizes = graph_sizes(config.max_num_seqs)
        rows = self.sizes[-1]
        self.numbers = torch.zeros(4 * rows, dtype=torch.int64, device=model.device)
        self.temperatures = torch.zeros(rows, device=model.device)
        # Pinned, so that a copy to the device does not wait for the host; and two of each, because the device may read
        # those of one step while the host writes those of the next.
        self._host = deque((torch.zeros(4 * rows, dtype=torch.int64, pin_memory=True),
                            torch.zeros(rows, pin_memory=True)) for _ in range(2))
        # One for all sizes: vocabularies are large.
        self.logits = torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=model.device)
        self.sampled: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._record()

    @torch.inference_mode()
    def _record(self) -> None:
        pool, stream = None, torch.cuda.Stream()  # one stream: cuBLAS keeps 32 MiB of workspace for each
        for size in reversed(self.sizes):  # the largest first: the smaller ones fit into its memory
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)  # compiles the kernels, which a recording must not do
            torch.cuda.current_stream().wait_stream(stream)
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.sampled[size] = self._step(size)
            pool = pool or graph.pool()

    def _step(self, size: int) -> torch.Tensor:
        """What is recorded: fills `logits[:size]` and returns the token ids, [size]."""
        from tutorial_engine.kernels import fused

        ids, positions, keys, rows = self.numbers[:4 * size].view(4, size).unbind(0)
        last_token_ids, block_size = self.input_batch.last_token_ids, self.block_size
        ids = torch.where(ids == LAST_TOKEN, last_token_ids[rows], ids)
        tables = self.input_batch.device_block_table[rows]
        slots = tables.gather(1, positions[:, None] // block_size)[:, 0].long() * block_size + positions % block_size
        attend = partial(self._attend, fused.decode_attention, tables, (positions + 1).int(), self._num_splits(size))
        hidden = self.model.forward_fused(ids, positions, slots, self.kv_cache, attend)
        logits = torch.mm(hidden, self.model.lm_head.weight.t(), out=self.logits[:size])
        sampled = fused.gumbel_sample(logits, self.temperatures[:size], keys)
        last_token_ids[rows] = sampled
        return sampled

    def _attend(self, kernel: Callable[..., torch.Tensor], tables: torch.Tensor, lens: torch.Tensor, splits: int,
                query: torch.Tensor, layer: int) -> torch.Tensor:
        return kernel(query, self.kv_cache.key[layer], self.kv_cache.value[layer], tables, lens, splits, self.use_dot)

    def _num_splits(self, size: int) -> int:
        """Enough programs to fill the GPU twice, but no more than 32 parts."""
        wanted = 2 * torch.cuda.get_device_properties(self.model.device).multi_processor_count
        splits = 1
        while splits < 32 and size * self.kv_cache.num_kv_heads * splits * 2 <= wanted:
            splits *= 2
        return splits

    def replay(self, input_ids: np.ndarray, positions: np.ndarray, keys: np.ndarray, rows: np.ndarray,
               temperatures: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """One step for n requests.

        Args:
            input_ids, positions, keys, rows: [n] int64, an id may be LAST_TOKEN; rows of the input batch.
            temperatures: [n] float32.

        Returns:
            (logits [n, vocab_size], sampled ids [n] int64), both overwritten by the next step.
        """
        n = len(input_ids)
        size = next(s for s in self.sizes if s >= n)
        self._host.rotate()
        numbers, host_temperatures = self._host[0]
        table = numbers[:4 * size].view(4, size).numpy()
        table[:, :n] = input_ids, positions, keys, rows
        table[:3, n:], table[3, n:] = 0, self.input_batch.padding_row
        host_temperatures[:n] = torch.from_numpy(temperatures)
        self.numbers[:4 * size].copy_(numbers[:4 * size], non_blocking=True)
        self.temperatures[:size].copy_(host_temperatures[:size], non_blocking=True)
        self._graphs[size].replay()
        return self.logits[:n], self.sampled[size][:n]
