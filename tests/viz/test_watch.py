"""`watch`: frames while the engine runs, not too many of them; one player at the end; nothing but that in a replay."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import pytest

from tests.api.support import greedy, piece_ids, piece_tokenizer, run_steps, scripted_engine, scripted_llm
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.trace import Trace
from tutorial_engine.viz import batch_occupancy, block_table, watch
from tutorial_engine.viz.picture import Picture

module = sys.modules["tutorial_engine.viz.watch"]  # the package's attribute of that name is the function
LETTERS = piece_tokenizer()
ABC = piece_ids(LETTERS, "a", "b", "c")


class Screen:
    """Stands in for a notebook: what was displayed, and how often each output changed."""

    def __init__(self) -> None:
        self.outputs: list[list[dict[str, str]]] = []
        self.now = 0.0

    def display(self, bundle: dict[str, str], live: bool = False) -> Any:
        states = [bundle]
        self.outputs.append(states)
        return types.SimpleNamespace(update=lambda new, raw: states.append(new)) if live else None


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A notebook that a person looks at; its clock stands still unless a test moves it."""
    screen = Screen()
    monkeypatch.setenv("TUTORIAL_LIVE", "1")
    monkeypatch.setattr(module, "_in_notebook", lambda: True)
    monkeypatch.setattr(module, "_display", screen.display)
    # its clock alone: other threads sleep by that of the process
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: screen.now))
    return screen


def test_each_output_becomes_a_player(screen: Screen) -> None:
    llm = scripted_llm(LETTERS, ABC)
    with watch(llm) as trace:
        llm.generate(["a prompt", "another"], greedy(5, ignore_eos=True), use_tqdm=False)
    assert len(trace) == 5 and llm.llm_engine.listeners == []
    assert len(screen.outputs) == 2
    for states, view in zip(screen.outputs, (block_table, batch_occupancy), strict=True):
        waiting, *frames, last = states
        assert waiting == {"text/plain": "nothing computed yet"}
        assert last == view(trace)._repr_mimebundle_()
        assert len(frames) == 1  # the clock stood still


