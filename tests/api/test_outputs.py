"""What comes back: the records, the three kinds of output step by step, n completions, times."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from tests.api.support import greedy, piece_ids, piece_tokenizer, run_steps, scripted_engine
from tests.core.support import assert_clean
from tutorial_engine import CompletionOutput, RequestOutput, SamplingParams
from tutorial_engine.logprobs import Logprob
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LETTERS = piece_tokenizer()
ABC = piece_ids(LETTERS, "a", "b", "c")


def by_seed(request: Request) -> int:
    """Child i (seed i) says a letter of its own, and ends with EOS after 2 + i tokens."""
    return 0 if request.num_output_tokens == 2 + request.seed else ABC[request.seed]


# Records


def test_fields_of_the_records() -> None:
    completion = CompletionOutput(index=0, text="a", token_ids=[1])
    output = RequestOutput("0", "p", [5], None, [completion], False)
    assert (completion.cumulative_logprob, completion.logprobs, completion.finish_reason, completion.stop_reason,
            completion.lora_request) == (None,) * 5
    for name in ("routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"):
        assert getattr(completion, name) is None and name not in repr(completion)
    assert output.metrics is output.lora_request is output.num_cached_tokens is None
    for name in ("encoder_prompt", "encoder_prompt_token_ids", "num_cache_creation_tokens", "prompt_token_id_logprobs",
                 "kv_transfer_params", "ec_transfer_params"):
        assert getattr(output, name) is None and name not in repr(output)
    assert not completion.finished() and dataclasses.replace(completion, finish_reason="stop").finished()
    assert Logprob(-0.5) == Logprob(logprob=-0.5, rank=None, decoded_token=None)


@pytest.mark.parametrize("name", ["text", "token_ids", "finish_reason", "stop_reason", "logprobs", "index"])
def test_the_common_slip_gets_an_answer(name: str) -> None:
    output = RequestOutput("0", "p", [5], None, [], True)
    with pytest.raises(AttributeError, match=rf"has no '{name}'.*output\.outputs\[0\]\.{name}"):
        getattr(output, name)


def test_other_wrong_names() -> None:
    output = RequestOutput("0", "p", [5], None, [], True)
    with pytest.raises(AttributeError, match="RequestOutput has no attribute 'answer'"):
        output.answer  # noqa: B018 - the access is the test
    assert not hasattr(output, "answer")
    assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


# Kinds


def summary(outputs: list[RequestOutput]) -> list[Any]:
    return [(c.index, c.text, c.token_ids, c.finish_reason, o.finished) for o in outputs for c in o.outputs]


@pytest.mark.parametrize("kind, expected", [
    (CUMULATIVE, [("a", ABC[:1]), ("ab", ABC[:2]), ("abc", ABC)]), (DELTA, [("a", ABC[:1]), ("b", ABC[1:2]),
                                                                           ("c", ABC[2:])]),
    (FINAL_ONLY, [("abc", ABC)])])
def test_kinds_of_output(kind: RequestOutputKind, expected: list[tuple[str, list[int]]]) -> None:
    engine = scripted_engine(LETTERS, ABC)
    outputs = run_steps(engine, "xy", greedy(3, output_kind=kind))
    last = len(expected) - 1
    assert summary(outputs) == [(0, text, ids, "length" if i == last else None, i == last)
                                for i, (text, ids) in enumerate(expected)]
    for output in outputs:
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "xy", piece_ids(LETTERS, "x", "y"))
    assert_clean(engine)


@pytest.mark.parametrize("kind, expected", [
    (CUMULATIVE, [(0, "a", 1, None), (1, "b", 1, None), (0, "aa", 2, None), (1, "bb", 2, None), (0, "aa", 3, "stop"),
                  (1, "bbb", 3, None), (1, "bbb", 4, "stop")]),
    (DELTA, [(0, "a", 1, None), (1, "b", 1, None), (0, "a", 1, None), (1, "b", 1, None), (0, "", 1, "stop"),
             (1, "b", 1, None), (1, "", 1, "stop")]),
    (FINAL_ONLY, [(0, "aa", 3, "stop"), (1, "bbb", 4, "stop")])])
def test_kinds_with_several_completions(kind: RequestOutputKind, expected: list[tuple[int, str, int, str | None]]
                                        ) -> None:
    """Streaming: one output per piece of a child, with its index; finished only on the last one's last."""
    engine = scripted_engine(LETTERS, by_seed)
    params = SamplingParams(n=2, seed=0, output_kind=kind)
    engine.add_request("r", "xy", params)
    assert engine.get_num_unfinished_requests() == 1  # the completions of a prompt count once
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [(c.index, c.text, len(c.token_ids), c.finish_reason) for o in outputs for c in o.outputs] == expected
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == 1 if kind == FINAL_ONLY else all(len(o.outputs) == 1 for o in outputs)
    assert {o.request_id for o in outputs} == {"r"}
    assert_clean(engine)


