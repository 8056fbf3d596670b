"""A matrix multiplication with its weight laid out for the device.

    y = x W^T        W [out_features, in_features]

Why a class for that? Decoding multiplies a few rows with every weight of the model, so it lives on memory bandwidth, and
on a CPU the default `F.linear` wastes half of it. Two layouts do better there in float32:

* a few rows and more: oneDNN's blocked layout, packed once at load.
* a single row: W^T cut into one slab per thread. A product of a vector and a matrix is otherwise run by one thread.

They cost a second copy of the weights. Anything else (GPU, bfloat16, a torch without oneDNN) uses `F.linear`.
Owns: layouts. Does not own: what the weights mean (`decoder.py`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        in_features, out_features: sizes.
        bias: whether there is a b.

    `weight` is there until `pack()`, which may trade it for faster layouts.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
                 ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: torch.Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.packed: torch.Tensor | None = None
        self.slabs: torch.Tensor | None = None

    def pack(self) -> None:
        """Choose the layout; called once, after the weights are loaded."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        num_slabs = math.gcd(torch.get_num_threads(), self.out_features)
        # [num_slabs, in_features, out_features / num_slabs]
        self.slabs = weight.view(num_slabs, -1, self.in_features).transpose(1, 2).contiguous()
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] == 1:
            y = torch.bmm(x.expand(len(self.slabs), 1, -1), self.slabs).view(1, -1)
            return y if self.bias is None else y.add_(self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
