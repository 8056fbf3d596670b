"""Output processor: from sampled ids to `RequestOutput`s.

    step's new ids --> RequestState (one per request: text, logprobs, times) --> CompletionOutput
                                          ParentRequest (one per prompt: n children) --> RequestOutput

Owns: text, logprob records, stop strings, joining n completions. Does not own: stop ids and lengths (`request.py`).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from tutorial_engine.detokenizer import IncrementalDetokenizer
from tutorial_engine.logprobs import Logprob
from tutorial_engine.metrics import FinishedRequestStats, IterationStats
from tutorial_engine.model_runner import ModelRunnerOutput
from tutorial_engine.outputs import CompletionOutput, RequestOutput, RequestStateStats
from tutorial_engine.request import Request, RequestStatus
from tutorial_engine.sampler import LogprobsLists
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.scheduler import SchedulerOutput


class ParentRequest:
    """A prompt and its n completions.

    Args:
        request_id: the user's. prompt: its text, if known. requests: the children, by index.
    """

    def __init__(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.requests = requests
        self.output_kind = requests[0].sampling_params.output_kind
        self.finished: dict[int, CompletionOutput] = {}


class RequestState:
    """What has been said so far by one request."""

    def __init__(self, request: Request, parent: ParentRequest, index: int, tokenizer: Any) -> None:
        self.request, self.parent, self.index = request, parent, index
        params = request.sampling_params
        self.tokenizer = tokenizer if params.detokenize else None
        self.detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params)
        self.token_ids: list[int] = []
        self.num_sent_tokens = 0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing predicts the first prompt token
        self.stats = RequestStateStats(arrival_time=request.arrival_time, queued_ts=time.monotonic())

    def add_logprobs(self, lists: LogprobsLists, row: int) -> None:
        self.logprobs.append(self._logprob_dict(lists, row))
        self.cumulative_logprob += lists.logprobs[row][0]

    def add_prompt_logprobs(self, lists: LogprobsLists, start: int) -> None:
        """Row i is prompt token start + i + 1. Rows computed again after a preemption are known already."""
        for row in range(len(lists.token_ids)):
            if self.prompt_logprobs is not None and len(self.prompt_logprobs) == start + row + 1:
                self.prompt_logprobs.append(self._logprob_dict(lists, row))

    def _logprob_dict(self, lists: LogprobsLists, row: int) -> dict[int, Logprob]:
        """The chosen token with its true rank, then ranks 1, 2, 3 ...; the chosen one is not repeated."""
        ids, values = lists.token_ids[row], lists.logprobs[row]
        entries = {ids[0]: Logprob(values[0], lists.sampled_ranks[row], self._token_text(ids[0]))}
        for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:]), start=1):
            entries.setdefault(token_id, Logprob(value, rank, self._token_text(token_id)))
        return entries

    def _token_text(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode([token_id])
        return "" if text.endswith("\ufffd") else text

    def finished_stats(self, finish_reason: str, now: float) -> FinishedRequestStats:
        """How it went, for the metrics. now: on the `time.monotonic` clock."""
        s = self.stats
        return FinishedRequestStats(
            finish_reason=finish_reason, num_prompt_tokens=self.request.num_prompt_tokens,
            num_generation_tokens=len(self.token_ids), max_tokens=self.request.sampling_params.max_tokens,
            num_preemptions=self.request.num_preemptions, e2e_latency=now - s.queued_ts,
            queue_time=s.scheduled_ts - s.queued_ts if s.scheduled_ts else None,
            prefill_time=s.first_token_ts - s.scheduled_ts if s.first_token_ts else None,
            decode_time=s.last_token_ts - s.first_token_ts if s.first_token_ts else None,
            inference_time=s.last_token_ts - s.scheduled_ts if s.first_token_ts else None)

    def make_completion(self) -> CompletionOutput:
        """A snapshot: later steps do not change what was handed out."""
        finished = self.request.status.is_finished
        delta = self.parent.output_kind == RequestOutputKind.DELTA
        begin = self.num_sent_tokens if delta else 0
        self.num_sent_tokens = len(self.token_ids)
        text = self.detokenizer.get_next_delta(finished) if delta else self.detokenizer.get_text(finished)
        return CompletionOutput(
            index=self.index, text=text, token_ids=self.token_ids[begin:], cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[begin:],
            finish_reason=self.request.status.finish_reason, stop_reason=self.request.stop_reason)


class OutputProcessor:
    """Keeps the states of all unfinished requests.

    Args:
        tokenizer: to make text with. log_stats: whether `RequestOutput.metrics` is filled in.
    """

    def __init__(self, tokenizer: Any, log_stats: bool) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.states: dict[str, RequestState] = {}  # by internal id
        self.iteration_stats = IterationStats()  # of the last step

    def add_parent(self, parent: ParentRequest) -> None:
        for index, request in enumerate(parent.requests):
            self.states[request.request_id] = RequestState(request, parent, index, self.tokenizer)

    def internal_ids(self, request_id: str) -> list[str]:
        """Unfinished requests that belong to the user's `request_id`."""
        return [i for i, state in self.states.items() if state.parent.request_id == request_id]

    def num_unfinished_prompts(self) -> int:
        return len({id(state.parent) for state in self.states.values()})

    def forget(self, internal_ids: list[str], finish_reason: str) -> IterationStats:
        """Drop requests that are ended from outside ("abort", "error"); the numbers about them are returned."""
        now, stats = time.monotonic(), IterationStats()
        for internal_id in internal_ids:
            if state := self.states.pop(internal_id, None):
                stats.finished.append(state.finished_stats(finish_reason, now))
        return stats

    def last_outputs(self, states: list[RequestState]) -> list[RequestOutput]:
        """What requests that were aborted have said."""
        return [output for state in states if (output := self._make_output(state)) is not None]

    def process(self, plan: SchedulerOutput, result: ModelRunnerOutput, kept: dict[str, list[int]]
                ) -> tuple[list[RequestOutput], list[str]]:
        """Take in a step.

        Args:
            kept: internal id -> new tokens, from `Scheduler.update_from_output`.

        Returns:
            (outputs to hand out, internal ids that a stop string ended and that the scheduler must finish).
        """
        now = time.monotonic()
        self.iteration_stats = IterationStats()
        outputs: list[RequestOutput] = []
        stopped: list[str] = []
        for internal_id, scheduled in plan.scheduled.items():
            state = self.states.get(internal_id)
            if state is None:
                continue  # it was ended while the step was in flight
            state.stats.scheduled_ts = state.stats.scheduled_ts or plan.time
            if internal_id in result.prompt_logprobs:
                state.add_prompt_logprobs(result.prompt_logprobs[internal_id], scheduled.start)
        for row, internal_id in enumerate(result.sampled_token_ids):
            if internal_id not in kept:
                continue  # it was ended while the step was in flight
            state, token_ids = self.states[internal_id], kept[internal_id]
            if self._take_tokens(state, token_ids, now):
                stopped.append(internal_id)
            if result.logprobs is not None and state.logprobs is not None and token_ids:
                state.add_logprobs(result.logprobs, row)
            if output := self._make_output(state):
                outputs.append(output)
            if state.request.status.is_finished:
                self.iteration_stats.finished.append(
                    state.finished_stats(state.request.status.finish_reason, now))
                if len(state.parent.finished) == len(state.parent.requests):
                    self.iteration_stats.num_completions.append(len(state.parent.requests))
                del self.states[internal_id]
        return outputs, stopped

    def _take_tokens(self, state: RequestState, token_ids: list[int], now: float) -> bool:
        """Add new tokens to the text. True if a stop string ended a request that the scheduler still runs."""
        request = state.request
        was_finished = request.status.is_finished
        found = state.detokenizer.update(token_ids, request.status == RequestStatus.FINISHED_STOPPED)
        if found:
            # The stop string wins over a length limit that was reached by the same token.
            request.stop_reason, num_kept = found
            request.status = RequestStatus.FINISHED_STOPPED
            token_ids = token_ids[:num_kept]
        state.token_ids += token_ids
        if not token_ids:  # a grammar left no choice
            return False
        stats, step = state.stats, self.iteration_stats
        step.num_generation_tokens += len(token_ids)
        if not stats.first_token_ts:
            stats.first_token_ts = now
            stats.first_token_latency = now - stats.queued_ts
            step.time_to_first_tokens.append(stats.first_token_latency)
            step.num_prompt_tokens += request.num_prompt_tokens
            step.num_cached_tokens += request.num_cached_tokens
        else:
            step.inter_token_latencies.append(now - stats.last_token_ts)
        stats.last_token_ts = now
        stats.num_generation_tokens = len(state.token_ids)
        stats.num_preemptions = request.num_preemptions
        return bool(found) and not was_finished

    def _make_output(self, state: RequestState) -> RequestOutput | None:
        """What the consumer of this request gets now, or None if it only wants the end."""
        parent = state.parent
        finished = state.request.status.is_finished
        if parent.output_kind == RequestOutputKind.FINAL_ONLY:
            if not finished:
                return None
            parent.finished[state.index] = state.make_completion()
            if len(parent.finished) < len(parent.requests):
                return None
            completions = [parent.finished[i] for i in sorted(parent.finished)]
        else:
            completions = [state.make_completion()]
            if finished:
                parent.finished[state.index] = completions[0]
        prompt_logprobs = None if state.prompt_logprobs is None else list(state.prompt_logprobs)
        if parent.output_kind == RequestOutputKind.DELTA:
            state.prompt_logprobs = None  # delivered once
        return RequestOutput(
            request_id=parent.request_id, prompt=parent.prompt, prompt_token_ids=state.request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs, outputs=completions,
            finished=len(parent.finished) == len(parent.requests),
            metrics=dataclasses.replace(state.stats) if self.log_stats else None,
            num_cached_tokens=max(parent.requests[0].num_cached_tokens, 0))  # -1: aborted before it was scheduled
