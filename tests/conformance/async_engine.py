"""Rows A: the asynchronous engine."""

from __future__ import annotations

import pytest

from tests.conformance.registry import NOT_HERE, row


@row("A1", "AsyncLLMEngine, AsyncLLM", NOT_HERE)
@row("A2", "AsyncLLM.generate", NOT_HERE)
@row("A3", "cancelling, AsyncLLM.abort", NOT_HERE)
@row("A4", "one request id twice", NOT_HERE)
@row("A5", "errors while streaming", NOT_HERE)
@row("A6", "pause_generation, resume_generation", NOT_HERE)
@row("A7", "check_health and other thin wrappers", NOT_HERE)
def no_async_engine() -> None:
    """There is no asynchronous engine; to stream, call LLMEngine.step() in a loop of your own."""
    with pytest.raises(ImportError):
        from tutorial_engine import AsyncLLMEngine  # noqa: F401
    with pytest.raises(ImportError):
        from tutorial_engine.v1.engine.async_llm import AsyncLLM  # noqa: F401
