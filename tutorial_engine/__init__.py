"""A small inference engine with vLLM's names: ``from tutorial_engine import LLM, SamplingParams``.

This file owns the list of public names and nothing else. Each name is imported when it is first used (PEP 562), so
that ``import tutorial_engine`` costs milliseconds and the tools that need only a part of the package (the downloader,
the notebook helpers) do not wait for torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorial_engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from tutorial_engine.config import AsyncEngineArgs as AsyncEngineArgs
    from tutorial_engine.config import EngineArgs as EngineArgs
    from tutorial_engine.inputs import PromptType as PromptType
    from tutorial_engine.inputs import TextPrompt as TextPrompt
    from tutorial_engine.inputs import TokensPrompt as TokensPrompt
    from tutorial_engine.llm import LLM as LLM
    from tutorial_engine.llm_engine import LLMEngine as LLMEngine
    from tutorial_engine.outputs import CompletionOutput as CompletionOutput
    from tutorial_engine.outputs import RequestOutput as RequestOutput
    from tutorial_engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

# The kernels live in a folder of their own beside this package, and are imported as `tutorial_engine.kernels`.
# Installed, they are inside; in a plain checkout this line finds them. (Never import `kernels` itself: a package of
# that name exists, and transformers looks for it.)
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "kernels" / "decode_attention.py").is_file():
    __path__.append(str(_ROOT))

# public name -> the module of this package that defines it
_HOME = {
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "AsyncLLMEngine": "async_llm",
    "EngineArgs": "config",
    "AsyncEngineArgs": "config",
    "SamplingParams": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "PromptType": "inputs",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """Import ``name`` from its home module on first use and keep it."""
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(_HOME)}. "
            f"If you expected a module, write `import {__name__}.{name}`."
        )
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
