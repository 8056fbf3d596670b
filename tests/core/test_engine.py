"""The loop, driven step by step, and what it does when a part of it fails: nothing of a lost request stays behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.core.support import FakeRunner, assert_clean, make_engine, make_params
from tutorial_engine.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from tutorial_engine.llm_engine import MAX_IDLE_STEPS, LLMEngine, _model_max_len, _read_generation_config
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.request import RequestStatus
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams

FINAL_ONLY, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nobody is left; the last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# Step by step


def test_steps_and_what_they_hand_out() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.add_request("mine", list(range(10)), make_params(2)) == "mine"
    assert engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 1
    assert engine.step() == []  # 8 of 10 prompt tokens: nothing to say yet
    (first,) = engine.step()
    assert (first.request_id, ids(first), first.finished) == ("mine", [[110]], False)
    (last,) = engine.step()
    assert ids(last) == [[110, 111]] and last.finished and last.outputs[0].finish_reason == "length"
    assert ids(first) == [[110]], "what was handed out does not change"
    assert_clean(engine)
    assert engine.step() == []


def test_a_request_that_is_added_while_others_run_joins_them() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], make_params(4))
    engine.step()
    engine.add_request("b", [1, 2, 3], make_params(2))
    assert sorted(output.request_id for output in engine.step()) == ["a", "b"]
    assert {i: ids(o) for i, o in run(engine).items()} == {"a": [[102, 103, 104, 105]], "b": [[103, 104]]}


def test_repr_shows_queues_pool_and_tables() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("a", [1] * 5, make_params(4))
    engine.add_request("b", [2], make_params(4))
    engine.step()
    lines = repr(engine).splitlines()
    assert lines[0] == ("LLMEngine: 1 running, 1 waiting, 62 of 64 blocks free; last step computed 5 of at most 4096 "
                        "tokens")
    assert lines[1:] == [
        "  Request('a-00000000', RUNNING, 5/6 tokens computed, 1 of at most 4 output), blocks [1, 2]",
        "  Request('b-00000001', WAITING, 0/1 tokens computed, 0 of at most 4 output): all 1 seats "
        "(max_num_seqs) taken"]
    engine.close()
    assert repr(engine) == "LLMEngine(closed)"


def test_listeners_see_the_tables_as_the_model_saw_them() -> None:
    engine = make_engine()
    seen = []
    engine.listeners.append(lambda _, plan, tables, kept: seen.append((plan.num_scheduled_tokens, tables, kept)))
    engine.add_request("a", [1] * 5, make_params(1))
    engine.step()
    assert seen == [({"a-00000000": 5}, {"a-00000000": [1, 2]}, {"a-00000000": [105]})]


# Boundaries


def test_a_prompt_of_max_model_len_minus_1_gives_one_token() -> None:
    """B12, E19."""
    engine = make_engine(num_gpu_blocks=9, max_model_len=32)
    engine.add_request("a", [1] * 31, make_params(5))
    output = run(engine)["a"]
    assert ids(output) == [[131]] and output.outputs[0].finish_reason == "length"
    for length in (32, 33):
        with pytest.raises(VLLMValidationError, match="maximum context length is 32") as error:
            engine.add_request("b", [1] * length, make_params(5))
        assert error.value.parameter == "input_tokens"
    assert_clean(engine)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 30, 31])
@pytest.mark.parametrize("budget", [8, 4096])
def test_a_pool_that_can_only_just_hold_one_request(length: int, budget: int) -> None:
    engine = make_engine(num_gpu_blocks=9, max_model_len=32, max_num_batched_tokens=budget)  # 8 blocks of 4
    for i in range(3):
        engine.add_request(str(i), [i] * length, make_params(99))
    right = [[100 + n for n in range(length, 32)]]
    assert {i: ids(o) for i, o in run(engine).items()} == dict.fromkeys("012", right)
    assert_clean(engine)


def test_blocks_of_one_token() -> None:
    engine = make_engine(num_gpu_blocks=9, max_model_len=8, block_size=1)
    for i in range(2):
        engine.add_request(str(i), [1, 2, 3], make_params(4))
    assert all(ids(o) == [[103, 104, 105, 106]] for o in run(engine).values())


# Outputs across preemption, in order and once each


def test_preemption_is_invisible_in_streams() -> None:
    """B16: each token is delivered once, and counted once."""
    engine = make_engine(num_gpu_blocks=13, max_model_len=48, disable_log_stats=False)  # 12 blocks; 2 x 10 are wanted
    for i in "ab":
        engine.add_request(i, [ord(i)] * 20, make_params(20, output_kind=DELTA))
    deltas: dict[str, list[int]] = {"a": [], "b": []}
    preemptions = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            deltas[output.request_id] += output.outputs[0].token_ids
            preemptions[output.request_id] = output.metrics.num_preemptions
            if output.finished:
                assert output.metrics.num_generation_tokens == 20
    assert deltas == dict.fromkeys("ab", [100 + n for n in range(20, 40)])
    assert preemptions["a"] == 0 and preemptions["b"] >= 1


def test_n_completions_come_together_and_in_order() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add_request("a", [1] * 9, SamplingParams(n=3, seed=1, max_tokens=2, output_kind=FINAL_ONLY))
    assert engine.get_num_unfinished_requests() == 1 and len(engine.scheduler.waiting) == 3
    output = run(engine)["a"]
    assert [c.index for c in output.outputs] == [0, 1, 2] and output.finished
    assert_clean(engine)


# Abort


def test_abort_frees_at_once_wherever_the_request_is() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("runs", [1] * 9, make_params())
    engine.add_request("waits", [2] * 9, make_params())
    engine.step()
    engine.abort_request(["runs", "unknown"])
    assert engine.scheduler.kv_cache_manager.usage == 0.0 and engine.get_num_unfinished_requests() == 1
    engine.abort_request(["waits"])
    assert_clean(engine)
    assert engine.step() == []


def test_abort_ends_all_completions_of_a_prompt() -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 9, SamplingParams(n=3, seed=0))
    engine.add_request("b", [1] * 9, make_params(1))
    engine.step()
    engine.abort_request(["a"])
    assert_clean(engine)


def test_a_preempted_request_can_be_aborted() -> None:
    engine = make_engine(num_gpu_blocks=9, max_model_len=32)
    for i in "ab":
        engine.add_request(i, [ord(i)] * 14, make_params(99))
    while not any(r.num_preemptions for r in engine.scheduler.requests.values()):
        engine.step()
    engine.abort_request(["b"])
    assert list(run(engine)) == ["a"]
    assert_clean(engine)


# Errors


class Trap:
    """Raises `error` at call number `at`."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.steps = at, error, 0

    def __call__(self, *args: object) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise self.error


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_failing_model_ends_the_requests_of_its_step_and_no_others(at: int) -> None:
    engine = make_engine(max_num_seqs=1, before=Trap(at, ZeroDivisionError("out of numbers")))
    engine.add_request("a", [1] * 9, make_params(9))
    engine.add_request("b", [1] * 9, make_params(3))
    for _ in range(at - 1):
        engine.step()
    (request,) = engine.scheduler.running or list(engine.scheduler.waiting)[:1]
    with pytest.raises(EngineGenerateError, match="1 request.*ZeroDivisionError: out of numbers") as error:
        engine.step()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert request.status == RequestStatus.FINISHED_ERROR and request.status.finish_reason == "error"
    engine.scheduler.kv_cache_manager.check_invariants()
    assert engine.scheduler.kv_cache_manager.usage == 0.0
    assert {i: ids(o) for i, o in run(engine).items()} == {"b": [[109, 110, 111]]}
    assert_clean(engine)


