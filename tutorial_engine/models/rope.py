"""Rotary position embedding: the angles, and how long-context models stretch them.

Pair i of a head is a point in the plane; at position p it is turned by p * inv_freq[i]. The dot product of two turned
points depends only on the distance of their positions (Su et al., RoFormer, arXiv 2104.09864). To serve contexts longer
than those seen in training, the turning is slowed down:

    linear   every frequency by the same factor                                     (Chen et al., arXiv 2306.15595)
    llama3   only slow frequencies, those that turn less than about once in the old context
    yarn     a ramp between the two, and slightly sharper attention                 (Peng et al., arXiv 2309.00071)

Owns: cos and sin tables. Does not own: reading the config (`config.py`) or calling it per layer (`decoder.py`).
"""

from __future__ import annotations

import math

import torch

from tutorial_engine.models.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Turning speed of each pair, and the factor on cos and sin (1 unless yarn).

    Returns:
        (inv_freq [head_dim // 2] float32 in radians per position, attention_factor).
    """
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {"rope_type": "default"}
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = scaling["rope_type"]
    if kind == "linear":
        return inv_freq / scaling["factor"], 1.0
    if kind == "factors":
        return inv_freq / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        factor = scaling["factor"]
        attention_factor = scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        return _yarn(inv_freq, scaling, dim, base), attention_factor
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Slow pairs are slowed by `factor`, fast ones are kept, those between are blended."""
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # full turns in the old context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / scaling["factor"] + keep * inv_freq


def _yarn(inv_freq: torch.Tensor, scaling: dict, dim: int, base: float) -> torch.Tensor:
    """Blend by pair index: below `low` keep (more than beta_fast turns), above `high` slow down fully."""

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling["original_max_position_embeddings"] / turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_with_turns(scaling.get("beta_slow") or 1)), dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return slow * inv_freq / scaling["factor"] + (1 - slow) * inv_freq


class RotaryEmbedding:
    """cos and sin of every position, computed once.

    Args:
        max_positions: longest sequence; the tables have this many rows.
    """

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, attention_factor = rope_frequencies(config)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq  # [max_positions, head_dim // 2]
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        # As wide as a head, with the sign that each half needs, so that `apply_rope` is three operations.
        self.cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin), each [num_tokens, 1, head_dim], ready to multiply heads with."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle. x: [num_tokens, num_heads, head_dim]."""
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): rolling by half a head brings each number's partner to it.
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
