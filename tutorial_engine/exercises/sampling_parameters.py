"""Sampling parameters: what each filter keeps, and what a penalty does to a logit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tutorial_engine.checks import Answer, check


def top_p_kept(probs: Sequence[float], top_p: float) -> list[int]:
    """Ids of the smallest set of likeliest tokens that reaches top_p, likeliest first."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    return kept


def min_p_kept(logits: Sequence[float], temperature: float, min_p: float) -> list[int]:
    """Ids of the tokens at least min_p times as likely as the likeliest, after temperature, in order of their ids."""
    best = max(logits)
    return [token for token, x in enumerate(logits) if math.exp((x - best) / temperature) >= min_p]


def repetition_penalty(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], penalty: float
                       ) -> list[float]:
    """The logits, with those of every token of prompt or output made smaller, once each."""
    seen = {*prompt, *output}
    return [x if token not in seen else x / penalty if x > 0 else x * penalty for token, x in enumerate(logits)]


@check(top_p_kept)
def check_top_p_kept(answer: Answer) -> None:
    """Few tokens where the model is sure, many where it is not: that is what top_p is for."""
    probs = [0.125, 0.5, 0.25, 0.125]
    answer(probs, 0.5).gives([1], "when to stop: token 1 alone has 0.5, so top_p is reached and nothing else is "
                                  "needed.")
    answer(probs, 0.75).gives([1, 2], "the order: the likeliest token comes first, whatever its id.")
    answer(probs, 0.6).gives([1, 2], "the token that crosses the line: without token 2 there is only 0.5, which is "
                                     "less than 0.6.")
    answer(probs, 0.1).gives([1], "a top_p smaller than the likeliest token: one token must always be left.")
    answer(probs, 1.0).gives([1, 2, 0, 3], "top_p 1 keeps everything. Equal tokens stand in the order of their ids.")
    answer([1.0], 0.9).gives([0], "a vocabulary of one token.")


@check(min_p_kept)
def check_min_p_kept(answer: Answer) -> None:
    """The bar moves with the likeliest token: high where the model is sure, low where it is not."""
    logits = [2.0, 1.0, 0.0, -2.0]
    answer(logits, 1.0, 0.0).gives([0, 1, 2, 3], "min_p 0, which is no restriction.")
    answer(logits, 1.0, 1.0).gives([0], "min_p 1: only what is as likely as the likeliest stays.")
    answer(logits, 1.0, 0.2).gives([0, 1], "what a token is compared with: its probability, divided by that of the "
                                           "likeliest token. Here these are 1, 0.37, 0.14 and 0.02.")
    answer(logits, 2.0, 0.3).gives([0, 1, 2], "the temperature, which comes first. At 2 the same four are 1, 0.61, "
                                              "0.37 and 0.14.")
    answer(logits, 0.5, 0.2).gives([0], "a low temperature: at 0.5 token 1 has only 0.14 of the likeliest.")
    answer([0.0] * 4, 1.0, 0.5).gives([0, 1, 2, 3], "four equal tokens. Each has a probability of only 0.25, and each "
                                                    "is as likely as the likeliest.")
    answer([-1000.0, -1001.0], 1.0, 0.3).gives([0, 1], "very small logits: exp(-1000) is 0 in a computer. Only "
                                                       "differences matter, so subtract the largest first.")


@check(repetition_penalty)
def check_repetition_penalty(answer: Answer) -> None:
    """What was said becomes less likely, whether its logit is positive or negative."""
    answer([3.0, 1.0], [], [], 2.0).gives([3.0, 1.0], "a text without tokens: nobody is punished.")
    answer([3.0, 1.0], [], [0], 2.0).gives([1.5, 1.0], "a token of the output with a positive logit: it is divided.")
    answer([3.0, -1.0], [], [1], 2.0).gives([3.0, -2.0], "a token with a negative logit. Half of -1 would be *more* "
                                                         "likely than -1.")
    answer([3.0, 1.0], [0], [], 2.0).gives([1.5, 1.0], "the prompt: this penalty counts it as well.")
    answer([4.0, 1.0], [0], [0, 0], 2.0).gives([2.0, 1.0], "a token that occurs three times: it is punished once.")
    answer([1.0, 2.0], [0, 1], [], 1.0).gives([1.0, 2.0], "penalty 1, which changes nothing.")
