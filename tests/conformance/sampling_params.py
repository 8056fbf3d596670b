"""Rows S: the fields of `SamplingParams`."""

from __future__ import annotations

import logging
import re

import pytest

from tests.conformance.helpers import EOS, LETTERS, held_to, ids, kept, letters_llm, one, refuses, say, shaped
from tests.conformance.registry import DIFFERS, NOT_HERE, SAME, row
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.sampling_params import RequestOutputKind, StructuredOutputsParams


@row("S1", "n", SAME)
def completions(llm: LLM) -> None:
    """Completions per prompt, an integer from 1 to 16384 (VLLM_MAX_N_SEQUENCES); more than 1 with greedy sampling is
    an error."""
    assert SamplingParams(2).n == 2  # the first positional argument
    assert [c.index for c in one(llm, "ab", 3, seed=1, max_tokens=2).outputs] == [0, 1, 2]
    for bad in (0, "2", 2.0, 16385):
        refuses("n", SamplingParams, n=bad)
    refuses("n", SamplingParams, n=2, temperature=0)


@row("S2", "presence_penalty", SAME)
def presence() -> None:
    """In [-2, 2]; subtracted from the logit of every token that is in the output, however often. The prompt does not
    count."""
    assert shaped({10: 2.0, 11: 2.0, 12: 2.0}, prompt=[10], said=[11, 11], temperature=0, presence_penalty=0.5) == {
        10: 2.0, 11: 1.5, 12: 2.0}
    refuses("presence_penalty", SamplingParams, presence_penalty=2.1)


@row("S3", "frequency_penalty", SAME)
def frequency() -> None:
    """In [-2, 2]; subtracted once per occurrence in the output. The prompt does not count."""
    assert shaped({10: 2.0, 11: 2.0, 12: 2.0}, prompt=[10], said=[11, 11], temperature=0, frequency_penalty=0.5) == {
        10: 2.0, 11: 1.0, 12: 2.0}
    refuses("frequency_penalty", SamplingParams, frequency_penalty=-2.1)


@row("S4", "repetition_penalty", SAME)
def repetition() -> None:
    """Above 0; logits of tokens in prompt or output are divided by it if positive, else multiplied. It comes before
    the other two penalties."""
    assert shaped({10: 2.0, 11: -2.0, 12: 2.0, 13: 2.0}, prompt=[10, 11], said=[12], temperature=0,
                  repetition_penalty=2) == {10: 1.0, 11: -4.0, 12: 1.0, 13: 2.0}
    assert shaped({10: 2.0}, prompt=[10], said=[10], temperature=0, repetition_penalty=2, frequency_penalty=0.25,
                  presence_penalty=0.5) == {10: 0.25}
    assert SamplingParams(repetition_penalty=5).repetition_penalty == 5
    refuses("repetition_penalty", SamplingParams, repetition_penalty=0)


@row("S5", "temperature", SAME)
def temperature(caplog: pytest.LogCaptureFixture) -> None:
    """0 is greedy, up to 2 divides the logits; a value between 0 and 0.01 is raised to 0.01 with a warning, and
    anything else is an error."""
    assert shaped({10: 1.0, 11: 2.0}, temperature=0.5) == {10: 2.0, 11: 4.0}
    assert say("abc", max_tokens=3).text == "abc"
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=1e-6).temperature == 0.01 and caplog.messages
    for bad in (-0.1, 2.1, float("nan"), float("inf")):
        refuses("temperature", SamplingParams, temperature=bad)
    with pytest.raises(TypeError):
        SamplingParams(temperature=None)


@row("S6", "top_p", SAME)
def nucleus() -> None:
    """In (0, 1], so that 0 is an error; keeps the most likely tokens until their probability reaches it, and always
    the first."""
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.6) == [2, 3]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=1e-9) == [3]
    refuses("top_p", SamplingParams, top_p=0)
    refuses("top_p", SamplingParams, top_p=1.1)


@row("S7", "top_k", SAME)
def top_k() -> None:
    """Keeps the k most likely tokens; 0, -1 and anything from the size of the vocabulary up mean no restriction."""
    probs = [0.1, 0.2, 0.3, 0.4]
    assert kept(probs, top_k=2) == [2, 3]
    assert all(kept(probs, top_k=k) == [0, 1, 2, 3] for k in (0, -1, len(LETTERS), 10**6))
    refuses("top_k", SamplingParams, top_k=-2)
    refuses("top_k", SamplingParams, top_k=1.0)


