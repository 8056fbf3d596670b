"""The acceptance plot: of the tokens that were drafted ahead, how many did the model agree with?

    position    0      1      2      3
    accepted   84 %   66 %   47 %   30 %      of the drafts that were so long

A draft is accepted up to its first wrong token, so each bar is lower than the one before. Were every token accepted
with the same chance a, whatever came before, the bars would be a, a², a³ ... (Leviathan, Kalman and Matias, ICML 2023,
section 3); that is the line.

Owns: this picture. Does not own: drafting and counting.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutorial_engine.viz.palette import DECODE
from tutorial_engine.viz.picture import Picture, box, document, text

LEFT, TOP, HEIGHT, PITCH, BAR = 64, 74, 180, 76, 52  # pixels


def acceptance(proposed: Sequence[int], accepted: Sequence[int]) -> Picture:
    """Draw how often the token at each position of a draft was accepted.

    Args:
        proposed: for position 0, 1, 2 ... of a draft, how many drafts had a token there.
        accepted: how many of these tokens were accepted.

    Raises:
        ValueError: the lists do not belong together: of different lengths, empty, more accepted than proposed, or a
            position that is reached more often than the one before it.
    """
    proposed, accepted = [int(n) for n in proposed], [int(n) for n in accepted]
    if not proposed or len(proposed) != len(accepted):
        raise ValueError(f"proposed and accepted need one number for each position of a draft, got {len(proposed)} and "
                         f"{len(accepted)}.")
    if any(not 0 <= a <= p for a, p in zip(accepted, proposed)) or proposed[0] == 0:
        raise ValueError(f"At each position at most as many tokens are accepted as were proposed, and at position 0 "
                         f"some are proposed; got {accepted} of {proposed}.")
    for name, counts in (("proposed", proposed), ("accepted", accepted)):
        if any(b > a for a, b in zip(counts, counts[1:])):
            raise ValueError(f"{name} must not grow: a draft has a position 1 only if it has a position 0, and it is "
                             f"accepted from the front; got {counts}.")
    rates = [a / p if p else 0.0 for a, p in zip(accepted, proposed)]
    title = (f"{sum(accepted):,} of {sum(proposed):,} drafted tokens accepted "
             f"({100 * sum(accepted) / sum(proposed):.3g} %): "
             f"{1 + sum(accepted) / proposed[0]:.3g} tokens a step instead of 1")
    lines = [title, "", "position  accepted  of"]
    lines += [f"{i:>8}  {a:>8,}  {p:,} ({100 * rate:.3g} %)" for i, (a, p, rate) in
              enumerate(zip(accepted, proposed, rates))]
    return Picture(_svg(title, proposed, accepted, rates), "\n".join(lines))


def _svg(title: str, proposed: list[int], accepted: list[int], rates: list[float]) -> str:
    bottom = TOP + HEIGHT
    parts = [text(16, 26, title, "t"), text(16, 46, "accepted, by position in the draft", "h")]
    for tick in range(0, 101, 25):
        y = bottom - HEIGHT * tick / 100
        parts += [f'<path class="l" d="M{LEFT} {y:g}H{LEFT + PITCH * len(rates)}"/>',
                  text(LEFT - 8, y + 4, f"{tick} %", "e g")]
    line = []
    for i, (p, a, rate) in enumerate(zip(proposed, accepted, rates)):
        x = LEFT + i * PITCH + (PITCH - BAR) / 2
        parts += [box(x, bottom - HEIGHT * rate, BAR, max(HEIGHT * rate, 0.5), f"p{DECODE}"),
                  text(x + BAR / 2, bottom - HEIGHT * rate + (16 if rate > 0.12 else -6), f"{100 * rate:.3g} %", "b"),
                  text(x + BAR / 2, bottom + 16, f"position {i}"),
                  text(x + BAR / 2, bottom + 30, f"{a:,} of {p:,}", "g")]
        line.append(f"{x + BAR / 2:g} {bottom - HEIGHT * rates[0] ** (i + 1):.1f}")
    parts.append(f'<path class="k" stroke-dasharray="4 3" d="M{"L".join(line)}"/>')
    parts += [f'<path class="k" stroke-dasharray="4 3" d="M{LEFT} {bottom + 50}h24"/>',
              text(LEFT + 30, bottom + 54, f"if each token were accepted with a chance of {rates[0]:.3g}", "h")]
    return document(max(LEFT + PITCH * len(rates) + 24, 40 + 9 * len(title)), bottom + 70, title, "".join(parts))
