"""Beam search: keep the `beam_width` most likely continuations of a prompt, one token longer at each step.

    beams                 each asked for its 2 x width most likely tokens         the best go on
    "The"       -0.0  ->  "The cat" -1.2   "The dog" -1.5   "The</s>" -4.0    ->  "The cat", "The dog"
                                                             finished, set aside
    "The cat"   -1.2  ->  "The cat sat" -1.9 ...                              ->  ...

It lives outside of the engine, as in vLLM: a step is a batch of ordinary requests for one token with logprobs, one per
beam of every prompt. The prefix cache makes that affordable: the full blocks of a beam are found again, so that only
the last, partly filled block (at most block_size tokens) is computed anew.

Why 2 x width candidates: if up to `width` of them end their beam, enough are left to go on with.

Owns: the search and its records. Does not own: computing anything (`LLM.generate`), its parameters' ranges
(`BeamSearchParams`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.inputs import parse_prompt
from tutorial_engine.logprobs import Logprob
from tutorial_engine.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tutorial_engine.llm import LLM


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: the prompt's ids and the generated ones, the EOS that ended it included.
        logprobs: per generated token, what the model thought at that place (see `CompletionOutput.logprobs`).
        cum_logprob: sum of the generated tokens' log-probabilities.
        text: prompt and generation, special tokens included, without the final EOS (unless asked for); "" from an
            engine with skip_tokenizer_init.
        finish_reason: "stop" (an EOS) or "length" (max_tokens, or the end of the model's context).
        stop_reason: the EOS id; None for "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """What became of one prompt: its `beam_width` best sequences (or all, if there are fewer), the best one first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearchInstance:
    """The state of one prompt's search.

    Attributes:
        extra: other keys of the prompt that each beam passes on (cache_salt).
        num_steps: tokens that may be generated.
        beams: alive, the best one first. completed: ended by an EOS.
    """

    extra: dict[str, Any]
    num_steps: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def get_beam_search_score(tokens: Sequence[int], cumulative_logprob: float, eos_token_id: int | None,
                          length_penalty: float = 1.0) -> float:
    """cum_logprob / length ** length_penalty: since log-probabilities are negative, more penalty favours longer ones.

    The length is vLLM's: all tokens, those of the prompt too, but not a final EOS. (transformers counts the generated
    ones only, the EOS too; with length_penalty=0, or among sequences of one length, that makes no difference.)
    """
    length = len(tokens) - (tokens[-1] == eos_token_id)
    return cumulative_logprob / length ** length_penalty


def beam_search(llm: LLM, prompts: Sequence[Any], params: BeamSearchParams, *, lora_requests: Sequence[Any],
                bar: Callable[..., Any], concurrency_limit: int | None) -> list[BeamSearchOutput]:
    """See `LLM.beam_search`.

    Args:
        lora_requests: one per prompt. bar: makes a progress bar from an iterable and a description.
    """
    _check(llm, params, concurrency_limit)
    instances = [_make_instance(llm, prompt, params, lora) for prompt, lora in zip(prompts, lora_requests, strict=True)]
    size = concurrency_limit or max(1, len(instances))
    for begin in range(0, len(instances), size):
        group = instances[begin:begin + size]
        for step in bar(range(max(i.num_steps for i in group)), "Beam search"):
            live = [i for i in group if i.beams and step < i.num_steps]
            if live:
                _advance(llm, live, params)
    return [_finish(llm, instance, params) for instance in instances]


def _eos_ids(llm: LLM) -> list[int]:
    processor = llm.llm_engine.input_processor
    return [i for i in (processor.eos_token_id, *processor.extra_eos_ids) if i is not None]


def _check(llm: LLM, params: BeamSearchParams, concurrency_limit: int | None) -> None:
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}.")
    args = llm.llm_engine.config.args
    if args.max_logprobs != -1 and args.max_logprobs < 2 * params.beam_width:
        raise VLLMValidationError(
            f"beam_width={params.beam_width} looks at the {2 * params.beam_width} most likely tokens of each beam, "
            f"more than max_logprobs={args.max_logprobs}; ask for less, or build the engine with "
            f"max_logprobs={2 * params.beam_width}.", parameter="beam_width", value=params.beam_width)
    if not args.logprobs_mode.endswith("logprobs"):
        raise VLLMValidationError(f"Beam search adds up log-probabilities, which an engine with logprobs_mode="
                                  f"{args.logprobs_mode!r} does not report; use 'raw_logprobs'.",
                                  parameter="logprobs_mode", value=args.logprobs_mode)
    if concurrency_limit is not None and (not isinstance(concurrency_limit, int) or concurrency_limit < 1):
        raise VLLMValidationError(f"concurrency_limit must be None or at least 1, got {concurrency_limit!r}.",
                                  parameter="concurrency_limit", value=concurrency_limit)


def _make_instance(llm: LLM, prompt: Any, params: BeamSearchParams, lora_request: Any) -> BeamSearchInstance:
    parsed = parse_prompt(prompt)
    engine = llm.llm_engine
    tokens = engine.input_processor.tokenize(parsed, {})
    extra = {key: value for key, value in parsed.items() if key not in ("prompt", "prompt_token_ids")}
    # Where the context ends so do the beams. A prompt that leaves no room is refused by the first step.
    num_steps = max(1, min(params.max_tokens, engine.config.max_model_len - len(tokens)))
    return BeamSearchInstance(extra, num_steps, [BeamSearchSequence(tokens, lora_request=lora_request)])


def _advance(llm: LLM, instances: list[BeamSearchInstance], params: BeamSearchParams) -> None:
    """One more token for every beam of these prompts, all in one batch."""
    beams = [(instance, beam) for instance in instances for beam in instance.beams]
    outputs = llm.generate(
        [{**instance.extra, "prompt_token_ids": beam.tokens} for instance, beam in beams],
        SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature),
        lora_request=[beam.lora_request for _, beam in beams], use_tqdm=False)
    eos_ids = [] if params.ignore_eos else _eos_ids(llm)
    for instance in instances:
        instance.beams = []
    for (instance, beam), output in zip(beams, outputs, strict=True):
        logprobs = output.outputs[0].logprobs[0]
        for token_id, logprob in logprobs.items():
            longer = BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, logprobs], beam.lora_request,
                                        beam.cum_logprob + logprob.logprob)
            if token_id in eos_ids:
                longer.finish_reason, longer.stop_reason = "stop", token_id
                instance.completed.append(longer)
            else:
                instance.beams.append(longer)
    for instance in instances:
        instance.beams = _best(llm, instance.beams, params)


def _best(llm: LLM, beams: list[BeamSearchSequence], params: BeamSearchParams) -> list[BeamSearchSequence]:
    eos_ids = _eos_ids(llm)

    def score(beam: BeamSearchSequence) -> float:
        last = beam.tokens[-1]
        return get_beam_search_score(beam.tokens, beam.cum_logprob, last if last in eos_ids else None,
                                     params.length_penalty)

    return sorted(beams, key=score, reverse=True)[:params.beam_width]


def _finish(llm: LLM, instance: BeamSearchInstance, params: BeamSearchParams) -> BeamSearchOutput:
    for beam in instance.beams:
        beam.finish_reason = "length"
    sequences = _best(llm, [*instance.completed, *instance.beams], params)
    tokenizer = None if llm.llm_engine.tokenizer is None else llm.get_tokenizer()
    for beam in sequences:
        cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        beam.text = tokenizer.decode(beam.tokens[:-1] if cut else beam.tokens) if tokenizer is not None else ""
    return BeamSearchOutput(sequences)
