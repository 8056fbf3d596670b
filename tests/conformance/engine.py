"""Rows E: scheduling, blocks, prefix cache, and what happens at their edges."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.api.support import byte_tokenizer, piece_ids, stream
from tests.conformance.helpers import LETTERS, held_to, ids, letters_llm, one, refuses, steps
from tests.conformance.registry import DIFFERS, NOT_HERE, SAME, row
from tests.core.support import assert_clean
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.lora.request import LoRARequest
from tutorial_engine.request import RequestStatus
from tutorial_engine.sampling_params import StructuredOutputsParams
from tutorial_engine.trace import StepRecord, Trace


def add(llm: LLM, request_id: str, prompt: Any, max_tokens: int = 20, **kwargs: Any) -> None:
    """A greedy request that says `max_tokens` tokens. Blocks hold 4 tokens in this file."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.llm_engine.add_request(request_id, prompt, params, **kwargs)


def recorded(llm: LLM, num_steps: int | None = None) -> list[StepRecord]:
    """Records of the next steps, or of all that are left."""
    with Trace(llm) as trace:
        while llm.llm_engine.has_unfinished_requests() and (num_steps is None or len(trace) < num_steps):
            llm.llm_engine.step()
    return trace.records


@row("E1", "order of a step", SAME)
def order_of_a_step() -> None:
    """There is no prefill phase and no decode phase: running requests go first, in order, then waiting ones, and all
    share the step's tokens."""
    llm = letters_llm("a", max_num_batched_tokens=8)
    add(llm, "A", "pqr")
    recorded(llm, 1)
    add(llm, "B", "p" * 9)
    assert [r.scheduled for r in recorded(llm, 2)] == [{"A": [3, 1], "B": [0, 7]}, {"A": [4, 1], "B": [7, 2]}]


@row("E2", "admission", SAME)
def admission() -> None:
    """Waiting requests are admitted in order, and the first that does not fit ends the scan: nobody overtakes it, and
    nobody is preempted for it."""
    llm = letters_llm("a", num_gpu_blocks=9, max_model_len=32)
    for name, length in (("A", 20), ("B", 16), ("C", 1)):
        add(llm, name, name * length)
    (record,) = recorded(llm, 1)
    assert list(record.scheduled) == ["A"] and list(record.waiting) == ["B", "C"] and not record.preempted


@row("E3", "preemption", SAME)
def preemption() -> None:
    """Only when a running request finds no free block: the last one running loses its blocks, goes to the front of the
    queue and is computed again later. What it says does not change."""
    llm = letters_llm("abcdefghijklmnopqrst", num_gpu_blocks=9, max_model_len=32)
    add(llm, "A", "p" * 14, 10)
    add(llm, "B", "q" * 14, 10)
    add(llm, "C", "r")
    with Trace(llm) as trace:
        outputs = {o.request_id: o.outputs[0].text for o in steps(llm)}
    first = next(record for record in trace if record.preempted)
    assert first.preempted[-1] == "B" == list(first.waiting)[0] and "A" in first.scheduled
    assert outputs == {"A": "abcdefghij", "B": "abcdefghij", "C": "abcdefghijklmnopqrst"}


@row("E4", "priority", SAME)
def priority() -> None:
    """Lower first, then by arrival; the least important running request is preempted. A more important one that waits
    takes no seat away."""
    llm = letters_llm("a", scheduling_policy="priority", max_num_seqs=1)
    add(llm, "late", "p", 2, priority=5)
    recorded(llm, 1)
    for name, priority, arrival in (("third", 1, 1.0), ("second", 0, 2.0), ("first", 0, 1.0)):
        add(llm, name, "p", 1, priority=priority, arrival_time=arrival)
    assert [list(r.scheduled) for r in recorded(llm)] == [["late"], ["first"], ["second"], ["third"]]
    llm = letters_llm("a", scheduling_policy="priority", num_gpu_blocks=9, max_model_len=32)
    add(llm, "unimportant", "p" * 14, priority=1)
    add(llm, "important", "q" * 14, priority=0)
    assert next(r.preempted for r in recorded(llm) if r.preempted) == ["unimportant"]


@row("E5", "the token budget", SAME)
def token_budget() -> None:
    """Pieces of prompts and single tokens share max_num_batched_tokens. A request gets a new token only in the step
    that reaches the end of what is known."""
    llm = letters_llm("a", max_num_batched_tokens=8)
    add(llm, "A", "p" * 17, 2)
    records = recorded(llm)
    assert [r.scheduled["A"] for r in records] == [[0, 8], [8, 8], [16, 1], [17, 1]]
    assert [bool(r.sampled) for r in records] == [False, False, True, True]
    assert [r.budget_left for r in records] == [0, 0, 7, 7]


