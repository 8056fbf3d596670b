"""Forty requests at the same time. They share the server's batches, so together they take far less than forty times as
long as one."""

import asyncio
import os
import time

from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=os.environ.get("BASE_URL", "http://localhost:8000") + "/v1",
                     api_key=os.environ.get("OPENAI_API_KEY", "none"))


async def ask(model: str, number: int) -> float:
    """Seconds until the whole answer was there."""
    began = time.perf_counter()
    await client.completions.create(model=model, prompt=f"Fact {number} about the sea:", max_tokens=20, seed=number)
    return time.perf_counter() - began


async def main() -> None:
    model = (await client.models.list()).data[0].id
    alone = await ask(model, 0)
    began = time.perf_counter()
    await asyncio.gather(*(ask(model, number) for number in range(1, 41)))
    together = time.perf_counter() - began
    print(f"one alone: {alone:.2f} s; 40 together: {together:.2f} s, {together / alone:.1f} times as long")


asyncio.run(main())
