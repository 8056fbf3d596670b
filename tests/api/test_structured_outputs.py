"""S26 and E13: outputs that keep to a grammar, whatever the model would rather say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.api.support import EOS, TURN, byte_tokenizer, greedy, piece_ids, piece_tokenizer, run_steps, scripted_llm
from tests.core.support import assert_clean
from tutorial_engine import LLM, CompletionOutput, EngineArgs, SamplingParams
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind, StructuredOutputsParams
from tutorial_engine.structured_outputs import StructuredOutputManager, close_objects

TOKENIZER = byte_tokenizer(b"he", b"yes", b"no", b'":', b'{"', b"true", b"ab", b"\xf0\x9f")
EOS_ID, TURN_ID = 1, 2
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99},
                                          "on": {"type": "boolean"}}, "required": ["x", "on"]}
TAGS = {"triggers": ["<f="], "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}]}


def babble(request: Request) -> torch.Tensor:
    """A model without any sense: logits are noise of the seed and the position."""
    generator = torch.Generator().manual_seed((request.seed * 7919 + request.num_tokens) % 2**40)
    return torch.randn(len(TOKENIZER), generator=generator) * 3


def typist(text: str) -> Callable[[Request], torch.Tensor]:
    """A model that wants to say exactly this, byte by byte, and then to stop; what it may not say, it leaves out."""
    def logits(request: Request) -> torch.Tensor:
        rest = [*piece_ids(TOKENIZER, *(bytes([b]) for b in text.encode())), EOS_ID]
        for token_id in request.output_token_ids:
            if token_id in rest:
                rest = rest[rest.index(token_id) + 1:]
        row = torch.zeros(len(TOKENIZER))
        for k, token_id in reversed(list(enumerate(rest))):
            row[token_id] = 90.0 - k
        return row
    return logits


@pytest.fixture
def babbler() -> Iterator[LLM]:
    llm = scripted_llm(TOKENIZER, babble, max_model_len=256)
    yield llm
    assert_clean(llm.llm_engine)


def ask(llm: LLM, max_tokens: int = 200, *, params: dict[str, Any] | None = None, **structured: Any
        ) -> CompletionOutput:
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**structured),
                              **(params or {}))
    return llm.generate("p", sampling, use_tqdm=False)[0].outputs[0]


def typed(text: str, **structured: Any) -> str:
    """What comes out if the model wants to say `text`, and may not."""
    return ask(scripted_llm(TOKENIZER, typist(text), max_model_len=256), params={"temperature": 0}, **structured).text


# What is refused


@pytest.mark.parametrize("given", [
    {}, {"disable_any_whitespace": True}, {"regex": "a", "choice": ["a"]}, {"json": {}, "json_object": True},
    {"json": "{}", "grammar": "g", "structural_tag": "{}"}, {"choice": [], "json_object": False}])
def test_exactly_one_constraint(given: dict[str, Any]) -> None:
    """S26: none and several are errors where the object is made."""
    with pytest.raises(VLLMValidationError, match="exactly one of json, regex, choice") as caught:
        StructuredOutputsParams(**given)
    assert caught.value.parameter == "structured_outputs"


def test_fields_are_vllms() -> None:
    with pytest.raises(TypeError, match="jsonschema"):
        StructuredOutputsParams(jsonschema={})
    params = StructuredOutputsParams(json={})
    assert (params.disable_any_whitespace, params.disable_additional_properties, params.whitespace_pattern) == (
        False, False, None)
    with pytest.raises(VLLMValidationError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"choice": []}, "at least one text"), ({"choice": ["a", 1]}, "at least one text"), ({"choice": "ab"}, "must be a"),
    ({"json": " "}, "must be a JSON schema"), ({"json": 5}, "must be a JSON schema"), ({"json": "{"}, "is not JSON"),
    ({"json": "[" * 100_000}, "is not JSON"), ({"json": {"enum": [{1}]}}, "is not JSON"),
    ({"grammar": "\n"}, "must be text"), ({"grammar": b"root"}, "must be text"), ({"regex": 5}, "must be text"),
    ({"json_object": False}, "must be True"), ({"json_object": "yes"}, "must be True"),
    ({"structural_tag": " "}, "must be text"), ({"structural_tag": TAGS}, "must be text"),
    # What does not compile, or is beyond the library.
    ({"regex": "("}, "cannot be compiled"), ({"regex": "(?=a)b"}, "look-ahead"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "\ud800"}, "cannot be compiled"), ({"regex": r"[^\s\S]"}, "no token of this model can begin"),
    ({"json": {"type": "objekt"}}, "Invalid type"), ({"json": {"not": {}}}, "Unimplemented"),
    ({"json": "[]"}, "schema"), ({"json": "false"}, "Unsatisfiable"),
    ({"json": {"$ref": "http://example.com/s"}}, "cannot be compiled"),
    ({"grammar": "nonsense"}, "cannot be compiled"), ({"grammar": "root ::= word"}, "not found"),
    ({"grammar": "start: word"}, "unknown name"),
    ({"structural_tag": "{}"}, "it must be"),
    ({"structural_tag": '{"triggers": [], "structures": []}'}, "not be empty"),
    ({"structural_tag": json.dumps(TAGS | {"triggers": ["<g="]})}, "none of the triggers"),
    ({"structural_tag": json.dumps(TAGS | {"triggers": 5})}, "cannot be compiled"),
    ({"structural_tag": json.dumps(TAGS | {"structures": ["f"]})}, "it must be"),
    ({"structural_tag": '{"type": "structural_tag", "format": {}}'}, "it must be"),
    # Options with nothing to act on.
    ({"regex": "a", "disable_any_whitespace": True}, "no meaning for regex"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "no meaning for choice"),
    ({"json_object": True, "disable_additional_properties": True}, "no meaning for json_object"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradicts"),
    ({"json": {}, "whitespace_pattern": "("}, "cannot be compiled"), ({"json": {}, "whitespace_pattern": 5}, "be text"),
    ({"json": {}, "disable_any_whitespace": 1}, "True or False"),
    # Nesting.
    ({"json": nested(65)}, "64 levels"), ({"json": json.dumps(nested(65))}, "64 levels"),
    ({"regex": "(" * 65 + "a" + ")" * 65}, "64 levels"), ({"grammar": f"start: {'(' * 65}{')' * 65}"}, "64 levels"),
    ({"structural_tag": json.dumps(TAGS | {"structures": [{"begin": "<f=", "schema": nested(63), "end": ""}]})}, "64")]


@pytest.mark.parametrize("given, words", REFUSED, ids=lambda v: str(v)[:40])
def test_refused_when_added(babbler: LLM, given: dict[str, Any], words: str) -> None:
    """S26, E13: an error of this request alone; it takes nothing, and those beside it go on."""
    engine = babbler.llm_engine
    engine.add_request("other", "p", greedy(3))
    engine.step()
    with pytest.raises(VLLMValidationError, match=re.escape(words)) as caught:
        ask(babbler, **given)
    assert caught.value.parameter.startswith("structured_outputs.") and len(str(caught.value)) < 2000 + len(str(given))
    assert engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.finished and len(output.outputs[0].token_ids) == 3
    assert ask(babbler, regex="a").text == "a"


def test_the_deepest_that_is_accepted(babbler: LLM) -> None:
    for given in ({"json": nested(64)}, {"json": json.dumps(nested(64))}, {"regex": "(" * 64 + "a" + ")" * 64},
                  {"regex": r"\(" * 65}):
        assert ask(babbler, max_tokens=1, **given).token_ids


def test_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted_llm(TOKENIZER, typist("a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(VLLMValidationError, match=r'pip install "tutorial-engine\[structured\]"'):
        ask(llm, regex="a")
    assert llm.generate("p", greedy(1), use_tqdm=False)[0].outputs[0].text == "a"
    assert_clean(llm.llm_engine)


@pytest.mark.parametrize("make, words", [
    (lambda: piece_tokenizer("ab"), "cannot read this model's tokenizer"),
    (lambda: PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer), "needs an EOS token")])
def test_tokenizers_that_do_not_do(make: Callable[[], Any], words: str) -> None:
    llm = scripted_llm(make(), [5])
    with pytest.raises(VLLMValidationError, match=words):
        ask(llm, regex="a")
    assert len(llm.generate("p", greedy(2), use_tqdm=False)[0].outputs[0].token_ids) == 2
    assert_clean(llm.llm_engine)


# Each constraint, against a model that says anything


def test_regex(babbler: LLM) -> None:
    for seed in range(20):
        output = ask(babbler, regex=r"[a-f]{3}-(yes|no)+[0-9]?é", params={"seed": seed})
        assert output.finish_reason == "stop"
        assert re.fullmatch(r"[a-f]{3}-(yes|no)+[0-9]?é", output.text)


def test_choice(babbler: LLM) -> None:
    choices = ["yes", "no", "a", "ab", 'q"\\\n/é\u2028\x00😀', " "]
    assert {ask(babbler, choice=choices, params={"seed": seed}).text for seed in range(80)} == set(choices)
    assert typed("abc", choice=["a", "ab", "b"]) == "ab"


def test_json_schema(babbler: LLM) -> None:
    for seed in range(10):
        for schema in (POINT, json.dumps(POINT)):
            text = ask(babbler, json=schema, disable_additional_properties=True, disable_any_whitespace=True,
                       params={"seed": seed}).text
            point = json.loads(text)
            assert point.keys() == {"x", "on"} and 0 <= point["x"] <= 99 and isinstance(point["on"], bool)
            assert text == json.dumps(point, separators=(",", ":"))


def test_json_object() -> None:
    """White space is allowed between the parts, and nothing after them."""
    assert typed('{ "a": [1,\n2], "b": {}}!', json_object=True) == '{ "a": [1,\n2], "b": {}}'
    assert not typed("[1]", json_object=True).startswith("[")


@pytest.mark.parametrize("grammar", ['root ::= "x" | "(" root ")"', 'start: "x" | "(" start ")"'])
def test_grammar(babbler: LLM, grammar: str) -> None:
    """Counting brackets is what a regex cannot do. Both notations."""
    for seed in range(8):
        assert re.fullmatch(r"(\(*)x(\)*)", text := ask(babbler, grammar=grammar, params={"seed": seed}).text)
        assert text.count("(") == text.count(")")


def test_structural_tag() -> None:
    """Free text; where a trigger is said, the tag has to follow in its form."""
    tags = json.dumps(TAGS)
    assert typed("so <f=add>12</f> it is", structural_tag=tags) == "so <f=add>12</f> it is"
    assert typed("a < b", structural_tag=tags) == "a < b"
    assert typed("<f=add>x5</f>", structural_tag=tags) == "<f=add>5</f>"
    assert typed("<f=sub>5</f>", structural_tag=tags).startswith("<f=add>5")


def test_structural_tag_that_is_a_special_token() -> None:
    tags = json.dumps({"triggers": [TURN], "structures": [{"begin": TURN, "schema": {"enum": [7]}, "end": "."}]})
    llm = scripted_llm(TOKENIZER, [TURN_ID, *piece_ids(TOKENIZER, b"8", b"."), EOS_ID])
    assert ask(llm, structural_tag=tags, params={"temperature": 0, "skip_special_tokens": False}).text == f"{TURN}7."


def test_json_options() -> None:
    spaced = '{"x": 1,  "on":true, "z":2}'
    assert typed(spaced, json=POINT) == spaced
    assert typed(spaced, json=POINT, disable_any_whitespace=True).startswith('{"x":1')
    one = {"whitespace_pattern": " ?"}
    assert typed('{"x": 1, "on":true}', json=POINT, **one) == '{"x": 1, "on":true}'
    assert not typed('{"x": 1,  "on":true}', json=POINT, **one).startswith('{"x": 1,  ')
    assert typed('{"x":1,"on":true,"z":2}', json=POINT, disable_additional_properties=True) == '{"x":1,"on":true}'
    tags = json.dumps({"triggers": ["<"], "structures": [{"begin": "<", "schema": POINT, "end": ">"}]})
    assert typed('<{"x":1,"on":true,"z":2}>', structural_tag=tags, disable_additional_properties=True
                 ) == '<{"x":1,"on":true}>'
    assert typed('<{"x": 1', structural_tag=tags, disable_any_whitespace=True).startswith('<{"x":1')


def test_close_objects_looks_at_schemas_only() -> None:
    """A property may be called "properties", and a constant may look like a schema."""
    inner = {"properties": {"a": {}}}
    schema = {"properties": {"properties": inner, "b": {"const": inner}, "c": {"additionalProperties": True, **inner}},
              "$defs": {"d": {"items": [inner]}}}
    closed = close_objects(schema)
    assert closed["additionalProperties"] is False and closed["properties"].keys() == {"properties", "b", "c"}
    assert closed["properties"]["properties"]["additionalProperties"] is False
    assert closed["properties"]["b"] == {"const": inner} and closed["properties"]["c"]["additionalProperties"] is True
    assert closed["$defs"]["d"]["items"][0]["additionalProperties"] is False and "additionalProperties" not in inner


# Masks


# Bytes of each token of TOKENIZER, b"" for the special ones.
PIECES = [b"", b"", b"", *(bytes([b]) for b in range(256)),
          b"he", b"ye", b"yes", b"no", b'":', b'{"', b"tr", b"tru", b"true", b"ab", b"\xf0\x9f"]


def allowed(mask: np.ndarray, size: int) -> set[int]:
    return {i for i in range(size) if mask[i // 32] >> (i % 32) & 1}


@pytest.mark.parametrize("given", [
    {"regex": "(ab|he)*[0-9]{2,3}é?"}, {"json": POINT}, {"grammar": 'root ::= "x" | "(" root ")"'},
    {"choice": ["yes", "yeast", "no", "😀"]}], ids=lambda g: next(iter(g)))
def test_mask_is_what_trying_each_token_says(given: dict[str, Any]) -> None:
    """E13, the slow twin: for each token a fresh matcher that reads all the text and then this token.

    The library's one exception: of a text that is forced, only the tokenizer's own spelling is allowed.
    """
    manager = StructuredOutputManager({}, TOKENIZER, len(TOKENIZER) + 40, EOS_ID)
    random = np.random.default_rng(0)
    params = StructuredOutputsParams(**given)
    for _ in range(2):
        (grammar,) = manager.make_grammars(params, [EOS_ID], 1)
        said: list[int] = []
        while len(said) < 10 and EOS_ID not in said:
            expected = set()
            for token_id in range(len(TOKENIZER)):
                (fresh,) = manager.make_grammars(params, [EOS_ID], 1)
                if all(fresh.accept_token(t) for t in said) and fresh.accept_token(token_id):
                    expected.add(token_id)
            mask = grammar.bitmask()
            assert mask.dtype == np.int32 and mask.shape == (-(-(len(TOKENIZER) + 40) // 32),)
            found = allowed(mask, 32 * len(mask))  # the ids beyond the tokenizer's are forbidden too
            if found != expected:
                spelling = max(expected, key=lambda i: len(PIECES[i]))
                assert all(PIECES[spelling].startswith(PIECES[i]) for i in expected) and found == {spelling}
            said.append(int(random.choice(sorted(expected))))
            assert grammar.accept_token(said[-1])


def test_mask_of_a_choice_by_definition() -> None:
    """E13, a twin without the library: a token may come next if a choice begins with the text so far and its bytes."""
    choices = [b"yes", b"yeast", b"y", b"\xf0\x9f\x98\x80", b"hehe", b"ab"]
    assert len(PIECES) == len(TOKENIZER) and all(piece_ids(TOKENIZER, p) == [i] for i, p in enumerate(PIECES) if p)
    (grammar,) = StructuredOutputManager({}, TOKENIZER, len(TOKENIZER), EOS_ID).make_grammars(
        StructuredOutputsParams(choice=[c.decode() for c in choices]), [EOS_ID], 1)
    for wanted in (b"y", b"e", b"a", b"s", b"t"):
        said = {b"y": b"", b"e": b"y", b"a": b"ye", b"s": b"yea", b"t": b"yeas"}[wanted]
        expected = {i for i, piece in enumerate(PIECES) if piece and any(c.startswith(said + piece) for c in choices)}
        assert allowed(grammar.bitmask(), len(TOKENIZER)) == expected | ({EOS_ID} if said in choices else set())
        assert grammar.accept_token(piece_ids(TOKENIZER, wanted)[0])


def test_raw_logprobs_see_the_grammar() -> None:
    """P9: the mask is applied before the sampler, so its "raw" values are of the masked logits."""
    llm = scripted_llm(TOKENIZER, babble, max_logprobs=-1)
    output = ask(llm, choice=["yes", "a"], params={"logprobs": -1, "temperature": 0})
    y, a = (piece_ids(TOKENIZER, p)[0] for p in (b"y", b"a"))
    first = {i: entry.logprob for i, entry in output.logprobs[0].items()}
    finite = {i for i, value in first.items() if value > -torch.inf}
    assert finite == {y, a, *piece_ids(TOKENIZER, b"ye", b"yes")}
    assert sum(np.exp(value) for value in first.values()) == pytest.approx(1)
    assert len(output.logprobs) == len(output.token_ids)


# The end of a text


def test_stop_tokens_wait_for_the_grammar() -> None:
    """E13: a model that only wants to stop may do so where the text is complete, and must where nothing can follow."""
    llm = scripted_llm(TOKENIZER, [EOS_ID])
    output = ask(llm, regex="[ab]{3}c*", params={"temperature": 0})
    assert re.fullmatch("[ab]{3}", output.text) and output.finish_reason == "stop" and output.token_ids[-1] == EOS_ID
    llm = scripted_llm(TOKENIZER, piece_ids(TOKENIZER, b"c"))
    output = ask(llm, regex="[ab]{3}c*", max_tokens=10, params={"temperature": 0})
    assert output.finish_reason == "length" and output.text.endswith("c" * 7)
    output = ask(llm, regex="[ab]{3}c", params={"temperature": 0, "stop_token_ids": [TURN_ID]})
    assert output.finish_reason == "stop" and len(output.token_ids) == 5


@pytest.mark.parametrize("regex, text", [("[ab]{3}c*", "[ab]{3}"), ("[ab]{3}", "[ab]{3}")])
def test_stop_token_ids_are_stop_tokens(regex: str, text: str) -> None:
    """Also those that the grammar cannot read; a text's own token stops as soon as the grammar lets it be said."""
    llm = scripted_llm(TOKENIZER, [TURN_ID])
    output = ask(llm, regex=regex, params={"temperature": 0, "stop_token_ids": [TURN_ID]})
    assert re.fullmatch(text, output.text) and output.stop_reason == TURN_ID and len(output.token_ids) == 4
    b, llm = piece_ids(TOKENIZER, b"b")[0], scripted_llm(TOKENIZER, typist("aabc"))
    output = ask(llm, regex="a+bc", params={"stop_token_ids": [b], "temperature": 0})
    assert output.stop_reason == b and len(output.token_ids) == 3


