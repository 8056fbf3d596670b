"""Custom logits processors (rows P13, P9, S27, S32, L31): the interface, the rows, the order, and what goes wrong.

The slow twin of the row bookkeeping is `Replay`: it follows each update on a dictionary, checks that every instruction
makes sense at that moment, and compares with the rows that the step really has.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.support import greedy, llm_of, piece_tokenizer, run_steps, save_tiny_model, scripted_engine, scripted_llm
from tests.core.support import assert_clean, make_request
from tutorial_engine import LLM, EngineArgs, LLMEngine, SamplingParams
from tutorial_engine.exceptions import EngineGenerateError, VLLMValidationError
from tutorial_engine.logits_processor import RowTracker, process_dict_updates
from tutorial_engine.request import Request
from tutorial_engine.scheduler import SchedulerOutput
from tutorial_engine.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

TOKENIZER = piece_tokenizer()
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
INF = float("inf")


def replay(rows: dict[int, Any], update: BatchUpdate) -> None:
    """Follow an update by the letter; each instruction must fit the rows as they are at that moment."""
    largest = max(len(rows), update.batch_size)
    for row in update.removed:
        del rows[row]
    for row, *what in update.added:
        assert row not in rows and row < largest
        rows[row] = tuple(what)
    for i, j, direction in update.moved:
        if direction == MoveDirectionality.SWAP:
            rows[i], rows[j] = rows[j], rows[i]
        else:
            assert j not in rows and j < largest
            rows[j] = rows.pop(i)
    assert sorted(rows) == list(range(update.batch_size))


class Processor(LogitsProcessor):
    """Does nothing; the tests override what they need. `made` is the last object."""

    made: Any = None
    invariant = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.args = (vllm_config, device, is_pin_memory)
        self.seen: list[torch.Tensor] = []
        self.rows: dict[int, Any] = {}
        type(self).made = self

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits.clone())
        return logits

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            replay(self.rows, batch_update)


class Force(Processor):
    """extra_args={"force": token id}: say only this token."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        value = (sampling_params.extra_args or {}).get("force", 0)
        if not isinstance(value, int):
            raise ValueError(f"force must be a token id, got {value!r}")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (params, _, _) in self.rows.items():
            if (token_id := (params.extra_args or {}).get("force")) is not None:
                logits[row] = -INF
                logits[row, token_id] = 0.0
        return logits


def force(token_id: Any, **kwargs: Any) -> SamplingParams:
    return greedy(extra_args={"force": token_id}, **kwargs)


# The rows

def test_tracker_against_replay() -> None:
    """P13: over random joins, leaves, returns and shuffles, the updates lead to the true rows."""
    rng = random.Random(5)
    tracker, rows = RowTracker(), {}
    pool = [make_request(f"r{i}", 3) for i in range(9)]
    current: list[Request] = []
    kinds = set()
    for _ in range(400):
        if rng.random() < 0.8:
            current = rng.sample(pool, rng.randrange(1, len(pool) + 1))
            if rng.random() < 0.5:
                current.sort(key=lambda r: r.request_id)
        unchanged = [id(v[2]) for _, v in sorted(rows.items())]
        update = tracker.update(current)
        if update is None:
            assert [id(rows[i][2]) for i in range(len(current))] == unchanged
        else:
            replay(rows, update)
            kinds |= {direction for *_, direction in update.moved}
        assert [rows[i] for i in range(len(rows))] == [
            (r.sampling_params, r.prompt_token_ids, r.output_token_ids) for r in current]
        assert tracker._outputs.keys() == {r.request_id for r in current}  # those who left are forgotten
        for request in rng.sample(pool, 4):  # also some that are away
            request.all_token_ids.append(rng.randrange(100))
    assert kinds == set(MoveDirectionality)


