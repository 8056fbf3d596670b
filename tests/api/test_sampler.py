"""The sampler: the order of its stages, the distribution it draws from, and what it reports.

Two slow twins. `final_logits` below applies all stages to one row, token by token, in float64; `brute_force_probs` is
the sampler's own definition of the distribution. The sampler must agree with the first exactly (the processed logprobs
show its last logits) and with the second statistically.
"""

import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.api.support import chi_square_p
from tutorial_engine import SamplingParams, sampler
from tutorial_engine.request import Request
from tutorial_engine.sampler import (
    MASK64,
    LogprobsLists,
    Sampler,
    SamplingMetadata,
    apply_penalties,
    brute_force_probs,
    gumbel_noise,
    noise_key,
    noise_keys,
    truncate,
    truncate_head,
)

CPU = torch.device("cpu")
INF = math.inf


def make_row(params: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 0,
             masked: Sequence[int] = (), bad_words: Sequence[list[int]] = ()) -> Request:
    request = Request("r", list(prompt), params, seed=seed, masked_stop_ids=frozenset(masked),
                      bad_words_token_ids=list(bad_words))
    request.all_token_ids += output
    return request


def metadata(rows: list[Request], vocab_size: int) -> SamplingMetadata:
    return SamplingMetadata(rows, [r.num_tokens for r in rows], vocab_size, CPU)


def sample(logits: torch.Tensor, rows: list[Request], mode: str = "raw_logprobs"
           ) -> tuple[list[int], LogprobsLists | None]:
    return Sampler(mode)(logits.clone(), metadata(rows, logits.shape[1]))


def as_dicts(lists: LogprobsLists) -> list[dict[int, float]]:
    return [dict(zip(ids, values, strict=True)) for ids, values in zip(lists.token_ids, lists.logprobs, strict=True)]


def penalised(logits: list[float], row: Request) -> list[float]:
    out = torch.tensor([logits])
    apply_penalties(out, metadata([row], len(logits)))
    return out[0].tolist()


# Penalties


def test_penalties_of_one_token_in_their_order() -> None:
    """Logit 2, in the prompt and once in the output: 2 / 2 - 0.25 * 1 - 0.5 = 0.25."""
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.25, presence_penalty=0.5)
    assert penalised([0.0, 2.0], make_row(params, prompt=[1], output=[1])) == [0.0, 0.25]


@pytest.mark.parametrize("knobs, expected", [
    ({"repetition_penalty": 2.0}, {10: 1.0, 11: -4.0, 12: 1.0}),
    ({"presence_penalty": 1.0}, {10: 2.0, 11: -2.0, 12: 1.0}),
    ({"frequency_penalty": 0.5}, {10: 2.0, 11: -2.0, 12: 1.0}),
    ({"repetition_penalty": 0.5}, {10: 4.0, 11: -1.0, 12: 4.0}),
    ({"presence_penalty": -2.0, "frequency_penalty": -0.25}, {10: 2.0, 11: -2.0, 12: 4.5})])
def test_prompt_counts_for_repetition_only(knobs: dict[str, float], expected: dict[int, float]) -> None:
    logits = [2.0] * 14
    logits[11] = -2.0
    got = penalised(logits, make_row(SamplingParams(**knobs), prompt=[10, 11], output=[12, 12]
                                     if "frequency_penalty" in knobs else [12]))
    assert {i: got[i] for i in (10, 11, 12)} == expected
    assert [got[i] for i in range(14) if i not in expected] == [2.0] * 11


def test_penalties_touch_only_the_rows_that_ask() -> None:
    logits = torch.full((3, 4), 2.0)
    rows = [make_row(SamplingParams()), make_row(SamplingParams(repetition_penalty=2), prompt=[1]),
            make_row(SamplingParams(presence_penalty=1), prompt=[1])]
    apply_penalties(logits, metadata(rows, 4))
    assert logits.tolist() == [[2, 2, 2, 2], [2, 1, 2, 2], [2, 2, 2, 2]]


# All stages, against the twin


