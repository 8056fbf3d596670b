"""Prompt forms, tokenising, and everything that is checked when a request is admitted."""

from typing import Any

import numpy as np
import pytest

from tests.api.support import byte_ids, byte_tokenizer, greedy, piece_tokenizer
from tests.core.support import make_config
from tutorial_engine import SamplingParams, TextPrompt, TokensPrompt
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.input_processor import InputProcessor
from tutorial_engine.inputs import parse_prompt, split_prompts


def make_processor(tokenizer: Any = None, file: dict[str, Any] | None = None, max_model_len: int = 32, **args: Any
                   ) -> InputProcessor:
    """`file`: the model's generation_config.json."""
    tokenizer = tokenizer or byte_tokenizer(bos=True)
    return InputProcessor(make_config(max_model_len, **args), tokenizer, len(tokenizer), file or {})


def make_one(processor: InputProcessor, prompt: Any, params: SamplingParams | None = None, **kwargs: Any) -> Any:
    _, (request,) = processor.make_requests("r", prompt, params or greedy(), **kwargs)
    return request


# Forms


@pytest.mark.parametrize("prompt, parsed", [
    ("text", {"prompt": "text"}), ("", {"prompt": ""}), ([1, 2], {"prompt_token_ids": [1, 2]}),
    ([], {"prompt_token_ids": []}), (TextPrompt(prompt="t"), {"prompt": "t"}),
    (TokensPrompt(prompt_token_ids=[1], prompt="t"), {"prompt_token_ids": [1], "prompt": "t"}),
    ({"prompt_token_ids": (1, 2), "cache_salt": "s"}, {"prompt_token_ids": (1, 2), "cache_salt": "s"}),
    ({"prompt": None, "prompt_token_ids": [1], "cache_salt": None}, {"prompt_token_ids": [1]})])
def test_forms_of_one_prompt(prompt: Any, parsed: dict[str, Any]) -> None:
    assert parse_prompt(prompt) == parsed


@pytest.mark.parametrize("prompt, words", [
    (5, "Prompt should be a string, list of tokens, or dictionary, but this one is a int"),
    (None, "Prompt should be a string, list of tokens, or dictionary"),
    ((1, 2), "Prompt should be a string, list of tokens, or dictionary"),
    (b"bytes", "Prompt should be a string, list of tokens, or dictionary"),
    ([1, "a"], "Token prompt should be a list of integers"), ([1.0], "Token prompt should be a list of integers"),
    ([True], "Token prompt should be a list of integers"), (["text"], "Token prompt should be a list of integers"),
    ({"prompt_token_ids": "12"}, "Token prompt should be a list of integers"),
    ({"prompt_token_ids": 5}, "Token prompt should be a list of integers"),
    ({}, "should contain 'prompt'"), ({"cache_salt": "s"}, "should contain 'prompt'"),
    ({"prompt": None}, "should contain 'prompt'"), ({"prompt": 5}, "Prompt text should be a string, got int"),
    ({"prompt": "a", "multi_modal_data": {}}, r"does not have: \['multi_modal_data'\]"),
    ({"prompt_embeds": [0.5]}, "does not have"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt should be a non-empty string"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt should be a non-empty string")])
def test_other_forms_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        parse_prompt(prompt)


@pytest.mark.parametrize("prompts, expected", [
    ("text", ["text"]), (["a", "b"], ["a", "b"]), (("a", "b"), ["a", "b"]), ([1, 2], [[1, 2]]), ([], []), ((), []),
    ([[1], [2, 3]], [[1], [2, 3]]), ({"prompt": "a"}, [{"prompt": "a"}]), ([[]], [[]]),
    ([{"prompt": "a"}, "b", [1]], [{"prompt": "a"}, "b", [1]]), ([np.int64(1)], [[np.int64(1)]]),
    ((1, 2), [1, 2]),  # a tuple is always the outer sequence; its elements are refused one by one
    ([True, False], [True, False]), ([1, "a"], [1, "a"])])
def test_one_prompt_or_many(prompts: Any, expected: list[Any]) -> None:
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize("prompts", [5, None, {1, 2}, np.array([1, 2])])
def test_neither_one_nor_many(prompts: Any) -> None:
    with pytest.raises(TypeError, match="Prompt should be a string, list of tokens, or dictionary, or a list of these"):
        split_prompts(prompts)


# Tokenising


