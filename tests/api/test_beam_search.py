"""Beam search (row L51). Its slow twins: every sequence there is, scored one by one; and transformers' beam search."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.api.support import ScriptedRunner, greedy, llm_of, piece_tokenizer, scripted_llm
from tests.core.support import FakeTokenizer, assert_clean, make_config
from tutorial_engine import LLM, LLMEngine
from tutorial_engine.beam_search import BeamSearchOutput, BeamSearchSequence, get_beam_search_score
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import BeamSearchParams

VOCAB, EOS = 5, 0


def tiny_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    """A made-up model of 5 tokens that remembers the last three."""
    generator = torch.Generator().manual_seed(sum((t + 1) * 7**i for i, t in enumerate(tokens[-3:])))
    return 2.0 * torch.randn(VOCAB, generator=generator)


def tiny_llm(max_model_len: int = 64, **args: Any) -> LLM:
    config = make_config(max_model_len, **{"max_logprobs": -1, **args})
    runner = ScriptedRunner(lambda r: tiny_logits(tuple(r.all_token_ids)), VOCAB, 257, max_model_len,
                            config.args.logprobs_mode)
    return llm_of(LLMEngine(config, runner, FakeTokenizer(EOS), VOCAB, {}))


def search(llm: LLM, prompts: Any, **params: Any) -> list[BeamSearchOutput]:
    outputs = llm.beam_search(prompts, BeamSearchParams(**params))
    assert_clean(llm.llm_engine)
    return outputs


def all_sequences(prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[tuple[list[int], float]]:
    """Every sequence that a search could end with, and its log-probability."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = tokens[-1] == EOS and not ignore_eos
            if (EOS in tokens[:-1] and not ignore_eos) or not (ended or length == max_tokens):
                continue
            total = 0.0
            for i, token_id in enumerate(tokens):
                total += tiny_logits((*prompt, *tokens[:i])).log_softmax(0)[token_id].item()
            found.append(([*prompt, *tokens], total))
    return found


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 4.0, -1.0])
def test_wide_beams_find_the_truth(ignore_eos: bool, length_penalty: float) -> None:
    """L51: so wide that nothing is cut off, the search is exhaustive: the same best sequences, scores and order."""
    prompts = [[1, 2], [3], [4, 4, 1]]
    width = VOCAB**2
    outputs = search(tiny_llm(), prompts, beam_width=width, max_tokens=3, ignore_eos=ignore_eos,
                     length_penalty=length_penalty)
    for prompt, output in zip(prompts, outputs, strict=True):
        def score(tokens: list[int], total: float) -> float:
            return total / (len(tokens) - (tokens[-1] == EOS)) ** length_penalty

        expected = sorted(all_sequences(prompt, 3, ignore_eos), key=lambda item: -score(*item))[:width]
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in expected]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([total for _, total in expected], abs=1e-5)


def step_by_step(prompt: list[int], width: int, max_tokens: int) -> list[list[int]]:
    """The definition once more, for narrow beams: scores of whole sequences, no records, no engine."""
    beams, done = [(prompt, 0.0)], []
    for _ in range(max_tokens):
        longer = []
        for tokens, total in beams:
            logprobs = tiny_logits(tuple(tokens)).log_softmax(0)
            for token_id in logprobs.topk(min(2 * width, VOCAB)).indices.tolist():
                new = ([*tokens, token_id], total + logprobs[token_id].item())
                (done if token_id == EOS else longer).append(new)
        beams = sorted(longer, key=lambda b: -b[1] / len(b[0]))[:width]
    return [tokens for tokens, _ in sorted(
        done + beams, key=lambda b: -b[1] / (len(b[0]) - (b[0][-1] == EOS)))[:width]]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_beams(width: int) -> None:
    """L51, with as many prompts at a time as one likes."""
    prompts = [[1], [2, 3], [4, 4], [3, 1, 2]]
    expected = [step_by_step(p, width, 6) for p in prompts]
    for limit in (None, 1, 3):
        outputs = tiny_llm().beam_search(prompts, BeamSearchParams(width, 6), concurrency_limit=limit)
        assert [[s.tokens for s in o.sequences] for o in outputs] == expected
    assert any(s.finish_reason == "stop" for o in outputs for s in o.sequences)


def test_one_beam_is_greedy(llm: LLM) -> None:
    [beam] = search(llm, [[5, 6, 7]], beam_width=1, max_tokens=12, ignore_eos=True)[0].sequences
    [output] = llm.generate([[5, 6, 7]], greedy(12, ignore_eos=True, logprobs=2), use_tqdm=False)
    completion = output.outputs[0]
    assert beam.tokens == [5, 6, 7, *completion.token_ids]
    assert beam.cum_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)


