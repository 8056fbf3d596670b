"""Weights in eight and in four bits: what rounding costs, and the kernels against their twins."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
from tutorial_engine.kernels import int4_matvec as int4
from tutorial_engine.kernels import int8_matvec as int8


def weights(num_out: int, num_in: int) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, one with an outlier, one of a single value."""
    torch.manual_seed(0)
    w = torch.randn(num_out, num_in) * torch.logspace(-3, 1, num_out)[:, None]
    w[0], w[1, 5], w[2] = 0.0, 1000.0, -0.7
    return w


def test_int8_is_off_by_half_a_step_at_most() -> None:
    w = weights(40, 96)
    q, scale = int8.quantize_int8(w)
    back = int8.dequantize_int8(q, scale)
    assert ((back - w).abs() <= scale[:, None] * 0.5001).all()
    assert (back[0] == 0).all() and back[1, 5] == 1000.0 and int(q.min()) >= -127


def test_int4_is_off_by_half_a_step_at_most() -> None:
    """And by what float16 makes of the scale and the minimum, 2^-11 of each."""
    w = weights(40, 96)
    packed, scale, minimum = int4.quantize_int4(w)
    assert packed.shape == (40, 48) and scale.shape == minimum.shape == (40, 3)
    step, least = scale.float().repeat_interleave(32, dim=1), minimum.float().repeat_interleave(32, dim=1)
    bound = step * (0.5001 + 15 * 2**-11) + least.abs() * 2**-11 + 1e-7
    back = int4.dequantize_int4(packed, scale, minimum)
    assert ((back - w).abs() <= bound).all()
    assert (back[0] == 0).all()


def test_int4_halves_are_where_the_picture_says() -> None:
    w = (torch.arange(32) % 16).float()[None].roll(3, dims=1)  # steps of exactly 1
    packed, scale, minimum = int4.quantize_int4(w)
    assert scale.item() == 1.0 and minimum.item() == 0.0
    assert (packed[0] & 15).tolist() == w[0, :16].tolist() and (packed[0] >> 4).tolist() == w[0, 16:].tolist()
    with pytest.raises(ValueError, match="in_features must be a multiple of 32, got 33"):
        int4.quantize_int4(torch.zeros(1, 33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("rows, num_out, num_in", [(1, 70, 96), (2, 8, 1120), (5, 70, 352), (16, 9, 1056)])
def test_products(dtype: torch.dtype, use_dot: bool, rows: int, num_out: int, num_in: int) -> None:
    """Sizes that fill no tile, and long inputs that are cut into parts."""
    assert (int8.num_splits(2, num_in) > 1) == (num_in > 1000)
    w, x = weights(num_out, num_in), torch.randn(rows, num_in).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 5e-4}[dtype]
    for multiply, twin, quantized in ((int8.int8_matvec, int8.torch_int8_matvec, int8.quantize_int8(w)),
                                      (int4.int4_matvec, int4.torch_int4_matvec, int4.quantize_int4(w))):
        got, right = multiply(x, *quantized, use_dot), twin(x, *quantized)
        assert got.dtype == dtype
        # The error of a sum is relative to the size of its terms, not to a result that may be near zero.
        size = x.float().norm(dim=1)[:, None] * w.norm(dim=1).clamp(min=1e-3)
        assert ((got.float() - right.float()).abs() / size).max() < tolerance


@pytest.mark.parametrize("wrong, message", [
    ({"weight": torch.zeros(8, 32)}, "weight must be a tensor of torch.int8, got torch.float32"),
    ({"x": torch.zeros(2, 31)}, r"x must have the shape \[any, 32\], got \[2, 31\]"),
    ({"x": torch.zeros(17, 32)}, "x must have 1 to 16 rows, got 17: for more, dequantise"),
    ({"x": torch.zeros(0, 32)}, "x must have 1 to 16 rows, got 0"),
    ({"scale": torch.ones(8, device="meta")}, "scale must be on cpu"),
])
def test_int8_arguments_are_checked(wrong: dict, message: str) -> None:
    right = {"x": torch.zeros(2, 32), "weight": torch.zeros(8, 32, dtype=torch.int8), "scale": torch.ones(8)}
    with pytest.raises((TypeError, ValueError), match=message):
        int8.int8_matvec(**(right | wrong))


@pytest.mark.parametrize("wrong, message", [
    ({"packed": torch.zeros(8, 32, dtype=torch.uint8)}, r"packed must have the shape \[8, 16\], got \[8, 32\]"),
    ({"minimum": torch.zeros(8, 1)}, "minimum must be a tensor of torch.float16, got torch.float32"),
    ({"x": torch.zeros(17, 32)}, "x must have 1 to 16 rows, got 17"),
])
def test_int4_arguments_are_checked(wrong: dict, message: str) -> None:
    right = {"x": torch.zeros(2, 32), "packed": torch.zeros(8, 16, dtype=torch.uint8),
             "scale": torch.ones(8, 1, dtype=torch.float16), "minimum": torch.zeros(8, 1, dtype=torch.float16)}
    with pytest.raises((TypeError, ValueError), match=message):
        int4.int4_matvec(**(right | wrong))
