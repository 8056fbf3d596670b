"""Paged attention for decoding: one query per request against its whole cached context.

    request r, KV head h        block table of r:  [ 7 | 3 | 9 | 4 ]
                                                     \\___/   \\___/
    split 0: softmax over its part of the context ->  m0, l0, acc0      program (r, h, 0)
    split 1:                                          m1, l1, acc1      program (r, h, 1)
    then one small kernel joins the parts:            out = sum exp(mi - m) acci / sum exp(mi - m) li

* With tensor cores, all query heads of a group share each K and V tile that is read (grouped-query attention, Ainslie
  et al., arXiv 2305.13245): reading is what this kernel spends its time on.
* The softmax runs online, with a running maximum m and sum l (Milakov and Gimelshein, arXiv 1805.02867), so the context
  is read once. Splitting it keeps the whole GPU busy when there are few requests ("flash decoding", Dao et al., 2023).
* Blocks come from the block table (Kwon et al., arXiv 2309.06180, section 4.1); one tile may cover several.

Two kernels do the same: `_decode` on tensor cores (compute capability 8.0 and up), and `_decode_no_dot` for older ones,
where Triton has no tensor cores to offer: one program per query head, multiply and sum. Twin: `torch_decode_attention`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.kv_quant import check_kv, load_scales

LOG2_E = math.log2(math.e)  # goes into the scale: exp(x) = 2^(x log2 e), and powers of two are what a GPU computes


@triton.jit
def _load_tile(cache_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE: tl.constexpr,
               HEAD_DIM: tl.constexpr):
    """K or V of some context tokens, found through the block table: [TILE, HEAD_DIM]. inside: None if all are."""
    in_rows = inside
    if inside is not None:
        in_rows = inside[:, None]
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=None if inside is None else 0).to(tl.int64)
    row = (block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
    return tl.load(cache_ptr + row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], mask=in_rows,
                   other=None if inside is None else 0.0)


@triton.jit
def _decode(query_ptr, key_ptr, value_ptr, tables_ptr, seq_lens_ptr, out_ptr, part_ptr, part_ml_ptr, key_scale_ptr,
            value_scale_ptr, scale, table_stride, num_kv_heads, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    # Each split takes whole tiles.
    share = tl.cdiv(tl.cdiv(seq_len, TILE), NUM_SPLITS) * TILE
    first, last = split * share, tl.minimum((split + 1) * share, seq_len)
    g, d = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_DIM)
    head = (request * num_kv_heads + kv_head) * GROUP + g
    real = g < GROUP
    q = tl.load(query_ptr + head[:, None] * HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)
    m = tl.full([GROUP_PADDED], -1e30, tl.float32)
    l = tl.zeros([GROUP_PADDED], tl.float32)  # noqa: E741 - the literature's name
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
    table_ptr = tables_ptr + request * table_stride
    for begin in range(first, last, TILE):
        token = begin + tl.arange(0, TILE)
        inside = token < last
        k = _load_tile(key_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        v = _load_tile(value_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        k_scale = load_scales(key_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        v_scale = load_scales(value_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (k_scale * scale)[None, :]
        s = tl.where(inside[None, :], s, -1e30)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shrink, p = tl.exp2(m - m_new), tl.exp2(s - m_new[:, None])
        l = l * shrink + tl.sum(p, axis=1)  # noqa: E741
        acc = acc * shrink[:, None] + tl.dot((p * v_scale[None, :]).to(q.dtype), v.to(q.dtype),
                                               input_precision="ieee")
        m = m_new
    if NUM_SPLITS == 1:
        tl.store(out_ptr + head[:, None] * HEAD_DIM + d[None, :], acc / l[:, None], mask=real[:, None])
    else:
        part = head * NUM_SPLITS + split
        tl.store(part_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=real[:, None])
        tl.store(part_ml_ptr + part * 2, m, mask=real)
        tl.store(part_ml_ptr + part * 2 + 1, l, mask=real)


@triton.jit
def _decode_no_dot(query_ptr, key_ptr, value_ptr, tables_ptr, seq_lens_ptr, out_ptr, part_ptr, part_ml_ptr,
                   key_scale_ptr, value_scale_ptr, scale, table_stride, num_kv_heads, GROUP: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    request, head_in_request, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    share = tl.cdiv(tl.cdiv(seq_len, TILE), NUM_SPLITS) * TILE
    first, last = split * share, tl.minimum((split + 1) * share, seq_len)
    d = tl.arange(0, HEAD_DIM)
    head = request * num_kv_heads * GROUP + head_in_request
    q = tl.load(query_ptr + head * HEAD_DIM + d).to(tl.float32) * scale
    m, l = -1e30, 0.0  # noqa: E741
    acc = tl.zeros([HEAD_DIM], tl.float32)
    table_ptr, kv_head = tables_ptr + request * table_stride, head_in_request // GROUP
    for begin in range(first, last, TILE):
        token = begin + tl.arange(0, TILE)
        inside = token < last
        k = _load_tile(key_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        v = _load_tile(value_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        k_scale = load_scales(key_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        v_scale = load_scales(value_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        s = tl.where(inside, tl.sum(k.to(tl.float32) * q[None, :], axis=1) * k_scale, -1e30)
        m_new = tl.maximum(m, tl.max(s, axis=0))
        shrink, p = tl.exp2(m - m_new), tl.exp2(s - m_new)
        l = l * shrink + tl.sum(p, axis=0)  # noqa: E741
        acc = acc * shrink + tl.sum((p * v_scale)[:, None] * v.to(tl.float32), axis=0)
        m = m_new
    if NUM_SPLITS == 1:
        tl.store(out_ptr + head * HEAD_DIM + d, acc / l)
    else:
        part = head * NUM_SPLITS + split
        tl.store(part_ptr + part * HEAD_DIM + d, acc)
        tl.store(part_ml_ptr + part * 2, m)
        tl.store(part_ml_ptr + part * 2 + 1, l)


@triton.jit
def _join_splits(part_ptr, part_ml_ptr, out_ptr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)  # request and query head
    split, d = tl.arange(0, NUM_SPLITS), tl.arange(0, HEAD_DIM)
    part = head * NUM_SPLITS + split
    m, l = tl.load(part_ml_ptr + part * 2), tl.load(part_ml_ptr + part * 2 + 1)  # noqa: E741
    weight = tl.exp2(m - tl.max(m, axis=0))  # a split beyond the context has l = acc = 0
    acc = tl.load(part_ptr + part[:, None] * HEAD_DIM + d[None, :])
    out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(l * weight, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + d, out)


def decode_attention(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                     block_tables: torch.Tensor, seq_lens: torch.Tensor, num_splits: int = 1, use_dot: bool = True,
                     key_scale: torch.Tensor | None = None, value_scale: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q K^T / sqrt(head_dim)) V for one query per request.

    Args:
        query: [num_requests, num_heads, head_dim], contiguous; head_dim a power of two.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [num_requests, max_blocks] int32. seq_lens: [num_requests] int32, at least 1, this token included.
        num_splits: parts of each context, a power of two. use_dot: tensor cores, for compute capability >= 8.0.
        key_scale, value_scale: [num_blocks, num_kv_heads, block_size] float32 of a cache in int8 or float8, see
            `kv_quant`; None for a cache in query's dtype.

    Returns:
        [num_requests, num_heads, head_dim].

    Raises:
        TypeError, ValueError: cache and scales do not go together.
    """
    check_kv(query.dtype, key_cache, value_cache, key_scale, value_scale)
    num_requests, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    out = torch.empty_like(query)
    part = part_ml = out
    if num_splits > 1:
        part = torch.empty(num_requests, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
        part_ml = torch.empty(num_requests, num_heads, num_splits, 2, dtype=torch.float32, device=query.device)
    args = (query, key_cache, value_cache, block_tables, seq_lens, out, part, part_ml, key_scale, value_scale,
            head_dim**-0.5 * LOG2_E, block_tables.stride(0), num_kv_heads)
    sizes = {"GROUP": group, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "NUM_SPLITS": num_splits}
    if use_dot:
        sizes["TILE"] = 128 if head_dim == 128 and key_cache.element_size() == 2 else 64
        _decode[(num_requests, num_kv_heads, num_splits)](
            *args, **sizes, GROUP_PADDED=max(16, triton.next_power_of_2(group)), num_warps=4)  # a dot has 16 rows
    else:
        _decode_no_dot[(num_requests, num_heads, num_splits)](*args, **sizes, TILE=64, num_warps=4)
    if num_splits > 1:
        _join_splits[(num_requests * num_heads,)](part, part_ml, out, HEAD_DIM=head_dim, NUM_SPLITS=num_splits,
                                                  num_warps=1)
    return out


def torch_decode_attention(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                           block_tables: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The same from the definition, request by request and head by head, in float32."""
    out = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    for r, seq_len in enumerate(seq_lens.tolist()):
        token = torch.arange(seq_len, device=query.device)
        blocks, offsets = block_tables[r, token // block_size].long(), token % block_size
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            key, value = (cache[blocks, kv_head, offsets].float() for cache in (key_cache, value_cache))
            scores = key @ query[r, head].float() * head_dim**-0.5
            out[r, head] = (scores.softmax(dim=0) @ value).to(query.dtype)
    return out
