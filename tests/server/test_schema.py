"""Bodies made at random from the server's own OpenAPI schema, and from what lies beside it: never an error of the
server, always an answer in the usual shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.support import Live, serve
from tutorial_engine import EngineArgs, LLMEngine

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
ROUTES = {*POSTS, "/v1/models", "/health", "/version", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
ANYTHING_GOES = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6)


def check(response: Any) -> None:
    status = response.status_code
    assert status < 500 or status == 501, response.content
    if status >= 400 and status != 501:
        error = json.loads(response.content)["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status


def values(schema: dict[str, Any], parts: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows; of an object's optional properties, at most four at a time."""
    def inner(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        return values(schema, parts)

    if "$ref" in schema:
        return inner(parts[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([inner(choice) for choice in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        needed = {name: inner(schema["properties"][name]) for name in schema.get("required", [])}
        more = {name: inner(s) for name, s in schema["properties"].items() if name not in needed}
        return st.lists(st.sampled_from(sorted(more) or ["-"]), max_size=4, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({**needed, **{name: more.get(name, JSON) for name in names}}))
    few = {"min_size": schema.get("minItems", 0), "max_size": 3}
    return {"object": st.dictionaries(st.text(max_size=5), JSON, max_size=3), "boolean": st.booleans(),
            "array": st.lists(inner(schema.get("items", {})), **few) if kind == "array" else JSON,
            "integer": st.integers(schema.get("minimum"), schema.get("maximum")) | st.integers(0, 5),
            "string": st.from_regex(schema["pattern"]) if "pattern" in schema else st.text(max_size=20),
            "number": st.floats() | st.floats(0, 2), "null": st.none(), None: JSON}[kind]


def bodies(live: Live, path: str) -> tuple[st.SearchStrategy[Any], dict[str, Any]]:
    """(good bodies of a route, the schema's parts)."""
    document = live.http.get("/openapi.json").json()
    parts = document["components"]["schemas"]
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return values(content["application/json"]["schema"], parts), parts


def test_every_route_is_in_the_schema(letters: Live) -> None:
    assert set(letters.http.get("/openapi.json").json()["paths"]) == ROUTES


@pytest.mark.parametrize("path", POSTS)
def test_what_the_schema_allows(letters: Live, path: str) -> None:
    good, _ = bodies(letters, path)

    @given(body=good)
    @settings(max_examples=25, **ANYTHING_GOES)
    def one(body: Any) -> None:
        content = json.dumps(body).encode()
        check(letters.http.post(path, content=content, headers={"Content-Type": "application/json"}))

    one()


@pytest.mark.parametrize("path, part, good", [
    ("/v1/completions", "CompletionRequest", {"prompt": "p", "max_tokens": 1}),
    ("/v1/chat/completions", "ChatCompletionRequest", {"messages": [{"role": "user", "content": "x"}]})])
def test_what_it_does_not_allow(letters: Live, path: str, part: str, good: dict[str, Any]) -> None:
    """Good bodies with anything at all in a few of their fields."""
    names = sorted(bodies(letters, path)[1][part]["properties"])

    @given(wrong=st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
    @settings(max_examples=25, **ANYTHING_GOES)
    def one(wrong: Any) -> None:
        content = json.dumps({**good, **wrong}).encode()
        check(letters.http.post(path, content=content, headers={"Content-Type": "application/json"}))

    one()


def test_the_levers(monkeypatch: Any, tiny_model: Path) -> None:
    """Those that need no luck to be found; collective_rpc calls what it is told to, so it is left out."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_model), max_model_len=64, num_gpu_blocks_override=9))
    with serve(engine) as live:
        paths = [path for path in live.http.get("/openapi.json").json()["paths"] if path not in ROUTES]
        assert len(paths) == 10

        @given(path=st.sampled_from([p for p in paths if p != "/collective_rpc"]), query=st.dictionaries(
            st.sampled_from(["level", "mode", "tags", "clear_cache"]), st.sampled_from(
                ["0", "1", "9", "abort", "wait", "keep", "kv_cache", "scheduling", "x", ""])), body=JSON)
        @settings(max_examples=15, **ANYTHING_GOES)
        def one(path: str, query: dict[str, str], body: Any) -> None:
            content = json.dumps(body).encode()
            for method in ("POST", "GET"):
                response = live.http.request(method, path, params=query, content=content,
                                             headers={"Content-Type": "application/json"})
                check(response)

        one()
        for path in ("/wake_up", "/resume"):
            assert live.http.post(path).status_code == 200
        assert live.complete(max_tokens=1).status_code == 200
