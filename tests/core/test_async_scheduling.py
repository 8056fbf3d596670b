"""Async scheduling: a step is planned and begun before the tokens of the one before are known. Nobody may notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core.support import FakeRunner, FakeTokenizer, assert_clean, make_config, make_params
from tests.core.test_same_tokens import (
    COMPANY,
    NUM_TOKENS,
    PROMPTS,
    generate,
    ids,
    make_llm,
    right,
    save,
    seeded_params,
)
from tutorial_engine import SamplingParams
from tutorial_engine.exceptions import EngineGenerateError
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.model_runner import AsyncModelRunnerOutput, ModelRunnerOutput
from tutorial_engine.request import Request
from tutorial_engine.scheduler import SchedulerOutput

SETTINGS: dict[str, dict[str, Any]] = {
    **COMPANY, "smallest pool": {"num_gpu_blocks_override": 21}, "no prefix caching": {"enable_prefix_caching": False},
    "priority": {"num_gpu_blocks_override": 25, "scheduling_policy": "priority", "max_num_batched_tokens": 24,
                 "scheduler_reserve_full_isl": False}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


def count_steps_ahead(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step from now on, whether it was begun while another was in flight."""
    ahead: list[bool] = []
    execute = engine.model_runner.execute_model

    def counting(plan: SchedulerOutput) -> Any:
        ahead.append(bool(engine._in_flight))
        return execute(plan)

    monkeypatch.setattr(engine.model_runner, "execute_model", counting)
    return ahead


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_greedy_tokens(llama: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    priority = [i % 3 for i in range(len(PROMPTS))] if name == "priority" else None
    with make_llm(llama, async_scheduling=True, **SETTINGS[name]) as llm:
        ahead = count_steps_ahead(llm.llm_engine, monkeypatch)
        assert ids(generate(llm, priority=priority)) == right("llama")
        assert ids(generate(llm, priority=priority)) == right("llama")
        assert sum(ahead) > len(ahead) / 2


@pytest.mark.parametrize("name", COMPANY)
def test_the_same_sampled_tokens_with_and_without_knobs(llama: Path, name: str) -> None:
    """Some of these need the host for each token, and then nobody runs ahead."""
    answers = []
    for ahead in (False, True):
        with make_llm(llama, async_scheduling=ahead, **COMPANY[name]) as llm:
            for _ in range(2):
                answers.append(ids(llm.generate(PROMPTS, seeded_params(), use_tqdm=False)))
                plain = [SamplingParams(seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(NUM_TOKENS)]
                answers[-1] += ids(llm.generate(PROMPTS, plain, use_tqdm=False))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(llama: Path, seed: int) -> None:
    rng = random.Random(seed)
    with make_llm(llama, num_gpu_blocks_override=31, max_num_batched_tokens=20, max_num_seqs=5,
                  async_scheduling=True) as llm:
        engine, alive, got = llm.llm_engine, set(), {}
        todo = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        while todo or engine.has_unfinished_requests():
            while todo and rng.random() < 0.4:
                i = todo.pop()
                alive.add(str(i))
                engine.add_request(str(i), PROMPTS[i], make_params(NUM_TOKENS[i], detokenize=False))
            if alive and rng.random() < 0.1:
                engine.abort_request(alive.pop())
            got.update((o.request_id, o.outputs[0].token_ids) for o in engine.step())
            alive -= {i for i in got if not engine.is_in_use(i)}
        assert len(got) > 5 and all(tokens == right("llama")[int(i)][:len(tokens)] for i, tokens in got.items())
        assert_clean(engine)


class LateRunner(FakeRunner):
    """Its tokens come late, and `fail` may come instead of them."""

    fail: Callable[[SchedulerOutput], None] = staticmethod(lambda plan: None)

    def execute_model(self, plan: SchedulerOutput) -> Any:
        output = super().execute_model(plan)

        class Late(AsyncModelRunnerOutput):
            def __init__(self) -> None:
                pass

            def get_output(inner) -> ModelRunnerOutput:
                self.fail(plan)
                return output

        return Late()


def make_engine(next_token: Callable[[Request], int] | None = None, eos_token_id: int | None = None, **args: Any
                ) -> LLMEngine:
    config = make_config(async_scheduling=True, **args)
    return LLMEngine(config, LateRunner(65, 64, next_token), FakeTokenizer(eos_token_id), 1000, {})


def position(request: Request) -> int:
    """Of the token to be sampled: those in flight count, this one does not."""
    return request.num_tokens + request.num_output_placeholders - 1


def run(engine: LLMEngine) -> dict[str, list[int]]:
    done = {}
    while engine.has_unfinished_requests():
        done.update((o.request_id, o.outputs[0].token_ids) for o in engine.step())
    return done


def test_two_steps_are_in_flight_at_most_and_the_last_token_is_not_computed() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], make_params(3))
    assert len(engine.step()[0].outputs[0].token_ids) == 1 and len(engine._in_flight) == 1
    assert len(run(engine)["a"]) == 3 and not engine._in_flight
    assert [s.start for plan in engine.model_runner.plans for s in plan.scheduled.values()] == [0, 3, 4]