def test_text_gets_special_tokens_unless_told_otherwise() -> None:
    processor = make_processor()
    assert make_one(processor, "ab").prompt_token_ids == [0, *byte_ids(b"ab")]
    plain = make_one(processor, "ab", tokenization_kwargs={"add_special_tokens": False})
    assert plain.prompt_token_ids == byte_ids(b"ab")
    assert make_one(processor, "").prompt_token_ids == [0]
    ids = make_one(processor, [np.int64(5), 6]).prompt_token_ids
    assert ids == [5, 6] and type(ids[0]) is int


def test_the_text_is_known_if_it_was_given() -> None:
    processor = make_processor()
    assert processor.make_requests("r", "ab", greedy())[0] == "ab"
    assert processor.make_requests("r", [5], greedy())[0] is None
    assert processor.make_requests("r", {"prompt_token_ids": [5], "prompt": "shown"}, greedy())[0] == "shown"


@pytest.mark.parametrize("kwargs, kept", [
    ({"truncate_prompt_tokens": 3}, slice(0, 3)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(7, 10)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)), ({"truncate_prompt_tokens": 99}, None),
    ({"truncate_prompt_tokens": None}, slice(0, 10)), ({"truncate_prompt_tokens": 32}, slice(0, 10)),
    ({"truncate_prompt_tokens": 0}, None), ({"truncate_prompt_tokens": -2}, None),
    ({"truncate_prompt_tokens": "3"}, None)])
@pytest.mark.parametrize("as_text", [True, False])
def test_truncation(kwargs: dict[str, Any], kept: slice | None, as_text: bool) -> None:
    ids = [0, *byte_ids(b"abcdefghi")]
    prompt = "abcdefghi" if as_text else ids
    if kept is None:
        with pytest.raises(VLLMValidationError, match="must be -1 or between 1 and max_model_len=32") as caught:
            make_one(make_processor(), prompt, tokenization_kwargs=kwargs)
        assert caught.value.parameter == "truncate_prompt_tokens"
    else:
        assert make_one(make_processor(), prompt, tokenization_kwargs=kwargs).prompt_token_ids == ids[kept]


def test_truncation_to_what_fits() -> None:
    """-1 leaves room for one token to be generated."""
    request = make_one(make_processor(), "x" * 100, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert request.num_prompt_tokens == 31


def test_side_of_truncation_defaults_to_the_tokenizers() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.truncation_side = "left"
    request = make_one(make_processor(tokenizer), "abc", tokenization_kwargs={"truncate_prompt_tokens": 1})
    assert request.prompt_token_ids == byte_ids(b"c")


def test_bad_tokenization_kwargs() -> None:
    with pytest.raises(VLLMValidationError, match="truncation_side must be 'left' or 'right', got 'middle'"):
        make_one(make_processor(), "a", tokenization_kwargs={"truncation_side": "middle"})
    for prompt in ("a", [5]):
        with pytest.raises(TypeError, match=r"does not have: \['padding'\]"):
            make_one(make_processor(), prompt, tokenization_kwargs={"padding": True})


def test_two_bos_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    processor = make_processor()
    assert make_one(processor, "<s>a").prompt_token_ids[:2] == [0, 0] and "two BOS" in caplog.text
    caplog.clear()
    make_one(processor, "<s>a", tokenization_kwargs={"add_special_tokens": False})
    make_one(processor, [0, 0, 5])
    make_one(processor, "a")
    assert not caplog.text


# Checks of the prompt


@pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}, {"prompt": ""}])
def test_empty_prompt(prompt: Any) -> None:
    with pytest.raises(VLLMValidationError, match="The decoder prompt cannot be empty") as caught:
        make_one(make_processor(byte_tokenizer()), prompt)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("length, words", [
    (32, "maximum context length is 32 tokens.*plus the number of requested output tokens.*is longer than the maximum "
         "model length"),
    (33, "maximum context length is 32 tokens. However, your prompt contains at least 33 input tokens.*even without"),
    (500, "maximum context length is 32 tokens. However, your prompt contains at least 500 input tokens")])
def test_prompt_too_long(length: int, words: str) -> None:
    for prompt in ("x" * length, [5] * length):
        with pytest.raises(VLLMValidationError, match=words) as caught:
            make_one(make_processor(byte_tokenizer()), prompt)
        assert (caught.value.parameter, caught.value.value) == ("input_tokens", length)


def test_longest_prompt() -> None:
    request = make_one(make_processor(), [5] * 31, greedy(None))
    assert request.num_prompt_tokens == 31 and request.sampling_params.max_tokens == 1


@pytest.mark.parametrize("token_id", [-1, 259, 10**9])
def test_token_id_out_of_vocabulary(token_id: int) -> None:
    processor = make_processor()
    assert processor.vocab_size == 259
    make_one(processor, [0, 258])
    with pytest.raises(VLLMValidationError, match=f"Token id {token_id} is out of vocabulary: ids go from 0 to 258"):
        make_one(processor, [5, token_id, 5])


