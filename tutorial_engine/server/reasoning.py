"""Reasoning parsers: what a model thinks aloud, told from what it answers.

    <think>\nThe user greets me.\n</think>\n\nHello!
            reasoning                     content

Owns: the tags, while the text is still growing. Does not own: tool calls, which are in the content (`tool_parsers.py`).
"""

from __future__ import annotations

from tutorial_engine.server.tool_parsers import overlap

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """One completion's text, piece by piece.

    Args:
        implicit: the template has opened the tag, so the text begins inside of it.
    """

    def __init__(self, implicit: bool) -> None:
        self._implicit = implicit
        self._text = ""
        self._state = "begin"  # "begin" -> "thinking" -> "done"

    def feed(self, text: str, final: bool) -> tuple[str, str]:
        """(reasoning, content) that a piece of text brought; `final`: nothing comes after it."""
        self._text += text
        if self._state == "begin":
            stripped = self._text.lstrip()
            if stripped.startswith(BEGIN):
                self._state, self._text = "thinking", stripped[len(BEGIN):]
            elif BEGIN.startswith(stripped) and not final:
                return "", ""
            else:
                self._state = "thinking" if self._implicit else "done"
        reasoning = ""
        if self._state == "thinking":
            at = self._text.find(END)
            if at >= 0:
                reasoning, self._text, self._state = self._text[:at], self._text[at + len(END):], "done"
            else:
                end = len(self._text) - (0 if final else overlap(self._text, END))
                reasoning, self._text = self._text[:end], self._text[end:]
        if self._state != "done":
            return reasoning, ""
        content, self._text = self._text, ""
        return reasoning, content


# vLLM's names -> whether the text begins with reasoning even without a tag.
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}
