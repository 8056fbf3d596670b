"""Rows R, Q, W and N: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from typing import Any
from unittest import mock

import openai
import pytest

import tutorial_engine
from tests.api.support import byte_ids, byte_tokenizer, scripted_engine, scripted_llm
from tests.conformance.registry import DIFFERS, NOT_HERE, SAME, row
from tests.server.support import LETTERS, Live, events, ids, serve, serve_letters
from tutorial_engine.bench import offline
from tutorial_engine.bench.workload import random_jobs
from tutorial_engine.server import cli
from tutorial_engine.server.serving import ServerOptions

DEV_MODE = mock.patch.dict(os.environ, {"VLLM_SERVER_DEV_MODE": "1"})


def refused(response: Any, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """The error of a response, which is about this field."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and (param is None or error["param"].split(".")[0] == param), error
    return error


def text_of(response: Any) -> str:
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def calling(text: str, **options: Any) -> Any:
    """A server whose model says `text`, byte by byte."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = LETTERS.chat_template
    script = [*byte_ids(text.encode()), tokenizer.eos_token_id]
    return serve(scripted_engine(tokenizer, script, max_model_len=256), paced=True, **options)


# Routes


@row("R1", "/v1/completions, /v1/chat/completions, /v1/models", SAME)
def core_routes(letters: Live) -> None:
    """The three routes that the openai package needs."""
    client = letters.openai()
    (model,) = client.models.list()
    said = client.completions.create(model=model.id, prompt="p", max_tokens=5, temperature=0)
    assert said.choices[0].text == "hello"
    messages: list[Any] = [{"role": "user", "content": "p"}]
    answered = client.chat.completions.create(model=model.id, messages=messages, max_tokens=5, temperature=0)
    assert answered.choices[0].message.content == "hello"


@row("R2", "/health", SAME)
def health(letters: Live) -> None:
    """200 with an empty body; 503 once the engine has ended."""
    response = letters.http.get("/health")
    assert response.status_code == 200 and response.content == b""
    with serve_letters("a") as live:
        live.llm.shutdown()
        assert live.http.get("/health").status_code == 503


@row("R3", "/version", SAME)
def version(letters: Live) -> None:
    """The version, which is this package's own."""
    assert letters.http.get("/version").json() == {"version": tutorial_engine.__version__}


@row("R4", "/metrics", SAME)
def metrics(letters: Live) -> None:
    """Prometheus's text format. Answers of /metrics, /health and /version are not counted."""
    letters.http.get("/health")
    letters.http.get("/v1/models")
    found = letters.metrics()
    assert "vllm:num_requests_running" in found and found["http_requests_total:/v1/models:GET:2xx"] >= 1
    assert not any("/health" in name or "/metrics" in name for name in found)


@row("R5", "/tokenize, /detokenize", SAME)
def tokenize(letters: Live) -> None:
    """A text or a conversation as token ids, counted; and back."""
    wanted = {"count": 2, "max_model_len": 64, "tokens": ids("hi"), "token_strs": ["h", "i"]}
    assert letters.post("/tokenize", prompt="hi", return_token_strs=True).json() == wanted
    chat = letters.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    assert chat["count"] == len("user:hi;") and chat["token_strs"] is None
    assert letters.post("/detokenize", tokens=ids("hi")).json() == {"prompt": "hi"}


@row("R6", "/load, /ping, /kv_event_sources, /tokenizer_info", NOT_HERE)
def other_info(letters: Live) -> None:
    """They are not there, and answer 404."""
    for path in ("/load", "/ping", "/kv_event_sources", "/tokenizer_info"):
        refused(letters.http.get(path), status=404)


@row("R7", "/v1/load_lora_adapter, /v1/unload_lora_adapter", NOT_HERE)
def lora_routes(letters: Live) -> None:
    """501: this engine has no LoRA adapters."""
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert "LoRA" in refused(letters.post(path, lora_name="a", lora_path="/a"), status=501)["message"]


