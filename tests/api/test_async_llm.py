"""`AsyncLLM`: what streams say, and that nothing of a request stays behind, however and whenever it ends.

No test sleeps. A scripted model can be held in the middle of a step (`Gate`), so that a test decides what the engine's
thread has seen and what it has not; every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import tutorial_engine
from tests.api.support import (
    greedy,
    piece_ids,
    piece_tokenizer,
    run_steps,
    scripted_engine,
)
from tests.core.support import assert_clean
from tutorial_engine import LLM, AsyncEngineArgs, EngineArgs, RequestOutput, SamplingParams
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.exceptions import (
    EngineDeadError,
    EngineGenerateError,
    EnginePausedError,
    VLLMValidationError,
)
from tutorial_engine.outputs import CompletionOutput
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.scheduler import SchedulerOutput
from tutorial_engine.trace import Trace

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TOKENIZER = piece_tokenizer()
TIMEOUT = 60  # seconds; nothing here takes one, but the machine may be busy


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIMEOUT):
            return await main

    return asyncio.run(limited())


def alphabet(request: Request) -> int:
    """Token i of a child is letter i, so that what is said shows where it is from."""
    return piece_ids(TOKENIZER, chr(ord("a") + request.num_output_tokens % 26))[0]


class Gate:
    """Holds the model at the begin of a step: `await gate.reached()`, look around, `gate.open()`."""

    def __init__(self, closed: bool = True) -> None:
        self.closed, self.arrived, self.go = closed, threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, plan: SchedulerOutput) -> None:
        if self.closed:
            self.arrived.release()
            assert self.go.acquire(timeout=TIMEOUT)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=TIMEOUT)

    def step(self) -> None:
        self.go.release()

    def open(self) -> None:
        self.closed = False
        self.go.release()


@contextlib.contextmanager
def serving(script: Any = alphabet, tokenizer: Any = TOKENIZER, gate: Gate | None = None,
            before: Callable[[SchedulerOutput], None] | None = None, **kwargs: Any) -> Iterator[AsyncLLM]:
    """An AsyncLLM on a scripted model; shut down afterwards, and its thread gone."""
    llm = AsyncLLM(scripted_engine(tokenizer, script, before=before or gate, **kwargs))
    try:
        yield llm
    finally:
        if gate:
            gate.open()
        llm.shutdown()
        assert not llm._thread._thread.is_alive()


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str = "r", **kwargs: Any
                  ) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id, **kwargs)]


async def caught_up(llm: AsyncLLM) -> None:
    """Every task has begun, and the engine's thread knows what they want."""
    await asyncio.sleep(0)
    await llm._thread.call(lambda: None)


async def settled(llm: AsyncLLM) -> None:
    """All commands given so far were carried out; nothing of any request is left."""
    await llm._thread.call(assert_clean, llm.llm_engine)
    assert not llm._thread._collectors


def texts(outputs: list[RequestOutput], kind: RequestOutputKind) -> dict[int, str]:
    """The whole text of each completion, from what a stream of this kind brought."""
    whole: dict[int, str] = {}
    for output in outputs:
        for c in output.outputs:
            whole[c.index] = whole.get(c.index, "") + c.text if kind == DELTA else c.text
    return whole


# Names


def test_names() -> None:
    """A1, O4, O5."""
    from tutorial_engine.engine.async_llm_engine import AsyncLLMEngine
    from tutorial_engine.v1.engine.async_llm import AsyncLLM as V1AsyncLLM

    assert AsyncLLMEngine is V1AsyncLLM is AsyncLLM is tutorial_engine.AsyncLLMEngine


def test_a_model_from_a_folder(tiny_model: Path, llm: LLM) -> None:
    """A1; the same tokens as the synchronous engine, greedy and seeded, one request or several."""
    prompts = ["the described", "he said", "the"]
    params = [greedy(12), SamplingParams(seed=3, max_tokens=12, n=2), greedy(5)]
    wanted = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, [p.clone() for p in params],
                                                                     use_tqdm=False)]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(tiny_model), max_model_len=128, num_gpu_blocks_override=65))

    async def main() -> None:
        got = await asyncio.gather(*(collect(engine, prompt, p) for prompt, p in zip(prompts, params)))
        for outputs, ids in zip(got, wanted):
            last = {c.index: c.token_ids for o in outputs for c in o.outputs}
            assert [last[i] for i in sorted(last)] == ids
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[0].metrics is not None, "statistics are on in the asynchronous engine"
        await settled(engine)

    try:
        run(main())
        assert engine.get_tokenizer().encode("he") == llm.get_tokenizer().encode("he")
    finally:
        engine.shutdown()
    with pytest.raises(TypeError, match="must be AsyncEngineArgs, got EngineArgs"):
        AsyncLLM.from_engine_args(EngineArgs())


