"""One decoder for Llama, Qwen2 and Qwen3.

    token ids -> embedding -> [ norm -> attention -> + ] -> [ norm -> MLP -> + ]  x layers  -> norm -> LM head -> logits
                                q, k, v; RoPE; cache          gate, up; SiLU; down

Qwen2 adds a bias to q, k and v; Qwen3 normalises each head of q and k. That is all the difference there is.

q, k, v are one matrix here, and so are gate and up: fewer, larger products. All tokens of a step lie in one flat
[num_tokens, hidden_size] tensor; which request a token belongs to is known to attention only.

Owns: the forward pass and the strict loading of weights. Does not own: the cache, the batch, sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tutorial_engine.attention import AttentionMetadata, paged_attention
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.kv_cache import KVCache
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.linear import Linear
from tutorial_engine.models.rope import RotaryEmbedding, apply_rope


class DecoderLayer(nn.Module):
    """One layer: attention and MLP, each with its norm in front and a residual around it."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.index = config, index
        hidden, heads, kv_heads, dim = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
                                        config.head_dim)
        self.eps = config.rms_norm_eps
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv_proj = Linear(hidden, (heads + 2 * kv_heads) * dim, config.attention_bias, dtype, device)
        self.o_proj = Linear(heads * dim, hidden, False, dtype, device)
        self.post_attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.gate_up_proj = Linear(hidden, 2 * config.intermediate_size, False, dtype, device)
        self.down_proj = Linear(config.intermediate_size, hidden, False, dtype, device)
        if config.qk_norm:
            self.q_norm = torch.empty(dim, dtype=dtype, device=device)
            self.k_norm = torch.empty(dim, dtype=dtype, device=device)
        self.qk_norm: torch.Tensor | None = None  # both, a row per head, made by pack(): one product scales q and k

    def pack(self) -> None:
        """Bring the weights into the layout that is fastest on this device."""
        for linear in (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj):
            linear.pack()
        if self.config.qk_norm:
            self.qk_norm = torch.cat([self.q_norm.expand(self.config.num_attention_heads, -1),
                                      self.k_norm.expand(self.config.num_key_value_heads, -1)])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_cache: KVCache,
                metadata: AttentionMetadata) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same."""
        c = self.config
        h = rms_norm(x, self.input_norm, self.eps)
        qkv = self.qkv_proj(h).view(-1, c.num_attention_heads + 2 * c.num_key_value_heads, c.head_dim)
        qk, value = qkv.split([c.num_attention_heads + c.num_key_value_heads, c.num_key_value_heads], dim=1)
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self.eps)
        query, key = apply_rope(qk, cos, sin).split([c.num_attention_heads, c.num_key_value_heads], dim=1)
        kv_cache.write(self.index, key, value, metadata.head_rows)
        attended = paged_attention(query, kv_cache, self.index, metadata)
        x = x + self.o_proj(attended.flatten(1))
        gate, up = self.gate_up_proj(rms_norm(x, self.post_attention_norm, self.eps)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate).mul_(up))

    def forward_fused(self, delta: torch.Tensor, residual: torch.Tensor, step: FusedStep
                      ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on a GPU with Triton's kernels: five launches besides the four products, or three for one
        token, and one more where attention is split.

        Args:
            delta: what the layer before has to add to the residual stream. residual: that stream, which may be changed
                in place. Both [num_tokens, hidden_size].

        Returns:
            (what this layer's MLP has to add: the next norm adds it on its way; the residual stream so far).
        """
        c, k = self.config, step.kernels
        norms = (self.q_norm, self.k_norm) if c.qk_norm else None
        qkv, residual = k.norm_linear(delta, residual, self.input_norm, self.eps, self.qkv_proj)
        query = k.rope_kv_write(qkv, step.positions, step.slot_mapping, step.cos, step.sin,
                                step.kv_cache.key[self.index], step.kv_cache.value[self.index],
                                c.num_attention_heads, norms, self.eps)
        attended = k.linear(step.attend(query, self.index).flatten(1), self.o_proj)
        gate_up, residual = k.norm_linear(attended, residual, self.post_attention_norm, self.eps, self.gate_up_proj)
        return k.silu_linear(gate_up, self.down_proj), residual


@dataclass
class FusedStep:
    """What `forward_fused` needs to know about a step.

    Attributes:
        kernels: the module `kernels/fused.py`.
        positions, slot_mapping: [num_tokens] int64. cos, sin: the whole tables of `RotaryEmbedding`.
        attend: (query [num_tokens, num_heads, head_dim], layer) -> the same shape.
    """

    kernels: Any
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv_cache: KVCache
    attend: Callable[[torch.Tensor, int], torch.Tensor]


