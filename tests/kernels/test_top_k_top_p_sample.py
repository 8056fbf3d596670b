"""The kernel without a sort keeps exactly the tokens that sorting keeps (S6, S7, S8, P9)."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
from tutorial_engine.kernels.gumbel_sample import gumbel_sample
from tutorial_engine.kernels.top_k_top_p_sample import top_k_top_p_sample, torch_top_k_top_p_sample
from tutorial_engine.sampler import apply_min_p, gumbel_noise, noise_key, truncate

VOCAB = 700  # eleven groups, the last of which is not full


def rows_to_cut() -> dict[str, torch.Tensor]:
    """Logits that a careless search stumbles over."""
    normal = torch.randn(VOCAB) * 2
    ids = torch.randperm(VOCAB)
    one_hot, few, signed_zeros, overflowed = (torch.zeros(VOCAB) for _ in range(4))
    one_hot[ids[0]] = 40.0
    few[ids[3:]] = -torch.inf
    signed_zeros[ids[:300]] = -0.0
    signed_zeros[ids[:3]] = torch.tensor([1e-45, -1e-45, 1e-40])
    overflowed[ids[:20]], overflowed[ids[20:23]] = torch.nan, torch.tensor([1e30, 1e30, torch.inf])
    neighbours = torch.full((VOCAB,), 1.5)
    for i in range(1, VOCAB):
        neighbours[ids[i]] = torch.nextafter(neighbours[ids[i - 1]], torch.tensor(9.0))
    return {"normal": normal, "halves": (normal * 2).round() / 2, "flat": torch.full((VOCAB,), -3.25),
            "one hot": one_hot, "three of them": few, "zeros of both signs": signed_zeros,
            "divided, some are equal": neighbours, "far apart": normal * 1e4, "overflowed": overflowed}


#          temperature, min_p, top_k, top_p
WISHES = [(1.0, 0.0, 1, 1.0), (0.7, 0.0, 5, 1.0), (1.0, 0.0, 0, 1e-30), (1.3, 0.0, VOCAB - 1, 1.0), (2.0, 0.0, 0, 0.5),
          (1.5, 0.0, 20, 0.813), (3.0, 0.1, 0, 1.0), (1.0, 0.0, -1, 0.9), (3.0, 0.05, 40, 0.7), (1.0, 1.0, VOCAB, 1.0)]


def kept_and_next(scaled: torch.Tensor, min_p: float, k: int, p: float) -> tuple[torch.Tensor, int, int]:
    """The row with what is dropped at -inf, the last token kept, and the first one dropped (or the last again)."""
    row = scaled[None].clone()
    apply_min_p(row, torch.tensor([[min_p]]))
    kept = truncate(row, [k if 0 < k < VOCAB else VOCAB], [p])[0]
    order = scaled.sort(descending=True, stable=True).indices
    count = max(int((kept > -torch.inf).sum()), 1)
    return kept, int(order[count - 1]), int(order[min(count, VOCAB - 1)])


def telling_draws(scaled: torch.Tensor, noise: torch.Tensor, min_p: float, k: int, p: float) -> list[int]:
    """Draws, by number, that the last token kept wins, and that the first one dropped would win."""
    kept, last, dropped = kept_and_next(scaled, min_p, k, p)
    best = (kept + noise).max(dim=1)
    wins, would = best.indices == last, (scaled[dropped] + noise[:, dropped] > best.values) & (dropped != last)
    return [int(which.nonzero()[0, 0]) for which in (wins, would) if which.any()]


@pytest.mark.parametrize("number, kind", list(enumerate(rows_to_cut())))
def test_the_cut_is_where_sorting_cuts(number: int, kind: str) -> None:
    torch.manual_seed(0)
    logits = rows_to_cut()[kind]
    clean, rows = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf), []
    keys = torch.tensor([noise_key(seed, 0) for seed in range(2000)])
    noise = gumbel_noise(keys[:, None], torch.arange(VOCAB))
    for wish in WISHES[number % 2::2]:  # half of them: the interpreter is slow
        rows += [(*wish, int(keys[draw])) for draw in telling_draws(clean / wish[0], noise, *wish[1:])]
    t, m, k, p, keys = (torch.tensor(column) for column in zip(*rows))
    args = (logits.expand(len(rows), VOCAB).contiguous(), t, m, k, p, keys)
    assert top_k_top_p_sample(*args).tolist() == torch_top_k_top_p_sample(*args).tolist()
    assert len(rows) >= (2 if kind in ("one hot", "far apart", "overflowed") else 4), "draws that a wrong cut changes"


def test_a_batch_of_all_wishes() -> None:
    """Two tiles, two chunks of groups; greedy and unrestricted rows between the others take the plain way."""
    torch.manual_seed(1)
    logits = (torch.randn(8, 2500) * 2).half()
    t, p = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.0, 5.0, 1.0, 1.0]), torch.tensor([0.1, 1, 0.999, 0.5, 1, 0.97, 1, 1])
    k = torch.tensor([1, 0, 2000, 50, 3, 0, 2500, -1], dtype=torch.int32)
    args = (logits, t, torch.zeros(8), k, p, torch.tensor([noise_key(seed, 7) for seed in range(8)]))
    got = top_k_top_p_sample(*args)
    assert torch.equal(got, torch_top_k_top_p_sample(*args))
    plain = torch.tensor([0, 1, 3, 6, 7])
    assert torch.equal(got[plain], gumbel_sample(logits, t, args[-1])[plain])


def test_without_a_single_token() -> None:
    """A row of -inf or NaN gives the id of some token, like the greedy choice."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[1] = torch.nan
    got = top_k_top_p_sample(logits, torch.ones(2), torch.full((2,), 0.1), torch.full((2,), 3, dtype=torch.int32),
                             torch.full((2,), 0.5), torch.arange(2))
    assert got.tolist() == [0, 0]


@pytest.mark.parametrize("wrong, message", [
    ({"logits": torch.zeros(2, 9, dtype=torch.int64)}, "logits must be a tensor of torch.float32 or"),
    ({"logits": torch.zeros(9)}, r"logits must have the shape \[any, any\], got \[9\]"),
    ({"logits": torch.zeros(9, 2).t()}, "logits must be contiguous"),
    ({"top_k": torch.zeros(2)}, "top_k must be a tensor of torch.int32 or torch.int64, got torch.float32"),
    ({"top_p": torch.ones(3)}, r"top_p must have the shape \[2\], got \[3\]"),
    ({"min_p": 0.5}, "min_p must be a tensor of torch.float32, got float"),
    ({"noise_keys": torch.zeros(2, dtype=torch.int64, device="meta")}, "noise_keys must be on cpu"),
])
def test_arguments_are_checked(wrong: dict, message: str) -> None:
    right = {"logits": torch.zeros(2, 9), "temperature": torch.ones(2), "min_p": torch.zeros(2),
             "top_k": torch.zeros(2, dtype=torch.int32), "top_p": torch.ones(2),
             "noise_keys": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises((TypeError, ValueError), match=message):
        top_k_top_p_sample(**(right | wrong))
    assert len(top_k_top_p_sample(**right)) == 2
