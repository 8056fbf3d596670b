"""Metrics: what a running engine tells about itself, under vLLM's names.

    output processor -- IterationStats (what one step delivered) --+--> StatLogger --> Prometheus registry
    scheduler        -- queues, pool, prefix cache ----------------+        |          (get_metrics, /metrics)
                                                                            +--> one line in the log every 10 s

Gauges say what is (requests running), counters what has been (tokens generated), histograms how it was spread (time to
first token). Counting costs a few microseconds a step; an engine with disable_log_stats=True does not count at all.

Owns: names, buckets, the log line. Does not own: when things happen (`output_processor.py`), the HTTP route.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tutorial_engine.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from tutorial_engine.block_manager import PrefixCacheStats
    from tutorial_engine.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

HIT_RATE_REQUESTS = 1000  # the log line's hit rate looks at this many recent requests

# Upper edges in seconds. vLLM's, with finer steps below: a small model on a GPU answers in a millisecond.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                    480.0, 960.0, 1920.0, 7680.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


# ---------------------------------------------------------------------- what get_metrics() returns


@dataclass
class Metric:
    """One series: a metric's name (without Prometheus's `_total`) and its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """The state now."""

    value: float


@dataclass
class Vector(Metric):
    """Counters with a position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """How values were spread: `buckets` maps an upper edge to the number of values not above it."""

    count: int
    sum: float
    buckets: dict[str, int]


# ---------------------------------------------------------------------- what a step delivered


@dataclass
class FinishedRequestStats:
    """One request that ended. Times in seconds; a request that was never scheduled, or has no token, has less to
    tell: what is unknown is None."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_preemptions: int
    e2e_latency: float
    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None
    inference_time: float | None


