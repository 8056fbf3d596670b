"""Greedy tokens in float32: those of transformers, under any budget, pool, block size, batch or mishap."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.core.support import assert_clean, make_params
from tests.core.test_decoder import ARCHITECTURES, smooth_model
from tests.models.hf_models import SIZES
from tutorial_engine import LLM, attention
from tutorial_engine.exceptions import EngineGenerateError
from tutorial_engine.models.decoder import Decoder
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams

MAX_MODEL_LEN = 80
SHARED = list(range(20, 53))  # the beginning of several prompts


@functools.cache
def reference_model(architecture: str) -> PreTrainedModel:
    return smooth_model(architecture)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def save(architecture: str, path: Path) -> Path:
    """The model in Hugging Face's layout, with a tokenizer that knows the words w0 to w95."""
    reference_model(architecture).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(architecture, tmp_path_factory.mktemp(architecture))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what has nothing to do with the architecture."""
    return save("llama", tmp_path_factory.mktemp("one"))


def make_prompts() -> list[list[int]]:
    """Lengths around the edges of blocks of 4 and 16; one that leaves one token; beginnings shared and repeated."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 96) for _ in range(n)] for n in (1, 3, 4, 5, 15, 16, 17, 31, 79)]
    prompts += [SHARED[:n] + [rng.randrange(2, 96)] for n in (16, 24, 32)]
    return [*prompts, SHARED, SHARED, prompts[6]]


PROMPTS = make_prompts()
NUM_TOKENS = [7, 12, 3, 20, 9, 12, 1, 14, 5, 12, 10, 11, 9, 13, 6]


@functools.cache
def solo(architecture: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """transformers, one request, no cache: each token is the argmax over the whole text so far."""
    text = list(prompt)
    for _ in range(min(num_tokens, MAX_MODEL_LEN - len(prompt))):
        with torch.inference_mode():
            logits = reference_model(architecture)(torch.tensor([text])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        assert first - second > 2e-4, "too close to call in float32: choose other prompts"
        text.append(int(logits.argmax()))
    return text[len(prompt):]


def right(architecture: str) -> list[list[int]]:
    return [solo(architecture, tuple(p), n) for p, n in zip(PROMPTS, NUM_TOKENS, strict=True)]


def generate(llm: LLM, **kwargs: Any) -> list[RequestOutput]:
    params = [make_params(n, detokenize=False) for n in NUM_TOKENS]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **kwargs)
    assert [o.prompt_token_ids for o in outputs] == PROMPTS  # B21
    assert_clean(llm.llm_engine)
    return outputs


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def make_llm(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), max_model_len=MAX_MODEL_LEN, **{"num_gpu_blocks_override": 400, "block_size": 4, **args})


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "blocks of 1": {"block_size": 1},
    "blocks of 3": {"block_size": 3},
    "blocks of 16": {"block_size": 16},
    "blocks of 128": {"block_size": 128},
    "no prefix caching": {"enable_prefix_caching": False},
    "budget of 4": {"max_num_batched_tokens": 4, "max_num_seqs": 4},
    "budget of 33": {"max_num_batched_tokens": 33},
    "threshold of 5": {"long_prefill_token_threshold": 5},
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN},
    # 20 usable blocks of 4 hold exactly one longest request.
    "smallest pool": {"num_gpu_blocks_override": 21},
    "smallest pool, no caching": {"num_gpu_blocks_override": 21, "enable_prefix_caching": False},
    "smallest pool, little budget": {"num_gpu_blocks_override": 21, "max_num_batched_tokens": 16, "max_num_seqs": 8,
                                     "scheduler_reserve_full_isl": False},
    "watermark": {"num_gpu_blocks_override": 31, "watermark": 0.2},
    "small pool, priority": {"num_gpu_blocks_override": 25, "scheduling_policy": "priority",
                             "max_num_batched_tokens": 24, "scheduler_reserve_full_isl": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on_the_engine(architecture: str, folder: Path, name: str) -> None:
    settings = SETTINGS[name]
    with make_llm(folder, **settings) as llm:
        priority = [i % 3 for i in range(len(PROMPTS))] if "scheduling_policy" in settings else None
        preemptions = []
        llm.llm_engine.listeners.append(lambda _, plan, tables, kept: preemptions.extend(plan.preempted))
        first = generate(llm, priority=priority)
        assert ids(first) == right(architecture)
        assert preemptions or "small" not in name, "the pool is small, but large enough: the test shows nothing"
        # Again: now the blocks of the first time are found, the tokens are the same.
        second = generate(llm, priority=priority)
        assert ids(second) == ids(first)
        if not settings:
            assert [o.num_cached_tokens for o in second] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]  # E8
            assert llm.reset_prefix_cache() and ids(generate(llm)) == ids(first)


