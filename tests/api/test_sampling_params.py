"""`SamplingParams`: defaults, ranges, what is normalised, what is refused and in which words."""

import dataclasses
import logging
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutorial_engine import SamplingParams
from tutorial_engine.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from tutorial_engine.sampling_params import RequestOutputKind

DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "spaces_between_special_tokens": True,
    "output_kind": RequestOutputKind.CUMULATIVE, "logit_bias": None, "allowed_token_ids": None, "bad_words": [],
    "structured_outputs": None, "extra_args": None, "skip_reading_prefix_cache": False}


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


def test_positional_order() -> None:
    given = SamplingParams(2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8, "stop", [9], True, 10, 11 - 1, 0, 1)
    names = list(DEFAULTS)[:16]
    assert names == [f.name for f in dataclasses.fields(SamplingParams)][:16]
    assert [getattr(given, name) for name in names] == [
        2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8, ["stop"], [9], True, 10, 10, 0, 1]


def test_equality_and_clone() -> None:
    one = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    assert one == SamplingParams(stop="a", logit_bias={1: 2.0}) != SamplingParams(stop="b", logit_bias={1: 2.0})
    copy = one.clone()
    assert copy == one
    copy.stop.append("b")
    copy.logit_bias[1] = 3.0
    assert one.stop == ["a"] and one.logit_bias == {1: 2.0}


def test_caller_keeps_their_lists() -> None:
    stop, ids, words, bias = ["a"], [1], ["w"], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, bad_words=words, logit_bias=bias, allowed_token_ids=ids)
    params.stop.append("b")
    params.stop_token_ids.append(2)
    params.bad_words.append("v")
    params.logit_bias[2] = 0.0
    params.allowed_token_ids.append(3)
    assert (stop, ids, words, bias) == (["a"], [1], ["w"], {1: 1.0})


REFUSED: list[tuple[str, Any]] = [
    ("n", 0), ("n", -1), ("n", 1.0), ("n", None), ("n", "2"), ("n", 16385),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", math.nan),
    ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", -math.inf),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan), ("repetition_penalty", 1e39), ("repetition_penalty", 10**400),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", 10**400),
    ("top_p", 0.0), ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan),
    ("top_k", -2), ("top_k", 1.0), ("top_k", None),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
    ("seed", 0.5), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", "7"),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", {"a": 1}), ("stop", [["a"]]),
    ("stop_token_ids", ["1"]), ("stop_token_ids", [1.0]), ("stop_token_ids", 5), ("stop_token_ids", "12"),
    ("stop_token_ids", [[1]]), ("stop_token_ids", [None]),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5),
    ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None), ("min_tokens", 0.5),
    ("logprobs", -2), ("logprobs", 1.0), ("logprobs", "5"),
    ("prompt_logprobs", -2), ("prompt_logprobs", 0.0),
    ("logit_bias", [(1, 2.0)]), ("logit_bias", {"1": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}), ("logit_bias", {1: 1e39}), ("logit_bias", {1.0: 1.0}),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", ["1"]), ("allowed_token_ids", 5),
    ("bad_words", [""]), ("bad_words", ["a", ""]), ("bad_words", "word"), ("bad_words", [5]),
    ("output_kind", 0), ("output_kind", "DELTA"),
    ("ignore_eos", "no"), ("detokenize", None), ("skip_special_tokens", 0), ("include_stop_str_in_output", "yes"),
    ("skip_reading_prefix_cache", "no"),
    ("structured_outputs", {"json": {}}), ("spaces_between_special_tokens", False),
]


@pytest.mark.parametrize("name, value", REFUSED, ids=lambda v: str(v)[:24])
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert error.parameter == name and name in str(error)
    # The value is the argument, or the element of it that is wrong.
    assert error.value is value or error.value == value or value != value or error.value in value or (
        isinstance(value, dict) and error.value in value.values()) or value == {1: math.nan}
    assert isinstance(error, (VLLMError, VLLMClientError)) and isinstance(error, ValueError)