def test_ignore_eos() -> None:
    """Nothing but EOS can be said any more, so it is said again and again."""
    output = ask(scripted_llm(TOKENIZER, typist("ab")), regex="ab", max_tokens=6,
                 params={"temperature": 0, "ignore_eos": True})
    assert output.text == "ab" and output.token_ids[2:] == [EOS_ID] * 4 and output.finish_reason == "length"


def test_extra_eos_ids_of_the_model() -> None:
    llm = scripted_llm(TOKENIZER, [TURN_ID], generation_config={"eos_token_id": [EOS_ID, TURN_ID]})
    output = ask(llm, regex="ab", params={"temperature": 0})
    assert output.text == "ab" and output.stop_reason == TURN_ID


def test_min_tokens() -> None:
    """E13: stop tokens are masked until min_tokens, except where nothing else could be said."""
    output = ask(scripted_llm(TOKENIZER, [EOS_ID]), regex="a*", max_tokens=9,
                 params={"temperature": 0, "min_tokens": 4})
    assert output.token_ids == [*piece_ids(TOKENIZER, *[b"a"] * 4), EOS_ID]
    output = ask(scripted_llm(TOKENIZER, [EOS_ID]), regex="a{2}", max_tokens=9,
                 params={"temperature": 0, "min_tokens": 5})
    assert output.text == "aa" and output.token_ids[2:] == [EOS_ID] * 3 and output.finish_reason == "stop"
    a, b = piece_ids(TOKENIZER, b"a", b"b")
    output = ask(scripted_llm(TOKENIZER, [EOS_ID]), regex="b*", max_tokens=9,  # "a" is allowed, but not by the grammar
                 params={"temperature": 0, "min_tokens": 2, "allowed_token_ids": [a, EOS_ID]})
    assert output.text == "" and output.finish_reason == "stop" and b not in output.token_ids


