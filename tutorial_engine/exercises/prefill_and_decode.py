"""Prefill and decode: how much work for each byte, who gets a long step's tokens, and what a user sees of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tutorial_engine.checks import Answer, check


def arithmetic_intensity(num_tokens: int, num_in: int, num_out: int, bytes_per_number: int = 2) -> float:
    """FLOP for each byte moved, in the product of [num_tokens, num_in] activations and [num_in, num_out] weights.

    Each of the three matrices is moved once: inputs and weights are read, the result is written. A multiply-add is two
    operations. (The roofline's definition: Williams, Waterman and Patterson, CACM 2009.)
    """
    operations = 2 * num_tokens * num_in * num_out
    numbers = num_in * num_out + num_tokens * num_in + num_tokens * num_out
    return operations / (numbers * bytes_per_number)


def chunk_prefill(remaining: int, budget: int, running: int) -> list[tuple[int, int]]:
    """The steps until a prompt is computed: for each, (tokens of those who write, tokens of the prompt).

    Those who write come first, with one token each; the prompt gets what is left of the budget (Sarathi-Serve, OSDI
    2024, Algorithm 3).

    Args:
        remaining: tokens of the prompt that nobody has computed yet.
        budget: tokens of a step, at most. running: requests that write.

    Raises:
        ValueError: those who write use up the budget, so the prompt would never be computed.
    """
    if budget <= running:
        raise ValueError(f"{running} requests write, and a step has {budget} tokens: nothing is left for the prompt.")
    steps = []
    while remaining > 0:
        chunk = min(remaining, budget - running)
        steps.append((running, chunk))
        remaining -= chunk
    return steps


def ttft_itl(arrival: float, times: Sequence[float]) -> tuple[float, list[float]]:
    """Time to first token, and the gaps between tokens: (TTFT, [ITL, ...]).

    Args:
        arrival: when the request came. times: when each of its tokens was there (same clock), at least one.
    """
    return times[0] - arrival, [after - before for before, after in zip(times, times[1:], strict=False)]


@check(arithmetic_intensity)
def check_arithmetic_intensity(answer: Answer) -> None:
    """One number for a step: compare it with a GPU's ridge, and you know what the step waits for."""
    answer(1, 1, 1).gives(2 / 6, "the smallest case: one multiply-add is 2 operations; three numbers of 2 bytes move: "
                                 "an input, a weight, a result.")
    answer(1, 1000, 1000).gives(
        2_000_000 / 2_004_000, "one token: a million weights of 2 bytes are read for a million multiply-adds, and each "
                               "multiply-add counts as 2 operations.")
    answer(100, 1000, 1000).gives(
        200_000_000 / 2_400_000, "a hundred tokens: a hundred times the operations, but the weights are read once for "
                                 "all. What grows in bytes are inputs and results.")
    answer(1, 1000, 1000, 4).gives(
        2_000_000 / 4_008_000, "the fourth argument: numbers of 4 bytes mean twice the bytes, and half the intensity.")
    answer(7, 300, 20).gives(
        84_000 / 16_480, "a matrix that is not square: inputs are [tokens, in], results are [tokens, out].")
    for seed in range(30):
        rng = random.Random(seed)
        sizes = rng.randint(1, 500), rng.randint(1, 2000), rng.randint(1, 2000), rng.choice([1, 2, 4])
        answer(*sizes).gives(arithmetic_intensity(*sizes), "the three matrices, one by one: how many numbers has each?")


@check(chunk_prefill)
def check_chunk_prefill(answer: Answer) -> None:
    """Those who write never miss a step, and no step is larger than the budget."""
    answer(100, 64, 0).gives([(0, 64), (0, 36)], "nobody writes: the prompt has the whole budget, and its last chunk "
                                                 "is what remains.")
    answer(10, 64, 4).gives([(4, 10)], "a short prompt: all of it fits beside the four who write.")
    answer(100, 64, 4).gives(
        [(4, 60), (4, 40)], "the order: the four who write come first, with a token each. 60 are left for the prompt, "
                            "so that the step has 64 and not 68.")
    answer(120, 64, 4).gives([(4, 60), (4, 60)], "a prompt that is cut without a rest: no step may be empty.")
    answer(1024, 256, 4).gives([(4, 252)] * 4 + [(4, 16)], "the lesson's newcomer, with a budget of 256.")
    answer(0, 64, 4).gives([], "a prompt of which nothing remains.")
    answer(5, 4, 4).raises(ValueError, "the budget: four write, and four tokens are all there is. Say so, instead of "
                                       "making steps for ever.")
    for seed in range(30):
        rng = random.Random(seed)
        running = rng.randint(0, 8)
        case = rng.randint(1, 300), running + rng.randint(1, 64), running
        answer(*case).gives(chunk_prefill(*case), "this case with a pencil: what is left of the budget in each step?")


@check(ttft_itl)
def check_ttft_itl(answer: Answer) -> None:
    """These are the two times that a user feels: how long until something comes, and how evenly it comes."""
    answer(0, [3]).gives((3, []), "an answer of one token: it has a time to first token, and no gaps.")
    answer(10, [13, 14, 15]).gives(
        (3, [1, 1]), "the arrival: the first token was there at 13, but the user asked at 10, not at 0.")
    answer(0, [2, 3, 9, 10]).gives(
        (2, [1, 6, 1]), "the gap of 6. Give each gap by itself: in a mean of 2.67 the stall would be invisible.")
    answer(5, [5.5, 6.0]).gives((0.5, [0.5]), "fractions of a second.")
    for seed in range(20):
        rng = random.Random(seed)
        arrival = rng.randint(0, 20)
        times = [arrival + 1]
        for _ in range(rng.randint(0, 8)):
            times.append(times[-1] + rng.randint(1, 9))
        answer(arrival, times).gives(ttft_itl(arrival, times), "this case with a pencil: n tokens have n - 1 gaps.")
