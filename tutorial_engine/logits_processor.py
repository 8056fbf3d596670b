"""Custom logits processors: classes of yours that change the logits of every step. The interface is vLLM V1's.

    LLM(logits_processors=[MyProcessor, "my_package.my_module:MyOtherProcessor"])

    requests that sample now --RowTracker--> BatchUpdate --> processor.update_state(update)   who sits in which row
    logits [rows, vocab_size] ----------------------------> processor.apply(logits)           one call for all rows

One object serves all requests, so that `apply` can be one tensor operation; the price is that it must know which row
belongs to whom. It is told what changed since the last step, and only that: an unchanged batch is None.

Owns: the interface, finding the classes, keeping each processor's idea of the rows right. Does not own: when processors
run (`sampler.py`), or the refusal of parameters that they do not like (`input_processor.py`).
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tutorial_engine.exceptions import VLLMValidationError

if TYPE_CHECKING:  # this file is read with the arguments, before anyone needs torch
    import torch

    from tutorial_engine.config import EngineConfig
    from tutorial_engine.request import Request
    from tutorial_engine.sampling_params import SamplingParams

T = TypeVar("T")


class MoveDirectionality(Enum):
    """Of a move (i, j): row i goes to j, where nobody sits; or both change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What changed in the rows since the last step. To be followed in this order: removed, added, moved.

    Attributes:
        batch_size: rows of this step's logits.
        removed: rows whose request left.
        added: (row, its parameters, prompt ids, output ids). The list of output ids is alive: it grows with each step.
        moved: (row, row, direction), one after the other.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Base class of custom processors. The engine makes one object of each class and calls it in every step.

    A request leaves its row when it ends, and also when it misses a step (preempted, or no budget was left). It comes
    back as an added one, with the output that it has by then. So keep state that follows from parameters, prompt and
    output, or lives in a dictionary of your own.

    Args:
        vllm_config: the engine's `EngineConfig`. device: of the logits.
        is_pin_memory: whether pinned CPU memory makes copies to the device faster.
    """

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Args: logits [batch_size, vocab_size] float32, to be changed in place or not. Returns: the same kind."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the most likely token always stays so; then greedy requests are spared. Asked once."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None: the rows are as they were."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called when a request arrives; raise ValueError to refuse it."""
        return None