def test_max_tokens_cuts(babbler: LLM) -> None:
    output = ask(babbler, regex="[a-z]{40}", max_tokens=7)
    assert output.finish_reason == "length" and re.fullmatch("[a-z]{7,14}", output.text)


def test_stop_string_and_streaming() -> None:
    params = greedy(50, structured_outputs=StructuredOutputsParams(regex="[a-e]+"), stop=["cd"],
                    output_kind=RequestOutputKind.DELTA)
    llm = scripted_llm(TOKENIZER, typist("abxcde"))
    outputs = run_steps(llm.llm_engine, "p", params)
    assert "".join(o.outputs[0].text for o in outputs).startswith("ab") and "cd" not in outputs[-1].outputs[0].text
    assert outputs[-1].finished
    assert_clean(llm.llm_engine)


def test_abort_in_the_middle(babbler: LLM) -> None:
    engine = babbler.llm_engine
    engine.add_request("r", "p", greedy(50, structured_outputs=StructuredOutputsParams(regex="[a-z]{60}")))
    for _ in range(3):
        engine.step()
    engine.abort_request(["r"])
    assert not engine.has_unfinished_requests()


# Together with other parameters


def test_other_rules_choose_within_the_grammar() -> None:
    llm = scripted_llm(TOKENIZER, babble, max_model_len=256)
    y, n, a = piece_ids(TOKENIZER, b"yes", b"no", b"a")
    assert ask(llm, choice=["yes", "no"], params={"logit_bias": {n: 90.0}}).text == "no"
    for seed in range(9):
        assert ask(llm, choice=["yes", "no"], params={"seed": seed, "allowed_token_ids": [y, EOS_ID]}).text == "yes"
        assert "a" not in ask(llm, regex="[abc]{9}", params={"seed": seed, "bad_words": ["a", "ab"]}).text
        knobs = {"top_k": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5, "frequency_penalty": 1.0,
                 "presence_penalty": -1.0, "temperature": 1.7, "seed": seed, "logprobs": 2}
        assert re.fullmatch("[abc]{9}", ask(llm, regex="[abc]{9}", params=knobs).text)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 4, "top_p": 0.5}], ids=str)
