"""The trace: complete, consistent with the scheduler, and the same after a trip through a file."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.api.support import greedy, llm_of, piece_ids, piece_tokenizer, run_steps, scripted_engine
from tutorial_engine import LLM, LLMEngine, SamplingParams
from tutorial_engine.trace import StepRecord, Trace, public_id

LETTERS = piece_tokenizer()
ABC = piece_ids(LETTERS, "a", "b", "c")


def busy_engine() -> LLMEngine:
    """Tiny pool, budget and seats: chunks, waiting, preemption, sharing."""
    return scripted_engine(LETTERS, ABC, num_gpu_blocks=13, max_model_len=32, max_num_batched_tokens=10, max_num_seqs=3)


def add_crowd(engine: LLMEngine) -> None:
    shared = "the same beginning "
    for i in range(4):
        engine.add_request(str(i), shared[:12] + str(i), greedy(14, ignore_eos=True))
    engine.add_request("many", "n completions", SamplingParams(n=2, seed=1, max_tokens=3))


def record_crowd() -> tuple[Trace, list[dict[str, Any]]]:
    """A trace, and what a second listener saw of the scheduler after the same steps."""
    engine, seen = busy_engine(), []

    def look(scheduler: Any, plan: Any, tables: Any, kept: Any) -> None:
        manager = scheduler.kv_cache_manager
        seen.append({"running": [r.request_id for r in scheduler.running],
                     "waiting": [r.request_id for r in scheduler.waiting], "tables": dict(tables),
                     "free": [b.block_id for b in manager.block_pool.free_block_queue.get_all_free_blocks()],
                     "held": {i: manager.get_block_ids(i) for i in manager.req_to_blocks},
                     "preempted": len(plan.preempted), "total": plan.total_num_scheduled_tokens})

    engine.listeners.append(look)
    with Trace(engine) as trace:
        add_crowd(engine)
        while engine.has_unfinished_requests():
            engine.step()
    return trace, seen


def test_sums_are_those_of_the_records() -> None:
    """Counted block by block and span by span. Shared blocks count once, which a sum of table lengths would miss."""
    trace, _ = record_crowd()
    assert trace.tokens_computed == sum(n for record in trace for _, n in record.scheduled.values())
    for record in trace:
        assert record.blocks_held == sum(any(block in table for table in record.tables.values()) for block in range(13))
    assert any(record.blocks_held < sum(map(len, record.tables.values())) for record in trace)
    assert trace.seconds == pytest.approx(sum(record.time - record.started for record in trace))
    assert 0 < trace.seconds <= trace.records[-1].time and Trace().seconds == Trace().tokens_computed == 0


def test_records_agree_with_the_scheduler() -> None:
    trace, seen = record_crowd()
    assert len(trace) == len(seen) == len(list(trace)) > 20
    for i, (record, truth) in enumerate(zip(trace, seen, strict=True)):
        assert record.step == i and record.budget == 10
        assert sum(n for _, n in record.scheduled.values()) == record.budget - record.budget_left == truth["total"] > 0
        assert record.running == [public_id(r) for r in truth["running"]]
        assert list(record.waiting) == [public_id(r) for r in truth["waiting"]]
        assert record.tables == {public_id(r): t for r, t in truth["tables"].items()}
        assert record.free == truth["free"] and len(record.preempted) == truth["preempted"]
        assert not {b for table in truth["held"].values() for b in table} & set(record.free)
    assert sum(len(r.preempted) for r in trace) >= 1
    assert trace.records[-1].running == [] and sorted(trace.records[-1].free) == list(range(1, 13))


def test_records_are_consistent_in_themselves() -> None:
    trace, _ = record_crowd()
    progress: dict[str, int] = {}
    done: set[str] = set()
    times = [r.time for r in trace]
    assert times == sorted(times) and 0 <= times[0] <= times[-1] < 300  # seconds since the recording began
    for record in trace:
        for who, (start, num) in record.scheduled.items():
            assert who not in done and record.lengths[who] == start + num
            table = record.tables[who]
            assert len(table) == -(-record.lengths[who] // trace.block_size) and 0 not in table
            if who in record.cached:
                assert start == record.cached[who] and start % trace.block_size == 0
            else:
                assert start == progress[who]  # goes on where it stood
            progress[who] = start + num
        assert set(record.sampled) <= set(record.scheduled) and all(len(t) == 1 for t in record.sampled.values())
        assert set(record.finished) <= set(record.sampled)
        done |= set(record.finished)
        assert not done & {*record.running, *record.waiting}
        assert set(record.preempted) <= set(record.waiting)
        if record.waiting:  # the head of the queue knows why it waits; those behind it wait for the head
            assert next(iter(record.waiting.values()))
        assert set(record.running) - set(record.preempted) <= set(record.tables)
        assert set(record.hashed) <= set(range(1, trace.num_blocks))
    assert done == {"0", "1", "2", "3", "0_many", "1_many"} and progress["0"] >= 13
    assert {r for record in trace for r in record.finished.values()} == {"length"}
    assert any(record.cached.get("1") for record in trace)  # found the shared beginning


def test_waiting_reasons() -> None:
    engine = scripted_engine(LETTERS, ABC, max_num_seqs=1, max_model_len=32)
    with Trace(engine) as trace:
        for i in range(3):
            engine.add_request(str(i), "x", greedy(1))
        engine.step()
    assert trace.records[0].waiting == {"1": "all 1 seats (max_num_seqs) taken", "2": ""}
    engine.abort_request(["1", "2"])


def test_from_an_llm_and_with_text() -> None:
    llm = llm_of(scripted_engine(LETTERS, [*ABC, 0]))
    with Trace(llm) as trace:
        llm.generate("xy", greedy(9), use_tqdm=False)
    assert [r.sampled for r in trace] == [{"0": [t]} for t in [*ABC, 0]]
    assert [r.finished for r in trace] == [{}, {}, {}, {"0": "stop"}]
    assert trace.num_blocks == 129 and trace.block_size == 4
    assert repr(trace) == "Trace(4 steps, 5 tokens computed, 129 blocks of 4 tokens)"
    llm.generate("xy", greedy(9), use_tqdm=False)
    assert len(trace) == 4  # nobody listens any more


def test_tiny_model(llm: LLM) -> None:
    with Trace(llm) as trace:
        (output,) = llm.generate("hello", greedy(3, ignore_eos=True), use_tqdm=False)
    (name,) = trace.records[0].scheduled
    assert [r.sampled[name][0] for r in trace] == output.outputs[0].token_ids and name == output.request_id


def test_recording_can_go_on_and_ends_after_an_error() -> None:
    engine = scripted_engine(LETTERS, ABC)
    trace = Trace(engine)
    for _ in range(2):
        with trace:
            run_steps(engine, "x", greedy(1))
    assert [r.step for r in trace] == [0, 1]
    with pytest.raises(RuntimeError), trace:
        raise RuntimeError
    assert engine.listeners == []


def test_nothing_is_done_while_nobody_listens() -> None:
    engine = scripted_engine(LETTERS, ABC)
    with mock.patch.object(LLMEngine, "_block_tables") as tables:
        run_steps(engine, "x", greedy(3))
    assert not tables.called


def test_save_and_load(tmp_path: Path) -> None:
    trace, _ = record_crowd()
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(str(tmp_path / "trace.json"))
    assert loaded.records == trace.records and isinstance(loaded.records[0], StepRecord)
    assert (loaded.num_blocks, loaded.block_size) == (trace.num_blocks, trace.block_size)
    with pytest.raises(ValueError, match="belongs to no engine"), loaded:
        pass


def test_a_compressed_file(tmp_path: Path) -> None:
    trace, _ = record_crowd()
    sizes = []
    for name in ("a.json", "a.json.gz", "again.json.gz"):
        trace.save(tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
        assert Trace.load(tmp_path / name).records == trace.records
    assert sizes[1] < sizes[0] / 3
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "again.json.gz").read_bytes()


def test_a_table_in_the_file_is_what_changed(tmp_path: Path) -> None:
    trace, _ = record_crowd()
    trace.save(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())["records"]
    assert all(value not in ({}, []) for entry in written for value in entry.values())
    for entry, before, record in zip(written[1:], trace.records, trace.records[1:], strict=False):
        for request, (kept, *new) in entry.get("tables", {}).items():
            assert before.tables.get(request, [])[:kept] + new == record.tables[request]
            assert len(new) <= 4 or request not in before.tables


GOOD = {"step": 0, "time": 0.5, "budget": 8, "budget_left": 4}


@pytest.mark.parametrize("content", [
    "no json", "[]", "5", "{}", '"text"', '{"version": 2}', "\x1f\x8b no gzip", "NaN",
    *(json.dumps({"version": 2, "num_blocks": 9, "block_size": 4, "records": records}) for records in (
        [{"step": 0}], [5], 7, [GOOD | {"colour": 1}], [GOOD | {"tables": [1]}], [GOOD | {"tables": {"0": 5}}],
        [GOOD | {"step": "first"}], [GOOD | {"budget": None}])),
    json.dumps({"version": 2, "num_blocks": "many", "block_size": 4, "records": []})])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"other\.json is not a trace: Trace\.save\(\) did not write it"):
        Trace.load(path)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.json")


@pytest.mark.parametrize("version", [0, 1, 3, "two"])
def test_other_versions_are_refused(version: Any, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"version": version, "something": "else"}))
    with pytest.raises(ValueError, match=rf"old\.json is a trace of version {version}, and this package reads"):
        Trace.load(tmp_path / "old.json")


def test_who_came_when_and_with_how_much() -> None:
    now = [100.0]
    engine = scripted_engine(LETTERS, ABC, max_num_seqs=1, max_model_len=32)
    with Trace(engine, clock=lambda: now[0]) as trace:
        engine.add_request("first", "xyz", greedy(2), arrival_time=99.0)
        engine.add_request("second", "x", greedy(1), arrival_time=100.5)
        for _ in range(3):
            now[0] += 1
            engine.step()
        engine.add_request("first", "xy", greedy(1), arrival_time=103.0)  # an id may come again
        engine.step()
    assert [r.arrived for r in trace] == [{"first": [-1.0, 3], "second": [0.5, 1]}, {}, {}, {"first": [3.0, 2]}]
    assert [r.time for r in trace] == [1.0, 2.0, 3.0, 3.0]


def test_a_large_pool_costs_no_more_than_a_small_one() -> None:
    """Of the free queue a record says how it begins, of the cached blocks what changed."""
    engine = scripted_engine(LETTERS, ABC, num_gpu_blocks=5001, max_model_len=32)
    with Trace(engine) as trace:
        for name in ("a", "b"):
            run_steps(engine, name * 20, greedy(6, ignore_eos=True), name)
    assert all(r.num_free > 4900 and len(r.free) == 64 for r in trace)
    hashed: set[int] = set()
    for r in trace:
        assert not hashed & set(r.hashed) and set(r.unhashed) <= hashed
        hashed = (hashed | set(r.hashed)) - set(r.unhashed)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert hashed == {b.block_id for b in pool.blocks if b.block_hash is not None} and len(hashed) == 12


def test_public_ids() -> None:
    assert [public_id(i) for i in ("0-0000002a", "my-own-id-00000001", "2_chat-00000003", "plain")] == [
        "0", "my-own-id", "2_chat", "plain"]


def trace_with(*requests: str) -> Trace:
    trace = Trace()
    trace.records = [StepRecord(0, 0.0, 8, 8, running=list(requests[:1]), waiting=dict.fromkeys(requests[1:], ""),
                                preempted=list(requests[-1:]))]
    return trace


@pytest.mark.parametrize(("requests", "called"), [
    (["33", "34", "35"], ["0", "1", "2"]),
    (["34", "33"], ["1", "0"]),
    (["0_7", "1_7", "8"], ["0_0", "1_0", "1"]),
    (["0", "1"], ["0", "1"]),
    (["33", "35"], ["33", "35"]),
    (["33", "chat"], ["33", "chat"]),
    (["0_chat", "1_chat"], ["0_chat", "1_chat"]),
])
def test_requests_of_a_call_are_counted_from_zero(requests: list[str], called: list[str]) -> None:
    trace = trace_with(*requests)
    record = trace.named().records[0]
    assert [*record.running, *record.waiting] == called and record.preempted == called[-1:]
    assert (trace.named() is trace) == (requests == called)


def test_names_that_are_given() -> None:
    trace = trace_with("0_7", "1_7", "8")
    assert trace.named({"7": "Ada", "8": "Ben", "9": "nobody"}).records[0].waiting == {"1_Ada": "", "Ben": ""}
    assert trace.named({"1_7": "Ada"}).records[0].waiting == {"Ada": "", "1": ""}
    assert trace.named(["Ada", "Ben", "Cleo", "Dan"]).records[0].waiting == {"Ben": "", "Cleo": ""}
    for wrong in ("Ada", {"7": 1}, [1], 7):
        with pytest.raises(TypeError, match="names must be"):
            trace.named(wrong)
    with pytest.raises(ValueError, match="more than one would be called 'Ada'"):
        trace.named(["Ada", "Ada"])


def test_names_are_saved(tmp_path: Path) -> None:
    trace = trace_with("33", "34")
    trace.names = ["Ada"]
    trace.save(tmp_path / "named.json")
    loaded = Trace.load(tmp_path / "named.json")
    assert loaded.records == trace.records and loaded.names == ["Ada"]
    assert loaded.named().records == trace.named().records
