"""What clients may ask for, what they get, and how what is wrong is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import tutorial_engine
from tests.api.support import byte_ids, byte_tokenizer, scripted_engine
from tests.server.support import Live, ids, serve, serve_letters
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.server.app import MAX_BODY_BYTES
from tutorial_engine.server.errors import error_body


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status
    return error


# Answers


def test_offline_and_online_say_the_same(tiny: Live, tiny_model: Path) -> None:
    """Q1, Q3: each parameter reaches the engine."""
    cases: list[dict[str, Any]] = [
        {}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.5, "seed": 3, "top_k": 4}, {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5}, {"frequency_penalty": 2.0}, {"temperature": 1, "seed": 1, "min_p": 0.1},
        {"temperature": 1, "seed": 1, "top_p": 0.4}, {"logit_bias": {70: 80.0}}, {"allowed_token_ids": [40, 41]},
        {"stop_token_ids": list(range(3, 90))}, {"bad_words": ["he"]}, {"min_tokens": 5, "stop_token_ids": [200]},
        {"ignore_eos": True}, {"skip_special_tokens": False, "logit_bias": {2: 90.0}}]
    with LLM(str(tiny_model), max_model_len=128, num_gpu_blocks_override=33) as llm:
        for case in cases:
            params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **case})
            wanted = llm.generate("the described", params, use_tqdm=False)[0].outputs[0]
            bias = {str(k): v for k, v in case.get("logit_bias", {}).items()}
            body = {"max_tokens": 8, "return_token_ids": True, **case, **({"logit_bias": bias} if bias else {})}
            choice = tiny.complete("the described", **body).json()["choices"][0]
            assert (choice["text"], choice["token_ids"]) == (wanted.text, wanted.token_ids), case
            assert (choice["finish_reason"], choice["stop_reason"]) == (wanted.finish_reason, wanted.stop_reason)


def test_forms_of_prompts(letters: Live) -> None:
    """Q1, W1: choices in the order of the prompts; usage is the sum."""
    for prompt, count, tokens in (("ab", 1, 2), (["ab", "c"], 2, 3), (ids("abc"), 1, 3), ([ids("a"), ids("bc")], 2, 3)):
        result = letters.complete(prompt, max_tokens=2, echo=True).json()
        texts = [choice["text"] for choice in result["choices"]]
        assert [choice["index"] for choice in result["choices"]] == list(range(count)) and len(texts) == count
        assert all(text.endswith("he") for text in texts)
        assert "".join(text[:-2] for text in texts) == "abc"[:tokens]
        assert result["usage"] == {"prompt_tokens": tokens, "completion_tokens": 2 * count,
                                   "total_tokens": tokens + 2 * count}


def test_w5_logprobs(tiny: Live, tiny_model: Path) -> None:
    """As the offline engine's; with echo those of the prompt come first, the first of them unknown."""
    body = {"max_tokens": 3, "ignore_eos": True, "logprobs": 2, "echo": True}
    choice = tiny.complete("the described", **body).json()["choices"][0]
    with LLM(str(tiny_model), max_model_len=128, num_gpu_blocks_override=33) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
        (wanted,) = llm.generate("the described", params, use_tqdm=False)
    entries = wanted.prompt_logprobs + wanted.outputs[0].logprobs
    token_ids = wanted.prompt_token_ids + wanted.outputs[0].token_ids
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["tokens"][1:] == [entry[i].decoded_token for i, entry in zip(token_ids[1:], entries[1:])]
    assert found["token_logprobs"][1:] == pytest.approx(
        [entry[i].logprob for i, entry in zip(token_ids[1:], entries[1:])], abs=1e-4)
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(token_ids))]
    named = tiny.complete("the", **body, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in named["tokens"])

    chat = tiny.chat("he", max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2).json()["choices"][0]
    for token in chat["logprobs"]["content"]:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(token["top_logprobs"]) == 2 and token["bytes"] == list(token["token"].encode())
        assert token["top_logprobs"][0]["logprob"] == token["logprob"], "greedy: the first of them is the chosen one"


def test_impossible_tokens_are_still_json(letters: Live) -> None:
    """Minus infinity is no JSON; -9999 stands for it."""
    with serve_letters("a", logprobs_mode="processed_logprobs") as live:
        text = live.complete(max_tokens=1, logprobs=3, allowed_token_ids=ids("a")).text
        (top,) = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"]
        assert "Infinity" not in text and -9999.0 in top.values()