def test_rules_that_leave_nothing(mode: str, params: dict[str, Any]) -> None:
    """The request ends with "error" and what it has said; token 0 is not taken for a choice; others are not harmed."""
    llm = scripted_llm(TOKENIZER, typist("abc"), logprobs_mode=mode)
    engine = llm.llm_engine
    a, b = piece_ids(TOKENIZER, b"a", b"b")
    structured = StructuredOutputsParams(regex="[ab][bd]c+")
    engine.add_request("stuck", "p", SamplingParams(structured_outputs=structured, allowed_token_ids=[a, b], logprobs=2,
                                                    **params))
    engine.add_request("stuck too", "p", SamplingParams(structured_outputs=structured, bad_words=["c"], **params))
    engine.add_request("other", "p", greedy(4))
    done = {}
    while engine.has_unfinished_requests():
        done.update((o.request_id, o.outputs[0]) for o in engine.step() if o.finished)
    assert done["stuck"].text == done["stuck too"].text == "ab"
    assert done["stuck"].finish_reason == done["stuck too"].finish_reason == "error"
    assert len(done["stuck"].logprobs) == len(done["stuck"].token_ids) == 2
    assert np.isfinite(done["stuck"].cumulative_logprob)
    assert done["other"].text == "abc"
    assert_clean(engine)