def test_tracker_says_nothing_about_an_unchanged_batch() -> None:
    tracker, request = RowTracker(), make_request("a", 3)
    update = tracker.update([request])
    assert update is not None and update.batch_size == 1 and not update.removed and not update.moved
    [(row, params, prompt_ids, live)] = update.added
    assert (row, params, prompt_ids, live) == (0, request.sampling_params, request.prompt_token_ids, [])
    request.all_token_ids.append(42)
    assert tracker.update([request]) is None and live == [42]  # the list is alive


class Replay(Processor):
    """Checks its rows against the plan of the step in every `apply`."""

    plan: SchedulerOutput
    num_added = 0

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        self.num_added += len(batch_update.added) if batch_update else 0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        truth = [s.request for s in self.plan.scheduled.values() if s.samples]
        assert [self.rows[i] for i in range(len(logits))] == [
            (r.sampling_params, r.prompt_token_ids, r.output_token_ids) for r in truth]
        assert [int(row.argmax()) for row in logits] == [2 + r.num_tokens % 90 for r in truth]
        return super().apply(logits)


def replay_engine(**kwargs: Any) -> LLMEngine:
    return scripted_engine(TOKENIZER, lambda request: 2 + request.num_tokens % 90,
                           before=lambda plan: setattr(Replay, "plan", plan), logits_processors=[Replay], **kwargs)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_rows_survive_preemption_aborts_and_chunks(policy: str) -> None:
    """P13: a pool too small for all, prompts in chunks, aborts at any time: the processor is never wrong."""
    rng = random.Random(policy)
    engine = replay_engine(num_gpu_blocks=14, max_num_batched_tokens=8, max_num_seqs=6, scheduling_policy=policy)
    alive: list[str] = []
    for step in range(160):
        if rng.random() < 0.5 and step < 120:
            prompt = [rng.randrange(2, 90) for _ in range(rng.randrange(1, 20))]
            engine.add_request(str(step), prompt, greedy(rng.randrange(1, 20)),
                               priority=rng.randrange(3) if policy == "priority" else 0)
            alive.append(str(step))
        if rng.random() < 0.08 and alive:
            engine.abort_request([alive.pop(rng.randrange(len(alive)))])
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert sum(len(plan.preempted) for plan in engine.model_runner.plans) > 5
    assert_clean(engine)


def test_a_row_lives_on_while_others_are_prefilled() -> None:
    """P13: chunks of another prompt do not disturb a decoding request; each request is added exactly once."""
    engine = replay_engine(max_num_batched_tokens=8)
    engine.add_request("decoding", [5, 6], greedy(20))
    engine.step()
    engine.add_request("long", list(range(2, 40)), greedy(4))
    while engine.has_unfinished_requests():
        engine.step()
    assert Replay.made.num_added == 2 and len(Replay.made.seen) == 20
    assert max(len(p.scheduled) for p in engine.model_runner.plans[:6]) == 2  # they did share steps


def test_dict_updates_against_replay() -> None:
    """The helper for processors that keep a dictionary; None means that a request needs no state."""
    rng = random.Random(7)
    tracker, rows, entries = RowTracker(), {}, {}
    pool = [make_request(f"r{i}", 1 + i) for i in range(7)]
    for _ in range(200):
        update = tracker.update(rng.sample(pool, rng.randrange(1, 8)))
        before = dict(entries)
        changed = process_dict_updates(entries, update, lambda p, prompt, out: len(prompt) if len(prompt) % 2 else None)
        if update is not None:
            replay(rows, update)
        assert entries == {row: len(prompt) for row, (_, prompt, _) in rows.items() if len(prompt) % 2}
        assert changed or entries == before


