"""Weights in half a byte each: y = x W^T for a handful of rows, reading less than a third of what float16 does.

    32 weights of a row share a scale s and a minimum m:       W = m + s * q,   q from 0 to 15

    a group's 16 bytes     [ byte 0       | byte 1       | .. | byte 15       ]
      low half                q[0]           q[1]                q[15]
      high half               q[16]          q[17]               q[31]            5 bits per weight with s and m

Low and high halves are two plain runs of weights, so nothing has to be woven together: each is multiplied with its own
run of x. This is also the order of llama.cpp's Q4_1, so a file of that kind could be used as it lies.

A weight is off by about s / 2 at most, as it lies between its group's extremes (a bit more where float16 rounds the
minimum); whole rows (as in `int8_matvec`) would be
too coarse for 16 steps (groups: Frantar et al., arXiv 2210.17323, section 4; Lin et al., arXiv 2306.00978).
How the work is divided is the same as in `int8_matvec`; like it, no model uses this yet. Twin: `torch_int4_matvec`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.arguments import check_tensor
from tutorial_engine.kernels.int8_matvec import ACTIVATIONS, check_rows, num_splits, sum_splits

GROUP = 32  # weights that share a scale


@triton.jit
def _load_weights(packed_ptr, scale_ptr, minimum_ptr, out, group, num_out, num_groups, HALF: tl.constexpr):
    """Low and high halves of some groups, [outputs, groups, HALF] float32."""
    at = out.to(tl.int64)[:, None] * num_groups + group[None, :]
    inside = (out < num_out)[:, None] & (group < num_groups)[None, :]
    s = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    m = tl.load(minimum_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    packed = tl.load(packed_ptr + at[:, :, None] * HALF + tl.arange(0, HALF)[None, None, :], mask=inside[:, :, None],
                     other=0)
    return m + s * (packed & 15).to(tl.float32), m + s * (packed >> 4).to(tl.float32)


@triton.jit
def _dot(x_ptr, packed_ptr, scale_ptr, minimum_ptr, out_ptr, num_rows, num_out, num_groups, share,
         ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    out, row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS)
    split = tl.program_id(1)
    acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    i = tl.arange(0, GROUPS * HALF)
    for begin in range(split * share, tl.minimum((split + 1) * share, num_groups), GROUPS):
        low, high = _load_weights(packed_ptr, scale_ptr, minimum_ptr, out, begin + tl.arange(0, GROUPS), num_out,
                                  num_groups, HALF)
        column = (begin + i // HALF) * 2 * HALF + i % HALF
        mask = (row < num_rows)[None, :] & (column < num_groups * 2 * HALF)[:, None]
        x_ptrs = x_ptr + row[None, :] * num_groups * 2 * HALF + column[:, None]
        x_low, x_high = tl.load(x_ptrs, mask=mask, other=0.0), tl.load(x_ptrs + HALF, mask=mask, other=0.0)
        low = tl.reshape(low.to(x_low.dtype), [BLOCK_OUT, GROUPS * HALF])
        high = tl.reshape(high.to(x_low.dtype), [BLOCK_OUT, GROUPS * HALF])
        acc += tl.dot(low, x_low, input_precision="ieee") + tl.dot(high, x_high, input_precision="ieee")
    target = out_ptr + (split * num_rows + row)[None, :] * num_out + out[:, None]
    tl.store(target, acc, mask=(out < num_out)[:, None] & (row < num_rows)[None, :])


@triton.jit
def _no_dot(x_ptr, packed_ptr, scale_ptr, minimum_ptr, out_ptr, num_rows, num_out, num_groups, share,
            ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out, split = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(2)
    acc = tl.zeros([ROWS, BLOCK_OUT, GROUPS, HALF], tl.float32)
    for begin in range(split * share, tl.minimum((split + 1) * share, num_groups), GROUPS):
        group = begin + tl.arange(0, GROUPS)
        low, high = _load_weights(packed_ptr, scale_ptr, minimum_ptr, out, group, num_out, num_groups, HALF)
        column = group[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]
        mask = (row < num_rows)[:, None, None] & (group < num_groups)[None, :, None]
        x_ptrs = x_ptr + row[:, None, None] * num_groups * 2 * HALF + column[None, :, :]
        x_low = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        x_high = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        acc += low[None, :, :, :] * x_low[:, None, :, :] + high[None, :, :, :] * x_high[:, None, :, :]
    y = tl.sum(tl.sum(acc, axis=3), axis=2)
    target = out_ptr + (split * num_rows + row)[:, None] * num_out + out[None, :]
    tl.store(target, y, mask=(row < num_rows)[:, None] & (out < num_out)[None, :])


def int4_matvec(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor,
                use_dot: bool = True) -> torch.Tensor:
    """x W^T for up to 16 rows, W = minimum + scale * nibble.

    Args:
        x: [rows, in_features], contiguous, any float dtype; in_features a multiple of 32.
        packed: [out_features, in_features / 2] uint8. scale, minimum: [out_features, in_features / 32] float16; all
            three from `quantize_int4`.
        use_dot: tensor cores, for compute capability >= 8.0; a weight is then rounded to x's dtype.

    Returns:
        [rows, out_features] in x's dtype; sums are in float32.

    Raises:
        TypeError, ValueError: an argument of another dtype, shape or device, or more than 16 rows.
    """
    check_tensor("scale", scale, (torch.float16,), (-1, -1))
    num_out, num_groups = scale.shape
    check_tensor("minimum", minimum, (torch.float16,), (num_out, num_groups), scale.device)
    check_tensor("packed", packed, (torch.uint8,), (num_out, num_groups * GROUP // 2), scale.device)
    check_tensor("x", x, ACTIVATIONS, (-1, num_groups * GROUP), scale.device)
    num_rows = check_rows(x)
    block_out, groups = (64, 4) if use_dot else (8, 8)
    num_tiles = triton.cdiv(num_out, block_out)
    splits = num_splits(num_tiles, num_groups * GROUP)
    share = triton.cdiv(triton.cdiv(num_groups, splits), groups) * groups
    part = torch.empty(splits, num_rows, num_out, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    args = (x, packed, scale, minimum, part, num_rows, num_out, num_groups, share)
    sizes = {"BLOCK_OUT": block_out, "GROUPS": groups, "HALF": GROUP // 2, "num_warps": 4}
    if use_dot:
        _dot[(num_tiles, splits)](*args, ROWS=16, **sizes, num_stages=4)
    else:
        rows = min(4, triton.next_power_of_2(num_rows))
        _no_dot[(triton.cdiv(num_rows, rows), num_tiles, splits)](*args, ROWS=rows, **sizes)
    return part[0] if splits == 1 else sum_splits(part, x.dtype)


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Args: weight [out_features, in_features], finite, in_features a multiple of 32.

    Returns:
        (packed [out_features, in_features / 2] uint8, scale and minimum [out_features, in_features / 32] float16).
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"in_features must be a multiple of {GROUP}, got {weight.shape[1]}.")
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, greatest = groups.aminmax(dim=2)
    minimum, scale = least.half(), ((greatest - least) / 15).half()
    scale[scale == 0] = 1.0  # all of a group alike
    # The rounded scale and minimum are what the kernel will use, so the steps are counted with them.
    q = ((groups - minimum.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
    return (q[..., :GROUP // 2] | q[..., GROUP // 2:] << 4).flatten(1), scale, minimum


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Back to [out_features, in_features] float32."""
    packed = packed.unflatten(1, (-1, GROUP // 2))
    q = torch.cat([packed & 15, packed >> 4], dim=2).float()
    return (minimum.float()[..., None] + scale.float()[..., None] * q).flatten(1)


def torch_int4_matvec(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
                      ) -> torch.Tensor:
    """The same from the definition, in float32."""
    return (x.float() @ dequantize_int4(packed, scale, minimum).t()).to(x.dtype)