def test_against_transformers(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    """L51: the same beams and sums as transformers'. length_penalty is 0, as lengths are counted differently there.

    With an EOS, transformers takes up only the endings among the `num_beams` best candidates of a step, and vLLM's
    search all that it sees: then ours can be better (last prompt), and never worse.
    """
    def search_both(prompt: list[int], eos: int | None
                    ) -> tuple[list[BeamSearchSequence], list[list[int]], list[float]]:
        found = search(llm, [prompt], beam_width=4, max_tokens=8, ignore_eos=eos is None, length_penalty=0.0)
        theirs = tiny_hf.generate(
            torch.tensor([prompt]), num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False,
            length_penalty=0.0, early_stopping="never", eos_token_id=eos, pad_token_id=2, return_dict_in_generate=True,
            output_scores=True)
        return (found[0].sequences, [[t for t in row if t != 2] for row in theirs.sequences.tolist()],
                theirs.sequences_scores.tolist())

    ours, tokens, scores = search_both([0, 40, 41, 42], None)
    assert [s.tokens for s in ours] == tokens
    assert [s.cum_logprob for s in ours] == pytest.approx(scores, abs=1e-4)
    ours, tokens, scores = search_both([0, 83, 27, 32], 1)
    assert ours[0].tokens == tokens[0] and tokens[0][-1] == 1
    assert ours[0].cum_logprob == pytest.approx(scores[0], abs=1e-4)
    ours, tokens, scores = search_both([0, 5, 154, 279], 1)
    assert ours[0].tokens[-1] == 1 and ours[0].cum_logprob > scores[0] + 1


# Records

def test_records() -> None:
    """L51: text decodes prompt and generation; an EOS ends a beam with "stop", the limit with "length"."""
    tokenizer = piece_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])

    def script(request: Request) -> torch.Tensor:
        row = torch.full((len(tokenizer),), -20.0)
        row[a] = 1.0
        rival, value = (tokenizer.eos_token_id, 0.5) if request.num_tokens == 2 else (b, 0.0)
        row[rival] = value
        return row

    llm = scripted_llm(tokenizer, script)
    first, second = search(llm, "p", beam_width=2, max_tokens=2, length_penalty=0.5)[0].sequences
    assert (first.text, first.finish_reason, first.stop_reason) == ("paa", "length", None)
    assert (second.text, second.finish_reason, second.stop_reason) == ("pa", "stop", tokenizer.eos_token_id)
    assert second.tokens == [*tokenizer.encode("pa"), tokenizer.eos_token_id]
    for beam in (first, second):
        chosen = [place[t].logprob for place, t in zip(beam.logprobs, beam.tokens[1:], strict=True)]
        assert beam.cum_logprob == pytest.approx(sum(chosen)) and all(len(place) == 4 for place in beam.logprobs)
    assert first.cum_logprob == pytest.approx(-math.log(1 + math.exp(-1.0)) - math.log(1 + math.exp(-0.5)), abs=1e-3)
    kept = search(llm, {"prompt": "p", "cache_salt": "s"}, beam_width=2, max_tokens=2, length_penalty=0.5,
                  include_stop_str_in_output=True)
    assert kept[0].sequences[1].text == "pa</s>"
    plan = llm.llm_engine.model_runner.plans[-1]
    assert [s.request.cache_salt for s in plan.scheduled.values()] == ["s", "s"]


def test_without_a_tokenizer() -> None:
    """An engine that knows ids only finds the same beams; their texts stay empty."""
    config = make_config(64, max_logprobs=-1)
    runner = ScriptedRunner(lambda r: tiny_logits(tuple(r.all_token_ids)), VOCAB, 257, 64, "raw_logprobs")
    llm = llm_of(LLMEngine(config, runner, None, VOCAB, {"eos_token_id": EOS}))
    bare, full = (search(x, [[1, 2]], beam_width=2, max_tokens=4)[0].sequences for x in (llm, tiny_llm()))
    assert [s.tokens for s in bare] == [s.tokens for s in full] and {s.text for s in bare} == {""}
    assert full[0].text.startswith("<1><2>")


def test_all_of_the_models_eos_ids_end_a_beam() -> None:
    """L51: those of generation_config.json too, as in `generate`."""
    tokenizer = piece_tokenizer()
    a = tokenizer.convert_tokens_to_ids("a")
    llm = scripted_llm(tokenizer, [a], generation_config={"eos_token_id": [0, a]})
    [beam] = search(llm, "p", beam_width=1, max_tokens=5)[0].sequences
    assert (beam.tokens[1:], beam.finish_reason, beam.stop_reason) == ([a], "stop", a)


def test_score() -> None:
    """L51: cum_logprob / len ** length_penalty, where a final EOS does not count."""
    assert get_beam_search_score([5, 6, 7], -6.0, 1) == -2.0
    assert get_beam_search_score([5, 6, 1], -6.0, 1) == -3.0
    assert get_beam_search_score([5, 6, 1], -6.0, 1, 2.0) == -1.5
    assert get_beam_search_score([5, 6, 1], -6.0, 1, 0.0) == -6.0


