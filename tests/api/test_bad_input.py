"""Bad input costs the others nothing: it is refused before anything is computed, and the engine stays clean."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.support import byte_ids, greedy, piece_ids, piece_tokenizer, scripted_engine, scripted_llm
from tests.core.support import assert_clean
from tutorial_engine import LLM, RequestOutput, SamplingParams
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.request import Request

LETTERS = piece_tokenizer()
GOOD = [0, *byte_ids(b"a good prompt of more than one block")]

# (prompt, parameters, error, words): each is one way to be wrong.
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": ([], {}, VLLMValidationError, "cannot be empty"),
    "empty dict": ({"prompt_token_ids": []}, {}, VLLMValidationError, "cannot be empty"),
    "too long": ([5] * 129, {}, VLLMValidationError, "maximum context length is 128"),
    "as long as the context": ("x" * 127, {}, VLLMValidationError, "maximum context length is 128"),
    "unknown token": ([5, 320], {}, VLLMValidationError, "Token id 320 is out of vocabulary"),
    "negative token": ([-1], {}, VLLMValidationError, "Token id -1 is out of vocabulary"),
    "not a prompt": (5.0, {}, TypeError, "string, list of tokens, or dictionary"),
    "none": (None, {}, TypeError, "string, list of tokens, or dictionary"),
    "mixed list": ([5, "a"], {}, TypeError, "list of integers"),
    "no text": ({"text": "a"}, {}, TypeError, "does not have"),
    "bias of an unknown token": ("a", {"logit_bias": {325: 1.0}}, VLLMValidationError, "325"),
    "unknown allowed token": ("a", {"allowed_token_ids": [320]}, VLLMValidationError, "320"),
    "unknown stop token": ("a", {"stop_token_ids": [999]}, VLLMValidationError, "999"),
    "too many logprobs": ("a", {"logprobs": 21}, VLLMValidationError, "max_logprobs"),
    "too many prompt logprobs": ("a", {"prompt_logprobs": -1}, VLLMValidationError, "max_logprobs"),
    "no room for min_tokens": ("a", {"max_tokens": None, "min_tokens": 127}, VLLMValidationError, "min_tokens"),
    "bad word of nothing": ("a", {"bad_words": [" "]}, VLLMValidationError, "no token at all")}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", BAD)
def test_one_bad_request_in_a_batch(kind: str, position: int, llm: LLM) -> None:
    prompt, params, error, words = BAD[kind]
    prompts, all_params = [GOOD, GOOD[:9]], [greedy(3), greedy(3)]
    prompts.insert(position, prompt)
    all_params.insert(position, greedy(**{"max_tokens": 3, **params}))
    steps = []
    runner = llm.llm_engine.model_runner
    runner.execute_model, real = (lambda plan: steps.append(plan)), runner.execute_model
    try:
        with pytest.raises(error, match=words):
            llm.generate(prompts, all_params, use_tqdm=False)
    finally:
        runner.execute_model = real
    assert not steps  # refused before anything was computed
    assert_clean(llm.llm_engine)


def test_the_engine_serves_on_after_all_of_them(llm: LLM) -> None:
    (expected,) = llm.generate([GOOD], greedy(8), use_tqdm=False)
    for prompt, params, error, _ in BAD.values():
        with pytest.raises(error):
            llm.generate([GOOD, prompt], [greedy(3), greedy(**{"max_tokens": 3, **params})], use_tqdm=False)
    llm.reset_prefix_cache()
    (again,) = llm.generate([GOOD], greedy(8), use_tqdm=False)
    assert again.outputs == expected.outputs


@pytest.mark.parametrize("kind", BAD)
def test_a_running_request_does_not_notice(kind: str, llm: LLM) -> None:
    prompt, params, error, _ = BAD[kind]
    (alone,) = llm.generate([GOOD], greedy(8, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    engine.add_request("a", GOOD, greedy(8, ignore_eos=True))
    outputs = [*engine.step(), *engine.step()]
    with pytest.raises(error):
        engine.add_request("b", prompt, greedy(**{"max_tokens": 3, **params}))
    assert engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].request_id == "a" and outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], ["greedy"], [greedy(), None], 5])
def test_parameters_of_the_wrong_type(params: Any, llm: LLM) -> None:
    prompts = ["a"] * (len(params) if isinstance(params, list) else 1)
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        llm.generate(prompts, params, use_tqdm=False)
    assert_clean(llm.llm_engine)


@pytest.mark.parametrize("prompts", [5, None, {1, 2}, b"bytes", iter(["a"])])
def test_prompts_of_the_wrong_type(prompts: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="Prompt should be a string, list of tokens, or dictionary"):
        llm.generate(prompts, use_tqdm=False)


# Anything at all

PROMPTS = st.one_of(st.text("abc", max_size=4), st.lists(st.integers(-1, 100), max_size=4), st.just(GOOD),
                    st.none(), st.integers(), st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x"]),
                                                              st.one_of(st.text("ab", max_size=2), st.lists(
                                                                  st.integers(0, 9), max_size=2)), max_size=2))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(PROMPTS, max_size=4), st.sampled_from([{}, {"logit_bias": {98: 1.0}}, {"stop_token_ids": [200]},
                                                       {"n": 2, "seed": 1}, {"max_tokens": None, "min_tokens": 60}]))
def test_all_answers_or_a_clean_refusal(prompts: list[Any], params: dict[str, Any]) -> None:
    llm = scripted_llm(LETTERS, piece_ids(LETTERS, "a", "b"), num_gpu_blocks=17)
    try:
        outputs = llm.generate(prompts, SamplingParams(**{"max_tokens": 3, **params}), use_tqdm=False)
    except (TypeError, VLLMValidationError):
        pass
    else:
        assert len(outputs) == len(prompts) or isinstance(prompts[0], int)  # a list of ints is one prompt
    assert_clean(llm.llm_engine)
    (output,) = llm.generate("ok", greedy(2), use_tqdm=False)
    assert output.outputs[0].text == "ab"


# Everything that is accepted, at once

VOCAB = len(LETTERS)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=3)
VALID = st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.01, 0.7, 2.0])}, optional={
    "seed": st.integers(-(2**63), 2**63 - 1), "top_k": st.integers(-1, 2 * VOCAB), "top_p": st.floats(1e-3, 1),
    "min_p": st.floats(0, 1), "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100), "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
    "min_tokens": st.integers(0, 1), "bad_words": st.lists(st.text("ab", min_size=1, max_size=2), max_size=4),
    "stop": st.lists(st.text("abc ", min_size=1, max_size=2), max_size=2), "stop_token_ids": IDS,
    "ignore_eos": st.booleans(), "logprobs": st.integers(0, 5), "prompt_logprobs": st.none(),
    "skip_special_tokens": st.booleans(), "include_stop_str_in_output": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-1e4, 1e4), max_size=3),
    "allowed_token_ids": st.lists(st.integers(2, VOCAB - 1), min_size=2, max_size=5, unique=True)})


def noise(request: Request) -> torch.Tensor:
    """Logits that depend on everything said so far."""
    seed = hash(tuple(request.all_token_ids)) & 0xFFFFFFFF
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def check_promises(output: RequestOutput, params: SamplingParams) -> None:
    for completion in output.outputs:
        ids = completion.token_ids
        limit = min(params.max_tokens or 64, 64 - len(output.prompt_token_ids))
        assert 1 <= len(ids) <= limit
        if params.allowed_token_ids is not None:
            assert set(ids) <= set(params.allowed_token_ids)
        if completion.finish_reason == "length":
            assert len(ids) == limit and completion.stop_reason is None
        else:
            assert completion.finish_reason == "stop"
            stopped_by_token = ids[-1] in params.stop_token_ids or (ids[-1] == 0 and not params.ignore_eos)
            assert completion.stop_reason in params.stop or stopped_by_token
        stopping = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
        assert not stopping & set(ids[:-1])
        if not params.include_stop_str_in_output and not params.min_tokens:
            assert not any(stop in completion.text for stop in params.stop)
        if params.logprobs is not None:
            assert [next(iter(entry)) for entry in completion.logprobs] == ids
            assert all(params.logprobs <= len(entry) <= params.logprobs + 1 for entry in completion.logprobs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.text("abc ", min_size=1, max_size=9), VALID, st.integers(1, 3)), min_size=1, max_size=4))
def test_random_parameters_keep_their_promises(crowd: list[tuple[str, dict[str, Any], int]]) -> None:
    """Many requests of all kinds in one batch, in a pool that is too small for them; and each as if it were alone."""
    engine = scripted_engine(LETTERS, noise, num_gpu_blocks=20, max_num_batched_tokens=12, max_num_seqs=4)
    accepted: dict[str, tuple[str, SamplingParams]] = {}
    for i, (prompt, knobs, n) in enumerate(crowd):
        params = SamplingParams(**{"seed": i, **knobs}, n=1 if knobs["temperature"] == 0 else n)
        try:
            accepted[engine.add_request(str(i), prompt, params)] = prompt, params
        except VLLMValidationError as error:
            assert "no token could be chosen" in str(error)
    outputs: dict[str, dict[int, Any]] = {}
    for _ in range(400):  # at most 12 requests of at most 63 tokens, four at a time; and each preemption costs a few
        for output in engine.step():
            for completion in output.outputs:
                outputs.setdefault(output.request_id, {})[completion.index] = completion
    assert_clean(engine)
    for name, (prompt, params) in accepted.items():
        (alone,) = scripted_llm(LETTERS, noise).generate(prompt, params.clone(), use_tqdm=False)
        check_promises(alone, params)
        assert [outputs[name][j] for j in range(params.n)] == alone.outputs
