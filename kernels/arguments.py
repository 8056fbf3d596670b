"""What a kernel is given, checked before it runs: on a GPU a wrong shape reads a stranger's memory and says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_tensor(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int],
                 device: torch.device | None = None) -> None:
    """Raise if a tensor is not what a kernel is written for. Looks at no value, so the host never waits.

    Args:
        dtypes: that it may have. shape: sizes, -1 for any. device: where it must be; None for anywhere.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, another device, or not contiguous.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, got {got}.")
    wanted = [size if expected == -1 else expected for size, expected in zip(tensor.shape, shape)]
    if tensor.dim() != len(shape) or list(tensor.shape) != wanted:
        sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must have the shape [{sizes}], got {list(tensor.shape)}.")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, like the other arguments, got {tensor.device}.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous: call .contiguous() on it.")
