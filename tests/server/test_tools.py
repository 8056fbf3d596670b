"""Tool calls and reasoning: the parsers alone, cut at every place, and behind the server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.support import byte_ids, byte_tokenizer, scripted_engine
from tests.server.support import LETTERS, Live, events, serve
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.server.reasoning import ReasoningParser
from tutorial_engine.server.serving import ServerOptions
from tutorial_engine.server.tool_parsers import HermesToolParser

WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def cuts(text: str, seed: int) -> list[str]:
    """The text in pieces of random length."""
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, rng.choice([1, 3, 30]))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]) as a client puts the deltas together."""
    parser, content, calls, seen = HermesToolParser(), "", [], []
    for i, piece in enumerate(pieces):
        parsed = parser.feed(piece, i == len(pieces) - 1)
        content += parsed.content
        for call in parsed.calls:
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                seen.append(call["id"])
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    assert len(set(seen)) == len(calls) == parser.num_calls
    return content, [(name, arguments) for name, arguments in calls]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
HERMES = {
    "no call": ("Just text, a < b, <tool, </tool_call>.", "Just text, a < b, <tool, </tool_call>.", []),
    "one": (CALL, "", [("weather", {"city": "Bern"})]),
    "text before": ("Let me look." + CALL, "Let me look.", [("weather", {"city": "Bern"})]),
    "two, and text after": (f"A{CALL}\n{CALL.replace('Bern', 'Rome')} bye", "A", [
        ("weather", {"city": "Bern"}), ("weather", {"city": "Rome"})]),
    "two, the second cut off": (CALL + CALL[:30], "", [("weather", {"city": "Bern"})]),
    "not closed": (CALL.removesuffix("\n</tool_call>"), "", [("weather", {"city": "Bern"})]),
    "braces in text": ('<tool_call>{"name":"f","arguments":{"a":"}\\"{</","b":[{"c":"é]"}]}}</tool_call>', "",
                       [("f", {"a": '}"{</', "b": [{"c": "é]"}]})]),
    "other order": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "no object": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    "escaped name": ('<tool_call>{"name": "a\\u0062\\"c", "arguments": {}}</tool_call>', "", [('ab"c', {})]),
    "no JSON": ("x<tool_call>weather(Bern)</tool_call>", "x<tool_call>weather(Bern)</tool_call>", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
}


@pytest.mark.parametrize("text, content, calls", HERMES.values(), ids=HERMES)
def test_w13_hermes(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """However the text is cut, the client puts together the same."""
    for pieces in ([text], list(text), *(cuts(text, seed) for seed in range(30))):
        found_content, found = parse(pieces)
        assert found_content == content, pieces
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_w13_arguments_come_in_pieces() -> None:
    """The name first, as soon as it is known; then the arguments while they are written."""
    parser, arrived = HermesToolParser(), []
    for piece in ('<tool_', 'call>{"name": "f", "argu', 'ments": {"a', '": [1, ', '2]}', '}</tool', '_call>'):
        arrived.append([call["function"] for call in parser.feed(piece, False).calls])
    assert [[f.get("arguments") for f in functions] for functions in arrived] == [
        [], [], ["", '{"a'], ['": [1, '], ["2]}"], [], []]
    assert arrived[2][0]["name"] == "f"


def test_w13_a_call_cut_off_by_the_length() -> None:
    """Not yet a call: the user sees what was written. In a stream the begin of it is already on its way."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "lo'
    assert parse([text]) == (text, [])
    assert parse(list(text)) == ("", [("f", '{"a": "lo')])


@pytest.mark.parametrize("implicit, text, wanted", [
    (False, "<think>hm</think>yes", ("hm", "yes")), (True, "<think>hm</think>yes", ("hm", "yes")),
    (False, "\n<think>\nhm\n</think>\n\nyes", ("\nhm\n", "\n\nyes")), (True, "hm</think>yes", ("hm", "yes")),
    (False, "yes <think>", ("", "yes <think>")), (False, "<thin air", ("", "<thin air")), (True, "hm", ("hm", "")),
    (False, "<think>a < b </thin", ("a < b </thin", "")), (False, "", ("", "")), (False, "<thi", ("", "<thi")),
    (False, "<think>a</think>b</think>", ("a", "b</think>"))])
def test_w14_reasoning(implicit: bool, text: str, wanted: tuple[str, str]) -> None:
    for pieces in ([text], list(text) or [""], *(cuts(text, seed) or [""] for seed in range(20))):
        parser = ReasoningParser(implicit)
        parts = [parser.feed(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        assert ("".join(r for r, _ in parts), "".join(c for _, c in parts)) == wanted, pieces


# Behind the server


def says(text: str, paced: bool = False, **options: Any) -> Any:
    """A server whose model would like to say `text`, byte by byte."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = LETTERS.chat_template.replace("{% for", "{% if tools %}tools{% endif %}{% for", 1)
    script = [*byte_ids(text.encode()), tokenizer.eos_token_id]
    engine = scripted_engine(tokenizer, script, max_model_len=512, num_gpu_blocks=513)
    return serve(engine, paced, **options)


def streamed(live: Live, **body: Any) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in events(live.chat(stream=True, **body).text):
        choice = chunk["choices"][0]
        for name in ("content", "reasoning"):
            message[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def whole(live: Live, **body: Any) -> dict[str, Any]:
    choice = live.chat(**body).json()["choices"][0]
    message = choice["message"]
    assert "tool_calls" not in message or message["tool_calls"], "an empty list is left out"
    calls = [{**call["function"]} for call in message.get("tool_calls", [])]
    assert all(call.keys() == {"id", "type", "function"} for call in message.get("tool_calls", []))
    return {"content": message["content"] or "", "reasoning": message.get("reasoning", ""), "tool_calls": calls,
            "finish_reason": choice["finish_reason"]}


BOTH: list[Callable[..., dict[str, Any]]] = [whole, streamed]
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.mark.parametrize("ask", BOTH)
def test_w13_the_model_decides(ask: Any) -> None:
    with says("Let me look." + CALL, paced=True, **AUTO) as live:
        message = ask(live, tools=[WEATHER], max_tokens=200)
        assert message == {"content": "Let me look.", "reasoning": "", "finish_reason": "tool_calls",
                           "tool_calls": [{"name": "weather", "arguments": '{"city": "Bern"}'}]}
        message = ask(live, tools=[WEATHER], tool_choice="none", max_tokens=200)
        assert message["content"].endswith(CALL) and message["finish_reason"] == "stop"


@pytest.mark.parametrize("ask", BOTH)
def test_w13_the_client_insists(ask: Any) -> None:
    """A grammar sees to it, whatever the model would like to say; neither flag is needed."""
    wish = '<tool_call>\n{"name": "clock", "arguments": {"city": "Bern"}}\n</tool_call>'
    with says(wish) as live:
        named = ask(live, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}},
                    max_tokens=200)
        assert named["finish_reason"] == "stop" and [call["name"] for call in named["tool_calls"]] == ["clock"]
        assert json.loads(named["tool_calls"][0]["arguments"]) == {"city": "Bern"} and named["content"] == ""
        for extra in ({}, {"parallel_tool_calls": False}):
            required = ask(live, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=200, **extra)
            assert required["finish_reason"] == "tool_calls" and required["tool_calls"][0]["name"] == "clock"


def test_w13_auto_needs_the_flags() -> None:
    with says(CALL) as live:
        error = live.chat(tools=[WEATHER], tool_choice="auto").json()["error"]
        assert error["code"] == 400 and error["param"] == "tool_choice"
        assert "--enable-auto-tool-choice" in error["message"] and "--tool-call-parser" in error["message"]
        message = live.chat(tools=[WEATHER], max_tokens=200).json()["choices"][0]["message"]
        assert message["content"] == CALL, "not asked for: the tools are in the prompt, the text is as it is"
    with pytest.raises(VLLMValidationError, match="tool_call_parser"):
        ServerOptions(enable_auto_tool_choice=True)
    with pytest.raises(VLLMValidationError, match="hermes"):
        ServerOptions(tool_call_parser="greek")


def test_w13_one_call_only() -> None:
    with says(CALL + CALL, **AUTO) as live:
        assert len(whole(live, tools=[WEATHER], max_tokens=300)["tool_calls"]) == 2
        for ask in BOTH:
            assert len(ask(live, tools=[WEATHER], max_tokens=300, parallel_tool_calls=False)["tool_calls"]) == 1


def test_tools_are_in_the_prompt_and_calls_go_back_into_it() -> None:
    """Arguments are text for clients and objects for templates."""
    with says("ok", **AUTO) as live:
        def count(**body: Any) -> int:
            return live.chat(**body, max_tokens=1).json()["usage"]["prompt_tokens"]

        assert count(tools=[WEATHER]) == count() + len("tools") == count(tools=[WEATHER], tool_choice="none") + 5
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "rain"}]
        assert live.post("/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200
        call["function"]["arguments"] = "{"
        assert live.post("/v1/chat/completions", messages=messages).json()["error"]["param"] == "messages"


@pytest.mark.parametrize("ask", BOTH)
def test_w14_reasoning_and_tools(ask: Any) -> None:
    with says("<think>Bern?</think>Let me look." + CALL, paced=True, reasoning_parser="qwen3", **AUTO) as live:
        message = ask(live, tools=[WEATHER], max_tokens=200)
        assert message["reasoning"] == "Bern?" and message["content"] == "Let me look."
        assert [call["name"] for call in message["tool_calls"]] == ["weather"]
        assert ask(live, max_tokens=200)["content"] == "Let me look." + CALL
        assert ask(live, max_tokens=200, include_reasoning=False)["reasoning"] == ""