def test_preemption_is_counted_and_its_lookups_are_not(llama: Path) -> None:
    """B16, B23: each token counts once, and a request that finds its own blocks again is no hit."""
    with make_llm(llama, num_gpu_blocks_override=21, disable_log_stats=False) as llm:
        prompts = [[i] * 20 for i in (5, 6)]
        outputs = llm.generate(prompts, make_params(24), use_tqdm=False)
        assert sum(o.metrics.num_preemptions for o in outputs) >= 1
        assert [o.metrics.num_generation_tokens for o in outputs] == [24, 24]
        stats = llm.llm_engine.scheduler.kv_cache_manager.prefix_cache_stats
        assert stats.queries == 40 and stats.hits == 0 and stats.preempted_queries > 0


def test_prompts_longer_than_a_tile(architecture: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", 8)
    with make_llm(folder) as llm:
        assert ids(generate(llm)) == right(architecture)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(llama: Path, seed: int) -> None:
    """Arrivals and aborts at random moments: whoever stays gets what they would have got alone."""
    rng = random.Random(seed)
    with make_llm(llama, num_gpu_blocks_override=31, max_num_batched_tokens=20, max_num_seqs=5) as llm:
        engine = llm.llm_engine
        todo = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        got: dict[int, list[int]] = {}
        alive: set[int] = set()
        while todo or engine.has_unfinished_requests():
            while todo and rng.random() < 0.4:
                i = todo.pop()
                alive.add(i)
                got[i] = []
                engine.add_request(str(i), PROMPTS[i], make_params(
                    NUM_TOKENS[i], detokenize=False, output_kind=RequestOutputKind.DELTA))
            if alive and rng.random() < 0.05:
                i = rng.choice(sorted(alive))
                engine.abort_request([str(i)])
                alive.discard(i)
            for output in engine.step():
                got[int(output.request_id)] += output.outputs[0].token_ids
                if output.finished:
                    assert got[int(output.request_id)] == right("llama")[int(output.request_id)]
                    alive.discard(int(output.request_id))
        assert all(tokens == right("llama")[i][:len(tokens)] for i, tokens in got.items())
        assert_clean(engine)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_after_a_failed_step_the_engine_is_as_good_as_new(llama: Path, error: BaseException, call: int,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer fails, so all others have already written keys and values of the step."""
    right_forward, calls = Decoder.compute_logits, []

    def fail_once(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise error
        return right_forward(self, hidden)

    monkeypatch.setattr(Decoder, "compute_logits", fail_once)
    with make_llm(llama, max_num_seqs=6, num_gpu_blocks_override=41) as llm:
        with pytest.raises(EngineGenerateError if isinstance(error, Exception) else KeyboardInterrupt):
            generate(llm)
        assert_clean(llm.llm_engine)
        assert ids(generate(llm)) == right("llama")
        assert len(llm.llm_engine.model_runner.input_batch._row) <= 6


def test_random_sampling_does_not_depend_on_the_engine_either(llama: Path) -> None:
    """B06: n completions with one seed are n requests with the seeds that follow; batch and pool change nothing."""
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = []
    for settings in ({}, {"num_gpu_blocks_override": 21, "max_num_batched_tokens": 16, "max_num_seqs": 8}):
        with make_llm(llama, **settings) as llm:
            for _ in range(2):
                (output,) = llm.generate([SHARED], params, use_tqdm=False)
                answers.append([c.token_ids for c in output.outputs])
            singles = [SamplingParams(seed=7 + i, temperature=1.0, max_tokens=12, ignore_eos=True, detokenize=False)
                       for i in range(4)]
            answers.append(ids(llm.generate([SHARED] * 4, singles, use_tqdm=False)))
    assert all(answer == answers[0] for answer in answers) and len({tuple(a) for a in answers[0]}) > 1


COMPANY: dict[str, dict[str, Any]] = {
    "all at once": {}, "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "two at a time": {"max_num_seqs": 2, "enable_prefix_caching": False},
    "small pool": {"num_gpu_blocks_override": 21, "max_num_batched_tokens": 16, "max_num_seqs": 8,
                   "scheduler_reserve_full_isl": False}}


@functools.cache
def seeded_alone(llama: Path) -> list[list[int]]:
    """What each prompt gets by itself, one after another."""
    with make_llm(llama, enable_prefix_caching=False) as llm:
        return [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, seeded_params(), strict=True)]


def seeded_params() -> list[SamplingParams]:
    knobs: list[dict[str, Any]] = [{}, {"top_k": 9}, {"temperature": 0.6, "repetition_penalty": 1.3}, {"top_p": 0.8},
                                   {"min_p": 0.05, "presence_penalty": 1.0}]
    return [SamplingParams(seed=i, max_tokens=n, ignore_eos=True, detokenize=False, **knobs[i % len(knobs)])
            for i, n in enumerate(NUM_TOKENS)]


@pytest.mark.parametrize("name", COMPANY)
def test_seeded_requests_draw_the_same_tokens_in_any_company(llama: Path, name: str) -> None:
    """P10: batch composition, order, chunking and preemption change nothing; strangers without a seed take part."""
    rng = random.Random(name)
    with make_llm(llama, **COMPANY[name]) as llm:
        preempted, chunks = [], []
        llm.llm_engine.listeners += [lambda _, plan, tables, kept: preempted.extend(plan.preempted),
                                     lambda _, plan, tables, kept: chunks.extend(plan.scheduled.keys() - kept.keys())]
        order = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        strangers = rng.sample(PROMPTS, 4)
        params = [seeded_params()[i] for i in order] + [SamplingParams(max_tokens=5, ignore_eos=True)] * 4
        outputs = ids(llm.generate([PROMPTS[i] for i in order] + strangers, params, use_tqdm=False))
        assert [outputs[order.index(i)] for i in range(len(PROMPTS))] == seeded_alone(llama)
        assert bool(preempted) == (name == "small pool") and bool(chunks) == (name in ("in chunks", "small pool"))
        assert_clean(llm.llm_engine)


def test_prompt_logprobs_are_complete_however_often_they_are_asked_for(llama: Path) -> None:
    """B19: such a request does not read the cache, and chunks and preemption leave no gap and no double."""
    params = make_params(3, prompt_logprobs=1, detokenize=False)
    values = []
    for settings in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"num_gpu_blocks_override": 21}):
        with make_llm(llama, **settings) as llm:
            for _ in range(2):
                outputs = llm.generate([SHARED, SHARED[:17]], params, use_tqdm=False)
                assert [o.num_cached_tokens for o in outputs] == [0, 0]
                assert [len(o.prompt_logprobs) for o in outputs] == [33, 17]
                assert all(o.prompt_logprobs[0] is None for o in outputs)
                values.append([[entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], SHARED[1:])]
                               for o in outputs])
    for value in values[1:]:
        for ours, first in zip(value, values[0]):
            assert ours == pytest.approx(first, abs=1e-4)


def test_what_the_model_recommends_may_come_from_another_folder(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 3, "max_new_tokens": 5}')
    with make_llm(llama, generation_config=str(tmp_path)) as llm:
        assert llm.llm_engine.get_tokenizer().eos_token == "w1"
        (output,) = llm.generate([SHARED], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 5 and llm.get_default_sampling_params().top_k == 3


def test_close_gives_the_memory_back(llama: Path) -> None:
    llm = make_llm(llama)
    llm.generate([SHARED], make_params(2), use_tqdm=False)
    runner = llm.llm_engine.model_runner
    kept = [weakref.ref(t) for t in (runner.kv_cache.key[0], runner.model.embed_tokens, runner.model.layers[0])]
    del runner
    llm.close()
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]
    assert repr(llm) == "LLM(closed)"
