"""Logprobs of output and prompt: their shape, their ranks, and their values against a plain forward of transformers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.api.support import byte_ids, byte_tokenizer, greedy, piece_ids, run_steps, scripted_engine
from tests.core.support import assert_clean
from tutorial_engine import LLM, RequestOutput, SamplingParams
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.logprobs import Logprob
from tutorial_engine.sampling_params import RequestOutputKind

PROMPT = [0, *byte_ids(b"a prompt that is several blocks long")]
SIZES = {"max_model_len": 128, "num_gpu_blocks_override": 65}


def reference(model: LlamaForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab_size] log-probabilities of what comes after each token."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(dim=-1)


CLOSE = 1e-4  # two programs agree this well; what is closer together may change places


def check_entry(entry: dict[int, Logprob], chosen: int, num: int, expected: torch.Tensor) -> None:
    """One position: the chosen token first, with its true rank; then the `num` most likely ones, best first."""
    assert next(iter(entry)) == chosen
    for token_id, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[token_id].item(), abs=CLOSE)
        better, no_worse = ((expected > expected[token_id] + d).sum().item() for d in (CLOSE, -CLOSE))
        assert better + 1 <= logprob.rank <= no_worse
    others = [logprob.rank for token_id, logprob in entry.items() if token_id != chosen]
    assert others == [rank for rank in range(1, num + 1) if rank != entry[chosen].rank]


def check_output(output: RequestOutput, num: int, model: LlamaForCausalLM) -> None:
    for completion in output.outputs:
        ids = completion.token_ids
        expected = reference(model, output.prompt_token_ids + ids)[len(output.prompt_token_ids) - 1:]
        assert len(completion.logprobs) == len(ids)
        for entry, chosen, row in zip(completion.logprobs, ids, expected, strict=False):
            check_entry(entry, chosen, num, row)
        own = [entry[chosen].logprob for entry, chosen in zip(completion.logprobs, ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own))


def check_prompt(output: RequestOutput, num: int, model: LlamaForCausalLM) -> None:
    ids = output.prompt_token_ids
    assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
    for entry, chosen, row in zip(output.prompt_logprobs[1:], ids[1:], reference(model, ids), strict=False):
        check_entry(entry, chosen, num, row)


# Output


@pytest.mark.parametrize("num", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_logprobs(num: int, temperature: float, llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True, logprobs=num)
    for output in llm.generate([PROMPT, [5]], params, use_tqdm=False):
        check_output(output, num, tiny_hf)


def test_each_request_gets_what_it_asked_for(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    asked = [None, 0, 3, None, 1]
    params = [SamplingParams(seed=1, max_tokens=4, ignore_eos=True, logprobs=n) for n in asked]
    for output, num in zip(llm.generate([PROMPT] * 5, params, use_tqdm=False), asked, strict=True):
        if num is None:
            assert output.outputs[0].logprobs is output.outputs[0].cumulative_logprob is None
        else:
            check_output(output, num, tiny_hf)


def test_several_completions(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    check_output(output, 2, tiny_hf)
    check_prompt(output, 1, tiny_hf)


def test_whole_vocabulary(tiny_model: Path, tiny_hf: LlamaForCausalLM) -> None:
    with LLM(str(tiny_model), max_logprobs=-1, **SIZES) as llm:
        params = greedy(2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        check_output(output, 320, tiny_hf)
        check_prompt(output, 320, tiny_hf)
        assert [len(entry) for entry in output.outputs[0].logprobs] == [320, 320]
    with LLM(str(tiny_model), max_logprobs=5, **SIZES) as llm, pytest.raises(
            VLLMValidationError, match="Requested logprobs of 6 is more than max_logprobs=5"):
        llm.generate("a", greedy(logprobs=6), use_tqdm=False)


KNOBS = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "logit_bias": {9: 5.0}}


def test_raw_values_do_not_see_the_knobs(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True, logprobs=5, **KNOBS)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    check_output(output, 5, tiny_hf)


def test_processed_values_do(tiny_model: Path, tiny_hf: LlamaForCausalLM) -> None:
    with LLM(str(tiny_model), logprobs_mode="processed_logprobs", **SIZES) as llm:
        params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True, logprobs=5, prompt_logprobs=2, **KNOBS)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    check_prompt(output, 2, tiny_hf)  # nothing was sampled there, so nothing was processed
    for entry in output.outputs[0].logprobs:
        kept = [e.logprob for e in entry.values() if e.logprob > -float("inf")]
        assert len(kept) == 3 and sum(math.exp(v) for v in kept) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits(mode: str, tiny_model: Path, tiny_hf: LlamaForCausalLM) -> None:
    with LLM(str(tiny_model), logprobs_mode=mode, **SIZES) as llm:
        (output,) = llm.generate([PROMPT], greedy(1, logprobs=3, logit_bias={9: 100.0}), use_tqdm=False)
    with torch.no_grad():
        logits = tiny_hf(torch.tensor([PROMPT])).logits[0, -1]
    if mode == "processed_logits":
        logits[9] += 100
    (entry,) = output.outputs[0].logprobs
    assert {i: e.logprob for i, e in entry.items()} == pytest.approx({i: logits[i].item() for i in entry}, abs=1e-3)
    assert list(entry)[0] == 9


def test_text_of_tokens() -> None:
    """\"\" while the bytes of a token are not yet a character; special tokens are shown as they are."""
    tokenizer = byte_tokenizer(b" a", b"\xc4", b"\x8f")
    ids = [*piece_ids(tokenizer, b" a", b"\xc4", b"\x8f"), 2]
    outputs = run_steps(scripted_engine(tokenizer, ids), [5], greedy(4, logprobs=0))
    entries = outputs[-1].outputs[0].logprobs
    assert [entry[i].decoded_token for entry, i in zip(entries, ids, strict=True)] == [" a", "", "", "<|turn|>"]
    assert outputs[-1].outputs[0].text == " a\u010f"


