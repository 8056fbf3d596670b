"""From ids to text: characters that are spread over tokens, special tokens, stop strings, streaming."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.api.support import byte_ids, byte_tokenizer, greedy, piece_ids, piece_tokenizer, stream
from tutorial_engine.detokenizer import IncrementalDetokenizer
from tutorial_engine.sampling_params import SamplingParams

CARON, EMOJI = "\u010f", "\U0001f600"  # two bytes, four bytes


def feed(detokenizer: IncrementalDetokenizer, ids: Sequence[int], stop_token_at_end: bool = False
         ) -> tuple[list[str], Any]:
    """One id per step, as in the engine: (deltas, what `update` returned last)."""
    deltas, found = [], None
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        found = detokenizer.update([token_id], last and stop_token_at_end)
        deltas.append(detokenizer.get_next_delta(last or found is not None))
        if found:
            break
    return deltas, found


# Characters over several tokens

BYTES = byte_tokenizer()


def incremental(prompt: bytes, *outputs: bytes) -> list[str]:
    """Deltas of tokens that each hold some bytes; the tokens are made for the occasion."""
    tokenizer = byte_tokenizer(*outputs)
    detokenizer = IncrementalDetokenizer(tokenizer, byte_ids(prompt), SamplingParams())
    return feed(detokenizer, piece_ids(tokenizer, *outputs))[0]


def test_nothing_is_said_until_a_character_is_complete() -> None:
    assert incremental(b"p", b"\xc4", b"\x8f", b"\xf0\x9f", b"\x98\x80") == ["", CARON, "", EMOJI]
    assert incremental(b"p", b"a", b"\xf0", b"\x9f", b"\x98", b"\x80b") == ["a", "", "", "", EMOJI + "b"]
    # A token that ends one character and begins another is held until that one is complete.
    assert incremental(b"p", b"\xc4", b"\x8f\xf0", b"\x9f\x98\x80") == ["", "", CARON + EMOJI]
    # So is the space in front of half a character.
    assert incremental(b"p", b"x", b" \xc4") == ["x", ""]


def test_bytes_that_are_no_text_are_marked_once_it_is_certain() -> None:
    assert incremental(b"p", b"\xff", b"a") == ["", "\ufffda"]
    assert incremental(b"p", b"\xc4", b"a", b"b") == ["", "\ufffda", "b"]


@pytest.mark.parametrize("prompt, outputs, deltas", [
    (b"ab\xc4", [b"\x8f", b"c"], [CARON, "c"]),
    (b"ab\xf0\x9f\x98", [b"\x80"], [EMOJI]),
    (b"\xf0\x9f", [b"\x98", b"\x80", b"z"], ["", EMOJI, "z"]),
    (b"\xff\xc4", [b"\x8f"], [CARON]),  # the first mark is the prompt's own
    (b"\xff\xff\xff\xff\xff\xf0\x9f", [b"\x98\x80"], [EMOJI]),
    (b"\xc4", [b"a"], ["a"]),  # never completed: the mark belongs to the prompt
    (b"abc", [b"d"], ["d"])])
def test_prompt_that_ends_inside_a_character(prompt: bytes, outputs: list[bytes], deltas: list[str]) -> None:
    assert incremental(prompt, *outputs) == deltas


def test_long_prompt_is_not_decoded_again() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, byte_ids(b"x" * 1000), SamplingParams())
    assert feed(detokenizer, byte_ids(b"ab"))[0] == ["a", "b"]
    assert len(detokenizer._ids) < 10


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As in Llama 2: a space is part of the next piece, the first one is dropped, unknown bytes are tokens."""
    pieces = ["<s>", "\u2581Hello", "\u2581world", "lo", ",", *(f"<0x{b:02X}>" for b in b"\xc4\x8f\xe4\xb8\xad\xff")]
    backend = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<s>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.mark.parametrize("prompt, output, deltas", [
    (["<s>", "\u2581Hello"], ["\u2581world", ",", "\u2581Hello"], [" world", ",", " Hello"]),
    (["<s>"], ["\u2581Hello", "\u2581world"], ["Hello", " world"]),
    (["\u2581Hello"], ["<0xC4>", "<0x8F>", ","], ["", CARON, ","]),
    # Here each byte of half a character has a mark of its own.
    (["\u2581Hello", "<0xE4>", "<0xB8>"], ["<0xAD>", "lo"], ["\u4e2d", "lo"])])
def test_pieces_with_spaces_and_bytes(prompt: list[str], output: list[str], deltas: list[str]) -> None:
    tokenizer = sentencepiece_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, piece_ids(tokenizer, *prompt), SamplingParams())
    assert feed(detokenizer, piece_ids(tokenizer, *output))[0] == deltas
    assert "".join(deltas) == tokenizer.decode(
        piece_ids(tokenizer, *prompt, *output), skip_special_tokens=True)[-len("".join(deltas)):]


