"""Detokeniser: turns ids into text one token at a time, and watches for stop strings.

Text cannot be made token by token: one character may be spread over several tokens, and a token's spaces depend on its
neighbours. So a small window of ids is decoded twice, without and with the new token; the difference is the new text:

    ids   ... p p p | n            decode(p p p)   = "the cat"
              prefix  new          decode(p p p n) = "the cat sat"       -> " sat"

While the decoded window ends in U+FFFD (the mark of an incomplete character), nothing is said; more tokens will come.

Owns: text and stop strings of one request. Does not own: stop token ids and lengths (`request.py`).
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Any

from tutorial_engine.sampling_params import SamplingParams

_INCOMPLETE = "\ufffd"
# Tokens of the prompt that the window starts with: enough for a decoder that looks at the token before.
_CONTEXT_TOKENS = 5


class IncrementalDetokenizer:
    """Text of one request as it grows.

    Args:
        tokenizer: with `decode(ids, skip_special_tokens=...)`, or None to make no text at all.
        prompt_token_ids: the prompt; its last tokens give context to the first new one.
        params: stop strings, min_tokens and what to show.

    Attributes:
        output_text: everything said so far, a stop string that ended it already cut off.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.tokenizer = tokenizer if params.detokenize else None
        self.params = params
        self.output_text = ""
        self.num_sent = 0  # characters that `get_next_delta` has handed out
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        # Decode [prefix:] and subtract decode([prefix:read]).
        self._prefix, self._read = 0, len(self._ids)
        self._num_tokens = 0
        # A stop string may be half said; until it is whole or refuted, that many characters are not streamed.
        holds_back = params.stop and not params.include_stop_str_in_output
        self._hold_back = max(len(s) for s in params.stop) - 1 if holds_back else 0

    def update(self, new_token_ids: Sequence[int], last_is_stop_token: bool) -> tuple[str, int] | None:
        """Add tokens.

        Args:
            last_is_stop_token: the last of them ended the request; it is not shown unless the user asked for it.

        Returns:
            (stop string, number of the new tokens up to the one that completed it) if one was found, else None.
        """
        if self.tokenizer is None:
            return None
        for i, token_id in enumerate(new_token_ids):
            is_last = i == len(new_token_ids) - 1
            if is_last and last_is_stop_token and not self.params.include_stop_str_in_output:
                return None
            before = len(self.output_text)
            self.output_text += self._decode_next(token_id)
            self._num_tokens += 1
            if self.params.stop and self._num_tokens > self.params.min_tokens and (found := self._find_stop(before)):
                return found, i + 1
        return None

    def _decode_next(self, token_id: int) -> str:
        self._ids.append(token_id)
        skip = self.params.skip_special_tokens
        before = self.tokenizer.decode(self._ids[self._prefix:self._read], skip_special_tokens=skip)
        after = self.tokenizer.decode(self._ids[self._prefix:], skip_special_tokens=skip)
        # All of `before`, unless it ended inside a character (of the prompt) that has now become another text.
        num_old = len(os.path.commonprefix([before, after]))
        if num_old == len(after) or after.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[num_old:]

    def _find_stop(self, num_old_chars: int) -> str | None:
        """The stop string that is complete first, ties by their order; cuts `output_text` behind or before it."""
        best: tuple[int, str] | None = None
        for stop in self.params.stop:
            # A match may begin in the old text, but must end in the new.
            at = self.output_text.find(stop, max(num_old_chars - len(stop) + 1, 0))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        if best is None:
            return None
        end, stop = best
        self.output_text = self.output_text[:end if self.params.include_stop_str_in_output else end - len(stop)]
        return stop

    def get_next_delta(self, finished: bool) -> str:
        """Text that has not been handed out yet, less what may turn out to be a stop string."""
        end = len(self.output_text) - (0 if finished else self._hold_back)
        delta = self.output_text[self.num_sent:max(end, self.num_sent)]
        self.num_sent += len(delta)
        return delta

    def get_text(self, finished: bool) -> str:
        """All text so far, less what may turn out to be a stop string."""
        if finished or not self._hold_back:
            return self.output_text
        return self.output_text[:-self._hold_back]
