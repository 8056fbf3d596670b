"""A KV cache of one byte per number: twice the context of float16 in the same memory, and half as much to read.

    a head's K of one token     [ 0.31  -1.26  ..  4.00 ]   -> scale 4.00 / 127 ->   [ 10  -40  ..  127 ]  and the scale

    cache    [num_blocks, num_kv_heads, block_size, head_dim]    int8, or float8 (e4m3)
    scale    [num_blocks, num_kv_heads, block_size]              float32, beside it: 4 bytes for each head_dim

A scale per token and head is found when the token is written, so nothing has to be calibrated, nothing is ever clipped,
and no vector suffers from another's outliers; vLLM's "int8_per_token_head" does the same, its "fp8" has one scale per
layer from a calibration run. (At 2 bits keys need a scale per channel, since outliers sit in channels: Liu et al.
("KIVI"), arXiv 2402.02750. At 8 bits they do not, and a channel's scale would have to wait for later tokens.)

Reading costs one multiplication per token, not per number, since a scale can be taken out of the sums:

    score = q . (s k) = s (q . k)                output = sum p (s v) = sum (p s) v

int8 has evenly spaced steps, and every GPU can read it. float8 has 3 bits of mantissa: worse for the large numbers of a
vector, better for the small ones; it needs compute capability 8.9.

Here are the pieces: `rope_kv_write` writes, `decode_attention` and `prefill_attention` read; the engine does not ask
for it yet. Twins: `quantize_kv`,
`dequantize_kv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.arguments import check_tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def to_bytes(low, high, dtype: tl.constexpr):
    """Both halves of some tokens' vectors, [tokens, head_dim / 2], in one byte a number, and their scales [tokens]."""
    largest: tl.constexpr = 127.0 if dtype.is_int8() else 448.0
    scale = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1)) / largest
    scale = tl.where(scale > 0.0, scale, 1.0)
    low, high = low / scale[:, None], high / scale[:, None]
    if dtype.is_int8():  # a cast alone would cut off
        low, high = tl.floor(low + 0.5), tl.floor(high + 0.5)
    return low.to(dtype), high.to(dtype), scale


@triton.jit
def load_scales(scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE: tl.constexpr):
    """Scales of some context tokens, found through the block table; ones for a cache that has none.
    inside: None if all are."""
    if scale_ptr is None:
        return tl.full(token.shape, 1.0, tl.float32)
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=None if inside is None else 0).to(tl.int64)
        row = (block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
        return tl.load(scale_ptr + row, mask=inside, other=None if inside is None else 0.0)


def check_kv(dtype: torch.dtype, key_cache: torch.Tensor, value_cache: torch.Tensor, key_scale: torch.Tensor | None,
             value_scale: torch.Tensor | None) -> None:
    """Raise unless the cache is in `dtype` without scales, or in one byte a number with them.

    Raises:
        TypeError, ValueError: says which tensor, and what was expected; also for float8 on a GPU without it.
    """
    if key_scale is None and value_scale is None:
        if key_cache.dtype != dtype or value_cache.dtype != dtype:
            raise TypeError(f"key_cache and value_cache must be {dtype}, like the queries, or have scales; got "
                            f"{key_cache.dtype} and {value_cache.dtype}.")
        return
    check_tensor("key_cache", key_cache, tuple(LARGEST), (-1, -1, -1, -1))
    check_tensor("value_cache", value_cache, (key_cache.dtype,), key_cache.shape, key_cache.device)
    check_tensor("key_scale", key_scale, (torch.float32,), key_cache.shape[:3], key_cache.device)
    check_tensor("value_scale", value_scale, (torch.float32,), key_cache.shape[:3], key_cache.device)
    if (key_cache.dtype == torch.float8_e4m3fn and key_cache.is_cuda
            and torch.cuda.get_device_capability(key_cache.device) < (8, 9)):
        raise ValueError("A float8 cache needs a GPU of compute capability 8.9 or more; use int8 on this one.")


def quantize_kv(cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels store. cache: [..., head_dim] -> (the same in `dtype`, int8 or float8; scales [...] float32)."""
    cache = cache.float()
    scale = cache.abs().amax(dim=-1) / LARGEST[dtype]
    scale = torch.where(scale > 0, scale, 1.0)
    cache = cache / scale[..., None]
    return ((cache + 0.5).floor() if dtype == torch.int8 else cache).to(dtype), scale


def dequantize_kv(cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What attention makes of it, in float32."""
    return cache.float() * scale[..., None]