@row("S8", "min_p", SAME)
def min_p() -> None:
    """In [0, 1]; drops tokens less likely than min_p times the most likely one, judged after the temperature."""
    assert kept([0.1, 0.4, 0.5], min_p=0.3) == [1, 2]
    assert kept([0.1, 0.4, 0.5], min_p=0.3, temperature=2.0) == [0, 1, 2]
    refuses("min_p", SamplingParams, min_p=1.1)


@row("S9", "seed", SAME)
def seed(llm: LLM) -> None:
    """A seeded request gives the same tokens each time; -1 means None. The tokens are not those of vLLM (see P10)."""
    first, second, other = (one(llm, "ab", seed=s, max_tokens=8).outputs[0].token_ids for s in (7, 7, 8))
    assert first == second != other
    assert SamplingParams(seed=-1).seed is None
    refuses("seed", SamplingParams, seed=2**63)


@row("S10", "stop", SAME)
def stop() -> None:
    """A string or a list of strings that end the text and are cut off; an empty one is an error, and so is stop
    without detokenize."""
    completion = say("abcdef", stop="cd")
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "cd")
    assert SamplingParams(stop="x").stop == ["x"] and SamplingParams().stop == []
    for bad in ("", ["a", ""]):
        refuses("stop", SamplingParams, stop=bad)
    refuses("stop", SamplingParams, stop="x", detokenize=False)