# Streams


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 3])
def test_streams_bring_what_the_synchronous_engine_says(kind: RequestOutputKind, n: int) -> None:
    """A2, X1, S22: all kinds; the caller's SamplingParams are left alone."""
    params = SamplingParams(n=n, seed=1, max_tokens=9, logprobs=1, output_kind=kind)
    before = params.clone()
    sync = run_steps(scripted_engine(TOKENIZER, alphabet), "p", SamplingParams(
        n=n, seed=1, max_tokens=9, logprobs=1, output_kind=FINAL_ONLY))[-1]

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        outputs = await collect(llm, "p", params)
        await settled(llm)
        return outputs

    with serving() as llm:
        outputs = run(main(llm))
    assert params == before
    assert texts(outputs, kind) == {c.index: c.text for c in sync.outputs} == dict.fromkeys(range(n), "abcdefghi")
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {o.request_id for o in outputs} == {"r"}
    logprobs: dict[int, list] = {}
    for c in (c for o in outputs for c in o.outputs):
        logprobs[c.index] = logprobs.get(c.index, []) + c.logprobs if kind == DELTA else c.logprobs
    assert logprobs == {c.index: c.logprobs for c in sync.outputs}
    if kind == FINAL_ONLY:
        assert len(outputs) == 1 and outputs[0] == sync


def test_a_stop_string_is_never_seen_in_a_stream() -> None:
    """B01."""
    tokenizer = piece_tokenizer("AB", "C DEF", "HI", "J tail")
    script = piece_ids(tokenizer, "AB", "C DEF", "G", "HI", "J tail")
    with serving(script, tokenizer) as llm:
        outputs = run(collect(llm, "p", greedy(stop=["DEFGHIJ"], output_kind=DELTA)))
    assert texts(outputs, DELTA) == {0: "ABC "}
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "DEFGHIJ")


def test_every_completion_streams_and_has_its_own_seed(tiny_model: Path) -> None:
    """B06."""
    params = SamplingParams(n=4, seed=7, max_tokens=16, ignore_eos=True, output_kind=DELTA)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(tiny_model), max_model_len=64, num_gpu_blocks_override=65))

    def ids(outputs: list[RequestOutput]) -> dict[int, list[int]]:
        whole: dict[int, list[int]] = {}
        for c in (c for o in outputs for c in o.outputs):
            whole.setdefault(c.index, []).extend(c.token_ids)
        return whole

    async def main() -> None:
        first = ids(await collect(engine, "the", params))
        assert sorted(first) == [0, 1, 2, 3] and len({tuple(i) for i in first.values()}) > 1
        assert ids(await collect(engine, "the", params)) == first
        for i in range(4):
            alone = SamplingParams(seed=7 + i, max_tokens=16, ignore_eos=True, output_kind=DELTA)
            assert ids(await collect(engine, "the", alone)) == {0: first[i]}

    try:
        run(main())
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize("n", [1, 3])
def test_a_slow_consumer_gets_everything_in_fewer_pieces(kind: RequestOutputKind, n: int) -> None:
    """A2: deltas are joined, of cumulative outputs the newest is kept, each by its index."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate("p", SamplingParams(n=n, seed=1, max_tokens=20, output_kind=kind, logprobs=0), "slow")
        first = asyncio.create_task(anext(stream))
        await gate.reached()
        gate.step()
        outputs = [await first]
        gate.open()
        await collect(llm, "p", greedy(40))  # the engine is done with the slow one long before
        outputs += [output async for output in stream]
        assert len(outputs) == 2, "what was taken early, and what all the rest was merged into"
        assert outputs[-1].finished and texts(outputs, kind) == dict.fromkeys(range(n), "abcdefghijklmnopqrst")
        last = {c.index: c for c in outputs[-1].outputs}
        assert sorted(last) == list(range(n)) and all(c.finish_reason == "length" for c in last.values())
        for c in last.values():
            assert len(c.logprobs) == len(c.token_ids) == len(c.text) >= 19
            assert kind == DELTA or len(c.token_ids) == 20

    with serving(gate=gate) as llm:
        run(main(llm))


def test_merging_two_outputs() -> None:
    """A2: what belongs to the request is the later one's; prompt logprobs, which deltas bring once, stay."""
    def output(text: str, *indexes: int, finished: bool = False, **kwargs: Any) -> RequestOutput:
        completions = [CompletionOutput(i, text, [len(text)], cumulative_logprob=float(i)) for i in indexes]
        return RequestOutput("r", "p", [1, 2], kwargs.get("prompt_logprobs"), completions, finished)

    merged = output("one", 0, prompt_logprobs=[None, {}])
    merged.add(output("two", 1), aggregate=True)
    merged.add(output("three", 0, finished=True), aggregate=True)
    assert [(c.index, c.text, c.token_ids) for c in merged.outputs] == [(0, "onethree", [3, 5]), (1, "two", [3])]
    assert merged.finished and merged.prompt_logprobs == [None, {}]
    newest = output("one", 0, 1)
    newest.add(output("three", 1), aggregate=False)
    assert [(c.index, c.text) for c in newest.outputs] == [(0, "one"), (1, "three")]


