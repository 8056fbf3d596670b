"""Why inference servers exist: the bound on tokens per second, what may be counted, and what a million tokens cost."""

from __future__ import annotations

from collections.abc import Sequence

from tutorial_engine.checks import Answer, check


def tokens_per_second_bound(params: int, bytes_per_param: float, bandwidth: float) -> float:
    """The most tokens per second of one request: each token reads all weights. bandwidth: bytes per second."""
    return bandwidth / (params * bytes_per_param)


def count_output_tokens(output_ids: Sequence[int], prompt_len: int, eos: int) -> int:
    """Tokens that the model wrote, up to and with the first eos. output_ids begin with the prompt."""
    written = list(output_ids[prompt_len:])
    return written.index(eos) + 1 if eos in written else len(written)


@check(tokens_per_second_bound)
def check_tokens_per_second_bound(answer: Answer) -> None:
    """A decode step of one request cannot be faster than reading the weights once."""
    answer(10, 1, 100).gives(10.0, "10 weights of one byte, 100 bytes a second: the weights are read 10 times.")
    answer(10, 2, 100).gives(5.0, "bytes_per_param: twice the bytes take twice as long to read.")
    answer(20, 1, 100).gives(5.0, "params: twice the weights take twice as long to read.")


@check(count_output_tokens)
def check_count_output_tokens(answer: Answer) -> None:
    """Only what the model wrote counts as output."""
    answer([7, 8, 9, 5], 3, 0).gives(1, "prompt_len: the first three tokens are the prompt, nobody wrote them.")
    answer([7, 5, 0, 0, 0], 1, 0).gives(2, "eos: it was written and counts once. What follows it is padding.")
    answer([0, 7, 5], 1, 0).gives(2, "an eos in the prompt: it ends nothing.")


def cost_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Dollars for a million tokens, on a machine that is busy all the time."""
    return dollars_per_hour / (tokens_per_second * 3600) * 1_000_000


@check(cost_per_million)
def check_cost_per_million(answer: Answer) -> None:
    """The rent is paid by the hour, so twice the tokens per second halve the price of a token."""
    answer(1000, 3.6).gives(1.0, "1,000 tokens a second are 3.6 million an hour, for 3.6 dollars.")
    answer(2000, 3.6).gives(0.5, "tokens_per_second: twice as fast is half the price.")
    answer(1000, 7.2).gives(2.0, "dollars_per_hour: twice the rent is twice the price.")