# Prompt


@pytest.mark.parametrize("num", [0, 1, 7])
def test_prompt_logprobs(num: int, llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    (output,) = llm.generate([PROMPT], greedy(2, prompt_logprobs=num), use_tqdm=False)
    check_prompt(output, num, tiny_hf)
    assert output.outputs[0].logprobs is None


def test_prompt_of_one_token(llm: LLM) -> None:
    (output,) = llm.generate([[5]], greedy(2, prompt_logprobs=3), use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_prompt_in_chunks(budget: int, tiny_model: Path, tiny_hf: LlamaForCausalLM) -> None:
    with LLM(str(tiny_model), max_num_batched_tokens=budget, max_num_seqs=1, **SIZES) as llm:
        params = greedy(3, ignore_eos=True, prompt_logprobs=4, logprobs=2)
        for output in llm.generate([PROMPT, PROMPT[:9]], params, use_tqdm=False):
            check_prompt(output, 4, tiny_hf)
            check_output(output, 2, tiny_hf)


def test_second_call_does_not_read_the_cache(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    prompt = PROMPT[:33]
    first, second = (llm.generate([prompt], greedy(2, prompt_logprobs=1), use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    check_prompt(second, 1, tiny_hf)
    assert first.prompt_logprobs == second.prompt_logprobs
    (without,) = llm.generate([prompt], greedy(2), use_tqdm=False)
    assert without.num_cached_tokens == 32 and without.outputs[0] == first.outputs[0]


PREEMPTING: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4,
                              "num_gpu_blocks_override": 26, "scheduler_reserve_full_isl": False}


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemptions(caching: bool, tiny_model: Path, tiny_hf: LlamaForCausalLM) -> None:
    """Also of requests whose prompt was only half computed: what is computed again is not reported again."""
    with LLM(str(tiny_model), disable_log_stats=False, enable_prefix_caching=caching, **PREEMPTING) as llm:
        prompts = [PROMPT[:12 + 6 * i] + [7 + i] for i in range(4)]
        params = greedy(40, ignore_eos=True, prompt_logprobs=2, logprobs=1)
        preempted: dict[str, int] = {}  # request -> prompt tokens that were computed when it was preempted
        real = llm.llm_engine.scheduler._preempt

        def spy(request: Any, out: Any) -> None:
            preempted[request.request_id] = request.num_computed_tokens - request.num_prompt_tokens
            real(request, out)

        llm.llm_engine.scheduler._preempt = spy
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert_clean(llm.llm_engine)
    assert any(n < 0 for n in preempted.values()) and any(n >= 0 for n in preempted.values())
    for output in outputs:
        check_prompt(output, 2, tiny_hf)
        check_output(output, 1, tiny_hf)


def test_delivered_once_as_a_delta(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    def run(kind: RequestOutputKind) -> list[RequestOutput]:
        return run_steps(llm.llm_engine, PROMPT, greedy(3, ignore_eos=True, prompt_logprobs=1, output_kind=kind))

    deltas = run(RequestOutputKind.DELTA)
    check_prompt(deltas[0], 1, tiny_hf)
    assert [o.prompt_logprobs for o in deltas[1:]] == [None, None]
    for output in run(RequestOutputKind.CUMULATIVE):
        check_prompt(output, 1, tiny_hf)