def test_requests_share_their_steps() -> None:
    """Continuous batching: a request that comes while another streams is served in the same steps."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        with Trace(llm) as trace:
            first = asyncio.create_task(collect(llm, "p", greedy(6), "first"))
            await gate.reached()
            gate.step()
            await gate.reached()  # step 2 of the first runs
            params = greedy(3)
            second = asyncio.create_task(collect(llm, "q", params, "second"))
            await asyncio.sleep(0)  # the task begins and queues its command
            params.max_tokens = 1  # too late to matter
            gate.open()
            await asyncio.gather(first, second)
            await settled(llm)
        assert [sorted(r.scheduled) for r in trace] == (
            [["first"]] * 2 + [["first", "second"]] * 3 + [["first"]])

    with serving(gate=gate) as llm:
        run(main(llm))


def test_newcomers_do_not_keep_the_others_from_their_steps() -> None:
    async def main(llm: AsyncLLM) -> None:
        def again() -> None:
            llm._thread.post(again)  # there is always one more command in the queue

        llm._thread.post(again)
        assert texts(await collect(llm, "p", greedy(9)), CUMULATIVE) == {0: "abcdefghi"}

    with serving() as llm:
        run(main(llm))


def test_one_loop_after_another_and_several_threads() -> None:
    """It belongs to no event loop."""
    with serving() as llm:
        for _ in range(3):
            assert len(run(collect(llm, "p", greedy(3)))) >= 1
        said: list[dict[int, str]] = []
        threads = [threading.Thread(target=lambda: said.append(texts(run(collect(llm, "p", greedy(9))), CUMULATIVE)))
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert said == [{0: "abcdefghi"}] * 4
        run(settled(llm))


# Errors


BAD_REQUESTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": ""}, VLLMValidationError, "empty"),
    ({"prompt": 3}, TypeError, "."),
    ({"prompt": "x" * 64}, VLLMValidationError, "maximum context length is 64"),
    ({"sampling_params": None}, TypeError, "must be SamplingParams, got NoneType"),
    ({"request_id": 3}, TypeError, "request_id must be a string, got int"),
    ({"lora_request": object()}, VLLMValidationError, "LoRA is not enabled"),
    ({"priority": 1}, VLLMValidationError, "priority scheduling is not enabled"),
    ({"tokenization_kwargs": {"padding": True}}, TypeError, "padding"),
]


@pytest.mark.parametrize("bad, kind, match", BAD_REQUESTS)
def test_a_bad_request_raises_at_the_first_output(bad: dict[str, Any], kind: type[Exception], match: str) -> None:
    """A5."""
    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate(**{"prompt": "p", "sampling_params": greedy(3), "request_id": "r", **bad})
        with pytest.raises(kind, match=match):
            await anext(stream)
        await settled(llm)
        assert len(await collect(llm, "p", greedy(3), tokenization_kwargs={"truncate_prompt_tokens": 1})) >= 1

    with serving() as llm:
        run(main(llm))


def test_an_error_that_nobody_foresaw_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5."""
    async def main(llm: AsyncLLM) -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("a tokenizer's own")

        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine.input_processor, "tokenize", broken)
            with pytest.raises(EngineGenerateError, match="Request 'r' .*ZeroDivisionError: a tokenizer") as error:
                await collect(llm, "p", greedy(3))
        assert error.value.request_ids == ["r"] and isinstance(error.value.__cause__, ZeroDivisionError)
        await settled(llm)
        assert await collect(llm, "p", greedy(3))

    with serving() as llm:
        run(main(llm))


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    """A5: the requests of the step get EngineGenerateError, each its own; the one that waits for a seat goes on."""
    gate = Gate()

    def before(plan: SchedulerOutput) -> None:
        gate(plan)
        if sum(s.request.num_output_tokens for s in plan.scheduled.values()) >= 6:
            raise RuntimeError("out of memory")

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, "p", greedy(9), name)) for name in "abc"]
        await asyncio.sleep(0)  # all three are queued
        gate.open()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(x) for x in done[:2]] == [EngineGenerateError] * 2 and done[0] is not done[1]
        assert set(done[0].request_ids) == {"a", "b"} and "RuntimeError: out of memory" in str(done[0])
        assert isinstance(done[0].__cause__, RuntimeError)
        # Alone, the third fails only when it is too long for our model.
        assert isinstance(done[2], EngineGenerateError) and done[2].request_ids == ["c"]
        assert texts(await collect(llm, "p", greedy(5)), CUMULATIVE) == {0: "abcde"}
        await settled(llm)
        await llm.check_health()

    with serving(gate=gate, before=before, max_num_seqs=2) as llm:
        run(main(llm))


