"""What of CUDA graphs can be tested without a GPU: which sizes are recorded, and who may use the short way."""

import pytest
import torch

from tests.core.support import make_request
from tutorial_engine import SamplingParams, cuda_graphs
from tutorial_engine.cuda_graphs import StepGraphs, decode_sizes, empty_device_cache, forward_sizes
from tutorial_engine.sampler import NEVER, plain_from


@pytest.mark.parametrize("max_num_seqs, sizes", [
    (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (20, [1, 2, 4, 8, 16, 20])])
def test_sizes_end_exactly_at_the_most_requests_there_can_be(max_num_seqs: int, sizes: list[int]) -> None:
    assert decode_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize("plain", [
    {"temperature": 0.0, "top_k": 5}, {"temperature": 1.3, "seed": 3}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}])
def test_what_the_device_draws_alone(plain: dict) -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(**plain))) == 3


@pytest.mark.parametrize("knob", [
    {"logprobs": 0}, {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
    {"prompt_logprobs": 0, "logprobs": 0}])
def test_any_other_knob_needs_the_sampler(knob: dict) -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(**knob))) == NEVER


def test_min_tokens_needs_the_sampler_until_there_are_so_many() -> None:
    assert plain_from(make_request("a", 3, params=SamplingParams(min_tokens=2))) == 5


@pytest.mark.parametrize("budget", [1, 16, 17, 100, 1000, 8192, 100_000])
def test_a_step_with_prompts_is_padded_by_an_eighth_at_most(budget: int) -> None:
    sizes = forward_sizes(budget)
    assert sizes == sorted(set(sizes)) and sizes[-1] == budget and len(sizes) < 130
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert size - (below + 1) <= max(15, size / 8)


def test_workspaces_stay_as_long_as_graphs_remember_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines in one process: what one gives back when it closes must not be what the other's graphs write to."""
    cleared = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
    monkeypatch.setattr(cuda_graphs, "_RECORDED", type(cuda_graphs._RECORDED)())
    graphs = StepGraphs.__new__(StepGraphs)
    cuda_graphs._RECORDED.add(graphs)
    empty_device_cache()
    assert not cleared
    del graphs
    empty_device_cache()
    assert cleared
