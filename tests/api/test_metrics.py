"""E11, L56: metrics under vLLM's names, and the line in the log."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.api.support import greedy, llm_of, piece_tokenizer, scripted_engine
from tests.core.support import make_engine, make_params
from tutorial_engine import LLM, LLMEngine
from tutorial_engine.exceptions import EngineGenerateError
from tutorial_engine.metrics import Counter, Gauge, Histogram

LETTERS = piece_tokenizer()


def stats_engine(**args: Any) -> LLMEngine:
    return scripted_engine(LETTERS, [70], disable_log_stats=False, **args)


def values(engine: LLM | LLMEngine) -> dict[str, Any]:
    """Metric name -> value, or the whole histogram; several series of one name by their own label."""
    found: dict[str, Any] = {}
    for m in engine.get_metrics():
        own = [v for k, v in m.labels.items() if k not in ("model_name", "engine")]
        found[":".join([m.name.removeprefix("vllm:"), *own])] = m if isinstance(m, Histogram) else m.value
    return found


def test_l56_counts_of_a_small_run() -> None:
    llm = llm_of(stats_engine())
    llm.generate(["abcde", "xy"], [greedy(3), greedy(2)], use_tqdm=False)
    v = values(llm)
    assert (v["prompt_tokens"], v["generation_tokens"], v["num_preemptions"]) == (7, 5, 0)
    assert v["request_success:length"] == 2
    assert (v["num_requests_running"], v["num_requests_waiting"], v["kv_cache_usage_perc"]) == (0, 0, 0.0)
    assert v["time_to_first_token_seconds"].count == 2
    assert v["inter_token_latency_seconds"].count == 3, "tokens that are not the first of their answer"
    assert v["e2e_request_latency_seconds"].count == v["request_time_per_output_token_seconds"].count == 2
    assert v["request_prompt_tokens"].sum == 7 and v["request_generation_tokens"].sum == 5
    assert v["request_generation_tokens"].buckets["2.0"] == 1 and v["request_generation_tokens"].buckets["5.0"] == 2
    assert v["request_params_max_tokens"].sum == 5
    steps = v["iteration_tokens_total"]
    assert (steps.count, steps.sum) == (3, 7 + 2 + 1), "the prompts, then one token each, then the longer one alone"
    assert steps.buckets["8.0"] == steps.count
    parts = [v[f"request_{part}_time_seconds"].sum for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(v["e2e_request_latency_seconds"].sum, abs=1e-6)


def test_l56_kinds_and_labels() -> None:
    metrics = {m.name: m for m in stats_engine().get_metrics()}
    assert isinstance(metrics["vllm:kv_cache_usage_perc"], Gauge)
    assert isinstance(metrics["vllm:prompt_tokens"], Counter), "without Prometheus's _total"
    assert isinstance(metrics["vllm:time_to_first_token_seconds"], Histogram)
    assert metrics["vllm:prompt_tokens"].labels == {"model_name": "smollm2-135m-instruct", "engine": "0"}


def test_l56_without_stats() -> None:
    with pytest.raises(AssertionError, match="Stat logging disabled"):
        llm_of(scripted_engine(LETTERS, [70])).get_metrics()


def test_gauges_in_the_middle_of_a_run() -> None:
    engine = stats_engine(max_num_seqs=2, num_gpu_blocks=21)
    for i in range(3):
        engine.add_request(str(i), "abcdefg", greedy(5))
    engine.step()
    v = values(engine)
    assert (v["num_requests_running"], v["num_requests_waiting"], v["num_requests_waiting_by_reason:capacity"]) == (
        2, 1, 1)
    # 8 tokens each in blocks of 4, the first block of the same prompt shared.
    assert v["kv_cache_usage_perc"] == pytest.approx(3 / 20)


def test_prefix_cache_is_counted_in_tokens() -> None:
    llm = llm_of(stats_engine())
    for _ in range(2):
        llm.generate("abcdefghij", greedy(1), use_tqdm=False)
    v = values(llm)
    assert (v["prefix_cache_queries"], v["prefix_cache_hits"], v["prompt_tokens_cached"]) == (20, 8, 8)
    llm.reset_prefix_cache()
    llm.generate("abcdefghij", greedy(1), use_tqdm=False)
    assert (values(llm)["prefix_cache_queries"], values(llm)["prefix_cache_hits"]) == (30, 8), "counters only grow"


def test_b23_own_blocks_found_after_a_preemption_are_no_hits() -> None:
    """vllm-project/vllm #25780: prompts without a common prefix, in a pool that forces preemption."""
    engine = stats_engine(num_gpu_blocks=11, max_model_len=36)
    for i in range(3):
        engine.add_request(str(i), chr(97 + i) * 12, greedy(20))
    while engine.has_unfinished_requests():
        engine.step()
    v = values(engine)
    assert v["num_preemptions"] > 0 and v["request_num_preemptions"].sum == v["num_preemptions"]
    assert (v["prefix_cache_queries"], v["prefix_cache_hits"]) == (36, 0)
    assert v["generation_tokens"] == 60, "recomputed tokens are not generated twice"


