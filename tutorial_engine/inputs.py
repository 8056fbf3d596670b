"""Prompt forms: what `generate` accepts, brought into one shape.

Owns: telling a prompt from a list of prompts. Does not own: tokenising or checking lengths (`input_processor.py`).

    "text" | [1, 2, 3] | {"prompt": "text"} | {"prompt_token_ids": [1, 2, 3]}      one prompt
    a list or tuple of these                                                        several
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt given as text. `cache_salt` keeps its prefix-cache blocks apart from those of other salts."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt given as token ids; `prompt` may carry the text along for display."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt

_KNOWN_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)  # numpy's integers pass, True does not


def parse_prompt(prompt: Any) -> dict[str, Any]:
    """One prompt of any form as a dict with "prompt" or "prompt_token_ids" (or both), perhaps "cache_salt".

    Raises:
        TypeError: it is none of the four forms, or a field has the wrong type.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, dict):
        hint = ""
        if hasattr(prompt, "tolist"):
            hint = " Make it a list with .tolist()."
        elif _is_int(prompt):
            hint = " The ids of one prompt go in a list, since a tuple means several prompts."
        raise TypeError("Prompt should be a string, list of tokens, or dictionary, "
                        f"but this one is a {type(prompt).__name__}.{hint}")
    prompt = {key: value for key, value in prompt.items() if value is not None}
    if "role" in prompt:
        raise TypeError("Prompt dictionary has a 'role', so it is a message of a conversation: use chat(), which lays "
                        "messages out with the model's template.")
    if unknown := sorted(prompt.keys() - _KNOWN_KEYS, key=str):
        raise TypeError(f"Prompt dictionary has keys that this engine does not have: {unknown}. "
                        f"It knows {sorted(_KNOWN_KEYS)}.")
    if "prompt" not in prompt and "prompt_token_ids" not in prompt:
        raise TypeError("Prompt dictionary should contain 'prompt' (text) or 'prompt_token_ids' (a list of integers).")
    if not isinstance(prompt.get("prompt", ""), str):
        raise TypeError(f"Prompt text should be a string, got {type(prompt['prompt']).__name__}.")
    if not isinstance(prompt.get("cache_salt", "-"), str) or prompt.get("cache_salt") == "":
        raise TypeError("cache_salt should be a non-empty string.")
    if "prompt_token_ids" in prompt:
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)) or not all(_is_int(i) for i in ids):
            raise TypeError("Token prompt should be a list of integers.")
    return prompt


def split_prompts(prompts: Any) -> list[Any]:
    """The outer sequence: a single prompt becomes a list of one. A non-empty list of ints is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        if isinstance(prompts, list) and prompts and all(_is_int(p) for p in prompts):
            return [prompts]
        return list(prompts)
    raise TypeError("Prompt should be a string, list of tokens, or dictionary, or a list of these, "
                    f"got {type(prompts).__name__}.")
