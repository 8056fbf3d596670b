"""Paged attention for any mixture of prompts, chunks of prompts and single tokens.

    flat queries of a step    [ a a a a a a a | b | c c c c c ]          no padding between requests
    tiles of BLOCK_Q queries    [0    ] [1  ]  [2] [3    ] [4]           a tile never spans two requests
                                   |
              program (tile, KV head): its queries x the group's heads are the rows of one matrix,
              which walks the request's block table from the start to the tile's last query

The rows of a tile see different numbers of tokens (each query sees itself and what came before: causal), so the mask is
made from positions, in registers; a mask in memory would be larger than the cache it hides. The rest is as in
`decode_attention`: a running softmax, K and V read once for a whole group of heads.

FlashAttention-2: Dao, arXiv 2307.08691. Needs tensor cores (compute capability 8.0). Twin: `torch_prefill_attention`.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.decode_attention import LOG2_E, _load_tile, torch_decode_attention
from tutorial_engine.kernels.kv_quant import check_kv, load_scales

BLOCK_M = 64  # rows of a tile: queries x heads of a group


@triton.jit
def _attend(q, k, v, k_scale, v_scale, m, l, acc, scale, visible):  # noqa: E741 - the literature's name
    """One step of the running softmax over the context; `visible` [rows, tokens], or None if all of it is."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (k_scale * scale)[None, :]
    if visible is not None:
        s = tl.where(visible, s, -1e30)
    m_new = tl.maximum(m, tl.max(s, axis=1))
    shrink, p = tl.exp2(m - m_new), tl.exp2(s - m_new[:, None])
    p_v = (p * v_scale[None, :]).to(q.dtype)
    acc = acc * shrink[:, None] + tl.dot(p_v, v.to(q.dtype), input_precision="ieee")
    return m_new, l * shrink + tl.sum(p, axis=1), acc


@triton.jit
def _prefill(query_ptr, key_ptr, value_ptr, tables_ptr, tiles_ptr, out_ptr, key_scale_ptr, value_scale_ptr, scale,
             table_stride, num_tiles, num_kv_heads, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles_ptr + tile).to(tl.int64)
    first_row = tl.load(tiles_ptr + num_tiles + tile).to(tl.int64)
    first_position = tl.load(tiles_ptr + 2 * num_tiles + tile)
    num_queries = tl.load(tiles_ptr + 3 * num_tiles + tile)
    if num_queries == 0:
        return
    m_row, d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    of_query = m_row // GROUP
    real = of_query < num_queries
    row = (first_row + of_query) * num_kv_heads * GROUP + kv_head * GROUP + m_row % GROUP
    q = tl.load(query_ptr + row[:, None] * HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)
    position = first_position + of_query
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    table_ptr, end = tables_ptr + request * table_stride, first_position + num_queries
    # What lies before the tile's first query is seen by all its rows: whole tiles of that need no mask.
    diagonal = (first_position + 1) // TILE * TILE
    for begin in range(0, diagonal, TILE):
        token = begin + tl.arange(0, TILE)
        k = _load_tile(key_ptr, table_ptr, token, None, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        v = _load_tile(value_ptr, table_ptr, token, None, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        k_scale = load_scales(key_scale_ptr, table_ptr, token, None, kv_head, num_kv_heads, BLOCK_SIZE)
        v_scale = load_scales(value_scale_ptr, table_ptr, token, None, kv_head, num_kv_heads, BLOCK_SIZE)
        m, l, acc = _attend(q, k, v, k_scale, v_scale, m, l, acc, scale, None)  # noqa: E741
    for begin in range(diagonal, end, TILE):
        token = begin + tl.arange(0, TILE)
        inside = token < end
        k = _load_tile(key_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        v = _load_tile(value_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        k_scale = load_scales(key_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        v_scale = load_scales(value_scale_ptr, table_ptr, token, inside, kv_head, num_kv_heads, BLOCK_SIZE)
        visible = token[None, :] <= position[:, None]
        m, l, acc = _attend(q, k, v, k_scale, v_scale, m, l, acc, scale, visible)  # noqa: E741
    tl.store(out_ptr + row[:, None] * HEAD_DIM + d[None, :], acc / l[:, None], mask=real[:, None])


def cut_tiles(query_start_loc: np.ndarray, seq_lens: np.ndarray, group: int) -> np.ndarray:
    """Tiles of a step: [4, num_tiles] int32, rows: request, first query row, its position, number of queries.

    Those with the longest context come first, so that the GPU is not left waiting for a few long ones at the end. A
    tile of 0 queries does nothing.

    Args:
        query_start_loc: [num_requests + 1]. seq_lens: [num_requests], this step's tokens included.
        group: query heads per KV head.
    """
    block_q = BLOCK_M // group
    num_queries = np.diff(query_start_loc)
    tiles_of = -(-num_queries // block_q)
    request = np.repeat(np.arange(len(num_queries)), tiles_of)
    begin = (np.arange(len(request)) - (np.cumsum(tiles_of) - tiles_of)[request]) * block_q
    tiles = np.stack([request, query_start_loc[:-1][request] + begin, (seq_lens - num_queries)[request] + begin,
                      np.minimum(num_queries[request] - begin, block_q)]).astype(np.int32)
    return np.ascontiguousarray(tiles[:, np.argsort(-(tiles[2] + tiles[3]), kind="stable")])


def max_tiles(num_tokens: int, num_requests: int, group: int) -> int:
    """Most tiles that `cut_tiles` can make of so many tokens of at most so many requests."""
    return num_tokens // (BLOCK_M // group) + min(num_tokens, num_requests)


def prefill_attention(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                      block_tables: torch.Tensor, tiles: torch.Tensor, key_scale: torch.Tensor | None = None,
                      value_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of a step's queries over their cached contexts.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous; K and V of these tokens are in the cache.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [rows, max_blocks] int32, which the tiles refer to. tiles: from `cut_tiles`, on the device.
        key_scale, value_scale: [num_blocks, num_kv_heads, block_size] float32 of a cache in int8 or float8, see
            `kv_quant`; None for a cache in query's dtype.

    Returns:
        [num_tokens, num_heads, head_dim].

    Raises:
        TypeError, ValueError: cache and scales do not go together.
    """
    check_kv(query.dtype, key_cache, value_cache, key_scale, value_scale)
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    out, num_tiles = torch.empty_like(query), tiles.shape[1]
    tile, stages = (64, 2) if key_cache.element_size() == 2 else (32, 3)
    _prefill[(num_tiles, num_kv_heads)](
        query, key_cache, value_cache, block_tables, tiles, out, key_scale, value_scale, head_dim**-0.5 * LOG2_E,
        block_tables.stride(0), num_tiles, num_kv_heads, GROUP=num_heads // num_kv_heads, BLOCK_M=BLOCK_M,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, TILE=tile, num_warps=4, num_stages=stages)
    return out


def torch_prefill_attention(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                            block_tables: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """The same, query by query: each is a request of its own that decodes with the context it may see."""
    owner, seq_lens = (torch.empty(len(query), dtype=torch.int64) for _ in range(2))
    for request, row, position, count in tiles.T.tolist():
        owner[row:row + count] = request
        seq_lens[row:row + count] = torch.arange(position + 1, position + 1 + count)
    return torch_decode_attention(query, key_cache, value_cache, block_tables[owner], seq_lens)
