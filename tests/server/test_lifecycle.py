"""What happens to a request whose client leaves, to one that finds the queue full, and to all when the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from tests.api.support import scripted_engine
from tests.core.support import assert_clean
from tests.server.support import LETTERS, TIMEOUT, Live, events, ids, serve_letters, wait_until
from tutorial_engine import SamplingParams
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.scheduler import SchedulerOutput
from tutorial_engine.server.app import build_app
from tutorial_engine.server.serving import EventStream, merge


class Gate:
    """Lets the model make some steps, then holds it at the begin of each until it is told to go on."""

    def __init__(self, steps: int) -> None:
        self.arrived, self.go, self.closed = threading.Semaphore(0), threading.Semaphore(steps), True

    def __call__(self, plan: SchedulerOutput) -> None:
        if self.closed and not self.go.acquire(blocking=False):
            self.arrived.release()
            assert self.go.acquire(timeout=TIMEOUT)

    def wait(self) -> None:
        """Until the model is held."""
        assert self.arrived.acquire(timeout=TIMEOUT)

    def step(self) -> None:
        self.go.release()
        self.wait()

    def open(self) -> None:
        self.closed = False
        self.go.release()


@contextlib.contextmanager
def gated(steps: int, **kwargs: Any) -> Iterator[tuple[Live, Gate]]:
    gate = Gate(steps)
    with serve_letters("a", before=gate, paced=False, **kwargs) as live:
        try:
            yield live, gate
        finally:
            gate.open()


LONG = {"prompt": "p" * 20, "temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 3])
def test_b22_a_client_killed_in_the_middle_of_a_stream(n: int) -> None:
    """W10, A3: no step after the one that runs knows the request; blocks are free, gauges back, the abort counted."""
    with gated(1) as (live, gate):
        runner, pool = live.llm.llm_engine.model_runner, live.llm.llm_engine.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        body = {**LONG, "stream": True, "n": n, "temperature": 1}
        with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=TIMEOUT) as response:
            lines = response.iter_lines()
            gate.wait()
            for _ in range(3):
                gate.step()
                next(lines)
        wait_until(lambda: live.serving.num_in_flight == 0)
        assert pool.get_num_free_blocks() < free, "the step that runs still has them"
        num_steps = len(runner.plans)
        gate.open()
        live.assert_clean()
        assert pool.get_num_free_blocks() == free and len(runner.plans) == num_steps
        found = live.metrics()
        assert found["vllm:request_success_total:abort"] == n
        assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
        assert live.complete(max_tokens=2).json()["choices"][0]["text"] == "aa"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(stream: bool) -> None:
    """Also while its prompt is computed, or still waits."""
    with gated(0, max_num_seqs=1) as (live, gate):
        for _ in range(2):  # the second one waits in the queue
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(live.url + "/v1/completions", json={**LONG, "stream": stream}, timeout=0.3)
        wait_until(lambda: live.serving.num_in_flight == 0)
        assert live.metrics()["http_requests_total:/v1/completions:POST:4xx"] == 2, "499"


def test_many_prompts_of_one_client_end_together() -> None:
    with gated(0) as (live, gate):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + "/v1/completions", json={**LONG, "prompt": ["p", "q", "r"]}, timeout=0.5)
        wait_until(lambda: live.serving.num_in_flight == 0)


def test_a_full_queue() -> None:
    """503 with Retry-After, and room again as soon as somebody is done."""
    with gated(0, max_num_seqs=2, options={"max_queued_requests": 1}) as (live, gate):
        def ask() -> None:
            assert live.complete(max_tokens=2).status_code == 200

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: live.serving.num_in_flight == 3)
        for stream in (False, True):
            refused = live.complete(stream=stream)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "ServiceUnavailable"
        assert live.complete(["a"] * 4).status_code == 400, "that many it never takes"
        gate.open()
        for thread in threads:
            thread.join(TIMEOUT)
        assert live.complete(max_tokens=1).status_code == 200


def test_aborted_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8: the client is told, and gets what there is."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with gated(1) as (live, gate):
        body = {**LONG, "stream": True, "request_id": "mine"}
        with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=TIMEOUT) as response:
            gate.wait()
            aborting = threading.Thread(target=live.post, args=("/abort_requests",),
                                        kwargs={"request_ids": ["cmpl-mine"]})
            aborting.start()
            wait_until(lambda: live.llm._thread._commands.qsize() > 0)
            gate.open()
            last = events(response.read().decode())[-1]["choices"][0]
            aborting.join(TIMEOUT)
        assert last["finish_reason"] == "abort"


# Without HTTP: a client that does not read


async def _outputs(llm: AsyncLLM) -> AsyncGenerator[dict[str, Any], None]:
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate("p", params, "slow"):
        yield {"text": output.outputs[0].text}


def test_a_slow_reader_holds_up_nobody() -> None:
    """Its request runs to the end and gives its blocks back; what it has not read is one joined piece."""
    async def main(llm: AsyncLLM) -> list[bytes]:
        sent: list[bytes] = []
        reading, arrived = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])
                arrived.set()
                await reading.wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        chunks = _outputs(llm)
        stream = EventStream(await anext(chunks), chunks)
        writing = asyncio.create_task(stream({}, receive, send))
        await arrived.wait()
        params = SamplingParams(temperature=0, max_tokens=50)
        async for output in llm.generate("q", params, "fast"):
            last = output
        assert len(last.outputs[0].token_ids) == 50
        while llm.llm_engine.has_unfinished_requests():
            await asyncio.sleep(0.001)
        await llm.run_between_steps(assert_clean, llm.llm_engine)
        assert len(sent) == 1
        reading.set()
        await writing
        return sent

    llm = AsyncLLM(scripted_engine(LETTERS, ids("a")))
    sent = asyncio.run(asyncio.wait_for(main(llm), TIMEOUT))
    llm.shutdown()
    assert len(sent) <= 4, "the first piece, the rest, [DONE], the end"
    chunks = events(b"".join(sent).decode())
    assert "".join(chunk["text"] for chunk in chunks) == "a" * 40


def test_merge() -> None:
    """Each item with its number, errors at once, and all closed at the end, whichever it is."""
    closed: list[str] = []

    async def count(name: str, n: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
            if error:
                raise error
            await asyncio.sleep(0 if n else 3600)
        finally:
            closed.append(name)

    async def main() -> None:
        items = [item async for item in merge([count("a", 3), count("b", 2)])]
        assert sorted(items) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] and sorted(closed) == ["a", "b"]
        with pytest.raises(KeyError):
            async for _ in merge([count("c", 1, KeyError()), count("d", 0), count("e", 1, KeyError())]):
                pass
        merged = merge([count("f", 9), count("g", 0)])
        await anext(merged)
        await merged.aclose()
        assert sorted(closed) == ["a", "b", "c", "d", "e", "f", "g"]

    asyncio.run(main())


# The end of the server


def run_server(engine: Any, timeout: int, port: list[int]) -> tuple[uvicorn.Server, threading.Thread, AsyncLLM]:
    llm = AsyncLLM(engine)
    server = uvicorn.Server(uvicorn.Config(build_app(llm), port=0, log_level="critical",
                                           timeout_graceful_shutdown=timeout))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port.append(server.servers[0].sockets[0].getsockname()[1])
    return server, thread, llm


@pytest.mark.parametrize("drains", [True, False])
def test_shutdown(drains: bool) -> None:
    """Answers that are on their way are finished, if there is time; else they end, and no thread or block is left."""
    gate, port = Gate(1), []
    server, thread, llm = run_server(scripted_engine(LETTERS, ids("a"), before=gate), 60 if drains else 1, port)
    url = f"http://127.0.0.1:{port[0]}/v1/completions"
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=TIMEOUT) as response:
        lines = response.iter_lines()
        gate.wait()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "a"
        server.should_exit = True
        wait_until(lambda: not server.servers[0].is_serving())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port[0]}/health")
        if drains:
            gate.open()
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        else:
            threading.Timer(1.5, gate.open).start()  # the time is up before the step is done
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert "length" not in "".join(lines)
    thread.join(TIMEOUT)
    assert not thread.is_alive() and not llm.is_running