def test_blocks_of_a_failed_step_are_never_found() -> None:
    engine = make_engine(before=Trap(1, ValueError("no")))
    for attempt in range(2):
        engine.add_request(str(attempt), [1] * 9, make_params(1))
        if attempt == 0:
            with pytest.raises(EngineGenerateError):
                engine.step()
    output = run(engine)["1"]
    assert output.num_cached_tokens == 0 and ids(output) == [[109]]


def test_the_other_completions_of_a_failed_prompt_end_too() -> None:
    """Only two of three were in the step that failed; the third could never be handed out without them."""
    engine = make_engine(max_num_seqs=2, before=Trap(1, ValueError("no")))
    engine.add_request("a", [1] * 9, SamplingParams(n=3, seed=0, output_kind=FINAL_ONLY))
    engine.add_request("b", [1] * 9, make_params(1))
    with pytest.raises(EngineGenerateError, match="3 request"):
        engine.step()
    assert engine.get_num_unfinished_requests() == 1
    assert list(run(engine)) == ["b"]
    assert_clean(engine)


def test_an_interrupt_stays_an_interrupt_and_leaves_a_working_engine() -> None:
    interrupt = KeyboardInterrupt()
    engine = make_engine(before=Trap(2, interrupt))
    engine.add_request("a", [1] * 9, make_params(9))
    engine.step()
    with pytest.raises(KeyboardInterrupt) as raised:
        engine.step()
    assert raised.value is interrupt
    assert_clean(engine)
    engine.add_request("b", [1] * 9, make_params(2))
    output = run(engine)["b"]
    assert ids(output) == [[109, 110]] and output.num_cached_tokens == 8, "step 1 did run: its blocks are good"