def test_fifteen_frames_a_second(screen: Screen) -> None:
    engine = scripted_engine(LETTERS, ABC)
    with watch(engine, block_table) as trace:
        engine.add_request("r", "x", greedy(60, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
            screen.now += 0.02  # 50 steps a second
    (states,) = screen.outputs
    frames = states[1:-1]
    assert len(trace) == 60 and 15 <= len(frames) <= 18  # in 1.2 seconds
    for frame, step in zip(frames, range(0, 60, 4)):
        assert frame["text/plain"] == block_table(trace, step).text and f"Step {step}:" in frame["text/plain"]
        assert frame["text/html"].startswith('<div style="min-height: ') and "<script" not in frame["text/html"]


def test_slow_pictures_do_not_slow_the_engine(screen: Screen) -> None:
    """A view that takes a second to draw gets a tenth of the time."""
    def slow(trace: Trace, step: int | None = None) -> Picture:
        screen.now += 1.0
        return block_table(trace, step)

    engine = scripted_engine(LETTERS, ABC)
    with watch(engine, slow):
        engine.add_request("r", "x", greedy(60, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
            screen.now += 0.5  # 30 seconds of work
    assert len(screen.outputs[0]) - 2 in (3, 4)


def test_a_view_that_fails_costs_no_answer(screen: Screen, caplog: pytest.LogCaptureFixture) -> None:
    def broken(trace: Trace, step: int | None = None) -> Picture:
        if step is not None:
            raise ZeroDivisionError
        return block_table(trace)

    engine = scripted_engine(LETTERS, ABC)
    with watch(engine, broken) as trace:
        outputs = run_steps(engine, "x", greedy(3))
    assert outputs[-1].finished and len(trace) == 3 and engine.listeners == []
    assert "listener failed" in caplog.text.lower()
    assert screen.outputs[0][-1] == block_table(trace)._repr_mimebundle_()


def test_what_was_seen_before_an_error_is_shown(screen: Screen) -> None:
    engine = scripted_engine(LETTERS, ABC)
    with pytest.raises(RuntimeError, match="stop"), watch(engine, block_table) as trace:
        engine.add_request("r", "x", greedy(9))
        engine.step()
        raise RuntimeError("stop")
    assert screen.outputs[0][-1] == block_table(trace)._repr_mimebundle_() and engine.listeners == []


def test_nothing_ran(screen: Screen) -> None:
    with watch(scripted_engine(LETTERS, ABC), block_table):
        pass
    assert screen.outputs == [[{"text/plain": "nothing computed yet"}]]


def test_what_cannot_be_watched(screen: Screen) -> None:
    with pytest.raises(TypeError, match="records an LLM, LLMEngine or AsyncLLM, got str"), watch("my-model"):
        pass
    engine = scripted_engine(LETTERS, ABC)
    with pytest.raises(TypeError, match="needs functions that draw a trace"), watch(engine, "block_table"):
        pass
    assert engine.listeners == [] and screen.outputs == []


def test_async_engine(screen: Screen) -> None:
    """The engine's thread paints, and never after the end."""
    async def main(llm: AsyncLLM) -> Trace:
        with watch(llm, block_table) as trace:
            async for _ in llm.generate("x", greedy(7, ignore_eos=True), "r"):
                screen.now += 1.0
        return trace

    llm = AsyncLLM(scripted_engine(LETTERS, ABC))
    try:
        trace = asyncio.run(main(llm))
    finally:
        llm.shutdown()
    assert len(trace) >= 6 and len(screen.outputs[0]) >= 3
    assert "<script" in screen.outputs[0][-1]["text/html"]
    assert all("<script" not in frame["text/html"] for frame in screen.outputs[0][1:-1])


def test_a_late_painter_does_not_paint_over_the_end(screen: Screen) -> None:
    engine = scripted_engine(LETTERS, ABC)
    with watch(engine, block_table):
        run_steps(engine, "x", greedy(2))
        painter = engine.listeners[-1]
    screen.now += 10
    painter()  # the engine's thread was just about to
    assert "<script" in screen.outputs[0][-1]["text/html"]


def test_a_replay_shows_only_the_end(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTORIAL_LIVE", "0")
    engine = scripted_engine(LETTERS, ABC)
    with watch(engine) as trace:
        run_steps(engine, "x", greedy(4))
    assert screen.outputs == [[view(trace)._repr_mimebundle_()] for view in (block_table, batch_occupancy)]


def test_in_a_terminal_it_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTORIAL_LIVE", "1")
    engine = scripted_engine(LETTERS, ABC)
    with watch(engine, block_table) as trace:
        run_steps(engine, "x", greedy(4))
    assert capsys.readouterr().out == repr(block_table(trace)) + "\n"


def test_opens_where_it_is_told(screen: Screen) -> None:
    for start, step in ((2, 2), (-1, 4), (99, 4), (-99, 0)):
        engine = scripted_engine(LETTERS, ABC)
        with watch(engine, block_table, batch_occupancy, start=start) as trace:
            run_steps(engine, "x", greedy(5, ignore_eos=True))
        table, batch = (states[-1] for states in screen.outputs[-2:])
        assert table == block_table(trace, start=step)._repr_mimebundle_() and f"Step {step}:" in table["text/plain"]
        assert batch == batch_occupancy(trace, start=step)._repr_mimebundle_() and f'"at":{step},' in batch["text/html"]


def test_names_are_shown_while_it_runs_and_afterwards(screen: Screen) -> None:
    llm = scripted_llm(LETTERS, ABC)
    llm.generate(["before"], greedy(1), use_tqdm=False)
    with watch(llm, block_table, names=["Ada", "Ben"]) as trace:
        outputs = llm.generate(["a prompt", "another"], greedy(3, ignore_eos=True), use_tqdm=False)
    (states,) = screen.outputs
    assert len(states) == 3 and all("request Ada: 8 tokens" in state["text/plain"] for state in states[1:2])
    assert "request Ben:" in states[-1]["text/plain"] and "request Ada:" in block_table(trace).text
    assert outputs[0].request_id in trace.records[0].tables  # the records keep the ids
    with pytest.raises(TypeError, match="names must be"), watch(llm, names="Ada"):
        pass
