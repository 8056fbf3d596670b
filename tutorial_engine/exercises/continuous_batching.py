"""Continuous batching's arithmetic: how many steps, and who gets how much of one."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from tutorial_engine.checks import Answer, check


def continuous_steps(lengths: Sequence[int], seats: int) -> int:
    """Steps until all answers are written, if each free seat is taken at once by the next in the queue."""
    free_at = [0] * seats
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def plan_step(running: Sequence[int], waiting: Sequence[int], budget: int, seats: int) -> list[int]:
    """Tokens of each request in one step, those that run first: [min(wanted, what is left), ...].

    Args:
        running, waiting: how many tokens each still has to compute, in order.

    Returns:
        One number for each running request (0 if nothing is left for it), then one for each that gets on.
    """
    plan = []
    for wanted in running:
        plan.append(min(wanted, budget))
        budget -= plan[-1]
    for wanted in waiting:
        if budget == 0 or len(plan) == seats:
            break
        plan.append(min(wanted, budget))
        budget -= plan[-1]
    return plan


@check(continuous_steps)
def check_continuous_steps(answer: Answer) -> None:
    """With this one function you can say what continuous batching is worth for any list of lengths."""
    answer([7], 1).gives(7, "one request alone: one step for each token.")
    answer([3, 4], 1).gives(7, "a single seat: one after the other.")
    answer([3, 5], 2).gives(5, "two seats: both write at the same time, and the longer one ends last.")
    answer([3, 9, 4, 2], 2).gives(
        9, "the seat of the 3: it is free in step 3, and the 4 takes it at once, while the 9 goes on.")
    answer([2, 9, 3, 8], 2).gives(
        13, "the last request. It gets on in step 5, where the 3 leaves, and writes its 8 tokens from there.")
    answer([5, 5, 1], 4).gives(5, "more seats than requests: some stay empty.")
    answer([3, 12, 5, 20, 4, 8, 6, 10], 4).gives(22, "the picture in the lesson, row by row.")
    answer([], 3).gives(0, "a queue with nobody in it.")
    for seed in range(50):
        rng = random.Random(seed)
        lengths, seats = [rng.randint(1, 9) for _ in range(rng.randint(1, 9))], rng.randint(1, 4)
        answer(lengths, seats).gives(continuous_steps(lengths, seats), "the seats, one by one, with a pencil: when is "
                                                                       "each of them free, and who takes it?")


@check(plan_step)
def check_plan_step(answer: Answer) -> None:
    """This is the heart of the scheduler: one budget, for prompts and single tokens alike."""
    answer([], [5], 8, 4).gives([5], "the simplest step: one request waits, and its whole prompt fits.")
    answer([1, 1], [], 8, 4).gives([1, 1], "those who write: they want one token each.")
    answer([1, 1], [5], 8, 4).gives([1, 1, 5], "the order: those that run, then those that wait.")
    answer([1, 1], [20], 8, 4).gives(
        [1, 1, 6], "the long prompt: 6 of the 8 are left for it. It gets these, and the rest in later steps.")
    answer([1, 14, 1], [], 8, 4).gives(
        [1, 7, 0], "the third that runs: the chunk before it took the rest of the budget, so it gets 0 in this step. "
                   "It stays in the list, since it has a seat.")
    answer([1, 1], [6, 4], 8, 4).gives([1, 1, 6], "the budget, which is spent when the second in the queue comes. "
                                                  "It does not get on with 0 tokens.")
    answer([1, 1, 1], [2, 2], 8, 4).gives([1, 1, 1, 2], "the seats: there are four, and three are taken.")
    answer([], [3, 3, 3], 8, 2).gives([3, 3], "the seats once more: those who get on in this step take some too.")
    answer([], [], 8, 4).gives([], "a step in which nobody is there.")
    for seed in range(50):
        rng = random.Random(seed)
        seats = rng.randint(1, 4)
        running = [rng.choice([1, 1, 9]) for _ in range(rng.randint(0, seats))]
        waiting = [rng.randint(1, 9) for _ in range(rng.randint(0, 4))]
        budget = rng.randint(1, 16)
        answer(running, waiting, budget, seats).gives(
            plan_step(running, waiting, budget, seats), "this case, request by request: what is left of the budget, "
                                                        "and of the seats?")