def test_a_step_that_fails_outside_of_the_model_ends_all_its_requests() -> None:
    """A5: those that were not in the step are told too; the engine takes new ones."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, "p", greedy(9), name)) for name in "abc"]
        await gate.reached()
        gate.step()
        await gate.reached()  # by now all three are in the engine
        llm.llm_engine.output_processor.process = lambda *args: 1 / 0  # type: ignore[method-assign]
        gate.open()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in done] == [EngineGenerateError] * 3
        assert texts(await collect(llm, "p", greedy(5)), CUMULATIVE) == {0: "abcde"}
        await settled(llm)

    with serving(gate=gate, max_num_seqs=2) as llm:
        run(main(llm))


def test_what_was_said_before_a_failure_is_not_lost() -> None:
    gate = Gate()

    def before(plan: SchedulerOutput) -> None:
        gate(plan)
        if any(s.request.num_output_tokens == 2 for s in plan.scheduled.values()):
            raise RuntimeError("late")

    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate("p", greedy(5, output_kind=DELTA), "r")
        first = asyncio.create_task(anext(stream))
        await gate.reached()
        gate.step()
        assert (await first).outputs[0].text == "a"
        await gate.reached()
        gate.step()
        await gate.reached()  # the third step, which will fail
        clean = asyncio.create_task(settled(llm))
        await asyncio.sleep(0)
        gate.open()
        await clean
        assert (await anext(stream)).outputs[0].text == "b"
        with pytest.raises(EngineGenerateError, match="late"):
            await anext(stream)

    with serving(gate=gate, before=before) as llm:
        run(main(llm))


def test_an_engine_that_fails_outside_of_the_model_is_dead_for_everyone() -> None:
    """A5: EngineDeadError for those who wait and for all who come."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        assert llm.is_running and not llm.errored and llm.dead_error is None
        await llm.check_health()
        engine_step, divisors = llm.llm_engine.step, [1, 0]

        def step() -> list[RequestOutput]:
            outputs = engine_step()
            1 / divisors.pop(0)  # the second time
            return outputs

        llm.llm_engine.step = step  # type: ignore[method-assign]
        tasks = [asyncio.create_task(collect(llm, "p", greedy(5), name)) for name in "ab"]
        await gate.reached()
        tasks.append(asyncio.create_task(llm.pause_generation(mode="wait")))
        await asyncio.sleep(0)
        gate.step()
        await gate.reached()  # the thread knows of the pause, and will not come to these:
        tasks.append(asyncio.create_task(collect(llm, "p", greedy(5), "late")))
        tasks.append(asyncio.create_task(llm.pause_generation(mode="keep")))
        await asyncio.sleep(0)
        gate.open()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in done] == [EngineDeadError] * 5 and len({id(error) for error in done}) == 5
        assert "ZeroDivisionError: division by zero" in str(done[0])
        assert all(isinstance(error.__cause__, ZeroDivisionError) for error in done)
        assert not llm.is_running and llm.errored and isinstance(llm.dead_error, EngineDeadError)
        for call in (llm.check_health, lambda: collect(llm, "p", greedy(1)), lambda: llm.abort("a"),
                     llm.reset_prefix_cache, llm.pause_generation, llm.resume_generation):
            with pytest.raises(EngineDeadError, match="division by zero"):
                await call()
        assert_clean(llm.llm_engine)
        assert repr(llm.llm_engine) == "LLMEngine(closed)"

    with serving(gate=gate) as llm:
        run(main(llm))


@pytest.mark.parametrize("where", ["step", "command"])
def test_errors_that_are_nobodys_end_the_engine(where: str) -> None:
    """A5: better dead than waited for."""
    def fail() -> None:
        raise AssertionError("a table names a free block")

    def failure_without_names() -> None:
        raise EngineGenerateError("whose?")

    async def main(llm: AsyncLLM) -> None:
        if where == "step":
            llm.llm_engine.step = failure_without_names  # type: ignore[method-assign]
        else:
            with pytest.raises(AssertionError, match="a table names"):
                await llm._thread.call(fail)
        with pytest.raises(EngineDeadError, match="whose" if where == "step" else "AssertionError: a table names"):
            await collect(llm, "p", greedy(3))

    with serving() as llm:
        run(main(llm))


# Leaving early


def test_closing_a_generator_frees_everything() -> None:
    """A3, B22: the children of n > 1 too."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate("prompt", SamplingParams(n=3, max_tokens=50), "r")
        first = asyncio.create_task(anext(stream))
        await gate.reached()
        gate.step()
        await first
        await gate.reached()
        assert len(llm.llm_engine.scheduler.running) == 3
        await stream.aclose()
        gate.open()
        await settled(llm)
        assert len(llm.llm_engine.model_runner.plans) == 2
        (aborted,) = [metric.value for metric in llm.llm_engine.get_metrics() if metric.name.endswith("request_success")
                      and metric.labels["finished_reason"] == "abort"]
        assert aborted == 3, "each completion counts"
        assert texts(await collect(llm, "p", greedy(4)), CUMULATIVE) == {0: "abcd"}

    async def left_open(llm: AsyncLLM) -> None:
        async for _ in llm.generate("prompt", greedy(50), "r"):
            break  # asyncio closes what is open

    with serving(gate=gate, disable_log_stats=False) as llm:
        run(main(llm))
        run(left_open(llm))
        run(settled(llm))


def test_cancelling_during_a_chunked_prefill() -> None:
    """B22."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm, "x" * 40, greedy(5)))
        await gate.reached()
        gate.step()
        await gate.reached()  # 8 of 40 tokens are computed, 8 more are being computed
        (request,) = llm.llm_engine.scheduler.running
        assert request.num_computed_tokens == 16 and llm.llm_engine.scheduler.kv_cache_manager.usage > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # at once: the step is still held
        gate.open()
        await settled(llm)
        assert len(llm.llm_engine.model_runner.plans) == 2

    with serving(gate=gate, max_num_batched_tokens=8) as llm:
        run(main(llm))


