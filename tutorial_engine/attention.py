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

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tutorial_engine.kv_cache import KVCache

# Most queries of one request in one tile. Cutting a long prompt saves half of the masked (future) part and bounds
# the mask: 512 queries x 8192 context x 4 bytes = 16 MiB.
QUERY_TILE = 512


# A group costs about as much as this many context tokens do: fewer than that are rather padded than split off.
MERGE_TOKENS = 200


@dataclass
class TileGroup:
    """Tiles that share one rectangle: B tiles x Q queries x T context tokens.

    Attributes:
        rows: rows of the step's query tensor, [B * Q] or a slice if they lie together; padding repeats a tile's first.
        out_rows: the same without the padding.
        block_rows: index for `KVCache.gather`; short tables are padded with the null block, whose
            slots are zeros or padding's.
        mask: [B, 1, Q, T] added to the scores: 0 where a query may look, -inf elsewhere.
        keep: [n] positions in B * Q that are real queries, or None if all are.
        num_tiles, num_queries: B and Q.
    """

    rows: torch.Tensor | slice
    out_rows: torch.Tensor | slice
    block_rows: torch.Tensor
    mask: torch.Tensor
    keep: torch.Tensor | None
    num_tiles: int
    num_queries: int


@dataclass
class AttentionMetadata:
    """What attention must know about a step, under vLLM's names.

    Attributes:
        query_start_loc: [R + 1] int64, first query row of each request.
        seq_lens: [R] int64, context of each request, this step's tokens included.
        block_table: [R, max_blocks] int64, physical blocks of each request.
        slot_mapping: [num_tokens] int64 on the device, where each token's K and V go.
        head_rows: the same per KV head, see `KVCache.head_rows`.
        groups: the tiles of this step.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: torch.Tensor
    head_rows: torch.Tensor
    groups: list[TileGroup]

    @classmethod
    def build(cls, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray,
              slot_mapping: torch.Tensor, kv_cache: KVCache) -> AttentionMetadata:
        """Cut the queries into tiles and put tiles of like size together."""
        metadata = cls(query_start_loc, seq_lens, block_table, slot_mapping, kv_cache.head_rows(slot_mapping), [])
        num_queries = np.diff(query_start_loc)
        # One row per tile: its request, its first query inside the request, its number of queries.
        tiles_per_request = -(-num_queries // QUERY_TILE)
        request = np.repeat(np.arange(len(num_queries)), tiles_per_request)
        first_tile = np.cumsum(tiles_per_request) - tiles_per_request
        begin = (np.arange(len(request)) - first_tile[request]) * QUERY_TILE
        length = np.minimum(num_queries[request] - begin, QUERY_TILE)
        # A tile sees everything up to its own last query.
        first_position = (seq_lens - num_queries)[request] + begin
        num_blocks = -(-(first_position + length) // kv_cache.block_size)
        for t in _group_tiles(length, num_blocks, kv_cache.block_size):
            metadata._add_group(kv_cache, request[t], query_start_loc[request[t]] + begin[t], length[t],
                                first_position[t], num_blocks[t].max())
        return metadata

    def _add_group(self, kv_cache: KVCache, request: np.ndarray, first_row: np.ndarray, length: np.ndarray,
                   first_position: np.ndarray, num_blocks: int) -> None:
        device = self.slot_mapping.device
        offset = np.arange(length.max())
        real = offset < length[:, None]  # [B, Q]
        offset = np.where(real, offset, 0)
        rows = (first_row[:, None] + offset).reshape(-1)
        position = first_position[:, None] + offset  # of each query; it sees that many tokens before it, and itself
        hidden = np.arange(num_blocks * kv_cache.block_size) > position[:, :, None]  # [B, Q, T]
        mask = torch.zeros(hidden.shape, dtype=kv_cache.key[0].dtype)
        mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        keep = np.flatnonzero(real)
        blocks = torch.from_numpy(self.block_table[request, :num_blocks]).to(device)
        self.groups.append(TileGroup(
            rows=_slice_if_together(rows, device), out_rows=_slice_if_together(rows[keep], device),
            block_rows=kv_cache.block_rows(blocks), mask=mask[:, None].to(device),
            keep=None if real.all() else torch.from_numpy(keep).to(device),
            num_tiles=len(request), num_queries=len(offset[0])))


def _slice_if_together(rows: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """Rows that follow one another need no copy to be read."""
    first, last = int(rows[0]), int(rows[-1])
    together = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(first, last + 1) if together else torch.from_numpy(rows).to(device)


def _group_tiles(length: np.ndarray, num_blocks: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Tiles whose queries and context round up to the same powers of two, in groups of indices.

    Small groups join the next larger one: a call has a price, and a little padding is cheaper.
    """
    sizes = np.stack([_log2(length), _log2(num_blocks)], axis=1)
    groups: list[np.ndarray] = []
    for size in np.unique(sizes, axis=0)[::-1]:  # the largest first
        tiles = np.flatnonzero((sizes == size).all(axis=1))
        if groups and (sizes[groups[-1][0], 0] == size[0]):
            padding = (num_blocks[groups[-1]].max() - num_blocks[tiles]).sum() * block_size * length[tiles].max()
            if padding <= MERGE_TOKENS:
                groups[-1] = np.sort(np.concatenate([groups[-1], tiles]))
                continue
        groups.append(tiles)
    return groups


def _log2(x: np.ndarray) -> np.ndarray:
    """Exponent of the smallest power of two that is not below x."""
    return np.ceil(np.log2(x)).astype(np.int64)


def paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, metadata: AttentionMetadata) -> torch.Tensor:
    """Causal attention of a step's queries over their cached contexts.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated; K and V of these tokens are already in the cache.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    _, num_heads, head_dim = query.shape
    out = torch.empty_like(query)
    for g in metadata.groups:
        key, value = kv_cache.gather(layer, g.block_rows, g.num_tiles)
        q = query[g.rows].view(g.num_tiles, g.num_queries, num_heads, head_dim).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, key, value, attn_mask=g.mask, enable_gqa=True)
        o = o.transpose(1, 2).reshape(-1, num_heads, head_dim)
        out[g.out_rows] = o if g.keep is None else o[g.keep]
    return out


def naive_paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, metadata: AttentionMetadata
                          ) -> torch.Tensor:
    """The same, request by request and head by head, straight from the definition: softmax(q k^T / sqrt(d)) v."""
    out = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    for r, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = metadata.query_start_loc[r], metadata.query_start_loc[r + 1]
        # Walk the block table token by token: [seq_len, num_kv_heads, head_dim].
        blocks, offsets = zip(*((int(metadata.block_table[r, i // kv_cache.block_size]), i % kv_cache.block_size)
                                for i in range(seq_len)), strict=True)
        key, value = (cache[layer][list(blocks), :, list(offsets)] for cache in (kv_cache.key, kv_cache.value))
        for head in range(num_heads):
            kv_head = head * kv_cache.num_kv_heads // num_heads
            for i in range(begin, end):
                visible = seq_len - (end - i) + 1
                scores = (key[:visible, kv_head] @ query[i, head]) / head_dim**0.5
                out[i, head] = torch.softmax(scores, dim=0) @ value[:visible, kv_head]
    return out
