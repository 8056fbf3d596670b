"""Whole decode steps as CUDA graphs: one launch instead of several hundred.

    step of n requests, one token each      graph of the next larger size, recorded once
    ids, positions, tables  --copy-->  fixed buffers  --replay-->  all layers, LM head, sampling  -->  ids, fixed too
                                       rows n.. are padding: position 0 of the null block

A GPU finishes a small model's kernel faster than Python can launch the next one (10 to 17 microseconds each), so an
eager step is launch-bound. A graph replays the recorded launches without Python; the price is that shapes and addresses
are frozen. So there is a graph for each of a few sizes, and everything that changes lives in buffers that do not move.

Owns: the buffers, recording, replaying. Does not own: what a step computes (`models/decoder.py`), who runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tutorial_engine.config import EngineConfig
from tutorial_engine.kv_cache import KVCache

if TYPE_CHECKING:
    from tutorial_engine.models.decoder import Decoder


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8, ending exactly at `max_num_seqs`."""
    sizes = [n for n in (1, 2, 4) if n < max_num_seqs]
    return [*sizes, *range(8, max_num_seqs, 8), max_num_seqs]


class DecodeGraphs:
    """Records and replays.

    Args:
        model, kv_cache: whose addresses the graphs remember: neither may be replaced.
        max_blocks: columns of a block table.
    """

    def __init__(self, config: EngineConfig, model: Decoder, kv_cache: KVCache, max_blocks: int) -> None:
        self.model, self.kv_cache = model, kv_cache
        self.block_size = config.block_size
        self.use_dot = torch.cuda.get_device_capability(model.device) >= (8, 0)
        self.sizes = graph_sizes(config.max_num_seqs)
        rows = self.sizes[-1]
        # Pinned, so that a copy to the device does not wait for the host.
        self.host = self._buffers(rows, max_blocks, pin_memory=True)
        self.device = self._buffers(rows, max_blocks, device=model.device)
        # One for all sizes: vocabularies are large.
        self.logits = torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=model.device)
        self.sampled: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._record()

    @staticmethod
    def _buffers(rows: int, max_blocks: int, **where: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(input ids, positions and noise keys [3, rows], temperatures [rows], block tables [rows, max_blocks])."""
        return (torch.zeros(3, rows, dtype=torch.int64, **where), torch.zeros(rows, **where),
                torch.zeros(rows, max_blocks, dtype=torch.int32, **where))

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

        numbers, temperatures, tables = self.device
        ids, positions, keys = numbers[:, :size].unbind(0)
        tables, block_size = tables[:size], self.block_size
        slots = tables.gather(1, positions[:, None] // block_size)[:, 0].long() * block_size + positions % block_size
        lens = (positions + 1).int()
        splits = self._num_splits(size)
        attend = partial(self._attend, fused.decode_attention, tables, lens, splits)
        hidden = self.model.forward_fused(ids, positions, slots, self.kv_cache, attend)
        logits = torch.mm(hidden, self.model.lm_head.weight.t(), out=self.logits[:size])
        return fused.gumbel_sample(logits, temperatures[:size], keys)

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

    def replay(self, input_ids: np.ndarray, positions: np.ndarray, temperatures: np.ndarray, keys: np.ndarray,
               tables: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """One step for n requests.

        Args:
            input_ids, positions, keys: [n] int64. temperatures: [n] float. tables: [n, max_blocks] block ids.

        Returns:
            (logits [n, vocab_size], sampled ids [n] int64), both overwritten by the next step.
        """
        n = len(input_ids)
        size = next(s for s in self.sizes if s >= n)
        numbers, host_temperatures, host_tables = (buffer.numpy() for buffer in self.host)
        numbers[:, :n], numbers[:, n:size] = (input_ids, positions, keys), 0
        host_temperatures[:n], host_tables[:n], host_tables[n:size] = temperatures, tables, 0
        for host, device in zip(self.host, self.device):
            rows = np.s_[:, :size] if host is self.host[0] else np.s_[:size]
            device[rows].copy_(host[rows], non_blocking=True)
        self._graphs[size].replay()
        return self.logits[:n], self.sampled[size][:n]
