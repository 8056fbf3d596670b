"""`EngineArgs` and `EngineConfig`: vLLM's names and defaults; contradictions are refused before anything loads."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutorial_engine import LLM, EngineArgs
from tutorial_engine.config import EngineConfig
from tutorial_engine.exceptions import VLLMValidationError


def resolve(model_max_len: int = 1024, device: str = "cpu", capability: tuple[int, int] | None = None, **args: Any
            ) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(**args), model_max_len, device, capability)


# Arguments one by one


def test_defaults_are_vllms() -> None:
    args = EngineArgs()
    assert args.gpu_memory_utilization == 0.92 and args.seed == 0 and args.max_logprobs == 20
    assert args.generation_config == "auto" and args.logprobs_mode == "raw_logprobs"
    assert args.scheduling_policy == "fcfs" and args.scheduler_reserve_full_isl and args.watermark == 0.0
    assert args.disable_log_stats and args.max_model_len is None and args.long_prefill_token_threshold == 0
    config = resolve()
    assert (config.block_size, config.max_num_seqs, config.max_model_len) == (16, 256, 1024)
    assert config.enable_prefix_caching and config.enable_chunked_prefill and config.dtype == "float32"


REFUSED: list[tuple[str, Any]] = [
    ("model", 5), ("model", None), ("tokenizer", 3.5), ("revision", 1), ("tokenizer_revision", 1),
    ("dtype", "int8"), ("dtype", torch.int64), ("seed", "0"), ("seed", 1.5), ("seed", -(2**63) - 1),
    ("max_model_len", 0), ("max_model_len", -2), ("max_model_len", "8k"), ("max_model_len", 8.0),
    ("max_model_len", True), ("block_size", 0), ("block_size", 16.0), ("num_gpu_blocks_override", 1),
    ("num_gpu_blocks_override", "9"), ("kv_cache_memory_bytes", 0), ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.1), ("gpu_memory_utilization", "0.9"), ("gpu_memory_utilization", math.nan),
    ("gpu_memory_utilization", None), ("enable_prefix_caching", 0), ("enable_prefix_caching", "no"),
    ("enable_chunked_prefill", 1), ("max_num_batched_tokens", 0), ("max_num_seqs", 0), ("max_num_seqs", True),
    ("long_prefill_token_threshold", -1), ("long_prefill_token_threshold", None), ("scheduling_policy", "lifo"),
    ("scheduler_reserve_full_isl", None), ("watermark", -0.1), ("watermark", 1.5), ("watermark", math.inf),
    ("generation_config", None), ("override_generation_config", None), ("override_generation_config", [1]),
    ("override_generation_config", {"temprature": 1.0}), ("override_generation_config", {"eos_token_id": 1}),
    ("max_logprobs", -2), ("max_logprobs", None), ("logprobs_mode", "raw"), ("disable_log_stats", "yes"),
    ("enforce_eager", 1), ("chat_template", 5),
    # Things this engine does not have.
    ("tokenizer_mode", "slow"), ("quantization", "awq"), ("prefix_caching_hash_algo", "xxhash"),
    ("kv_cache_dtype", "fp8"), ("tensor_parallel_size", 2), ("pipeline_parallel_size", 2), ("data_parallel_size", 2),
    ("speculative_config", {"method": "ngram"}), ("enable_lora", True), ("enable_sleep_mode", 1),
    ("async_scheduling", 1), ("hf_overrides", {"a": 1}), ("cpu_offload_gb", 1),
    ("skip_tokenizer_init", "no"), ("kv_events_config", {"publisher": "zmq"}),
    ("kv_events_config", {"topic": ""}), ("trust_remote_code", "yes")]


@pytest.mark.parametrize("name, value", REFUSED, ids=lambda v: str(v)[:24])
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=name) as caught:
        EngineArgs(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize("name, value", [
    ("tokenizer_mode", "auto"), ("trust_remote_code", True), ("quantization", None), ("tensor_parallel_size", 1),
    ("speculative_config", None), ("enable_lora", False), ("enable_sleep_mode", False), ("async_scheduling", True),
    ("hf_overrides", {}), ("cpu_offload_gb", 0), ("max_logprobs", -1), ("watermark", 0), ("watermark", 1),
    ("gpu_memory_utilization", 1), ("seed", None), ("seed", 2**70), ("enforce_eager", True),
    ("override_generation_config", {"temperature": 0.5, "max_new_tokens": 9})])
def test_accepted(name: str, value: Any) -> None:
    assert getattr(EngineArgs(**{name: value}), name) == value


def test_other_spellings() -> None:
    for dtype, name in (("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), ("auto", "auto")):
        assert EngineArgs(dtype=dtype).dtype == name
    assert EngineArgs(max_model_len="auto").max_model_len == EngineArgs(max_model_len=-1).max_model_len == -1
    assert type(EngineArgs(block_size=np.int64(8)).block_size) is int


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'max_model_length'"):
        LLM(max_model_length=5)
    with pytest.raises(TypeError):
        LLM("model", "tokenizer")  # everything but the model is by keyword


# Arguments together, and with the model


def test_context_of_the_model_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(100).max_model_len == resolve(100, max_model_len=-1).max_model_len == 100
    assert resolve(100, max_model_len=100).max_model_len == 100
    with pytest.raises(VLLMValidationError, match="than the 100 tokens.*VLLM_ALLOW_LONG_MAX_MODEL_LEN") as caught:
        resolve(100, max_model_len=101)
    assert (caught.value.parameter, caught.value.value) == ("max_model_len", 101)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve(100, max_model_len=101).max_model_len == 101


@pytest.mark.parametrize("given, budget, seats", [
    ({}, 4096, 256), ({"max_num_seqs": 5000}, 5000, 5000), ({"max_num_batched_tokens": 64}, 64, 64),
    ({"max_num_batched_tokens": 1000}, 1000, 256), ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, 8, 8),
    ({"enable_chunked_prefill": False}, 9000, 256)])
def test_budget_and_seats(given: dict[str, Any], budget: int, seats: int) -> None:
    config = resolve(9000, **given)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (budget, seats)


def test_budget_on_a_gpu() -> None:
    assert resolve(device="cuda", capability=(8, 0)).max_num_batched_tokens == 8192


@pytest.mark.parametrize("given, parameter, words", [
    ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, "max_num_batched_tokens", "at least max_num_seqs=8"),
    ({"max_num_batched_tokens": 9, "enable_chunked_prefill": False}, "max_num_batched_tokens",
     "at least max_model_len"),
    ({"long_prefill_token_threshold": 101}, "long_prefill_token_threshold", "not be larger than max_model_len=100")])
def test_contradictions(given: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        resolve(100, **given)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("dtype, device, capability, got", [
    ("auto", "cpu", None, "float32"), ("bfloat16", "cpu", None, "bfloat16"), ("auto", "cuda", (7, 5), "float16"),
    ("auto", "cuda", (8, 0), "bfloat16"), ("float16", "cuda", (9, 0), "float16"),
    ("float32", "cuda", (7, 5), "float32")])
def test_dtype_of_each_device(dtype: str, device: str, capability: tuple[int, int] | None, got: str) -> None:
    assert resolve(dtype=dtype, device=device, capability=capability).dtype == got


def test_bfloat16_is_not_emulated() -> None:
    with pytest.raises(VLLMValidationError, match=r"needs compute capability 8\.0, this GPU has 7\.5; use float16"):
        resolve(dtype="bfloat16", device="cuda", capability=(7, 5))


def test_config_is_frozen() -> None:
    config = resolve()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 1
    assert config.with_max_model_len(7).max_model_len == 7 and config.max_model_len == 1024


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("auto"),
                     st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
                     st.lists(st.integers(), max_size=1))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(EngineArgs)]), ANYTHING, max_size=4))
def test_anything_is_accepted_or_refused_in_plain_words(kwargs: dict[str, Any]) -> None:
    try:
        config = EngineConfig.resolve(EngineArgs(**kwargs), 1024, "cpu", None)
    except VLLMValidationError as error:
        assert error.parameter in kwargs or error.parameter == "max_num_batched_tokens"
        return
    assert config.max_num_seqs <= config.max_num_batched_tokens and config.max_model_len >= 1