def test_waiting_for_ever_becomes_an_error_that_names_the_stuck() -> None:
    engine = make_engine(num_gpu_blocks=17, max_model_len=64)
    engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(15)  # a leak, say
    engine.add_request("a", [1] * 9, make_params())
    for _ in range(MAX_IDLE_STEPS - 1):
        assert engine.step() == []
    with pytest.raises(EngineGenerateError) as error:
        engine.step()
    for part in ("Request('a-00000000', WAITING", "1 of 16 blocks free", "a-00000000: not enough free blocks"):
        assert part in str(error.value)
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    engine.add_request("b", [1] * 3, make_params(1))
    assert list(run(engine)) == ["b"], "what fits goes on"


def test_a_step_that_makes_progress_resets_the_watchdog() -> None:
    engine = make_engine(num_gpu_blocks=17, max_model_len=64)
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.add_request("a", [1] * 9, make_params(9))
    for _ in range(3):
        held = pool.get_new_blocks(pool.get_num_free_blocks())
        for _ in range(MAX_IDLE_STEPS - 1):
            assert engine.step() == []
        pool.free_blocks(held)
        (output,) = engine.step()
        engine.reset_prefix_cache(reset_running_requests=True)
    assert ids(output) == [[109, 110, 111]]


# What is refused at the door


def test_bad_requests_are_refused_and_leave_nothing() -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="request_id must be a string, got int"):
        engine.add_request(1, [1], make_params())
    with pytest.raises(VLLMValidationError, match="LoRA is not enabled"):
        engine.add_request("a", [1], make_params(), lora_request=object())
    with pytest.raises(VLLMValidationError, match="priority scheduling is not enabled"):
        engine.add_request("a", [1], make_params(), priority=1)
    with pytest.raises(VLLMValidationError, match="connector"):
        engine.reset_prefix_cache(reset_connector=True)
    assert_clean(engine)


def test_priority_is_passed_on() -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    engine.add_request("later", [1], make_params(1), priority=2)
    engine.add_request("sooner", [1], make_params(1), priority=-1)
    assert list(run(engine)) == ["sooner", "later"]


# Prefix cache, seen from outside


def test_num_cached_tokens_and_reset() -> None:
    engine = make_engine()

    def cached() -> int:
        engine.add_request("a", [1] * 9, make_params(1))
        return run(engine)["a"].num_cached_tokens

    assert [cached(), cached()] == [0, 8]
    assert engine.reset_prefix_cache() is True
    assert [cached(), cached()] == [0, 8]
    engine.add_request("b", [2] * 9, make_params(3))
    engine.step()
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(reset_running_requests=True) is True
    assert ids(run(engine)["b"]) == [[109, 110, 111]]
    assert cached() == 0


# Close