@row("E6", "free blocks", SAME)
def free_blocks() -> None:
    """Block 0 is never handed out. A request's blocks are freed from its end: those that hold findable content go to
    the back of the queue, the others to the front, and what is taken from the front is forgotten."""
    llm = letters_llm("a", num_gpu_blocks=9, max_model_len=32)
    add(llm, "A", "p" * 10, 1)
    (record,) = recorded(llm)
    assert record.tables == {"A": [1, 2, 3]} and record.free == [3, 4, 5, 6, 7, 8, 2, 1] and record.hashed == [1, 2]
    add(llm, "B", "q" * 26, 1)
    assert recorded(llm)[0].tables == {"B": [3, 4, 5, 6, 7, 8, 2]}
    assert one(llm, "p" * 10, max_tokens=1).num_cached_tokens == 4


@row("E7", "what makes blocks equal", SAME)
def block_hash() -> None:
    """A full block is known by its tokens and everything before them, and by cache_salt. Output counts too, so that
    the next turn of a conversation finds it."""
    llm = letters_llm("abcdefgh")

    def cached(prompt: Any) -> int:
        return one(llm, prompt, temperature=0, max_tokens=8).num_cached_tokens

    assert [cached(p) for p in ("p" * 8 + "x", "p" * 8 + "y", "q" + "p" * 8)] == [0, 8, 0]
    assert [cached({"prompt": "p" * 9, "cache_salt": salt}) for salt in ("s", "t", "s")] == [0, 0, 8]
    assert [cached("m" * 8), cached("m" * 8 + "abcdefgh")] == [0, 12]  # the last token's K and V are never needed


@row("E8", "prefix hits", SAME)
def prefix_hits() -> None:
    """The longest chain of full blocks that leaves at least one token to compute, so that a prompt that is cached
    completely computes its last block again. A second equal prompt hits in the very step that computes the first."""
    for length, hit in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        llm = letters_llm("ab")
        first, second = llm.generate(["p" * length] * 2, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hit) and first.outputs == second.outputs


@row("E9", "all blocks or none", SAME)
def all_or_none() -> None:
    """A request takes its blocks only if there are enough, and then exactly as many as its tokens need."""
    llm = letters_llm("a", num_gpu_blocks=9, max_model_len=32)
    add(llm, "A", "p" * 20)
    add(llm, "B", "q" * 16)
    (record,) = recorded(llm, 1)
    assert record.tables == {"A": [1, 2, 3, 4, 5]} and record.free == [6, 7, 8]
    assert len(recorded(llm, 1)[0].tables["A"]) == 6  # the 21st token