@dataclass
class IterationStats:
    """One step, as its consumers saw it.

    Attributes:
        num_prompt_tokens: prompts that gave their first token in this step; num_cached_tokens: those of them that the
            prefix cache held. num_generation_tokens: new tokens.
        time_to_first_tokens, inter_token_latencies: seconds, one each per token.
        finished: requests that ended. num_completions: n of the prompts that ended.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    num_completions: list[int] = field(default_factory=list)


class StatLogger:
    """Counts, and now and then says so in the log.

    Args:
        model_name: the label of all metrics. max_model_len: the last edge of the histograms of lengths.

    Attributes:
        registry: of this engine alone, so that two engines in one notebook do not add up.
    """

    def __init__(self, model_name: str, max_model_len: int, device: str) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise VLLMValidationError(
                "disable_log_stats=False needs the package prometheus_client: pip install prometheus_client.",
                parameter="disable_log_stats", value=False) from None
        self._prometheus = prometheus_client
        self.registry = prometheus_client.CollectorRegistry()
        self.device = "CPU" if device == "cpu" else "GPU"
        self._labels = {"model_name": model_name, "engine": "0"}
        lengths = _one_two_five(max_model_len)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("num_requests_running", "Requests that own blocks")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue")
        self._waiting_by_reason = gauge("num_requests_waiting_by_reason", "The same, by what they wait for", "reason")
        self._usage = gauge("kv_cache_usage_perc", "Fraction of the blocks in use, 0 to 1")
        self.sleeping = gauge("engine_sleep_state", "1 while the engine sleeps")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that gave a token")
        self._prompt_cached = counter("prompt_tokens_cached", "Those of them that the prefix cache held")
        self._generation = counter("generation_tokens", "Generated tokens")
        self._queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = counter("prefix_cache_hits", "Tokens found there")
        self._preemptions = counter("num_preemptions", "Requests that lost their blocks")
        self._success = counter("request_success", "Requests that ended", "finished_reason")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "From token to token", _TOKEN_SECONDS)
        self._tpot = histogram("request_time_per_output_token_seconds", "A request's mean of those", _TOKEN_SECONDS)
        self._times = {name: histogram(f"{metric}_seconds", text, _REQUEST_SECONDS) for name, metric, text in (
            ("e2e_latency", "e2e_request_latency", "From arrival to the last token"),
            ("queue_time", "request_queue_time", "From arrival to the first step"),
            ("prefill_time", "request_prefill_time", "From the first step to the first token"),
            ("decode_time", "request_decode_time", "From the first token to the last"),
            ("inference_time", "request_inference_time", "From the first step to the last token"))}
        self._sizes = {name: histogram(metric, text, edges) for name, metric, text, edges in (
            ("num_prompt_tokens", "request_prompt_tokens", "Tokens of a prompt", lengths),
            ("num_generation_tokens", "request_generation_tokens", "Tokens of an answer", lengths),
            ("max_tokens", "request_params_max_tokens", "max_tokens as asked for", lengths),
            ("num_preemptions", "request_num_preemptions", "How often a request lost its blocks", (0, 1, 2, 5, 10)))}
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in a step", _STEP_TOKENS)
        self._params_n = histogram("request_params_n", "Completions per prompt", (1, 2, 5, 10, 20))
        self._seen: PrefixCacheStats | None = None
        self._seen_counts = (0, 0, 0)
        self._recent: deque[tuple[int, int, int]] = deque()
        self._interval = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", 10))
        self._idle_intervals = 2  # nothing to say before the first request
        self._state = 0, 0, 0.0  # running, waiting, usage of the cache
        self._restart_interval()

    def record(self, scheduler: Scheduler, plan: SchedulerOutput | None, stats: IterationStats) -> None:
        """Take in a step; `plan` is None if requests ended outside of one (aborted)."""
        self._record_state(scheduler)
        if plan is not None:
            self._step_tokens.observe(plan.total_num_scheduled_tokens)
        num_preemptions = scheduler.take_num_preemptions()
        self._preemptions.inc(num_preemptions)
        self._interval_preemptions += num_preemptions
        self._prompt.inc(stats.num_prompt_tokens)
        self._prompt_cached.inc(stats.num_cached_tokens)
        self._generation.inc(stats.num_generation_tokens)
        self._interval_prompt += stats.num_prompt_tokens - stats.num_cached_tokens  # only what was computed
        self._interval_generation += stats.num_generation_tokens
        for series, values in ((self._ttft, stats.time_to_first_tokens), (self._itl, stats.inter_token_latencies),
                               (self._params_n, stats.num_completions)):
            for value in values:
                series.observe(value)
        for finished in stats.finished:
            self._record_finished(finished)
        self._idle_intervals = 0
        self.log_if_due()

    def _record_state(self, scheduler: Scheduler) -> None:
        waiting = len(scheduler.waiting)
        self._state = len(scheduler.running), waiting, scheduler.kv_cache_manager.usage
        self._running.set(self._state[0])
        self._waiting.set(waiting)
        self._waiting_by_reason.labels(**self._labels, reason="capacity").set(waiting)
        self._usage.set(self._state[2])
        lookups = scheduler.kv_cache_manager.prefix_cache_stats
        if lookups is not self._seen:  # the cache was reset
            self._seen, self._seen_counts = lookups, (0, 0, 0)
            self._recent.clear()
        counts = lookups.requests, lookups.queries, lookups.hits
        requests, queries, hits = (now - before for now, before in zip(counts, self._seen_counts))
        self._seen_counts = counts
        if requests:
            self._queries.inc(queries)
            self._hits.inc(hits)
            self._recent.append((requests, queries, hits))
            while sum(r for r, _, _ in self._recent) - self._recent[0][0] >= HIT_RATE_REQUESTS:
                self._recent.popleft()

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._success.labels(**self._labels, finished_reason=finished.finish_reason).inc()
        for name, series in [*self._times.items(), *self._sizes.items()]:
            if (value := getattr(finished, name)) is not None:
                series.observe(value)
        if finished.decode_time is not None and finished.num_generation_tokens > 1:
            self._tpot.observe(finished.decode_time / (finished.num_generation_tokens - 1))

    def log_if_due(self) -> None:
        """Write the line if the last one is long enough ago; of a long silence, only the beginning."""
        if time.monotonic() - self._interval_began < self._interval:
            return
        if self._idle_intervals > 1:
            self._restart_interval()
        else:
            self.log()
        self._idle_intervals += 1

    def log(self) -> None:
        """Write the line, about the time since the last one."""
        seconds = max(time.monotonic() - self._interval_began, 1e-9)
        running, waiting, usage = self._state
        parts = [f"Engine 000: Avg prompt throughput: {self._interval_prompt / seconds:.1f} tokens/s",
                 f"Avg generation throughput: {self._interval_generation / seconds:.1f} tokens/s",
                 f"Running: {running} reqs", f"Waiting: {waiting} reqs"]
        if self._interval_preemptions:
            parts.append(f"Preemptions: {self._interval_preemptions}")
        parts.append(f"{self.device} KV cache usage: {usage:.1%}")
        if queries := sum(q for _, q, _ in self._recent):
            parts.append(f"Prefix cache hit rate: {sum(h for _, _, h in self._recent) / queries:.1%}")
        _make_visible()
        logger.info(", ".join(parts))
        self._restart_interval()

    def _restart_interval(self) -> None:
        self._interval_began = time.monotonic()
        self._interval_prompt = self._interval_generation = self._interval_preemptions = 0

    def get_metrics(self) -> list[Metric]:
        """All series as plain records."""
        metrics: list[Metric] = []
        for family in self.registry.collect():
            if family.type == "histogram":
                metrics += _read_histograms(family)
                continue
            for s in family.samples:
                if family.type == "gauge":
                    metrics.append(Gauge(family.name, dict(s.labels), s.value))
                elif not s.name.endswith("_created"):
                    metrics.append(Counter(family.name, dict(s.labels), int(s.value)))
        return metrics

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._make(self._prometheus.Counter, name, text, labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._make(self._prometheus.Gauge, name, text, labels)

    def _histogram(self, name: str, text: str, edges: tuple | list) -> Any:
        return self._make(self._prometheus.Histogram, name, text, (), buckets=edges)

    def _make(self, kind: Any, name: str, text: str, labels: tuple[str, ...], **kwargs: Any) -> Any:
        """A metric with the common labels filled in, or one that waits for its own labels."""
        metric = kind(f"vllm:{name}", text, [*self._labels, *labels], registry=self.registry, **kwargs)
        return metric if labels else metric.labels(**self._labels)


def _read_histograms(family) -> list[Metric]:
    """One Histogram from the bucket, count and sum samples of a family."""
    found = Histogram(family.name, {}, 0, 0.0, {})
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            found.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            found.count, found.labels = int(sample.value), dict(sample.labels)
        elif sample.name.endswith("_sum"):
            found.sum = sample.value
    return [found]


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    edges, power = [], 1
    while power <= limit:
        edges += [m * power for m in (1, 2, 5) if m * power <= limit]
        power *= 10
    return edges


def _make_visible() -> None:
    """The line is worth nothing unseen: without any logging set up, it goes to stderr."""
    root = logging.getLogger("tutorial_engine")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
        root.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        root.setLevel(logging.INFO)