# Checks of the parameters


@pytest.mark.parametrize("params, parameter, words", [
    ({"logprobs": 21}, "logprobs", "Requested logprobs of 21 is more than max_logprobs=20"),
    ({"logprobs": -1}, "logprobs", "max_logprobs=20"), ({"prompt_logprobs": 21}, "prompt_logprobs", "max_logprobs=20"),
    ({"stop_token_ids": [259]}, "stop_token_ids", "token id 259, which is out of vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
    ({"logit_bias": {5: 1.0, 264: 1.0}}, "logit_bias", "token id 264"),
    ({"allowed_token_ids": [5, 259]}, "allowed_token_ids", "token id 259"),
    ({"max_tokens": None, "min_tokens": 30}, "min_tokens", "min_tokens=30 is more than the 29 tokens"),
    ({"bad_words": [" \t"]}, "bad_words", "no token at all"),
    ({"bad_words": [f"w{i}" for i in range(129)]}, "bad_words", "the limit is 128"),
    ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids", "no token could be chosen"),
    ({"allowed_token_ids": [1, 9], "min_tokens": 1, "stop_token_ids": [9]}, "allowed_token_ids", "no token could"),
    ({"allowed_token_ids": byte_ids(b"a"), "bad_words": ["a"]}, "allowed_token_ids", "no token could be chosen"),
    ({"stop_token_ids": range(259), "min_tokens": 1}, "allowed_token_ids", "no token could be chosen")])
def test_parameters_against_the_model(params: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        make_one(make_processor(), [5, 6, 7], SamplingParams(**params))
    assert caught.value.parameter == parameter


def test_limits_are_inclusive() -> None:
    processor = make_processor()
    make_one(processor, [5, 6, 7], SamplingParams(logprobs=20, prompt_logprobs=20, stop_token_ids=[258, 0],
                                                  logit_bias={0: 1.0, 258: 1.0}, allowed_token_ids=[0, 258]))
    make_one(processor, [5, 6, 7], SamplingParams(max_tokens=None, min_tokens=29))
    make_one(processor, [5], SamplingParams(bad_words=[f"w{i}" for i in range(128)]))
    make_one(processor, [5], SamplingParams(allowed_token_ids=[1, 9], min_tokens=1))
    make_one(make_processor(max_logprobs=-1), [5], SamplingParams(logprobs=-1, prompt_logprobs=10**6))


def test_callers_parameters_are_not_changed() -> None:
    params = SamplingParams(max_tokens=None)
    before = params.clone()
    request = make_one(make_processor(file={"eos_token_id": [1, 7]}), [5], params)
    assert params == before and request.sampling_params.max_tokens == 31
    assert request.sampling_params.stop_token_ids == [7]


def test_fields_that_were_set_later_are_checked_too() -> None:
    params = SamplingParams()
    params.stop, params.temperature = "end", 1e-6
    request = make_one(make_processor(), "a", params)
    assert request.sampling_params.stop == ["end"] and request.sampling_params.temperature == 0.01
    params.temperature = 3.0
    with pytest.raises(VLLMValidationError, match="temperature"):
        make_one(make_processor(), "a", params)


def test_prompt_logprobs_never_read_the_cache() -> None:
    params = SamplingParams()
    assert not make_one(make_processor(), "a", params).sampling_params.skip_reading_prefix_cache
    params.prompt_logprobs = 1
    assert make_one(make_processor(), "a", params).sampling_params.skip_reading_prefix_cache


def test_parameters_must_be_sampling_params() -> None:
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        make_processor().make_requests("r", "a", {"temperature": 0})


def test_priority() -> None:
    assert make_one(make_processor(scheduling_policy="priority"), "a", priority=-3).priority == -3
    assert make_one(make_processor(), "a", priority=0).priority == 0
    with pytest.raises(VLLMValidationError, match="priority scheduling is not enabled.*scheduling_policy='priority'"):
        make_one(make_processor(), "a", priority=1)
    with pytest.raises(VLLMValidationError, match="priority must be an integer, got 'high'"):
        make_one(make_processor(scheduling_policy="priority"), "a", priority="high")


# Stop ids, seeds, completions


@pytest.mark.parametrize("file, ignore_eos, stops, masked", [
    ({}, False, [], {1}), ({"eos_token_id": 1}, False, [], {1}), ({"eos_token_id": 7}, False, [7], {1, 7}),
    ({"eos_token_id": [1, 7, 8]}, False, [7, 8], {1, 7, 8}), ({"eos_token_id": [1, 7]}, True, [], {1, 7}),
    ({"eos_token_id": 0}, False, [0], {0, 1}), ({"eos_token_id": None}, False, [], {1}),
    ({"eos_token_id": [1, 99999]}, False, [], {1})])  # an id that the model cannot produce
def test_further_eos_ids(file: dict[str, Any], ignore_eos: bool, stops: list[int], masked: set[int]) -> None:
    request = make_one(make_processor(file=file), "a", greedy(ignore_eos=ignore_eos))
    assert request.sampling_params.stop_token_ids == stops
    assert request.masked_stop_ids == masked and request.eos_token_id == 1


def test_explicit_stop_ids_come_first_and_once() -> None:
    processor = make_processor(file={"eos_token_id": [1, 7]})
    request = make_one(processor, "a", greedy(stop_token_ids=[9, 7]))
    assert request.sampling_params.stop_token_ids == [9, 7] and request.masked_stop_ids == {1, 7, 9}
    tokenizer = piece_tokenizer()
    tokenizer.eos_token = None
    assert make_one(make_processor(tokenizer), "a").masked_stop_ids == frozenset()


def test_completions_are_requests_with_seeds_in_a_row() -> None:
    processor = make_processor()
    _, requests = processor.make_requests("r", "ab", SamplingParams(n=3, seed=7))
    assert [r.seed for r in requests] == [7, 8, 9]
    assert [r.request_id.split("-")[0] for r in requests] == ["0_r", "1_r", "2_r"]
    assert len({r.request_id.split("-")[1] for r in requests}) == 1
    _, again = processor.make_requests("r", "ab", SamplingParams())
    assert again[0].request_id.startswith("r-") and again[0].request_id.split("-")[1] != requests[0].request_id[-8:]


def test_unseeded_requests_draw_from_the_engines_seed() -> None:
    def seeds(**args: Any) -> list[int]:
        processor = make_processor(**args)
        return [make_one(processor, "a", SamplingParams()).seed for _ in range(3)]

    assert len(set(seeds())) == 3 and seeds() == seeds(seed=0) != seeds(seed=1)
    assert seeds(seed=None) != seeds(seed=None)


# Bad words: vLLM's rule, with vLLM's gap


def test_bad_words_at_the_start_and_after_a_space() -> None:
    tokenizer = byte_tokenizer(b"no", (b" ", b"no"))
    no, space_no = (tokenizer.encode(text)[0] for text in ("no", " no"))
    processor = make_processor(tokenizer)
    assert make_one(processor, "a", greedy(bad_words=["no"])).bad_words_token_ids == [[no], [space_no]]
    assert make_one(processor, "a", greedy(bad_words=["  no"])).bad_words_token_ids == [[no], [space_no]]


def test_gap_of_the_rule_for_bad_words() -> None:
    """The form after a space is kept only if it is as long as the other: here one token against two. The word can
    still slip through in the form that was not kept. vLLM does the same; our docstring says so."""
    tokenizer = byte_tokenizer(b"desc", b"ribed", (b" ", b"desc", b"ribed"))
    request = make_one(make_processor(tokenizer), "a", greedy(bad_words=["described"]))
    assert request.bad_words_token_ids == [tokenizer.encode("described")]
    assert len(tokenizer.encode("described")) == 2 and len(tokenizer.encode(" described")) == 1
    assert "slip through" in InputProcessor._tokenize_bad_words.__doc__


# Defaults of the model


def test_defaults_of_the_model() -> None:
    file = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "max_new_tokens": 99, "do_sample": True}
    processor = make_processor(file=file)
    defaults = processor.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
                                      presence_penalty=0.5, frequency_penalty=0.25, max_tokens=99)
    defaults.temperature = 2.0
    assert processor.get_default_sampling_params().temperature == 0.6  # each caller gets an own copy
    assert make_processor().get_default_sampling_params() == SamplingParams()
    assert make_processor(file=file, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    changed = {"temperature": 0.2, "top_k": None}  # None takes the file's entry away
    defaults = make_processor(file=file, override_generation_config=changed).get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.2, 0, 0.9)


@pytest.mark.parametrize("file", [{"temperature": 5}, {"temperature": "hot"}, {"top_k": 0.5}])
def test_unusable_defaults_are_blamed_on_the_file(file: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=r"generation_config has a value.*generation_config='vllm'"):
        make_processor(file=file).get_default_sampling_params()


def test_what_belongs_to_chat_is_sent_there() -> None:
    with pytest.raises(TypeError, match=r"use chat\(\)"):
        parse_prompt({"role": "user", "content": "hi"})
