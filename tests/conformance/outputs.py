"""Rows O: the records that come back, and the import paths."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest

import tutorial_engine
from tests.conformance.helpers import ids, letters_llm, one
from tests.conformance.registry import DIFFERS, SAME, row
from tutorial_engine import CompletionOutput, RequestOutput

# vLLM's module -> the names that this package has under the same path. "" is the package itself.
IMPORTS = {
    "": ["LLM", "LLMEngine", "AsyncLLMEngine", "SamplingParams", "EngineArgs", "AsyncEngineArgs", "RequestOutput",
         "CompletionOutput", "PromptType", "TextPrompt", "TokensPrompt", "__version__"],
    "sampling_params": ["SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "BeamSearchParams"],
    "outputs": ["RequestOutput", "CompletionOutput"],
    "logprobs": ["Logprob", "PromptLogprobs", "SampleLogprobs"],
    "inputs": ["PromptType", "TextPrompt", "TokensPrompt"],
    "exceptions": ["VLLMError", "VLLMClientError", "VLLMValidationError"],
    "lora.request": ["LoRARequest"],
    "engine.arg_utils": ["EngineArgs", "AsyncEngineArgs"],
    "engine.llm_engine": ["LLMEngine"],
    "engine.async_llm_engine": ["AsyncLLMEngine"],
    "v1.engine.async_llm": ["AsyncLLM"],
    "v1.sample.logits_processor": ["LogitsProcessor", "AdapterLogitsProcessor", "BatchUpdate", "MoveDirectionality"],
}
MISSING = ["PoolingParams", "ModelRegistry", "EmbeddingRequestOutput", "ClassificationRequestOutput",
           "ScoringRequestOutput", "PoolingRequestOutput"]


def fields(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


@row("O1", "RequestOutput", SAME)
def request_output() -> None:
    """All of vLLM's fields. prompt is None if the prompt came as token ids; num_cached_tokens is the hit at the first
    scheduling, also after a preemption; metrics is None unless disable_log_stats=False. Fields for encoders and for
    moving caches between engines are None."""
    assert fields(RequestOutput) >= {
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics",
        "lora_request", "encoder_prompt", "encoder_prompt_token_ids", "num_cached_tokens", "num_cache_creation_tokens",
        "prompt_token_id_logprobs", "kv_transfer_params", "ec_transfer_params"}
    llm = letters_llm("ab", disable_log_stats=False)
    text, tokens = (one(llm, prompt, temperature=0, max_tokens=2) for prompt in ("p" * 9, ids("p" * 9)))
    assert (text.prompt, text.prompt_token_ids, text.finished) == ("p" * 9, ids("p" * 9), True)
    assert tokens.prompt is None and (text.num_cached_tokens, tokens.num_cached_tokens) == (0, 8)
    assert text.metrics.num_generation_tokens == 2 and text.metrics.num_preemptions == 0
    assert text.metrics.queued_ts <= text.metrics.scheduled_ts <= text.metrics.first_token_ts


@row("O2", "CompletionOutput", SAME)
def completion_output() -> None:
    """All of vLLM's fields and finished(). finish_reason is "stop", "length", "abort", "error" or None; stop_reason is
    the stop string or token id, and None for EOS, length and abort."""
    assert fields(CompletionOutput) >= {
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "routed_experts", "finish_reason",
        "stop_reason", "lora_request", "sampling_mask", "spec_decode_metrics", "weight_versions"}
    completion = one(letters_llm("ab"), "p", temperature=0, max_tokens=2).outputs[0]
    assert completion.finished() and (completion.finish_reason, completion.stop_reason) == ("length", None)


@row("O3", "Logprob", SAME)
def logprob() -> None:
    """logprob, rank and decoded_token, importable from the package's logprobs module."""
    from tutorial_engine.logprobs import Logprob

    completion = one(letters_llm("ab"), "p", temperature=0, max_tokens=1, logprobs=0).outputs[0]
    entry = completion.logprobs[0][ids("a")[0]]
    assert entry == Logprob(logprob=pytest.approx(0, abs=1e-6), rank=1, decoded_token="a")


@row("O4", "names in the package", DIFFERS)
def top_level_names() -> None:
    """What an engine for text needs is there. What belongs to pooling models and to models of your own is not, and
    importing it raises ImportError."""
    for name in IMPORTS[""]:
        assert hasattr(tutorial_engine, name), name
    for name in MISSING:
        assert not hasattr(tutorial_engine, name), name


@row("O5", "modules", SAME)
def module_paths() -> None:
    """The table above lists vLLM's module paths that exist here with the same names in them."""
    for module, names in IMPORTS.items():
        found = import_module(f"tutorial_engine.{module}".rstrip("."))
        assert all(hasattr(found, name) for name in names), module
