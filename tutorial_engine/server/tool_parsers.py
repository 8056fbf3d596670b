"""Tool calls in a model's text, found while the text is still growing.

    Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>

    text      "Let me look.<to" "ol_call>{\"name\": \"wea" "ther\", \"arguments\": {\"ci" "ty\": \"Bern\"}}</tool_call>"
    content   "Let me look."
    calls                                                   0: weather {"ci            0: ty": "Bern"}

What may be the beginning of a tag is held back until it is one or not. A call is announced as soon as its name is
known; then its arguments follow in pieces, raw, as the model writes them.

The format is that of the Hermes models (Nous Research), which Qwen and many others took over. `tool_grammar` is the
same format as a grammar, for when a client insists on a call.

Owns: the format. Does not own: what becomes of calls (`chat.py`).
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
# The usual order of keys, up to the brace of the arguments: from here on they can be passed on.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` may begin with, the whole tag left out."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


class _Braces:
    """Walks over the characters of a JSON object and notices where it ends."""

    def __init__(self, start: int) -> None:
        self.position, self.depth, self.in_string, self.escaped, self.closed = start, 0, False, False, False

    def advance(self, text: str) -> int:
        """The position up to which `text` belongs to the object."""
        while self.position < len(text) and not self.closed:
            c = text[self.position]
            self.position += 1
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped, self.in_string = c == "\\", c != '"'
            elif c == '"':
                self.in_string = True
            elif c in "{[":
                self.depth += 1
            elif c in "}]":
                self.depth -= 1
                self.closed = self.depth == 0
        return self.position


@dataclass
class Parsed:
    """What a piece of text brought: `content` for the user, `calls` as OpenAI's deltas of tool calls."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class HermesToolParser:
    """One completion's text, piece by piece.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""  # what is still to be looked at
        self._inside = False  # between BEGIN and END
        self._braces: _Braces | None = None  # of the arguments, once the call was announced
        self._num_sent = 0

    def feed(self, text: str, final: bool) -> Parsed:
        """Take in more text; `final`: nothing comes after it, so nothing is held back."""
        self._text += text
        parsed = Parsed()
        while (at := self._text.find(END if self._inside else BEGIN)) >= 0:
            if self._inside:
                self._end_call(self._text[:at], END, parsed)
                self._text = self._text[at + len(END):]
            else:
                self._tell(self._text[:at], parsed)
                self._text = self._text[at + len(BEGIN):]
            self._inside = not self._inside
        if self._inside and final:
            self._end_call(self._text, "", parsed)
        elif self._inside:
            self._continue_call(self._text, parsed)
        else:
            keep = 0 if final else overlap(self._text, BEGIN)
            end = len(self._text) - keep
            self._tell(self._text[:end], parsed)
            self._text = self._text[end:]
        return parsed

    def _tell(self, text: str, parsed: Parsed) -> None:
        if not self.num_calls:  # what stands between calls, or after them, is not meant for the user
            parsed.content += text

    def _end_call(self, text: str, closing: str, parsed: Parsed) -> None:
        """`text` is all of the call, up to the tag `closing` if there is one."""
        if self._braces is None:
            self._take_whole(text, closing, parsed)
        else:
            self._continue_call(text, parsed)
        self._braces, self._num_sent = None, 0

    def _take_whole(self, text: str, closing: str, parsed: Parsed) -> None:
        """A call that was not announced before it was over."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(name, str):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._tell(BEGIN + text + closing, parsed)  # no call after all
            return
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._announce(name, arguments, parsed)

    def _continue_call(self, text: str, parsed: Parsed) -> None:
        """`text` is the call so far."""
        if self._braces is None:
            head = _HEAD.match(text)
            if head is None:
                return
            try:
                name = json.loads(head[1])
            except ValueError:
                return
            self._braces, self._num_sent = _Braces(head.end()), head.end()
            self._announce(name, "", parsed)
        end = self._braces.advance(text)
        if end > self._num_sent:
            parsed.calls.append({"index": self.num_calls - 1, "function": {"arguments": text[self._num_sent:end]}})
            self._num_sent = end

    def _announce(self, name: str, arguments: str, parsed: Parsed) -> None:
        parsed.calls.append({"index": self.num_calls, "id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function",
                             "function": {"name": name, "arguments": arguments}})
        self.num_calls += 1


TOOL_PARSERS = {"hermes": HermesToolParser}


def tool_grammar(tools: dict[str, dict[str, Any] | None], several: bool) -> str:
    """Lark grammar of one call of one of these tools (name -> JSON schema of its arguments), or of at least one."""
    call = {"anyOf": [{
        "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
        "properties": {"name": {"const": name}, "arguments": {"type": "object"} if schema is None else schema},
    } for name, schema in tools.items()]}
    start = r'call ("\n" call)*' if several else "call"
    return f'start: {start}\ncall: "{BEGIN}\\n" body "\\n{END}"\nbody: %json {json.dumps(call)}\n'
