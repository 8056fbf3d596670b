"""One row times a matrix, and what surrounds it: the products of a step that serves a single request.

    y = f(x) W^T       W [num_out, num_in], read once: that is all the time there is
         |
         +-- norm:   x + residual, RMSNorm        qkv and gate/up projection
         +-- silu:   silu(gate) * up              down projection
         +-- plain                                output projection

A program takes a few rows of W and the whole of x. Everything that f does to x is done again by each program, while it
waits for W: cheaper than a launch of its own, because x comes from the cache and W does not. A norm's scale is a single
number, so it is applied to the sums at the end, and the row is passed over once:

    sum_k (x_k * scale * norm_k) W_nk = scale * sum_k (x_k * norm_k) W_nk

With more rows a tile of W is worth loading into a tensor core, and cuBLAS does that better; for an LM head it is as
good. Twin: `torch_matvec`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def _matvec(x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, sum_ptr, eps, num_out, num_in,
            INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    program = tl.program_id(0)
    row = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_row = weight_ptr + row[:, None].to(tl.int64) * num_in
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for begin in range(0, num_in, BLOCK_IN):
        column = begin + tl.arange(0, BLOCK_IN)
        inside = column < num_in
        w = tl.load(weight_row + column[None, :], mask=(row < num_out)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        dtype = x_ptr.dtype.element_ty
        if INPUT == "norm":
            x += tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = x.to(dtype).to(tl.float32)
            if program == 0:  # others may still read the old sum, so the new one goes to another place
                tl.store(sum_ptr + column, x, mask=inside)
            squares += x * x
            x *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        elif INPUT == "silu":
            up = tl.load(x_ptr + num_in + column, mask=inside, other=0.0).to(tl.float32)
            x = (x * tl.sigmoid(x) * up).to(dtype).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, axis=1)
    if INPUT == "norm":
        y *= tl.rsqrt(tl.sum(squares, axis=0) / num_in + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y, mask=row < num_out)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str,
            residual: torch.Tensor | None = None, norm: torch.Tensor | None = None, eps: float = 0.0
            ) -> tuple[torch.Tensor, torch.Tensor]:
    num_out, num_in = weight.shape
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(x) if residual is not None else x
    # Measured: few rows a program where there are few, so that all of the GPU has something to read.
    block_out = 8 if weight.numel() >= 1 << 25 else 4 if num_out >= 2048 else 2
    block_in = min(1024, triton.next_power_of_2(num_in))
    _matvec[(triton.cdiv(num_out, block_out),)](
        x, weight, bias if bias is not None else x, residual if residual is not None else x,
        norm if norm is not None else x, out, new_residual, eps, num_out, num_in, INPUT=kind,
        HAS_BIAS=bias is not None, BLOCK_OUT=block_out, BLOCK_IN=block_in, num_warps=4)
    return out, new_residual


def matvec(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [1, num_in] times weight [num_out, num_in], plus bias [num_out] -> [1, num_out]. All contiguous, of one dtype;
    the sum is in float32."""
    return _launch(x, weight, bias, "plain")[0]


def norm_matvec(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor,
                bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for rms_norm(x + residual) * norm. x, residual: [1, num_in]. norm: [num_in].

    Returns:
        (product [1, num_out], x + residual [1, num_in]).
    """
    return _launch(x, weight, bias, "norm", residual, norm, eps)


def silu_matvec(gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same for silu(gate) * up. gate_up: [1, 2 * num_in]."""
    return _launch(gate_up, weight, bias, "silu")[0]


def torch_matvec(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`matvec` in float32 from start to end; what comes before it is `torch_add_rms_norm` or `torch_silu_mul`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