def final_logits(logits: list[float], row: Request) -> list[float]:
    """All stages on one row by their definitions, in the order of the module's picture."""
    p, x = row.sampling_params, list(logits)
    if p.allowed_token_ids is not None:
        x = [v if i in p.allowed_token_ids else -INF for i, v in enumerate(x)]
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    if row.num_output_tokens < p.min_tokens:
        x = [-INF if i in row.masked_stop_ids else v for i, v in enumerate(x)]
    for i in range(len(x)):
        count = row.output_token_ids.count(i)
        if count or i in row.prompt_token_ids:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * count
        x[i] -= p.presence_penalty * (count > 0)
    before = list(x)
    for word in row.bad_words_token_ids:
        if row.output_token_ids[len(row.output_token_ids) - len(word) + 1:] == word[:-1]:
            x[word[-1]] = -INF
    if p.allowed_token_ids is not None and max(x) == -INF:
        x = before
    if p.greedy:
        return x
    x = [v / p.temperature for v in x]
    weights = [math.exp(v - max(x)) for v in x]
    x = [v if w >= p.min_p else -INF for v, w in zip(x, weights, strict=True)]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if 0 < p.top_k < len(x):
        x = [v if v >= x[order[p.top_k - 1]] else -INF for v in x]
    total = sum(math.exp(v - max(x)) for v in x)
    mass = 0.0
    for n, i in enumerate(order):
        probability = math.exp(x[i] - max(x)) / total
        if p.top_p < 1 and mass >= p.top_p and n:
            x[i] = -INF
        mass += probability
    return x


def log_softmax(x: list[float]) -> list[float]:
    top = max(x)
    total = top + math.log(sum(math.exp(v - top) for v in x))
    return [v - total for v in x]


VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=5)
# Quarters are exact in float32, and make ties; the odd hundredths keep top_p and min_p off every exact boundary.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
KNOBS = st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])}, optional={
    "top_k": st.integers(-1, VOCAB + 2), "top_p": st.integers(0, 99).map(lambda n: (n + 0.37) / 100),
    "min_p": st.integers(0, 99).map(lambda n: (n + 0.37) / 100),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]), "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-4.0, 1.5, 100.0]), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), "min_tokens": st.integers(0, 6)})
ROWS = st.builds(make_row, KNOBS.map(lambda k: SamplingParams(**k, logprobs=-1)),
                 TOKENS.filter(bool), TOKENS, st.integers(0, 99), st.lists(st.integers(0, VOCAB - 1), max_size=2),
                 st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=2))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LOGITS, ROWS), min_size=1, max_size=4), st.sampled_from([4, 256]))
def test_every_stage_agrees_with_its_definition(batch: list[tuple[list[float], Request]], head: int) -> None:
    expected = [final_logits(logits, row) for logits, row in batch]
    batch = [b for b, e in zip(batch, expected, strict=True) if max(e) > -INF]
    expected = [e for e in expected if max(e) > -INF]
    if not batch:
        return
    logits = torch.tensor([logits for logits, _ in batch])
    with mock.patch.object(sampler, "HEAD", head):
        tokens, lists = sample(logits, [row for _, row in batch], "processed_logprobs")
    for token, got, want, (_, row) in zip(tokens, as_dicts(lists), expected, batch, strict=True):
        want = log_softmax(want)
        assert [got[i] == -INF for i in range(VOCAB)] == [v == -INF for v in want]
        assert [got[i] for i in range(VOCAB)] == pytest.approx(want, abs=1e-4)
        assert got[token] > -INF
        if row.sampling_params.greedy:
            assert token == want.index(max(want))


def test_raw_values_are_those_of_the_model() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2)
    knobs = {"logprobs": -1, "repetition_penalty": 2.0, "logit_bias": {3: 100.0}, "allowed_token_ids": [0, 3]}
    rows = [make_row(SamplingParams(**own, **knobs)) for own in ({"temperature": 0}, {"temperature": 0.5, "top_k": 1})]
    tokens, lists = sample(logits, rows, "raw_logprobs")
    assert tokens == [3, 3]
    for got in as_dicts(lists):
        assert [got[i] for i in range(4)] == pytest.approx(log_softmax([2.0, 1.0, 0.0, -1.0]), abs=1e-6)
    assert as_dicts(sample(logits, rows, "raw_logits")[1])[0] == {0: 2.0, 1: 1.0, 2: 0.0, 3: -1.0}
    processed = as_dicts(sample(logits, rows, "processed_logits")[1])
    assert processed == [{0: 1.0, 1: -INF, 2: -INF, 3: 99.0}, {0: -INF, 1: -INF, 2: -INF, 3: 198.0}]