@row("R8", "levers of the development mode", DIFFERS)
def levers(letters: Live) -> None:
    """With VLLM_SERVER_DEV_MODE=1: sleep, wake_up, is_sleeping, reset_prefix_cache, collective_rpc, server_info, pause,
    resume, is_paused, abort_requests. Here they need the API key too, if there is one."""
    assert letters.http.post("/sleep").status_code == 404
    with DEV_MODE, serve_letters("a", options={"api_key": ["k"]}) as live:
        assert live.http.post("/sleep?level=0").json() == {"status": "sleeping", "level": 0}
        assert live.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert live.http.post("/wake_up").status_code == 200
        assert live.http.post("/reset_prefix_cache").json() == {"success": True}
        assert live.http.post("/pause?mode=abort").status_code == 200
        assert live.http.get("/is_paused").json() == {"is_paused": True}
        refused(live.complete(), status=503)
        assert live.http.post("/resume").status_code == live.http.post("/abort_requests").status_code == 200
        assert live.http.post("/resume", headers={"Authorization": ""}).status_code == 401


@row("R9", "profiles, responses, messages, embeddings, scores", NOT_HERE)
def other_tasks(letters: Live) -> None:
    """404: this server completes texts and conversations, and nothing else."""
    for path in ("/start_profile", "/v1/responses", "/v1/messages", "/v1/embeddings", "/score", "/rerank", "/pooling"):
        refused(letters.post(path, input="x"), status=404)


@row("R10", "defaults of the command line", DIFFERS)
def command_line() -> None:
    """Port 8000, --served-model-name (several: the first one is reported), --api-key (repeatable) or VLLM_API_KEY, and
    a flag for each argument of the engine, as `vllm serve` has them. It listens at 127.0.0.1 unless --host says
    otherwise; vLLM listens at all addresses."""
    caught: list[Any] = []
    text, arguments, _ = cli.COMMANDS["serve"]
    with mock.patch.dict(cli.COMMANDS, serve=(text, arguments, caught.append)):
        cli.main(["serve", "some/model", "--served-model-name", "a", "b", "--api-key", "k", "--api-key", "l"])
    args = caught[0]
    assert (args.host, args.port, args.model_tag) == ("127.0.0.1", 8000, "some/model")
    assert cli.made(ServerOptions, args).api_key == ["k", "l"] and args.served_model_name == ["a", "b"]
    with serve_letters("a", served_model_name=["a", "b"]) as live:
        assert live.complete().json()["model"] == "a" and live.complete(model="b").json()["model"] == "b"


# Requests


@row("Q1", "fields of completions", DIFFERS)
def completion_fields(letters: Live) -> None:
    """A prompt is a text, token ids, or a list of either; max_tokens is 16 unless said; unknown fields are ignored.
    suffix is refused, in vLLM too."""
    for prompt, count in (("p", 1), (["p", "q"], 2), (ids("pq"), 1), ([ids("p"), ids("q")], 2)):
        answer = letters.complete(prompt, flavour="mint", best_of=2, max_tokens=None).json()
        assert len(answer["choices"]) == count and answer["usage"]["completion_tokens"] == 16 * count
    assert text_of(letters.complete("ask", echo=True, max_tokens=2)) == "askhe"
    refused(letters.complete(suffix="x"), "suffix")


@row("Q2", "fields of chats", SAME)
def chat_fields(letters: Live) -> None:
    """max_completion_tokens, or max_tokens by its old name; with neither, up to the end of the context."""
    assert text_of(letters.chat(max_completion_tokens=2)) == text_of(letters.chat(max_tokens=2)) == "he"
    assert letters.chat("p").json()["usage"]["total_tokens"] == 64


@row("Q3", "vLLM's further fields", DIFFERS)
def extra_fields(letters: Live) -> None:
    """top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, min_tokens, prompt_logprobs, structured_outputs,
    priority, cache_salt, return_token_ids and others do what they do in vLLM. use_beam_search, logprob_token_ids,
    thinking_token_budget, repetition_detection and stream_interval are refused."""
    good: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": ids("o"),
                            "ignore_eos": True, "min_tokens": 1, "prompt_logprobs": 1, "cache_salt": "s",
                            "return_token_ids": True, "allowed_token_ids": ids("helo"), "bad_words": ["x"]}
    choice = letters.complete(**good).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("hell", ids("o")[0], ids("hello"))
    for name, value in (("use_beam_search", True), ("logprob_token_ids", [1]), ("thinking_token_budget", 5),
                        ("repetition_detection", {}), ("stream_interval", 2), ("length_penalty", 2)):
        refused(letters.complete(**{name: value}), name)