@row("E10", "size of the cache", DIFFERS)
def size_of_the_cache(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The arithmetic, the errors and the log line are vLLM's. What a step needs besides weights and cache is
    estimated here, not measured by a trial run; for a CPU see gpu_memory_utilization."""
    with (caplog.at_level(logging.INFO),
          LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=9)):
        assert "KV cache size: 144 tokens, Maximum concurrency for 64 tokens per request: 2.25x" in caplog.text
    with pytest.raises(ValueError, match="To serve at least one request.*estimated maximum model length is 32"):
        LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=3)


@row("E11", "statistics in the log", SAME)
def statistics(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's line every 10 seconds (VLLM_LOG_STATS_INTERVAL) when disable_log_stats=False. Its prompt throughput leaves
    prefix hits out; its hit rate leaves out requests that find their own blocks again after a preemption."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0")
    llm = letters_llm("abcdefghij", num_gpu_blocks=9, max_model_len=32, disable_log_stats=False)
    with caplog.at_level(logging.INFO, "tutorial_engine"):
        llm.generate(["p" * 14, "q" * 14], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    for part in ("Engine 000: Avg prompt throughput: ", " tokens/s, Avg generation throughput: ", "Running: 1 reqs",
                 "Waiting: 1 reqs", "Preemptions: 1", "KV cache usage: ", "Prefix cache hit rate: 0.0%"):
        assert part in caplog.text, part


@row("E12", "KV cache events", DIFFERS)
def kv_events() -> None:
    """BlockStored, BlockRemoved and AllBlocksCleared, fetched from the engine by take_kv_events(); they are not sent to
    other machines."""
    llm = letters_llm("a", kv_events_config={"enable_kv_cache_events": True})
    one(llm, "p" * 9, max_tokens=1)
    (stored,) = llm.llm_engine.take_kv_events()
    assert stored.token_ids == ids("p" * 8) and len(stored.block_hashes) == 2
    assert llm.reset_prefix_cache()
    assert [type(event).__name__ for event in llm.llm_engine.take_kv_events()] == ["AllBlocksCleared"]
    refuses("kv_events_config", LLM, kv_events_config={"publisher": "zmq"})


@row("E13", "structured outputs", DIFFERS)
def structured_outputs() -> None:
    """A bitmask forbids, before every other rule, the tokens that the grammar cannot take next; stop tokens are allowed
    where it may end. One library, llguidance, does it; a grammar is compiled when its request is added, so that no
    request ever waits for it."""
    completion = held_to("xaab", StructuredOutputsParams(regex="a+b"), logit_bias={3 + ord("z"): 100.0})
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("aaab", "stop", None)
    with pytest.raises(ValueError):
        held_to("a", StructuredOutputsParams(regex="(a"))


@row("E14", "speculative decoding", NOT_HERE)
def speculative_decoding() -> None:
    """One token per request and step."""
    refuses("speculative_config", LLM, speculative_config={"method": "ngram", "num_speculative_tokens": 2})


@row("E15", "names of quantisation", NOT_HERE)
def quantisation() -> None:
    """All of them are refused."""
    for name in ("awq", "gptq", "fp8", "compressed-tensors", "int8_per_channel_weight_only", "bitsandbytes"):
        refuses("quantization", LLM, quantization=name)


@row("E16", "sleep and pause", SAME)
def sleep(tiny_model: Path) -> None:
    """Level 0 pauses, 1 drops the cache and keeps the weights in the CPU's memory, 2 drops both. Requests that run are
    ended ("abort"), finished first ("wait") or frozen ("keep"); new ones are queued meanwhile."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=9) as llm:
        right = llm.generate("ab", params, use_tqdm=False)[0].outputs
        for level, mode in ((0, "keep"), (1, "keep"), (1, "wait"), (2, "abort")):
            llm.enqueue("ab", params, use_tqdm=False)
            llm.llm_engine.step()
            llm.sleep(level, mode)
            assert llm.llm_engine.has_unfinished_requests() == (mode == "keep") and llm.llm_engine.step() == []
            llm.enqueue("ab", params, use_tqdm=False)
            assert llm.wake_up()
            before, after = llm.wait_for_completion(use_tqdm=False)
            assert after.outputs == right
            assert before.outputs[0].finish_reason == "abort" if mode == "abort" else before.outputs == right


@row("E17", "LoRA", NOT_HERE)
def lora() -> None:
    """LoRARequest exists with vLLM's rules, and a request that brings one is refused: "LoRA is not enabled"."""
    request = LoRARequest("name", 1, "folder")
    assert request == LoRARequest("name", 2, "elsewhere")
    with pytest.raises(ValueError):
        LoRARequest("name", 0, "folder")
    refuses("lora_request", letters_llm("a").generate, "p", lora_request=request, use_tqdm=False)


@row("E18", "abort", SAME)
def abort() -> None:
    """Ends a request wherever it is and frees its blocks at once; nothing more comes from it."""
    llm = letters_llm("a", max_num_seqs=1)
    add(llm, "running", "p" * 9)
    add(llm, "waiting", "p" * 9)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["running", "waiting"])
    assert_clean(llm.llm_engine)
    assert llm.llm_engine.step() == []


@row("E19", "the context limit", SAME)
def context_limit() -> None:
    """A request ends with "length" when prompt and output fill max_model_len; a prompt one token shorter than that gets
    exactly one token."""
    for length, room in ((63, 1), (60, 4)):
        completion = one(letters_llm("a"), "p" * length, temperature=0, max_tokens=99).outputs[0]
        assert (len(completion.token_ids), completion.finish_reason) == (room, "length")


@row("E20", "names of a request's states", DIFFERS)
def states() -> None:
    """vLLM's names, but only those that can happen here."""
    assert {status.name for status in RequestStatus} == {
        "WAITING", "RUNNING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED",
        "FINISHED_ERROR"}
    assert RequestStatus.FINISHED_LENGTH_CAPPED.finish_reason == "length"


@row("E21", "text while it grows", SAME)
def growing_text() -> None:
    """Nothing is said until a character is complete; the pieces joined are the decoded ids, and bytes that stay
    incomplete at the end are never shown."""
    pieces = [b"\xc4", b"\x8f", b"\xf0\x9f", b"\x98\x80", b"\xc4"]
    tokenizer = byte_tokenizer(*pieces)
    deltas, _ = stream(tokenizer, piece_ids(tokenizer, *pieces), max_tokens=5)
    assert deltas == ["", "\u010f", "", "\U0001f600", ""]
    assert one(letters_llm("abc"), ids("p"), temperature=0, max_tokens=3).outputs[0].text == LETTERS.decode(ids("abc"))


@row("E22", "what older releases had", SAME)
def history() -> None:
    """Swapping to the CPU, copy-on-write forks, best_of and multi-step scheduling are gone from vLLM and were never
    here; their arguments raise TypeError."""
    for name in ("num_scheduler_steps", "use_v2_block_manager"):
        with pytest.raises(TypeError, match=name):
            LLM(**{name: 1})
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)