# min_tokens, bad words, ties, top_k, top_p


def test_min_tokens_masks_stop_ids_until_enough_is_said() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]])
    row = make_row(SamplingParams(temperature=0, min_tokens=2), masked=[0, 1])
    said = []
    for _ in range(3):
        (token,), _ = sample(logits, [row])
        said.append(token)
        row.all_token_ids.append(token)
    assert said == [2, 2, 0]


@pytest.mark.parametrize("output, allowed, min_tokens, token", [
    ([], None, 0, 0),  # no bad word is begun
    ([0], None, 0, 1), ([5, 0], None, 0, 1), ([0, 5], None, 0, 0),
    ([0], [0, 2], 0, 2),
    ([0], [0], 0, 0),  # nothing else is allowed
    ([0], [0, 3], 2, 0), ([0], [0, 3], 1, 3)])  # the rest of what is allowed is masked, or is not
def test_bad_words_forbid_their_last_token(output: list[int], allowed: list[int] | None, min_tokens: int, token: int
                                           ) -> None:
    """The bad word is [0, 0]; only what was generated begins it, not the prompt."""
    params = SamplingParams(temperature=0, allowed_token_ids=allowed, min_tokens=min_tokens)
    row = make_row(params, prompt=[0], output=output, masked=[3], bad_words=[[0, 0]])
    assert sample(torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0]]), [row])[0] == [token]


def kept_ids(probs: list[float], **knobs: Any) -> list[int]:
    logits = torch.tensor([probs]).log()
    params = SamplingParams(**knobs)
    k = params.top_k if 0 < params.top_k < len(probs) else len(probs)
    (kept,) = truncate(logits, [k], [params.top_p]) > -INF
    assert (brute_force_probs(logits[0], params) > 0).tolist() == kept.tolist()
    return kept.nonzero()[:, 0].tolist()


def test_top_k_before_top_p() -> None:
    """Top 2 are renormalised first: 0.4 of 0.7 is more than half."""
    assert kept_ids([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.5) == [3]
    assert kept_ids([0.1, 0.2, 0.3, 0.4], top_p=0.5) == [2, 3]
    assert kept_ids([0.1, 0.2, 0.3, 0.4], top_p=0.399) == [3]
    assert kept_ids([0.1, 0.2, 0.3, 0.4], top_p=1e-9) == [3]  # the most likely one always stays


def test_tokens_that_tie_with_the_kth_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]])
    assert (truncate(logits, [3], [1.0])[0] > -INF).tolist() == [False, True, True, True, True]


def test_equal_tokens_at_the_edge_of_the_nucleus_go_by_id() -> None:
    assert kept_ids([0.25] * 4, top_p=0.6) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 10**6, 0, -1])
def test_top_k_of_the_vocabulary_or_more_is_no_restriction(top_k: int) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    free = [make_row(SamplingParams(logprobs=-1), seed=s) for s in (1, 2)]
    wide = [make_row(SamplingParams(logprobs=-1, top_k=top_k), seed=1), free[1]]
    assert sample(logits, wide, "processed_logprobs") == sample(logits, free, "processed_logprobs")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 4, 5, 7, 40]), st.sampled_from([0.0, 0.25, 1.0, 20.0]),
       st.lists(st.tuples(st.integers(1, 60), st.integers(0, 100).map(lambda n: min(1.0, (n + 0.37) / 100))),
                min_size=1, max_size=4))
@example(0, 40, 0.0, [(40, 1.0), (40, 0.5037), (8, 0.5037), (7, 0.9937), (39, 0.5037)])
@example(0, 40, 0.25, [(3, 0.1037)])  # more tokens tie with the third than the head holds
def test_head_agrees_with_the_full_sort(seed: int, vocab_size: int, spread: float, knobs: list[tuple[int, float]]
                                        ) -> None:
    """Looking at the head only: either the very same tokens are kept, or it says that the head was not enough."""
    logits = torch.randn(len(knobs), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * 4).round() / 4  # many ties
    top_k, top_p = [min(k, vocab_size) for k, _ in knobs], [p for _, p in knobs]
    with mock.patch.object(sampler, "HEAD", 8):
        kept, ids, enough = truncate_head(logits, top_k, top_p)
    full = truncate(logits, top_k, top_p)
    for row in range(len(knobs)):
        assert len(set(ids[row].tolist())) == ids.shape[1]
        spread_out = torch.full((vocab_size,), -INF).scatter(0, ids[row], kept[row])
        if enough[row]:
            assert spread_out.tolist() == full[row].tolist()
        else:
            assert vocab_size > 8 and (full[row] > -INF).sum() >= 1


