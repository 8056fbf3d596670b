"""L54, E16: sleep and wake up. L58: a call to the worker. L3: an engine without a tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.support import greedy
from tests.core.support import assert_clean
from tutorial_engine import LLM
from tutorial_engine.exceptions import EngineGenerateError, VLLMValidationError
from tutorial_engine.sampling_params import StructuredOutputsParams

PROMPT = {"prompt_token_ids": list(range(10, 50))}
LONG = greedy(24, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), num_gpu_blocks_override=17, disable_log_stats=False)


def ids(llm: LLM, prompt: Any = PROMPT) -> list[int]:
    return llm.generate(prompt, LONG, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("level", [0, 1, 2])
def test_l54_after_a_sleep_everything_is_as_before(llm: LLM, level: int) -> None:
    right = ids(llm)
    llm.sleep(level)
    runner = llm.llm_engine.model_runner
    assert (runner.kv_cache is None, runner.model is None) == (level > 0, level == 2)
    sleeping = {m.name: m for m in llm.get_metrics()}["vllm:engine_sleep_state"]
    assert sleeping.value == 1 and llm.llm_engine.is_sleeping()
    repr(llm), repr(llm.llm_engine)
    assert llm.wake_up() is True and not llm.llm_engine.is_sleeping()
    (output,) = llm.generate(PROMPT, LONG, use_tqdm=False)
    assert output.outputs[0].token_ids == right
    assert output.num_cached_tokens == (32 if level == 0 else 0), "a dropped cache is empty"
    assert_clean(llm.llm_engine)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_e16_what_becomes_of_those_that_run(llm: LLM, mode: str) -> None:
    right = ids(llm)
    llm.reset_prefix_cache()
    llm.enqueue([PROMPT], LONG, use_tqdm=False)
    for _ in range(5):
        llm.llm_engine.step()
    llm.sleep(1, mode)
    assert llm.llm_engine.has_unfinished_requests() == (mode == "keep")
    assert llm.llm_engine.step() == [], "nothing is computed meanwhile"
    llm.wake_up()
    outputs = llm.wait_for_completion(use_tqdm=False)
    (completion,) = outputs[0].outputs
    if mode == "abort":
        assert (completion.token_ids, completion.finish_reason) == (right[:5], "abort")
    else:
        assert completion.token_ids == right
    assert_clean(llm.llm_engine)


def test_e16_requests_are_accepted_while_it_sleeps(llm: LLM) -> None:
    right = ids(llm)
    llm.sleep(0)
    llm.enqueue(PROMPT, LONG, use_tqdm=False)
    with pytest.raises(EngineGenerateError, match=r"sleeps.*wake_up\(\)"):
        llm.generate("a", greedy(2), use_tqdm=False)
    llm.wake_up()
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == right


def test_l54_waking_by_parts(llm: LLM) -> None:
    llm.sleep(2)
    assert llm.wake_up(["weights"]) is False
    assert llm.llm_engine.model_runner.kv_cache is None
    assert llm.wake_up(tags=["kv_cache"]) is False, "scheduling is still paused"
    assert llm.wake_up(["scheduling"]) is True
    assert len(ids(llm)) == 24
    llm.sleep(1)
    llm.sleep(2)  # deeper
    assert llm.wake_up() and len(ids(llm)) == 24


def test_l54_release_kv_cache_memory(llm: LLM) -> None:
    right = ids(llm)
    llm.enqueue([PROMPT], LONG, use_tqdm=False)
    llm.llm_engine.step()
    llm.release_kv_cache_memory()
    assert llm.llm_engine.model_runner.kv_cache is None and llm.llm_engine.model_runner.model is not None
    assert llm.llm_engine.step() == []
    assert llm.wake_up() is True
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == right


@pytest.mark.parametrize("call, match", [
    (lambda llm: llm.sleep(3), "level"), (lambda llm: llm.sleep(1, "later"), "mode"),
    (lambda llm: llm.wake_up("weights"), "list"), (lambda llm: llm.wake_up(["kv"]), "kv"),
    (lambda llm: llm.collective_rpc("no_such"), "no_such"),
    (lambda llm: llm.collective_rpc("close", timeout=1.0), "timeout")])
def test_bad_calls(llm: LLM, call: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        call(llm)
    assert len(ids(llm)) == 24


def test_l58_calls_to_the_worker(llm: LLM) -> None:
    assert llm.apply_model(lambda model: model.config.num_hidden_layers) == [2]
    assert llm.collective_rpc(lambda worker, a, b: (worker.num_gpu_blocks, a + b), args=(1,), kwargs={"b": 2}) == [
        (17, 3)]
    assert llm.collective_rpc("release_kv_cache") == [None]


def test_l3_ids_only(tiny_model: Path, llm: LLM) -> None:
    right = ids(llm)
    bare = LLM(str(tiny_model), num_gpu_blocks_override=17, skip_tokenizer_init=True)
    (output,) = bare.generate(PROMPT, greedy(24, ignore_eos=True, logprobs=1), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.token_ids == right and completion.text == "" and output.prompt is None
    assert completion.logprobs[0][right[0]].decoded_token is None
    for use in (lambda: bare.generate("text", use_tqdm=False), lambda: bare.get_tokenizer(),
                lambda: bare.generate(PROMPT, greedy(stop=["a"]), use_tqdm=False),
                lambda: bare.generate(PROMPT, greedy(bad_words=["a"]), use_tqdm=False),
                lambda: bare.generate(PROMPT, greedy(structured_outputs=StructuredOutputsParams(choice=["a"])),
                                      use_tqdm=False),
                lambda: bare.chat([{"role": "user", "content": "a"}], use_tqdm=False)):
        with pytest.raises(VLLMValidationError, match="skip_tokenizer_init"):
            use()
    assert_clean(bare.llm_engine)


def test_l3_the_end_of_an_answer_is_known_from_the_config(tiny_model: Path) -> None:
    bare = LLM(str(tiny_model), num_gpu_blocks_override=17, skip_tokenizer_init=True)
    params = greedy(5, logit_bias={1: 100.0})
    (output,) = bare.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].token_ids == [1] and output.outputs[0].finish_reason == "stop"


def test_an_engine_survives_the_end_of_another(llm: LLM, tiny_model: Path) -> None:
    """On a GPU both record graphs, which remember where cuBLAS has its workspace: it must not go with the first."""
    right = ids(llm)
    for _ in range(2):
        LLM(str(tiny_model), num_gpu_blocks_override=33, max_model_len=256).close()
        llm.reset_prefix_cache()
        assert ids(llm) == right
