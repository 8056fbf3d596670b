"""The shape of a model: everything that the decoder must know before it sees a weight.

It owns one frozen value, `ModelConfig`, the checks that its numbers fit together, and the translation from Hugging
Face's config.json. It does not read files (`loader`, `gguf`) and builds nothing (`decoder`).

Three architectures, one decoder: Qwen2 is Llama with a bias on q, k and v; Qwen3 is Llama with an RMS norm on every
head of q and k. Hence two flags describe the whole difference:

    architecture   attention_bias   qk_norm
    llama          no               no
    qwen2          yes              no
    qwen3          no               yes

What a config asks for and this engine cannot do (a sliding window, another activation, ...) is an error here, before
gigabytes are read, and never ignored: ignoring it would give fluent, wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutorial_engine.exceptions import ModelLoadError

# Hugging Face's class name -> the name llama.cpp and we use.
HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

# rope_type -> (keys it must have, keys it may have). The meaning of each key is in `rope`.
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": ({"factor", "original_max_position_embeddings"}, {"attention_factor", "beta_fast", "beta_slow"}),
    "factors": ({"factors"}, set()),
}

_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a checkpoint says about itself, under Hugging Face's names.

    Attributes:
        architecture: "llama", "qwen2" or "qwen3".
        vocab_size: rows of the embedding; may exceed the number of tokens that the tokenizer knows.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads H.
        num_key_value_heads: key/value heads KV; H is a multiple of it (grouped-query attention).
        head_dim: numbers per head; even, since RoPE rotates pairs. H * head_dim need not be hidden_size.
        rms_norm_eps: added to the mean square before the root.
        rope_theta: RoPE's base.
        rope_scaling: None for plain RoPE, else a dict with "rope_type" and the keys in `ROPE_KEYS`, spelt as Hugging
            Face does. Ours alone is {"rope_type": "factors", "factors": [head_dim // 2 numbers]}: divide the i-th
            frequency by the i-th factor, which is how a GGUF file stores Llama 3's scaling.
        max_position_embeddings: positions the checkpoint declares, copied as it stands.
        tie_word_embeddings: the output projection is the embedding matrix; the checkpoint then has no lm_head.
        attention_bias: q, k and v projections have a bias. The output projection never has one here.
        qk_norm: an RMS norm over head_dim is applied to each q and k head before RoPE.
        dtype: dtype of the checkpoint's weights, "float32", "float16" or "bfloat16".
        bos_token_id, eos_token_id: special tokens, None if the checkpoint names none. Where it names several EOS
            ids, this is the first one, and `ModelSource.generation_config` has them all.

    Raises:
        ModelLoadError: the values contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in HF_ARCHITECTURES.values():
            raise ModelLoadError(f"architecture is {self.architecture!r}; it must be one of llama, qwen2, qwen3.")
        for name in (*_REQUIRED_KEYS, "num_key_value_heads", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelLoadError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        for name in ("rms_norm_eps", "rope_theta"):
            if not _is_positive_number(getattr(self, name)):
                raise ModelLoadError(f"{name} is {getattr(self, name)!r}; it must be a number above 0.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelLoadError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads is "
                f"{self.num_key_value_heads}; every key/value head must serve the same number of query heads, so the "
                "first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; RoPE rotates pairs of numbers, so it must be even.")
        if self.dtype not in _DTYPES:
            raise ModelLoadError(f"dtype is {self.dtype!r}; supported are {', '.join(_DTYPES)}.")
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < self.vocab_size):
                raise ModelLoadError(f"{name} is {value!r}; it must be None or an id below {self.vocab_size=}.")
        _check_rope_scaling(self.rope_scaling, self.head_dim)

    @classmethod
    def from_hf_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Translate the content of a config.json, in the spelling of transformers 4 or 5.

        Args:
            raw: the parsed file.

        Raises:
            ModelLoadError: an unsupported architecture or feature, a missing key, or contradicting values.
        """
        architecture = _architecture(raw)
        sizes = {key: _required(raw, key) for key in _REQUIRED_KEYS}
        _reject_unsupported(raw, architecture)
        rope_theta, rope_scaling = _rope_from_hf(raw)
        return cls(
            architecture=architecture,
            **sizes,
            # Llama 1 had no grouped-query attention and its configs no such key.
            num_key_value_heads=raw.get("num_key_value_heads") or sizes["num_attention_heads"],
            head_dim=raw.get("head_dim") or _default_head_dim(raw, architecture),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            bos_token_id=_first(raw.get("bos_token_id")),
            eos_token_id=_first(raw.get("eos_token_id")),
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in HF_ARCHITECTURES:
        return HF_ARCHITECTURES[names[0]]
    found = f"architectures {names}" if names else f"no architecture (model_type {raw.get('model_type')!r})"
    raise ModelLoadError(
        f"config.json names {found}; this engine runs {', '.join(HF_ARCHITECTURES)}. Choose a model of that kind, for "
        "example Qwen/Qwen2.5-0.5B-Instruct or HuggingFaceTB/SmolLM2-135M-Instruct."
    )


def _required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if value is None:
        raise ModelLoadError(f"config.json has no {key!r}, which this engine needs.")
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"config.json has {key} = {value!r}; it must be a whole number of at least 1.")
    return value


