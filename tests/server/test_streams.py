"""Streams, byte by byte: what is in each event, what is held back, and how a stream ends when something fails."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.support import byte_tokenizer, piece_ids, piece_tokenizer, scripted_engine
from tests.server.support import LETTERS, TIMEOUT, Live, events, ids, serve, serve_letters
from tutorial_engine.request import Request
from tutorial_engine.scheduler import SchedulerOutput


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_w3_the_bytes_of_a_chat(letters: Live) -> None:
    """Each event is one line; the first has the role, the last the reason, and [DONE] ends the stream."""
    response = letters.chat(max_tokens=2, stream=True, request_id="me")
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.content.split(b"\n\n")
    head = json.loads(lines[0].removeprefix(b"data: "))
    assert head["id"] == "chatcmpl-me"
    known = b'data: {"id":"chatcmpl-me","object":"chat.completion.chunk","created":%d,"model":' \
            b'"smollm2-135m-instruct","choices":[{"index":0,"delta":' % head["created"]
    assert lines == [
        known + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        known + b'{"content":"h"},"logprobs":null,"finish_reason":null}]}',
        known + b'{"content":"e"},"logprobs":null,"finish_reason":"length","stop_reason":null}]}',
        b"data: [DONE]", b""]


def test_w4_the_bytes_of_a_completion(letters: Live) -> None:
    """No role; the prompt comes with the first piece if it is to be echoed."""
    content = letters.complete("ask", max_tokens=2, stream=True, echo=True, request_id="me").content
    head = json.loads(content.split(b"\n\n")[0].removeprefix(b"data: "))
    known = b'data: {"id":"cmpl-me","object":"text_completion","created":%d,"model":"smollm2-135m-instruct",' \
            b'"choices":[{"index":0,"text":' % head["created"]
    assert content.split(b"\n\n") == [
        known + b'"askh","logprobs":null,"finish_reason":null,"stop_reason":null}]}',
        known + b'"e","logprobs":null,"finish_reason":"length","stop_reason":null}]}', b"data: [DONE]", b""]


def test_w3_usage(letters: Live) -> None:
    """One more chunk at the end, without choices; or in every chunk; or not at all."""
    for options, wanted in (({}, []), ({"include_usage": True}, [2]),
                            ({"include_usage": True, "continuous_usage_stats": True}, [1, 1, 2, 2])):
        chunks = events(letters.chat(max_tokens=2, stream=True, stream_options=options).text)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk] == wanted
        assert [chunk for chunk in chunks if not chunk["choices"]] == chunks[3:]
        assert bool(chunks[3:]) == bool(options)


def by_child(request: Request) -> int:
    """The first completion says "abab...", the second "xyxy...": who says what shows in the text."""
    text = "xy" if request.request_id.startswith("1_") else "ab"
    return ids(text)[request.num_output_tokens % 2]


def test_two_choices_interleaved() -> None:
    """W3, W4, X1: each has its own role, its own text, its own end."""
    with serve_letters(by_child) as live:
        chunks = events(live.chat(n=2, temperature=1, max_tokens=6, stream=True).text)
        assert ["".join(deltas(chunks, i)) for i in (0, 1)] == ["ababab", "xyxyxy"]
        order = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
        assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the second begins before the first has ended"
        for i in (0, 1):
            mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == i]
            assert ["role" in choice["delta"] for choice in mine] == [True] + [False] * (len(mine) - 1)
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        chunks = events(live.complete(["p", "q"], n=2, temperature=1, max_tokens=4, stream=True, echo=True).text)
        assert ["".join(deltas(chunks, i)) for i in range(4)] == ["pabab", "pxyxy", "qabab", "qxyxy"]


def test_b03_characters_split_over_tokens() -> None:
    """No half of a character is ever sent."""
    tokenizer = byte_tokenizer(b"\xf0\x9f", b"\x98\x80")
    script = piece_ids(tokenizer, b"\xc4", b"\x8f", b"\xf0\x9f", b"\x98\x80")
    with serve(scripted_engine(tokenizer, script), paced=True) as live:
        response = live.complete("p", max_tokens=4, stream=True)
        assert deltas(events(response.text)) == ["", "ď", "", "😀"]
        assert "ď".encode() in response.content and b"\xef\xbf\xbd" not in response.content
        content = live.chat("p", max_tokens=4, stream=True).content
        assert "".join(deltas(events(content.decode()))) == "ď😀" and b"\\u" not in content


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_b01_a_stop_string_is_held_back(route: str) -> None:
    """Not one character of it is sent, and the text is that of the whole answer."""
    tokenizer = piece_tokenizer("AB", "C DEF", "G", "HI", "J tail")
    tokenizer.chat_template = LETTERS.chat_template
    body: dict[str, Any] = {"prompt": "p"} if route == "completions" else {"messages": [{"role": "user",
                                                                                         "content": "p"}]}
    body |= {"temperature": 0, "stop": ["DEFGHIJ"]}
    script = piece_ids(tokenizer, "AB", "C DEF", "G", "HI", "J tail")
    with serve(scripted_engine(tokenizer, script), paced=True) as live:
        chunks = events(live.post(f"/v1/{route}", **body, stream=True).text)
        whole = live.post(f"/v1/{route}", **body).json()["choices"][0]
    assert [delta for delta in deltas(chunks) if delta] == ["A", "B", "C "]
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")
    assert (whole["text"] if "text" in whole else whole["message"]["content"]) == "ABC "


def test_b25_usage_of_a_stream_is_that_of_the_whole_answer() -> None:
    """7 + 5 tokens of two completions; the prompt counts once."""
    def script(request: Request) -> int:
        return ids("bbbbSTOP" if request.request_id.startswith("1_") else "aaaaaaa")[request.num_output_tokens]

    body = {"n": 2, "temperature": 1, "max_tokens": 7, "stop": ["bS"]}
    with serve_letters(script) as live:
        chunks = events(live.chat("p", **body, stream=True, stream_options={"include_usage": True}).text)
        assert ["".join(deltas(chunks, i)) for i in (0, 1)] == ["aaaaaaa", "bbb"]
        prompt = len("user:p;")
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == live.chat("p", **body).json()["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}


def failing_at(num_tokens: int, error: BaseException) -> Any:
    def before(plan: SchedulerOutput) -> None:
        if any(scheduled.request.num_tokens == num_tokens for scheduled in plan.scheduled.values()):
            raise error

    return before


def test_w8_an_error_after_the_stream_began() -> None:
    """Status 200 was sent; the error is an event, and the stream ends as all do. What failed is not told."""
    with serve_letters("a", before=failing_at(3, RuntimeError("out of secret memory"))) as live:
        response = live.complete("p", stream=True)
        assert response.status_code == 200
        chunks = events(response.text)
        assert deltas(chunks[:-1]) == ["a", "a"]
        assert chunks[-1]["error"]["type"] == "InternalServerError" and chunks[-1]["error"]["code"] == 500
        assert "secret" not in response.text
        assert live.complete("pppp", stream=True).status_code == 200, "the engine goes on"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_stream_began(stream: bool) -> None:
    """W7: there is still a status to tell it with."""
    with serve_letters("a", before=failing_at(1, RuntimeError("out of secret memory"))) as live:
        response = live.complete("p", stream=stream)
        assert response.status_code == 500 and response.json()["error"]["type"] == "InternalServerError"
        assert "secret" not in response.text
        refused = live.complete("p" * 100, stream=stream)
        assert refused.status_code == 400 and "maximum context length is 64" in refused.json()["error"]["message"]


def test_an_engine_that_dies() -> None:
    """A5, R2: whoever streams is told, and afterwards everything that needs the engine says 503."""
    with serve_letters("a", before=failing_at(3, SystemExit("gone"))) as live:
        chunks = events(live.complete("p", stream=True).text)
        assert chunks[-1]["error"]["code"] == 503
        for response in (live.http.get("/health"), live.complete("p"), live.complete("p", stream=True), live.chat("p"),
                         live.post("/tokenize", prompt="p")):
            assert response.status_code == 503 and response.json()["error"]["type"] == "ServiceUnavailable"
            assert "gone" not in response.text
        assert live.http.get("/v1/models").status_code == 200


def test_logprobs_of_a_stream(letters: Live, tiny: Live) -> None:
    """W5: the pieces together are those of the whole answer."""
    body = {"max_tokens": 3, "logprobs": 2, "echo": True, "ignore_eos": True}
    whole = tiny.complete("ask", **body).json()["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == 1 + 3 + 3, "BOS, the prompt, the answer"
    chunks = events(tiny.complete("ask", **body, stream=True).text)
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = sum((chunk["choices"][0]["logprobs"][name] for chunk in chunks), [])
        wanted = whole["logprobs"][name]
        assert joined == (pytest.approx(wanted, abs=1e-4) if name == "token_logprobs" else wanted)
    body = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    whole = letters.chat(**body).json()["choices"][0]
    chunks = events(letters.chat(**body, stream=True).text)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert pieces[0] is None and sum((piece["content"] for piece in pieces[1:]), []) == whole["logprobs"]["content"]


def test_token_ids_of_a_stream(letters: Live) -> None:
    for ask in (letters.complete, letters.chat):
        chunks = events(ask(max_tokens=3, stream=True, return_token_ids=True).text)
        assert sum((chunk["choices"][0].get("token_ids") or [] for chunk in chunks), []) == ids("hel")
        where = chunks[0] if "prompt_token_ids" in chunks[0] else chunks[0]["choices"][0]
        assert where["prompt_token_ids"] == ids("p" if ask == letters.complete else "user:p;")
        assert sum("prompt_token_ids" in {**chunk, **chunk["choices"][0]} for chunk in chunks) == 1


def test_events_arrive_while_the_model_works() -> None:
    """The first is read before the last is made."""
    import threading

    gate = threading.Semaphore(2)
    with serve_letters("abc", before=lambda plan: gate.acquire(timeout=TIMEOUT)) as live, \
            httpx.stream("POST", live.url + "/v1/completions", timeout=TIMEOUT,
                         json={"prompt": "p", "max_tokens": 4, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        assert [json.loads(next(lines)[6:])["choices"][0]["text"] for _ in range(2)] == ["a", "b"]
        gate.release(2)
        assert len(list(lines)) == 3
