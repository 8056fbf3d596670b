"""Weights in one byte each: y = x W^T for a handful of rows, reading half as much as float16 does.

    W    [ -0.31  0.02 .. | s0 ]       q    [ -127   8 .. ]  int8        s0 = max|row 0| / 127
         [  0.07 -0.11 .. | s1 ]  =>        [   81 -127 .. ]      W[o, i] ~ s[o] * q[o, i],  off by s[o] / 2 at most

Decoding multiplies each weight with the few rows of a batch, so reading the weights is all the work there is. They are
turned back into the activations' type in registers, which no memory sees, and the scale of an output row is applied
once, to its finished sum ("W8A16"; LLM.int8(), Dettmers et al., arXiv 2208.07339, discusses scales per row).

* With tensor cores (compute capability 8.0 and up) the weights are the tall side of the product, W x^T: a tile of 64
  outputs, and the batch padded to 16 columns.
* Without them (Triton has none to offer there): multiply and sum, four rows of x at a time.
* Small matrices are cut along the input too, or most of the GPU would idle; the parts are summed by a second kernel.

For more rows than 16 this is the wrong tool: arithmetic counts then. No model uses it yet. Twin: `torch_int8_matvec`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tutorial_engine.kernels.arguments import check_tensor

ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 16
WANTED_PROGRAMS = 256  # two for each multiprocessor of a large GPU


@triton.jit
def _dot(x_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, num_out, num_in, share, ROWS: tl.constexpr,
         BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    out, row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS)
    split = tl.program_id(1)
    acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for begin in range(split * share, tl.minimum((split + 1) * share, num_in), BLOCK_IN):
        column = begin + tl.arange(0, BLOCK_IN)
        inside = column < num_in
        w = tl.load(weight_ptr + out.to(tl.int64)[:, None] * num_in + column[None, :],
                    mask=(out < num_out)[:, None] & inside[None, :], other=0)
        x = tl.load(x_ptr + row[None, :] * num_in + column[:, None],
                    mask=(row < num_rows)[None, :] & inside[:, None], other=0.0)
        acc += tl.dot(w.to(x.dtype), x, input_precision="ieee")  # whole numbers up to 127 are exact in any float type
    acc *= tl.load(scale_ptr + out, mask=out < num_out, other=0.0)[:, None]
    target = out_ptr + (split * num_rows + row)[None, :] * num_out + out[:, None]
    tl.store(target, acc, mask=(out < num_out)[:, None] & (row < num_rows)[None, :])


@triton.jit
def _no_dot(x_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, num_out, num_in, share, ROWS: tl.constexpr,
            BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    # The groups of rows come first: programs that read the same weights run at the same time.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out, split = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(2)
    acc = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)  # summed once, at the end
    for begin in range(split * share, tl.minimum((split + 1) * share, num_in), BLOCK_IN):
        column = begin + tl.arange(0, BLOCK_IN)
        inside = column < num_in
        w = tl.load(weight_ptr + out.to(tl.int64)[:, None] * num_in + column[None, :],
                    mask=(out < num_out)[:, None] & inside[None, :], other=0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * num_in + column[None, :],
                    mask=(row < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        acc += w[None, :, :] * x[:, None, :]
    y = tl.sum(acc, axis=2) * tl.load(scale_ptr + out, mask=out < num_out, other=0.0)[None, :]
    target = out_ptr + (split * num_rows + row)[:, None] * num_out + out[None, :]
    tl.store(target, y, mask=(row < num_rows)[:, None] & (out < num_out)[None, :])


@triton.jit
def _sum_splits(part_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    i, split = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    part = tl.load(part_ptr + split[:, None] * size + i[None, :], mask=(i < size)[None, :], other=0.0)
    tl.store(out_ptr + i, tl.sum(part, axis=0), mask=i < size)


def num_splits(num_tiles: int, num_in: int) -> int:
    """Parts of the input that give enough programs, none of which sums fewer than 256 numbers; a power of two."""
    splits = 1
    while splits < 16 and num_tiles * splits * 2 <= WANTED_PROGRAMS and num_in >= 512 * splits:
        splits *= 2
    return splits


def sum_splits(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """part: [splits, rows, columns] float32 -> their sum, [rows, columns]; always in the same order."""
    splits, *shape = part.shape
    out = torch.empty(shape, dtype=dtype, device=part.device)
    _sum_splits[(triton.cdiv(out.numel(), 256),)](part, out, out.numel(), SPLITS=splits, BLOCK=256, num_warps=2)
    return out


def int8_matvec(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, use_dot: bool = True) -> torch.Tensor:
    """x (scale * weight)^T for up to 16 rows.

    Args:
        x: [rows, in_features], contiguous, any float dtype. weight: [out_features, in_features] int8.
        scale: [out_features] float32; both from `quantize_int8`.
        use_dot: tensor cores, for compute capability >= 8.0.

    Returns:
        [rows, out_features] in x's dtype; sums are in float32.

    Raises:
        TypeError, ValueError: an argument of another dtype, shape or device, or more than 16 rows.
    """
    check_tensor("weight", weight, (torch.int8,), (-1, -1))
    num_out, num_in = weight.shape
    check_tensor("x", x, ACTIVATIONS, (-1, num_in), weight.device)
    check_tensor("scale", scale, (torch.float32,), (num_out,), weight.device)
    num_rows = check_rows(x)
    block_out, block_in = (64, 128) if use_dot else (8, 256)
    num_tiles = triton.cdiv(num_out, block_out)
    splits = num_splits(num_tiles, num_in)
    share = triton.cdiv(triton.cdiv(num_in, splits), block_in) * block_in
    part = torch.empty(splits, num_rows, num_out, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    args = (x, weight, scale, part, num_rows, num_out, num_in, share)
    if use_dot:
        _dot[(num_tiles, splits)](*args, ROWS=16, BLOCK_OUT=block_out, BLOCK_IN=block_in, num_warps=4, num_stages=4)
    else:
        rows = min(4, triton.next_power_of_2(num_rows))
        _no_dot[(triton.cdiv(num_rows, rows), num_tiles, splits)](*args, ROWS=rows, BLOCK_OUT=block_out,
                                                                  BLOCK_IN=block_in, num_warps=4)
    return part[0] if splits == 1 else sum_splits(part, x.dtype)


def check_rows(x: torch.Tensor) -> int:
    """Number of rows. Raises ValueError for none, and for more than these kernels are made for."""
    if not 1 <= len(x) <= MAX_ROWS:
        raise ValueError(f"x must have 1 to {MAX_ROWS} rows, got {len(x)}: for more, dequantise the weight and use a "
                         "matrix product.")
    return len(x)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out_features, in_features], finite -> (the same as int8, scales [out_features] float32)."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    scale[scale == 0] = 1.0  # a row of zeros
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Back to [out_features, in_features] float32."""
    return weight.float() * scale[:, None]


def torch_int8_matvec(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same from the definition, in float32."""
    return (x.float() @ dequantize_int8(weight, scale).t()).to(x.dtype)
