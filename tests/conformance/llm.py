"""Rows L: building an `LLM`, and its methods."""

from __future__ import annotations

import inspect
import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from tests.conformance.helpers import LETTERS, ids, letters_llm, one, refuses, steps
from tests.conformance.registry import DIFFERS, NOT_HERE, SAME, row
from tutorial_engine import LLM, EngineArgs, SamplingParams
from tutorial_engine.exceptions import ChatTemplateResolutionError, VLLMValidationError
from tutorial_engine.sampling_params import BeamSearchParams
from tutorial_engine.trace import Trace

GREEDY = {"temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hi"}]


def tiny(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), **{"max_model_len": 64, "num_gpu_blocks_override": 9, **args})


def only_neutral(name: str, neutral: Any, *others: Any) -> None:
    """An argument of a feature that is not here: its neutral value is fine, any other is refused by name."""
    assert getattr(EngineArgs(**{name: neutral}), name) == neutral
    for other in others:
        refuses(name, LLM, **{name: other})


def no_keyword(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        LLM(**{name: 1})


def no_method(*names: str) -> None:
    for name in names:
        assert not hasattr(LLM, name), name


# Arguments


@row("L1", "model", SAME)
def model(tiny_model: Path) -> None:
    """A folder, a .gguf file or a Hugging Face id. Without it, the course's own small model is used; vLLM's LLM wants
    one."""
    with tiny(tiny_model) as llm:
        assert len(one(llm, "ab", max_tokens=2, ignore_eos=True).outputs[0].token_ids) == 2
    assert EngineArgs().model == ""
    with pytest.raises(ValueError, match="nowhere"):
        LLM("./nowhere")
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        LLM(foo=1)


@row("L2", "tokenizer, revision, trust_remote_code", DIFFERS)
def tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """tokenizer, revision and tokenizer_revision do as in vLLM. tokenizer_mode knows "auto" only, and
    trust_remote_code=True changes nothing: no code ever comes from a model."""
    shutil.copytree(tiny_model, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with tiny(tmp_path / "bare", tokenizer=str(tiny_model), trust_remote_code=True) as llm:
        assert one(llm, "ab", max_tokens=1).prompt_token_ids == [0, 100, 101]
    only_neutral("tokenizer_mode", "auto", "slow", "mistral")


@row("L3", "skip_tokenizer_init", SAME)
def skip_tokenizer_init(tiny_model: Path) -> None:
    """No tokenizer: prompts are token ids, text stays "". What needs one (a text, stop strings, chat) is refused."""
    with tiny(tiny_model, skip_tokenizer_init=True) as llm:
        completion = one(llm, {"prompt_token_ids": [5, 6]}, max_tokens=2, ignore_eos=True).outputs[0]
        assert (completion.text, len(completion.token_ids)) == ("", 2)
        for call in (lambda: one(llm, "text"), lambda: one(llm, [5], stop="x"), lambda: llm.chat(HELLO)):
            refuses("skip_tokenizer_init", call)


@row("L4", "dtype", DIFFERS)
def dtype(llm: LLM) -> None:
    """"auto" is float32 on a CPU, where greedy tokens then do not depend on the batch; vLLM takes the checkpoint's
    dtype, and a 16-bit one for float32 checkpoints. On a GPU it is bfloat16, or float16 where that is missing."""
    config = llm.llm_engine.config
    assert config.device != "cpu" or config.dtype == "float32"
    assert EngineArgs(dtype="half").dtype == "float16"
    refuses("dtype", LLM, dtype="int4")


@row("L5", "quantization", NOT_HERE)
def quantization() -> None:
    """Weights are used as they are; the tensors of a .gguf file are unpacked when it is loaded."""
    only_neutral("quantization", None, "awq", "fp8")


@row("L6", "gpu_memory_utilization", DIFFERS)
def gpu_memory_utilization(tiny_model: Path) -> None:
    """0.92 unless said. On a GPU a share of its memory, as in vLLM; on a CPU a share of the memory that is free, and
    the cache takes 2 GiB at most, since a laptop has other things to do."""
    assert EngineArgs().gpu_memory_utilization == 0.92
    for bad in (0, 1.5):
        refuses("gpu_memory_utilization", LLM, gpu_memory_utilization=bad)
    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        tiny(tiny_model, num_gpu_blocks_override=None, gpu_memory_utilization=1e-9)


@row("L7", "kv_cache_memory_bytes", SAME)
def kv_cache_memory_bytes(tiny_model: Path) -> None:
    """Size of the KV cache in bytes; it goes before gpu_memory_utilization."""
    # two layers, K and V, 2 heads of 16 floats, 16 tokens
    block = 2 * 2 * 2 * 16 * 4 * 16
    with tiny(tiny_model, num_gpu_blocks_override=None, kv_cache_memory_bytes=10 * block + 5, dtype="float32",
              gpu_memory_utilization=1e-9) as llm:
        assert llm.llm_engine.num_gpu_blocks == 10
    refuses("kv_cache_memory_bytes", LLM, kv_cache_memory_bytes=0)


@row("L8", "num_gpu_blocks_override", SAME)
def num_gpu_blocks_override(tiny_model: Path) -> None:
    """Number of blocks, the null block included. If a request of max_model_len does not fit into the others, building
    the engine fails; nothing waits for ever later."""
    with pytest.raises(ValueError, match="To serve at least one request with the model's max seq len"):
        tiny(tiny_model, num_gpu_blocks_override=4)
    with tiny(tiny_model, num_gpu_blocks_override=5) as llm:
        assert len(one(llm, [5] * 60, max_tokens=9, ignore_eos=True).outputs[0].token_ids) == 4


@row("L9", "block_size", SAME)
def block_size(llm: LLM) -> None:
    """Tokens per block, 16 unless said. Any size from 1 up will do, on a GPU too."""
    assert llm.llm_engine.config.block_size == 16
    letters = letters_llm("a", block_size=3)
    assert [one(letters, "p" * 10, max_tokens=1).num_cached_tokens for _ in range(2)] == [0, 9]
    refuses("block_size", LLM, block_size=0)


@row("L10", "max_model_len", SAME)
def max_model_len(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: what model and tokenizer allow; -1 or "auto": what fits into the cache. More than the model was made for
    is refused unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."""
    with tiny(tiny_model, max_model_len=None, num_gpu_blocks_override=17) as llm:
        assert llm.llm_engine.config.max_model_len == 256
    for auto in (-1, "auto"):
        with tiny(tiny_model, max_model_len=auto) as llm:
            assert llm.llm_engine.config.max_model_len == 128
    refuses("max_model_len", tiny, tiny_model, max_model_len=257)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with tiny(tiny_model, max_model_len=257, num_gpu_blocks_override=18) as llm:
        assert llm.llm_engine.config.max_model_len == 257


@row("L11", "max_num_seqs", DIFFERS)
def max_num_seqs(llm: LLM) -> None:
    """Requests that run at once, 256 unless said; vLLM's default is 1024 on a GPU of 70 GiB or more."""
    assert llm.llm_engine.config.max_num_seqs == 256
    letters = letters_llm("a", max_num_seqs=2)
    with Trace(letters) as trace:
        letters.generate(["a", "b", "c"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert max(len(record.scheduled) for record in trace) == 2
    refuses("max_num_seqs", LLM, max_num_seqs=0)


@row("L12", "max_num_batched_tokens", DIFFERS)
def max_num_batched_tokens(tiny_model: Path, llm: LLM) -> None:
    """Tokens that one step computes: 4096 on a CPU and 8192 on a GPU unless said; vLLM's default is 16384 on a GPU of
    70 GiB or more. Less than max_num_seqs is refused."""
    config = llm.llm_engine.config
    assert config.max_num_batched_tokens == (4096 if config.device == "cpu" else 8192)
    letters = letters_llm("a", max_num_batched_tokens=8)
    with Trace(letters) as trace:
        one(letters, "p" * 20, max_tokens=1)
    assert [record.scheduled["0"] for record in trace] == [[0, 8], [8, 8], [16, 4]]
    refuses("max_num_batched_tokens", tiny, tiny_model, max_num_batched_tokens=8, max_num_seqs=9)


@row("L13", "enable_chunked_prefill", SAME)
def enable_chunked_prefill(tiny_model: Path, llm: LLM) -> None:
    """On unless said. Off, a prompt waits until a step has room for all of it, and max_num_batched_tokens must hold
    max_model_len. Greedy tokens are the same."""
    assert llm.llm_engine.config.enable_chunked_prefill
    prompts = [[5] * 40, [6] * 50]
    right = [o.outputs for o in llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)]
    for settings in ({"enable_chunked_prefill": False, "max_num_batched_tokens": 66, "max_model_len": 66,
                      "num_gpu_blocks_override": 12, "max_num_seqs": 2}, {"max_num_batched_tokens": 7,
                                                                          "max_num_seqs": 2, "max_model_len": 66}):
        with tiny(tiny_model, **settings) as other, Trace(other) as trace:
            assert [o.outputs for o in other.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)] == right
            assert trace.records[0].scheduled == {"0": [0, 40 if "enable_chunked_prefill" in settings else 7]}
    refuses("max_num_batched_tokens", tiny, tiny_model, enable_chunked_prefill=False, max_num_batched_tokens=63,
            max_num_seqs=2)


@row("L14", "long_prefill_token_threshold", SAME)
def long_prefill_token_threshold(tiny_model: Path) -> None:
    """Prompt tokens of one request per step, unless it is the only request; 0, the default, is no cap. More than
    max_model_len is refused."""
    letters = letters_llm("a", long_prefill_token_threshold=4)
    with Trace(letters) as trace:
        one(letters, "p" * 10, max_tokens=1)
        letters.generate(["q" * 10, "r" * 3], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [list(record.scheduled.values()) for record in trace][:2] == [[[0, 10]], [[0, 4], [0, 3]]]
    refuses("long_prefill_token_threshold", tiny, tiny_model, long_prefill_token_threshold=65)


@row("L15", "scheduling_policy", SAME)
def scheduling_policy() -> None:
    """"fcfs" or "priority", where a lower number goes first."""
    letters = letters_llm("a", scheduling_policy="priority", max_num_seqs=1)
    with Trace(letters) as trace:
        letters.generate(["p", "q", "r"], SamplingParams(max_tokens=1), priority=[2, 0, 1], use_tqdm=False)
    assert [list(record.scheduled) for record in trace] == [["1"], ["2"], ["0"]]
    refuses("scheduling_policy", LLM, scheduling_policy="lottery")


@row("L16", "enable_prefix_caching", SAME)
def enable_prefix_caching(tiny_model: Path, llm: LLM) -> None:
    """On unless said. Greedy tokens are the same without it."""
    first, second = (one(llm, [5] * 40, **GREEDY) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    with tiny(tiny_model, enable_prefix_caching=False) as other:
        outputs = [one(other, [5] * 40, **GREEDY) for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    assert first.outputs == second.outputs == outputs[0].outputs == outputs[1].outputs


@row("L17", "prefix_caching_hash_algo", DIFFERS)
def prefix_caching_hash_algo() -> None:
    """sha256 only. Here the tokens behind a hash are compared as well, so that a weaker one would gain nothing."""
    only_neutral("prefix_caching_hash_algo", "sha256", "xxhash", "sha256_cbor")


@row("L18", "kv_cache_dtype", NOT_HERE)
def kv_cache_dtype() -> None:
    """Keys and values have the model's dtype."""
    only_neutral("kv_cache_dtype", "auto", "fp8", "int8_per_token_head")


@row("L19", "enforce_eager", SAME)
def enforce_eager(tiny_model: Path, llm: LLM) -> None:
    """True: no CUDA graphs. Without it, a GPU runs steps that only decode as graphs; a CPU always runs eagerly."""
    with tiny(tiny_model, enforce_eager=True) as other:
        outputs = one(other, "ab", **GREEDY).outputs
        assert llm.llm_engine.config.device == "cuda" or outputs == one(llm, "ab", **GREEDY).outputs
    refuses("enforce_eager", LLM, enforce_eager="yes")


@row("L20", "tensor_parallel_size", NOT_HERE)
def parallel() -> None:
    """One device; tensor_parallel_size, pipeline_parallel_size and data_parallel_size must be 1."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        only_neutral(name, 1, 2)


@row("L21", "seed", SAME)
def seed(tiny_model: Path) -> None:
    """0 unless said; seeds what requests without a seed of their own draw, so that a notebook can be run again. None
    is another seed each time."""
    def tokens(**args: Any) -> list[int]:
        with tiny(tiny_model, **args) as llm:
            return one(llm, "ab", max_tokens=12, ignore_eos=True).outputs[0].token_ids

    assert tokens() == tokens(seed=0) != tokens(seed=1)
    assert tokens(seed=None) != tokens(seed=None)


@row("L22", "generation_config, override_generation_config", SAME)
def generation_config(tiny_model: Path, tmp_path: Path) -> None:
    """generate() and chat() without SamplingParams use the model's generation_config.json; explicit SamplingParams do
    not. "vllm" ignores the file, a folder replaces it, override_generation_config replaces entries."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9, "max_new_tokens": 3}))

    def defaults(**args: Any) -> tuple[float, int, int]:
        with tiny(folder, **args) as llm:
            params = llm.get_default_sampling_params()
            said = llm.generate("ab", use_tqdm=False)[0].outputs[0].token_ids
            assert len(said) <= params.max_tokens
            assert len(one(llm, "ab", ignore_eos=True).outputs[0].token_ids) == 16
            return params.temperature, params.top_k, params.max_tokens

    assert defaults() == (0.5, 9, 3)
    assert defaults(generation_config="vllm") == (1.0, 0, 16)
    assert defaults(override_generation_config={"temperature": 0.25}) == (0.25, 9, 3)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 4}')
    assert defaults(generation_config=str(other)) == (1.0, 4, 16)


@row("L23", "speculative_config", NOT_HERE)
def speculative_config() -> None:
    """There is no speculative decoding."""
    only_neutral("speculative_config", None, {"method": "ngram", "num_speculative_tokens": 2})


@row("L24", "enable_lora", NOT_HERE)
def enable_lora() -> None:
    """Adapters cannot be loaded."""
    only_neutral("enable_lora", False, True)
    no_keyword("max_loras")


@row("L25", "max_logprobs, logprobs_mode", SAME)
def logprobs_mode(llm: LLM) -> None:
    """20 unless said, -1 for no cap; raw_logprobs unless said, or raw_logits, processed_logprobs, processed_logits.
    The mode is about generated tokens: prompt_logprobs are always raw logprobs."""
    refuses("logprobs", one, llm, "ab", logprobs=21)
    values = {}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"):
        letters = letters_llm("a", logprobs_mode=mode, max_logprobs=-1)
        entries = one(letters, "p", max_tokens=1, temperature=2.0, seed=0, logprobs=-1).outputs[0].logprobs[0]
        assert len(entries) == len(LETTERS)
        values[mode] = entries[ids("a")[0]].logprob
    assert (values["raw_logits"], values["processed_logits"]) == (50.0, 25.0)
    assert values["raw_logprobs"] >= values["processed_logprobs"]
    refuses("logprobs_mode", LLM, logprobs_mode="logits")


@row("L26", "disable_log_stats", SAME)
def disable_log_stats() -> None:
    """True for LLM unless said. With False, RequestOutput.metrics holds times and counts."""
    assert EngineArgs().disable_log_stats
    assert one(letters_llm("a"), "p", max_tokens=1).metrics is None
    assert one(letters_llm("a", disable_log_stats=False), "p", max_tokens=1).metrics.num_generation_tokens == 1


@row("L27", "enable_sleep_mode", DIFFERS)
def enable_sleep_mode(tiny_model: Path) -> None:
    """There is nothing to prepare: sleep() gives memory back with it and without."""
    for enabled in (False, True):
        with tiny(tiny_model, enable_sleep_mode=enabled) as llm:
            llm.sleep()
            assert llm.wake_up()
    refuses("enable_sleep_mode", LLM, enable_sleep_mode="yes")


@row("L28", "scheduler_reserve_full_isl", SAME)
def scheduler_reserve_full_isl() -> None:
    """On unless said: a waiting request is admitted only if its whole prompt fits into the free blocks, even if this
    step computes a part of it."""
    for reserve, second in ((True, []), (False, ["1"])):
        letters = letters_llm("a", num_gpu_blocks=9, max_model_len=32, max_num_batched_tokens=20,
                              **({} if reserve else {"scheduler_reserve_full_isl": False}))
        with Trace(letters) as trace:  # 8 blocks of 4 tokens; the prompts need 4 and 6, this step only 4 and 1
            letters.generate(["p" * 16, "q" * 24], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        assert list(trace.records[0].scheduled) == ["0", *second]


@row("L29", "watermark", SAME)
def watermark() -> None:
    """Share of the blocks that must stay free when a request is admitted while others run; 0 unless said."""
    for share, num_running in ((0.0, 2), (0.5, 1)):
        letters = letters_llm("a", num_gpu_blocks=9, max_model_len=32, watermark=share)
        with Trace(letters) as trace:  # of 8 blocks, 3 and 3
            letters.generate(["p" * 12, "q" * 12], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        assert len(trace.records[0].scheduled) == num_running
    refuses("watermark", LLM, watermark=1.5)


@row("L30", "async_scheduling", SAME)
def async_scheduling() -> None:
    """A step is planned and started while the one before still runs; the tokens are the same."""
    prompts, params = ["p" * 9, "q" * 3], SamplingParams(max_tokens=7, temperature=0.9, seed=5)
    said = [[o.outputs[0].token_ids for o in letters_llm("abc", async_scheduling=ahead).generate(
        prompts, params, use_tqdm=False)] for ahead in (False, True)]
    assert said[0] == said[1]
    refuses("async_scheduling", LLM, async_scheduling="yes")


@row("L31", "chat_template and other arguments", DIFFERS)
def other_arguments(tiny_model: Path) -> None:
    """chat_template and logits_processors do as in vLLM; structured_outputs_config knows the backends "auto" and
    "guidance". hf_overrides and cpu_offload_gb accept their neutral value only; compilation_config is no argument."""
    with tiny(tiny_model, chat_template="{{ messages[0]['content'] }}!") as llm:
        assert llm.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == "Hi!"
    assert EngineArgs(structured_outputs_config={"backend": "guidance"})
    refuses("structured_outputs_config", LLM, structured_outputs_config={"backend": "outlines"})
    only_neutral("hf_overrides", None, {"vocab_size": 5})
    only_neutral("cpu_offload_gb", 0, 4)
    no_keyword("compilation_config")


# Methods


@row("L40", "generate", SAME)
def generate() -> None:
    """Outputs come in the order of the prompts, with request ids "0", "1", ... that a second call continues. Only
    prompts and sampling_params go by position."""
    letters = letters_llm(lambda request: request.prompt_token_ids[0], max_num_seqs=2)
    prompts = ["aaaa", "b", "cc"]
    for first in (0, 3):
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (5, 1, 3)]
        outputs = letters.generate(prompts, params, use_tqdm=False)
        assert [o.prompt for o in outputs] == prompts
        assert [o.outputs[0].text for o in outputs] == ["aaaaa", "b", "ccc"]
        assert [o.request_id for o in outputs] == [str(first + i) for i in range(3)]
    with pytest.raises(TypeError):
        letters.generate("a", SamplingParams(), False)


@row("L41", "forms of prompts", DIFFERS)
def forms_of_prompts() -> None:
    """Text, a list of ids, a dict with "prompt" or "prompt_token_ids" and perhaps "cache_salt", or a sequence of these.
    A prompt with prompt_embeds or multi_modal_data is refused: this engine takes text and tokens only."""
    letters = letters_llm("a")

    def prompts_of(prompts: Any) -> list[list[int]]:
        return [o.prompt_token_ids for o in letters.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)]

    a, b = ids("ab")
    assert prompts_of("ab") == prompts_of([a, b]) == prompts_of({"prompt": "ab"}) == [[a, b]]
    assert prompts_of({"prompt_token_ids": [a, b], "prompt": "shown", "cache_salt": "s"}) == [[a, b]]
    assert prompts_of(("a", "b")) == prompts_of([[a], {"prompt": "b"}]) == [[a], [b]] and prompts_of([]) == []
    for bad, words in ((5, "string, list of tokens, or dictionary"), ([["a"]], "list of integers"),
                       ({}, "should contain"), ({"prompt": 5}, "Prompt text should be a string"),
                       ((a, b), "string, list of tokens, or dictionary"), ({"prompt_embeds": None}, "should contain"),
                       ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
                       ({"prompt_embeds": [[0.5]]}, "prompt_embeds")):
        with pytest.raises(TypeError, match=words):
            prompts_of(bad)


@row("L42", "forms of sampling_params", SAME)
def forms_of_params(llm: LLM) -> None:
    """None for the model's defaults, one for all, or one for each; another number of them is an error, and so for
    priority and lora_request."""
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2]
    with pytest.raises(VLLMValidationError, match=r"The lengths of prompts \(3\) and params \(2\) must be the same"):
        llm.generate(["a"] * 3, [SamplingParams()] * 2, use_tqdm=False)
    for name in ("priority", "lora_request"):
        refuses(name, llm.generate, ["a"] * 3, SamplingParams(), **{name: [0, 0]}, use_tqdm=False)


@row("L43", "a bad prompt in a batch", SAME)
def bad_prompt_in_a_batch(llm: LLM) -> None:
    """The whole call fails, and nothing of it is left in the engine."""
    with pytest.raises(VLLMValidationError):
        llm.generate(["fine", [], "fine"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate(["fine"], SamplingParams(max_tokens=1), use_tqdm=False)) == 1


@row("L44", "empty prompt", SAME)
def empty_prompt(llm: LLM) -> None:
    """"The decoder prompt cannot be empty", unless the tokenizer adds a BOS: then it is a prompt of one token."""
    assert one(llm, "", max_tokens=1).prompt_token_ids == [0]
    for call in (lambda: one(llm, [], max_tokens=1), lambda: one(letters_llm("a"), "")):
        with pytest.raises(VLLMValidationError, match="The decoder prompt cannot be empty"):
            call()


@row("L45", "prompt too long", SAME)
def prompt_too_long(llm: LLM) -> None:
    """A prompt of max_model_len tokens or more is refused with the limit in the message; nothing is cut off
    silently."""
    for prompt in ([5] * 128, [5] * 129, "x" * 200):
        with pytest.raises(VLLMValidationError, match="maximum context length is 128 tokens") as error:
            one(llm, prompt)
        assert error.value.parameter == "input_tokens"


@row("L46", "token id out of range", SAME)
def token_out_of_range(llm: LLM) -> None:
    """Refused by name: "Token id X is out of vocabulary"."""
    for bad in (-1, 320):
        with pytest.raises(VLLMValidationError, match=f"Token id {bad} is out of vocabulary"):
            one(llm, [5, bad])


@row("L47", "special tokens of a prompt", SAME)
def special_tokens(llm: LLM) -> None:
    """generate() adds the BOS, chat() leaves it to the template; tokenization_kwargs takes add_special_tokens,
    truncate_prompt_tokens and truncation_side. Here a prompt with two BOS tokens is warned about."""
    def tokens(**kwargs: Any) -> list[int]:
        params = SamplingParams(max_tokens=1)
        return llm.generate("ab", params, use_tqdm=False, tokenization_kwargs=kwargs)[0].prompt_token_ids

    assert tokens() == [0, 100, 101] and tokens(add_special_tokens=False) == [100, 101]
    assert tokens(truncate_prompt_tokens=1, truncation_side="left") == [101]
    assert llm.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids.count(0) == 1


@row("L48", "progress bars", SAME)
def progress_bars() -> None:
    """"Rendering prompts" (or "Rendering conversations"), then "Processed prompts", which counts completions and shows
    tokens per second. use_tqdm may be a callable that makes the bar."""
    bars: list[tqdm] = []

    def make(*args: Any, **kwargs: Any) -> tqdm:
        bars.append(tqdm(*args, file=io.StringIO(), **kwargs))
        return bars[-1]

    params = [SamplingParams(max_tokens=1), SamplingParams(n=3, max_tokens=1)]
    letters_llm("a").generate(["p", "q"], params, use_tqdm=make)
    assert [bar.desc for bar in bars] == ["Rendering prompts", "Processed prompts"]
    assert [(bar.n, bar.total) for bar in bars] == [(2, 2), (4, 4)]
    assert "est. speed input" in bars[1].postfix and "output" in bars[1].postfix


@row("L49", "chat", SAME)
def chat(llm: LLM) -> None:
    """One conversation or a list of them, with vLLM's arguments in vLLM's order. A model without a template raises
    ChatTemplateResolutionError; add_generation_prompt and continue_final_message exclude each other; keywords that the
    template does not know are dropped."""
    assert list(inspect.signature(LLM.chat).parameters)[1:12] == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "priority", "chat_template",
        "chat_template_content_format", "add_generation_prompt", "continue_final_message", "tools",
        "chat_template_kwargs"]
    params = SamplingParams(max_tokens=1)
    (output,) = llm.chat(HELLO, params, use_tqdm=False, chat_template_kwargs={"nonsense": 1})
    assert output.prompt == "<s><|turn|>user: Hi<|turn|>assistant: "
    assert len(llm.chat([HELLO, HELLO], params, use_tqdm=False)) == 2
    with pytest.raises(VLLMValidationError):
        llm.chat(HELLO, params, use_tqdm=False, continue_final_message=True)
    with pytest.raises(ChatTemplateResolutionError, match="default chat template is no longer allowed"):
        letters_llm("a").chat(HELLO, params, use_tqdm=False)


@row("L50", "enqueue, enqueue_chat, wait_for_completion", SAME)
def enqueue(llm: LLM) -> None:
    """The two halves of generate() and chat(): queue and get the ids, then run everything that is queued."""
    params = SamplingParams(max_tokens=1)
    queued = llm.enqueue(["a", "b"], params, use_tqdm=False) + llm.enqueue_chat(HELLO, params, use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == queued


@row("L51", "beam_search", SAME)
def beam_search(llm: LLM) -> None:
    """BeamSearchParams(beam_width, max_tokens, ...) in, the best sequences out, the best first; the text of each holds
    the prompt too."""
    (output,) = llm.beam_search(["ab"], BeamSearchParams(beam_width=3, max_tokens=4))
    scores = [s.cum_logprob / (len(s.tokens) - 3) for s in output.sequences]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    best = output.sequences[0]
    assert best.tokens[:3] == [0, 100, 101] and "ab" in best.text and len(best.logprobs) == len(best.tokens) - 3
    refuses("beam_width", BeamSearchParams, beam_width=0, max_tokens=1)


@row("L52", "get_tokenizer, get_default_sampling_params", SAME)
def getters(llm: LLM) -> None:
    """The tokenizer is transformers' own; the defaults are those of generation_config.json."""
    assert llm.get_tokenizer().decode([100, 101]) == "ab"
    assert llm.get_default_sampling_params() == SamplingParams()


@row("L53", "llm_engine", SAME)
def llm_engine() -> None:
    """add_request, step, has_unfinished_requests, get_num_unfinished_requests and abort_request, for a loop of your
    own. An id that is not text is a TypeError. LLM numbers its own requests "0", "1", ...; an id that it waits for is
    refused, and generate() keeps its own outputs only."""
    engine = letters_llm("ab").llm_engine
    engine.add_request("mine", "p", SamplingParams(temperature=0, max_tokens=2))
    engine.add_request("other", "p", SamplingParams(n=2))
    assert engine.get_num_unfinished_requests() == 2
    engine.abort_request(["other", "unknown"])
    texts = []
    while engine.has_unfinished_requests():
        texts += [(o.request_id, o.outputs[0].text) for o in engine.step()]
    assert texts == [("mine", "a"), ("mine", "ab")]
    with pytest.raises(TypeError):
        engine.add_request(1, "p", SamplingParams())


@row("L54", "sleep, wake_up, release_kv_cache_memory", SAME)
def sleep(tiny_model: Path) -> None:
    """Memory is given back and fetched again, wholly or by tags; afterwards the engine says what it said before.
    wake_up returns whether it is fully awake."""
    with tiny(tiny_model) as llm:
        right = one(llm, "ab", **GREEDY).outputs
        llm.sleep(level=2)
        assert not llm.wake_up(tags=["weights"]) and llm.wake_up()
        assert one(llm, "ab", **GREEDY).outputs == right
        llm.release_kv_cache_memory()
        assert llm.wake_up() and one(llm, "ab", **GREEDY).outputs == right
        for wrong in ({"level": 3}, {"mode": "later"}):
            refuses(next(iter(wrong)), llm.sleep, **wrong)


@row("L55", "reset_prefix_cache", SAME)
def reset_prefix_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Forgets all cached blocks. While requests hold some it warns and returns False, unless
    reset_running_requests=True preempts them first, which does not change what they say."""
    letters = letters_llm("abcd")
    assert one(letters, "p" * 9, max_tokens=1).num_cached_tokens == 0 and letters.reset_prefix_cache()
    assert one(letters, "p" * 9, max_tokens=1).num_cached_tokens == 0
    letters.llm_engine.add_request("r", "p" * 9, SamplingParams(temperature=0, max_tokens=4))
    letters.llm_engine.step()
    with caplog.at_level(logging.WARNING):
        assert not letters.reset_prefix_cache() and caplog.messages
    assert letters.reset_prefix_cache(reset_running_requests=True)
    assert steps(letters)[-1].outputs[0].text == "abcd"


@row("L56", "get_metrics", SAME)
def get_metrics() -> None:
    """Counters, gauges and histograms under vLLM's names, with labels; AssertionError unless disable_log_stats=False.
    Histograms of times have some finer buckets at their lower end."""
    letters = letters_llm("a", disable_log_stats=False)
    letters.generate(["pqr", "s"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    metrics = {metric.name: metric for metric in letters.get_metrics()}
    assert (metrics["vllm:prompt_tokens"].value, metrics["vllm:generation_tokens"].value) == (4, 4)
    assert metrics["vllm:num_requests_running"].value == 0 and metrics["vllm:prompt_tokens"].labels["engine"] == "0"
    assert metrics["vllm:time_to_first_token_seconds"].count == 2
    with pytest.raises(AssertionError, match="Stat logging disabled"):
        letters_llm("a").get_metrics()


@row("L57", "start_profile, stop_profile", NOT_HERE)
def profile() -> None:
    """Profile the process with PyTorch's own profiler: the engine runs in it."""
    no_method("start_profile", "stop_profile")


@row("L58", "collective_rpc, apply_model", DIFFERS)
def apply_model(llm: LLM) -> None:
    """A list of one result, of the one worker, which runs in this process; so nothing can end a call early, and timeout
    must be None."""
    assert llm.apply_model(lambda model: model.config.num_hidden_layers) == [2]
    assert llm.collective_rpc(lambda worker, a, b: a + b, args=(1,), kwargs={"b": 2}) == [3]
    refuses("timeout", llm.collective_rpc, "close", timeout=1.0)


@row("L59", "encode, embed, classify, score", NOT_HERE)
def pooling() -> None:
    """Models that generate text are the only ones."""
    no_method("encode", "embed", "classify", "score", "reward")


@row("L60", "from_engine_args and methods for operations", NOT_HERE)
def operations() -> None:
    """from_engine_args, get_world_size, reset_mm_cache and the transfer of weights are for training loops and
    clusters; LLMEngine.from_engine_args does exist."""
    no_method("from_engine_args", "get_world_size", "reset_mm_cache", "update_weights", "init_weight_transfer_engine")
