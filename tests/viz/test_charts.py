"""The pictures of plain numbers: acceptance and roofline."""

import re

import pytest

from tests.viz.support import words
from tutorial_engine.viz import acceptance, roofline
from tutorial_engine.viz.roofline import GPU, GPUS


def test_acceptance_by_position() -> None:
    picture = acceptance([100, 90, 80], [84, 60, 0])
    assert picture.text.splitlines() == [
        "144 of 270 drafted tokens accepted (53.3 %): 2.44 tokens a step instead of 1",
        "",
        "position  accepted  of",
        "       0        84  100 (84 %)",
        "       1        60  90 (66.7 %)",
        "       2         0  80 (0 %)"]
    assert {"84 %", "66.7 %", "0 %", "84 of 100", "position 2"} <= set(words(picture.svg))
    heights = [float(h) for h in re.findall(r'<rect class="p2" [^>]*height="([\d.]+)"', picture.svg)]
    assert heights[1] / heights[0] == pytest.approx((60 / 90) / 0.84, rel=1e-3)


@pytest.mark.parametrize("proposed, accepted, message", [
    ([], [], "one number for each position"), ([3], [1, 1], "one number for each position"),
    ([3], [4], "at most as many"), ([3], [-1], "at most as many"), ([0], [0], "at most as many"),
    ([3, 4], [1, 1], "proposed must not grow"), ([3, 3], [1, 2], "accepted must not grow")])
def test_numbers_that_cannot_be(proposed: list[int], accepted: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        acceptance(proposed, accepted)


def test_ridges() -> None:
    """FLOP per byte at 16 bits: T4 203, A100 (80 GB) 153, H100 295, H200 206."""
    assert {name: round(gpu.ridge) for name, gpu in GPUS.items()} == {"T4": 203, "A100": 153, "H100": 295, "H200": 206}
    assert GPU(100, 10).attainable(2) == 20 and GPU(100, 10).attainable(50) == 100


def test_where_a_computation_stands() -> None:
    picture = roofline({"decode": 1, "prefill": (900, 4e14)}, {"A100": GPUS["A100"]})
    assert picture.text.splitlines() == [
        "Roofline: A100 turns at 153 FLOP a byte", "",
        "A100: peak 312 TFLOP/s, memory 2.04 TB/s", "",
        "decode: 1 FLOP a byte", "  on A100 at most 2.04 TFLOP/s, limited by memory", "",
        "prefill: 900 FLOP a byte, measured 400 TFLOP/s", "  on A100 at most 312 TFLOP/s, limited by arithmetic"]
    assert {"decode: 1", "prefill: 900", "A100: 312 TFLOP/s"} <= set(words(picture.svg))


def test_the_roof_bends_at_the_ridge() -> None:
    """On logarithmic axes the slope left of it is 1, and right of it 0."""
    path = re.search(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)H([\d.]+)"', roofline(gpus={"T4": GPUS["T4"]}).svg)
    x0, y0, x1, y1, x2 = map(float, path.groups())
    decades = (x1 - x0) / (560 / 4.5), (y0 - y1) / (300 / 4.3)
    assert decades[0] == pytest.approx(decades[1], rel=0.01) and x0 < x1 < x2


@pytest.mark.parametrize("points", [{"x": 0}, {"x": -1.0}, {"x": (1, 0)}])
def test_points_that_cannot_be(points: dict) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        roofline(points)
    with pytest.raises(ValueError, match="at least one GPU"):
        roofline(gpus={})
