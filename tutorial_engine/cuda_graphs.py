"""Steps as CUDA graphs: one launch instead of several hundred.

    a step of n requests or tokens          graph of the next larger size, recorded once
    ids, positions, ...  --copy-->  fixed buffers  --replay-->  all layers, LM head, sampling  -->  ids, fixed too
                                    n.. is padding: position 0 of the null block

A GPU finishes a small model's kernel faster than Python can launch the next one (10 to 40 microseconds each), so an
eager step is launch-bound. A graph replays the recorded launches without Python; the price is that shapes and addresses
are frozen. So there is a graph for each of some sizes, and everything that changes lives in buffers that do not move.

Two kinds: where everyone decodes, the whole step is one graph, by number of requests. Where prompts take part, the
layers are one, by number of tokens; what is sampled from their hidden states differs too much.

Owns: the buffers, recording, replaying. Does not own: what a step computes (`models/decoder.py`), who runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tutorial_engine.config import EngineConfig
from tutorial_engine.input_batch import LAST_TOKEN, InputBatch
from tutorial_engine.kv_cache import KVCache
from tutorial_engine.sampler import noise_keys

if TYPE_CHECKING:
    from tutorial_engine.models.decoder import Decoder


_RECORDED: weakref.WeakSet[StepGraphs] = weakref.WeakSet()  # all that live


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests: 1, 2, 4, then multiples of 8, ending exactly at `max_num_seqs`."""
    sizes = [n for n in (1, 2, 4) if n < max_num_seqs]
    return [*sizes, *range(8, max_num_seqs, 8), max_num_seqs]


def forward_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens: multiples of 16, then eight to an octave, so that at most an eighth is padding, or 15 tokens;
    ending exactly at `max_num_batched_tokens`."""
    sizes, size = [], 16
    while size < max_num_batched_tokens:
        sizes.append(size)
        size += max(16, 1 << (size.bit_length() - 4))
    return [*sizes, max_num_batched_tokens]


class FixedBuffer:
    """A buffer that graphs read, and the way into it: through pinned memory, so that the copy waits for the GPU and not
    the host; through two in turn, because the GPU may still copy what belongs to the step before. An event after each
    copy says when its memory may be written again."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(num_elements, dtype=dtype, device=device)
        on_gpu = device.type == "cuda"
        self._host = deque((torch.zeros(num_elements, dtype=dtype, pin_memory=on_gpu),
                            torch.cuda.Event() if on_gpu else None) for _ in range(2))

    def fill(self, columns: np.ndarray | Sequence[np.ndarray], size: int, padding: Sequence[int]) -> None:
        """Write [k, n] numbers as the [k, size] that `view` shows. padding: for columns n.., a number per row."""
        self._host.rotate()
        host, copied = self._host[0]
        if copied is not None:
            copied.synchronize()
        k, n = len(padding), len(columns[0])
        table = host[:k * size].view(k, size).numpy()
        table[:, :n] = columns
        table[:, n:] = np.array(padding)[:, None]
        self.device[:k * size].copy_(host[:k * size], non_blocking=True)
        if copied is not None:
            copied.record()

    def view(self, k: int, size: int) -> torch.Tensor:
        """[k, size] on the device."""
        return self.device[:k * size].view(k, size)


def graph_bytes(config: EngineConfig, model: Decoder, input_batch: InputBatch, tensor_cores: bool) -> int:
    """Device memory that all graphs will take: measured on the largest ones, which the others share their memory with,
    and on the next, for what each one more costs."""
    cache = KVCache(model.config, 2, config.block_size, model.dtype, model.device)
    taken = []
    for count in (1, 1, 2):  # the first time compiles and loads what stays loaded
        before = torch.cuda.mem_get_info()[0]
        graphs = StepGraphs(config, model, cache, input_batch, tensor_cores, only_largest=count)
        torch.cuda.synchronize()
        taken.append(before - torch.cuda.mem_get_info()[0])
        kinds = bool(graphs.decode_sizes) + bool(graphs.forward_sizes)
        del graphs
        empty_device_cache()
    total = len(decode_sizes(config.max_num_seqs)) + tensor_cores * len(forward_sizes(config.max_num_batched_tokens))
    return taken[1] + max(0, taken[2] - taken[1]) // kinds * (total - kinds)


def empty_device_cache() -> None:
    """Give memory that torch holds in reserve back to the GPU."""
    # cuBLAS keeps 32 MiB for each stream that a graph was recorded on, and graphs remember where they are: as long as
    # another engine of this process has some, they stay.
    if not _RECORDED:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


