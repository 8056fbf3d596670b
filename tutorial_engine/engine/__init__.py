"""vLLM's import paths `engine.*`. The engine itself is `llm_engine.py`; the files here only carry vLLM's names."""

from tutorial_engine.llm_engine import LLMEngine as LLMEngine
