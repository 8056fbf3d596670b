"""A crowd of clients: each sends its request when its time has come, and notes when each piece of the answer arrives.

Traffic goes to the one address that was given: no proxy, no redirect.

Owns: HTTP, time stamps. Does not own: what they mean (`report.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm.auto import tqdm

from tutorial_engine.bench.workload import Job
from tutorial_engine.exceptions import VLLMValidationError

WORDS = ("the of and to in is that for it was on are as with they be at this have from or one had by word but not what "
         "all were when your can said there use an each which she do how their if will up other about out many then "
         "them these so some her would make like him into time has look two more write go see number no way could")


@dataclass
class Result:
    """What became of one request. Times are in seconds since the run began.

    Attributes:
        sent: when. chunks: when each piece of the answer arrived; a piece is one token unless the server joined some.
        prompt_len, output_len: tokens, as the server counted them. error: why it failed, "" if it did not.
    """

    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_len: int = 0
    output_len: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.chunks[0] - self.sent

    @property
    def latency(self) -> float:
        """Until the last token."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 if there is only that one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Gaps between pieces."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:])]


def open_client(base_url: str) -> httpx.AsyncClient:
    """As many connections as there are requests, and no time limit. OPENAI_API_KEY is sent, if it is set."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=httpx.Limits(max_connections=None),
                             trust_env=False, headers={"Authorization": f"Bearer {key}"} if key else {})


async def ask_server(client: httpx.AsyncClient, model: str | None) -> tuple[str, list[int]]:
    """The name of its model (the first one, unless given), and ids of its tokens to make prompts of.

    Raises:
        VLLMValidationError: it does not answer as an OpenAI-compatible server with `/tokenize` does.
    """
    try:
        if model is None:
            model = (await _json(client, "GET", "/v1/models"))["data"][0]["id"]
        body = {"model": model, "prompt": WORDS, "add_special_tokens": False}
        return model, sorted(set((await _json(client, "POST", "/tokenize", json=body))["tokens"]))
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise VLLMValidationError(f"{client.base_url} does not answer as a server for this benchmark: "
                                  f"{type(error).__name__}: {error}. Start one with `tutorial-engine serve`, or name "
                                  "another with --base-url.", parameter="base_url") from error


async def _json(client: httpx.AsyncClient, method: str, path: str, **kwargs: Any) -> Any:
    return (await client.request(method, path, **kwargs)).raise_for_status().json()


async def run(client: httpx.AsyncClient, jobs: Sequence[Job], times: Sequence[float], body: dict[str, Any],
              max_concurrency: int | None = None, progress: bool = False) -> tuple[list[Result], float]:
    """Send each job at its time.

    Args:
        times: seconds from the start. body: what all requests have in common.
        max_concurrency: so many are on their way at most; further ones wait for that, and are late.

    Returns:
        A result for each job, and the seconds until the last one was answered.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    began = time.perf_counter()
    with tqdm(total=len(jobs), disable=not progress) as bar:
        async def one(job: Job, at: float) -> Result:
            await asyncio.sleep(began + at - time.perf_counter())
            async with places:
                result = await send(client, job, body, began)
            bar.update()
            return result

        results = await asyncio.gather(*map(one, jobs, times))
    return results, time.perf_counter() - began


async def send(client: httpx.AsyncClient, job: Job, body: dict[str, Any], began: float) -> Result:
    """One request to `/v1/completions`, streamed. `began`: the time.perf_counter() that its times count from."""
    body = {**body, "prompt": job.prompt, "max_tokens": job.output_len, "stream": True,
            "stream_options": {"include_usage": True}}
    result = Result(sent=time.perf_counter() - began)
    done = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                result.error = f"status {response.status_code}: {(await response.aread()).decode(errors='replace')}"
                return result
            async for line in response.aiter_lines():
                now = time.perf_counter() - began
                data = line.removeprefix("data:").strip()
                done = done or data == "[DONE]"
                if data and not done and not line.startswith(":"):
                    _take(result, json.loads(data), now)
    except (httpx.HTTPError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    if not result.error and not (done and result.chunks):
        result.error = "the stream ended before the answer did"
    return result


def _take(result: Result, event: dict[str, Any], now: float) -> None:
    if event.get("choices"):
        result.chunks.append(now)
    if usage := event.get("usage"):
        result.prompt_len, result.output_len = usage["prompt_tokens"], usage["completion_tokens"]
    if error := event.get("error"):
        result.error = str(error)