@row("Q4", "how a conversation is laid out", DIFFERS)
def chat_layout(letters: Live) -> None:
    """add_generation_prompt, continue_final_message and chat_template_kwargs; both of the first two are refused. A
    chat_template is used only by a server with --trust-request-chat-template. echo and documents are refused."""
    said = [{"role": "assistant", "content": "so"}]
    answer = letters.post("/v1/chat/completions", messages=said, add_generation_prompt=False, max_tokens=1,
                          continue_final_message=True).json()
    assert answer["usage"]["prompt_tokens"] == len("assistant:so")
    refused(letters.chat(continue_final_message=True), "add_generation_prompt")
    for name, value in (("chat_template", "{{ messages }}"), ("echo", True), ("documents", [{}])):
        refused(letters.chat(**{name: value}), name)
    with serve_letters("a", options={"trust_request_chat_template": True}) as live:
        assert live.chat(chat_template="{{ '---' }}", max_tokens=1).json()["usage"]["prompt_tokens"] == 3


@row("Q5", "fields that are null", SAME)
def null_fields() -> None:
    """The model's generation_config.json, then OpenAI's defaults."""
    messages = [{"role": "user", "content": "p"}]
    with serve_letters("abc", generation_config={"temperature": 0.0}) as live:
        greedy = live.post("/v1/chat/completions", messages=messages, n=2, temperature=None)
        refused(greedy, "n")  # all would be the same
    with serve_letters("abc") as live:
        assert live.post("/v1/chat/completions", messages=messages, n=2, temperature=None).status_code == 200