@pytest.mark.parametrize("let_it_in", [False, True])
def test_cancelling_before_the_engine_has_seen_the_request(let_it_in: bool) -> None:
    """B22: the command to add is skipped, or followed by the one to drop."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm, "p", greedy(3), "running"))
        await gate.reached()
        task = asyncio.create_task(collect(llm, "q", greedy(3), "early"))
        await asyncio.sleep(0)  # the command is queued, and the thread is in its step
        if let_it_in:
            future, add = llm._thread._commands.get()
            future.set_running_or_notify_cancel()  # as if the thread had just taken it
            llm._thread.post(add)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await running
        await settled(llm)
        names = {i for plan in llm.llm_engine.model_runner.plans for i in plan.scheduled}
        assert {name.rpartition("-")[0] for name in names} == {"running"}

    with serving(gate=gate) as llm:
        run(main(llm))


def test_a_late_leaver_does_not_end_another_request_of_its_name() -> None:
    gate = Gate(closed=False)

    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate("p", greedy(3, output_kind=FINAL_ONLY), "same")
        assert (await anext(stream)).finished  # the generator stands at its last output
        gate.closed = True
        other = asyncio.create_task(collect(llm, "p", greedy(9, output_kind=DELTA), "same"))
        await gate.reached()
        await stream.aclose()
        gate.open()
        assert texts(await other, DELTA) == {0: "abcdefghi"}

    with serving(gate=gate) as llm:
        run(main(llm))


@pytest.mark.parametrize("n", [1, 3])
def test_a_generator_in_a_loop_that_is_gone(n: int) -> None:
    """A loop closed without closing its generators: the request ends when an output finds nobody."""
    gate = Gate()

    async def main(stream: Any) -> None:
        first = asyncio.create_task(anext(stream))
        await gate.reached()
        gate.step()
        await first
        await gate.reached()

    with serving(gate=gate) as llm:
        loop = asyncio.new_event_loop()
        stream = llm.generate("p", SamplingParams(n=n, seed=1, max_tokens=60), "lost")
        loop.run_until_complete(asyncio.wait_for(main(stream), TIMEOUT))
        loop.close()
        gate.open()
        assert texts(run(collect(llm, "p", greedy(9))), CUMULATIVE) == {0: "abcdefghi"}
        run(settled(llm))
        assert sum("lost" in str(list(plan.scheduled)) for plan in llm.llm_engine.model_runner.plans) == 2


@pytest.mark.parametrize("seed", range(6))
def test_leaving_at_random_moments(seed: int) -> None:
    """A3, E18: many requests in a small pool, most of which leave at some time, in some way."""
    rng = random.Random(seed)

    async def read(llm: AsyncLLM, name: str, way: str, patience: int) -> None:
        kind, n, max_tokens = rng.choice(list(RequestOutputKind)), rng.choice([1, 1, 2, 3]), rng.randint(1, 20)
        outputs: list[RequestOutput] = []
        stream = llm.generate("x" * rng.randint(1, 30), SamplingParams(
            n=n, seed=1, max_tokens=max_tokens, output_kind=kind), name)
        async for output in stream:
            outputs.append(output)
            if len(outputs) == patience and way == "close":
                await stream.aclose()
            if len(outputs) == patience and way == "abort":
                await llm.abort(name)  # and so the other one of this name
        if way in ("stay", "abort"):
            whole, said = "abcdefghijklmnopqrst"[:max_tokens], texts(outputs, kind)
            reasons = {c.index: c.finish_reason for o in outputs for c in o.outputs}
            assert sorted(said) == list(range(n)) and outputs[-1].finished
            assert all(whole.startswith(text) and (reasons[i] == "abort" or text == whole) for i, text in said.items())

    async def one(llm: AsyncLLM, name: str) -> None:
        way, patience = rng.choice(["stay", "close", "abort", "cancel"]), rng.randint(0, 12)
        task = asyncio.create_task(read(llm, name, way, patience))
        if way == "cancel":
            for _ in range(patience):
                await asyncio.sleep(0)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def main(llm: AsyncLLM) -> None:
        for _ in range(5):
            await asyncio.gather(*(one(llm, str(i // 2)) for i in range(12)))
            await settled(llm)
        assert texts(await collect(llm, "p", greedy(4)), CUMULATIVE) == {0: "abcd"}

    with serving(num_gpu_blocks=17, max_num_batched_tokens=8) as llm:
        run(main(llm))


# Abort


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 3])
def test_abort_brings_a_last_output(kind: RequestOutputKind, n: int) -> None:
    """A3."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        params = SamplingParams(n=n, seed=1, max_tokens=50, output_kind=kind, stop=["never"])
        task = asyncio.create_task(collect(llm, "p", params))
        for _ in range(5):
            await gate.reached()
            gate.step()
        await gate.reached()  # five steps are done; abort comes during the sixth
        abort = asyncio.create_task(llm.abort(["unknown", "r"]))
        await asyncio.sleep(0)
        gate.open()
        await abort
        outputs = await task
        await settled(llm)
        assert texts(outputs, kind) == dict.fromkeys(range(n), "abcdef"), "what was held back for `stop` is out too"
        last = {c.index: c.finish_reason for o in outputs for c in o.outputs}
        assert last == dict.fromkeys(range(n), "abort") and outputs[-1].finished

    with serving(gate=gate) as llm:
        run(main(llm))