class StepGraphs:
    """Records and replays.

    Args:
        model, kv_cache, input_batch: whose addresses the graphs remember: none may be replaced.
        tensor_cores: there are some (compute capability 8.0): attention uses them, and has a kernel for prompts.
        only_largest: record only so many graphs of each kind; None for all.
    """

    def __init__(self, config: EngineConfig, model: Decoder, kv_cache: KVCache, input_batch: InputBatch,
                 tensor_cores: bool, only_largest: int | None = None) -> None:
        self.model, self.kv_cache, self.input_batch = model, kv_cache, input_batch
        self.block_size, self.max_num_seqs = config.block_size, config.max_num_seqs
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads
        self.tensor_cores = tensor_cores
        self.decode_sizes = decode_sizes(config.max_num_seqs)[-(only_largest or 0):]
        self.forward_sizes = (
            forward_sizes(config.max_num_batched_tokens)[-(only_largest or 0):] if tensor_cores else [])
        most = max(self.decode_sizes[-1], *self.forward_sizes, 0)
        # ids, rows, positions, noise keys and top_k of a decoding step; ids, rows, positions and slots of another.
        self.numbers = FixedBuffer(5 * most, torch.int64, model.device)
        self.knobs = FixedBuffer(3 * self.decode_sizes[-1], torch.float32, model.device)
        self.tiles = FixedBuffer(4 * self._num_tiles(most), torch.int32, model.device)
        # One for all sizes: vocabularies are large.
        self.logits = torch.empty(self.decode_sizes[-1], model.config.vocab_size, dtype=model.dtype,
                                  device=model.device)
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        _RECORDED.add(self)
        self._record()

    def _num_tiles(self, num_tokens: int) -> int:
        from tutorial_engine.kernels import fused

        return fused.max_tiles(num_tokens, self.max_num_seqs, self.group)

    @torch.inference_mode()
    def _record(self) -> None:
        pool, stream = None, torch.cuda.Stream()  # one stream: cuBLAS keeps 32 MiB of workspace for each
        kinds = [("forward", self._forward, self.forward_sizes), ("decode", self._decode, self.decode_sizes)]
        for kind, step, sizes in kinds:
            for size in reversed(sizes):  # the largest first: the smaller ones fit into its memory
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step(size)  # compiles the kernels, which a recording must not do
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._graphs[kind, size] = graph, step(size)
                pool = pool or graph.pool()

    def _decode(self, size: int) -> torch.Tensor:
        """What is recorded for `size` requests: fills `logits[:size]` and returns the token ids, [size]."""
        from tutorial_engine.kernels import fused

        ids, rows, positions, keys, top_k = self.numbers.view(5, size)
        temperature, min_p, top_p = self.knobs.view(3, size)
        tables, block_size = self.input_batch.device_block_table[rows], self.block_size
        slots = tables.gather(1, positions[:, None] // block_size)[:, 0].long() * block_size + positions % block_size
        seq_lens, splits = (positions + 1).int(), self._num_splits(size)

        def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
            return fused.decode_attention(query, self.kv_cache.key[layer], self.kv_cache.value[layer], tables,
                                          seq_lens, splits, self.tensor_cores)

        hidden = self._run_layers(ids, rows, positions, slots, attend)
        logits = torch.mm(hidden, self.model.lm_head.weight.t(), out=self.logits[:size])
        sampled = fused.top_k_top_p_sample(logits, temperature, min_p, top_k, top_p, keys)
        self.input_batch.last_token_ids[rows] = sampled
        return sampled

    def _forward(self, size: int) -> torch.Tensor:
        """What is recorded for `size` tokens: returns the hidden states, [size, hidden_size]."""
        from tutorial_engine.kernels import fused

        ids, rows, positions, slots = self.numbers.view(4, size)
        tiles = self.tiles.view(4, self._num_tiles(size))

        def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
            return fused.prefill_attention(query, self.kv_cache.key[layer], self.kv_cache.value[layer],
                                           self.input_batch.device_block_table, tiles)

        return self._run_layers(ids, rows, positions, slots, attend)

    def _run_layers(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                    attend: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        ids = torch.where(ids == LAST_TOKEN, self.input_batch.last_token_ids[rows], ids)
        return self.model.forward_fused(ids, positions, slots, self.kv_cache, attend)

    def _num_splits(self, size: int) -> int:
        """Enough programs to keep the memory busy, which is six on each multiprocessor for heads of 64 numbers and half
        as many for heads of 128 (measured); but no more than 16 parts."""
        processors = torch.cuda.get_device_properties(self.model.device).multi_processor_count
        wanted = processors * 6 * 64 // self.model.config.head_dim
        splits = 1
        while splits < 16 and size * self.kv_cache.num_kv_heads * splits * 2 <= wanted:
            splits *= 2
        return splits

    def _replay(self, kind: str, size: int) -> torch.Tensor:
        graph, out = self._graphs[kind, size]
        graph.replay()
        return out

    def decode(self, input_ids: Sequence[int], rows: np.ndarray, positions: np.ndarray
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of n requests, one token each.

        Args:
            input_ids: [n], may be LAST_TOKEN. rows: [n], of the input batch. positions: [n], of the input tokens.

        Returns:
            (logits [n, vocab_size], sampled ids [n] int64), both overwritten by the next step.
        """
        n, batch = len(rows), self.input_batch
        size = next(s for s in self.decode_sizes if s >= n)
        keys = noise_keys(batch.seed[rows], positions + 1)
        self.numbers.fill([np.asarray(input_ids), rows, positions, keys, batch.top_k[rows]], size,
                          (0, batch.padding_row, 0, 0, 0))
        self.knobs.fill(batch.knobs[:, rows], size, (0, 0, 1))
        return self.logits[:n], self._replay("decode", size)[:n]

    def forward(self, numbers: np.ndarray, batch_rows: np.ndarray, query_start_loc: np.ndarray, seq_lens: np.ndarray
                ) -> torch.Tensor:
        """The layers, for n tokens of R requests.

        Args:
            numbers: [4, n]: input ids, which may be LAST_TOKEN, each token's row of the input batch, positions, slots.
            batch_rows: [R], rows of the input batch. query_start_loc, seq_lens: see `RaggedBatch`.

        Returns:
            Hidden states after the last norm, [n, hidden_size], overwritten by the next step.
        """
        from tutorial_engine.kernels import fused

        n = numbers.shape[1]
        size = next(s for s in self.forward_sizes if s >= n)
        self.numbers.fill(numbers, size, (0, self.input_batch.padding_row, 0, 0))
        tiles = fused.cut_tiles(query_start_loc, seq_lens, self.group)
        tiles[0] = batch_rows[tiles[0]]
        self.tiles.fill(tiles, self._num_tiles(size), (0, 0, 0, 0))
        return self._replay("forward", size)[:n]
