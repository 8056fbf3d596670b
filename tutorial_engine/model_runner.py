"""The model runner: turns a plan (`SchedulerOutput`) into tensors, runs the model once, samples once.

    scheduled    a: tokens 0..5 (prefill)     b: token 89 (decode)     c: tokens 16..31 (chunk)
    input_ids    [ a a a a a a | b | c ... c ]        one flat batch, no padding
    positions    [ 0 1 2 3 4 5 | 89| 16 .. 31]
    slot_mapping [ table of a  | .. | table of c ]    block * block_size + offset
    logits rows  [           x | x |         x ]      only where a request reaches its last known token

Owns: weights, cache tensors, the rows of the batch, everything with a device in it. Does not own: who runs, what stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import torch

from tutorial_engine.attention import AttentionMetadata
from tutorial_engine.block_manager import cdiv
from tutorial_engine.config import EngineConfig
from tutorial_engine.cuda_graphs import DecodeGraphs
from tutorial_engine.kv_cache import KVCache, available_kv_cache_bytes, size_kv_cache
from tutorial_engine.logits_processor import make_processors
from tutorial_engine.models.decoder import Decoder
from tutorial_engine.models.loader import ModelSource
from tutorial_engine.sampler import LogprobsLists, Sampler, SamplingMetadata, needs_only_temperature, noise_key
from tutorial_engine.scheduler import ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass
class ModelRunnerOutput:
    """What a step produced.

    Attributes:
        sampled_token_ids: request id -> new tokens; only requests that reached their last known token.
        logprobs: request id -> (row, LogprobsLists) for the new token, if any request of the step asked.
        prompt_logprobs: request id -> logprobs of the prompt tokens that this step's chunk predicts.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: LogprobsLists | None = None
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)


@dataclass
class RaggedBatch:
    """A step's inputs.

    Attributes:
        input_ids, positions, slot_mapping: [num_tokens] int64, on the device.
        query_start_loc: [R + 1] int64, first token of each request. seq_lens: [R] int64, context of each request, this
            step's tokens included. block_table: [R, max_blocks] int64. On the host.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray


class BlockTables:
    """Block tables of the requests in the batch as one array, a row per request.

    Attributes:
        table: [max_num_seqs, max_blocks_per_request] int64; rows of absent requests are stale.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._row: dict[str, int] = {}
        self._length: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, out: SchedulerOutput) -> np.ndarray:
        """Apply a step's changes. Returns the rows of the scheduled requests, in batch order."""
        for request_id in out.dropped_req_ids:
            if request_id in self._row:
                self._free_rows.append(self._row.pop(request_id))
        for request_id, s in out.scheduled.items():
            if s.is_first:
                self._row[request_id] = self._free_rows.pop()
                self._length[request_id] = 0
                # What lies behind a table's end is read as padding: it must be the null block, not a stranger's.
                self.table[self._row[request_id]] = 0
            begin = self._length[request_id]
            end = self._length[request_id] = begin + len(s.new_block_ids)
            self.table[self._row[request_id], begin:end] = s.new_block_ids
        return np.array([self._row[request_id] for request_id in out.scheduled], dtype=np.int64)


def load_model(config: EngineConfig, source: ModelSource) -> Decoder:
    """Build the model and fill in its weights."""
    model = Decoder(source.config, config.max_model_len, getattr(torch, config.dtype), torch.device(config.device))
    model.load_weights(source.weights())
    return model


