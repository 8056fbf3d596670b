"""A real server for tests: uvicorn on 127.0.0.1, in a thread of this process, so that a test can see its engine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import uvicorn

from tests.api.support import piece_ids, piece_tokenizer, scripted_engine
from tests.core.support import assert_clean
from tutorial_engine import LLMEngine
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.server.app import build_app
from tutorial_engine.server.serving import ServerOptions, Serving

TIMEOUT = 60  # seconds; nothing takes so long, but the machine may be busy
LETTERS = piece_tokenizer()  # id 0 is EOS, 1 a special token, then one id per printable character
LETTERS.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


class Live:
    """A server that runs.

    Attributes:
        url: with port, without path. http: a client for it. llm, serving: what is behind it.
    """

    def __init__(self, url: str, llm: AsyncLLM, serving: Serving, keys: list[str]) -> None:
        self.url, self.llm, self.serving, self.keys = url, llm, serving, keys
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=self.keys[0] if self.keys else "none", timeout=TIMEOUT,
                             max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "p", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **body})

    def chat(self, content: str = "p", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **{
            "messages": [{"role": "user", "content": content}], "temperature": 0, **body})

    def metrics(self) -> dict[str, float]:
        """Samples by name; those of several series by "name:label"."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name, _, labels = name.partition("{")
                own = [part.partition("=")[2].strip('"}') for part in labels.split(",")
                       if part and not part.startswith(("engine=", "model_name="))]
                found[":".join([name, *own])] = float(value)
        return found

    def assert_clean(self) -> None:
        """Wait until nobody is served, then look at the pool."""
        wait_until(lambda: self.serving.num_in_flight == 0 and not self.llm.llm_engine.has_unfinished_requests())
        assert_clean(self.llm.llm_engine)


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def pace(llm: AsyncLLM) -> None:
    """Let each step of a scripted model wait until all outputs of the last one were fetched. A real model takes its
    time; this one would finish before anybody looks, and the pieces of its answer would be joined."""
    def wait(plan: Any) -> None:
        for collector in list(llm._thread._collectors.values()):
            fetched = False
            while not fetched:
                looked = threading.Event()
                collector._loop.call_soon_threadsafe(looked.set)  # behind all outputs that are on their way
                assert looked.wait(TIMEOUT)
                fetched = collector._output is None
        if before:
            before(plan)

    before, llm.llm_engine.model_runner.before = llm.llm_engine.model_runner.before, wait


@contextlib.contextmanager
def serve(engine: LLMEngine, paced: bool = False, **options: Any) -> Iterator[Live]:
    """Serve it, and shut it down; nothing may be left in it."""
    llm = AsyncLLM(engine)
    if paced:
        pace(llm)
    app = build_app(llm, ServerOptions(**options))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))  # idle connections
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="uvicorn")
        thread.start()
        live = Live(f"http://127.0.0.1:{sock.getsockname()[1]}", llm, app.state.serving, options.get("api_key", []))
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield live
            if llm.is_running:
                live.assert_clean()
        finally:
            live.http.close()
            server.should_exit = True
            thread.join(TIMEOUT)
            assert not thread.is_alive() and not llm.is_running


def ids(text: str) -> list[int]:
    return piece_ids(LETTERS, *text)


def serve_letters(script: Any, *, options: dict[str, Any] | None = None, paced: bool = True, **engine: Any
                  ) -> contextlib.AbstractContextManager[Live]:
    """A scripted model whose tokens are letters. `script`: a text, ids, or a function of the request."""
    script = ids(script) if isinstance(script, str) else script
    engine = {"disable_log_stats": False, **engine}
    return serve(scripted_engine(LETTERS, script, **engine), paced, **(options or {}))


def events(text: str) -> list[Any]:
    """The data of a stream of events, parsed; the last one, [DONE], is checked and left out."""
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    blocks = text.split("\n\n")[:-2]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]
