"""The simulation: the real scheduler's decisions, a clock that is the same everywhere."""

import pytest

from tests.core.support import make_engine, make_params
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.simulation import Job, simulate, step_seconds, workload
from tutorial_engine.trace import Trace
from tutorial_engine.viz import request_times


def test_it_decides_as_the_engine_does() -> None:
    """The same requests through the whole engine, with a fake model: the same steps, tables and preemptions."""
    jobs = workload(9, (6, 30), (4, 20), prefix_tokens=6, seed=3)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    simulated = simulate(jobs, num_blocks=14, block_size=4, **limits)
    engine = make_engine(14, max(j.prompt_tokens + j.output_tokens for j in jobs), block_size=4, **limits,
                         next_token=lambda request: 900 - int(request.request_id.partition("-")[0]))
    with Trace(engine) as real:
        for i, job in enumerate(jobs):
            prompt = [*range(job.prefix_tokens), *[100 + i] * (job.prompt_tokens - job.prefix_tokens)]
            engine.add_request(str(i), {"prompt_token_ids": prompt}, make_params(job.output_tokens), arrival_time=0.0)
        while engine.has_unfinished_requests():
            engine.step()
    assert sum(len(r.preempted) for r in real) > 1 and any(n for r in real for n in r.cached.values())
    for fields in ("scheduled", "tables", "waiting", "preempted", "finished", "free"):
        assert [getattr(r, fields) for r in simulated] == [getattr(r, fields) for r in real], fields


def test_the_same_jobs_give_the_same_trace() -> None:
    first, second = (simulate(workload(20, rate=9.0, seed=5), max_num_seqs=3) for _ in range(2))
    assert first.records == second.records
    assert first.records != simulate(workload(20, rate=9.0, seed=6), max_num_seqs=3).records


def test_time_is_that_of_the_steps() -> None:
    trace = simulate([Job(100, 3), Job(4, 2, arrival=1.0)], num_blocks=17)
    assert [r.time - r.started for r in trace] == pytest.approx([0.05, 0.02, 0.02, 0.02, 0.02])
    assert [r.started for r in trace] == pytest.approx([0.0, 0.05, 0.07, 1.0, 1.02])  # idle until the second comes
    times = request_times(trace, "seconds")
    assert times["0"].ttft == pytest.approx(0.05) and times["1"].arrived == 1.0
    assert step_seconds(1) == step_seconds(40) == 0.02 and step_seconds(400) == pytest.approx(0.2)
    twice = simulate([Job(4, 2)], seconds=lambda tokens: 2.0 * tokens)
    assert [r.time for r in twice] == [8.0, 10.0]


def static_steps(lengths: list[int], batch: int) -> int:
    return sum(max(lengths[i:i + batch]) for i in range(0, len(lengths), batch))


def continuous_steps(lengths: list[int], batch: int) -> int:
    """Brute force: in each step everybody in the batch gets a token, and free seats are taken at once."""
    todo, seats, steps = list(lengths), [], 0
    while todo or seats:
        while todo and len(seats) < batch:
            seats.append(todo.pop(0))
        seats = [left - 1 for left in seats if left > 1]
        steps += 1
    return steps


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_static_and_continuous_batching(batch: int, seed: int) -> None:
    jobs = workload(17, (3, 9), (1, 25), seed=seed)
    lengths = [job.output_tokens for job in jobs]
    sizes = {"num_blocks": 65, "max_num_seqs": batch, "max_num_batched_tokens": 4096}
    static, continuous = simulate(jobs, static=True, **sizes), simulate(jobs, **sizes)
    assert len(static) == static_steps(lengths, batch)
    assert len(continuous) == continuous_steps(lengths, batch)
    if batch > 1:
        assert len(continuous) < len(static)
        assert any("static batching: the batch has left" in r.waiting.values() for r in static)


def test_equal_lengths_gain_nothing() -> None:
    jobs = [Job(5, 7)] * 8
    assert len(simulate(jobs, static=True, max_num_seqs=4)) == len(simulate(jobs, max_num_seqs=4)) == 14


def test_a_batch_boards_over_several_steps_before_it_leaves() -> None:
    trace = simulate([Job(40, 3)] * 2, static=True, max_num_seqs=2, max_num_batched_tokens=64)
    assert [sorted(r.scheduled) for r in trace.records[:2]] == [["0", "1"], ["0", "1"]]


def test_chunks_keep_the_others_going() -> None:
    """C2: a long prompt that comes while others write. The largest step is the longest pause of those who write."""
    jobs = [*[Job(4, 40)] * 4, Job(1024, 4, arrival=0.2)]
    pauses = {}
    for budget in (2048, 256, 64):
        trace = simulate(jobs, num_blocks=129, max_num_batched_tokens=budget)
        times = request_times(trace, "seconds")
        pauses[budget] = max(max(times[str(i)].itl) for i in range(4))
        assert max(r.budget - r.budget_left for r in trace) == min(budget, 1028)
    assert pauses[2048] > 4 * pauses[256] * 0.9 > pauses[64]


def test_priority() -> None:
    jobs = [Job(8, 4, priority=5), Job(8, 4, priority=5), Job(8, 4, priority=1)]
    done = [i for r in simulate(jobs, max_num_seqs=1, scheduling_policy="priority") for i in r.finished]
    assert done == ["2", "0", "1"]


def test_workloads() -> None:
    jobs = workload(200, (5, 9), (2, 3), rate=10.0, prefix_tokens=7)
    assert {j.prompt_tokens for j in jobs} == {5, 6, 7, 8, 9} and {j.output_tokens for j in jobs} == {2, 3}
    assert all(j.prefix_tokens == min(7, j.prompt_tokens) for j in jobs)
    arrivals = [j.arrival for j in jobs]
    assert arrivals == sorted(arrivals) and 15 < arrivals[-1] < 27  # 200 at ten a second
    assert {j.arrival for j in workload(5)} == {0.0}
    assert jobs[:3] == workload(3, (5, 9), (2, 3), rate=10.0, prefix_tokens=7)


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="A job of 100 tokens needs 7 blocks of 16, and the pool has 6"):
        simulate([Job(60, 40)], num_blocks=7)
    simulate([Job(60, 36)], num_blocks=7)  # just fits
    for numbers in ((0, 1), (1, 0), (3, 1, 0.0, 4)):
        with pytest.raises(ValueError, match="A job needs at least one"):
            Job(*numbers)
    with pytest.raises(ValueError, match="rate must be"):
        workload(3, rate=0)
    with pytest.raises(VLLMValidationError, match="max_num_seqs"):
        simulate([Job(1, 1)], max_num_seqs=0)
    assert len(simulate([])) == 0