@pytest.mark.parametrize("name, value", [
    ("n", 16384), ("presence_penalty", 2), ("presence_penalty", -2), ("frequency_penalty", 2.0),
    ("frequency_penalty", -2.0), ("repetition_penalty", 5), ("repetition_penalty", 1e-6), ("temperature", 2.0),
    ("temperature", 0.01), ("top_p", 1), ("top_p", 1e-9), ("top_k", -1), ("top_k", 0), ("top_k", 10**6), ("min_p", 0),
    ("min_p", 1), ("seed", 0), ("seed", 2**63 - 1), ("seed", -(2**63)), ("max_tokens", 1), ("max_tokens", None),
    ("min_tokens", 16), ("logprobs", -1), ("logprobs", 0), ("logprobs", 10**9), ("prompt_logprobs", -1),
    ("logit_bias", {}), ("logit_bias", {1: 300.0}), ("allowed_token_ids", [0]), ("stop", []), ("bad_words", None)])
def test_accepted(name: str, value: Any) -> None:
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == value or (name == "bad_words" and got == [])


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                  "repetition_penalty"])
@pytest.mark.parametrize("value", [None, "1", [1.0]])
def test_plain_floats_do_not_take_none_or_text(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        SamplingParams(**{name: value})


def test_limit_of_n_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    assert SamplingParams(n=3).n == 3
    with pytest.raises(VLLMValidationError, match="n must be at most 3, got 4"):
        SamplingParams(n=4)


def test_temperature_close_to_zero_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """1e-6 is not greedy: it samples at 0.01. Only 0 is greedy."""
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=1e-6, top_p=0.5)
    assert params.temperature == 0.01 and not params.greedy and params.top_p == 0.5
    assert "0.01" in caplog.text and "greedy" in caplog.text
    caplog.clear()
    assert SamplingParams(temperature=0.01).temperature == 0.01 and SamplingParams(temperature=0).greedy
    assert not caplog.text


def test_greedy_resets_truncation_and_keeps_the_rest() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1, logit_bias={1: 1},
                            repetition_penalty=2, bad_words=["x"], min_tokens=1)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.presence_penalty, params.repetition_penalty, params.min_tokens) == (1.0, 2.0, 1)
    assert params.logit_bias == {1: 1.0} and params.bad_words == ["x"]


def test_greedy_allows_one_completion() -> None:
    with pytest.raises(VLLMValidationError, match=r"n must be 1 when using greedy sampling.*got 2\.") as caught:
        SamplingParams(temperature=0, n=2)
    assert caught.value.parameter == "n" and caught.value.value == 2


def test_normalised_values() -> None:
    params = SamplingParams(seed=-1, stop="end", stop_token_ids=[3, 1, 3], bad_words=["b", "a", "b"], logprobs=True,
                            prompt_logprobs=True)
    assert params.seed is None and params.stop == ["end"]
    assert params.stop_token_ids == [3, 1] and params.bad_words == ["b", "a"]
    assert params.logprobs == 1 and params.prompt_logprobs == 1 and params.skip_reading_prefix_cache
    assert not SamplingParams(logprobs=1).skip_reading_prefix_cache
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache


def test_lists_may_be_other_collections() -> None:
    params = SamplingParams(stop=("a", "b"), stop_token_ids=range(3), bad_words={"x"}, allowed_token_ids=(4, 5))
    assert params.stop == ["a", "b"] and params.stop_token_ids == [0, 1, 2] and params.bad_words == ["x"]
    assert params.allowed_token_ids == [4, 5] and SamplingParams(allowed_token_ids={7}).allowed_token_ids == [7]


