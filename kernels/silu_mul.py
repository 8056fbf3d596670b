"""SwiGLU's middle: silu(gate) * up, read once and written once.

    gate_up   [ gate ........ | up .......... ]     one row of the fused projection
    out       [ silu(gate) * up ]                   silu(x) = x * sigmoid(x)

In torch this is three launches and two temporaries as wide as the MLP; here one launch, nothing in between.

SwiGLU: Shazeer, arXiv 2002.05202. Twin: `torch_silu_mul`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [num_tokens, 2 * intermediate_size], contiguous -> [num_tokens, intermediate_size]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(num_tokens, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


def torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same from the definition, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
