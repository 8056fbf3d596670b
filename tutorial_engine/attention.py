"""Attention over a paged cache, for a ragged batch: the torch backend, which runs on any device.

A step mixes requests with one query token (decoding) and requests with many (prefill), each with its own context:

    query tokens   a a a a a a | b | c | d d d          query_start_loc [0, 6, 7, 8, 11]
    contexts       a: 6   b: 90   c: 40   d: 260        seq_lens        [6, 90, 40, 260]

SDPA wants a rectangle. So the queries are cut into tiles, tiles of like size (same power of two in queries and in
context blocks) form a group, and a group is one rectangle: gather its blocks by the block table, pad, mask, one SDPA
call. The groups are made once a step and used by every layer; no layer loops over requests.

The one idea behind it is PagedAttention: the block table is the page table of a process, the gather is the walk
through it (Kwon et al., arXiv 2309.06180, section 4.1). `naive_paged_attention` is the slow twin of all this.
Owns: attention. Does not own: the cache's tensors (`kv_cache.py`) or the batch (`model_runner.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from tutorial_engine.kv_cache import KVCache

# Most queries of one request in one tile. Cutting a long prompt saves half of the masked (future) part and bounds
# the mask: 512 queries x 8192 context x 4 bytes = 16 MiB.
QUERY_TILE = 512


@dataclass
class TileGroup:
    """Tiles that share one rectangle: B tiles x Q queries x T context tokens.

    Attributes:
        rows: [B * Q] rows of the step's query tensor; padding repeats the tile's first row.
        blocks: [B * T / block_size] physical blocks, padded with the null block.
        mask: [B, 1, Q, T] added to the scores: 0 where a query may look, -inf elsewhere.
        keep: [n] positions in B * Q that are real queries, or None if all are.
        num_tiles, num_queries: B and Q.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    keep: torch.Tensor | None
    num_tiles: int
    num_queries: int


@dataclass
class AttentionMetadata:
    """What attention must know about a step, under vLLM's names.

    Attributes:
        query_start_loc: [R + 1] int64 on the CPU, first query row of each request.
        seq_lens: [R] int64 on the CPU, context of each request, this step's tokens included.
        block_table: [R, max_blocks] int64 on the CPU, physical blocks of each request.
        slot_mapping: [num_tokens] int64 on the device, where each token's K and V go.
        groups: the tiles of this step.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: torch.Tensor
    groups: list[TileGroup] = field(default_factory=list)

    def build_groups(self, block_size: int, dtype: torch.dtype) -> None:
        """Cut the queries into tiles and put tiles of like size together."""
        device = self.slot_mapping.device
        num_queries = np.diff(self.query_start_loc)
        # One row per tile: request, first query inside the request, number of queries.
        tiles_per_request = -(-num_queries // QUERY_TILE)
        request = np.repeat(np.arange(len(num_queries)), tiles_per_request)
        first_tile = np.cumsum(tiles_per_request) - tiles_per_request
        begin = (np.arange(len(request)) - first_tile[request]) * QUERY_TILE
        length = np.minimum(num_queries[request] - begin, QUERY_TILE)
        # A tile sees everything up to its own last query: num_computed + begin + length tokens.
        num_computed = (self.seq_lens - num_queries)[request]
        context = num_computed + begin + length
        num_blocks = -(-context // block_size)
        sizes = np.stack([_power_of_two(length), _power_of_two(num_blocks)], axis=1)
        for size in np.unique(sizes, axis=0):
            t = np.flatnonzero((sizes == size).all(axis=1))
            q, nb = length[t].max(), num_blocks[t].max()
            offset = np.arange(q)
            real = offset < length[t, None]  # [B, Q]
            start = (self.query_start_loc[request[t]] + begin[t])[:, None]
            rows = start + np.where(real, offset, 0)
            last_visible = (num_computed + begin)[t, None] + np.where(real, offset, 0)  # position of each query
            hidden = np.arange(nb * block_size) > last_visible[:, :, None]  # [B, Q, T]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            self.groups.append(TileGroup(
                rows=torch.from_numpy(rows.reshape(-1)).to(device),
                blocks=torch.from_numpy(self.block_table[request[t], :nb].reshape(-1)).to(device),
                mask=mask[:, None].to(device),
                keep=None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device),
                num_tiles=len(t), num_queries=int(q)))


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """Exponent of the smallest power of two that is not below x."""
    return np.ceil(np.log2(x)).astype(np.int64)


def paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, metadata: AttentionMetadata) -> torch.Tensor:
    """Causal attention of a step's queries over their cached contexts.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated; K and V of these tokens are already in the cache.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty_like(query)
    key_cache, value_cache = kv_cache.key[layer], kv_cache.value[layer]
    num_kv_heads = key_cache.shape[2]
    for g in metadata.groups:
        key = key_cache.index_select(0, g.blocks).view(g.num_tiles, -1, num_kv_heads, head_dim).transpose(1, 2)
        value = value_cache.index_select(0, g.blocks).view(g.num_tiles, -1, num_kv_heads, head_dim).transpose(1, 2)
        q = query.index_select(0, g.rows)
        if g.num_queries == 1:
            # Grouped-query attention: the heads that share a KV head become the "queries" of one product, so that
            # K and V are read once for all of them.
            q = q.view(g.num_tiles, num_kv_heads, num_heads // num_kv_heads, head_dim)
            o = F.scaled_dot_product_attention(q, key, value, attn_mask=g.mask)
        else:
            q = q.view(g.num_tiles, g.num_queries, num_heads, head_dim).transpose(1, 2)
            o = F.scaled_dot_product_attention(q, key, value, attn_mask=g.mask, enable_gqa=True).transpose(1, 2)
        o = o.reshape(-1, num_heads, head_dim)
        if g.keep is not None:
            out.index_copy_(0, g.rows[g.keep], o[g.keep])
        else:
            out.index_copy_(0, g.rows, o)
    return out


def naive_paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, metadata: AttentionMetadata
                          ) -> torch.Tensor:
    """The same, request by request and head by head, straight from the definition: softmax(q k^T / sqrt(d)) v."""
    out = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    for r, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = metadata.query_start_loc[r], metadata.query_start_loc[r + 1]
        # Walk the block table token by token.
        slots = [int(metadata.block_table[r, i // kv_cache.block_size]) * kv_cache.block_size + i % kv_cache.block_size
                 for i in range(seq_len)]
        key, value = (t[layer].flatten(0, 1)[slots] for t in (kv_cache.key, kv_cache.value))
        for head in range(num_heads):
            kv_head = head * key.shape[1] // num_heads
            for i in range(begin, end):
                visible = seq_len - (end - i) + 1
                scores = (key[:visible, kv_head] @ query[i, head]) / head_dim**0.5
                out[i, head] = torch.softmax(scores, dim=0) @ value[:visible, kv_head]
    return out