# Special tokens


@pytest.mark.parametrize("skip, text", [(True, "ab"), (False, "a<|turn|>b")])
def test_special_tokens_are_left_out_of_the_text_only(skip: bool, text: str) -> None:
    tokenizer = piece_tokenizer()
    ids = piece_ids(tokenizer, "a", "<|turn|>", "b")
    _, last = stream(tokenizer, ids, max_tokens=3, skip_special_tokens=skip, output_kind=greedy().output_kind)
    assert last.outputs[0].text == text and last.outputs[0].token_ids == ids


def test_no_text_without_detokenize() -> None:
    tokenizer = piece_tokenizer()
    deltas, last = stream(tokenizer, piece_ids(tokenizer, "a"), max_tokens=2, detokenize=False, logprobs=1)
    assert deltas == ["", ""] and last.outputs[0].text == ""
    assert all(entry.decoded_token is None for entry in last.outputs[0].logprobs[0].values())


# Stop strings


@pytest.mark.parametrize("pieces, params, deltas, reason", [
    (["AB", "C DEF", "G", "HI", "J tail"], {"stop": ["DEFGHIJ"]}, ["", "A", "B", "C ", ""], "DEFGHIJ"),
    (["AB", "C DEF", "G", "HI", "J tail"], {"stop": ["DEFGHIJ"], "include_stop_str_in_output": True},
     ["AB", "C DEF", "G", "HI", "J"], "DEFGHIJ"),
    (["alpha beta", " gamma delta"], {"stop": ["beta gamma"]}, ["a", "lpha "], "beta gamma"),
    (["xay"], {"stop": ["a"]}, ["x"], "a"),
    (["xay"], {"stop": ["a"], "include_stop_str_in_output": True}, ["xa"], "a"),
    (["ab", "ab"], {"stop": ["aba"]}, ["", ""], "aba"),
    # The last hold-back is let go at the end, here by the length.
    (["ab"], {"stop": ["xyz"], "max_tokens": 2}, ["", "abab"], None)])
def test_streamed_stop_strings(pieces: list[str], params: dict[str, Any], deltas: list[str], reason: str | None
                               ) -> None:
    tokenizer = piece_tokenizer(*pieces)
    got, last = stream(tokenizer, piece_ids(tokenizer, *pieces), **params)
    assert got == deltas
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop" if reason else "length", reason)


@pytest.mark.parametrize("stops", [["wo", "o w"], ["o w", "wo"]])
def test_the_stop_string_that_is_complete_first_wins(stops: list[str]) -> None:
    tokenizer = piece_tokenizer("hello wor")
    _, last = stream(tokenizer, piece_ids(tokenizer, "hello wor"), stop=stops)
    assert last.outputs[0].stop_reason == "o w" and last.outputs[0].text == "hell"


@pytest.mark.parametrize("stops, reason, text", [(["lo", "hello"], "lo", "hel"), (["hello", "lo"], "hello", "")])
def test_ties_go_by_the_order_of_the_list(stops: list[str], reason: str, text: str) -> None:
    tokenizer = piece_tokenizer("hello")
    _, last = stream(tokenizer, piece_ids(tokenizer, "hello"), stop=stops)
    assert (last.outputs[0].stop_reason, last.outputs[0].text) == (reason, text)


def test_surplus_tokens_after_the_match_are_dropped() -> None:
    """Several tokens may arrive in one update."""
    tokenizer = piece_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, [2], SamplingParams(stop=["bc"]))
    assert detokenizer.update(piece_ids(tokenizer, "a", "b", "c", "d"), False) == ("bc", 3)
    assert detokenizer.output_text == "a"


def test_stop_string_in_the_prompt_or_at_its_border_does_not_count() -> None:
    tokenizer = piece_tokenizer()
    deltas, last = stream(tokenizer, piece_ids(tokenizer, "b", "c"), "ab", stop=["ab", "bb"], max_tokens=3)
    assert "".join(deltas) == "bcc" and last.outputs[0].finish_reason == "length"


def test_stop_string_wins_over_the_length_reached_by_the_same_token() -> None:
    tokenizer = piece_tokenizer()
    _, last = stream(tokenizer, piece_ids(tokenizer, "a", "b"), stop=["b"], max_tokens=2)
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "b")


# Stop tokens


