"""RMSNorm, with the residual's sum in the same pass.

    without fusion            read x, read r, write r' | read r', write n          5 trips to memory per number
    here      x  -+                                                                4 trips, and one launch less
                  +-> r' = r + x -> n = r' / sqrt(mean(r'^2) + eps) * weight
              r  -+

A norm does a handful of operations per number, so memory decides its time: the sum of the residual stream is needed
anyway, and doing it here saves reading it once more. One program takes one row; a row fits into registers.

RMSNorm: Zhang and Sennrich, arXiv 1910.07467. Twin: `torch_add_rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, num_columns, eps,
                  HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * num_columns
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        # The norm sees what the next layer will see: the sum as it is stored.
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        tl.store(residual_ptr + row + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, x * scale * weight, mask=inside)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x + residual) * weight; `residual` becomes the sum, in place.

    Args:
        x: [num_tokens, hidden_size], contiguous. residual: the same shape, or None for a plain norm of x.
        weight: [hidden_size].

    Returns:
        [num_tokens, hidden_size].
    """
    out = torch.empty_like(x)
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    _add_rms_norm[(num_rows,)](x, residual if residual is not None else x, weight, out, num_columns, eps,
                               HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=4 if block <= 2048 else 8)
    return out


def torch_add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
                       ) -> torch.Tensor:
    """The same from the definition, in float32."""
    if residual is not None:
        residual += x
        x = residual
    x32 = x.float()
    return (x32 / (x32.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.float()).to(x.dtype)
