"""The timeline: TTFT and ITL are what an event log would say."""

import pytest

from tests.viz.support import crowded_trace, record, trace_of, words
from tutorial_engine.simulation import Job, simulate, workload
from tutorial_engine.viz import request_times, timeline
from tutorial_engine.viz.timeline import RequestTimes


def test_by_hand_in_steps_and_seconds() -> None:
    trace = trace_of(
        record(0, started=1.0, time=1.5, arrived={"a": [-3.0, 6], "b": [1.25, 2]}, scheduled={"a": [0, 4]},
               waiting={"b": "the token budget is spent"}),
        record(1, started=1.5, time=1.75, scheduled={"a": [4, 2], "b": [0, 2]}, sampled={"a": [9], "b": [9]}),
        record(2, started=2.0, time=2.5, scheduled={"a": [6, 1]}, sampled={"a": [9]}, running=["a", "b"]),
        record(3, started=2.5, time=2.75, scheduled={"a": [7, 1], "b": [2, 1]}, sampled={"a": [9], "b": [9, 9]},
               finished={"b": "stop"}))
    assert request_times(trace) == {"a": RequestTimes("a", 0, 0, [2, 3, 4]),
                                    "b": RequestTimes("b", 0, 1, [2, 4, 4], "stop")}
    seconds = request_times(trace, "seconds")
    assert seconds == {"a": RequestTimes("a", 0.0, 1.0, [1.75, 2.5, 2.75]),
                       "b": RequestTimes("b", 1.25, 1.5, [1.75, 2.75, 2.75], "stop")}
    assert (seconds["b"].queued, seconds["b"].ttft, seconds["b"].itl) == (0.25, 0.5, [1.0, 0.0])
    with pytest.raises(ValueError, match="clock must be one of 'steps', 'seconds', got 'hours'"):
        request_times(trace, "hours")


def test_every_token_has_its_time() -> None:
    for trace in (crowded_trace(), simulate(workload(9, rate=20.0), num_blocks=17, max_num_seqs=3)):
        for times in request_times(trace).values():
            assert len(times.tokens) == sum(len(r.sampled.get(times.request, [])) for r in trace)
            assert times.finished == "length" and times.tokens == sorted(times.tokens)
            assert times.ttft == times.tokens[0] - times.arrived
            assert times.ttft + sum(times.itl) == times.tokens[-1] - times.arrived


def test_a_lone_request_gets_a_token_in_each_step() -> None:
    times = request_times(simulate([Job(100, 5)], max_num_batched_tokens=64))["0"]
    assert (times.queued, times.ttft, times.itl) == (0, 2, [1, 1, 1, 1])  # the prompt takes two steps


def test_text_is_a_table() -> None:
    trace = simulate([Job(4, 3), Job(4, 2)], max_num_seqs=1)
    assert timeline(trace).text.splitlines()[1:] == [
        "2 requests in 5 steps; TTFT: median 4, longest 4; ITL: median 1, longest 1",
        "(in steps)",
        "",
        "request  queued  TTFT  longest ITL  tokens  finished",
        "      0       0     1            1       3    length",
        "      1       3     4            1       2    length"]
    assert "in 100 ms; TTFT: median 80 ms" in timeline(trace, -1, clock="seconds").text


def test_a_player_in_seconds_follows_the_clock() -> None:
    trace = simulate([Job(4, 3), Job(400, 2, arrival=0.05)])
    xs = timeline(trace, clock="seconds")._payload["xs"]
    durations = [b - a for a, b in zip(xs, xs[1:])]
    assert len(durations) == len(trace) and max(durations) > 5 * min(durations)  # one step reads the long prompt


def test_those_who_still_wait() -> None:
    trace = trace_of(record(arrived={"a": [0.0, 3]}, waiting={"a": "not enough free blocks"}))
    picture = timeline(trace, 0)
    assert picture.text.splitlines()[-1].split() == ["a", "–", "–", "–", "0", "–"]
    assert words(picture.svg).count("–") == 3
    with pytest.raises(ValueError, match="no step 1"):
        timeline(trace, 1)
