"""Sampling without leaving the GPU: argmax(logits / temperature + Gumbel noise), one token per row.

    a row of logits    [ tile 0 | tile 1 | tile 2 | ... ]        one program per tile: its best value and token
                          \\________|________|_______/
                            one program per row: the best of the best -> token id, never seen by the host

Softmax, cumulative sums and a host that reads them are not needed: adding Gumbel noise and taking the maximum *is* a
draw from the softmax (Maddison et al., arXiv 1411.0030, section 2.1). The noise is a hash of the row's key and the
token id, the same as `sampler.gumbel_noise`, so nothing has to be remembered from step to step, and no random numbers
are read from memory. Temperature 0 means no noise: plain argmax, the lowest id among equals.

Twin: `torch_gumbel_sample`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.sampler import gumbel_noise

TILE = 2048


@triton.jit
def _gumbel(key, token):
    """-log(-log(u)) with u in (0, 1) from a hash of key and token; `sampler.gumbel_noise` explains the numbers."""
    x = (key + token.to(tl.int64) * -7046029254386353131).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    x = x ^ (x >> 33)
    bits = x >> 12  # 52 of them
    u = (bits.to(tl.float32) + 0.5) * (2.0**-52)
    # Near 1 float32 has no room for u, but plenty for v = 1 - u, and that is where large noise comes from.
    v = ((0xFFFFFFFFFFFFF - bits).to(tl.float32) + 0.5) * (2.0**-52)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))  # -log(1 - v) for small v
    exponential = tl.where(v < 2.0**-8, series, tl.where(v < 0.5, -tl.log(1.0 - v), -tl.log(u)))
    return -tl.log(exponential)


@triton.jit
def _best_of_tile(logits_ptr, temperature_ptr, keys_ptr, best_ptr, token_ptr, vocab_size, num_tiles,
                  TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + token, mask=inside, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        x = x / temperature + _gumbel(tl.load(keys_ptr + row), token)
        x = tl.where(inside, x, -float("inf"))
    # A model that overflows says NaN. No comparison holds for it, so it would win or lose by chance, and could leave an
    # index that no token has.
    x = tl.where(x == x, x, -float("inf"))
    best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(token_ptr + row * num_tiles + tile, tile * TILE + index)


@triton.jit
def _best_of_tiles(best_ptr, token_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    best = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    _, index = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(token_ptr + row * num_tiles + index).to(tl.int64))


def gumbel_sample(logits: torch.Tensor, temperature: torch.Tensor, noise_keys: torch.Tensor) -> torch.Tensor:
    """One token per row.

    Args:
        logits: [rows, vocab_size], contiguous, any float dtype.
        temperature: [rows] float32, 0 for greedy. noise_keys: [rows] int64, from `sampler.noise_key`.

    Returns:
        [rows] int64 token ids, on the same device.
    """
    rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    best = torch.empty(rows, num_tiles, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, num_tiles, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_tile[(rows, num_tiles)](logits, temperature, noise_keys, best, token, vocab_size, num_tiles, TILE=TILE,
                                     num_warps=4)
    _best_of_tiles[(rows,)](best, token, out, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1)
    return out


def torch_gumbel_sample(logits: torch.Tensor, temperature: torch.Tensor, noise_keys: torch.Tensor) -> torch.Tensor:
    """The same with whole rows: scale, add noise, argmax."""
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    noisy = x / temperature.clamp(min=1e-9)[:, None] + gumbel_noise(
        noise_keys[:, None], torch.arange(x.shape[1], device=x.device))
    return torch.where(temperature[:, None] > 0, noisy, x).argmax(dim=-1)
