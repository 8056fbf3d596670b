"""`SamplingParams`: how a request wants its tokens chosen, and when it wants to stop. `BeamSearchParams` beside it.

Owns: the fields, their defaults and their ranges. Does not own: what the fields do to the logits (`sampler.py`), to the
text (`detokenizer.py`) or to the length of a request (`scheduler.py`). Names, order, defaults and ranges are vLLM's.

    knobs on the distribution      temperature  top_k  top_p  min_p  seed
    knobs on single tokens         presence / frequency / repetition penalty, logit_bias, allowed_token_ids, bad_words
    when to stop                   max_tokens  min_tokens  stop  stop_token_ids  ignore_eos
    what to hand back              n  logprobs  prompt_logprobs  detokenize  skip_special_tokens  output_kind
    a form to keep to              structured_outputs (`StructuredOutputsParams`; done in `structured_outputs.py`)
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import math
import numbers
import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tutorial_engine.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
GREEDY_TEMPERATURE = 1e-5  # below it a request is greedy
FLOAT32_MAX = 3.4028234663852886e38  # what the sampler computes in
MAX_NESTING = 64  # of a structured output's description: compilers work on it recursively

# Keywords people bring from elsewhere, and what to tell them.
_REMOVED = {
    "best_of": "vLLM removed it: ask for n completions and rank them by cumulative_logprob.",
    "use_beam_search": "vLLM moved it out of SamplingParams: call LLM.beam_search with BeamSearchParams.",
    "length_penalty": "It belongs to beam search, which moved out of SamplingParams: see BeamSearchParams.",
    "early_stopping": "It belonged to beam search, which is no longer a sampling parameter and has no such option.",
    "logits_processors": "vLLM has no per-request processors any more; classes are given to the engine: "
                         "LLM(logits_processors=[...]).",
    "guided_decoding": "vLLM renamed it to structured_outputs.",
    "guided_json": "It is structured_outputs=StructuredOutputsParams(json=...) now.",
    "guided_regex": "It is structured_outputs=StructuredOutputsParams(regex=...) now.",
    "guided_choice": "It is structured_outputs=StructuredOutputsParams(choice=...) now.",
    "guided_grammar": "It is structured_outputs=StructuredOutputsParams(grammar=...) now.",
    "max_new_tokens": "It is called max_tokens here.",
    "do_sample": "temperature=0 is greedy; any other temperature samples.",
    "truncate_prompt_tokens": "Pass it in tokenization_kwargs of generate() instead.",
}
_NOT_HERE = {
    "logprob_token_ids", "thinking_token_budget", "repetition_detection", "stream_interval", "flat_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start", "trace_decode_token_ids",
    "watermarking",
}


class RequestOutputKind(Enum):
    """What a streaming consumer receives: everything so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """The form that an output must have: exactly one of the first five or `structural_tag`.

    Args:
        json: JSON schema, as a dict or as text.
        regex: the whole output matches it (syntax of Rust's regex: no look-around, no back references).
        choice: the output is one of these texts.
        grammar: context-free grammar, in Lark's or llama.cpp's (GBNF) notation.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without any white space between its parts.
        disable_additional_properties: JSON objects have no other properties than those that the schema names.
        whitespace_pattern: regex of the white space that is allowed between the parts of JSON.
        structural_tag: free text with tagged parts in it, as JSON: {"triggers": ["<f="], "structures": [{"begin":
            "<f=add>", "schema": {...}, "end": "</f>"}]}.

    Raises:
        VLLMValidationError: none of the constraints, or several. What they hold is checked when a request is added.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        self.constraint()

    def constraint(self) -> tuple[str, Any]:
        """(name, value) of the one constraint that is given."""
        given = [(name, value) for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
                 if (value := getattr(self, name)) is not None]
        if len(given) != 1:
            raise VLLMValidationError(
                "structured_outputs needs exactly one of json, regex, choice, grammar, json_object and structural_tag; "
                f"got {', '.join(name for name, _ in given) or 'none of them'}.", parameter="structured_outputs")
        return given[0]

    def verify(self) -> tuple[str, Any]:
        """Check everything that can be checked without compiling. Returns `constraint()`, with JSON parsed.

        Raises:
            VLLMValidationError: empty, of the wrong type, nested too deeply, or an option that goes with JSON only.
        """
        name, value = self.constraint()
        rule = {"json_object": "must be True or left out", "json": "must be a JSON schema, as a dict or as text",
                "choice": "must be a list of at least one text"}.get(name, "must be text, and not only blanks")
        if name == "choice":
            good = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, str) for v in value)
        elif name == "json_object":
            good = value is True
        elif name == "regex":
            good = isinstance(value, str)  # an empty one describes the empty output
        else:
            good = (isinstance(value, str) and bool(value.strip())) or (name == "json" and isinstance(value, dict))
        if not good:
            _fail(f"structured_outputs.{name}", value, rule)
        value = _parse_json(name, value) if name in ("json", "structural_tag") else value
        if _is_too_deep(value):
            raise VLLMValidationError(f"structured_outputs.{name} is nested more than {MAX_NESTING} levels deep.",
                                      parameter=f"structured_outputs.{name}")
        self._verify_options(name)
        return name, value

    def _verify_options(self, name: str) -> None:
        for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            value = getattr(self, option)
            wanted = (str, type(None)) if option == "whitespace_pattern" else bool
            if not isinstance(value, wanted):
                _fail(f"structured_outputs.{option}", value, "must be text" if wanted is not bool else
                      "must be True or False")
            fits = ("json", "structural_tag") + ("json_object",) * (option != "disable_additional_properties")
            if value not in (None, False) and name not in fits:
                _fail(f"structured_outputs.{option}", value, f"has no meaning for {name}; leave it out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            _fail("structured_outputs.whitespace_pattern", self.whitespace_pattern,
                  "contradicts disable_any_whitespace=True; give one of them")


@dataclass
class SamplingParams:
    """Sampling and stopping parameters of one request.

    Args (the rest is explained by its name and the table above):
        n: completions per prompt; each is a request of its own that shares the prompt's blocks.
        presence_penalty, frequency_penalty: in [-2, 2], over output tokens only.
        repetition_penalty: > 0, over prompt and output tokens; 1 is neutral.
        temperature: 0 for greedy, else in [0.01, 2]; a value in (0, 0.01) is raised to 0.01 with a warning.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: in (0, 1], keep the smallest set of tokens whose probability reaches it.
        min_p: in [0, 1], drop tokens less likely than min_p times the most likely one.
        seed: makes a request reproducible whatever else is in its batch; None draws a seed at admission.
        stop: strings that end the text; the match is cut off unless include_stop_str_in_output.
        max_tokens: at most this many output tokens, 16 unless said; None: up to the context limit.
        extra_args: values for custom logits processors; refused by an engine that has none.
        logprobs, prompt_logprobs: None, -1 (whole vocabulary) or the number of alternatives per position.

    Raises:
        TypeError: unknown keyword.
        VLLMValidationError: a value out of range; `.parameter` names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        # Runs before the generated __init__, so that a wrong keyword gets vLLM's words and a hint.
        for name in kwargs.keys() - {f.name for f in dataclasses.fields(cls)}:
            hint = _REMOVED.get(name, "")
            if name in _NOT_HERE:
                hint = "vLLM has it; this engine does not."
            raise TypeError(f"Unexpected keyword argument '{name}'. {hint}".strip())
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, **kwargs: Any) -> SamplingParams:
        """Build from fields that may be None, as a server does: None becomes the default; logit_bias keys may be
        strings and its values are clamped to [-100, 100]."""
        keep_none = {"max_tokens"}
        given = {k: v for k, v in kwargs.items() if v is not None or k in keep_none}
        if isinstance(bias := given.get("logit_bias"), dict):
            try:
                given["logit_bias"] = {int(k) if isinstance(k, str) else k: min(max(v, -100.0), 100.0)
                                       for k, v in bias.items()}
            except ValueError:
                _fail("logit_bias", bias, "must be a dict from token id to bias")
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = _check_list("stop", self.stop)
        for name in ("stop_token_ids", "bad_words"):
            setattr(self, name, list(dict.fromkeys(_check_list(name, getattr(self, name)))))
        self._verify_sampling()
        self._verify_stopping()
        self._verify_supported()
        if self.seed == -1:
            self.seed = None
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature %s is below %s, where numbers overflow: using %s. Pass 0 for greedy sampling.",
                           self.temperature, MIN_TEMPERATURE, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        if self.greedy:
            # A greedy choice ignores these; resetting them lets the sampler skip their work.
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                _fail("n", self.n, "must be 1 when using greedy sampling (all completions would be the same)")
        if self.skip_reading_prefix_cache is None:
            # A prefix hit would skip the very logits that prompt_logprobs asks for.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify_sampling(self) -> None:
        self._verify_float("presence_penalty", -2.0, 2.0)
        self._verify_float("frequency_penalty", -2.0, 2.0)
        self._verify_float("repetition_penalty", 0.0, FLOAT32_MAX, open_low=True)
        self._verify_float("temperature", 0.0, MAX_TEMPERATURE)
        self._verify_float("top_p", 0.0, 1.0, open_low=True)
        self._verify_float("min_p", 0.0, 1.0)
        self._verify_int("n", 1, int(os.environ.get("VLLM_MAX_N_SEQUENCES", 16384)))
        self._verify_int("top_k", -1)
        self._verify_int("seed", -(2**63), 2**63 - 1, optional=True)
        self._verify_int("logprobs", -1, optional=True)
        self._verify_int("prompt_logprobs", -1, optional=True)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                _fail("logit_bias", self.logit_bias, "must be a dict from token id to bias")
            self.logit_bias = {_check_int("logit_bias", k, 0): _check_float("logit_bias", v, -math.inf, FLOAT32_MAX)
                               for k, v in self.logit_bias.items()}
        if self.allowed_token_ids is not None:
            allowed = _check_list("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                _fail("allowed_token_ids", allowed, "must not be empty: no token could be chosen")
            self.allowed_token_ids = [_check_int("allowed_token_ids", token_id, 0) for token_id in allowed]

    def _verify_stopping(self) -> None:
        self._verify_int("max_tokens", 1, optional=True)
        self._verify_int("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"must not be larger than max_tokens={self.max_tokens}")
        self.stop_token_ids = [_check_int("stop_token_ids", token_id) for token_id in self.stop_token_ids]
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    _fail(name, text, "must hold non-empty strings only")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "must be True or False")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "needs text to look at: set detokenize=True, or stop by stop_token_ids")
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", self.output_kind, "must be a RequestOutputKind")

    def _verify_float(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        setattr(self, name, _check_float(name, getattr(self, name), low, high, open_low))

    def _verify_int(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        if getattr(self, name) is not None or not optional:
            setattr(self, name, _check_int(name, getattr(self, name), low, high))

    def _verify_supported(self) -> None:
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            _fail("structured_outputs", self.structured_outputs, "must be a StructuredOutputsParams")
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict):
                _fail("extra_args", self.extra_args, "must be a dict, of values for custom logits processors")
            _check_extra(self.extra_args)
            self.extra_args = dict(self.extra_args)
        if self.spaces_between_special_tokens is not True:
            _fail("spaces_between_special_tokens", self.spaces_between_special_tokens,
                  "is not in this engine; leave it True")
        if self.skip_reading_prefix_cache not in (None, False, True):
            _fail("skip_reading_prefix_cache", self.skip_reading_prefix_cache, "must be None, True or False")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken at each step."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self) -> SamplingParams:
        """A deep copy, so that a request may be changed without changing its caller's object."""
        return copy.deepcopy(self)


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`; names and defaults are vLLM's.

    Args:
        beam_width: sequences kept at each step, and returned.
        max_tokens: longest generation, in tokens.
        ignore_eos: let a beam go on after an EOS.
        temperature: in [0, 2]. Scores never depend on it. Above 0 each beam also draws a token, as any request does,
            which becomes a candidate if it is not among the beam's 2 * beam_width most likely ones anyway.
        length_penalty: exponent of the length in the score, in [-50, 50]: 0 compares sums of log-probabilities, 1 their
            means; larger values favour longer sequences.
        include_stop_str_in_output: keep the text of the EOS that ended a beam.

    Raises:
        VLLMValidationError: a value out of range; `.parameter` names it. TypeError: not a number.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.beam_width = _check_int("beam_width", self.beam_width, 1)
        self.max_tokens = _check_int("max_tokens", self.max_tokens, 1)
        self.temperature = _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        # The length of any context to the power of 50 is still a float.
        self.length_penalty = _check_float("length_penalty", self.length_penalty, -50.0, 50.0)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "must be True or False")


def _fail(name: str, value: Any, rule: str) -> None:
    raise VLLMValidationError(f"{name} {rule}, got {value!r}.", parameter=name, value=value)


def _parse_json(name: str, value: Any) -> Any:
    """`value` with nothing in it but what JSON knows, parsed if it is text."""
    try:
        return json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise VLLMValidationError(f"structured_outputs.{name} is not JSON: {error}.",
                                  parameter=f"structured_outputs.{name}") from error


def _is_too_deep(value: Any) -> bool:
    """True if parsed JSON, or brackets in a text (a regex or a grammar), are nested beyond MAX_NESTING."""
    if isinstance(value, str):
        steps = ((c in "([{") - (c in ")]}") for c in re.sub(r"\\.", "", value))
        return max(itertools.accumulate(steps), default=0) > MAX_NESTING
    level = [value]
    for _ in range(MAX_NESTING):
        containers = [node for node in level if isinstance(node, (dict, list))]
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    return any(isinstance(node, (dict, list)) for node in level)


def _check_extra(value: Any) -> None:
    """Integers at any depth must fit into 64 bits: they may have to cross a process border or enter a tensor."""
    if isinstance(value, numbers.Integral):
        if not -(2**63) <= int(value) < 2**64:
            _fail("extra_args", value, "must hold integers of at most 64 bits")
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_extra(item)


def _check_list(name: str, value: Any) -> list[Any]:
    """`value` as a list of hashable items; [] for None."""
    if value is None:
        return []
    # Not any iterable: the characters of a lone string would pass for words.
    if not isinstance(value, (list, tuple, set, frozenset, range)):
        _fail(name, value, "must be a list")
    for item in value:
        if not isinstance(item, Hashable):
            _fail(name, value, "must be a flat list")
    return list(value)


def _check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as Python's own int: numpy's would overflow where ours grow."""
    if not isinstance(value, numbers.Integral):
        _fail(name, value, "must be an integer")
    if low is not None and value < low:
        _fail(name, value, f"must be at least {low}")
    if high is not None and value > high:
        _fail(name, value, f"must be at most {high}")
    return int(value)


def _check_float(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """`value` as a float that float32, which the sampler computes in, can hold."""
    if not isinstance(value, numbers.Real):
        # A TypeError as from the comparison that vLLM makes here.
        raise TypeError(f"{name} must be a number, got {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not (low < number if open_low else low <= number) or not number <= high:  # this way round, NaN fails too
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        _fail(name, value, f"must be a {'' if math.isinf(low) else 'finite '}number in {interval}")
    return number
