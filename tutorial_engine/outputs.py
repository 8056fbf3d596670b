"""What comes back: one `RequestOutput` per prompt, holding one `CompletionOutput` per completion.

    outputs = llm.generate(prompts)            a list, in the order of the prompts
    outputs[i].outputs[j].text                 the doubled name: prompt i, completion j (j > 0 only if n > 1)

Owns: the two records, their helpful errors, joining two of them. Does not own: filling them (`output_processor.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tutorial_engine.logprobs import PromptLogprobs, SampleLogprobs


@dataclass
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: which of the n completions this is.
        text: the text without the stop string, the stop token and (unless asked for) special tokens.
        token_ids: every generated id, the one that ended it included.
        cumulative_logprob: sum of the chosen tokens' log-probabilities; None unless logprobs were asked for.
        logprobs: one dict per output token; None unless asked for.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS, length and abort.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    # Fields of vLLM's record that need features which this engine does not have: always None here.
    routed_experts: Any = field(default=None, repr=False)
    sampling_mask: Any = field(default=None, repr=False)
    spec_decode_metrics: Any = field(default=None, repr=False)
    weight_versions: Any = field(default=None, repr=False)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add_delta(self, delta: CompletionOutput) -> None:
        """Append what the same completion said next."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestStateStats:
    """When things happened to a request (seconds on the `time.monotonic` clock; `arrival_time` on the wall clock)."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """Everything known about one prompt's request.

    Attributes:
        prompt: the text, or None if the prompt came as token ids.
        prompt_token_ids: what the model really saw: look here when an answer is odd.
        prompt_logprobs: one entry per prompt token, the first None; None unless asked for.
        outputs: the completions, by index.
        num_cached_tokens: prompt tokens found in the prefix cache when the request was first scheduled.
        metrics: timestamps, or None when the engine keeps no statistics.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None
    # As in CompletionOutput: always None here.
    encoder_prompt: str | None = field(default=None, repr=False)
    encoder_prompt_token_ids: list[int] | None = field(default=None, repr=False)
    num_cache_creation_tokens: int | None = field(default=None, repr=False)
    prompt_token_id_logprobs: Any = field(default=None, repr=False)
    kv_transfer_params: dict | None = field(default=None, repr=False)
    ec_transfer_params: dict | None = field(default=None, repr=False)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output of the same request, for a consumer that has not come for this one yet.

        Args:
            aggregate: the completions are deltas, to be joined; else the later one of an index replaces the earlier.
        """
        self.finished = next_output.finished
        self.metrics = next_output.metrics
        self.num_cached_tokens = next_output.num_cached_tokens
        self.prompt_logprobs = next_output.prompt_logprobs or self.prompt_logprobs  # deltas bring them once
        position = {completion.index: i for i, completion in enumerate(self.outputs)}
        for completion in next_output.outputs:
            if completion.index not in position:
                self.outputs.append(completion)
            elif aggregate:
                self.outputs[position[completion.index]].add_delta(completion)
            else:
                self.outputs[position[completion.index]] = completion

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that the record does not have. The most common slip gets an answer.
        if name in CompletionOutput.__dataclass_fields__:
            raise AttributeError(
                f"RequestOutput has no '{name}': a request can have several completions. "
                f"Use output.outputs[0].{name} for the first one.")
        raise AttributeError(f"RequestOutput has no attribute '{name}'.")