def test_numbers_of_other_kinds_become_pythons_own() -> None:
    """numpy's integers overflow silently where a seed is hashed, and torch takes no Fraction."""
    params = SamplingParams(
        n=np.int64(2), seed=np.int64(7), max_tokens=np.int32(5), top_k=np.int64(3), temperature=Fraction(1, 2),
        top_p=np.float32(0.5), stop_token_ids=[np.int64(1)], logit_bias={np.int64(1): Fraction(1, 4)},
        allowed_token_ids=[np.int64(1)], repetition_penalty=2)
    for value in [params.n, params.seed, params.max_tokens, params.top_k, *params.stop_token_ids, *params.logit_bias,
                  *params.allowed_token_ids]:
        assert type(value) is int
    for value in [params.temperature, params.top_p, params.repetition_penalty, *params.logit_bias.values()]:
        assert type(value) is float


def test_stop_strings_need_text() -> None:
    with pytest.raises(VLLMValidationError, match="detokenize=True") as caught:
        SamplingParams(stop=["a"], detokenize=False)
    assert caught.value.parameter == "stop"
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop == []


def test_min_tokens_against_max_tokens() -> None:
    with pytest.raises(VLLMValidationError, match="min_tokens must not be larger than max_tokens=3, got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6  # checked when the prompt is known


@pytest.mark.parametrize("name, hint", [
    ("best_of", "rank them"), ("use_beam_search", "LLM.beam_search"), ("length_penalty", "beam search"),
    ("early_stopping", "beam search"), ("logits_processors", "given to the engine"),
    ("guided_decoding", "structured_outputs"), ("truncate_prompt_tokens", "tokenization_kwargs"),
    ("repetition_detection", "vLLM has it; this engine does not"), ("logprob_token_ids", "this engine does not"),
    ("foo", "")])
def test_unknown_keyword(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^Unexpected keyword argument '{name}'.*{hint}"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match="Unexpected keyword"):
        SamplingParams.from_optional(**{name: 1})


class TestFromOptional:
    def test_none_means_default(self) -> None:
        given = dict.fromkeys(DEFAULTS, None)
        assert SamplingParams.from_optional(**given) == SamplingParams(max_tokens=None)
        del given["max_tokens"]
        assert SamplingParams.from_optional(**given) == SamplingParams()

    def test_logit_bias_is_clamped_and_its_keys_may_be_text(self) -> None:
        params = SamplingParams.from_optional(logit_bias={"5": 300, 6: -300.0, "7": math.inf, 8: 1})
        assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 100.0, 8: 1.0}
        assert SamplingParams(logit_bias={5: 300.0}).logit_bias == {5: 300.0}  # the constructor does not clamp

    @pytest.mark.parametrize("bias", [{"x": 1.0}, {"1": math.nan}, {1.5: 1.0}, [1], {"-1": 1.0}])
    def test_bad_logit_bias(self, bias: Any) -> None:
        with pytest.raises(VLLMValidationError) as caught:
            SamplingParams.from_optional(logit_bias=bias)
        assert caught.value.parameter == "logit_bias"

    def test_values_are_checked(self) -> None:
        with pytest.raises(VLLMValidationError):
            SamplingParams.from_optional(temperature=3.0)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
    st.sampled_from([10**400, Fraction(1, 3)]),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=2), st.floats()), max_size=3),
    st.dictionaries(st.one_of(st.integers(-2, 9), st.text(max_size=2)), st.one_of(st.floats(), st.none()), max_size=3),
    st.sampled_from(RequestOutputKind), st.binary(max_size=2), st.tuples(st.integers(0, 3)), st.just(object()))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(list(DEFAULTS)), ANYTHING, max_size=6), st.booleans())
def test_anything_is_accepted_or_refused_in_plain_words(kwargs: dict[str, Any], optional: bool) -> None:
    try:
        params = (SamplingParams.from_optional if optional else SamplingParams)(**kwargs)
    except (VLLMValidationError, TypeError) as error:
        assert str(error)
        return
    assert params.clone() == params
    assert dataclasses.replace(params) == params  # what was normalised stays as it is
