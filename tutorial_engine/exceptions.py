"""Every error that this package raises on purpose, in one small tree.

    VLLMError
    ├── VLLMClientError                      the caller can fix it: a bad argument, a bad prompt
    │   ├── VLLMValidationError              (also a ValueError) knows which parameter, which value
    │   └── ChatTemplateResolutionError      (also a ValueError) the model has no chat template
    ├── ModelLoadError                       (also a ValueError) something keeps a model from loading
    ├── EngineGenerateError                  some requests failed; the engine goes on
    ├── EnginePausedError                    not now: no requests are taken until the engine is resumed
    └── EngineDeadError                      the engine itself failed; nothing more will come

The first branch answers "whose fault is it?", which is what a server needs to choose between HTTP 400 and 500.
Names and places are vLLM's (`vllm.exceptions`), so that ``except`` clauses survive a swapped import. vLLM 0.33 no
longer derives its validation error from `ValueError`, older releases did; deriving ours from both keeps the notebooks
of both ages working.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class VLLMError(Exception):
    """Root of all errors that the engine raises on purpose."""


class VLLMClientError(VLLMError):
    """The request is wrong, not the engine. A server answers 4xx."""


class VLLMValidationError(VLLMClientError, ValueError):
    """An argument has a value that cannot be honoured.

    Args:
        message: what was wrong, what was expected, what to do. `str(error)` is exactly this text.
        parameter: name of the argument, as the caller wrote it, or None.
        value: what the caller passed, or None.
    """

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ChatTemplateResolutionError(VLLMClientError, ValueError):
    """`chat` was called, but neither the caller nor the tokenizer has a chat template."""


class ModelLoadError(VLLMError, ValueError):
    """A model cannot be found, fetched, read, or is of a kind that this engine does not support."""


class EngineGenerateError(VLLMError):
    """Requests failed while they were being served. The engine can take the next ones.

    Attributes:
        request_ids: the ids, as they were added, of the requests that ended; a client waits in vain for these only.
        outputs: what they had said, as `RequestOutput`s with finish_reason "error", where that is known.
    """

    def __init__(self, message: str, request_ids: Iterable[str] = (), outputs: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.request_ids = list(request_ids)
        self.outputs = list(outputs)


class EnginePausedError(VLLMError):
    """The engine takes no requests until it is resumed. A server answers 503: try again later."""


class EngineDeadError(VLLMError):
    """The engine failed and has stopped. Every waiting request gets this, and so does every later call."""
