"""vLLM's import path of the asynchronous engine (`vllm.v1.engine.async_llm`); it is defined in `async_llm.py`."""

from tutorial_engine.async_llm import AsyncLLM as AsyncLLM
