"""Every kernel against its slow twin, in float32 and float16."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
from tutorial_engine.kernels.decode_attention import decode_attention, torch_decode_attention
from tutorial_engine.kernels.gumbel_sample import gumbel_sample, torch_gumbel_sample
from tutorial_engine.kernels.matvec import matvec, norm_matvec, silu_matvec, torch_matvec
from tutorial_engine.kernels.prefill_attention import cut_tiles, max_tiles, prefill_attention, torch_prefill_attention
from tutorial_engine.kernels.rms_norm import add_rms_norm, torch_add_rms_norm
from tutorial_engine.kernels.rope_kv_write import rope_kv_write, torch_rope_kv_write
from tutorial_engine.kernels.silu_mul import silu_mul, torch_silu_mul
from tutorial_engine.sampler import gumbel_noise, noise_key

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    tolerance = TOLERANCE[right.dtype]
    torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("width", [64, 100])
def test_add_rms_norm(dtype: torch.dtype, with_residual: bool, width: int) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype)
    residual = torch.randn(5, width).to(dtype) if with_residual else None
    twin = residual.clone() if with_residual else None
    close(add_rms_norm(x, residual, weight, 1e-5), torch_add_rms_norm(x, twin, weight, 1e-5))
    if with_residual:
        assert torch.equal(residual, twin), "the residual became the sum"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1500])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(3, 2 * width).to(dtype) * 4
    close(silu_mul(gate_up), torch_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm, num_tokens", [(False, 7), (True, 7), (True, 129), (True, 1025)])
def test_rope_kv_write(dtype: torch.dtype, with_norm: bool, num_tokens: int) -> None:
    """From a few tokens to so many that a program takes several."""
    heads, kv_heads, dim, block_size, num_blocks = 2, 1, 16, 4, num_tokens // 4 + 3
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(40, dim // 2) * 6
    cos = torch.cat([angles.cos()] * 2, dim=1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=1).to(dtype)
    positions, slots = torch.randint(40, (num_tokens,)), torch.randperm(num_blocks * block_size)[:num_tokens]
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if with_norm else None
    caches = [torch.full((num_blocks, kv_heads, block_size, dim), 7.0, dtype=dtype) for _ in range(4)]
    got = rope_kv_write(qkv, positions, slots, cos, sin, *caches[:2], heads, norms, 1e-5)
    right = torch_rope_kv_write(qkv, positions, slots, cos, sin, *caches[2:], heads, norms, 1e-5)
    close(got, right)
    close(caches[0], caches[2])
    close(caches[1], caches[3])
    assert (caches[0] == 7.0).all(dim=-1).sum() == (num_blocks * block_size - num_tokens) * kv_heads, "nothing else"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (4, 2)])
def test_decode_attention(dtype: torch.dtype, use_dot: bool, num_splits: int, heads: int, kv_heads: int) -> None:
    dim, block_size, seq_lens = 16, 4, [1, 4, 5, 70]
    num_blocks = [-(-n // block_size) for n in seq_lens]
    key, value = (torch.randn(sum(num_blocks) + 1, kv_heads, block_size, dim).to(dtype) for _ in range(2))
    pool = (torch.randperm(sum(num_blocks)) + 1).int()
    tables = torch.full((len(seq_lens), max(num_blocks) + 1), 10**6, dtype=torch.int32)  # nothing behind is read
    for row, count in enumerate(num_blocks):
        tables[row, :count], pool = pool[:count], pool[count:]
        if seq_lens[row] % block_size:  # whatever an earlier owner left
            key[tables[row, count - 1], :, seq_lens[row] % block_size:] = torch.nan
            value[tables[row, count - 1], :, seq_lens[row] % block_size:] = torch.nan
    query = torch.randn(len(seq_lens), heads, dim).to(dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    close(decode_attention(query, key, value, tables, lens, num_splits, use_dot),
          torch_decode_attention(query, key, value, tables, lens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (4, 2)])
def test_prefill_attention(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """A prompt of two tiles, one decoding token, a chunk in the middle of a prompt, and a prompt of one token."""
    dim, block_size, computed, new = 16, 4, [0, 33, 17, 0], [40, 1, 9, 1]
    num_blocks = [-(-(c + n) // block_size) for c, n in zip(computed, new, strict=True)]
    key, value = (torch.randn(sum(num_blocks) + 1, kv_heads, block_size, dim).to(dtype) for _ in range(2))
    pool = (torch.randperm(sum(num_blocks)) + 1).int()
    tables = torch.zeros(len(new), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count], pool = pool[:count], pool[count:]
        if used := (computed[row] + new[row]) % block_size:
            key[tables[row, count - 1], :, used:] = value[tables[row, count - 1], :, used:] = torch.nan
    tiles = torch.from_numpy(cut_tiles(np.cumsum([0, *new]), np.add(computed, new), heads // kv_heads))
    contexts = (tiles[2] + tiles[3]).tolist()
    assert contexts == sorted(contexts, reverse=True) and tiles[3].sum() == sum(new)
    assert tiles.shape[1] == 5 <= max_tiles(sum(new), len(new), heads // kv_heads), "two tiles for 40 queries"
    tiles = torch.nn.functional.pad(tiles, (0, 2))  # and two that do nothing
    query = torch.randn(sum(new), heads, dim).to(dtype)
    close(prefill_attention(query, key, value, tables, tiles),
          torch_prefill_attention(query, key, value, tables, tiles))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out, num_in", [(5, 40), (3, 1100)])
def test_matvec(dtype: torch.dtype, num_out: int, num_in: int) -> None:
    """Alone, behind a norm and behind SwiGLU; with and without a bias."""
    weight, bias = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype), torch.randn(num_out).to(dtype)
    x, residual, norm = (torch.randn(1, num_in).to(dtype) for _ in range(3))
    close(matvec(x, weight), torch_matvec(x, weight))
    close(matvec(x, weight, bias), torch_matvec(x, weight, bias))
    gate_up = torch.randn(1, 2 * num_in).to(dtype)
    close(silu_matvec(gate_up, weight), torch_matvec(torch_silu_mul(gate_up), weight))
    before = residual.clone()
    got, added = norm_matvec(x, residual, norm[0], 1e-5, weight, bias)
    assert torch.equal(residual, before), "others may still read it"
    assert torch.equal(added, x + residual)
    normed = torch_add_rms_norm(added.float(), None, norm[0].float(), 1e-5)  # not rounded before the product
    close(got, torch_matvec(normed, weight.float(), bias.float()).to(dtype))


def test_matvec_of_many_rows() -> None:
    """So many that a program takes four."""
    x, weight = torch.randn(1, 8), torch.randn(2051, 8)
    close(matvec(x, weight), torch_matvec(x, weight))


def test_gumbel_sample_is_the_samplers_own_draw() -> None:
    """Whose distribution is tested with it (chi-square against the exact one)."""
    logits = torch.randn(60, 2100) * 3
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 0.0, 1.0] * 10)
    keys = torch.tensor([noise_key(seed, 5) for seed in range(60)])
    got = gumbel_sample(logits, temperature, keys)
    assert torch.equal(got, torch_gumbel_sample(logits, temperature, keys))
    for row in (1, 5):
        noise = gumbel_noise(keys[row:row + 1, None], torch.arange(2100))
        assert got[row] == (logits[row] + noise[0]).argmax()


def test_gumbel_sample_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 4100)
    logits[0, [3000, 17, 4099]] = 1.0
    assert gumbel_sample(logits, torch.zeros(2), torch.zeros(2, dtype=torch.int64)).tolist() == [17, 0]


def test_gumbel_sample_survives_a_model_that_overflowed() -> None:
    """NaN never wins, and a row of nothing else still gives the id of some token."""
    logits = torch.full((4, 2500), torch.nan)
    logits[1:3, [5, 2400]] = torch.tensor([1.0, 2.0])
    temperature, keys = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.arange(4)
    got = gumbel_sample(logits, temperature, keys)
    assert torch.equal(got, torch_gumbel_sample(logits, temperature, keys))
    assert got.tolist()[:2] == [0, 2400] and got[2] in (5, 2400) and 0 <= got[3] < 2500


def test_gumbel_sample_never_draws_what_is_forbidden() -> None:
    logits = torch.full((3, 2500), -torch.inf)
    logits[:, 2400] = 0.0
    got = gumbel_sample(logits, torch.tensor([0.0, 1.0, 2.0]), torch.arange(3))
    assert got.tolist() == [2400] * 3