def test_beams_end_with_the_context() -> None:
    """A prompt near the context's end gets what is left of it; the others go on."""
    short, long = search(tiny_llm(max_model_len=8), [[1], [1] * 6], beam_width=2, max_tokens=5, ignore_eos=True)
    assert [len(s.tokens) for s in (*short.sequences, *long.sequences)] == [6, 6, 8, 8]
    assert {s.finish_reason for s in long.sequences} == {"length"}


def test_prefix_cache_spares_the_common_part() -> None:
    """L51: of the beams' tokens, only those of unfinished blocks are computed again."""
    computed = {}
    for caching in (True, False):
        llm = tiny_llm(enable_prefix_caching=caching)
        search(llm, [[1, 2, 3, 4] * 8], beam_width=3, max_tokens=8, ignore_eos=True)
        computed[caching] = sum(p.total_num_scheduled_tokens for p in llm.llm_engine.model_runner.plans)
    beams = 1 + 7 * 3
    assert computed[False] >= beams * 32 and computed[True] <= 32 + (beams - 1) * 4


def test_temperature_adds_a_drawn_candidate() -> None:
    """Without it the search is fixed; with it a beam may also take an unlikely token that it drew. Scores do not
    change."""
    fixed = {tuple(search(tiny_llm(), [[1]], beam_width=1, max_tokens=1, ignore_eos=True)[0].sequences[0].logprobs[0])
             for _ in range(3)}
    llm = tiny_llm()
    drawn = {tuple(search(llm, [[1]], beam_width=1, max_tokens=1, ignore_eos=True, temperature=2.0)[0]
                   .sequences[0].logprobs[0]) for _ in range(40)}
    assert {len(d) for d in fixed} == {2} and {len(d) for d in drawn} == {2, 3}
    best = search(llm, [[1]], beam_width=1, max_tokens=1, ignore_eos=True, temperature=2.0)[0].sequences[0]
    assert best.cum_logprob == pytest.approx(tiny_logits((1,)).log_softmax(0).max().item())


def test_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    tiny_llm().beam_search([[1]], BeamSearchParams(2, 3), use_tqdm=True)
    assert "Beam search: 100%" in capfd.readouterr().err
    tiny_llm().beam_search([[1]], BeamSearchParams(2, 3))
    assert capfd.readouterr().err == ""


# What is refused

@pytest.mark.parametrize("name, value", [
    ("beam_width", 0), ("beam_width", 1.5), ("max_tokens", 0), ("max_tokens", None), ("ignore_eos", 1),
    ("temperature", -1.0), ("temperature", 3.0), ("length_penalty", math.nan), ("length_penalty", 51.0),
    ("include_stop_str_in_output", "yes")])
def test_bad_params(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=name) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})
    assert caught.value.parameter == name


def test_defaults() -> None:
    assert vars(BeamSearchParams(2, 3)) == {
        "beam_width": 2, "max_tokens": 3, "ignore_eos": False, "temperature": 0.0, "length_penalty": 1.0,
        "include_stop_str_in_output": False}
    assert BeamSearchSequence([1]).finish_reason is None


def test_refused_by_the_engine() -> None:
    """Said before anything is computed; nothing is left of it."""
    llm = tiny_llm(max_logprobs=5)
    assert search(llm, [[1]], beam_width=2, max_tokens=1)
    for arguments, error, message in [
            (([[1]], BeamSearchParams(3, 1)), VLLMValidationError, "looks at the 6 most likely .* max_logprobs=5"),
            (([[1]], greedy()), TypeError, "params must be BeamSearchParams, got SamplingParams"),
            (([[1], []], BeamSearchParams(1, 1)), VLLMValidationError, "prompt cannot be empty"),
            (([[1], [9]], BeamSearchParams(1, 1)), VLLMValidationError, "out of vocabulary"),
            (([[1] * 64], BeamSearchParams(1, 1)), VLLMValidationError, "maximum context length"),
            (([[1]], BeamSearchParams(1, 1), None, False, 0), VLLMValidationError, "concurrency_limit"),
            (([[1]], BeamSearchParams(1, 1), [None, None]), VLLMValidationError, "lengths of prompts")]:
        plans = len(llm.llm_engine.model_runner.plans)
        with pytest.raises(error, match=message):
            llm.beam_search(*arguments)
        assert len(llm.llm_engine.model_runner.plans) == plans
        assert_clean(llm.llm_engine)
    with pytest.raises(VLLMValidationError, match="logprobs_mode='raw_logits' does not report"):
        tiny_llm(logprobs_mode="raw_logits").beam_search([[1]], BeamSearchParams(1, 1))
    assert llm.beam_search([], BeamSearchParams(1, 1)) == []
