"""A cache of one byte per number: what rounding costs, what is written, and what attention makes of it."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
from tutorial_engine.kernels.decode_attention import decode_attention, torch_decode_attention
from tutorial_engine.kernels.kv_quant import dequantize_kv, quantize_kv
from tutorial_engine.kernels.prefill_attention import cut_tiles, prefill_attention, torch_prefill_attention
from tutorial_engine.kernels.rope_kv_write import rope_kv_write, torch_rope_kv_write

BYTES = [torch.int8, torch.float8_e4m3fn]


def allowed_error(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a step: even ones for int8; a sixteenth of each number for float8, and of its smallest normal number, since
    the interpreter rounds those below to zero."""
    largest = cache.float().abs().amax(dim=-1, keepdim=True)
    if dtype == torch.int8:
        return largest / 127 * 0.5001
    return cache.float().abs() / 16 + largest / 448 * 2**-6


@pytest.mark.parametrize("dtype", BYTES)
def test_rounding_is_bounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = torch.randn(3, 2, 4, 16) * torch.logspace(-6, 4, 4)[:, None]
    cache[0, 0, 0] = 0.0
    q, scale = quantize_kv(cache, dtype)
    back = dequantize_kv(q, scale)
    assert q.dtype == dtype and scale.shape == (3, 2, 4)
    assert ((back - cache).abs() <= allowed_error(cache, dtype)).all()
    assert (back[0, 0, 0] == 0).all()


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("model_dtype, heads, kv_heads, num_tokens", [
    (torch.float32, 4, 2, 5), (torch.float16, 4, 2, 5), (torch.float32, 1, 1, 130)])
def test_writing(dtype: torch.dtype, model_dtype: torch.dtype, heads: int, kv_heads: int, num_tokens: int) -> None:
    """Queries as ever; K and V within half a step of what a plain cache would hold; nothing else is touched."""
    torch.manual_seed(0)
    dim, block_size, num_blocks = 16, 4, num_tokens // 4 + 2
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim).to(model_dtype)
    qkv[2] = 0.0
    angles = torch.rand(40, dim // 2) * 6
    cos = torch.cat([angles.cos()] * 2, dim=1).to(model_dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=1).to(model_dtype)
    positions, slots = torch.randint(40, (num_tokens,)), torch.randperm(num_blocks * block_size)[:num_tokens]
    plain = [torch.full((num_blocks, kv_heads, block_size, dim), 7.0, dtype=model_dtype) for _ in range(2)]
    caches = [torch.full((num_blocks, kv_heads, block_size, dim), 7.0).to(dtype) for _ in range(2)]
    scales = [torch.ones(num_blocks, kv_heads, block_size) for _ in range(2)]
    got = rope_kv_write(qkv, positions, slots, cos, sin, *caches, heads, None, 0.0, *scales)
    right = torch_rope_kv_write(qkv, positions, slots, cos, sin, *plain, heads)
    torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3)
    for cache, scale, twin in zip(caches, scales, plain):
        fine = (dequantize_kv(cache, scale) - twin.float()).abs() <= allowed_error(twin, dtype) + twin.abs() * 2**-10
        if dtype == torch.float8_e4m3fn:
            # The interpreter's cast forgets to carry where rounding up reaches the next power of two.
            fine |= (twin.float() / scale[..., None]).frexp().mantissa.abs() > 0.96
        assert fine.all()
        untouched = (twin == 7.0).all(dim=-1)
        assert untouched.sum() == (num_blocks * block_size - num_tokens) * kv_heads and (scale[untouched] == 1).all()


def paged(seq_lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """K and V in bytes, with their scales: (key, key_scale, value, value_scale); and block tables."""
    block_size, num_blocks = 4, [-(-n // 4) for n in seq_lens]
    pool = (torch.randperm(sum(num_blocks)) + 1).int()
    tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count], pool = pool[:count], pool[count:]
    shape = (sum(num_blocks) + 1, kv_heads, block_size, dim)
    return [t for _ in range(2) for t in quantize_kv(torch.randn(shape) * torch.rand(shape[:3])[..., None], dtype)
            ], tables


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("model_dtype, use_dot, num_splits", [
    (torch.float32, False, 1), (torch.float16, False, 4), (torch.float32, True, 4), (torch.float16, True, 1)])
def test_decoding(dtype: torch.dtype, model_dtype: torch.dtype, use_dot: bool, num_splits: int) -> None:
    torch.manual_seed(0)
    seq_lens = [1, 5, 70]
    (key, key_scale, value, value_scale), tables = paged(seq_lens, 2, 16, dtype)
    query, lens = torch.randn(3, 4, 16).to(model_dtype), torch.tensor(seq_lens, dtype=torch.int32)
    got = decode_attention(query, key, value, tables, lens, num_splits, use_dot, key_scale, value_scale)
    plain = dequantize_kv(key, key_scale), dequantize_kv(value, value_scale)
    right = torch_decode_attention(query, *plain, tables, lens)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3}[model_dtype]
    torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", BYTES)
def test_prompts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    computed, new = [0, 33, 17], [40, 1, 9]
    (key, key_scale, value, value_scale), tables = paged(list(np.add(computed, new)), 2, 16, dtype)
    tiles = torch.from_numpy(cut_tiles(np.cumsum([0, *new]), np.add(computed, new), 2))
    query = torch.randn(sum(new), 4, 16)
    got = prefill_attention(query, key, value, tables, tiles, key_scale, value_scale)
    plain = dequantize_kv(key, key_scale), dequantize_kv(value, value_scale)
    right = torch_prefill_attention(query, *plain, tables, tiles)
    torch.testing.assert_close(got, right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("wrong, message", [
    ({"key_scale": None, "value_scale": None}, "must be torch.float16, like the queries, or have scales; got"),
    ({"value_scale": None}, "value_scale must be a tensor of torch.float32, got NoneType"),
    ({"key_scale": torch.ones(2, 1, 5)}, r"key_scale must have the shape \[2, 1, 4\], got \[2, 1, 5\]"),
    ({"value_cache": torch.zeros(2, 1, 4, 16).half()}, "value_cache must be a tensor of torch.int8, got torch.float16"),
    ({"key_cache": torch.zeros(2, 1, 4, 16).half()}, "key_cache must be a tensor of torch.int8 or torch.float8_e4m3fn"),
])
def test_arguments_are_checked(wrong: dict, message: str) -> None:
    right = {"query": torch.zeros(1, 1, 16).half(), "key_cache": torch.zeros(2, 1, 4, 16, dtype=torch.int8),
             "value_cache": torch.zeros(2, 1, 4, 16, dtype=torch.int8), "block_tables": torch.ones(1, 1).int(),
             "seq_lens": torch.ones(1).int(), "key_scale": torch.ones(2, 1, 4), "value_scale": torch.ones(2, 1, 4)}
    with pytest.raises((TypeError, ValueError), match=message):
        decode_attention(**(right | wrong))