def test_close_ends_everything_once() -> None:
    engine = make_engine()
    runner: FakeRunner = engine.model_runner
    engine.add_request("a", [1] * 9, make_params())
    engine.add_request("b", [1] * 9, SamplingParams(n=2, seed=0))
    engine.step()
    engine.close()
    engine.close()
    assert runner.closed == 1 and engine.model_runner is None
    assert_clean(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step()
    with pytest.raises(EngineDeadError, match="build a new one"):
        engine.add_request("c", [1], make_params())
    engine.abort_request(["a"])  # harmless


# What the engine reads before it starts


def test_model_max_len_counts_stretched_rope() -> None:
    def length(rope_scaling: dict | None) -> int:
        return _model_max_len(ModelConfig(
            architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=100,
            rope_scaling=rope_scaling))

    assert length(None) == 100
    assert length({"rope_type": "linear", "factor": 2.5}) == 250
    assert length({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}) == 200
    assert length({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 50}) == 100, "Llama 3 declares the stretched length"


def test_generation_config_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    assert _read_generation_config(tmp_path) == {"top_k": 3}
    with pytest.raises(VLLMValidationError, match="without a generation_config.json"):
        _read_generation_config(tmp_path / "nowhere")


# What goes wrong beside the model


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Interrupts as a notebook has them: a job in a shell's background is started with them ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_waits_for_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside the scheduler arrives after the step, whose work is kept."""
    engine = make_engine()
    engine.add_request("a", [1] * 9, make_params(3))
    pool = engine.scheduler.kv_cache_manager.block_pool
    real = pool.get_new_blocks

    def interrupted(num_blocks: int) -> list:
        signal.raise_signal(signal.SIGINT)
        return real(num_blocks)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "get_new_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.scheduler.kv_cache_manager.check_invariants()
    assert {i: ids(o) for i, o in run(engine).items()} == {"a": [[109, 110, 111]]}, "nobody was ended"
    assert_clean(engine)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_inside_the_model_arrives_at_once() -> None:
    reached = []

    def interrupted(plan: object) -> None:
        if not reached:
            reached.append("model")
            signal.raise_signal(signal.SIGINT)
            reached.append("never")

    engine = make_engine(before=interrupted)
    engine.add_request("a", [1] * 9, make_params(3))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert reached == ["model"]
    assert_clean(engine)


def test_interrupts_are_left_alone_in_other_threads_and_where_they_are_ignored() -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 9, make_params(2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.step).result()
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert list(run(engine)) == ["a"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("where", ["schedule", "process"])
def test_after_a_fault_of_its_own_the_engine_starts_anew(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 9, make_params(3))
    engine.add_request("b", [2] * 9, SamplingParams(n=2, seed=1))
    engine.step()
    owner = engine.scheduler if where == "schedule" else engine.output_processor
    monkeypatch.setattr(owner, where, Trap(1, AssertionError("a bug")))
    with pytest.raises(EngineGenerateError, match=r"outside of the model: AssertionError: a bug. All 2 ") as error:
        engine.step()
    assert error.value.request_ids == ["a", "b"]
    assert_clean(engine)
    engine.add_request("c", [1] * 9, make_params(2))
    output = run(engine)["c"]
    assert ids(output) == [[109, 110]] and output.num_cached_tokens == 0
    assert len(engine.model_runner.plans[-2].dropped_req_ids) == 3, "the runner is told to forget the others"


def test_a_failing_listener_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    engine, seen = make_engine(), []
    engine.listeners += [Trap(1, ValueError("no picture")), lambda *args: seen.append(args)]
    engine.add_request("a", [1] * 9, make_params(2))
    assert {i: ids(o) for i, o in run(engine).items()} == {"a": [[109, 110]]}
    assert "no picture" in caplog.text and len(engine.listeners) == 1 and len(seen) == 2


def test_the_errors_name_who_ended() -> None:
    engine = make_engine(max_num_seqs=2, before=Trap(1, ValueError("no")))
    for name in "abc":
        engine.add_request(name, [1], make_params(1))
    with pytest.raises(EngineGenerateError) as error:
        engine.step()
    assert error.value.request_ids == ["a", "b"]


def test_a_plan_still_says_who_sampled_after_the_step() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("a", [1] * 9, make_params(2))
    engine.step()
    (chunk,) = engine.last_plan.scheduled.values()
    engine.step()
    (rest,) = engine.last_plan.scheduled.values()
    assert (chunk.samples, rest.samples) == (False, True)


def test_vllm_config_has_the_numbers() -> None:
    config = make_engine(65, max_num_seqs=3).vllm_config
    assert (config.cache_config.num_gpu_blocks, config.cache_config.block_size) == (65, 4)
    assert (config.scheduler_config.max_num_seqs, config.model_config.max_model_len) == (3, 64)
