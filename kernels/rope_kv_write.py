"""From the qkv projection to what attention reads: norm, turn, and write to the cache, in one pass.

    a token's row of qkv   [ q0 q1 .. | k0 k1 .. | v0 v1 .. ]       heads of head_dim numbers
                              |          |          |
                            norm?      norm?        |                Qwen3 only
                            RoPE       RoPE         |
                              v          v          v
                            query      key cache  value cache        block, head, offset of slot_mapping

One program takes one head of a few tokens. Unfused, each arrow is a launch and a trip to memory. A cache of one
byte per number gets its scales on the way (`kv_quant`).

RoPE: Su et al., arXiv 2104.09864. The cache's layout is `KVCache`'s: [num_blocks, num_kv_heads, block_size, head_dim].
Twin: `torch_rope_kv_write`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.kv_quant import check_kv, to_bytes


@triton.jit
def _rope_kv_write(qkv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, query_ptr, key_ptr,
                   value_ptr, key_scale_ptr, value_scale_ptr, eps, num_tokens, num_heads, num_kv_heads,
                   BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, TOKENS: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    inside = token < num_tokens
    half: tl.constexpr = HEAD_DIM // 2
    i, mask = tl.arange(0, half)[None, :], inside[:, None]
    source = qkv_ptr + (token * (num_heads + 2 * num_kv_heads) + head)[:, None] * HEAD_DIM
    # A head's two halves: RoPE turns (low[i], high[i]) as a pair.
    low = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half + i, mask=mask, other=0.0).to(tl.float32)
    if head < num_heads + num_kv_heads:
        if HAS_NORM:
            norm_ptr = q_norm_ptr if head < num_heads else k_norm_ptr
            scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
            dtype = qkv_ptr.dtype.element_ty  # rounded as an unfused norm would be
            low = (low * scale * tl.load(norm_ptr + i).to(tl.float32)).to(dtype).to(tl.float32)
            high = (high * scale * tl.load(norm_ptr + half + i).to(tl.float32)).to(dtype).to(tl.float32)
        position = tl.load(positions_ptr + token, mask=inside, other=0)[:, None]
        cos = tl.load(cos_ptr + position * HEAD_DIM + half + i).to(tl.float32)
        sin = tl.load(sin_ptr + position * HEAD_DIM + half + i).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
    if head < num_heads:
        target = query_ptr + (token * num_heads + head)[:, None] * HEAD_DIM
        tl.store(target + i, low.to(target.dtype.element_ty), mask=mask)
        tl.store(target + half + i, high.to(target.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + token, mask=inside, other=0)
        kv_head = (head - num_heads) % num_kv_heads
        row = ((slot // BLOCK_SIZE) * num_kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        is_key = head < num_heads + num_kv_heads
        cache = (key_ptr if is_key else value_ptr) + row[:, None] * HEAD_DIM
        if key_scale_ptr is None:
            tl.store(cache + i, low.to(cache.dtype.element_ty), mask=mask)
            tl.store(cache + half + i, high.to(cache.dtype.element_ty), mask=mask)
        else:
            low_byte, high_byte, byte_scale = to_bytes(low, high, cache.dtype.element_ty)
            tl.store(cache + i, low_byte, mask=mask)
            tl.store(cache + half + i, high_byte, mask=mask)
            tl.store((key_scale_ptr if is_key else value_scale_ptr) + row, byte_scale, mask=inside)


def rope_kv_write(qkv: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, cos: torch.Tensor,
                  sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, num_heads: int,
                  norms: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
                  key_scale: torch.Tensor | None = None, value_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate queries and keys by their positions, and store keys and values in their slots.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous.
        positions, slot_mapping: [num_tokens] int64.
        cos, sin: [max_positions, head_dim], the tables of `RotaryEmbedding`.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], written in place.
        norms: weights [head_dim] of the norms over each query and each key head; None for none.
        key_scale, value_scale: [num_blocks, num_kv_heads, block_size] float32, written in place, for a cache in int8 or
            float8; None for a cache in qkv's dtype.

    Returns:
        Queries, [num_tokens, num_heads, head_dim].

    Raises:
        TypeError, ValueError: cache and scales do not go together.
    """
    check_kv(qkv.dtype, key_cache, value_cache, key_scale, value_scale)
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or (qkv, qkv)
    # A program costs more than its few numbers, so it takes several tokens, once there are programs enough.
    tokens = 1 if num_tokens < 128 else 4 if num_tokens < 1024 else 16
    _rope_kv_write[(triton.cdiv(num_tokens, tokens), num_heads + 2 * num_kv_heads)](
        qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, query, key_cache, value_cache, key_scale,
        value_scale, eps, num_tokens, num_heads, num_kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim,
        HAS_NORM=norms is not None, TOKENS=tokens,
        num_warps=4 if tokens == 16 else 1)
    return query


def torch_rope_kv_write(qkv: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, cos: torch.Tensor,
                        sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, num_heads: int,
                        norms: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0) -> torch.Tensor:
    """The same from the definition, token by token and head by head, in float32."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    rows = qkv.view(len(qkv), -1, head_dim)
    query = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype)
    for token, (position, slot) in enumerate(zip(positions.tolist(), slot_mapping.tolist(), strict=True)):
        for head in range(num_heads + 2 * num_kv_heads):
            x = rows[token, head].float()
            if head < num_heads + num_kv_heads:
                if norms is not None:
                    x = x / (x.square().mean() + eps).sqrt() * norms[head >= num_heads].float()
                    x = x.to(qkv.dtype).float()
                x = x * cos[position].float() + x.roll(head_dim // 2) * sin[position].float()
            if head < num_heads:
                query[token, head] = x.to(qkv.dtype)
            else:
                cache = key_cache if head < num_heads + num_kv_heads else value_cache
                cache[slot // block_size, (head - num_heads) % num_kv_heads, slot % block_size] = x.to(cache.dtype)
    return query
