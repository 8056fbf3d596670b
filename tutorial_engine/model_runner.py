"""The model runner: turns a plan (`SchedulerOutput`) into tensors, runs the model once, samples once.

    scheduled    a: tokens 0..5 (prefill)     b: token 89 (decode)     c: tokens 16..31 (chunk)
    input_ids    [ a a a a a a | b | c ... c ]        one flat batch, no padding (but a CUDA graph's, at the end)
    positions    [ 0 1 2 3 4 5 | 89| 16 .. 31]
    slot_mapping [ table of a  | .. | table of c ]    block * block_size + offset
    logits rows  [           x | x |         x ]      only where a request reaches its last known token

Owns: weights, cache tensors, the rows of the batch, everything with a device in it. Does not own: who runs, what stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec

import numpy as np
import torch

from tutorial_engine.attention import AttentionMetadata
from tutorial_engine.block_manager import cdiv
from tutorial_engine.config import EngineConfig
from tutorial_engine.cuda_graphs import StepGraphs, empty_device_cache, graph_bytes
from tutorial_engine.input_batch import LAST_TOKEN, InputBatch, input_token_ids, to_device
from tutorial_engine.kv_cache import GIB, KVCache, available_kv_cache_bytes, size_kv_cache
from tutorial_engine.logits_processor import make_processors
from tutorial_engine.models.decoder import Decoder
from tutorial_engine.models.loader import ModelSource
from tutorial_engine.sampler import LogprobsLists, Sampler, SamplingMetadata, noise_keys
from tutorial_engine.scheduler import ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass
class ModelRunnerOutput:
    """What a step produced.

    Attributes:
        sampled_token_ids: request id -> new tokens; only requests that reached their last known token.
        logprobs: of the new tokens, a row for each entry of `sampled_token_ids`, if any request of the step asked.
        prompt_logprobs: request id -> logprobs of the prompt tokens that this step's chunk predicts.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: LogprobsLists | None = None
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)

    def get_output(self) -> ModelRunnerOutput:
        """Itself: nothing has to be waited for."""
        return self


