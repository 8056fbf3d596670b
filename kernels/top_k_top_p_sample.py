"""Sampling with temperature, min_p, top_k and top_p: no sort, no softmax in memory, no word to the host.

    tokens by their value        . . .:.:.::.:::::::.:::.::  |  :.  : .     .        largest
                                            dropped        floor       kept

    Is the floor here?           count(values >= pivot) >= k         top_k      yes: here or further right
                                 mass(values >= pivot)  >= p * all   top_p       no: further left

* A floor is found by bisection: measure, keep the half it must lie in, go on. Both ends jump to values that some token
  has, so the result is exact, after 32 rounds (the bits of a float) at most and usually far fewer. Sorting-free
  sampling: Xing et al., flashinfer.ai, March 2025; with exact pivots: Park et al. ("Qrita"), arXiv 2602.01518.
* Nobody measures a whole vocabulary 20 times. When a row is first read, the maximum of each 64 tokens is noted. If k of
  the maxima reach a value, so do k tokens: the same bisection among the maxima gives a lower bound, and only groups
  that reach it (about k, of thousands) are looked at again ("delegates": Gaihre et al., arXiv 2109.08219).
* Among what is kept, Gumbel noise decides, as in `gumbel_sample`; rows that restrict nothing take that kernel's way.

top_k: Fan et al., arXiv 1805.04833. top_p: Holtzman et al., arXiv 1904.09751. min_p: Nguyen et al., arXiv 2407.01082.
The order, and what happens to equals, are the sampler's. Twin: `torch_top_k_top_p_sample`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.arguments import check_tensor
from tutorial_engine.kernels.gumbel_sample import TILE, _best_of_tile, _best_of_tiles, _gumbel, torch_gumbel_sample
from tutorial_engine.sampler import apply_min_p, truncate

GROUP = 64  # tokens per maximum
CHUNK = 16  # groups looked at together


@triton.jit
def _is_restricted(row, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size):
    """Greedy rows never are: the best token survives everything."""
    k = tl.load(top_k_ptr + row)
    less = ((k > 0) & (k < vocab_size)) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    return less & (tl.load(temperature_ptr + row) > 0.0)


@triton.jit
def _scaled(x, temperature):
    """Divided as torch divides, so that what is equal there is equal here. NaN counts as forbidden."""
    y = tl.div_rn(x.to(tl.float32), temperature)
    return tl.where(y == y, y, -float("inf"))


@triton.jit
def _weight(y, top):
    """Probability relative to the most likely token's, which may be infinite: it is 1 then, not NaN."""
    return tl.where(y == top, 1.0, tl.exp(y - top))


@triton.jit
def _key(x):
    """A float's bits as a signed number that is ordered as the floats are, -0 and 0 alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _middle(low, high):
    """The number halfway between two floats, counted in floats; above `low`, at most `high`."""
    bits = ((_key(low) + _key(high) + 1) >> 1).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunk(values_ptr, live_ptr, begin, num_live, size, temperature, LISTED: tl.constexpr, CHUNK: tl.constexpr,
                GROUP: tl.constexpr):
    """Values and indices of some groups, [CHUNK, GROUP]: those listed at live_ptr, or simply the next ones."""
    group = begin + tl.arange(0, CHUNK)
    inside = group < num_live
    if LISTED:
        group = tl.load(live_ptr + group, mask=inside, other=0)
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(values_ptr + index, mask=inside[:, None] & (index < size), other=-float("inf"))
    return _scaled(x, temperature), index


@triton.jit
def _measure(values_ptr, live_ptr, num_live, size, temperature, top, pivot, BY_MASS: tl.constexpr,
             LISTED: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Count or mass of the values that reach the pivot, the least of them, and the greatest of the others."""
    total = tl.zeros([CHUNK, GROUP], tl.float32)  # counts too: exact up to 2^24
    least = tl.full([CHUNK, GROUP], float("inf"), tl.float32)
    greatest = tl.full([CHUNK, GROUP], -float("inf"), tl.float32)
    for begin in range(0, num_live, CHUNK):
        y, _ = _load_chunk(values_ptr, live_ptr, begin, num_live, size, temperature, LISTED, CHUNK, GROUP)
        reaches = y >= pivot
        if BY_MASS:
            total += tl.where(reaches, _weight(y, top), 0.0)
        else:
            total += tl.where(reaches, 1.0, 0.0)
        least = tl.minimum(least, tl.where(reaches, y, float("inf")))
        greatest = tl.maximum(greatest, tl.where(reaches, -float("inf"), y))
    return tl.sum(total), tl.min(least), tl.max(greatest)