def process_dict_updates(entries: dict[int, T], batch_update: BatchUpdate | None,
                         new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None]) -> bool:
    """Keep a dictionary from row to state up to date, which is all that most processors need.

    Args:
        new_state: state of an added request from (parameters, prompt ids, output ids); None: it needs none.

    Returns:
        False if the dictionary certainly is as it was: what was derived from it need not be made again.
    """
    if batch_update is None:
        return False
    had_entries = bool(entries)
    for row in batch_update.removed:
        entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        entries.pop(row, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            entries[row] = state
    for i, j, direction in batch_update.moved:
        from_i, from_j = entries.pop(i, None), entries.pop(j, None)
        if from_i is not None:
            entries[j] = from_i
        if from_j is not None and direction == MoveDirectionality.SWAP:
            entries[i] = from_j
    return had_entries or bool(entries)


class AdapterLogitsProcessor(LogitsProcessor):
    """Wraps processors of the older kind: a function per request that sees one row.

    Subclasses write `is_argmax_invariant` and `new_req_logits_processor`.
    """

    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """A function of (output ids, logits [vocab_size]), or of (prompt ids, output ids, logits), that returns the new
        logits; None if this request wants none."""

    def _new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
                   ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, prompt_ids, output_ids) if takes_prompt else partial(function, output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits


class RowTracker:
    """What one processor knows about the rows, and how to bring it up to date.

    Each processor has its own: after a step that failed half way, some have heard of it and some have not.
    """

    def __init__(self) -> None:
        self._rows: list[str] = []  # request ids
        self._outputs: dict[str, list[int]] = {}  # the live lists of those in the rows

    def update(self, requests: Sequence[Request]) -> BatchUpdate | None:
        """The change from the last call's rows to these; None if there is none. Lets the live lists grow."""
        outputs = {r.request_id: self._outputs.get(r.request_id, []) for r in requests}
        for request in requests:
            live = outputs[request.request_id]
            live += request.all_token_ids[request.num_prompt_tokens + len(live):]
        old, new = self._rows, list(outputs)
        known = set(old)
        self._rows, self._outputs = new, outputs
        if old == new:
            return None
        rows: list[str | None] = [request_id if request_id in outputs else None for request_id in old]
        removed = [row for row, request_id in enumerate(rows) if request_id is None]
        added = []
        # Newcomers take the empty rows first, so no row beyond the larger of the two batches is ever named.
        empty = iter(removed)
        for request in requests:
            if request.request_id not in known:
                row = next(empty, len(rows))
                rows[row:row + 1] = [request.request_id]
                added.append((row, request.sampling_params, request.prompt_token_ids, outputs[request.request_id]))
        return BatchUpdate(len(new), removed, added, _moves(rows, new))


def _moves(rows: list[str | None], wanted: list[str]) -> list[tuple[int, int, MoveDirectionality]]:
    """Moves that turn `rows` (changed in place; None is an empty row) into `wanted`. Both hold the same ids."""
    where = {request_id: row for row, request_id in enumerate(rows) if request_id is not None}
    moves = []
    for row, request_id in enumerate(wanted):
        source, there = where[request_id], rows[row]
        if source == row:
            continue
        # Rows before this one are right already, so `source` lies behind it.
        moves.append((source, row, MoveDirectionality.UNIDIRECTIONAL if there is None else MoveDirectionality.SWAP))
        rows[row], rows[source] = request_id, there
        if there is not None:
            where[there] = source
    return moves


class ProcessorPipeline:
    """The engine's processors in the order in which they were given.

    Args:
        processors: none is fine.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._steps = [(p, RowTracker(), p.is_argmax_invariant()) for p in processors]

    def __bool__(self) -> bool:
        return bool(self._steps)

    def apply(self, logits: torch.Tensor, requests: Sequence[Request], random_rows: list[int]) -> torch.Tensor:
        """Run all of them.

        Args:
            logits: [rows, vocab_size] float32, may be changed. requests: one per row. random_rows: those not greedy.

        Raises:
            RuntimeError: a processor raised, or what it returned cannot be sampled from.
        """
        if not self:
            return logits
        alive = _has_choice(logits)
        for processor, tracker, _ in self._steps:
            _call(processor, "update_state", tracker.update(requests))
        for processor, _, invariant in self._steps:
            if not invariant or len(random_rows) == len(requests):
                logits = _checked(processor, logits, alive)
            elif random_rows:  # a row number must mean the same as ever, so it sees all rows, but only some are kept
                logits[random_rows] = _checked(processor, logits.clone(), alive)[random_rows]
        return logits


def _has_choice(logits: torch.Tensor) -> torch.Tensor:
    """Per row, whether a token can be chosen; NaN compares as False, so it counts as no choice."""
    return logits.amax(dim=-1) > -float("inf")


def _checked(processor: LogitsProcessor, logits: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Call `apply`. A row that was `alive` before all processors must still be so."""
    result = _call(processor, "apply", logits)
    name = type(processor).__name__
    if (got := _kind(result)) != (wanted := _kind(logits)):
        raise RuntimeError(f"The logits processor {name} must return {wanted} from apply, got {got}.")
    if dead := (alive & ~_has_choice(result)).nonzero()[:, 0].tolist():
        raise RuntimeError(f"After the logits processor {name} no token can be chosen in rows {dead}: all their logits "
                           "are -inf, or one is NaN.")
    return result


def _kind(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return repr(value)
    return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"


def _call(processor: LogitsProcessor, method: str, argument: Any) -> Any:
    """Call a method and let its errors say whose they are."""
    try:
        return getattr(processor, method)(argument)
    except Exception as error:
        raise RuntimeError(f"The logits processor {type(processor).__name__} failed in {method}: "
                           f"{type(error).__name__}: {error}") from error


def resolve_processors(given: Any) -> list[type[LogitsProcessor]]:
    """The classes that `LLM(logits_processors=...)` names.

    Args:
        given: a list of subclasses of `LogitsProcessor`, or of texts "package.module:Class".

    Raises:
        VLLMValidationError: something else, or a class that cannot be imported or that lacks methods.
    """
    if not isinstance(given, (list, tuple)):
        _fail(f"must be a list of classes, got {given!r}", given)
    return [_resolve(item) for item in given]


def _resolve(item: Any) -> type[LogitsProcessor]:
    found = item
    if isinstance(item, str):
        module, colon, name = item.partition(":")
        if not (module and colon and name):
            _fail(f"names a class as 'package.module:Class', got {item!r}", item)
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # a module may raise anything while it is imported
            raise VLLMValidationError(f"logits_processors: {item!r} cannot be imported: {type(error).__name__}: "
                                      f"{error}.", parameter="logits_processors", value=item) from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        _fail("must hold subclasses of LogitsProcessor (the classes, not objects of them), or texts "
              f"'package.module:Class' that name one, got {item!r}", item)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        _fail(f"{found.__name__} must define {', '.join(missing)}", item)
    return found


def _fail(rule: str, value: Any) -> None:
    raise VLLMValidationError(f"logits_processors {rule}.", parameter="logits_processors", value=value)


def make_processors(config: EngineConfig, device: torch.device) -> ProcessorPipeline:
    """Objects of the engine's classes, in order."""
    return ProcessorPipeline([cls(config, device, device.type == "cuda")
                              for cls in config.args.logits_processors or ()])