@pytest.fixture
def ab_llm() -> Iterator[LLM]:
    """Three tokens: a (id 0), b, EOS. The model says a."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, EOS: 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, normalized=False)])
    llm = scripted_llm(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS), [0])
    yield llm
    assert_clean(llm.llm_engine)


@pytest.mark.parametrize("temperature", [0, 1])
def test_token_0_is_not_chosen_for_want_of_others(ab_llm: LLM, temperature: float) -> None:
    """The grammar would take it, but allowed_token_ids do not hold it."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]+"), allowed_token_ids=[2],
                            temperature=temperature)
    output = ab_llm.generate([[0, 1]], params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "error")


def test_vocabulary_that_cannot_spell_the_rest(ab_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["ac"]))
    output = ab_llm.generate([[0, 1]], params, use_tqdm=False)[0].outputs[0]
    assert output.text == "a" and output.finish_reason == "error" and "cannot go on" in caplog.text
    params.structured_outputs = StructuredOutputsParams(choice=["c"])
    with pytest.raises(VLLMValidationError, match="no token of this model can begin"):
        ab_llm.generate([[0, 1]], params, use_tqdm=False)


def test_engine_wide_options() -> None:
    """`structured_outputs_config`, as vLLM's dict."""
    config = {"backend": "guidance", "disable_any_whitespace": True, "disable_additional_properties": True}
    llm = scripted_llm(TOKENIZER, typist('{"x": 1, "on": true, "z": 1}'), structured_outputs_config=config)
    assert ask(llm, json=POINT, params={"temperature": 0}).text.startswith('{"x":1')
    assert ask(llm, json=POINT, whitespace_pattern=" ?", params={"temperature": 0}).text == '{"x": 1, "on": true }'
    assert ask(llm, regex="[{a]", params={"temperature": 0}).text == "{"
    assert EngineArgs(structured_outputs_config={"backend": "auto"}).structured_outputs_config == {"backend": "auto"}