@pytest.mark.parametrize("params, text, reason", [
    ({}, "a", None),  # EOS
    ({"include_stop_str_in_output": True}, "a", None),  # its text is that of a special token
    ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a</s>", None),
    ({"stop_token_ids": "b"}, "a", "b"),
    ({"stop_token_ids": "b", "include_stop_str_in_output": True}, "ab", "b")])
def test_stopping_token_is_kept_as_id_and_left_out_of_the_text(params: dict[str, Any], text: str, reason: str | None
                                                               ) -> None:
    tokenizer = piece_tokenizer()
    ids = piece_ids(tokenizer, "a", reason or "</s>", "c")
    if reason:
        params = {**params, "stop_token_ids": [ids[1]]}
    deltas, last = stream(tokenizer, ids, **params)
    assert "".join(deltas) == text
    assert last.outputs[0].finish_reason == "stop" and last.outputs[0].stop_reason == (ids[1] if reason else None)


def test_held_back_text_is_let_go_by_a_stop_token() -> None:
    tokenizer = piece_tokenizer()
    assert stream(tokenizer, piece_ids(tokenizer, "a", "b", "</s>"), stop=["bxx"])[0] == ["", "", "ab"]


# Against the obvious twin: decode everything, then look for the stop strings

PIECES = [b"a", b"b", b"ab", b"ba", b" ", b"aab", b"\xc4", b"\x8f", b"\x8fa", b"\xf0\x9f", b"\x98\x80", b"\x9f",
          b"\xff"]
MANY = byte_tokenizer(*PIECES)
SPECIAL = 2
STOPS = ["a", "b", "ab", "ba", "aba", "bab", "a a", "aabb", CARON, "a" + CARON, EMOJI, EMOJI + "b", "\ufffda"]


def text_after(ids: list[int]) -> str:
    """Text of the longest prefix that does not end inside a character."""
    for end in range(len(ids), 0, -1):
        text = MANY.decode(ids[:end], skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            return text
    return ""


def twin(ids: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """(text, number of tokens, stop string) by decoding the whole output after each token."""
    old = ""
    for count in range(1, len(ids) + 1):
        text = text_after(ids[:count])
        ends = [(start + len(stop), i) for i, stop in enumerate(params.stop) for start in range(len(text))
                if text.startswith(stop, start) and start + len(stop) > len(old)]
        if ends and count > params.min_tokens:
            end, i = min(ends)
            stop = params.stop[i]
            return text[:end if params.include_stop_str_in_output else end - len(stop)], count, stop
        old = text
    return old, len(ids), None


@settings(max_examples=250, deadline=None, derandomize=True)
@given(prompt=st.lists(st.sampled_from([b"a", b"b", b" ", b"ab"]), min_size=1, max_size=7),
       output=st.lists(st.sampled_from([*PIECES, *PIECES[:6], None]), min_size=1, max_size=12),
       stops=st.lists(st.sampled_from(STOPS), max_size=3), min_tokens=st.sampled_from([0, 0, 1, 3]),
       include=st.booleans())
def test_text_and_stops_agree_with_the_twin(prompt: list[bytes], output: list[bytes | None], stops: list[str],
                                            min_tokens: int, include: bool) -> None:
    ids = [SPECIAL if p is None else piece_ids(MANY, p)[0] for p in output]
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include)
    text, count, stop = twin(ids, params)
    prompt_ids = piece_ids(MANY, *prompt)

    deltas, found = feed(IncrementalDetokenizer(MANY, prompt_ids, params), ids)
    assert "".join(deltas) == text
    assert len(deltas) == count and (found[0] if found else None) == stop
    assert not stops or include or not any(s in "".join(deltas) for s in stops) or min_tokens

    cumulative = IncrementalDetokenizer(MANY, prompt_ids, params)
    for token_id in ids[:count]:
        found = cumulative.update([token_id], False)
        said = cumulative.get_text(found is not None)
        assert text.startswith(said)  # nothing that was said is ever taken back
    assert cumulative.get_text(True) == text

    at_once = IncrementalDetokenizer(MANY, prompt_ids, params)
    assert at_once.update(ids, False) == ((stop, count) if stop else None)
    assert at_once.get_text(True) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=20), st.text(max_size=20), st.integers(0, 40))
def test_any_text_byte_by_byte(prompt: str, output: str, cut: int) -> None:
    """Join of the deltas = the text, wherever prompt and output are cut apart, even inside a character."""
    data = (prompt + output).encode()
    cut = min(max(cut, 1), len(data))
    deltas, _ = feed(IncrementalDetokenizer(BYTES, byte_ids(data[:cut]), SamplingParams()), byte_ids(data[cut:]))
    complete = data[:cut].decode(errors="ignore")  # without the half character at the end
    assert "".join(deltas) == (prompt + output)[len(complete):] or "\ufffd" in prompt + output