def test_ends_of_all_kinds() -> None:
    def fail(plan: Any) -> None:
        if "boom" in str(list(plan.scheduled)):
            raise RuntimeError

    engine = make_engine(eos_token_id=104, before=fail, disable_log_stats=False)
    engine.add_request("stop", [1, 2], make_params(9, ignore_eos=False))
    engine.add_request("length", [1], make_params(2))
    engine.add_request("abort", [1, 2, 3], make_params(50, n=2, temperature=1.0))
    engine.step()
    engine.abort_request(["abort"])
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("boom", [1], make_params(2))
    with pytest.raises(EngineGenerateError):
        engine.step()
    v = values(engine)
    assert {k: n for k, n in v.items() if k.startswith("request_success")} == {
        "request_success:stop": 1, "request_success:length": 1, "request_success:abort": 2, "request_success:error": 1}
    assert v["request_params_n"].count == 2, "of prompts that were answered"


def test_e11_the_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0")
    caplog.set_level(logging.INFO, "tutorial_engine.metrics")
    engine = stats_engine(max_num_seqs=1)
    engine.add_request("a", "abcdefgh", greedy(2))
    engine.add_request("b", "abcdefgh", greedy(2))
    clock = iter(range(0, 1000, 2))  # two seconds from line to line
    monkeypatch.setattr("tutorial_engine.metrics.time", SimpleNamespace(monotonic=lambda: next(clock) / 2))
    engine.stat_logger._restart_interval()
    engine.step()
    line = caplog.messages[-1]
    assert line.startswith("Engine 000: Avg prompt throughput: ") and "Running: 1 reqs, Waiting: 1 reqs" in line
    assert ", CPU KV cache usage: 1.6%, Prefix cache hit rate: 0.0%" in line and "Preemptions" not in line
    caplog.clear()
    while engine.has_unfinished_requests():
        engine.step()
    assert "Prefix cache hit rate: 25.0%" in caplog.messages[-1], "4 of 8 + 8 tokens"
    computed = [float(m.split("prompt throughput: ")[1].split(" ")[0]) for m in caplog.messages]
    assert sum(n > 0 for n in computed) == 1, "the second prompt was computed in one step of this part"


def test_hit_rate_forgets_old_requests() -> None:
    engine = stats_engine()
    log = engine.stat_logger
    lookups = engine.scheduler.kv_cache_manager.prefix_cache_stats
    for hit in [10] * 600 + [0] * 1000:
        lookups.record(10, hit, preempted=False)
        log._record_state(engine.scheduler)
    assert sum(h for _, _, h in log._recent) == 0 and len(log._recent) == 1000


def test_two_engines_do_not_add_up() -> None:
    first, second = llm_of(stats_engine()), llm_of(stats_engine())
    first.generate("abc", greedy(1), use_tqdm=False)
    assert values(first)["prompt_tokens"] == 3 and values(second)["prompt_tokens"] == 0


def test_e11_no_line_about_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks regularly gets a line for each interval in which something happened, one more that shows the rest,
    and then silence."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0")
    caplog.set_level(logging.INFO, "tutorial_engine")
    engine = stats_engine()
    engine.stat_logger.log_if_due()
    assert not caplog.messages
    engine.add_request("r", "p", greedy(1))
    engine.step()
    for _ in range(3):
        engine.stat_logger.log_if_due()
    rates = [message.split(", ")[1] for message in caplog.messages]
    assert len(rates) == 2 and rates[1] == "Avg generation throughput: 0.0 tokens/s" != rates[0]
