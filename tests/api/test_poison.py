"""Numbers that overflow in one request (half precision does that) stay that request's problem.

Attention reads whole blocks and multiplies what lies behind a context by 0; but 0 * NaN is NaN.
"""

from pathlib import Path

import pytest
import torch

from tests.api.support import greedy
from tutorial_engine import LLM

PROMPTS = [{"prompt_token_ids": list(range(first, first + length))} for first, length in ((10, 37), (60, 70), (5, 3))]
PARAMS = greedy(20, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), num_gpu_blocks_override=33)


def answers(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_block_may_be_reused_whatever_it_held(llm: LLM, poison: float) -> None:
    right = answers(llm)
    llm.reset_prefix_cache()
    cache = llm.llm_engine.model_runner.kv_cache
    for tensor in (*cache.key, *cache.value):
        tensor[1:] = poison
    assert answers(llm) == right


def test_a_neighbour_in_the_batch_may_hold_anything(llm: LLM) -> None:
    """Tables of requests that left are padding in those that came after them."""
    right = answers(llm)
    for victim in range(3):
        llm.reset_prefix_cache()
        llm.enqueue(PROMPTS, PARAMS, use_tqdm=False)
        for _ in range(4):
            llm.llm_engine.step()
        manager, cache = llm.llm_engine.scheduler.kv_cache_manager, llm.llm_engine.model_runner.kv_cache
        victim_id = llm.llm_engine.scheduler.running[victim].request_id
        for tensor in (*cache.key, *cache.value):
            tensor[manager.get_block_ids(victim_id)] = torch.nan
        got = [o.outputs[0].token_ids for o in llm.wait_for_completion(use_tqdm=False)]
        assert [g == r for g, r in zip(got, right, strict=True)] == [i != victim for i in range(3)]
