"""vLLM's import path of the synchronous engine (`vllm.engine.llm_engine`); it is defined in `llm_engine.py`."""

from tutorial_engine.llm_engine import LLMEngine as LLMEngine
