"""Why inference servers exist: the bound on tokens per second, what may be counted, and what a million tokens cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tutorial_engine.checks import Answer, check

LLAMA_8B, SMOLLM2_135M = 8_030_261_248, 134_515_008  # weights
T4, H200 = 320e9, 4800e9  # bytes per second, from NVIDIA's data sheets


def tokens_per_second_bound(params: int, bytes_per_param: float, bandwidth: float) -> float:
    """The most tokens per second of one request: each token reads all weights. bandwidth: bytes per second."""
    return bandwidth / (params * bytes_per_param)


@check(tokens_per_second_bound)
def check_tokens_per_second_bound(answer: Answer) -> None:
    """One request cannot be faster than reading the weights once for each token: 20 a second for an 8B model on a T4's
    bandwidth, 299 on an H200's."""
    answer(10, 1, 100).gives(10.0, "10 weights of one byte, 100 bytes a second: how often per second are all 10 read?")
    answer(10, 2, 100).gives(5.0, "`bytes_per_param`: twice the bytes take twice as long to read.")
    answer(20, 1, 100).gives(5.0, "`params`: twice the weights take twice as long to read.")
    answer(10, 1, 200).gives(20.0, "`bandwidth`: twice as many bytes per second are twice as many tokens.")
    answer(10, 0.5, 100).gives(20.0, "4-bit weights: half a byte each.")
    answer(30, 1, 100).gives(100 / 30, "the fraction: the answer need not be a whole number. What does // do?")
    for params, bandwidth, tokens, name in ((LLAMA_8B, T4, 19.9, "an 8B model on a T4's bandwidth"),
                                            (LLAMA_8B, H200, 298.9, "an 8B model on an H200"),
                                            (SMOLLM2_135M, T4, 1189.5, "the course's model on a T4"),
                                            (SMOLLM2_135M, H200, 17_842.0, "the course's model on an H200")):
        answer(params, 2, bandwidth).must(
            functools.partial(math.isclose, tokens, rel_tol=0.003), f"about {tokens:,.0f}",
            f"{name}. The small cases were right: does anything depend on how large a number is?")


def count_output_tokens(output_ids: Sequence[int], prompt_len: int, eos: int) -> int:
    """Tokens that the model wrote, up to and with the first eos. output_ids begin with the prompt."""
    written = list(output_ids[prompt_len:])
    return written.index(eos) + 1 if eos in written else len(written)


@check(count_output_tokens)
def check_count_output_tokens(answer: Answer) -> None:
    """Only what the model wrote counts as output, and it ends with the first end-of-sequence token."""
    answer([7, 8, 9, 5], 3, 0).gives(1, "`prompt_len`: the first three tokens are the prompt, nobody wrote them.")
    answer([7, 5, 6, 4], 1, 0).gives(3, "an answer that was cut off: it has no eos, and all three tokens count.")
    answer([7, 5, 0, 0, 0], 1, 0).gives(2, "the first eos: the model wrote it, so it counts once. What follows it is "
                                           "filling.")
    answer([7, 5, 0, 9, 9], 1, 0).gives(2, "what follows the first eos: it is filling, whatever its ids are.")
    answer([0, 7, 5], 1, 0).gives(2, "an eos in the *prompt* (chat formats have some): it ends nothing.")
    answer([7, 8], 2, 0).gives(0, "an answer without any token.")


def cost_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Dollars for a million tokens, on a machine that is busy all the time."""
    return dollars_per_hour / (tokens_per_second * 3600) * 1_000_000


@check(cost_per_million)
def check_cost_per_million(answer: Answer) -> None:
    """The rent is paid by the hour, so twice the tokens per second halve the price of a token."""
    answer(1000, 3.6).gives(1.0, "1,000 tokens a second are 3.6 million an hour, for 3.6 dollars. Seconds and hours "
                                 "must not be mixed up.")
    answer(2000, 3.6).gives(0.5, "`tokens_per_second`: twice as fast is half the price.")
    answer(1000, 7.2).gives(2.0, "`dollars_per_hour`: twice the rent is twice the price.")