def test_first_completion_may_be_the_last_to_finish() -> None:
    engine = scripted_engine(LETTERS, lambda r: 0 if r.num_output_tokens == 4 - r.seed else ABC[r.seed])
    (output,) = run_steps(engine, "x", SamplingParams(n=3, seed=0, output_kind=FINAL_ONLY))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "aaaa"), (1, "bbb"), (2, "cc")]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_was_handed_out_stays_as_it_is(kind: RequestOutputKind) -> None:
    engine = scripted_engine(LETTERS, ABC, disable_log_stats=False)
    engine.add_request("r", "xy", SamplingParams(n=2, max_tokens=5, logprobs=1, output_kind=kind))
    outputs, copies = [], []
    while engine.has_unfinished_requests():
        new = engine.step()
        outputs += new
        copies += copy.deepcopy(new)
    assert outputs == copies
    outputs[0].outputs[0].token_ids.append(99)
    assert all(99 not in c.token_ids for o in outputs[1:] for c in o.outputs)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_logprobs_of_each_kind(kind: RequestOutputKind) -> None:
    outputs = run_steps(scripted_engine(LETTERS, ABC), "x", greedy(3, logprobs=0, output_kind=kind))
    lengths = [1, 2, 3] if kind == CUMULATIVE else [1, 1, 1]
    assert [len(o.outputs[0].logprobs) for o in outputs] == lengths
    assert list(outputs[-1].outputs[0].logprobs[-1]) == ABC[2:]
    sums = [o.outputs[0].cumulative_logprob for o in outputs]
    assert sums == sorted(sums, reverse=True)  # cumulative in both kinds


# Statistics


def test_no_metrics_unless_asked() -> None:
    assert run_steps(scripted_engine(LETTERS, ABC), "x", greedy(2))[-1].metrics is None


def test_metrics() -> None:
    engine = scripted_engine(LETTERS, ABC, disable_log_stats=False, max_num_batched_tokens=2, max_num_seqs=2)
    outputs = run_steps(engine, "xyz", greedy(3))
    first, last = outputs[0].metrics, outputs[-1].metrics
    assert first.num_generation_tokens == 1 and last.num_generation_tokens == 3 and last.num_preemptions == 0
    assert last.queued_ts <= last.scheduled_ts <= last.first_token_ts <= last.last_token_ts
    assert last.first_token_latency == last.first_token_ts - last.queued_ts >= 0
    assert first.last_token_ts == first.first_token_ts == last.first_token_ts < last.last_token_ts
    assert last.arrival_time > 1e9  # the wall clock


def test_cached_tokens_are_those_of_the_first_scheduling() -> None:
    """A preempted request finds its own blocks again; that says nothing about sharing."""
    engine = scripted_engine(LETTERS, ABC, num_gpu_blocks=9, max_model_len=32, disable_log_stats=False)
    for name in "ab":
        engine.add_request(name, name * 9, greedy(20, ignore_eos=True))
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step()}
    assert sum(o.metrics.num_preemptions for o in done.values()) >= 1
    assert [o.num_cached_tokens for o in done.values()] == [0, 0]
    (again,) = run_steps(engine, "b" * 9, greedy(1))
    assert again.num_cached_tokens == 8
    assert_clean(engine)
