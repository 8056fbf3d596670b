"""A crowd of clients, many of whom behave badly: afterwards nothing is left of any of them.

Lasts STORM_SECONDS (6 unless set; a minute is a good test before a release).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from tests.server.support import Live, events, serve_letters

SECONDS = float(os.environ.get("STORM_SECONDS", 6))
CLIENTS = 200
TEXT = "hello world"


class Client:
    """One that does something at random, again and again.

    Attributes:
        done: what it did, and how it ended.
    """

    def __init__(self, live: Live, seed: int, end: float) -> None:
        self.port, self.rng, self.end = int(live.url.rpartition(":")[2]), random.Random(seed), end
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        ways = [self.read, self.read, self.read_slowly, self.leave, self.leave, self.reset, self.leave_before_answer,
                self.send_nonsense, self.send_half, self.abort]
        while time.monotonic() < self.end:
            way = self.rng.choice(ways)
            try:
                outcome = await asyncio.wait_for(way(), 60)
            except ConnectionError:
                outcome = "connection error"
            self.done[f"{way.__name__}: {outcome}"] += 1

    def body(self, **more: Any) -> dict[str, Any]:
        rng = self.rng
        return {"prompt": [rng.choice("pq") * rng.randint(1, 20) for _ in range(rng.choice([1, 1, 1, 3]))],
                "max_tokens": rng.randint(1, 40), "ignore_eos": True, "temperature": 1, "seed": 1,
                "n": rng.choice([1, 1, 2]), "stream": rng.random() < 0.8, **more}

    async def ask(self, body: Any, path: str = "/v1/completions") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**12)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(b"POST %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % (path.encode(), len(content)) + content)
        return reader, writer

    async def read(self, pause: float = 0.0) -> str:
        """An answer to its end; it must be right."""
        body = self.body()
        reader, writer = await self.ask(body)
        received = b""
        while data := await reader.read(2**10):
            received += data
            await asyncio.sleep(pause)
        writer.close()
        head, _, payload = received.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1].decode()
        if status == "200":
            self.check(body, payload, b"chunked" in head)
        assert status in ("200", "503")
        return status

    def check(self, body: dict[str, Any], payload: bytes, chunked: bool) -> None:
        if chunked:
            parts = payload.split(b"\r\n")
            payload = b"".join(parts[1::2])
        texts = [""] * (len(body["prompt"]) * body["n"])
        reasons: list[Any] = [None] * len(texts)
        for answer in events(payload.decode()) if body["stream"] else [json.loads(payload)]:
            for choice in answer["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
        for text, reason in zip(texts, reasons):
            if reason != "abort":  # somebody pulled the lever for all
                assert reason == "length" and text == (TEXT + "d" * 99)[:body["max_tokens"]]

    async def read_slowly(self) -> str:
        return await self.read(self.rng.uniform(0.0, 0.1))

    async def leave(self) -> str:
        """In the middle."""
        reader, writer = await self.ask(self.body())
        await reader.read(self.rng.randint(1, 1000))
        writer.close()
        return "left"

    async def reset(self) -> str:
        reader, writer = await self.ask(self.body())
        await reader.read(self.rng.randint(1, 400))
        writer.transport.abort()
        return "reset"

    async def leave_before_answer(self) -> str:
        _, writer = await self.ask(self.body())
        await writer.drain()
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        writer.close()
        return "left"

    async def send_nonsense(self) -> str:
        nonsense = [b"{", b"\xff" * 10, self.body(top_p=7), self.body(prompt="x" * 999), self.body(stop=[""]), {},
                    self.body(n=10**6), self.body(logit_bias={"9999999": 1})]
        reader, writer = await self.ask(self.rng.choice(nonsense))
        status = (await reader.read()).split(b" ", 2)[1].decode()
        writer.close()
        assert status in ("400", "503")
        return status

    async def send_half(self) -> str:
        """A body that stops in its middle."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{\"prompt\"")
        await writer.drain()
        writer.close()
        return "left"

    async def abort(self) -> str:
        """Rarely, everybody's requests; else one that does not exist."""
        everybody = self.rng.random() < 0.02
        reader, writer = await self.ask({} if everybody else {"request_ids": ["cmpl-nobody"]}, "/abort_requests")
        status = (await reader.read()).split(b" ", 2)[1].decode()
        writer.close()
        assert status == "200"
        return status


def test_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")

    async def crowd(live: Live) -> Counter[str]:
        end = time.monotonic() + SECONDS
        clients = [Client(live, seed, end) for seed in range(CLIENTS)]
        await asyncio.gather(*(client.run() for client in clients))
        return sum((client.done for client in clients), Counter())

    options = {"max_queued_requests": 150}
    with serve_letters(TEXT, paced=False, max_num_seqs=32, num_gpu_blocks=80, options=options) as live:
        done = asyncio.run(crowd(live))
        live.assert_clean()
        assert not live.llm._thread._collectors
        found = live.metrics()
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["vllm:num_preemptions_total"] > 0 and found["vllm:request_success_total:abort"] > 0
        assert live.complete(max_tokens=11).json()["choices"][0]["text"] == TEXT
    print(sorted(done.items()))
    for way in ("read: 200", "read: 503", "read_slowly: 200", "leave: left", "reset: reset", "send_nonsense: 400"):
        assert done[way], f"nobody came to '{way}': {done}"