def test_dict_updates_by_hand() -> None:
    """P13: vLLM may add to a row that is taken, or move onto one; the newcomer replaces what was there."""
    one_way, swap = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
    entries = {0: "a", 1: "b", 2: "c"}
    for update, expected in [
            (None, {0: "a", 1: "b", 2: "c"}),
            (BatchUpdate(3, [], [(1, SamplingParams(), None, [])], []), {0: "a", 2: "c"}),
            (BatchUpdate(2, [], [], [(2, 0, one_way)]), {0: "c"}),
            (BatchUpdate(2, [], [], [(0, 1, swap)]), {1: "c"}),
            (BatchUpdate(1, [], [], [(0, 1, one_way)]), {})]:
        assert process_dict_updates(entries, update, lambda *_: None) == (update is not None)
        assert entries == expected


# What a processor can do

def test_each_request_has_its_own_parameters() -> None:
    """S27, L31: `extra_args` reach the processor, which changes the rows of those who asked and no others."""
    for given in (Force, f"{__name__}:Force"):
        llm = scripted_llm(TOKENIZER, [A], logits_processors=[given])
        outputs = llm.generate(["x"] * 4, [force(B, max_tokens=3), greedy(2), force(C, max_tokens=5), greedy(4)],
                               use_tqdm=False)
        assert [o.outputs[0].text for o in outputs] == ["bbb", "aa", "ccccc", "aaaa"]


def test_real_runner(tmp_path: Path) -> None:
    """L31: through the real model runner; the processor is given the engine's config and device."""
    with LLM(str(save_tiny_model(tmp_path)), logits_processors=[Force], num_gpu_blocks_override=32) as llm:
        plain, forced = llm.generate([[5, 6, 7]] * 2, [greedy(4, ignore_eos=True), force(9, max_tokens=4)],
                                     use_tqdm=False)
        assert forced.outputs[0].token_ids == [9, 9, 9, 9] != plain.outputs[0].token_ids
        config = llm.llm_engine.model_runner.config
        assert Force.made.args == (config, torch.device(config.device), config.device == "cuda")


def test_order() -> None:
    """P9: after bias, penalties and bad words, before temperature, min_p and truncation; in the order given."""
    class First(Processor):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            super().apply(logits)
            return logits * 2  # a new tensor is as good as one that was changed

    class Second(Processor):
        pass

    base = torch.zeros(len(TOKENIZER))
    base[A], base[B], base[C] = 4.0, 3.0, 2.0
    llm = scripted_llm(TOKENIZER, lambda r: base, logits_processors=[First, Second])
    llm.generate("a", SamplingParams(temperature=0.5, top_k=1, min_p=0.5, max_tokens=1, logit_bias={C: 6.0},
                                     repetition_penalty=2.0, bad_words=["b"]), use_tqdm=False)
    expected = base.clone()
    expected[A], expected[B], expected[C] = 2.0, -INF, 8.0
    assert torch.equal(First.made.seen[0][0], expected)
    assert torch.equal(Second.made.seen[0][0], expected * 2)


class Sharpen(Processor):
    """Argmax-invariant: only the best token is left."""

    invariant = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        super().apply(logits)
        return logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True), -INF)


def test_argmax_invariant_processors_spare_greedy_rows() -> None:
    """P13: not called for greedy rows alone; in a mixed batch the greedy rows stay as they were."""
    base = torch.zeros(len(TOKENIZER))
    base[A] = 0.1
    llm = scripted_llm(TOKENIZER, lambda r: base, logits_processors=[Sharpen], logprobs_mode="processed_logits")
    llm.generate(["x", "y"], greedy(3), use_tqdm=False)
    assert Sharpen.made.seen == []
    drawn = SamplingParams(temperature=1.0, max_tokens=20, seed=1, logprobs=2)
    for params in ([greedy(20, logprobs=2), drawn], [drawn, drawn]):
        first, second = (o.outputs[0] for o in llm.generate(["x", "y"], params, use_tqdm=False))
        assert second.token_ids == [A] * 20  # by chance alone this does not happen among a hundred tokens
        assert [v.logprob for v in second.logprobs[0].values()][1] == -INF
        assert [v.logprob for v in first.logprobs[0].values()][1] == (0.0 if params[0] is not drawn else -INF)
    assert all(s.shape == (2, len(TOKENIZER)) for s in Sharpen.made.seen) and len(Sharpen.made.seen) == 40