def test_head_is_enough_for_common_knobs() -> None:
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0)) * 4
    logits[4, 3:] = -INF  # as min_p may leave it
    assert all(truncate_head(logits, [50, 5000, 1, 255, 50], [0.95, 0.9, 1.0, 0.5, 0.9])[2])


# The distribution

COMBINATIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.05, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.6, "min_p": 0.1}, {"top_k": 1}, {"top_k": 10**6, "top_p": 0.999}]


@pytest.mark.parametrize("knobs", COMBINATIONS, ids=str)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(knobs: dict[str, Any], vary: str) -> None:
    num = 3000 if vary == "seed" else 1500
    params = SamplingParams(**knobs)
    row = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    if vary == "seed":
        rows = [make_row(params, seed=seed) for seed in range(num)]
    else:
        rows = [make_row(params, prompt=range(n), seed=11) for n in range(1, num + 1)]
    tokens, _ = sample(row.repeat(num, 1), rows)
    counts = torch.bincount(torch.tensor(tokens), minlength=40)
    assert chi_square_p(counts, brute_force_probs(row, params)) > 1e-3


@pytest.mark.parametrize("knobs", [{"top_p": 0.9}, {"top_k": 300}, {"top_k": 280, "top_p": 0.7}, {"min_p": 0.5}],
                         ids=str)
def test_draws_from_rows_that_are_flatter_than_the_head(knobs: dict[str, Any]) -> None:
    """More tokens are kept than the head holds."""
    num, vocab_size = 8_000, 400
    params = SamplingParams(**knobs)
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(2)) * 0.3
    probs = brute_force_probs(row, params)
    assert (probs > 0).sum() > 100
    rows = [make_row(params, seed=seed) for seed in range(num)]
    tokens, _ = sample(row.repeat(num, 1), rows)
    assert chi_square_p(torch.bincount(torch.tensor(tokens), minlength=vocab_size), probs) > 1e-3


def test_draws_after_penalties_bias_and_masks() -> None:
    num = 3000
    params = SamplingParams(temperature=0.8, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3,
                            logit_bias={3: 2.0}, allowed_token_ids=list(range(1, 20)), min_tokens=9, top_k=15,
                            top_p=0.95)
    row = torch.randn(24, generator=torch.Generator().manual_seed(3))
    rows = [make_row(params, [1, 2, 3], [4, 4, 5], seed, masked=[6], bad_words=[[4, 5, 7], [8]]) for seed in range(num)]
    tokens, _ = sample(row.repeat(num, 1), rows)
    counts = torch.bincount(torch.tensor(tokens), minlength=24)
    assert counts[[0, 6, 7, 8, 20]].sum() == 0
    expected = torch.tensor(final_logits(row.tolist(), rows[0]), dtype=torch.float64).softmax(0)
    assert chi_square_p(counts, expected) > 1e-3


def test_the_test_would_notice() -> None:
    row = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    tokens, _ = sample(row.repeat(4000, 1), [make_row(SamplingParams(), seed=s) for s in range(4000)])
    counts = torch.bincount(torch.tensor(tokens), minlength=40)
    assert chi_square_p(counts, brute_force_probs(row, SamplingParams(temperature=0.9))) < 1e-3


def test_brute_force_of_a_greedy_row() -> None:
    assert brute_force_probs(torch.tensor([0.0, 3.0, 3.0]), SamplingParams(temperature=0)).tolist() == [0.0, 1.0, 0.0]


# Randomness


def test_a_draw_depends_on_nothing_but_seed_position_and_logits() -> None:
    rng = random.Random(0)
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(4))
    knobs = [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0}, {"min_p": 0.1, "temperature": 0.5}, {"logprobs": 2}]
    rows = [make_row(SamplingParams(**rng.choice(knobs)), prompt=range(rng.randint(1, 9)), seed=rng.randint(0, 5))
            for _ in range(30)]
    alone = [sample(logits[[i]], [rows[i]])[0][0] for i in range(30)]
    for _ in range(5):
        chosen = rng.sample(range(30), rng.randint(2, 30))
        assert sample(logits[chosen], [rows[i] for i in chosen])[0] == [alone[i] for i in chosen]