def test_one_name_for_several_requests() -> None:
    """A4: they do not mix, and abort(name) ends them all."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, "p", greedy(length), "same")) for length in (2, 4, 40)]
        tasks.append(asyncio.create_task(collect(llm, "p", greedy(3), "same#2")))
        tasks.append(asyncio.create_task(collect(llm, "p", greedy(40), "same")))
        await asyncio.sleep(0)
        for _ in range(10):
            await gate.reached()
            gate.step()
        await gate.reached()
        abort = asyncio.create_task(llm.abort("same"))
        await asyncio.sleep(0)
        gate.open()
        await abort
        ends = [(await task)[-1] for task in tasks]
        assert [o.request_id for o in ends] == ["same", "same", "same", "same#2", "same"]
        assert [len(o.outputs[0].token_ids) for o in ends[:2]] == [2, 4] and len(ends[3].outputs[0].token_ids) == 3
        assert [o.outputs[0].finish_reason for o in ends] == ["length", "length", "abort", "length", "abort"]
        await settled(llm)

    with serving(gate=gate, max_num_seqs=8) as llm:
        run(main(llm))


def test_aborting_what_waits_for_a_seat() -> None:
    """An abort before the first step of a request: an empty last output."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        first = asyncio.create_task(collect(llm, "p", greedy(5), "first"))
        await gate.reached()
        second = asyncio.create_task(collect(llm, "p", greedy(5), "second"))
        await asyncio.sleep(0)
        abort = asyncio.create_task(llm.abort("second"))
        await asyncio.sleep(0)
        gate.open()
        (output,) = await second
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])
        assert output.outputs[0].finish_reason == "abort" and output.num_cached_tokens == 0
        await asyncio.gather(first, abort)

    with serving(gate=gate, max_num_seqs=1) as llm:
        run(main(llm))


def test_the_synchronous_engine_returns_the_last_outputs_too() -> None:
    engine = scripted_engine(TOKENIZER, alphabet)
    engine.add_request("r", "p", SamplingParams(n=2, seed=1, max_tokens=9, output_kind=FINAL_ONLY))
    engine.step()
    (output,) = engine.abort_request(["unknown", "r", "r"])
    assert output.finished and [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
        (0, "a", "abort"), (1, "a", "abort")]
    assert engine.abort_request(["r"]) == []
    assert_clean(engine)


# Pausing


async def paused_in_step(llm: AsyncLLM, gate: Gate, **kwargs: Any) -> tuple[asyncio.Task, asyncio.Task]:
    """(a request in its second step, a pause that was asked for meanwhile)."""
    task = asyncio.create_task(collect(llm, "p" * 9, greedy(5), "running"))
    await gate.reached()
    gate.step()
    await gate.reached()
    pause = asyncio.create_task(llm.pause_generation(**kwargs))
    await asyncio.sleep(0)
    gate.open()
    return task, pause