@pytest.mark.parametrize("mode, expected", [("raw_logprobs", B), ("processed_logprobs", C)])
def test_raw_logprobs_do_not_see_them(mode: str, expected: int) -> None:
    llm = scripted_llm(TOKENIZER, [B], logits_processors=[Force], logprobs_mode=mode)
    [output] = llm.generate("x", force(C, max_tokens=1, logprobs=1), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == [C]
    best = max(completion.logprobs[0].items(), key=lambda item: item[1].logprob)
    assert best[0] == expected and completion.logprobs[0][C].rank == (1 if expected == C else 2)


def test_adapter_for_functions_of_one_request() -> None:
    """P13: `AdapterLogitsProcessor` wraps functions of (output ids, logits) or (prompt ids, output ids, logits)."""
    class Adapter(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return {"count": self.count, "echo": self.echo}.get((params.extra_args or {}).get("do"))

        @staticmethod
        def count(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[B + len(output_ids)] = INF
            return logits

        @staticmethod
        def echo(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            changed = torch.zeros_like(logits)
            changed[prompt_ids[len(output_ids)]] = 1.0
            return changed

    llm = scripted_llm(TOKENIZER, [A], logits_processors=[Adapter])
    outputs = llm.generate(["word"] * 3, [greedy(4, extra_args={"do": "count"}), greedy(3),
                                          greedy(4, extra_args={"do": "echo"})], use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["bcde", "aaa", "word"]


# What is refused

def test_extra_args() -> None:
    """S27: a dict whose integers fit 64 bits, and only where somebody reads it."""
    fine = {"a": [1, {"b": 2**63}], "c": "x"}
    assert SamplingParams(extra_args=fine).extra_args == fine
    for value in ([1], "x", {"a": 2**64}, {"a": [{"b": -(2**63) - 1}]}):
        with pytest.raises(VLLMValidationError, match="^extra_args must") as caught:
            SamplingParams(extra_args=value)
        assert caught.value.parameter == "extra_args"
    engine = scripted_engine(TOKENIZER, [A])
    with pytest.raises(VLLMValidationError, match="custom logits processors only, and this engine has none") as caught:
        engine.add_request("r", "x", force(B))
    assert caught.value.parameter == "extra_args"
    assert_clean(engine)
    assert run_steps(engine, "x", greedy(1, extra_args={}))[-1].finished  # says nothing, so nothing is ignored


def test_validate_params_refuses_one_request() -> None:
    """P13: whatever `validate_params` raises, it costs that request only."""
    engine = scripted_engine(TOKENIZER, [A], logits_processors=[Force])
    engine.add_request("good", "x", force(B, max_tokens=2))
    with pytest.raises(VLLMValidationError, match="Force refuses the parameters: force must be a token id, got 'b'"):
        engine.add_request("bad", "x", force("b"))
    outputs = run_steps(engine, "x", greedy(2))
    assert {o.request_id: o.outputs[0].text for o in outputs if o.finished} == {"good": "bb", "r": "aa"}
    assert_clean(engine)


class Faulty(Processor):
    """Does what `fault` says, once."""

    fault: Any = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        fault, Faulty.fault = Faulty.fault, None
        return fault(logits) if fault else logits


def fail(*_: Any) -> Any:
    raise KeyError("broken")


@pytest.mark.parametrize("fault, message", [
    (fail, "Faulty failed in apply: KeyError: 'broken'"),
    (lambda x: None, r"Faulty must return a torch.float32 tensor of shape \[2, \d+\] on cpu from apply, got None"),
    (lambda x: x[:1], r"got a torch.float32 tensor of shape \[1, \d+\] on cpu"),
    (lambda x: x.double(), "got a torch.float64 tensor"),
    (lambda x: x.fill_(-INF), r"After the logits processor Faulty no token can be chosen in rows \[0, 1\]"),
    (lambda x: x.index_fill_(0, torch.tensor([1]), float("nan")), r"no token can be chosen in rows \[1\]")])
def test_failing_apply_ends_its_step_only(fault: Any, message: str) -> None:
    """P13: the requests of the step end with an error, those that wait are served, and the rows are right again."""
    engine = scripted_engine(TOKENIZER, [A], logits_processors=[Force, Faulty], max_num_seqs=2)
    for i in range(3):
        engine.add_request(str(i), "x", force(B, max_tokens=3))
    engine.step()
    Faulty.fault = fault
    with pytest.raises(EngineGenerateError, match=message):
        engine.step()
    outputs = run_steps(engine, "x", greedy(3))
    assert {o.request_id: o.outputs[0].text for o in outputs if o.finished} == {"2": "bbb", "r": "aaa"}
    assert_clean(engine)


def test_processors_are_not_blamed_for_the_model() -> None:
    """A row that had no choice before them ends as it would without them: here, a model that says NaN."""
    tokens = []
    for processors in (None, [Processor]):
        llm = scripted_llm(TOKENIZER, lambda r: torch.full((len(TOKENIZER),), float("nan")),
                           logits_processors=processors)
        tokens.append(llm.generate("x", greedy(2, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_failing_update_leaves_the_others_consistent() -> None:
    """P13: processors behind the one that failed never heard of that step; `replay` would notice a wrong sequel."""
    class Failing(Processor):
        def update_state(self, batch_update: BatchUpdate | None) -> None:
            super().update_state(batch_update)
            if batch_update and any(params.extra_args for _, params, _, _ in batch_update.added):
                raise ValueError("no")

    engine = scripted_engine(TOKENIZER, [A], logits_processors=[Failing, Processor])
    engine.add_request("0", "x", greedy(9))
    engine.step()
    engine.add_request("1", "x", greedy(9, extra_args={"a": 1}))
    with pytest.raises(EngineGenerateError, match="Failing failed in update_state: ValueError: no"):
        engine.step()
    assert_clean(engine)
    assert run_steps(engine, "x", greedy(3))[-1].outputs[0].text == "aaa"
    assert len(Processor.made.rows) == len(Failing.made.rows) == 1


class NoUpdate(LogitsProcessor):
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False


@pytest.mark.parametrize("given, message", [
    (Force, "must be a list of classes"), ("pkg:Class", "must be a list of classes"),
    ([int], r"must hold subclasses of LogitsProcessor .* got <class 'int'>"),
    ([Force(None, torch.device("cpu"), False)], "the classes, not objects of them"),
    ([NoUpdate], "NoUpdate must define __init__, update_state"),
    (["no_colon"], "names a class as 'package.module:Class', got 'no_colon'"),
    (["no.such.module:Class"], "'no.such.module:Class' cannot be imported: ModuleNotFoundError"),
    (["json:NoClass"], "cannot be imported: AttributeError"), (["json:JSONDecoder"], "must hold subclasses")])
def test_not_a_processor(given: Any, message: str) -> None:
    """L31: said when the engine is built, before a model is loaded."""
    with pytest.raises(VLLMValidationError, match=f"^logits_processors.*{message}") as caught:
        EngineArgs(logits_processors=given)
    assert caught.value.parameter == "logits_processors"


def test_none_at_all() -> None:
    """L31: None and an empty list are the same."""
    assert EngineArgs().logits_processors is None
    for none in (None, []):
        engine = scripted_engine(TOKENIZER, [A], logits_processors=none)
        assert llm_of(engine).generate("x", greedy(2), use_tqdm=False)[0].outputs[0].text == "aa"


def test_import_paths() -> None:
    """P13: vLLM's module paths."""
    from tutorial_engine.v1.sample.logits_processor import builtin
    assert builtin.process_dict_updates is process_dict_updates