class AsyncModelRunnerOutput:
    """A step whose tokens the device is still computing. They come to the host while it does something else.

    Args:
        result: the rest of the output. request_ids: whom the tokens belong to. sampled: [n] int64, on the device.
    """

    def __init__(self, result: ModelRunnerOutput, request_ids: list[str], sampled: torch.Tensor) -> None:
        self._result, self._request_ids, self._sampled, self._copied = result, request_ids, sampled, None
        if sampled.is_cuda:
            self._sampled = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
            self._sampled.copy_(sampled, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        self._result.sampled_token_ids = {i: [t] for i, t in zip(self._request_ids, self._sampled.tolist())}
        return self._result


@dataclass
class RaggedBatch:
    """A step's requests, in batch order, as arrays on the host.

    Attributes:
        steps: who computes what. rows: [R] of the `InputBatch`.
        start, num_tokens: [R] int64, tokens computed before this step and in it.
        samples: [R] bool, whether the last token's logits choose a new one.
    """

    steps: list[ScheduledRequest]
    rows: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    samples: np.ndarray

    @cached_property
    def seq_lens(self) -> np.ndarray:
        """[R] int64, context of each request, this step's tokens included."""
        return self.start + self.num_tokens

    @cached_property
    def query_start_loc(self) -> np.ndarray:
        """[R + 1] int64, first token of each request in the flat batch."""
        return np.concatenate([[0], self.num_tokens.cumsum()])

    @property
    def is_decode(self) -> bool:
        """Everyone computes one token and samples."""
        return bool(self.samples.all()) and len(self.steps) == self.num_tokens.sum()


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
        self._model_config = self.model.config
        self.kv_cache: KVCache | None = None
        self.graphs: StepGraphs | None = None
        self.use_kernels = self._can_use_kernels()
        self.use_prefill_kernel = self.use_kernels and torch.cuda.get_device_capability() >= (8, 0)
        # On a GPU without kernels the host draws each token, so that there is nothing to run ahead of.
        self.runs_ahead = config.async_scheduling and (self.use_kernels or self.device.type == "cpu")
        self.input_batch = InputBatch(config.max_num_seqs, cdiv(config.max_model_len, config.block_size), self.device,
                                      self.use_kernels)
        reserved = self._activation_bytes() + self._graph_bytes()
        available = available_kv_cache_bytes(config, self.device, reserved)
        self.num_gpu_blocks, self.max_model_len = size_kv_cache(config, self.model.config, self.dtype, available)
        self.restore_kv_cache()

    def _activation_bytes(self) -> int:
        """Upper estimate of one step's temporaries: the MLP of a full budget, and logits of all seats in float32."""
        c = self.model.config
        per_token = (2 * c.hidden_size + 4 * c.intermediate_size) * self.dtype.itemsize
        return self.config.max_num_batched_tokens * per_token + 3 * self.config.max_num_seqs * c.vocab_size * 4

    def _graph_bytes(self) -> int:
        args = self.config.args
        if not self.use_kernels or args.num_gpu_blocks_override or args.kv_cache_memory_bytes:
            return 0
        return graph_bytes(self.config, self.model, self.input_batch, self.use_prefill_kernel)

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Begin with one step; `get_output()` of what is returned waits for its end. With `async_scheduling` the next
        step may be begun before that. `out` must schedule at least one token."""
        batch = self._make_batch(out)
        result = ModelRunnerOutput()
        if self.graphs is not None and batch.is_decode:
            logits, sampled = self.graphs.decode(input_token_ids(batch.steps), batch.rows, batch.start)
        else:
            hidden = self._forward(batch)
            self._compute_prompt_logprobs(result, batch, hidden)
            logits, sampled = self._logits(batch, hidden), None
        sampling = np.flatnonzero(batch.samples)
        plain = not self.sampler.processors and bool(
            (batch.seq_lens >= self.input_batch.plain_from[batch.rows])[sampling].all())
        if sampled is None or not plain:
            sampled, result.logprobs = self._sample(logits, batch, sampling, plain)
        ids = [batch.steps[i].request.request_id for i in sampling]
        if plain and self.runs_ahead:
            return AsyncModelRunnerOutput(result, ids, sampled)
        result.sampled_token_ids = {i: [t] for i, t in zip(ids, sampled.tolist())}
        return result

    def _make_batch(self, out: SchedulerOutput) -> RaggedBatch:
        steps = list(out.scheduled.values())
        rows = self.input_batch.update(out)
        if not self.use_prefill_kernel:
            # Zero the new blocks that this step does not fill. torch's attention reads whole blocks and gives the slots
            # behind a context the weight 0; but 0 * NaN is NaN, so what an overflow left there would poison the next
            # owner. Kernels do not read it.
            tails = [s.new_block_ids[-1] for s in steps
                     if s.new_block_ids and (s.start + s.num_tokens) % self.config.block_size]
            if tails:  # and the null block, which short tables are padded with, and which padding writes to
                self.kv_cache.clear(to_device(np.array([0, *tails]), self.device))
        start, num_tokens, samples = zip(*((s.start, s.num_tokens, s.samples) for s in steps))
        return RaggedBatch(steps, rows, np.array(start, dtype=np.int64), np.array(num_tokens, dtype=np.int64),
                           np.array(samples, dtype=bool))

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of a step, [num_tokens, hidden_size]."""
        query_start_loc, block_size = batch.query_start_loc, self.config.block_size
        # Position of flat token j of request r: start[r] + (j - query_start_loc[r]).
        request = np.repeat(np.arange(len(batch.steps)), batch.num_tokens)
        positions = np.arange(query_start_loc[-1]) + (batch.start - query_start_loc[:-1])[request]
        rows = batch.rows[request]
        slots = self.input_batch.block_table[rows, positions // block_size] * block_size + positions % block_size
        numbers = np.array([input_token_ids(batch.steps), rows, positions, slots])
        if self.graphs is not None and self.use_prefill_kernel:
            return self.graphs.forward(numbers, batch.rows, query_start_loc, batch.seq_lens)
        ids, rows, positions, slots = to_device(numbers, self.device)
        ids = torch.where(ids == LAST_TOKEN, self.input_batch.last_token_ids[rows], ids)
        metadata = AttentionMetadata.build(query_start_loc, batch.seq_lens, self.input_batch.block_table[batch.rows],
                                           slots, self.kv_cache)
        return self.model(ids, positions, self.kv_cache, metadata)

    def _logits(self, batch: RaggedBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Of those who sample: [n, vocab_size]."""
        last = (batch.query_start_loc[1:] - 1)[batch.samples]
        if not len(last):
            return torch.empty(0, self._model_config.vocab_size, dtype=self.dtype, device=self.device)
        return self.model.compute_logits(hidden[to_device(last, self.device)])

    def _sample(self, logits: torch.Tensor, batch: RaggedBatch, sampling: np.ndarray, plain: bool
                ) -> tuple[torch.Tensor, LogprobsLists | None]:
        """Token ids [len(sampling)] on the device, and logprobs if someone asked. logits: a row for each."""
        rows, num_tokens = batch.rows[sampling], batch.seq_lens[sampling]
        logprobs = None
        if not len(rows):
            return torch.empty(0, dtype=torch.int64, device=self.device), None
        if plain and self.use_kernels:
            from tutorial_engine.kernels import fused

            temperature, min_p, top_p = to_device(self.input_batch.knobs[:, rows], self.device)
            top_k, keys = to_device(np.stack([self.input_batch.top_k[rows], noise_keys(
                self.input_batch.seed[rows], num_tokens)]), self.device)
            sampled = fused.top_k_top_p_sample(logits, temperature, min_p, top_k, top_p, keys)
        else:
            requests = [batch.steps[i].request for i in sampling]
            token_ids, logprobs = self.sampler(logits.float(), SamplingMetadata(
                requests, num_tokens.tolist(), logits.shape[1], self.device))
            sampled = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        self.input_batch.last_token_ids[to_device(rows, self.device)] = sampled
        return sampled, logprobs

    def _compute_prompt_logprobs(self, result: ModelRunnerOutput, batch: RaggedBatch, hidden: torch.Tensor) -> None:
        """Row i of a chunk predicts prompt token start + i + 1; the last prompt token predicts output, not prompt."""
        for s, first in zip(batch.steps, batch.query_start_loc.tolist()):
            request = s.request
            if request.sampling_params.prompt_logprobs is None:
                continue
            num_rows = min(s.num_tokens, request.num_prompt_tokens - 1 - s.start)
            if num_rows <= 0:
                continue
            logits = self.model.compute_logits(hidden[first:first + num_rows]).float()
            targets = torch.tensor(request.all_token_ids[s.start + 1:s.start + 1 + num_rows], device=self.device)
            asked = [request.sampling_params.prompt_logprobs] * num_rows
            result.prompt_logprobs[request.request_id] = self.sampler.gather_logprobs(
                logits, targets, asked, is_prompt=True)

    def release_kv_cache(self) -> None:
        """Give the cache's memory back; what it held is lost."""
        self._wait_for_device()
        self.kv_cache = self.graphs = None
        self._empty_device_cache()

    def restore_kv_cache(self) -> None:
        """An empty cache of the same size."""
        self.kv_cache = KVCache(self._model_config, self.num_gpu_blocks, self.config.block_size, self.dtype,
                                self.device)
        self._record_graphs()

    def release_weights(self, keep_copy: bool) -> None:
        """Give the weights' memory back: move them to the CPU's memory, or drop them."""
        self._wait_for_device()
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
            began, before = time.monotonic(), torch.cuda.mem_get_info()[0]
            self.graphs = StepGraphs(self.config, self.model, self.kv_cache, self.input_batch, self.use_prefill_kernel)
            logger.info("Graph capturing finished in %.0f secs, took %.2f GiB", time.monotonic() - began,
                        (before - torch.cuda.mem_get_info()[0]) / GIB)

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
        self._wait_for_device()
        self.model = self.kv_cache = self.graphs = None
        self._empty_device_cache()

    def _wait_for_device(self) -> None:
        """Until nothing is in flight: a step may still use what is about to go."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _empty_device_cache(self) -> None:
        if self.device.type == "cuda":
            empty_device_cache()