def test_greedy_rows_beside_random_ones() -> None:
    logits = torch.randn(40, 20, generator=torch.Generator().manual_seed(5))
    rows = [make_row(SamplingParams(temperature=i % 2, top_k=0), seed=i) for i in range(40)]
    tokens, _ = sample(logits, rows)
    assert tokens[::2] == logits[::2].argmax(dim=-1).tolist() != tokens[1::2]


def test_same_seed_other_position_other_noise() -> None:
    keys = {noise_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000
    assert all(-(2**63) <= key < 2**63 for key in keys) and min(keys) < 0 < max(keys)
    assert noise_key(7, 3) == noise_key(7, 3) and noise_key(2**63 - 1, 1) != noise_key(-(2**63), 1)


def test_the_keys_of_many_rows_are_those_of_each() -> None:
    seeds = [0, 1, 7, 2**63 - 1, -1, -(2**63), 2**64 - 1, 123456789] * 50
    positions = [(i * i) % 4099 for i in range(len(seeds))]
    keys = noise_keys(np.array([seed & MASK64 for seed in seeds], dtype=np.uint64), np.array(positions))
    assert keys.dtype == np.int64 and keys.tolist() == [noise_key(s, p) for s, p in zip(seeds, positions, strict=True)]


def test_noise_is_gumbel_and_finite() -> None:
    """Mean 0.5772, variance pi^2 / 6; neighbours (by key, by token) are uncorrelated."""
    keys = torch.tensor([[noise_key(0, p)] for p in range(500)])
    noise = gumbel_noise(keys, torch.arange(1000))
    assert noise.shape == (500, 1000) and noise.dtype == torch.float32 and noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    centred = noise - noise.mean()
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs((a * b).mean().item()) < 0.02
    # Per-row token ids give the same numbers as a shared row of them.
    ids = torch.tensor([[3, 1], [7, 0]])
    assert torch.equal(gumbel_noise(keys[:2], ids), noise[:2].gather(1, ids))


def test_uniform_never_reaches_its_ends() -> None:
    """The hash may be all zeros or all ones; the noise must still be finite. The hash is undone to get there."""
    def unmix(x: int) -> int:
        mask = (1 << 64) - 1
        for factor in (-4265267296055464877, -49064778989728563):
            x ^= x >> 33
            x = (x * pow(factor, -1, 1 << 64)) & mask
        return x ^ (x >> 33)

    for target in (0, (1 << 64) - 1):
        key = unmix(target)
        key -= (1 << 64) * (key >> 63)
        (noise,), = gumbel_noise(torch.tensor([[key]]), torch.tensor([0])).tolist()
        assert math.isfinite(noise) and abs(noise) > 3


# What is reported


def test_reported_entries_and_ranks() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0]] * 4)
    rows = [make_row(SamplingParams(logprobs=n, temperature=0, logit_bias={i: 100}))
            for n, i in ((0, 2), (2, 0), (-1, 3), (None, 1))]
    tokens, lists = sample(logits, rows)
    assert tokens == [2, 0, 3, 1]
    assert [len(ids) for ids in lists.token_ids] == [1, 3, 5, 1]
    assert [ids[0] for ids in lists.token_ids] == tokens
    assert lists.sampled_ranks == [3, 4, 1, 1]  # one more than the number of strictly larger values
    assert sorted(lists.token_ids[1][1:]) == [1, 3] and sorted(lists.token_ids[2][1:]) == [0, 1, 2, 3]
    expected = log_softmax([0.0, 3.0, 2.0, 3.0])
    for ids, values in zip(lists.token_ids, lists.logprobs, strict=True):
        assert values == pytest.approx([expected[i] for i in ids], abs=1e-6)


def test_more_alternatives_than_tokens() -> None:
    _, lists = sample(torch.tensor([[1.0, 2.0]]), [make_row(SamplingParams(logprobs=50))])
    assert len(lists.token_ids[0]) == 3


def test_nothing_is_reported_unless_asked() -> None:
    assert sample(torch.zeros(1, 4), [make_row(SamplingParams(temperature=0))]) == ([0], None)
