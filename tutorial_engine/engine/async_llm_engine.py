"""vLLM's older name and import path of the asynchronous engine (`vllm.engine.async_llm_engine`): `AsyncLLMEngine` is
`AsyncLLM`, defined in `async_llm.py`."""

from tutorial_engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