class ModelRunner:
    """Holds the model and the cache, and executes steps.

    Args:
        config: what to run with.
        load: builds the model, weights included; called again if they were dropped for good, see `release_weights`.

    Attributes:
        num_gpu_blocks: blocks in the cache, the null block included.
        max_model_len: the config's, or what fits if the user asked for "auto".
    """

    def __init__(self, config: EngineConfig, load: Callable[[], Decoder]) -> None:
        self.config = config
        self._load = load
        self.model: Decoder | None = load()
        self.device, self.dtype = self.model.device, self.model.dtype
        self.sampler = Sampler(config.args.logprobs_mode, make_processors(config, self.device))
        available = available_kv_cache_bytes(config, self.device, self._activation_bytes())
        self.num_gpu_blocks, self.max_model_len = size_kv_cache(config, self.model.config, self.dtype, available)
        self._model_config = self.model.config
        self.kv_cache: KVCache | None = None
        self.graphs: DecodeGraphs | None = None
        self.use_kernels = self._can_use_kernels()
        self.use_prefill_kernel = self.use_kernels and torch.cuda.get_device_capability() >= (8, 0)
        self.block_tables = BlockTables(config.max_num_seqs, cdiv(self.max_model_len, config.block_size))
        self.restore_kv_cache()

    def _activation_bytes(self) -> int:
        """Upper estimate of one step's temporaries: the MLP of a full budget, and logits of all seats in float32."""
        c = self.model.config
        per_token = (2 * c.hidden_size + 4 * c.intermediate_size) * self.dtype.itemsize
        return self.config.max_num_batched_tokens * per_token + 3 * self.config.max_num_seqs * c.vocab_size * 4

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. `out` must schedule at least one token."""
        steps = list(out.scheduled.values())
        if self.graphs is not None and all(s.num_tokens == 1 and s.samples for s in steps):
            return self._decode(self.graphs, out, steps)
        batch = self._prepare_inputs(out, steps)
        hidden = self._forward(batch)
        result = ModelRunnerOutput()
        last_rows = batch.query_start_loc[1:] - 1
        self._compute_prompt_logprobs(result, steps, hidden, batch.query_start_loc)
        sampling = [i for i, s in enumerate(steps) if s.samples]
        if sampling:
            requests = [steps[i].request for i in sampling]
            logits = self.model.compute_logits(hidden[torch.from_numpy(last_rows[sampling]).to(self.device)])
            token_ids, result.logprobs = self.sampler(
                logits, SamplingMetadata(requests, logits.shape[1], self.device))
            result.sampled_token_ids = {r.request_id: [t] for r, t in zip(requests, token_ids)}
        return result

    def _decode(self, graphs: DecodeGraphs, out: SchedulerOutput, steps: list[ScheduledRequest]) -> ModelRunnerOutput:
        """A step in which everyone computes one token and samples, by CUDA graph."""
        tables = self.block_tables.table[self.block_tables.update(out)]
        self._clear_tails(steps)
        requests = [s.request for s in steps]
        logits, sampled = graphs.replay(
            np.array([r.all_token_ids[-1] for r in requests]), np.array([s.start for s in steps]),
            np.array([r.sampling_params.temperature for r in requests]),
            np.array([noise_key(r.seed, r.num_tokens) for r in requests]), tables)
        logprobs = None
        if all(needs_only_temperature(r) for r in requests) and not self.sampler.processors:
            token_ids = sampled.tolist()
        else:
            token_ids, logprobs = self.sampler(
                logits.float(), SamplingMetadata(requests, logits.shape[1], self.device))
        return ModelRunnerOutput({r.request_id: [t] for r, t in zip(requests, token_ids)}, logprobs)

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of a step, [num_tokens, hidden_size]."""
        if not self.use_prefill_kernel:
            metadata = AttentionMetadata.build(batch.query_start_loc, batch.seq_lens, batch.block_table,
                                               batch.slot_mapping, self.kv_cache)
            return self.model(batch.input_ids, batch.positions, self.kv_cache, metadata)
        from tutorial_engine.kernels import fused

        group = self._model_config.num_attention_heads // self._model_config.num_key_value_heads
        tiles = self._to_device(fused.cut_tiles(batch.query_start_loc, batch.seq_lens, group))
        longest = cdiv(int(batch.seq_lens.max()), self.config.block_size)
        tables = self._to_device(batch.block_table[:, :longest].astype(np.int32))

        def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
            return fused.prefill_attention(query, self.kv_cache.key[layer], self.kv_cache.value[layer], tables, tiles)

        return self.model.forward_fused(batch.input_ids, batch.positions, batch.slot_mapping, self.kv_cache, attend)

    def _prepare_inputs(self, out: SchedulerOutput, steps: list[ScheduledRequest]) -> RaggedBatch:
        rows = self.block_tables.update(out)
        self._clear_tails(steps)
        num_tokens = np.array([s.num_tokens for s in steps], dtype=np.int64)
        start = np.array([s.start for s in steps], dtype=np.int64)
        query_start_loc = np.concatenate([[0], num_tokens.cumsum()])
        # Position of flat token j of request r: start[r] + (j - query_start_loc[r]).
        request = np.repeat(np.arange(len(steps)), num_tokens)
        positions = np.arange(query_start_loc[-1]) + (start - query_start_loc[:-1])[request]
        input_ids: list[int] = []
        for s in steps:
            input_ids += s.request.all_token_ids[s.start:s.start + s.num_tokens]
        block_size = self.config.block_size
        blocks = self.block_tables.table[rows[request], positions // block_size]
        return RaggedBatch(
            self._to_device(np.array(input_ids)), self._to_device(positions),
            self._to_device(blocks * block_size + positions % block_size), query_start_loc, start + num_tokens,
            self.block_tables.table[rows])

    def _clear_tails(self, steps: list[ScheduledRequest]) -> None:
        """Zero the new blocks that this step does not fill. Attention reads whole blocks and gives the slots behind a
        context the weight 0; but 0 * NaN is NaN, so what an overflow left there would poison the block's next owner."""
        tails = [s.new_block_ids[-1] for s in steps
                 if s.new_block_ids and (s.start + s.num_tokens) % self.config.block_size]
        if tails:
            self.kv_cache.clear(self._to_device(np.array(tails)))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _compute_prompt_logprobs(self, result: ModelRunnerOutput, steps: list[ScheduledRequest], hidden: torch.Tensor,
                                 query_start_loc: np.ndarray) -> None:
        """Row i of a chunk predicts prompt token start + i + 1; the last prompt token predicts output, not prompt."""
        for i, s in enumerate(steps):
            request = s.request
            if request.sampling_params.prompt_logprobs is None:
                continue
            num_rows = min(s.num_tokens, request.num_prompt_tokens - 1 - s.start)
            if num_rows <= 0:
                continue
            first = int(query_start_loc[i])
            logits = self.model.compute_logits(hidden[first:first + num_rows])
            targets = torch.tensor(request.all_token_ids[s.start + 1:s.start + 1 + num_rows], device=self.device)
            asked = [request.sampling_params.prompt_logprobs] * num_rows
            result.prompt_logprobs[request.request_id] = self.sampler.gather_logprobs(
                logits, targets, asked, is_prompt=True)

    def release_kv_cache(self) -> None:
        """Give the cache's memory back; what it held is lost."""
        self.kv_cache = self.graphs = None
        self._empty_device_cache()

    def restore_kv_cache(self) -> None:
        """An empty cache of the same size."""
        self.kv_cache = KVCache(self._model_config, self.num_gpu_blocks, self.config.block_size, self.dtype,
                                self.device)
        self._record_graphs()

    def release_weights(self, keep_copy: bool) -> None:
        """Give the weights' memory back: move them to the CPU's memory, or drop them."""
        self.graphs = None  # they remember where the weights were
        if keep_copy and self.model is not None:
            self.model.move_to(torch.device("cpu"))
        else:
            self.model = None
        self._empty_device_cache()

    def restore_weights(self) -> None:
        """Bring the weights back, from the CPU's memory or from the file."""
        if self.model is None:
            self.model = self._load()
        self.model.move_to(self.device)
        self._record_graphs()

    def _record_graphs(self) -> None:
        """Once weights and cache are in their places, where kernels can be used."""
        if self.kv_cache is None or self.model is None or self.model.embed_tokens.device.type != self.device.type:
            return  # one of the two still sleeps
        if self.use_kernels:
            self.graphs = DecodeGraphs(self.config, self.model, self.kv_cache, self.block_tables.table.shape[1])

    def _can_use_kernels(self) -> bool:
        if self.device.type != "cuda" or self.config.args.enforce_eager:
            return False
        head_dim = self._model_config.head_dim
        if find_spec("triton") is None or head_dim & (head_dim - 1):
            logger.warning("No kernels and no CUDA graphs: they need Triton (on Linux: pip install triton), and heads "
                           "whose size is a power of two; this model's have %d.", head_dim)
            return False
        return True

    def close(self) -> None:
        """Let go of weights and cache, and give a GPU's memory back."""
        self.model = self.kv_cache = self.graphs = None
        self._empty_device_cache()

    def _empty_device_cache(self) -> None:
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that a graph was recorded on
            torch.cuda.empty_cache()
