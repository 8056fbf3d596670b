"""What of CUDA graphs can be tested without a GPU: which sizes are recorded, and who may use the short way."""

import pytest

from tests.core.support import make_request
from tutorial_engine import SamplingParams
from tutorial_engine.cuda_graphs import graph_sizes
from tutorial_engine.sampler import NEVER, plain_from


@pytest.mark.parametrize("max_num_seqs, sizes", [
    (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (20, [1, 2, 4, 8, 16, 20])])
def test_sizes_end_exactly_at_the_most_requests_there_can_be(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize("plain", [{"temperature": 0.0, "top_k": 5}, {"temperature": 1.3, "seed": 3}, {"top_k": -1}])
def test_temperature_is_all_that_is_needed(plain: dict) -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(**plain))) == 3


@pytest.mark.parametrize("knob", [
    {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 0}, {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
    {"prompt_logprobs": 0, "logprobs": 0}])
def test_any_other_knob_needs_the_sampler(knob: dict) -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(**knob))) == NEVER


def test_min_tokens_needs_the_sampler_until_there_are_so_many() -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(min_tokens=2))) == 5
