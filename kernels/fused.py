"""The kernels that a step of the decoder is made of, by the names it calls them.

A product comes with what stands before it, because for a single row the two are one kernel (`matvec.py`).
"""

import torch

from tutorial_engine.kernels.decode_attention import decode_attention as decode_attention
from tutorial_engine.kernels.matvec import matvec, norm_matvec, silu_matvec
from tutorial_engine.kernels.prefill_attention import cut_tiles as cut_tiles
from tutorial_engine.kernels.prefill_attention import max_tiles as max_tiles
from tutorial_engine.kernels.prefill_attention import prefill_attention as prefill_attention
from tutorial_engine.kernels.rms_norm import add_rms_norm as add_rms_norm
from tutorial_engine.kernels.rope_kv_write import rope_kv_write as rope_kv_write
from tutorial_engine.kernels.silu_mul import silu_mul
from tutorial_engine.kernels.top_k_top_p_sample import top_k_top_p_sample as top_k_top_p_sample
from tutorial_engine.models.linear import Linear


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x [num_tokens, in_features] -> [num_tokens, out_features]."""
    return matvec(x, layer.weight, layer.bias) if len(x) == 1 else layer(x)


def norm_linear(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, layer: Linear
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer(rms_norm(x + residual) * norm), x + residual). `residual` may be changed in place."""
    if len(x) == 1:
        return norm_matvec(x, residual, norm, eps, layer.weight, layer.bias)
    return layer(add_rms_norm(x, residual, norm, eps)), residual


def silu_linear(gate_up: torch.Tensor, layer: Linear) -> torch.Tensor:
    """layer(silu(gate) * up). gate_up: [num_tokens, 2 * in_features]."""
    return silu_matvec(gate_up, layer.weight, layer.bias) if len(gate_up) == 1 else layer(silu_mul(gate_up))
