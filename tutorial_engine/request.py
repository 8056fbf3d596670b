"""`Request`: one sequence on its way through the engine.

Two numbers say where it stands; there is no "prefill phase" and no "decode phase":

    tokens     [ prompt ............ | output ... ]        num_tokens
    computed   [ ###########                      ]        num_computed_tokens   (their K and V are in the cache)

Each step the scheduler lets `num_computed_tokens` chase `num_tokens`. When it has caught up, the model's last row
predicts the next token, `num_tokens` grows by one, and the chase goes on.

Owns: tokens, progress, status, block hashes. Does not own: blocks (`block_manager.py`), text (`detokenizer.py`).
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from tutorial_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tutorial_engine.structured_outputs import Grammar


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Everything after PREEMPTED is final."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """State of one sequence inside the scheduler.

    Args:
        request_id: unique inside the engine.
        prompt_token_ids: the prompt; at least one token.
        sampling_params: already checked against the model, with `max_tokens` set.
        seed: 64-bit seed of its random numbers.
        eos_token_id: the tokenizer's end-of-sequence id, None if it has none.
        masked_stop_ids: ids that may not be chosen before `min_tokens`.
        priority: lower goes first under the "priority" policy.
        arrival_time: seconds; ties of priority are broken by it.
        cache_salt: mixed into the hash of the first block, so that only equal salts share blocks.
        grammar: what its output must look like, see `structured_outputs.py`; None: anything.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], sampling_params: SamplingParams, *, seed: int = 0,
                 eos_token_id: int | None = None, masked_stop_ids: frozenset[int] = frozenset(), priority: int = 0,
                 arrival_time: float | None = None, cache_salt: str | None = None,
                 bad_words_token_ids: list[list[int]] | None = None, grammar: Grammar | None = None) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.seed = seed
        self.eos_token_id = eos_token_id
        self.masked_stop_ids = masked_stop_ids
        self.priority = priority
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.cache_salt = cache_salt
        self.bad_words_token_ids = bad_words_token_ids or []
        self.grammar = grammar
        self.all_token_ids: list[int] = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0  # tokens that steps in flight will sample: counted on, but not known yet
        self.num_cached_tokens = -1  # prefix-cache hit at first scheduling; -1 until then
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        # One of each per full block of all_token_ids, filled in by the block manager.
        self.block_hashes: list[bytes] = []
        self.block_keys: list[tuple] = []

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens:]

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the "priority" policy: smaller goes first and is preempted last."""
        return self.priority, self.arrival_time, self.request_id

    def is_full(self, max_model_len: int, num_in_flight: int = 0) -> bool:
        """True if no token may follow the known ones and `num_in_flight` more."""
        num_tokens = len(self.all_token_ids) + num_in_flight
        return (num_tokens >= max_model_len
                or num_tokens - self.num_prompt_tokens >= self.sampling_params.max_tokens)

    def append_output_token(self, token_id: int, max_model_len: int) -> bool:
        """Add a sampled token and say whether it ended the request.

        The order of the checks decides the reason that the user sees: EOS, then stop_token_ids, then length.
        """
        self.all_token_ids.append(token_id)
        params = self.sampling_params
        if len(self.all_token_ids) - self.num_prompt_tokens >= params.min_tokens:
            if token_id == self.eos_token_id and not params.ignore_eos:
                self.status = RequestStatus.FINISHED_STOPPED
                return True
            elif token_id in params.stop_token_ids:
                self.status, self.stop_reason = RequestStatus.FINISHED_STOPPED, token_id
                return True
        if self.is_full(max_model_len):
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def __repr__(self) -> str:
        return (f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens "
                f"computed, {self.num_output_tokens} of at most {self.sampling_params.max_tokens} output)")
