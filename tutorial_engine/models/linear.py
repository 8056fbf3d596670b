"""A matrix multiplication with its weight laid out for the device.

    y = x W^T        W [out_features, in_features]

Why a class for that? Decoding multiplies a few rows with every weight of the model, so it lives on memory bandwidth,
and on a CPU the default `F.linear` wastes half of it. Two layouts do better there in float32:

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

    `weight` exists from the first call of `rows`, until other layouts have taken its place.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
                 ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.device = dtype, device
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.weight: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        self.slabs: torch.Tensor | None = None

    def rows(self, begin: int, count: int) -> torch.Tensor:
        """View of some rows of W, to load a checkpoint's matrix into."""
        if self.weight is None:
            self.weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.device)
        return self.weight[begin:begin + count]

    def pack(self) -> None:
        """Choose the layout; called once, after the weights are loaded."""
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        if on_cpu and torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def _cut_slabs(self) -> torch.Tensor:
        """[num_slabs, in_features, out_features / num_slabs]; made when the first single row comes, in W's stead."""
        num_slabs = math.gcd(torch.get_num_threads(), self.out_features)
        slabs = self.weight.view(num_slabs, -1, self.in_features).transpose(1, 2).contiguous()
        self.weight = None
        return slabs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] > 1:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.slabs is None:
            self.slabs = self._cut_slabs()
        y = torch.bmm(x.expand(len(self.slabs), 1, -1), self.slabs).view(1, -1)
        return y if self.bias is None else y.add_(self.bias)
