"""Paged attention against its slow twin, over ragged batches; and the cache that both read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tutorial_engine import attention
from tutorial_engine.attention import AttentionMetadata, naive_paged_attention, paged_attention
from tutorial_engine.kv_cache import KVCache
from tutorial_engine.models.config import ModelConfig

CPU = torch.device("cpu")


def model_config(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, num_layers: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=num_layers,
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim)


class Batch:
    """A step of requests, each with `computed` tokens in the cache and `new` ones now, its blocks anywhere in the pool.

    Attributes:
        query: [num_tokens, num_heads, head_dim].
        keys, values: per request the whole context, [computed + new, num_kv_heads, head_dim].
    """

    def __init__(self, sizes: list[tuple[int, int]], block_size: int, model: ModelConfig, seed: int = 0,
                 dtype: torch.dtype = torch.float32) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        num_blocks = [-(-(computed + new) // block_size) for computed, new in sizes]
        pool = list(range(1, sum(num_blocks) + 4))
        rng.shuffle(pool)
        self.cache = KVCache(model, len(pool) + 1, block_size, dtype, CPU)
        # Whatever is not written must not be read: only the null block is promised to hold numbers.
        for tensor in (*self.cache.key, *self.cache.value):
            tensor[1:] = 1e6
        tables = np.zeros((len(sizes), max(num_blocks) + 2), dtype=np.int64)
        slots, self.keys, self.values, kv_heads = [], [], [], (model.num_key_value_heads, model.head_dim)
        for row, (computed, new) in enumerate(sizes):
            tables[row, :num_blocks[row]] = [pool.pop() for _ in range(num_blocks[row])]
            tables[row, num_blocks[row]:] = 1  # stale
            position = np.arange(computed + new)
            slots.append(tables[row][position // block_size] * block_size + position % block_size)
            for store in (self.keys, self.values):
                store.append(torch.randn(computed + new, *kv_heads, generator=generator).to(dtype))
        self.slots = torch.from_numpy(np.concatenate(slots))
        for layer in range(model.num_hidden_layers):
            self.cache.write(layer, torch.cat(self.keys) * (layer + 1), torch.cat(self.values) * (layer + 1),
                             self.cache.head_rows(self.slots))
        num_new = np.array([new for _, new in sizes])
        seq_lens = np.array([computed + new for computed, new in sizes])
        new_slots = np.concatenate([s[computed:] for s, (computed, _) in zip(slots, sizes)])
        self.metadata = AttentionMetadata.build(
            np.concatenate([[0], num_new.cumsum()]), seq_lens, tables, torch.from_numpy(new_slots), self.cache)
        self.query = torch.randn(int(num_new.sum()), model.num_attention_heads, model.head_dim,
                                 generator=generator).to(dtype)

    def check(self) -> None:
        for layer in range(len(self.cache.key)):
            fast = paged_attention(self.query, self.cache, layer, self.metadata)
            slow = naive_paged_attention(self.query, self.cache, layer, self.metadata)
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


# (computed, new)
DECODES = [(1, 1), (15, 1), (16, 1), (17, 1), (90, 1)]
MIXED = [(0, 6), (89, 1), (39, 1), (257, 3), (0, 1), (16, 16), (31, 2)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("sizes", [[(0, 1)], [(0, 33)], DECODES, MIXED], ids=["one", "prompt", "decodes", "mixed"])
def test_equals_the_slow_twin(num_heads: int, num_kv_heads: int, sizes: list[tuple[int, int]]) -> None:
    Batch(sizes, 16, model_config(num_heads, num_kv_heads)).check()


@pytest.mark.parametrize("head_dim", [2, 16, 64, 80])
def test_head_dims(head_dim: int) -> None:
    Batch(MIXED, 16, model_config(head_dim=head_dim)).check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_contexts_around_block_edges(block_size: int, around: int) -> None:
    edge = max(2 * block_size + around, 1)
    Batch([(edge, 1), (edge - 1, 1), (0, edge), (edge, block_size), (edge - 1, 2)], block_size, model_config()).check()


@pytest.mark.parametrize("tile", [1, 2, 3, 4, 7])
def test_prompts_longer_than_a_tile(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", tile)
    Batch([(0, 13), (9, 8), (5, 1), (0, tile), (3, tile + 1)], 4, model_config()).check()


@pytest.mark.parametrize("merge", [0, 10**9])
def test_grouping_changes_nothing(merge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MERGE_TOKENS", merge)
    Batch(MIXED + DECODES, 4, model_config()).check()


def test_random_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for seed in range(25):
        monkeypatch.setattr(attention, "QUERY_TILE", rng.choice([1, 2, 5, 8, 512]))
        monkeypatch.setattr(attention, "MERGE_TOKENS", rng.choice([0, 8, 64, 200]))
        sizes = [(rng.choice([0, rng.randint(0, 60)]), rng.choice([1, 1, rng.randint(1, 24)]))
                 for _ in range(rng.randint(1, 8))]
        kv_heads = rng.choice([1, 2, 3])
        model = model_config(kv_heads * rng.choice([1, 2, 3]), kv_heads, rng.choice([2, 4, 10]), num_layers=1)
        Batch(sizes, rng.randint(1, 9), model, seed).check()


def test_equals_plain_attention_over_the_whole_sequence() -> None:
    """The slow twin itself, against torch's own causal attention."""
    batch = Batch([(0, 21)], 4, model_config(num_layers=1))
    query, key, value = (t.transpose(0, 1)[None] for t in (batch.query, batch.keys[0], batch.values[0]))
    right = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    slow = naive_paged_attention(batch.query, batch.cache, 0, batch.metadata)
    torch.testing.assert_close(slow, right, rtol=1e-4, atol=1e-5)