@pytest.mark.parametrize("config, words", [
    ("guidance", "must be a dict"), ({"backend": "xgrammar"}, "both mean the library llguidance"),
    ({"backend": None}, "not in this engine"), ({"reasoning_parser": "x"}, "can hold backend"),
    ({"disable_any_whitespace": 1}, "True or False")])
def test_config_that_is_refused(config: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        EngineArgs(structured_outputs_config=config)
    assert caught.value.parameter == "structured_outputs_config"


# Batches, on a real model of random weights

MIX: list[tuple[str, dict[str, Any]]] = [
    ("the dog described it", {}), ("a", {"structured_outputs": StructuredOutputsParams(regex="[a-d ]{5,30}")}),
    ("he said", {"temperature": 0}), ("x" * 40, {"structured_outputs": StructuredOutputsParams(json=POINT)}),
    ("he said the", {"structured_outputs": StructuredOutputsParams(regex="[a-d ]{5,30}"), "temperature": 0}),
    ("desc" * 9, {"min_tokens": 5})]


def run_mix(llm: LLM, which: range) -> list[list[int]]:
    params = [SamplingParams(max_tokens=30, **{"seed": 5, **MIX[i][1]}) for i in which]
    return [o.outputs[0].token_ids for o in llm.generate([MIX[i][0] for i in which], params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    with LLM(str(tiny_model), max_model_len=128, num_gpu_blocks_override=65) as llm:
        return [run_mix(llm, range(i, i + 1))[0] for i in range(len(MIX))]


def test_mixed_batch(llm: LLM, alone: list[list[int]]) -> None:
    """E13: rows without a grammar get what they get alone, and so do those with one."""
    assert run_mix(llm, range(len(MIX))) == alone


@pytest.mark.parametrize("args", [
    {"max_num_batched_tokens": 7, "max_num_seqs": 6, "num_gpu_blocks_override": 65},
    {"num_gpu_blocks_override": 9, "enable_prefix_caching": False}], ids=["chunked prefill", "preemption"])
def test_chunked_and_preempted(tiny_model: Path, alone: list[list[int]], args: dict[str, Any]) -> None:
    """The position in the grammar belongs to the request: tokens that are computed again are not accepted again."""
    with LLM(str(tiny_model), max_model_len=128, disable_log_stats=False, **args) as llm:
        params = [SamplingParams(max_tokens=30, **{"seed": 5, **p}) for _, p in MIX]
        outputs = llm.generate([prompt for prompt, _ in MIX], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == alone
        preemptions = sum(outputs[i].metrics.num_preemptions for i in (1, 3, 4))
        assert preemptions if "enable_prefix_caching" in args else not preemptions
        assert_clean(llm.llm_engine)


def test_n_completions_have_a_grammar_each(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=30,
                            structured_outputs=StructuredOutputsParams(regex="[a-z]{1,9}[0-9]"))
    (output,) = llm.generate("he", params, use_tqdm=False)
    texts = [c.text for c in output.outputs]
    assert all(re.fullmatch("[a-z]{1,9}[0-9]", text) for text in texts) and len(set(texts)) > 1
    for i in range(4):
        alone = SamplingParams(seed=3 + i, max_tokens=30, structured_outputs=params.structured_outputs)
        assert llm.generate("he", alone, use_tqdm=False)[0].outputs[0].text == texts[i]


# The default model


@pytest.fixture(scope="module")
def default_llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_gpu_blocks_override=65) as llm:
        yield llm
        assert_clean(llm.llm_engine)


def test_default_model(default_llm: LLM) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "large": {"type": "boolean"}},
            "required": ["city", "large"]}
    structured = [
        StructuredOutputsParams(choice=["red", "green", "blue"]), StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8}\."),
        StructuredOutputsParams(json=city, disable_any_whitespace=True, disable_additional_properties=True),
        StructuredOutputsParams(json_object=True, whitespace_pattern=" ?"),
        StructuredOutputsParams(grammar='root ::= "1" ("+" [0-9])+ "="')]
    prompts = ["The colour of the sky is", "The capital of France is ", "A city in JSON: ", "JSON: {}\nJSON: ", "Sum: "]
    outputs = default_llm.generate([*prompts, prompts[1]], [*(
        greedy(20, structured_outputs=s) for s in structured), greedy(6)], use_tqdm=False)
    colour, capital, in_json, any_object, total, free = (o.outputs[0] for o in outputs)
    assert colour.text in ("red", "green", "blue")
    assert re.fullmatch(r"[A-Z][a-z]{2,8}\.", capital.text) and capital.finish_reason == "stop"
    parsed = json.loads(in_json.text)
    assert parsed.keys() == {"city", "large"} and isinstance(parsed["large"], bool) and len(parsed["city"]) <= 6
    assert any_object.text.startswith("{")
    assert any_object.finish_reason == "length" or isinstance(json.loads(any_object.text), dict)
    assert re.match(r"1(\+[0-9])+", total.text)
    assert [free.token_ids] == [default_llm.generate(prompts[1], greedy(6), use_tqdm=False)[0].outputs[0].token_ids]


