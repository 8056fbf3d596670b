"""Rows X and P: what several parameters make of a request together, and the way from logits to a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.api.support import byte_tokenizer, piece_ids, piece_tokenizer, scripted_llm, stream
from tests.conformance.helpers import EOS, LETTERS, ids, kept, letters_llm, one, refuses, say, shaped, steps
from tests.conformance.registry import DIFFERS, NOT_HERE, SAME, row
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


@row("X1", "n and seed", SAME)
def n_and_seed(llm: LLM) -> None:
    """n completions are n requests with the seeds seed, seed + 1, ... that share the prompt's blocks. From
    LLMEngine.step(), each piece holds one completion and its index; finished is True on the last one only."""
    params = SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True)
    alone = [one(llm, "ab", seed=7 + i, max_tokens=4, ignore_eos=True).outputs[0].token_ids for i in range(3)]
    assert [c.token_ids for c in llm.generate("ab", params, use_tqdm=False)[0].outputs] == alone
    params.output_kind = RequestOutputKind.DELTA
    llm.llm_engine.add_request("r", "ab", params)
    pieces = steps(llm)
    assert all(len(o.outputs) == 1 for o in pieces) and [o.finished for o in pieces] == [False] * 11 + [True]
    assert [sum([o.outputs[0].token_ids for o in pieces if o.outputs[0].index == i], []) for i in range(3)] == alone


@row("X2", "greedy sampling", SAME)
def greedy_side_effects() -> None:
    """temperature=0 resets top_p, top_k and min_p on the object; penalties, bias, masks and min_tokens still apply
    before the most likely token is taken."""
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert say("a", max_tokens=1, bad_words=["a"]).text != "a"
    assert say("a", max_tokens=1, allowed_token_ids=ids("z")).text == "z"
    a, b = ids("ab")
    assert shaped({a: 2.0, b: 1.5}, said=[a], temperature=0, presence_penalty=1) == {a: 1.0, b: 1.5}


@row("X3", "stop strings", SAME)
def stop_strings() -> None:
    """The stop string that is complete first wins, ties by their order, wherever tokens begin and end. No character of
    it is ever streamed, and tokens after the one that completes it are dropped."""
    pieces = ["AB", "C DEF", "G", "HI", "J tail"]
    tokenizer = piece_tokenizer(*pieces)
    deltas, last = stream(tokenizer, piece_ids(tokenizer, *pieces), stop=["DEFGHIJ"])
    assert deltas == ["", "A", "B", "C ", ""] and last.outputs[0].stop_reason == "DEFGHIJ"
    for stops in (["wo", "o w"], ["o w", "wo"]):
        completion = say("hello world", stop=stops)
        assert (completion.text, completion.stop_reason) == ("hell", "o w")
    assert say("hello", stop=["lo", "hello"]).stop_reason == "lo" and say("hello", stop=["hello", "lo"]).text == ""


@row("X4", "which rule ends a request", SAME)
def order_of_stops() -> None:
    """EOS (stop_reason None) comes before stop_token_ids (the id), and that before the length. The token that ended a
    request is counted, and shown only with include_stop_str_in_output."""
    eos = say([EOS], stop_token_ids=[EOS], max_tokens=1)
    assert (eos.finish_reason, eos.stop_reason, eos.token_ids, eos.text) == ("stop", None, [EOS], "")
    token = say("a", stop_token_ids=ids("a"), max_tokens=1)
    assert (token.finish_reason, token.stop_reason, token.text) == ("stop", ids("a")[0], "")
    assert say("a", max_tokens=1).finish_reason == "length"


@row("X5", "bad words and spaces", SAME)
def bad_words_and_spaces() -> None:
    """A word is forbidden as it stands and after a space; of the two, the second only if it has as many tokens. So a
    word of two tokens that is one token after a space slips through, as in vLLM. The prompt does not count."""
    tokenizer = byte_tokenizer(b"desc", b"ribed", b" a", (b" ", b"desc", b"ribed"))

    def text(*pieces: bytes) -> str:
        llm = scripted_llm(tokenizer, piece_ids(tokenizer, *pieces))
        return one(llm, [5], temperature=0, max_tokens=3, bad_words=["described"]).outputs[0].text

    assert text(b" a", b"desc", b"ribed").startswith(" adesc") and "described" not in text(b" a", b"desc", b"ribed")
    assert text(b" a", b" described", b" a") == " a described a"
    assert say("b", "a", bad_words=["ab"], max_tokens=1).text == "b"


@row("X6", "shape of logprobs", SAME)
def shape_of_logprobs(llm: LLM) -> None:
    """One dict per output token: the sampled token first with its true rank, then the ranks from 1, so that there are
    k or k + 1 entries. cumulative_logprob is None unless logprobs were asked for."""
    completion = one(llm, "ab", seed=1, max_tokens=6, logprobs=2, ignore_eos=True).outputs[0]
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token_id and len(entry) in (2, 3)
        assert {1, 2} <= {e.rank for e in entry.values()} and all(e.logprob <= 0 for e in entry.values())
    chosen = [entry[i].logprob for i, entry in zip(completion.token_ids, completion.logprobs)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert [len(entry) for entry in one(llm, "ab", max_tokens=2, logprobs=0).outputs[0].logprobs][0] == 1
    assert one(llm, "ab", max_tokens=2).outputs[0].cumulative_logprob is None


@row("X7", "shape of prompt_logprobs", SAME)
def shape_of_prompt_logprobs(llm: LLM) -> None:
    """One entry per prompt token, the first None, and each has the prompt's own token in it. With DELTA they are
    delivered once."""
    output = one(llm, [5, 6, 7], max_tokens=1, prompt_logprobs=1)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:]] == [6, 7]
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    llm.llm_engine.add_request("r", [5, 6, 7], params)
    assert [o.prompt_logprobs is None for o in steps(llm)] == [False, True, True]


@row("X8", "several EOS tokens", SAME)
def several_eos() -> None:
    """The tokenizer's EOS ends a text with stop_reason None; further ids from generation_config.json become
    stop_token_ids, so that stop_reason is the id. min_tokens forbids all of them, even with ignore_eos."""
    a, b = ids("ab")
    llm = letters_llm([a, b], generation_config={"eos_token_id": [EOS, b]})
    completion = one(llm, "p", temperature=0).outputs[0]
    assert (completion.token_ids, completion.stop_reason) == ([a, b], b)
    tokens = one(llm, "p", temperature=0, ignore_eos=True, min_tokens=3, max_tokens=4).outputs[0].token_ids
    assert b not in tokens[:3] and tokens[3] == b


@row("P9", "order of the stages", SAME)
def order_of_stages() -> None:
    """allowed ids, bias, min_tokens; penalties; bad words; temperature; min_p; top_k; top_p: the order of vLLM's
    newer model runner. So a biased logit is penalised with its bias, and top_p takes its fraction of what top_k kept.
    Logprobs are of the raw logits unless logprobs_mode says otherwise."""
    assert shaped({50: 1.0}, prompt=[50], temperature=0, logit_bias={50: 3.0}, repetition_penalty=2) == {50: 2.0}
    assert kept([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.5) == [3]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.5) == [2, 3]
    raw = shaped({10: 0.0, 11: 0.0}, mode="raw_logprobs", temperature=0.5, logit_bias={10: 9.0}, top_k=1)
    assert raw == pytest.approx({10: math.log(0.5), 11: math.log(0.5)}, abs=1e-4)


@row("P10", "random numbers", DIFFERS)
def random_numbers(llm: LLM) -> None:
    """As in vLLM's newer runner, a draw depends on the seed, the position and the token only, not on the batch; but the
    hash is another one, so that sampled tokens are never those of vLLM. Compare greedy tokens, or distributions."""
    alone = one(llm, "ab", seed=7, max_tokens=6, ignore_eos=True).outputs[0].token_ids
    params = [SamplingParams(seed=s, max_tokens=6, ignore_eos=True) for s in (1, None, 7, 2)]
    crowd = llm.generate(["cd", "ab", "ab", "x" * 40], params, use_tqdm=False)
    assert crowd[2].outputs[0].token_ids == alone != crowd[1].outputs[0].token_ids


@row("P11", "ties", DIFFERS)
def ties() -> None:
    """All tokens that tie with the k-th most likely are kept, as in vLLM's PyTorch code; its Triton code keeps exactly
    k. top_p keeps as few tokens as reach it, of equal ones those with the smaller ids."""
    assert kept([0.1, 0.2, 0.2, 0.2, 0.3], top_k=3) == [1, 2, 3, 4]
    assert kept([0.25] * 4, top_p=0.6) == [0, 1, 2]


@row("P12", "parameters that exclude speculative decoding", NOT_HERE)
def no_speculation() -> None:
    """There is no speculative decoding, so that min_p and logit_bias are never refused for its sake."""
    refuses("speculative_config", LLM, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert len(LETTERS) > max(one(letters_llm("a"), "p", min_p=0.1, logit_bias={5: 1.0}).outputs[0].token_ids)


@row("P13", "custom logits processors", SAME)
def logits_processors() -> None:
    """Classes given to the engine, with vLLM's interface: update_state says which rows hold which requests, apply
    changes all rows at once. They run after penalties and bad words, as in vLLM's newer runner, and those that leave
    the most likely token as it is are skipped for greedy rows."""
    class Only(LogitsProcessor):
        """extra_args={"only": id}: nothing else."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.only: dict[int, int] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            for row_index, params, _, _ in batch_update.added if batch_update else ():
                self.only[row_index] = (params.extra_args or {}).get("only")

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for row_index, token_id in self.only.items():
                if token_id is not None:
                    logits[row_index] = -math.inf
                    logits[row_index, token_id] = 0.0
            return logits

    llm = letters_llm("ab", logits_processors=[Only])
    params = [SamplingParams(temperature=0, max_tokens=2, extra_args=extra) for extra in (None, {"only": ids("z")[0]})]
    outputs = llm.generate(["p", "q"], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["ab", "zz"]
    refuses("logits_processors", LLM, logits_processors=[object])