@pytest.mark.parametrize("mode, said, reason", [("abort", "ab", "abort"), ("wait", "abcde", "length")])
def test_pausing_refuses_new_requests_until_resumed(mode: str, said: str, reason: str) -> None:
    """A6."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        assert not await llm.is_paused()
        task, pause = await paused_in_step(llm, gate, mode=mode)
        await pause
        assert await llm.is_paused()
        last = (await task)[-1].outputs[0]
        assert (last.text, last.finish_reason) == (said, reason)
        with pytest.raises(EnginePausedError, match=f"paused .mode='{mode}'"):
            await collect(llm, "p", greedy(3))
        await settled(llm)
        pool = llm.llm_engine.scheduler.kv_cache_manager.block_pool
        assert not pool.cached_block_hash_to_block, "clear_cache is the default"
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert texts(await collect(llm, "p", greedy(3)), CUMULATIVE) == {0: "abc"}

    with serving(gate=gate) as llm:
        run(main(llm))


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pausing_with_keep_lets_all_wait(clear_cache: bool) -> None:
    """A6: nothing is computed, nothing is lost; with clear_cache the K and V are computed again."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        task, pause = await paused_in_step(llm, gate, mode="keep", clear_cache=clear_cache)
        await pause
        new = asyncio.create_task(collect(llm, "q", greedy(3), "new"))
        await caught_up(llm)
        plans = llm.llm_engine.model_runner.plans
        assert len(plans) == 2 and await llm.is_paused() and not new.done()
        assert len(llm.llm_engine.scheduler.requests) == 2
        gone = asyncio.create_task(collect(llm, "q", greedy(3), "gone"))
        await caught_up(llm)
        assert len(llm.llm_engine.scheduler.requests) == 3
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await caught_up(llm)
        assert len(llm.llm_engine.scheduler.requests) == 2, "one can leave a paused engine"
        await llm.resume_generation()
        assert texts(await task, CUMULATIVE) == {0: "abcde"} and texts(await new, CUMULATIVE) == {0: "abc"}
        assert [s.start for s in plans[2].scheduled.values()] == ([0, 0] if clear_cache else [10, 0])
        await settled(llm)

    with serving(gate=gate) as llm:
        run(main(llm))


def test_pauses_of_several_kinds() -> None:
    """A6: a pause may follow another; resuming ends one that still waits."""
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(VLLMValidationError, match="mode must be one of abort, wait, keep, got 'stop'"):
            await llm.pause_generation(mode="stop")
        assert not await llm.is_paused()
        for mode in ("abort", "wait", "keep", "wait", "abort"):
            await llm.pause_generation(mode=mode)
        await llm.resume_generation()
        await llm.resume_generation()
        await llm.pause_generation(mode="keep")
        kept = asyncio.create_task(collect(llm, "p", greedy(5), "kept"))
        await caught_up(llm)
        await llm.pause_generation(mode="wait")  # the kept one is finished now
        assert texts(await kept, CUMULATIVE) == {0: "abcde"}
        await llm.resume_generation()
        assert await collect(llm, "p", greedy(3))

    with serving() as llm:
        run(main(llm))