def test_default_model_needs_no_transformers(default_llm: LLM) -> None:
    """The vocabulary is read from the `tokenizers` library's object; the slow import is not needed for it."""
    assert ask(default_llm, choice=["up"]).text == "up"
    assert "full" not in default_llm.llm_engine.tokenizer.__dict__


@pytest.mark.parametrize("constraint, pattern", [
    ({"choice": [TURN]}, re.escape(TURN)), ({"regex": re.escape(TURN) + "[a-c]{2}"}, re.escape(TURN) + "[a-c]{2}"),
    ({"json": {"const": TURN}}, re.escape(f'"{TURN}"'))], ids=["choice", "regex", "json"])
def test_s26_a_text_that_is_spelled_like_a_special_token(llm: LLM, constraint: dict[str, Any], pattern: str) -> None:
    """The library forces the special token there, and then refuses it; so it is spelled with ordinary ones."""
    params = greedy(40, structured_outputs=StructuredOutputsParams(**constraint))
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and re.fullmatch(pattern, output.outputs[0].text)


def test_s26_thousands_of_choices_and_marks_in_them(llm: LLM) -> None:
    many = [f"item {i}" for i in range(3000)]
    for choices in (many, ["a+b (c)", "x^2 - y/z #1 & ~", "[1]|{2}$"]):
        params = greedy(24, structured_outputs=StructuredOutputsParams(choice=choices))
        (output,) = llm.generate("x", params, use_tqdm=False)
        assert output.outputs[0].text in choices and output.outputs[0].finish_reason == "stop"
