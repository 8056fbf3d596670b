"""vLLM's import path of the engine's arguments (`vllm.engine.arg_utils`); they are defined in `config.py`."""

from tutorial_engine.config import AsyncEngineArgs as AsyncEngineArgs
from tutorial_engine.config import EngineArgs as EngineArgs
