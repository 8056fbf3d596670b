"""When requests come, and what is in them.

Gaps between arrivals follow a gamma distribution with mean 1 / rate. Its shape is the burstiness: 1 is a Poisson
process, as of many people who do not know of each other; below 1 requests come in bursts, above 1 more evenly. The
coefficient of variation of the gaps is 1 / sqrt(burstiness).

Owns: drawing, from a seed. Does not own: sending.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutorial_engine.exceptions import VLLMValidationError


@dataclass(frozen=True)
class Job:
    """One request: token ids of its prompt, and how many tokens its answer shall have."""

    prompt: list[int]
    output_len: int


def arrival_times(num_requests: int, request_rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds from the start at which each request is sent, ascending, float64 [num_requests].

    Args:
        request_rate: requests per second on average; inf: all at once.
        burstiness: shape of the gamma distribution.

    Raises:
        VLLMValidationError: one of them is not positive.
    """
    check("request_rate", request_rate > 0, request_rate, "a number above 0; inf sends all at once")
    check("seed", seed >= 0, seed, "at least 0")
    check("burstiness", 0 < burstiness < math.inf, burstiness, "a number above 0; 1 is a Poisson process")
    if math.isinf(request_rate):
        return np.zeros(num_requests)
    rng = np.random.default_rng([seed, 0])
    return np.cumsum(rng.gamma(burstiness, 1 / (request_rate * burstiness), num_requests))


def random_jobs(token_ids: Sequence[int], num_requests: int, input_len: int, output_len: int, range_ratio: float,
                prefix_len: int, seed: int) -> list[Job]:
    """Prompts of random tokens, so that the prefix cache finds nothing in them but the prefix that all share.

    Args:
        token_ids: to draw from. prefix_len: tokens in front of the `input_len` tokens of each prompt.
        range_ratio: lengths are drawn evenly from length * (1 - ratio) to length * (1 + ratio).

    Raises:
        VLLMValidationError: a number out of its range.
    """
    check("num_prompts", num_requests >= 1, num_requests, "at least 1")
    check("input_len", input_len >= 1, input_len, "at least 1")
    check("output_len", output_len >= 1, output_len, "at least 1")
    check("random_prefix_len", prefix_len >= 0, prefix_len, "at least 0")
    check("random_range_ratio", 0 <= range_ratio < 1, range_ratio, "at least 0 and below 1")
    rng = np.random.default_rng([seed, 1])

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return rng.integers(max(low, 1), high + 1, num_requests).tolist()

    prefix = rng.choice(token_ids, prefix_len).tolist()
    return [Job(prefix + rng.choice(token_ids, prompt).tolist(), output)
            for prompt, output in zip(lengths(input_len), lengths(output_len))]


def check(name: str, is_right: bool, value: object, wanted: str) -> None:
    """Raises VLLMValidationError unless it is right."""
    if not is_right:
        raise VLLMValidationError(f"--{name.replace('_', '-')} must be {wanted} (got {value}).", parameter=name,
                                  value=value)