class Decoder(nn.Module):
    """The whole model.

    Args:
        config: its shape.
        max_positions: longest sequence to be served.
        dtype, device: of weights and activations.
    """

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(config.num_hidden_layers))
        self.eps = config.rms_norm_eps
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        self.rotary = RotaryEmbedding(config, max_positions, dtype, device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
                ) -> torch.Tensor:
        """One step for a ragged batch.

        Args:
            input_ids, positions: [num_tokens] int64; a token's position counts from the start of its own request.

        Returns:
            Hidden states after the last norm, [num_tokens, hidden_size].
        """
        x = self.embed_tokens[input_ids]
        cos, sin = self.rotary.rows(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, kv_cache, metadata)
        return rms_norm(x, self.norm, self.eps)

    def forward_fused(self, input_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
                      kv_cache: KVCache, attend: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """`forward` with Triton's kernels, for a GPU. `attend` gets each layer's queries once its K and V are
        stored.

        Returns:
            Hidden states after the last norm, [num_tokens, hidden_size].
        """
        from tutorial_engine.kernels import fused

        step = FusedStep(fused, positions, slot_mapping, self.rotary.cos, self.rotary.sin, kv_cache, attend)
        residual = self.embed_tokens[input_ids]
        delta = torch.zeros_like(residual)
        for layer in self.layers:
            delta, residual = layer.forward_fused(delta, residual, step)
        return fused.add_rms_norm(delta, residual, self.norm, self.eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [rows, vocab_size] in the model's dtype; only rows that choose a token need them."""
        return self.lm_head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's tensors in, by Hugging Face's names. Every weight must come exactly once.

        A layer is packed as soon as it is complete, so that its plain weights never wait for those of the others: the
        peak of memory is hardly above what remains.

        Raises:
            ModelLoadError: a tensor that this model has no place for, a wrong shape, or a place left empty.
        """
        places = self._places()
        missing = Counter(owner for owner, _ in places.values())
        for name, tensor in weights:
            owner = self._load_one(places, name, tensor)
            missing[owner] -= 1
            if missing[owner] == 0:
                owner.pack()
        if places:
            some = ", ".join(list(places)[:3])
            raise ModelLoadError(f"The checkpoint lacks {len(places)} weight(s), for example {some}. "
                                 "Is the download complete?")

    def _load_one(self, places: dict, name: str, tensor: torch.Tensor) -> nn.Module:
        """Copy one tensor to its place, which is used up. Returns the module it belongs to."""
        if name not in places:
            raise ModelLoadError(f"The checkpoint holds a weight that a {self.config.architecture} model of this "
                                 f"config has no place for, or holds it twice: {name}. Is config.json the right one?")
        owner, view = places.pop(name)
        place = view()
        if place.shape != tensor.shape:
            raise ModelLoadError(f"Weight {name} has shape {list(tensor.shape)}, the config asks for "
                                 f"{list(place.shape)}. Is config.json the right one?")
        place.copy_(tensor)
        return owner

    def move_to(self, device: torch.device) -> None:
        """Take all tensors to a device. One that two modules share stays shared."""
        moved: dict[int, torch.Tensor] = {}
        for module in self.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    setattr(module, name, moved.setdefault(id(value), value.to(device)))

    def pack(self) -> None:
        """The embedding is there: if it is the LM head's matrix as well, bring that into its layout."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
            self.lm_head.pack()

    def _places(self) -> dict[str, tuple[nn.Module, Callable[[], torch.Tensor]]]:
        """Where each tensor of a checkpoint goes: (the module it belongs to, a view into our own, larger tensors)."""
        c = self.config
        q, kv, ff = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
        places = {"model.embed_tokens.weight": (self, partial(getattr, self, "embed_tokens")),
                  "model.norm.weight": (self, partial(getattr, self, "norm"))}
        if not c.tie_word_embeddings:
            places["lm_head.weight"] = self.lm_head, partial(self.lm_head.rows, 0, c.vocab_size)
        for i, layer in enumerate(self.layers):
            views: dict[str, Callable[[], torch.Tensor]] = {
                "input_layernorm.weight": partial(getattr, layer, "input_norm"),
                "post_attention_layernorm.weight": partial(getattr, layer, "post_attention_norm"),
                "self_attn.o_proj.weight": partial(layer.o_proj.rows, 0, c.hidden_size),
                "mlp.gate_proj.weight": partial(layer.gate_up_proj.rows, 0, ff),
                "mlp.up_proj.weight": partial(layer.gate_up_proj.rows, ff, ff),
                "mlp.down_proj.weight": partial(layer.down_proj.rows, 0, c.hidden_size)}
            for name, begin, count in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
                views[f"self_attn.{name}_proj.weight"] = partial(layer.qkv_proj.rows, begin, count)
                if c.attention_bias:
                    views[f"self_attn.{name}_proj.bias"] = partial(layer.qkv_proj.bias.narrow, 0, begin, count)
            if c.qk_norm:
                views["self_attn.q_norm.weight"] = partial(getattr, layer, "q_norm")
                views["self_attn.k_norm.weight"] = partial(getattr, layer, "k_norm")
            places.update((f"model.layers.{i}.{name}", (layer, view)) for name, view in views.items())
        return places


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        weight: [hidden_size], or [num_heads, head_dim] for heads.
    """
    if x.dtype != torch.float32:
        # The weight apart: it may be a matrix, a row per head.
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    # The same in half as many operations as F.rms_norm makes on a CPU, where each costs more than its arithmetic.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul(torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)


@lru_cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)