@triton.jit
def _raise_floor(floor, values_ptr, live_ptr, num_live, size, temperature, top, target, BY_MASS: tl.constexpr,
                 LISTED: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The largest value whose measure reaches the target, or the old floor if none does; and the measure above it."""
    low, high, above = floor, top, target * 0.0
    while low < high:
        pivot = _middle(low, high)
        total, least, greatest = _measure(values_ptr, live_ptr, num_live, size, temperature, top, pivot, BY_MASS,
                                          LISTED, CHUNK, GROUP)
        enough = total >= target
        low, high = tl.where(enough, least, low), tl.where(enough, high, greatest)
        above = tl.where(enough, above, total)
    return low, above


@triton.jit
def _list_live(maxima_ptr, live_ptr, num_groups, temperature, floor, BLOCK: tl.constexpr):
    """Writes the numbers of the groups that have a value at the floor or above, in order. Returns how many."""
    tl.debug_barrier()  # until everyone has read the old list
    count = 0
    for begin in range(0, num_groups, BLOCK):
        group = begin + tl.arange(0, BLOCK)
        x = tl.load(maxima_ptr + group, mask=group < num_groups, other=-float("inf"))
        alive = ((_scaled(x, temperature) >= floor) & (group < num_groups)).to(tl.int32)
        tl.store(live_ptr + count + tl.cumsum(alive, axis=0) - alive, group, mask=alive > 0)
        count += tl.sum(alive, axis=0)
    tl.debug_barrier()  # until all of the new one is there
    return count


@triton.jit
def _draw(logits_ptr, live_ptr, num_live, vocab_size, temperature, key, top, floor, above, target,
          CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Gumbel-max among the tokens above the floor, and those at the floor that top_p still needs, lowest id first."""
    best, winner, equals_seen = -float("inf"), 0, 0
    weight = _weight(floor, top)
    for begin in range(0, num_live, CHUNK):
        y, token = _load_chunk(logits_ptr, live_ptr, begin, num_live, vocab_size, temperature, True, CHUNK, GROUP)
        equal = (y == floor).to(tl.int32)
        rank = tl.reshape(tl.cumsum(tl.reshape(equal, [CHUNK * GROUP]), axis=0), [CHUNK, GROUP]) - 1 + equals_seen
        needed = (rank == 0) | (above + rank.to(tl.float32) * weight < target)
        y = tl.where((y > floor) | ((y == floor) & needed), y + _gumbel(key, token), -float("inf"))
        chunk_best = tl.max(y)
        first = tl.min(tl.where(y == chunk_best, token, vocab_size))
        winner, best = tl.where(chunk_best > best, first, winner), tl.maximum(best, chunk_best)
        equals_seen += tl.sum(equal)
    return winner


@triton.jit
def _first_look(logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, keys_ptr, best_ptr, token_ptr,
                maxima_ptr, vocab_size, num_tiles, num_groups, TILE: tl.constexpr, GROUP: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_restricted(row, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size):
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + row * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        x = x.to(tl.float32)
        largest = tl.max(tl.where(x == x, x, -float("inf")), axis=1)
        tl.store(maxima_ptr + row * num_groups + group, largest, mask=group < num_groups)
    else:
        _best_of_tile(logits_ptr, temperature_ptr, keys_ptr, best_ptr, token_ptr, vocab_size, num_tiles, TILE)


@triton.jit
def _sample(logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, keys_ptr, best_ptr, token_ptr, maxima_ptr,
            live_ptr, out_ptr, vocab_size, num_tiles, num_groups, TILES: tl.constexpr, CHUNK: tl.constexpr,
            GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if _is_restricted(row, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size):
        temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
        k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        logits_ptr += row * vocab_size
        maxima_ptr += row * num_groups
        live_ptr += row * num_groups
        maxima_chunks = tl.cdiv(num_groups, GROUP)
        # No value reaches NaN: the greatest of the others is the row's maximum.
        _, _, top = _measure(maxima_ptr, live_ptr, maxima_chunks, num_groups, temperature, 0.0, float("nan"), False,
                             False, CHUNK, GROUP)
        floor = -float("inf")
        if min_p > 0.0:
            floor = top + tl.log(min_p)
        if (k > 0) & (k < vocab_size):
            floor, _ = _raise_floor(floor, maxima_ptr, live_ptr, maxima_chunks, num_groups, temperature, top,
                                    k.to(tl.float32), False, False, CHUNK, GROUP)
        num_live = _list_live(maxima_ptr, live_ptr, num_groups, temperature, floor, BLOCK)
        if (k > 0) & (k < vocab_size):
            floor, _ = _raise_floor(floor, logits_ptr, live_ptr, num_live, vocab_size, temperature, top,
                                    k.to(tl.float32), False, True, CHUNK, GROUP)
        above, target = 0.0, float("inf")  # all that tie with the k-th are kept
        if p < 1.0:
            mass, _, _ = _measure(logits_ptr, live_ptr, num_live, vocab_size, temperature, top, floor, True, True,
                                  CHUNK, GROUP)
            target = p * mass
            floor, _ = _raise_floor(floor, maxima_ptr, live_ptr, maxima_chunks, num_groups, temperature, top, target,
                                    True, False, CHUNK, GROUP)
            num_live = _list_live(maxima_ptr, live_ptr, num_groups, temperature, floor, BLOCK)
            floor, above = _raise_floor(floor, logits_ptr, live_ptr, num_live, vocab_size, temperature, top, target,
                                        True, True, CHUNK, GROUP)
        winner = _draw(logits_ptr, live_ptr, num_live, vocab_size, temperature, tl.load(keys_ptr + row), top, floor,
                       above, target, CHUNK, GROUP)
        tl.store(out_ptr + row, winner.to(tl.int64))
    else:
        _best_of_tiles(best_ptr, token_ptr, out_ptr, num_tiles, TILES)


def top_k_top_p_sample(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor,
                       top_p: torch.Tensor, noise_keys: torch.Tensor) -> torch.Tensor:
    """One token per row, in two launches that never depend on what the buffers hold: a CUDA graph may record them.

    Args:
        logits: [rows, vocab_size], contiguous, any float dtype.
        temperature: [rows] float32, 0 for greedy.
        min_p: [rows] float32, 0 for off. top_k: [rows] int32 or int64, 0, less, or vocab_size and more for off.
        top_p: [rows] float32 in (0, 1], 1 for off.
        noise_keys: [rows] int64, from `sampler.noise_key`.

    Returns:
        [rows] int64 token ids, on the same device.

    Raises:
        TypeError, ValueError: an argument of another dtype, shape or device.
    """
    check_tensor("logits", logits, (torch.float32, torch.float16, torch.bfloat16), (-1, -1))
    rows, vocab_size = logits.shape
    for name, tensor, dtypes in (("temperature", temperature, (torch.float32,)), ("min_p", min_p, (torch.float32,)),
                                 ("top_k", top_k, (torch.int32, torch.int64)), ("top_p", top_p, (torch.float32,)),
                                 ("noise_keys", noise_keys, (torch.int64,))):
        check_tensor(name, tensor, dtypes, (rows,), logits.device)
    num_tiles, num_groups = triton.cdiv(vocab_size, TILE), triton.cdiv(vocab_size, GROUP)
    best, maxima = (torch.empty(rows, n, dtype=torch.float32, device=logits.device) for n in (num_tiles, num_groups))
    token, live = (torch.empty(rows, n, dtype=torch.int32, device=logits.device) for n in (num_tiles, num_groups))
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    wishes = (temperature, min_p, top_k, top_p, noise_keys)
    _first_look[(rows, num_tiles)](logits, *wishes, best, token, maxima, vocab_size, num_tiles, num_groups, TILE=TILE,
                                   GROUP=GROUP, num_warps=4)
    _sample[(rows,)](logits, *wishes, best, token, maxima, live, out, vocab_size, num_tiles, num_groups,
                     TILES=triton.next_power_of_2(num_tiles), CHUNK=CHUNK, GROUP=GROUP, BLOCK=1024, num_warps=8)
    return out


def torch_top_k_top_p_sample(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor,
                             top_k: torch.Tensor, top_p: torch.Tensor, noise_keys: torch.Tensor) -> torch.Tensor:
    """The same with the sampler's functions, which sort whole rows."""
    vocab_size = logits.shape[1]
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    greedy = temperature <= 0
    scaled = x / temperature.masked_fill(greedy, 1.0)[:, None]
    apply_min_p(scaled, min_p[:, None])
    ks = [k if 0 < k < vocab_size else vocab_size for k in top_k.tolist()]
    kept = truncate(scaled, ks, top_p.tolist())
    one = torch.ones_like(temperature)
    return torch.where(greedy, x.argmax(dim=-1), torch_gumbel_sample(kept, one, noise_keys))
