"""The decoder against transformers: the same logits for the same weights, however the tokens are cut into steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from tests.models.hf_models import tiny_model
from tutorial_engine.attention import AttentionMetadata
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.kv_cache import KVCache
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.decoder import Decoder, rms_norm
from tutorial_engine.models.linear import Linear
from tutorial_engine.models.rope import RotaryEmbedding, apply_rope, rope_frequencies

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_EACH = 4, 40  # room for 160 tokens of each request
ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def smooth_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A tiny model whose attention looks at many tokens: with larger weights each query would choose a single one, and
    float errors would grow from layer to layer."""
    hf = tiny_model(architecture, **changes)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.25)
    return hf


def weights(hf: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """As `ModelSource.weights` gives them."""
    for name, tensor in hf.state_dict().items():
        if name != "lm_head.weight" or not hf.config.tie_word_embeddings:
            yield name, tensor


def config_of(hf: PreTrainedModel) -> ModelConfig:
    return ModelConfig.from_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__]})


def load(hf: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(config_of(hf), 160, dtype, CPU)
    decoder.load_weights(weights(hf))
    return decoder


@torch.inference_mode()
def logits(decoder: Decoder, sequences: list[list[int]], steps: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every position of every sequence, computed in `steps`: how many tokens of each sequence at a time."""
    cache = KVCache(decoder.config, 1 + BLOCKS_EACH * len(sequences), BLOCK_SIZE, decoder.dtype, CPU)
    # Tables that interleave, so that no request's blocks lie together.
    tables = 1 + np.arange(BLOCKS_EACH * len(sequences)).reshape(BLOCKS_EACH, len(sequences)).T
    done = np.zeros(len(sequences), dtype=np.int64)
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        rows = [i for i, num in enumerate(step) if num]
        num = np.array([step[i] for i in rows])
        positions = np.concatenate([done[i] + np.arange(step[i]) for i in rows])
        slots = np.concatenate([tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                                for i in rows for p in [done[i] + np.arange(step[i])]])
        ids = [token for i in rows for token in sequences[i][done[i]:done[i] + step[i]]]
        metadata = AttentionMetadata.build(np.concatenate([[0], num.cumsum()]), done[rows] + num, tables[rows],
                                           torch.from_numpy(slots), cache)
        hidden = decoder(torch.tensor(ids), torch.from_numpy(positions), cache, metadata)
        for i, part in zip(rows, decoder.compute_logits(hidden).split(num.tolist())):
            out[i].append(part)
            done[i] += step[i]
    return [torch.cat(parts) for parts in out]


@torch.inference_mode()
def hf_logits(hf: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    return hf(torch.tensor([sequence])).logits[0].float()


def random_ids(num: int, seed: int = 0) -> list[int]:
    return torch.randint(96, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


ROPE = {
    "default": {"rope_type": "default"},
    "another base": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, all keys": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
                       "beta_slow": 0.5, "attention_factor": 1.25},
    "yarn, nothing to blend": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE.keys())
def test_logits_equal_transformers_for_every_rope(architecture: str, rope: dict[str, Any]) -> None:
    hf = smooth_model(architecture, rope_parameters={"rope_theta": 10_000.0, **rope})
    sequence = random_ids(100)
    assert_same(logits(load(hf), [sequence], [[100]])[0], hf_logits(hf, sequence))


@pytest.mark.parametrize("changes", [
    {"tie_word_embeddings": True}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 8},
    {"head_dim": 32, "num_attention_heads": 8}, {"num_hidden_layers": 1}, {"vocab_size": 97}, {"rms_norm_eps": 0.1},
], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_for_every_shape(architecture: str, changes: dict[str, Any]) -> None:
    if architecture == "qwen2" and "head_dim" in changes:
        pytest.skip("it is always hidden_size / heads there")
    hf = smooth_model(architecture, **changes)
    sequence = random_ids(20)
    assert_same(logits(load(hf), [sequence], [[20]])[0], hf_logits(hf, sequence))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_cut_into_steps_gives_the_same_logits(architecture: str) -> None:
    """Chunks beside decodes beside prompts; single rows take another path through `Linear`."""
    hf = smooth_model(architecture)
    decoder = load(hf)
    sequences = [random_ids(n, seed=n) for n in (37, 12, 25)]
    right = [hf_logits(hf, s) for s in sequences]
    one_by_one = [[0, 1, 0]] * 12
    ragged = [[16, 3, 0], [4, 1, 8], [5, 1, 1], [1, 1, 1], [0, 1, 15], [11, 5, 0]]
    for steps in ([[37, 12, 25]], ragged, [[0, 0, 25], *one_by_one, [36, 0, 0], [1, 0, 0]]):
        for ours, theirs in zip(logits(decoder, sequences, steps), right):
            assert_same(ours, theirs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_close_to_transformers_in_bfloat16(architecture: str) -> None:
    hf = smooth_model(architecture)
    sequence = random_ids(30)
    decoder = load(hf, torch.bfloat16)
    ours = logits(decoder, [sequence], [[29], [1]])[0]
    theirs = hf_logits(hf.to(torch.bfloat16), sequence)
    # Roundings fall differently; on average they must not.
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


# Loading


def test_loading_is_strict() -> None:
    hf = smooth_model("qwen3")
    config = config_of(hf)
    all_weights = dict(weights(hf))

    def load_these(items: list[tuple[str, torch.Tensor]]) -> None:
        Decoder(config, 8, torch.float32, CPU).load_weights(items)

    load_these(list(all_weights.items())[::-1])  # any order will do
    name = "model.layers.1.self_attn.k_norm.weight"
    with pytest.raises(ModelLoadError, match="lacks 1 weight.*layers.1.self_attn.k_norm"):
        load_these([(n, w) for n, w in all_weights.items() if n != name])
    with pytest.raises(ModelLoadError, match="lacks 25 weight"):
        load_these([])
    with pytest.raises(ModelLoadError, match="no place for, or holds it twice: model.layers.0.mlp.bias"):
        load_these([*all_weights.items(), ("model.layers.0.mlp.bias", torch.zeros(3))])
    with pytest.raises(ModelLoadError, match=f"holds it twice: {name}"):
        load_these([*all_weights.items(), (name, all_weights[name])])
    with pytest.raises(ModelLoadError, match=r"has shape \[17\], the config asks for \[16\]"):
        load_these([*((n, w) for n, w in all_weights.items() if n != name), (name, torch.zeros(17))])


def test_a_tied_head_has_no_place_and_an_untied_one_needs_its_weight() -> None:
    hf = smooth_model("llama", tie_word_embeddings=True)
    config = config_of(hf)
    with pytest.raises(ModelLoadError, match="lm_head"):
        Decoder(config, 8, torch.float32, CPU).load_weights([("lm_head.weight", torch.zeros(96, 64))])
    untied = smooth_model("llama")
    with pytest.raises(ModelLoadError, match="lm_head"):
        Decoder(config_of(untied), 8, torch.float32, CPU).load_weights(
            [(n, w) for n, w in weights(untied) if n != "lm_head.weight"])


def test_a_checkpoint_in_half_precision_is_converted() -> None:
    hf = smooth_model("llama")
    decoder = Decoder(config_of(hf), 160, torch.float32, CPU)
    decoder.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in weights(hf))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    sequence = random_ids(10)
    assert_same(logits(decoder, [sequence], [[10]])[0], hf_logits(hf, sequence))


# Linear


@pytest.mark.parametrize("mkldnn", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_every_layout_multiplies_alike(mkldnn: bool, bias: bool, dtype: torch.dtype, tolerance: float,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    for num_threads, out_features in ((1, 7), (2, 24), (2, 7), (3, 24)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        linear = Linear(10, out_features, bias, dtype, CPU)
        weight = torch.randn(out_features, 10).to(dtype)
        linear.rows(0, 3).copy_(weight[:3])
        linear.rows(3, out_features - 3).copy_(weight[3:])
        if bias:
            linear.bias.copy_(torch.randn(out_features))
        linear.pack()
        for num_rows in (1, 2, 5, 1):
            x = torch.randn(num_rows, 10).to(dtype)
            before = x.clone()
            torch.testing.assert_close(linear(x), F.linear(x, weight, linear.bias), rtol=tolerance, atol=tolerance)
            assert torch.equal(x, before)


# Norm and rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 16).to(dtype), torch.randn(16).to(dtype)
    before = x.clone()
    right = F.rms_norm(x.float(), (16,), weight.float(), 0.01)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(rms_norm(x, weight, 0.01).float(), right, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before)
    heads = torch.randn(3, 16).to(dtype)
    right = F.rms_norm(x.float(), (16,), None, 0.01) * heads.float()
    torch.testing.assert_close(rms_norm(x, heads, 0.01).float(), right, rtol=tolerance, atol=tolerance)
    assert not rms_norm(torch.zeros(1, 16, dtype=dtype), weight, 0.01).any(), "zeros stay finite"


def rope_config(head_dim: int = 16, **rope_scaling: Any) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=head_dim, rope_scaling=rope_scaling or None)


def test_frequencies_of_plain_and_divided_rope() -> None:
    plain, factor = rope_frequencies(rope_config(head_dim=4))
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.01]))
    assert factor == 1.0
    torch.testing.assert_close(rope_frequencies(rope_config(4, rope_type="linear", factor=4.0))[0], plain / 4)
    divided, factor = rope_frequencies(rope_config(4, rope_type="factors", factors=[2.0, 5.0]))
    torch.testing.assert_close(divided, torch.tensor([0.5, 0.002]))
    assert factor == 1.0


def test_llama3_slows_slow_pairs_only() -> None:
    scaled, _ = rope_frequencies(rope_config(64, rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                             high_freq_factor=4.0, original_max_position_embeddings=2048))
    plain, _ = rope_frequencies(rope_config(64))
    turns = 2048 * plain / (2 * math.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = RotaryEmbedding(rope_config(), 64, torch.float32, CPU)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(i: int, j: int) -> torch.Tensor:
        turned = [apply_rope(x, *rotary.rows(torch.tensor([p]))) for x, p in ((q, i), (k, j))]
        torch.testing.assert_close(turned[0].norm(), q.norm())
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(60, 55), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score(9, 4), score(9, 5))
    torch.testing.assert_close(apply_rope(q, *rotary.rows(torch.tensor([0]))), q)