def test_prompt_logprobs(tiny: Live) -> None:
    """Q3: null, then one entry per token, by token id."""
    whole = tiny.complete("the", max_tokens=1, prompt_logprobs=1, return_token_ids=True).json()["choices"][0]
    first, *others = whole["prompt_logprobs"]
    assert first is None and len(others) == len(whole["prompt_token_ids"]) - 1
    for token_id, entry in zip(whole["prompt_token_ids"][1:], others):
        assert entry[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    assert len(tiny.chat("the", max_tokens=1, prompt_logprobs=1).json()["prompt_logprobs"]) > 3


def test_w6_only_the_prompt(tiny: Live) -> None:
    """echo with max_tokens=0, as lm-eval asks for to score a text."""
    for stream in (False, True):
        response = tiny.complete("the described", echo=True, max_tokens=0, logprobs=1, stream=stream)
        text = response.text.removeprefix("data: ").split("\n\n")[0]
        choice = json.loads(text)["choices"][0]
        assert choice["text"] == "the described" and len(choice["logprobs"]["tokens"]) == 4
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == 0
    assert error_of(tiny.complete("the", max_tokens=0))["param"] == "max_tokens"


def test_q5_defaults_of_the_model() -> None:
    """null: what the model recommends; a value of the client's own wins."""
    config = {"temperature": 0.0, "max_new_tokens": 3}
    with serve_letters("abcdef", generation_config=config) as live:
        ask = {"messages": [{"role": "user", "content": "p"}]}
        said = live.post("/v1/chat/completions", **ask).json()["choices"][0]
        assert said["message"]["content"] == "abc" and said["finish_reason"] == "length"
        assert error_of(live.post("/v1/chat/completions", **ask, n=2))["param"] == "n", "greedy, as recommended"
        assert live.post("/v1/chat/completions", **ask, n=2, temperature=1).status_code == 200
        longer = live.post("/v1/chat/completions", **ask, max_tokens=5).json()
        assert longer["choices"][0]["message"]["content"] == "abcde"
    with serve_letters("abcdef", override_generation_config={"max_new_tokens": 2}) as live:
        assert live.complete(max_tokens=9).json()["choices"][0]["text"] == "ab", "the server's limit"


def test_q8_lengths() -> None:
    """B12, W12: what fits is generated; what cannot fit is refused, with the limit."""
    with serve_letters("a", max_model_len=32) as live:
        only = live.complete("p" * 31, max_tokens=5).json()
        assert only["choices"][0]["finish_reason"] == "length" and only["usage"]["completion_tokens"] == 1
        for length in (32, 33, 200):
            error = error_of(live.complete("p" * length, max_tokens=5))
            assert "32 tokens" in error["message"] and error["param"] == "input_tokens"
        error = error_of(live.complete("p" * 5000))
        assert error["param"] == "input_text" and "5000 characters" in error["message"]
        assert error_of(live.complete("p", max_tokens=33))["message"] == (
            "max_tokens=33 cannot be greater than max_model_len=32. Please request fewer output tokens.")
        assert live.chat("p").json()["usage"]["total_tokens"] == 32, "up to the context limit, unless told otherwise"
        cut = live.complete("p" * 99, truncate_prompt_tokens=-1).json()
        assert cut["usage"] == {"prompt_tokens": 31, "completion_tokens": 1, "total_tokens": 32}
        assert error_of(live.complete("p", min_tokens=20, max_tokens=10))["param"] == "min_tokens"


def test_b11_empty_prompts(letters: Live, tiny: Live) -> None:
    """With a BOS, "" is a prompt of one token; without it there is nothing to begin with."""
    for prompt in ("", [], [[]], ["a", ""]):
        assert "empty" in error_of(letters.complete(prompt))["message"]
    assert tiny.complete("", max_tokens=1).json()["usage"]["prompt_tokens"] == 1
    assert letters.complete("p", max_tokens=1).status_code == 200


def test_structured_outputs() -> None:
    """Q3: each way to ask for a form."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}
    with serve(scripted_engine(byte_tokenizer(), byte_ids(b'{"a": 12}'))) as live:
        for extra in ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
                      {"structured_outputs": {"json": schema}}, {"response_format": {"type": "json_object"}}):
            said = live.chat(max_tokens=30, **extra).json()["choices"][0]
            assert said["message"]["content"] == '{"a": 12}' and said["finish_reason"] == "stop"
        said = live.complete(structured_outputs={"choice": ["yes", "no"]}).json()["choices"][0]
        assert said["text"] in ("yes", "no")
        assert live.complete(structured_outputs={"regex": "[ab]{3}"}).json()["choices"][0]["text"] in ("aaa", "bbb")
        assert live.complete(response_format={"type": "text"}, max_tokens=3).json()["choices"][0]["text"] == '{"a'
        two = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
        for bad in (two, {"structured_outputs": {}}, {"structured_outputs": {"json": schema, "regex": "a"}},
                    {"structured_outputs": {"shape": "round"}}, {"response_format": {"type": "json_schema"}},
                    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"grammar": " "}}):
            assert live.complete(**bad).status_code == 400, bad


def test_priority_and_salt(letters: Live) -> None:
    """Q3: a salt keeps prefixes apart; priority needs the policy."""
    assert error_of(letters.complete(priority=1))["param"] == "priority"
    with serve_letters("a", scheduling_policy="priority", options={"enable_prompt_tokens_details": True}) as live:
        assert live.complete(priority=-3).status_code == 200
        cached = [live.complete("x" * 20, cache_salt=salt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                  for salt in ("one", "one", "two", None)]
        assert cached == [0, 16, 0, 0]
        for salt in ("", "a/b", "a@b", "x" * 129):
            assert error_of(live.complete(cache_salt=salt))["param"] == "cache_salt"


def test_tokenize(tiny: Live, letters: Live) -> None:
    """R5: what the engine would see."""
    result = tiny.post("/tokenize", prompt="the described", return_token_strs=True).json()
    assert result["tokens"][0] == 0 and result["count"] == len(result["tokens"]) == len(result["token_strs"]) == 4
    assert result["max_model_len"] == 128
    assert tiny.post("/tokenize", prompt="the", add_special_tokens=False).json()["tokens"] == result["tokens"][1:3]
    assert tiny.post("/detokenize", tokens=result["tokens"][1:]).json() == {"prompt": "the described"}
    chat = tiny.post("/tokenize", messages=[{"role": "user", "content": "he"}]).json()
    assert chat["tokens"].count(0) == 1 and chat["token_strs"] is None
    assert chat["count"] == tiny.chat("he", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert error_of(tiny.post("/detokenize", tokens=[10**6]))["param"] == "tokens"
    assert error_of(tiny.post("/tokenize", prompt="a", model="x"), 404)["param"] == "model"


def test_conversations(letters: Live) -> None:
    """Q4: how the prompt is laid out; parts of text; what follows a conversation is up to the template."""
    def prompt(**body: Any) -> str:
        answer = letters.post("/v1/chat/completions", max_tokens=1, temperature=0, return_token_ids=True, **body).json()
        return letters.post("/detokenize", tokens=answer["prompt_token_ids"]).json()["prompt"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    both = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert prompt(messages=both) == "system:s;user:a\nb;"
    said = {"role": "assistant", "content": "so"}
    assert prompt(messages=[said], add_generation_prompt=False, continue_final_message=True) == "assistant:so"
    for bad in ({"messages": []}, {"messages": [{"content": "x"}]}, {"messages": "hi"},
                {"messages": [said], "echo": True},
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
                {"messages": [said], "continue_final_message": True}):
        error_of(letters.post("/v1/chat/completions", **bad))


def test_templates_of_clients(letters: Live, tmp_path: Path) -> None:
    """Q4: only if the server trusts them, and never a file of the server."""
    error = error_of(letters.chat(chat_template="{{ messages }}"))
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with serve_letters("a", options={"trust_request_chat_template": True}) as live:
        answer = live.chat("x", chat_template="{{ messages[0].content }}!", max_tokens=1).json()
        assert answer["usage"]["prompt_tokens"] == 2
        assert error_of(live.chat(chat_template=str(secret)))["param"] == "chat_template"


# Refusals


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stream_options": {}}, "stream_options"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"), ({"stop": [""]}, "stop"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt_token_ids"), ({"n": 0}, "n"), ({"n": "x"}, "n"), ({"n": 10**5}, "n"),
    ({"temperature": 3}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"seed": 2**64}, "seed"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [0] * 1025}, "stop_token_ids"), ({"prompt": None}, "prompt"), ({"suffix": "s"}, "suffix"),
    ({"max_tokens": -1}, "max_tokens"), ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"), ({"vllm_xargs": {"a": 1}}, "extra_args"),
    ({"request_id": "a\nb"}, "request_id"), ({"min_p": 2}, "min_p"),
    ({"bad_words": ["x" * 257]}, "bad_words"), ({"prompt": ["p"] * 2000}, "n"),
    ({"structured_outputs": {"choice": ["x" * 2**17]}}, "structured_outputs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"n": 2}, "n")]


@pytest.mark.parametrize("body, param", BAD, ids=[param for _, param in BAD])
def test_q6_bad_fields(letters: Live, body: dict[str, Any], param: str) -> None:
    content = json.dumps({"prompt": "p", "temperature": 0, **body})
    response = letters.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert param in (error := error_of(response))["param"].split("."), error


@pytest.mark.parametrize("body, param", [
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"tools": []}, "tools"), ({"tool_choice": "auto"}, "tool_choice"), ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
     "tool_choice"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"), ({"documents": ["d"]}, "documents"),
    ({"max_completion_tokens": 0}, "max_tokens"), ({"chat_template_kwargs": 1}, "chat_template_kwargs")])
def test_q6_bad_fields_of_a_chat(letters: Live, body: dict[str, Any], param: str) -> None:
    assert param in (error := error_of(letters.chat(**body)))["param"].split("."), error


def test_fields_nobody_knows(letters: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Q1, Q7: ignored; those that vLLM has removed with one warning."""
    for _ in range(2):
        answer = letters.complete(max_tokens=2, best_of=3, guided_regex="x+", flavour="mint", user="me")
        assert answer.json()["choices"][0]["text"] == "he"
    assert sum("guided_regex" in record.message for record in caplog.records) <= 1


def test_bodies_that_are_no_request(letters: Live) -> None:
    """W7: 400 in the usual shape, whatever it is."""
    send = letters.http.post
    for content in (b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 300 + b"]" * 300,
                    b'{"prompt": ' + b"9" * 5000 + b"}"):
        error = error_of(send("/v1/completions", content=content, headers={"Content-Type": "application/json"}))
        assert len(error["message"]) < 1100
    error = error_of(send("/v1/completions", content=b'{"n": }', headers={"Content-Type": "application/json"}))
    assert error["message"] == "The body is not JSON: Expecting value, at character 6." and error["param"] is None
    error = error_of(send("/v1/completions", content=b'{"prompt": "p"}', headers={"Content-Type": "text/plain"}))
    assert "application/json" in error["message"]
    many = {f"{name}": "x" for name in ("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "logprobs",
                                        "presence_penalty", "frequency_penalty", "max_tokens", "priority")}
    error = error_of(letters.complete(**many))
    assert error["message"].count(";") == 9 and error["message"].endswith("...") and error["type"] == "Bad Request"
    assert error_of(letters.http.get("/v1/nothing"), 404)
    assert error_of(letters.http.get("/v1/completions"), 405)


def test_half_characters(letters: Live) -> None:
    """JSON can hold what UTF-8 cannot; that is the client's mistake, and no failure of the server."""
    for body in ({"prompt": "\ud800"}, {"prompt": "p", "model": "\udfff"}, {"prompt": "p", "stop": "\ud800"},
                 {"prompt": "p", "cache_salt": "\ud800"}, {"prompt": "p", "bad_words": ["\ud800"]},
                 {"prompt": "p", "request_id": "\ud800"},
                 {"prompt": "p", "structured_outputs": {"choice": ["\ud800"]}}):
        response = letters.http.post("/v1/completions", content=json.dumps(body).encode(),
                                     headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), (body, response.text)


def test_large_bodies(letters: Live) -> None:
    """Refused by their length, or when there is more than was announced."""
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    assert error_of(letters.http.post("/v1/completions", content=large, headers=headers), 413)

    def pieces() -> Any:
        for start in range(0, len(large), 2**20):
            yield large[start:start + 2**20]

    assert error_of(letters.http.post("/v1/completions", content=pieces(), headers=headers), 413)
    assert letters.complete().status_code == 200


def test_errors_do_not_tell_where_things_are(letters: Live) -> None:
    """W7: no path, no address, not the whole of a long value."""
    told = "cannot read /home/me/model/x.gguf at 0x7f00deadbeef, or C:\\data\\x.bin; see /v1 " + "x" * 5000
    text = error_body(told, 400)["error"]["message"]
    assert text.startswith("cannot read <path> at <address>, or <path>; see /v1 ") and len(text) < 1100
    assert len(error_of(letters.complete(logit_bias={"x" * 9000: 1}))["message"]) < 1100


# Other routes


def test_w9_keys() -> None:
    """What needs the key, what does not, and what is no key."""
    with serve_letters("a", options={"api_key": ["right"]}) as live:
        plain = httpx.Client(base_url=live.url)
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert plain.get(path).status_code == 200
        for headers in ({}, {"Authorization": "right"}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"},
                        {"Authorization": "Basic right"}, {"Authorization": "Bearer right2"},
                        {"Authorization": "Bearer rïght".encode("latin-1")}):
            response = plain.get("/v1/models", headers=headers)
            assert response.status_code == 401 and response.json() == {"error": "Unauthorized"}, headers
        assert plain.get("/v1/models", headers={"Authorization": "Bearer right"}).status_code == 200
        assert plain.post("/v1/completions", json={"prompt": "p"}).status_code == 401
        preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
        assert plain.options("/v1/completions", headers=preflight).status_code == 200
        plain.close()


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10."""
    monkeypatch.setenv("VLLM_API_KEY", "from-outside")
    with serve_letters("a") as live:
        assert live.http.get("/v1/models").status_code == 401
        assert live.http.get("/v1/models", headers={"Authorization": "Bearer from-outside"}).status_code == 200


def test_small_routes(letters: Live) -> None:
    """R2, R3, R7."""
    assert letters.http.get("/health").content == b""
    assert letters.http.get("/version").json() == {"version": tutorial_engine.__version__}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        error = error_of(letters.post(path, lora_name="x", lora_path="/x"), 501)
        assert error["type"] == "NotImplementedError" and "LoRA" in error["message"]
    assert letters.http.post("/sleep").status_code == 404, "only with VLLM_SERVER_DEV_MODE=1"


def test_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with serve_letters("a", options={"api_key": ["key"]}) as live:
        def post(path: str, **body: Any) -> Any:
            response = live.http.post(path, json=body or None)
            assert response.status_code == 200, response.text
            return response.json()

        assert post("/sleep?level=0") == {"status": "sleeping", "level": 0}
        assert live.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert post("/wake_up?tags=scheduling") == {"is_sleeping": False}
        assert post("/reset_prefix_cache") == {"success": True}
        assert post("/pause?mode=wait") == {"status": "paused"}
        assert live.http.get("/is_paused").json() == {"is_paused": True}
        refused = live.complete()
        assert error_of(refused, 503)["type"] == "ServiceUnavailable" and refused.headers["retry-after"]
        assert post("/resume") == {"status": "resumed"}
        assert post("/abort_requests", request_ids=["cmpl-none"]) == post("/abort_requests") == {"status": "aborted"}
        info = live.http.get("/server_info").json()["vllm_config"]
        assert info["model_config"]["max_model_len"] == 64
        assert post("/collective_rpc", method="close") == {"results": [None]}
        for bad in ("/sleep?level=9", "/sleep?level=x", "/pause?mode=never", "/wake_up?tags=coffee"):
            error_of(live.http.post(bad))
        for method in ("_run", "nothing", "execute_model"):
            assert error_of(live.post("/collective_rpc", method=method))["param"] == "method"
        live.http.headers.pop("authorization")
        assert live.http.post("/resume").status_code == 401, "a lever needs the key too"
        live.http.headers["authorization"] = "Bearer key"
        assert live.complete(max_tokens=1).json()["choices"][0]["text"] == "a"


def test_metrics() -> None:
    """R4, N1, N2, N3: the engine's, under the served name, and the server's own."""
    with serve_letters("a", served_model_name="letters") as live:
        live.complete(max_tokens=3)
        live.complete(top_p=0)
        live.http.get("/health")
        text = live.http.get("/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="letters"} 0.0' in text
        found = live.metrics()
        assert found["vllm:generation_tokens_total"] == 3 and found["vllm:request_success_total:length"] == 1
        assert found["http_requests_total:/v1/completions:POST:2xx"] == 1
        assert found["http_requests_total:/v1/completions:POST:4xx"] == 1
        live.http.get("/no/such/path")
        assert live.metrics()["http_requests_total:none:GET:4xx"] == 1
        assert not [name for name in found if "/health" in name or "/metrics" in name]
