"""The roofline: what limits a computation, arithmetic or memory?

    speed = min(peak, intensity × bandwidth)          intensity: floating-point operations for each byte read

Left of the ridge (peak ÷ bandwidth) a GPU waits for its memory, right of it for its arithmetic units. Decoding one
sequence reads each weight (2 bytes) for one multiply-add (2 operations): an intensity of 1, far to the left. A batch of
n reads the same weights for n times the work: an intensity of about n. Prefill is a batch of many tokens of one
sequence. The model is that of Williams, Waterman and Patterson, CACM 2009. It is a ceiling: real kernels are slower,
and a small model on a large GPU is limited by starting them.

Owns: this picture, the GPUs' numbers. Does not own: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tutorial_engine.viz.palette import NUM_COLORS
from tutorial_engine.viz.picture import Picture, box, document, text

LEFT, TOP, PLOT, HEIGHT, WIDTH = 72, 62, 560, 300, 844  # pixels
LOW_X, HIGH_X, LOW_Y, HIGH_Y = -0.5, 4.0, 11.0, 15.3  # powers of ten: FLOP per byte, FLOP per second


class GPU(NamedTuple):
    """Peak speed in FLOP/s (16-bit floats, dense: without counting skipped zeros twice) and bandwidth in bytes/s."""

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic is the limit."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        return min(self.flops, intensity * self.bandwidth)


# From NVIDIA's data sheets, "T4", "A100 80GB SXM", "H100 SXM" and "H200 SXM". Those of H100 and H200 print numbers with
# sparsity, which are twice as high.
GPUS = {"T4": GPU(65e12, 320e9), "A100": GPU(312e12, 2039e9), "H100": GPU(989.4e12, 3.35e12),
        "H200": GPU(989.4e12, 4.8e12)}  # fmt: skip


def roofline(points: Mapping[str, float | tuple[float, float]] | None = None, gpus: Mapping[str, GPU] = GPUS
             ) -> Picture:
    """Draw the roofs of some GPUs, and where computations stand under them.

    Args:
        points: name -> intensity in FLOP per byte, or (intensity, measured FLOP per second).
        gpus: name -> its `GPU`; those of the course if not given.

    Raises:
        ValueError: numbers that are not positive.
    """
    placed = {name: value if isinstance(value, tuple) else (value, None) for name, value in (points or {}).items()}
    for name, numbers in placed.items():
        if not all(number is None or number > 0 for number in numbers):
            raise ValueError(f"point {name!r}: intensity and speed must be more than 0, got {placed[name]}.")
    if not gpus:
        raise ValueError("roofline needs at least one GPU.")
    title = "Roofline: " + ", ".join(f"{name} turns at {gpu.ridge:.3g}" for name, gpu in gpus.items()) + " FLOP a byte"
    return Picture(_svg(title, placed, gpus), _text(title, placed, gpus))


def _text(title: str, points: Mapping[str, tuple[float, float | None]], gpus: Mapping[str, GPU]) -> str:
    lines = [title, ""]
    for name, gpu in gpus.items():
        lines.append(f"{name}: peak {_si(gpu.flops)}FLOP/s, memory {_si(gpu.bandwidth)}B/s")
    for name, (intensity, measured) in points.items():
        speed = f", measured {_si(measured)}FLOP/s" if measured else ""
        lines += ["", f"{name}: {_short(intensity)} FLOP a byte{speed}"]
        for gpu_name, gpu in gpus.items():
            limit = "memory" if intensity < gpu.ridge else "arithmetic"
            lines.append(f"  on {gpu_name} at most {_si(gpu.attainable(intensity))}FLOP/s, limited by {limit}")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _si(number: float) -> str:
    power = min(max(int(math.log10(number) // 3), 0), 5)
    return f"{number / 1000**power:.3g} {' kMGTP'[power].strip()}"


def _x(intensity: float) -> float:
    return LEFT + PLOT * (min(max(math.log10(intensity), LOW_X), HIGH_X) - LOW_X) / (HIGH_X - LOW_X)


def _y(speed: float) -> float:
    return TOP + HEIGHT * (HIGH_Y - min(max(math.log10(speed), LOW_Y), HIGH_Y)) / (HIGH_Y - LOW_Y)


def _svg(title: str, points: Mapping[str, tuple[float, float | None]], gpus: Mapping[str, GPU]) -> str:
    bottom, right = TOP + HEIGHT, LEFT + PLOT
    parts = [text(16, 26, title, "t"), text(16, 46, "speed, FLOP/s", "h"),
             text(right, bottom + 34, "intensity: FLOP for each byte read", "g e")]
    for power in range(0, 5):
        x = _x(10**power)
        parts += [f'<path class="l" d="M{x:.1f} {TOP}V{bottom}"/>', text(x, bottom + 16, f"{10**power:,}", "g")]
    for power in range(11, 16):
        y = _y(10.0**power)
        parts += [f'<path class="l" d="M{LEFT} {y:.1f}H{right}"/>', text(LEFT - 8, y + 4, _si(10.0**power), "e g")]
    for n, (name, gpu) in enumerate(gpus.items()):
        start = max(10**LOW_X, 10**LOW_Y / gpu.bandwidth)
        roof = (f"M{_x(start):.1f} {_y(start * gpu.bandwidth):.1f}L{_x(gpu.ridge):.1f} {_y(gpu.flops):.1f}"
                f"H{right}")
        color = f"var(--{n % NUM_COLORS})"
        parts += [f'<path d="{roof}" style="fill:none;stroke:{color};stroke-width:3"/>',
                  f'<circle class="c" cx="{_x(gpu.ridge):.1f}" cy="{_y(gpu.flops):.1f}" r="3.5"/>',
                  box(right + 22, TOP + 40 * n, 14, 14, f"p{n % NUM_COLORS}"),
                  text(right + 42, TOP + 11 + 40 * n, f"{name}: {_si(gpu.flops)}FLOP/s", "s"),
                  text(right + 42, TOP + 25 + 40 * n, f"{_si(gpu.bandwidth)}B/s, ridge {gpu.ridge:.3g}", "h")]
    for n, (name, (intensity, measured)) in enumerate(points.items()):
        x = _x(intensity)
        y = _y(measured) if measured else bottom - 14 - 16 * n
        left = x > LEFT + PLOT / 2  # of the line
        parts += [f'<path class="k d" d="M{x:.1f} {TOP}V{bottom}"/>',
                  f'<circle class="c" cx="{x:.1f}" cy="{y:.1f}" r="5"/>',
                  text(x - 9 if left else x + 9, y + 4, f"{name}: {_short(intensity)}", "s b e" if left else "s b")]
    return document(WIDTH, bottom + 50, title, "".join(parts))