@row("Q6", "what is refused", SAME)
def bad_requests(letters: Live) -> None:
    """400 with the field's name: stream_options without stream, top_logprobs without logprobs, prompt_logprobs with
    stream, empty tools, a tool_choice without tools or of an unknown tool, two constraints, more than four stop
    strings, a negative token id."""
    tool = {"type": "function", "function": {"name": "f"}}
    for body, param in (({"stream_options": {}}, "stream_options"), ({"top_logprobs": 1}, "top_logprobs"),
                        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"tools": []}, "tools"),
                        ({"tool_choice": "required"}, "tool_choice"), ({"stop": list("abcde")}, "stop"),
                        ({"tools": [tool], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
                        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs")):
        refused(letters.chat(**body), param)
    refused(letters.complete([-1]), "prompt")


@row("Q7", "guided_json and its like", SAME)
def removed_fields(letters: Live) -> None:
    """Ignored, with one warning in the log: the output is not constrained."""
    assert text_of(letters.complete(guided_choice=["yes"], max_tokens=5)) == "hello"


@row("Q8", "max_tokens and the context", DIFFERS)
def lengths() -> None:
    """Clamped to what the context has left; more than the whole context is refused, in vLLM's words. A prompt that
    fills the context gets the message about the context; in vLLM, one about max_tokens=0."""
    with serve_letters("a", max_model_len=32) as live:
        assert live.complete("p" * 30, max_tokens=20).json()["usage"]["completion_tokens"] == 2
        assert refused(live.complete(max_tokens=33), "max_tokens")["message"] == (
            "max_tokens=33 cannot be greater than max_model_len=32. Please request fewer output tokens.")
        assert "context length is 32" in refused(live.complete("p" * 32), "input_tokens")["message"]
        assert live.complete("p" * 40, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 31


@row("Q9", "model", DIFFERS)
def unknown_model(letters: Live) -> None:
    """404 for a name that is not served; the model may be left out. There are no adapters to name."""
    error = refused(letters.complete(model="x"), "model", 404)
    assert error["message"] == "The model `x` does not exist." and error["type"] == "NotFoundError"
    assert letters.complete().status_code == 200


@row("Q10", "X-Request-Id", DIFFERS)
def request_ids(letters: Live) -> None:
    """The header becomes part of the answer's id, as the field request_id does. Priority comes from the body only."""
    answer = letters.http.post("/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine" == letters.complete(request_id="mine").json()["id"]


# Answers


@row("W1", "ids, objects, usage", SAME)
def heads(letters: Live) -> None:
    """cmpl- and chatcmpl- ids; the prompt counts once, however many completions it has. How much of it was cached is
    told with --enable-prompt-tokens-details."""
    for ask, prefix, kind in ((letters.complete, "cmpl-", "text_completion"),
                              (letters.chat, "chatcmpl-", "chat.completion")):
        answer = ask(n=2, temperature=1, max_tokens=3).json()
        assert answer["id"].startswith(prefix) and answer["object"] == kind
        usage = answer["usage"]
        assert usage["completion_tokens"] == 6 and usage["prompt_tokens"] == (1 if kind == "text_completion" else 7)
        assert usage["total_tokens"] == usage["prompt_tokens"] + 6 and "prompt_tokens_details" not in usage
    with serve_letters("a", options={"enable_prompt_tokens_details": True}) as live:
        cached = [live.complete("p" * 20).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, 16]


@row("W2", "a chat's choice", SAME)
def chat_choice(letters: Live) -> None:
    """index, message, logprobs, finish_reason, stop_reason; an empty list of tool calls is left out."""
    choice = letters.chat(stop=["o w"]).json()["choices"][0]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "hell"}, "logprobs": None,
                      "finish_reason": "stop", "stop_reason": "o w"}


@row("W3", "a chat's stream", DIFFERS)
def chat_stream(letters: Live) -> None:
    """Server-sent events: the role first, for each choice; then pieces of content; the reason in the last one; usage in
    one more, if asked for; [DONE]. The headers wait for the first token, so that whatever goes wrong before it has a
    status."""
    response = letters.chat(stream=True, max_tokens=2, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    first, second, third, usage = events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in (second, third)] == [{"content": "h"}, {"content": "e"}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (second, third)] == [None, "length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert len(events(letters.chat(stream=True, max_tokens=2, stream_options={}).text)) == 3
    always = {"include_usage": True, "continuous_usage_stats": True}
    assert all("usage" in chunk for chunk in events(letters.chat(stream=True, stream_options=always).text))


@row("W4", "a completion's stream", SAME)
def completion_stream(letters: Live) -> None:
    """No role. Choices are counted over prompts and their completions; the echo comes with the first piece."""
    chunks = events(letters.complete(["p", "q"], n=2, temperature=1, max_tokens=2, stream=True, echo=True).text)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["phe", "phe", "qhe", "qhe"]


@row("W5", "logprobs", DIFFERS)
def logprobs(letters: Live) -> None:
    """In OpenAI's two forms. top_logprobs of a chat are the most likely tokens by rank; vLLM's list begins with the
    chosen one, whichever it is."""
    found = letters.complete(max_tokens=2, logprobs=1).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["h", "e"] and found["text_offset"] == [0, 1]
    assert [list(top) for top in found["top_logprobs"]] == [["h"], ["e"]] and len(found["token_logprobs"]) == 2
    (token,) = letters.chat(max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert token["token"] == "h" and token["bytes"] == [104] and len(token["top_logprobs"]) == 2
    drawn = {"logprobs": True, "top_logprobs": 1, "allowed_token_ids": ids("z"), "max_tokens": 1}
    (token,) = letters.chat(**drawn).json()["choices"][0]["logprobs"]["content"]
    assert token["token"] == "z" and token["top_logprobs"][0]["token"] == "h"


@row("W6", "echo with max_tokens=0", DIFFERS)
def only_the_prompt(letters: Live) -> None:
    """Only the prompt comes back. The token that the engine makes all the same is not counted in usage."""
    answer = letters.complete("ask", echo=True, max_tokens=0)
    assert text_of(answer) == "ask" and answer.json()["usage"]["completion_tokens"] == 0
    refused(letters.complete("ask", max_tokens=0), "max_tokens")


@row("W7", "errors", DIFFERS)
def errors(letters: Live) -> None:
    """{"error": {"message", "type", "param", "code"}} with the status; a body of the wrong shape is 400 "Bad Request",
    with at most ten things listed. Of a failure inside the server a client learns no more than that it happened."""
    error = refused(letters.complete(top_p=0), "top_p")
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "BadRequestError"
    assert refused(letters.complete(n="many"), "n")["type"] == "Bad Request"
    assert refused(letters.http.get("/nowhere"), status=404)["type"] == "NotFoundError"

    def fail(plan: Any) -> None:
        raise RuntimeError("a secret")

    with serve_letters("a", before=fail) as live:
        error = refused(live.complete(), status=500)
        assert error["type"] == "InternalServerError" and "secret" not in error["message"]


@row("W8", "errors in a stream", SAME)
def errors_in_streams() -> None:
    """An event with the error, then [DONE]; the status has long been 200."""
    def fail(plan: Any) -> None:
        if any(s.request.num_tokens > 1 for s in plan.scheduled.values()):
            raise RuntimeError("no memory")

    with serve_letters("a", before=fail) as live:
        response = live.complete(stream=True)
        *pieces, last = events(response.text)
        assert response.status_code == 200 and pieces and last["error"]["code"] == 500


@row("W9", "keys", SAME)
def keys() -> None:
    """Paths that begin with /v1 need one, if the server has one; else 401 {"error": "Unauthorized"}."""
    with serve_letters("a", options={"api_key": ["k"]}) as live:
        live.http.headers.pop("authorization")
        assert live.http.get("/health").status_code == live.http.get("/metrics").status_code == 200
        response = live.http.get("/v1/models")
        assert response.status_code == 401 and response.json() == {"error": "Unauthorized"}
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=live.url + "/v1", api_key="wrong").models.list()
        assert openai.OpenAI(base_url=live.url + "/v1", api_key="k").models.list().data


@row("W10", "disconnects", SAME)
def disconnects() -> None:
    """A client that leaves ends its requests, streamed or not, and their blocks are free. They are counted as
    aborted."""
    with serve_letters("a") as live:
        body = {"prompt": "p", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        live.assert_clean()
        assert live.metrics().get("vllm:request_success_total:length", 0) + live.metrics().get(
            "vllm:request_success_total:abort", 0) == 1


@row("W11", "/v1/models", DIFFERS)
def model_cards(letters: Live) -> None:
    """One card per served name, with max_model_len; there are no adapters to list."""
    (card,) = letters.http.get("/v1/models").json()["data"]
    assert card["id"] == card["root"] == "smollm2-135m-instruct" and card["object"] == "model"
    assert card["owned_by"] == "vllm" and card["max_model_len"] == 64 and card["parent"] is None
    assert card["permission"] and card["created"] > 0


@row("W12", "prompts that are too long", SAME)
def too_long(letters: Live) -> None:
    """400, with param input_tokens; input_text if the characters alone are too many."""
    error = refused(letters.complete("p" * 65), "input_tokens")
    assert "maximum context length is 64 tokens" in error["message"]
    refused(letters.complete("p" * 9999), "input_text")


@row("W13", "tool calls", DIFFERS)
def tool_calls() -> None:
    """The hermes format, whole or streamed: the name first, then the arguments in pieces. tool_choice "auto" needs
    --enable-auto-tool-choice and --tool-call-parser; a named tool or "required" is enforced by a grammar and needs
    neither (vLLM asks for the parser)."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = 'Wait.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with calling(said, enable_auto_tool_choice=True, tool_call_parser="hermes") as live:
        choice = live.chat(tools=[tool], max_tokens=200).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "Wait." and choice["finish_reason"] == "tool_calls"
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["type"] == "function"
        deltas = [call["function"] for chunk in events(live.chat(tools=[tool], max_tokens=200, stream=True).text)
                  for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert deltas[0]["name"] == "f" and len(deltas) > 3
        assert "".join(delta["arguments"] for delta in deltas) == '{"a": 1}'
    with calling(said.removeprefix("Wait.")) as live:
        error = refused(live.chat(tools=[tool], tool_choice="auto"), "tool_choice")
        assert "--enable-auto-tool-choice" in error["message"] and "--tool-call-parser" in error["message"]
        forced = live.chat(tools=[tool], tool_choice="required", max_tokens=200).json()["choices"][0]
        assert json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@row("W14", "reasoning", DIFFERS)
def reasoning() -> None:
    """--reasoning-parser qwen3 or deepseek_r1 splits what is between the think tags off into message.reasoning. Usage
    does not count its tokens apart."""
    with calling("<think>hm</think>yes", reasoning_parser="qwen3") as live:
        message = live.chat(max_tokens=50).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}
        deltas = [chunk["choices"][0]["delta"] for chunk in events(live.chat(max_tokens=50, stream=True).text)]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"


# Metrics


@row("N1", "gauges", DIFFERS)
def gauges(letters: Live) -> None:
    """num_requests_running, num_requests_waiting, num_requests_waiting_by_reason, kv_cache_usage_perc and
    engine_sleep_state; lora_requests_info is not there."""
    found = letters.metrics()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_sleep_state"):
        assert found[f"vllm:{name}"] == 0


@row("N2", "counters", DIFFERS)
def counters() -> None:
    """prompt_tokens, prompt_tokens_cached, generation_tokens, prefix_cache_queries, prefix_cache_hits, num_preemptions
    and request_success{finished_reason}, each with _total; those of speculative decoding are not there."""
    with serve_letters("a") as live:
        for _ in range(2):
            live.complete("p" * 20, max_tokens=3)
        found = live.metrics()
        for name, count in (("prompt_tokens", 40), ("prompt_tokens_cached", 16), ("generation_tokens", 6),
                            ("prefix_cache_queries", 40), ("prefix_cache_hits", 16), ("num_preemptions", 0)):
            assert found[f"vllm:{name}_total"] == count
        assert found["vllm:request_success_total:length"] == 2


@row("N3", "histograms", SAME)
def histograms() -> None:
    """Times to the first token, between tokens and per token, of a whole request and of its parts; lengths, and tokens
    per step. Labels are model_name and engine."""
    with serve_letters("a", served_model_name="letters") as live:
        live.complete(max_tokens=3)
        found = live.metrics()
        for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds",
                     "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
                     "request_generation_tokens", "request_params_n", "request_params_max_tokens",
                     "request_num_preemptions"):
            assert found[f"vllm:{name}_count"] == 1
        assert found["vllm:inter_token_latency_seconds_count"] == 2 and found["vllm:iteration_tokens_total_count"] == 3
        assert 'engine="0",model_name="letters"' in live.http.get("/metrics").text


@row("N4", "bench serve", DIFFERS)
def bench_serve(letters: Live) -> None:
    """`tutorial-engine bench serve` prints vLLM's table, from the same measures, and saves them under its names.
    --request-rate takes several rates, for a sweep; prompts are random tokens of the server, and fewer and shorter
    unless said."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(["bench", "serve", "--base-url", letters.url, "--num-prompts", "2", "--input-len", "8", "--output-len",
                  "4", "--ignore-eos", "--goodput", "ttft:60000", "--disable-tqdm"])
    for words in ("Successful requests:                     2", "Total input tokens:                      16",
                  "Request goodput (req/s):", "Mean TTFT (ms):", "Median TPOT (ms):", "P99 ITL (ms):"):
        assert words in printed.getvalue()


@row("N5", "bench throughput, bench latency", DIFFERS)
def bench_offline() -> None:
    """They print vLLM's lines. Prompts are random tokens; throughput takes fewer and shorter ones unless said, latency
    empties the prefix cache before each batch."""
    llm = scripted_llm(LETTERS, ids("a"))
    jobs = random_jobs(range(2, 60), 3, 8, 4, 0.0, 0, 0)
    text = offline.throughput_text(offline.throughput(llm, jobs))
    assert re.match(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s\n", text)
    text = offline.latency_text(offline.latency(llm, jobs, 1, 2))
    assert re.match(r"Avg latency: [\d.e-]+ seconds\n10% percentile latency: [\d.e-]+ seconds\n25%", text)