def test_half_precision_keeps_its_dtype() -> None:
    batch = Batch(MIXED, 16, model_config(), dtype=torch.bfloat16)
    out = paged_attention(batch.query, batch.cache, 0, batch.metadata)
    assert out.dtype == torch.bfloat16
    slow = naive_paged_attention(batch.query, batch.cache, 0, batch.metadata)
    torch.testing.assert_close(out, slow, rtol=0.05, atol=0.05)


def test_tiles_cover_every_query_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", 4)
    batch = Batch(MIXED, 4, model_config())
    rows = torch.arange(len(batch.query))
    covered = [rows[g.rows] if g.keep is None else rows[g.rows][g.keep] for g in batch.metadata.groups]
    assert sorted(torch.cat(covered).tolist()) == rows.tolist()
    assert len(batch.metadata.groups) < len(MIXED), "tiles of like size share a call"


# The cache itself


def test_write_and_gather_are_inverse() -> None:
    model = model_config(num_layers=3)
    batch = Batch([(5, 6), (0, 3)], 4, model)
    for layer in range(3):
        for row, (keys, values) in enumerate(zip(batch.keys, batch.values)):
            num_blocks = -(-len(keys) // 4)
            blocks = torch.from_numpy(batch.metadata.block_table[row:row + 1, :num_blocks])
            key, value = batch.cache.gather(layer, batch.cache.block_rows(blocks), num_tiles=1)
            assert key.shape == (1, model.num_key_value_heads, num_blocks * 4, model.head_dim)
            assert torch.equal(key[0, :, :len(keys)].transpose(0, 1), keys * (layer + 1))
            assert torch.equal(value[0, :, :len(keys)].transpose(0, 1), values * (layer + 1))


def test_a_slot_is_block_times_size_plus_offset() -> None:
    cache = KVCache(model_config(num_layers=1), 5, 4, torch.float32, CPU)
    key = torch.arange(16.0).view(1, 2, 8)
    cache.write(0, key, -key, cache.head_rows(torch.tensor([3 * 4 + 2])))
    assert torch.equal(cache.key[0][3, :, 2], key[0]) and torch.equal(cache.value[0][3, :, 2], -key[0])
    assert cache.key[0].count_nonzero() == 15 and cache.value[0].count_nonzero() == 15


def test_new_caches_hold_zeros() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = KVCache(model_config(), 7, 4, dtype, CPU)
        assert cache.key[1].dtype == dtype and cache.key[1].shape == (7, 2, 4, 8)
        assert all(not t.any() for t in (*cache.key, *cache.value))
        assert cache.num_bytes == sum(t.numel() * t.element_size() for t in (*cache.key, *cache.value))