def _first(token_id: Any) -> Any:
    """Llama 3 lists several EOS ids; the first one is the primary."""
    return (token_id or [None])[0] if isinstance(token_id, list) else token_id


def _default_head_dim(raw: Mapping[str, Any], architecture: str) -> int:
    """What transformers assumes when config.json is silent: 128 for Qwen3, an equal share of the width otherwise."""
    if architecture == "qwen3":
        return 128
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"config.json has no 'head_dim', and hidden_size {hidden_size} cannot be shared equally among "
            f"{num_heads} attention heads."
        )
    return hidden_size // num_heads


def _reject_unsupported(raw: Mapping[str, Any], architecture: str) -> None:
    """Raise for each switch that changes the arithmetic in a way the decoder does not implement."""
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(
            f"the checkpoint is quantised (quant_method {method!r}); this engine reads float32, float16 and bfloat16 "
            "safetensors, and some GGUF files. Choose the unquantised model."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported.")
    # transformers gives Qwen2 its biases whatever the config says, and the other two a fourth one on o_proj.
    if raw.get("mlp_bias") or (raw.get("attention_bias") and architecture != "qwen2"):
        raise ModelLoadError("attention_bias or mlp_bias is true; biases are supported on q, k and v of Qwen2 only.")
    if kinds := _sliding_layers(raw):
        raise ModelLoadError(f"config.json asks for {', '.join(sorted(kinds))}; only full attention is supported.")


def _sliding_layers(raw: Mapping[str, Any]) -> set[str]:
    """Kinds of attention other than full that some layer uses, by v5's explicit list or else by v4's rule."""
    if raw.get("layer_types"):
        return set(raw["layer_types"]) - {"full_attention"}
    slides = raw.get("use_sliding_window") and raw.get("sliding_window")
    # Layers from max_window_layers on see only the window; 28 is transformers' default.
    return {"sliding_attention"} if slides and raw.get("max_window_layers", 28) < raw["num_hidden_layers"] else set()


def _rope_from_hf(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling) from "rope_theta" + "rope_scaling" (v4) or "rope_parameters" (v5).

    The older v4 key "type" is accepted for "rope_type". The pre-training length, which llama3 and yarn need, falls
    back to max_position_embeddings, as in transformers.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"the RoPE parameters in config.json are {given!r}; they must be a dictionary.")
    rope = {key: value for key, value in given.items() if value is not None}
    rope_theta = rope.pop("rope_theta", raw.get("rope_theta", 10_000.0))
    if (partial := rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) not in (None, 1.0):
        raise ModelLoadError(f"partial_rotary_factor is {partial!r}; only whole heads can be rotated here.")
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return rope_theta, None if rope == {"rope_type": "default"} else rope


def _check_rope_scaling(rope: Mapping[str, Any] | None, head_dim: int) -> None:
    """Raise ModelLoadError unless `rope` is None or a kind of scaling that `rope` implements, complete and sane."""
    if rope is None:
        return
    kind = rope.get("rope_type")
    if kind not in ROPE_KEYS:
        raise ModelLoadError(f"rope_scaling has rope_type {kind!r}; supported are default, {', '.join(ROPE_KEYS)}.")
    needed, optional = ROPE_KEYS[kind]
    keys = set(rope) - {"rope_type"}
    if missing := needed - keys:
        raise ModelLoadError(f"rope_scaling of type {kind!r} lacks {', '.join(sorted(missing))}.")
    if unknown := keys - needed - optional:
        raise ModelLoadError(f"rope_scaling of type {kind!r} has {', '.join(sorted(unknown))}, not supported here.")
    if kind == "factors":
        factors = rope["factors"]
        if len(factors) != head_dim // 2 or not all(map(_is_positive_number, factors)):
            raise ModelLoadError(f"rope factors must be {head_dim // 2} numbers above 0, one for each rotated pair.")
        return
    for key in sorted(keys):
        if not _is_positive_number(rope[key]):
            raise ModelLoadError(f"rope_scaling has {key} = {rope[key]!r}; it must be a number above 0.")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ModelLoadError("rope_scaling of type 'llama3' needs high_freq_factor above low_freq_factor.")


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
