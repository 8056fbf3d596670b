"""The course's own answers on sampling keep the tokens that transformers keeps, and punish as it does."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from tutorial_engine.exercises.sampling_parameters import min_p_kept, repetition_penalty, top_p_kept

NO_TEXT = torch.zeros(1, 0, dtype=torch.int64)  # the filters do not look at the tokens so far


def some_logits(seed: int, size: int = 200) -> torch.Tensor:
    """[1, size] float64, no two of them equal."""
    return 3 * torch.randn(1, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept(filtered: torch.Tensor) -> list[int]:
    return (filtered[0] > -torch.inf).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("bar", [0.02, 0.3, 0.9, 0.99])
def test_filters_keep_what_transformers_keeps(bar: float, temperature: float) -> None:
    for seed in range(8):
        logits = some_logits(seed)
        cooled = TemperatureLogitsWarper(temperature)(NO_TEXT, logits)
        ours = top_p_kept(cooled[0].softmax(dim=0).tolist(), bar)
        assert ours == sorted(ours, key=lambda token: -logits[0, token].item())
        assert sorted(ours) == kept(TopPLogitsWarper(bar)(NO_TEXT, cooled))
        relative = min_p_kept(logits[0].tolist(), temperature, bar)
        assert relative == kept(MinPLogitsWarper(bar)(NO_TEXT, cooled))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = some_logits(0, 20), [3, 7, 7, 0], [7, 11, 19]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    seen = logits[0, [*{*prompt, *output}]]
    assert seen.min() < 0 < seen.max()
    assert repetition_penalty(logits[0].tolist(), prompt, output, penalty) == pytest.approx(theirs[0].tolist())