def test_resuming_and_cancelling_a_pause_that_waits() -> None:
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm, "p", greedy(9)))
        await gate.reached()
        pauses = [asyncio.create_task(llm.pause_generation(mode="wait", clear_cache=False)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.step()
        await gate.reached()  # the engine knows that it shall pause
        for _ in range(3):
            await asyncio.sleep(0)
        pauses[1].cancel()
        resumed = asyncio.create_task(llm.resume_generation())
        await asyncio.sleep(0)
        gate.step()
        await gate.reached()
        await pauses[0]
        await resumed
        assert not task.done() and not await llm.is_paused()
        gate.open()
        await task
        assert (await asyncio.gather(pauses[1], return_exceptions=True))[0].__class__ is asyncio.CancelledError

    with serving(gate=gate) as llm:
        run(main(llm))


def test_reset_prefix_cache() -> None:
    """A7."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm, "p" * 9, greedy(3)))
        await gate.reached()
        refused = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        gate.open()
        assert not await refused
        await task
        assert await llm.reset_prefix_cache()
        with pytest.raises(VLLMValidationError, match="reset_connector"):
            await llm.reset_prefix_cache(reset_connector=True)
        await llm.check_health()

    with serving(gate=gate) as llm:
        run(main(llm))


def test_sleep_and_wake_up(tiny_model: Path) -> None:
    """A7: kept requests go on; others are told that they were aborted; a refused level leaves the engine awake."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(tiny_model), max_model_len=128, num_gpu_blocks_override=65))

    async def main() -> None:
        right = [o.outputs[0].token_ids for o in await collect(engine, "the", greedy(30, ignore_eos=True))][-1]
        with pytest.raises(VLLMValidationError, match="level"):
            await engine.sleep(level=7)
        assert not await engine.is_paused() and not await engine.is_sleeping()
        await engine.sleep(level=1, mode="keep")
        assert await engine.is_sleeping()
        task = asyncio.create_task(collect(engine, "the", greedy(30, ignore_eos=True)))
        await caught_up(engine)
        await engine.wake_up(["weights"])
        assert await engine.is_sleeping() and not task.done()
        await engine.wake_up()
        assert (await task)[-1].outputs[0].token_ids == right and not await engine.is_sleeping()
        task = asyncio.create_task(collect(engine, "the", greedy(120, ignore_eos=True)))
        await caught_up(engine)
        await engine.sleep()
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        newcomer = asyncio.create_task(collect(engine, "the", greedy(3)))
        await caught_up(engine)
        assert not newcomer.done(), "who comes while it sleeps waits"
        await engine.wake_up()
        await engine.do_log_stats()
        assert await newcomer
        waited_for = asyncio.create_task(collect(engine, "the", greedy(9, ignore_eos=True)))
        await caught_up(engine)
        await engine.sleep(mode="wait")
        assert len((await waited_for)[-1].outputs[0].token_ids) == 9 and not await engine.is_paused()
        await engine.wake_up()
        await engine.pause_generation(mode="keep")
        with pytest.raises(VLLMValidationError, match="level"):
            await engine.sleep(level=7, mode="keep")
        assert await engine.is_paused(), "an error ends no pause"
        await engine.resume_generation()
        await settled(engine)

    try:
        run(main())
    finally:
        engine.shutdown()


# The end


def test_shutdown_during_generation() -> None:
    """A7: those who wait get an error, the thread ends, and twice does no harm."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, "p", greedy(50), name)) for name in "ab"]
        await gate.reached()
        runner = llm.llm_engine.model_runner
        llm.shutdown(timeout=0)  # asked for; the step is still held
        gate.open()
        llm.shutdown()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in done] == [EngineDeadError] * 2 and "shut down" in str(done[0])
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm, "p", greedy(1))
        llm.shutdown()
        assert_clean(llm.llm_engine)
        assert llm.llm_engine.model_runner is None and len(runner.plans) == 1

    with serving(gate=gate) as llm:
        run(main(llm))


def test_a_paused_engine_can_be_shut_down() -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.pause_generation(mode="keep")
        task = asyncio.create_task(collect(llm, "p", greedy(50)))
        await caught_up(llm)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await task

    with serving() as llm:
        run(main(llm))


def test_the_garbage_collector_ends_the_thread() -> None:
    """A thread must not keep an engine alive that nobody can reach."""
    llm = AsyncLLM(scripted_engine(TOKENIZER, alphabet))
    engine, thread = weakref.ref(llm.llm_engine), llm._thread._thread
    run(collect(llm, "p", greedy(3)))
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_an_idle_thread_sleeps() -> None:
    """No polling: the loop turns when something is to do, and not in between."""
    turns: list[int] = []
    with serving() as llm:
        can_step = llm._thread._can_step
        llm._thread._can_step = lambda: turns.append(1) or can_step()
        run(collect(llm, "p", greedy(3)))
        run(settled(llm))
        before = len(turns)
        threading.Event().wait(0.05)  # time to turn in
        run(settled(llm))
        assert len(turns) - before <= 4


def test_requests_are_logged_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tutorial_engine"):
        for log_requests in (False, True):
            llm = AsyncLLM(scripted_engine(TOKENIZER, alphabet), log_requests)
            run(collect(llm, "a prompt", greedy(3), "mine"))
            llm.shutdown()
            assert ("Received request mine: prompt 'a prompt', SamplingParams(" in caplog.text) == log_requests


# What a server needs


def test_between_steps() -> None:
    """Called in the engine's thread while no step runs; what it raises comes back, and the engine lives on."""
    gate = Gate()

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm, "p", greedy(3)))
        await gate.reached()
        looked = asyncio.create_task(llm.run_between_steps(lambda: (
            threading.current_thread().name, llm.llm_engine.scheduler.running[0].num_output_tokens)))
        await asyncio.sleep(0)
        gate.step()
        assert await looked == ("AsyncLLM", 1)
        gate.open()
        assert (await task)[-1].outputs[0].text == "abc"
        with pytest.raises(ValueError, match="mine"):
            await llm.run_between_steps(int, "mine")

    with serving(gate=gate) as llm:
        run(main(llm))


def test_texts(tiny_model: Path, llm: LLM) -> None:
    """Tokens, texts and conversations as the synchronous engine sees them, beside the engine's thread."""
    async def main(async_llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "he"}]
        rendered = await async_llm.render_chat(messages)
        ids = await async_llm.tokenize(rendered, {"add_special_tokens": False})
        assert ids == llm.chat(messages, greedy(1), use_tqdm=False)[0].prompt_token_ids
        assert await async_llm.tokenize("the") == llm.generate("the", greedy(1), use_tqdm=False)[0].prompt_token_ids
        assert await async_llm.detokenize(ids) == rendered
        assert async_llm.get_default_sampling_params() == llm.get_default_sampling_params()
        with pytest.raises(VLLMValidationError):
            await async_llm.render_chat([])
        with pytest.raises(TypeError):
            await async_llm.tokenize(5)
        async_llm.shutdown()
        with pytest.raises(EngineDeadError):
            await async_llm.tokenize("the")

    run(main(AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(tiny_model), max_model_len=64, num_gpu_blocks_override=9))))


def test_abort_all_and_metrics() -> None:
    async def main(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, "p", greedy(50), name)) for name in "xy"]
        await gate.reached()
        aborting = asyncio.create_task(llm.abort_all())
        await asyncio.sleep(0)
        gate.open()
        await aborting
        assert [(await task)[-1].outputs[0].finish_reason for task in tasks] == ["abort", "abort"]
        counts = {m.labels.get("finished_reason"): m.value for m in llm.get_metrics()
                  if m.name == "vllm:request_success"}
        assert counts == {"abort": 2}
        await settled(llm)

    gate = Gate()
    with serving(gate=gate, disable_log_stats=False) as llm:
        run(main(llm))
