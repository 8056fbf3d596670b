"""Rows A: the asynchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.helpers import letters_llm
from tests.conformance.registry import DIFFERS, SAME, row
from tests.core.support import assert_clean
from tutorial_engine import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams
from tutorial_engine.exceptions import EngineDeadError, EngineGenerateError, EnginePausedError, VLLMValidationError
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.v1.engine.async_llm import AsyncLLM


@contextlib.contextmanager
def serving(script: Any, **args: Any) -> Iterator[AsyncLLM]:
    """On a scripted model; nothing may be left in it at the end."""
    llm = AsyncLLM(letters_llm(script, **args).llm_engine)
    try:
        yield llm
        assert_clean(llm.llm_engine)
    finally:
        llm.shutdown()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def ask(llm: AsyncLLM, request_id: str = "r", prompt: Any = "p", **params: Any) -> list[RequestOutput]:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 3, **params})
    return [output async for output in llm.generate(prompt, sampling, request_id)]


@row("A1", "AsyncLLMEngine, AsyncLLM", SAME)
def names(tiny_model: Path) -> None:
    """One class under two names, built by from_engine_args(AsyncEngineArgs(...))."""
    assert AsyncLLMEngine is AsyncLLM
    args = AsyncEngineArgs(model=str(tiny_model), max_model_len=64, num_gpu_blocks_override=9)
    llm = AsyncLLM.from_engine_args(args)
    assert len(run(ask(llm, ignore_eos=True))[-1].outputs[0].token_ids) == 3
    llm.shutdown()


@row("A2", "AsyncLLM.generate", SAME)
def streams() -> None:
    """An asynchronous generator of outputs, cumulative unless said. For a consumer that comes late, deltas are joined,
    and of cumulative outputs the newest is kept."""
    async def late(llm: AsyncLLM, kind: RequestOutputKind) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=4, output_kind=kind)
        stream = llm.generate("p", params, "r")
        texts = [(await anext(stream)).outputs[0].text]
        while llm.llm_engine.has_unfinished_requests():
            await asyncio.sleep(0.001)
        await llm.is_sleeping()  # a question to the engine's side: all outputs are on their way back by now
        return texts + [output.outputs[0].text async for output in stream]

    with serving("abcd") as llm:
        assert run(ask(llm))[-1].outputs[0].text == "abc"
        deltas = run(ask(llm, output_kind=RequestOutputKind.DELTA))
        assert "".join(o.outputs[0].text for o in deltas) == "abc" and deltas[-1].finished
        joined = run(late(llm, RequestOutputKind.DELTA))
        assert "".join(joined) == "abcd" and len(joined) <= 2
        assert run(late(llm, RequestOutputKind.CUMULATIVE))[-1] == "abcd"


@row("A3", "leaving early, abort", SAME)
def leaving() -> None:
    """Closing the generator or cancelling its task ends the request and frees its blocks; abort(request_id) sends a
    last output with finish_reason "abort"."""
    async def main(llm: AsyncLLM) -> str:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        stream = llm.generate("p", params, "closed")
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(ask(llm, "cancelled", max_tokens=50))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        stream = llm.generate("p", params, "aborted")
        await llm.pause_generation(mode="keep")
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await llm.abort("aborted")
        return (await reading).outputs[0].finish_reason

    with serving("a") as llm:
        assert run(main(llm)) == "abort"
        run(llm.resume_generation())


@row("A4", "one request id twice", SAME)
def same_id() -> None:
    """Two requests may have one id at the same time; abort ends both."""
    async def main(llm: AsyncLLM) -> list[str | None]:
        both = await asyncio.gather(ask(llm, "same"), ask(llm, "same"))
        assert [outputs[-1].outputs[0].text for outputs in both] == ["abc", "abc"]
        await llm.pause_generation(mode="keep")
        tasks = [asyncio.create_task(ask(llm, "same")) for _ in range(2)]
        await asyncio.sleep(0)
        await llm.abort("same")
        return [outputs[-1].outputs[0].finish_reason for outputs in await asyncio.gather(*tasks)]

    with serving("abc") as llm:
        assert run(main(llm)) == ["abort", "abort"]
        run(llm.resume_generation())


@row("A5", "errors while streaming", SAME)
def errors() -> None:
    """A bad prompt or parameter raises from the first step of the generator; a request that fails gets
    EngineGenerateError, and everyone gets EngineDeadError once the engine has ended."""
    def fail(plan: Any) -> None:
        if any(s.request.num_prompt_tokens == 2 for s in plan.scheduled.values()):
            raise RuntimeError("no memory")

    with serving("abc", before=fail) as llm:
        with pytest.raises(VLLMValidationError):
            run(ask(llm, prompt=""))
        with pytest.raises(EngineGenerateError, match="no memory"):
            run(ask(llm, prompt="pp"))
        assert run(ask(llm))[-1].outputs[0].text == "abc"
    with pytest.raises(EngineDeadError):
        run(ask(llm))


@row("A6", "pause_generation, resume_generation", SAME)
def pausing() -> None:
    """mode "abort" ends what runs, "wait" finishes it, "keep" freezes it. Requests that come meanwhile are refused by
    the first two, and wait with "keep"."""
    async def main(llm: AsyncLLM) -> str:
        for mode in ("abort", "wait"):
            await llm.pause_generation(mode=mode)
            assert await llm.is_paused()
            with pytest.raises(EnginePausedError):
                await ask(llm)
            await llm.resume_generation()
        await llm.pause_generation(mode="keep")
        task = asyncio.create_task(ask(llm))
        await asyncio.sleep(0.01)
        assert not task.done()
        await llm.resume_generation()
        return (await task)[-1].outputs[0].text

    with serving("abc") as llm:
        assert run(main(llm)) == "abc" and not run(llm.is_paused())


@row("A7", "check_health and other thin wrappers", DIFFERS)
def wrappers() -> None:
    """check_health, reset_prefix_cache, sleep, wake_up, is_sleeping, do_log_stats and shutdown are there; add_lora,
    remove_lora, list_loras and pin_lora are not."""
    async def main(llm: AsyncLLM) -> None:
        await llm.check_health()
        assert await llm.reset_prefix_cache()
        await llm.sleep(0)
        assert await llm.is_sleeping()
        await llm.wake_up()
        await llm.do_log_stats()
        assert (await ask(llm))[-1].outputs[0].text == "abc"

    with serving("abc") as llm:
        run(main(llm))
    with pytest.raises(EngineDeadError):
        run(llm.check_health())
    assert not any(hasattr(llm, name) for name in ("add_lora", "remove_lora", "list_loras", "pin_lora"))
