"""The KV cache: two tensors a layer, cut into blocks; and how many blocks there is memory for.

    key[layer], value[layer]    [num_gpu_blocks, num_kv_heads, block_size, head_dim] each

    token i of a request  ->  logical block i // block_size  ->  block table  ->  physical block b
                          ->  slot = b * block_size + i % block_size             (one number addresses one token)

Inside a block the heads come before the tokens (FlashInfer's "HND" order): attention reads one head at a time, and
finds its block_size x head_dim numbers in one piece.

Owns: the tensors, the arithmetic of bytes, the sizing and its errors. Does not own: who uses which block.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from tutorial_engine.block_manager import cdiv
from tutorial_engine.config import EngineConfig
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
# A laptop has other things to do: without kv_cache_memory_bytes a CPU's cache stays below this.
CPU_DEFAULT_CACHE_BYTES = 2 * GIB


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token occupies: K and V, in every layer, for every KV head."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.itemsize


def available_kv_cache_bytes(config: EngineConfig, device: torch.device, reserved_bytes: int) -> int:
    """Memory that the KV cache may take, once the weights are loaded.

    Args:
        reserved_bytes: what one step at the full token budget needs besides weights and cache, and what CUDA graphs do.
    """
    if config.args.kv_cache_memory_bytes is not None:
        return config.args.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * config.args.gpu_memory_utilization) - (total - free) - reserved_bytes
    import psutil

    free = psutil.virtual_memory().available
    return min(int(free * config.args.gpu_memory_utilization) - reserved_bytes, CPU_DEFAULT_CACHE_BYTES)


def size_kv_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available_bytes: int
                  ) -> tuple[int, int]:
    """Number of blocks, and the longest sequence to accept.

    Returns:
        (num_gpu_blocks, max_model_len); the second differs from the config's only if the user asked for "auto".

    Raises:
        VLLMValidationError: not even one request of max_model_len tokens fits; the message says what would.
    """
    per_token = kv_bytes_per_token(model, dtype)
    block_size, max_model_len = config.block_size, config.max_model_len
    override = config.args.num_gpu_blocks_override
    num_blocks = override if override is not None else max(available_bytes, 0) // (per_token * block_size)
    # Block 0 is the null block and holds nothing. vLLM counts it only when the user fixed the number of blocks.
    usable = num_blocks - 1
    fits = usable * block_size
    if usable < 1:
        raise VLLMValidationError(
            f"No available memory for the cache blocks: one block of {block_size} tokens needs "
            f"{per_token * block_size:,} bytes, and {max(available_bytes, 0):,} bytes are left for the cache. Try "
            "increasing `gpu_memory_utilization` or `kv_cache_memory_bytes`, or a smaller model.",
            parameter="gpu_memory_utilization")
    if config.args.max_model_len == -1:
        max_model_len = min(max_model_len, fits)
    if fits < max_model_len:
        raise VLLMValidationError(
            f"To serve at least one request with the model's max seq len ({max_model_len:,}), "
            f"{cdiv(max_model_len, block_size):,} blocks of {block_size} tokens are needed "
            f"({max_model_len * per_token / GIB:.3f} GiB), but the KV cache has {usable:,} usable blocks "
            f"({fits * per_token / GIB:.3f} GiB). The estimated maximum model length is {fits:,}. Try "
            f"max_model_len={fits}, or a larger pool (`num_gpu_blocks_override`, `kv_cache_memory_bytes`, "
            "`gpu_memory_utilization`).", parameter="max_model_len", value=max_model_len)
    logger.info("%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
                "GPU" if config.device == "cuda" else "CPU", f"{num_blocks * block_size:,}", f"{max_model_len:,}",
                num_blocks / cdiv(max_model_len, block_size))
    return num_blocks, max_model_len


class KVCache:
    """The tensors.

    Attributes:
        key, value: per layer, [num_blocks, num_kv_heads, block_size, head_dim] in the model's dtype.
    """

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
                 ) -> None:
        self.num_blocks, self.num_kv_heads, self.block_size = num_blocks, model.num_key_value_heads, block_size
        shape = (model.num_hidden_layers, num_blocks, self.num_kv_heads, block_size, model.head_dim)
        self._all = [_zeros(shape, dtype, device) for _ in range(2)]
        self.key, self.value = (tensor.unbind(0) for tensor in self._all)
        self.num_bytes = num_blocks * block_size * kv_bytes_per_token(model, dtype)

    def head_rows(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Where each KV head of each token lives, counted in rows of head_dim numbers.

        Args:
            slot_mapping: [num_tokens] int64, block * block_size + offset of each token.

        Returns:
            [num_tokens * num_kv_heads] int64, for `write`: the same for all layers, so computed once a step.
        """
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size
        heads = torch.arange(self.num_kv_heads, device=slot_mapping.device)
        return ((block[:, None] * self.num_kv_heads + heads) * self.block_size + offset[:, None]).flatten()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, head_rows: torch.Tensor) -> None:
        """Scatter the K and V of a step's tokens to their slots.

        Args:
            key, value: [num_tokens, num_kv_heads, head_dim].
            head_rows: from `head_rows`.
        """
        head_dim = key.shape[-1]
        self.key[layer].view(-1, head_dim).index_copy_(0, head_rows, key.reshape(-1, head_dim))
        self.value[layer].view(-1, head_dim).index_copy_(0, head_rows, value.reshape(-1, head_dim))

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero whole blocks in every layer. blocks: [n] int64."""
        for tensor in self._all:
            tensor.index_fill_(1, blocks, 0)

    def block_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Index for `gather`. blocks: [tiles, num_blocks] int64 -> [tiles * num_kv_heads * num_blocks]."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device)[:, None]
        return (blocks[:, None] * self.num_kv_heads + heads).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk the block tables: K and V as [tiles, num_kv_heads, num_blocks * block_size, head_dim] each."""
        head_dim = self.key[layer].shape[-1]
        key, value = (cache[layer].view(-1, self.block_size * head_dim).index_select(0, block_rows)
                      .view(num_tiles, self.num_kv_heads, -1, head_dim) for cache in (self.key, self.value))
        return key, value


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: padding reads the null block, and 0 * NaN is NaN.

    On a CPU the operating system hands out zeroed pages when they are first touched, which is free; `torch.zeros` would
    touch all of them now, and a cache of 2 GiB would cost seconds and memory that nobody may ever use.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
