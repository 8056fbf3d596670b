"""Structured outputs: a grammar decides, token by token, what may be said next.

    schema, regex, choice ... --compile--> automaton --bitmask--> 0 1 1 0 0 1 ..   one bit per token: may it come next?
                                             ^                         |           where it is 0, the logit becomes -inf
                                             +--- sampled token <------+

A grammar speaks of characters, a model of tokens: a token may come next if all of its bytes can be read from where the
text stands. Asking this for each of 50,000 tokens in each step is the slow twin (in the tests); the library llguidance
walks its automaton along a trie of the vocabulary and answers for all of them at once. (Where only one text can follow,
it allows of that text's spellings the tokenizer's own, which the model knows best.) The idea of the mask is from
Willard and Louf, "Efficient Guided Generation for Large Language Models" (arXiv 2307.09702, section 3).

Stop tokens are allowed where the text may end, and only they are where nothing can follow. (One of stop_token_ids that
is text itself may be said as text, and stops there.)
Constraints that leave no token together (say, allowed_token_ids without any that the grammar needs) end the request
with finish_reason "error" and what it has said so far.

Owns: compiling, one position in a grammar per request, the masks. Does not own: choosing (`sampler.py`), what ends a
request (`request.py`), the fields and their checks (`sampling_params.py`).
No request waits for its grammar: it is compiled when the request is added, which takes milliseconds (half a second the
first time, for the trie), so that what is wrong with it is told to who added it. vLLM compiles beside the loop, and
lets the request wait meanwhile in a status of its own, WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from tutorial_engine.request import Request

logger = logging.getLogger(__name__)

_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
NO_TOKEN = -1  # what the sampler says where everything is forbidden; no grammar accepts it

# Where the values of a JSON schema are not schemas: maps from names to schemas, and plain data.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples")


class Grammar:
    """One request's position in its grammar.

    Args:
        matcher: llguidance's, at the start; no other request uses it.
        eos_token_id: the id that ends a text for the matcher.
        stop_ids: ids that end this request. vocab_size: ids there are.
    """

    def __init__(self, matcher: LLMatcher, eos_token_id: int, stop_ids: Iterable[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64)

    def bitmask(self) -> np.ndarray:
        """What may come next: [ceil(vocab_size / 32)] int32, where bit i % 32 of word i // 32 is token i."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():  # no token can spell what comes next, or the library's limits are reached
            logger.warning("A request's grammar cannot go on: %s", _reason(self._matcher))
            mask[:] = 0
            return mask.view(np.int32)
        self._replace_special(mask)
        if self._matcher.is_accepting():
            np.bitwise_or.at(mask, self._stop_ids // 8, (1 << self._stop_ids % 8).astype(np.uint8))
        return mask.view(np.int32)

    def _replace_special(self, mask: np.ndarray) -> None:
        """Where a text that must come is spelled like a special token, the library's mask allows that token alone, and
        then does not accept it. Such a text is spelled with ordinary tokens, tried one by one: slow, and rare."""
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed) != 1 or self._matcher.validate_tokens([int(allowed[0])]) or allowed[0] == self._eos_token_id:
            return
        ordinary = [i for i in range(8 * len(mask)) if i < self._vocab_size and self._matcher.validate_tokens([i])]
        mask[:] = 0
        np.bitwise_or.at(mask, np.array(ordinary) // 8, (1 << np.array(ordinary) % 8).astype(np.uint8))

    def accept_token(self, token_id: int) -> bool:
        """Move past a token that was chosen. False, and nothing changes, if it may not come here."""
        accepted = False
        if token_id == NO_TOKEN:
            logger.warning("A request ends with an error: its grammar and its other rules leave no token.")
            return False
        if self._matcher.validate_tokens([token_id]):
            accepted = self._matcher.consume_token(token_id)
        elif token_id in self._stop_ids and self._matcher.is_accepting():
            accepted = self._matcher.consume_token(self._eos_token_id)
        if not accepted:
            logger.warning("A request ends with an error: its grammar does not go on with token %d. %s", token_id,
                           _reason(self._matcher))
        return accepted


class StructuredOutputManager:
    """Makes grammars for one tokenizer.

    Args:
        config: the engine's `structured_outputs_config`.
        tokenizer: a fast tokenizer; its bytes per token are read when the first grammar is asked for.
        vocab_size: columns of the logits.
        eos_token_id: the id that ends a text, None if there is none.
    """

    def __init__(self, config: dict[str, Any], tokenizer: Any, vocab_size: int, eos_token_id: int | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def make_grammars(self, params: StructuredOutputsParams | None, stop_ids: Iterable[int], n: int
                      ) -> list[Grammar | None]:
        """A grammar for each of n completions; None for each if nothing is asked for.

        Raises:
            VLLMValidationError: empty, wrong, or beyond what llguidance can do; llguidance is not installed; the model
                has no EOS token or a tokenizer of an unknown kind.
        """
        if params is None:
            return [None] * n
        kind, value = params.verify()
        with _errors_as_refusals(f"structured_outputs.{kind}", "cannot be compiled"):
            matcher = self._compiled(self._to_text(kind, value, params))
        return [Grammar(matcher.deep_copy(), self.eos_token_id, stop_ids, self.vocab_size) for _ in range(n)]

    @functools.cached_property
    def ll_tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance wants it."""
        if self.eos_token_id is None:
            _refuse("structured_outputs needs an EOS token to end a text with, and this model has none.")
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            _refuse("structured_outputs reads the vocabulary from a fast tokenizer (one of the `tokenizers` library), "
                    f"and this model has a {type(self.tokenizer).__name__}.")
        backend = copy.copy(backend)  # without the settings that only matter to batches of texts
        backend.no_padding()
        backend.no_truncation()
        size = max(self.vocab_size, backend.get_vocab_size(with_added_tokens=True))
        with _errors_as_refusals("structured_outputs", "cannot read this model's tokenizer"):
            return _llguidance().LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self.eos_token_id)

    def _compile(self, text: str) -> LLMatcher:
        """A matcher at its start, to be copied. Raises ValueError."""
        matcher = _llguidance().LLMatcher(self.ll_tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        first_step = matcher.deep_copy()
        first_step.compute_bitmask()
        if first_step.is_error():
            raise ValueError(f"no token of this model can begin such a text ({_reason(first_step)})")
        for warning in matcher.get_grammar_warnings():
            logger.warning("structured_outputs: %s", warning)
        return matcher

    def _to_text(self, kind: str, value: Any, params: StructuredOutputsParams) -> str:
        """A constraint in llguidance's own notation. Raises ValueError."""
        if kind == "json":
            value = self._schema(value, params)
        elif kind == "json_object":
            kind, value = "json", self._schema({"type": "object"}, params)
        elif kind == "structural_tag":
            kind, value = "lark", self._tags_to_lark(value, params)
        elif kind == "choice":  # as one regex: the library's own way ends at 2,000 choices
            kind, value = "regex", "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", text) for text in value)
        return _llguidance().grammar_from(kind, json.dumps(value) if kind == "json" else value)

    def _schema(self, schema: Any, params: StructuredOutputsParams) -> Any:
        """A JSON schema with the options of request and engine written into it, the request's first."""
        if params.disable_additional_properties or self.config.get("disable_additional_properties"):
            schema = close_objects(schema)
        if params.whitespace_pattern is not None:
            options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern}
        elif params.disable_any_whitespace or self.config.get("disable_any_whitespace"):
            options = {"whitespace_flexible": False}
        else:
            return schema
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            return schema
        return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}

    def _tags_to_lark(self, tags: Any, params: StructuredOutputsParams) -> str:
        """{"triggers": [...], "structures": [{"begin", "schema", "end"}]} as a Lark grammar."""
        shape = ValueError('it must be {"triggers": [text], "structures": [{"begin": text, "schema": {...}, '
                           '"end": text}]}')
        if not isinstance(tags, dict) or tags.keys() != {"triggers", "structures"}:
            raise shape
        made = []
        for s in tags["structures"]:
            if not isinstance(s, dict) or s.keys() != {"begin", "schema", "end"} or not isinstance(s["schema"], dict):
                raise shape
            trigger = next((t for t in tags["triggers"] if t and s["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"{s['begin']!r} begins with none of the triggers {tags['triggers']}")
            made.append(_llguidance().StructTag(trigger=trigger, begin=s["begin"], end=s["end"],
                                                grammar=self._schema(s["schema"], params)))
        # "<tool>" is one special token of some models, and six characters to others.
        special = any(self.tokenizer.backend_tokenizer.token_to_id(t) is not None for t in tags["triggers"])
        return _llguidance().StructTag.to_grammar(made, assume_special=special)


def close_objects(schema: Any) -> Any:
    """`schema`, where each object whose properties are named, and that does not say what others it allows, allows
    none."""
    if isinstance(schema, list):
        return [close_objects(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[key] = {name: close_objects(s) for name, s in value.items()}
        else:
            closed[key] = value if key in _DATA else close_objects(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def apply_grammars(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Set to -inf what the grammars forbid, in place.

    Args:
        logits: [rows, vocab_size]. requests: one per row.
    """
    rows = _constrained_rows(requests)
    if not rows:
        return
    packed = torch.from_numpy(np.stack([requests[row].grammar.bitmask() for row in rows])).to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((packed[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def rows_without_choice(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Rows with a grammar in which all logits [rows, vocab_size] are -inf."""
    rows = _constrained_rows(requests)
    if not rows:
        return []
    stuck = logits[rows].amax(dim=-1) == -torch.inf
    return [row for row, s in zip(rows, stuck.tolist()) if s]


def _constrained_rows(requests: Sequence[Request]) -> list[int]:
    return [row for row, request in enumerate(requests) if request.grammar is not None]


def _llguidance() -> ModuleType:
    """The library, which only those need who ask for structured outputs."""
    try:
        import llguidance
    except ImportError as error:
        raise VLLMValidationError('structured_outputs needs the package llguidance: pip install '
                                  '"tutorial-engine[structured]"', parameter="structured_outputs") from error
    return llguidance


@contextlib.contextmanager
def _errors_as_refusals(parameter: str, what: str) -> Iterator[None]:
    """The library's complaints, and those about what it is given, as one kind of error."""
    try:
        yield
    except VLLMValidationError:
        raise
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise VLLMValidationError(f"{parameter} {what}: {error}", parameter=parameter) from error


def _reason(matcher: LLMatcher) -> str:
    """A matcher's error without the dump of its state."""
    return matcher.get_error().partition("<state>")[0].strip()


def _refuse(message: str) -> None:
    raise VLLMValidationError(message, parameter="structured_outputs")