def test_a_stop_is_seen_one_step_late_and_what_came_after_it_is_dropped() -> None:
    engine = make_engine(lambda r: 0 if position(r) == 5 else 9, eos_token_id=0)
    engine.add_request("a", [1, 2, 3], make_params(9, ignore_eos=False))
    assert run(engine)["a"] == [9, 9, 0]
    assert len(engine.model_runner.plans) == 4 and len(engine._in_flight) == 1, "one step too many"
    engine.add_request("b", [4, 5], make_params(2))
    assert run(engine)["b"] == [9, 9]
    assert_clean(engine)


def test_an_aborted_request_leaves_the_step_in_flight_alone() -> None:
    engine = make_engine()
    for i in "ab":
        engine.add_request(i, [1, 2, 3], make_params(4))
    engine.step()
    (last,) = engine.abort_request("a")
    assert last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) == 1
    assert run(engine).keys() == {"b"}
    assert_clean(engine)


def test_who_watches_sees_one_step_at_a_time() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], make_params(5))
    seen = []
    engine.listeners.append(lambda scheduler, plan, tables, kept: seen.append(
        (next(iter(plan.scheduled.values())).start, scheduler.running and scheduler.running[0].num_computed_tokens)))
    while engine.has_unfinished_requests():
        engine.step()
        assert not engine._in_flight
    assert seen == [(0, 3), (3, 4), (4, 5), (5, 6), (6, [])]


def test_a_step_that_fails_late_takes_the_one_begun_after_it_along() -> None:
    engine = make_engine()
    for i in "ab":
        engine.add_request(i, [1, 2, 3], make_params(9))
    engine.step()

    def fail(plan: SchedulerOutput) -> None:
        raise RuntimeError("no memory")

    engine.model_runner.fail = fail
    with pytest.raises(EngineGenerateError, match="no memory") as caught:
        engine.step()
    assert caught.value.request_ids == ["a", "b"] and not engine._in_flight
    assert_clean(engine)
    assert engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block == {}
    engine.model_runner.fail = lambda plan: None
    engine.add_request("c", [1, 2, 3], make_params(2))
    assert len(run(engine)["c"]) == 2


def test_a_failure_that_concerns_nobody_any_more_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], make_params(9))
    engine.step()
    engine.abort_request("a")

    def fail(plan: SchedulerOutput) -> None:
        if any(i.startswith("a") for i in plan.scheduled):
            raise RuntimeError("no memory")

    engine.model_runner.fail = fail
    engine.add_request("b", [1, 2, 3], make_params(2))
    engine.listeners.append(lambda *step: None)  # so that nothing is begun before the failure is known
    with caplog.at_level("ERROR", logger="tutorial_engine"):
        assert engine.step() == []
    assert "all ended already" in caplog.text
    assert len(run(engine)["b"]) == 2
    assert_clean(engine)


def test_preempted_by_a_reset_while_a_token_is_in_flight() -> None:
    """It waits for that token, and goes on after it."""
    engine = make_engine(lambda r: 100 + position(r))
    engine.add_request("a", [1, 2, 3], make_params(4))
    engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert run(engine)["a"] == [103, 104, 105, 106]
    assert_clean(engine)


def test_who_ended_meanwhile_takes_no_other_ones_logprobs(llama: Path) -> None:
    """A step in flight whose second row asks for logprobs, and whose first row ends before it is in the books."""
    said = []
    for ahead in (False, True):
        with make_llm(llama, async_scheduling=ahead) as llm:
            engine, values = llm.llm_engine, {}
            engine.add_request("plain", PROMPTS[3], make_params(3, detokenize=False))
            engine.step()
            engine.add_request("asks", PROMPTS[5], make_params(3, detokenize=False, logprobs=2))
            while engine.has_unfinished_requests():
                values.update((o.request_id, o.outputs[0]) for o in engine.step())
            asks = values["asks"]
            assert all(token in entry for token, entry in zip(asks.token_ids, asks.logprobs, strict=True))
            said.append([{t: round(e.logprob, 3) for t, e in entry.items()} for entry in asks.logprobs])
    assert said[0] == said[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_last_full_block_of_an_answer_is_found_by_the_next_turn(ahead: bool) -> None:
    config = make_config(async_scheduling=ahead)
    engine = LLMEngine(config, (LateRunner if ahead else FakeRunner)(65, 64, lambda r: 9), FakeTokenizer(), 1000, {})
    engine.add_request("a", [1, 2, 3], make_params(2))
    run(engine)
    engine.add_request("b", [1, 2, 3, 9, 9, 5], make_params(1))
    output = None
    while engine.has_unfinished_requests():
        output = (engine.step() or [output])[0]
    assert output.num_cached_tokens == 4


def test_nobody_is_preempted_for_blocks_that_come_back_with_the_step_in_flight() -> None:
    """Six blocks: "a" ends in flight with three, "b" needs a fourth."""
    engine = LLMEngine(make_config(24, async_scheduling=True, disable_log_stats=False, num_gpu_blocks_override=7,
                                   scheduler_reserve_full_isl=False),
                       LateRunner(7, 24, lambda r: 9), FakeTokenizer(), 1000, {})
    engine.add_request("a", list(range(10)), make_params(3))
    engine.add_request("b", list(range(50, 60)), make_params(6))
    assert {i: len(ids) for i, ids in run(engine).items()} == {"a": 3, "b": 6}
    assert not any(plan.preempted for plan in engine.model_runner.plans)
    assert "last step computed 1 of" in repr(engine)
    (preemptions,) = (m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
    assert preemptions == 0