@row("S11", "stop_token_ids", SAME)
def stop_token_ids() -> None:
    """Tokens that end the text: kept in token_ids, left out of the text. An id outside of the vocabulary is refused
    when the request is added."""
    b, = ids("b")
    completion = say("abc", stop_token_ids=[b])
    assert (completion.text, completion.token_ids) == ("a", ids("ab"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", b)
    assert SamplingParams(stop_token_ids=[5, 3, 5]).stop_token_ids == [5, 3]
    refuses("stop_token_ids", SamplingParams, stop_token_ids=["a"])
    for unknown in (-1, len(LETTERS)):
        refuses("stop_token_ids", say, "a", stop_token_ids=[unknown])


@row("S12", "ignore_eos", SAME)
def ignore_eos() -> None:
    """EOS, and the further EOS ids of generation_config.json, no longer end the text; explicit stop_token_ids do."""
    a, b = ids("ab")
    script = [a, EOS, b, a]
    llm = letters_llm(script, generation_config={"eos_token_id": [EOS, b]})

    def tokens(**params: object) -> list[int]:
        return one(llm, "p", temperature=0, max_tokens=4, **params).outputs[0].token_ids

    assert tokens() == [a, EOS]
    assert tokens(ignore_eos=True) == script
    assert tokens(ignore_eos=True, stop_token_ids=[b]) == [a, EOS, b]


@row("S13", "max_tokens", SAME)
def max_tokens(llm: LLM) -> None:
    """16 unless said, None for as much as the context holds. More than that is no error: the text ends at the limit
    with "length"."""
    assert SamplingParams().max_tokens == 16
    for asked in (None, 50):
        completion = one(llm, [5] * 120, max_tokens=asked, ignore_eos=True).outputs[0]
        assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
    refuses("max_tokens", SamplingParams, max_tokens=0)


@row("S14", "min_tokens", SAME)
def min_tokens() -> None:
    """Until then EOS and all stop tokens are forbidden, and stop strings are not looked for."""
    assert EOS not in say([EOS], min_tokens=3, max_tokens=5).token_ids[:3]
    assert say("ab", stop_token_ids=ids("b"), min_tokens=4).token_ids.index(ids("b")[0]) == 4
    assert say("STOP a STOP b", stop="STOP", min_tokens=5).text == "STOP a "
    refuses("min_tokens", SamplingParams, min_tokens=3, max_tokens=2)
    refuses("min_tokens", say, "a", max_tokens=None, min_tokens=64)


@row("S15", "logprobs", SAME)
def logprobs(llm: LLM) -> None:
    """None, 0 or more, or -1 for the whole vocabulary; more than the engine's max_logprobs is refused."""
    assert SamplingParams(logprobs=True).logprobs == 1
    assert one(llm, "ab", max_tokens=1).outputs[0].logprobs is None
    assert 3 <= len(one(llm, "ab", max_tokens=1, logprobs=3).outputs[0].logprobs[0]) <= 4
    refuses("logprobs", SamplingParams, logprobs=-2)
    for too_many in (21, -1):
        refuses("logprobs", one, llm, "ab", logprobs=too_many)


@row("S16", "prompt_logprobs", SAME)
def prompt_logprobs(llm: LLM) -> None:
    """As logprobs, for the prompt. Such a request does not read the prefix cache."""
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    outputs = [one(llm, [5] * 33, prompt_logprobs=1, max_tokens=1) for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0] and len(outputs[1].prompt_logprobs) == 33


@row("S17", "logprob_token_ids", NOT_HERE)
def logprob_token_ids() -> None:
    """Logprobs of chosen ids cannot be asked for; ask for the whole vocabulary with logprobs=-1, of an
    LLM(max_logprobs=-1)."""
    with pytest.raises(TypeError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[5])


@row("S18", "detokenize", SAME)
def detokenize() -> None:
    """False: no text is made, only token_ids."""
    completion = say("abc", detokenize=False, max_tokens=3)
    assert (completion.text, completion.token_ids) == ("", ids("abc"))


@row("S19", "skip_special_tokens", SAME)
def skip_special_tokens() -> None:
    """Special tokens are left out of the text, never out of token_ids."""
    script = [*ids("a"), 1, *ids("b")]
    assert say(script, max_tokens=3).text == "ab" and say(script, max_tokens=3).token_ids == script
    assert say(script, max_tokens=3, skip_special_tokens=False).text == "a<|turn|>b"


@row("S20", "include_stop_str_in_output", SAME)
def include_stop_str() -> None:
    """Keeps the stop string, and shows the text of a stop token."""
    assert say("abcd", stop="bc", include_stop_str_in_output=True).text == "abc"
    assert say("abcd", stop_token_ids=ids("b"), include_stop_str_in_output=True).text == "ab"


@row("S21", "spaces_between_special_tokens", NOT_HERE)
def spaces_between_special_tokens() -> None:
    """Only its default, True: with skip_special_tokens=False, text is what the tokenizer's own decoder makes of it."""
    SamplingParams(spaces_between_special_tokens=True)
    refuses("spaces_between_special_tokens", SamplingParams, spaces_between_special_tokens=False)


@row("S22", "output_kind", SAME)
def output_kind() -> None:
    """CUMULATIVE unless said, DELTA or FINAL_ONLY. LLM.generate sets FINAL_ONLY on the object that you pass."""
    assert [kind.value for kind in RequestOutputKind] == [0, 1, 2]
    llm, texts = letters_llm("abc"), {}
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=3, output_kind=kind)
        llm.llm_engine.add_request(kind.name, "p", params)
        texts[kind.name] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            texts[output.request_id].append(output.outputs[0].text)
    assert texts == {"CUMULATIVE": ["a", "ab", "abc"], "DELTA": ["a", "b", "c"], "FINAL_ONLY": ["abc"]}
    params = SamplingParams()
    assert params.output_kind == RequestOutputKind.CUMULATIVE
    llm.generate("p", params, use_tqdm=False)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY


@row("S23", "logit_bias", SAME)
def logit_bias() -> None:
    """Added to the logits, for greedy sampling too. Values are clamped to [-100, 100] and text keys turned into ids by
    SamplingParams.from_optional only. There is no limit of 1024 entries."""
    assert shaped({10: 1.0, 11: 2.0}, temperature=0, logit_bias={10: 3.0}) == {10: 4.0, 11: 2.0}
    assert say("a", max_tokens=1, logit_bias={ids("b")[0]: 99.0}).text == "b"
    assert SamplingParams(logit_bias={5: 300.0}).logit_bias == {5: 300.0}
    assert SamplingParams.from_optional(logit_bias={"5": 300.0}).logit_bias == {5: 100.0}
    for unknown in (len(LETTERS), len(LETTERS) + 5):
        refuses("logit_bias", say, "a", logit_bias={unknown: 1.0})


@row("S24", "allowed_token_ids", SAME)
def allowed_token_ids() -> None:
    """Nothing else can be chosen. An empty list is an error, an id outside of the vocabulary too."""
    assert say("a", max_tokens=2, allowed_token_ids=ids("xy")).text in ("xx", "yy")
    refuses("allowed_token_ids", SamplingParams, allowed_token_ids=[])
    refuses("allowed_token_ids", say, "a", allowed_token_ids=[len(LETTERS)])


@row("S25", "bad_words", SAME)
def bad_words() -> None:
    """The last token of a bad word is forbidden when the output ends with its other tokens; at most 128 token
    sequences. Repeated words count once, an empty one is an error."""
    assert not say("abab", bad_words=["ab"], max_tokens=4).text.startswith("ab")
    assert say("abab", bad_words=["ba"], max_tokens=2).text == "ab"
    assert SamplingParams(bad_words=["x", "x"]).bad_words == ["x"]
    refuses("bad_words", SamplingParams, bad_words=[""])
    refuses("bad_words", say, "a", bad_words=[f"{i}!" for i in range(129)])


@row("S26", "structured_outputs", SAME)
def structured_outputs() -> None:
    """StructuredOutputsParams with exactly one of json, regex, choice, grammar, json_object and structural_tag; what is
    wrong with it is told when the request is added."""
    def text(wish: str, **constraint: object) -> str:
        return held_to(wish, StructuredOutputsParams(**constraint)).text

    assert text("no, maybe", choice=["yes", "no"]) == "no"
    assert re.fullmatch("[0-9]{3}", text("abc", regex="[0-9]{3}"))
    assert text("abc", json={"type": "boolean"}) in ("true", "false")
    assert text("xyz", grammar='start: "xy" | "b"') == "xy"
    for given in ({}, {"regex": "a", "choice": ["a"]}):
        refuses("structured_outputs", StructuredOutputsParams, **given)
    for name, empty in (("choice", []), ("json_object", False), ("grammar", " ")):
        refuses(f"structured_outputs.{name}", text, "a", **{name: empty})


@row("S27", "extra_args", DIFFERS)
def extra_args() -> None:
    """Handed to custom logits processors, which may refuse it; integers must fit into 64 bits. An engine that has no
    processors refuses it: vLLM ignores it there."""
    assert SamplingParams(extra_args={"a": 1}).extra_args == {"a": 1}
    refuses("extra_args", SamplingParams, extra_args={"a": 2**64})
    refuses("extra_args", say, "a", extra_args={"a": 1})


def not_a_keyword(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"Unexpected keyword argument '{name}'.*this engine does not"):
        SamplingParams(**{name: value})


@row("S28", "thinking_token_budget", NOT_HERE)
def thinking_token_budget() -> None:
    """The end of a reasoning section cannot be forced."""
    not_a_keyword("thinking_token_budget", 10)


@row("S29", "repetition_detection", NOT_HERE)
def repetition_detection() -> None:
    """Loops are not detected, so that finish_reason is never "repetition"."""
    not_a_keyword("repetition_detection", None)


@row("S30", "stream_interval", NOT_HERE)
def stream_interval() -> None:
    """Every token is streamed at once."""
    not_a_keyword("stream_interval", 1)


@row("S31", "rarely used fields", DIFFERS)
def rarely_used() -> None:
    """skip_reading_prefix_cache works. flat_logprobs, prompt_logprob_token_ids, prompt_logprob_start,
    routed_experts_prompt_start, trace_decode_token_ids and watermarking are no keywords here."""
    llm = letters_llm("abc")
    assert [one(llm, "p" * 9, skip_reading_prefix_cache=skip).num_cached_tokens for skip in (None, None, True)] == [
        0, 8, 0]
    for name in ("flat_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start",
                 "trace_decode_token_ids", "watermarking"):
        not_a_keyword(name, None)


@row("S32", "removed fields", SAME)
def removed() -> None:
    """best_of, use_beam_search, length_penalty, early_stopping, logits_processors, guided_decoding and
    truncate_prompt_tokens raise TypeError; here the message says what to use instead."""
    for name in ("best_of", "use_beam_search", "length_penalty", "early_stopping", "logits_processors",
                 "guided_decoding", "truncate_prompt_tokens"):
        with pytest.raises(TypeError, match=rf"Unexpected keyword argument '{name}'\. \w"):
            SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match="Unexpected keyword argument 'foo'"):
        SamplingParams(foo=1)
