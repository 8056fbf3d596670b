"""GGUF: a whole model in one file. This reader turns the file into names, numbers and float32 arrays.

It owns the file format: parsing, dequantisation, and the translation of llama.cpp's names and layouts into Hugging
Face's. It needs numpy only; torch tensors are made by `loader`, the tokenizer by `tokenizer`.

    byte 0      24                           ...                             aligned to 32
    ┌──────────┬────────────────────────────┬────────────────────────────┬───┬─────────────────────────────────┐
    │ "GGUF"   │ metadata                   │ tensor infos               │ 0 │ tensor data                     │
    │ version  │  key, type, value          │  name, shape, type, offset │ . │  ┌───────┬───────┬──            │
    │ #tensors │  key, type, value          │  name, shape, type, offset─┼───┼─►│ block │ block │ ...          │
    │ #keys    │  ...                       │  ...                       │ 0 │  └───────┴───────┴──            │
    └──────────┴────────────────────────────┴────────────────────────────┴───┴─────────────────────────────────┘

All numbers are little-endian. A string is a 64-bit length and UTF-8 bytes; an array is an item type, a 64-bit count,
and the items. A quantised tensor is cut, along its rows, into blocks of 32 weights that share a scale. In Q4_1, the
format of the default model, 32 weights take 20 bytes, 5 bits each instead of 32:

    ┌─────────┬─────────┬──────────────────────────────────────────────┐
    │ d: fp16 │ m: fp16 │ 16 bytes: the low halves are weights 0 … 15, │     weight = d · half + m,  half = 0 … 15
    └─────────┴─────────┴─ the high halves are weights 16 … 31 ────────┘

A file from the internet is not to be trusted: every count and offset is compared with the size of the file before
anything of that size is read or allocated. The format is described in docs/gguf.md of the ggml project, the blocks in
its ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.config import ModelConfig

# --- Dequantisation: blocks of bytes, uint8 [num_blocks, bytes_per_block] -> float32 [num_blocks, block_size] ---


def _column(blocks: np.ndarray, start: int) -> np.ndarray:
    """The fp16 number at byte `start` of every block, as float32 [num_blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Split each byte into two 4-bit numbers: uint8 [n, 16] -> float32 [n, 32], the low halves first."""
    numbers = np.empty((len(packed), 32), np.float32)
    numbers[:, :16] = packed & 0x0F
    numbers[:, 16:] = packed >> 4
    return numbers


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    # bfloat16 is the upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _column(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    weights = _halves(blocks[:, 2:])
    weights -= 8
    weights *= _column(blocks, 0)
    return weights


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    weights = _halves(blocks[:, 4:])
    weights *= _column(blocks, 0)
    weights += _column(blocks, 2)
    return weights


class TensorType(NamedTuple):
    """How one of ggml's types stores numbers: `block_size` weights in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    dequantize: Callable[[np.ndarray], np.ndarray]


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _f32),
    1: TensorType("F16", 1, 2, _f16),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    30: TensorType("BF16", 1, 2, _bf16),
}
# Known by name only, for the error message.
_OTHER_TYPES = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_OTHER_TYPES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
_OTHER_TYPES |= {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 39: "MXFP4"}

# --- Parsing ---

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
# Name length, number of dimensions, one dimension, type, offset: no tensor is described in fewer bytes.
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8
_MIN_METADATA_BYTES = 8 + 4 + 1


class _Reader:
    """A position in the file that moves forward and never beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}")

    def skip(self, num_bytes: int) -> int:
        """Move over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.error(
                f"the file ends too early: {num_bytes:,} bytes are announced at byte {start:,}, but it has only "
                f"{self.size:,}. It is truncated or damaged; fetch it again."
            )
        self.position = start + num_bytes
        return start

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack_from("<" + layout, self.data, self.skip(struct.calcsize("<" + layout)))

    def string(self) -> str:
        (length,) = _UINT64.unpack_from(self.data, self.skip(8))
        start = self.skip(length)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the text at byte {start:,} is not UTF-8; the file is damaged.") from error

    def value(self) -> Any:
        """A type and a value of that type: a number, a string, a list of strings, or a numpy array of numbers."""
        (kind,) = self.numbers("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(*self.numbers("IQ"))
        return self.numbers(self._scalar(kind))[0]

    def _array(self, kind: int, count: int) -> list[str] | np.ndarray:
        if kind == _STRING:
            self.check_count(count, 8, "strings")
            return [self.string() for _ in range(count)]
        dtype = np.dtype(self._scalar(kind)).newbyteorder("<")
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start).copy()

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.error(f"value type {kind} at byte {self.position:,} is unknown; the file is damaged.")
        return _SCALARS[kind]

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count > (self.size - self.position) // min_bytes:
            raise self.error(f"{count:,} {what} are announced, more than fit into a file of {self.size:,} bytes.")


class TensorInfo(NamedTuple):
    """Where a tensor is. `shape` is in numpy's order (rows, columns); the file has it the other way round."""

    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed GGUF file. Its tensors stay on disk until they are asked for.

    Attributes:
        path: the file.
        metadata: key -> number, string, list of strings, or numpy array.
        tensors: llama.cpp's tensor name -> `TensorInfo`.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Parse everything but the weights.

        Raises:
            ModelLoadError: not a GGUF file of version 2 or 3, damaged, or with a tensor of an unsupported type.
        """
        path = Path(path)
        reader = _Reader(path, _map_file(path))
        num_tensors, num_keys = _read_header(reader)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            if key in metadata:
                raise reader.error(f"the key {key!r} is there twice; the file is damaged.")
            metadata[key] = reader.value()
        infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise reader.error(f"general.alignment is {alignment!r}; it must be a whole number of at least 1.")
        data_start = -(-reader.position // alignment) * alignment  # rounded up
        tensors = {name: info._replace(start=data_start + info.start) for name, info in infos}
        if len(tensors) != len(infos):
            raise reader.error("two tensors have the same name; the file is damaged.")
        for name, info in tensors.items():
            if info.start + info.num_bytes > reader.size:
                raise reader.error(
                    f"tensor {name!r} ends at byte {info.start + info.num_bytes:,}, but the file has only "
                    f"{reader.size:,}. It is truncated; fetch it again."
                )
        return cls(path, metadata, tensors, reader.data)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised into a new float32 array, in llama.cpp's layout."""
        info = self.tensors[name]
        blocks = np.frombuffer(self.data, np.uint8, info.num_bytes, info.start).reshape(-1, info.type.block_bytes)
        return info.type.dequantize(blocks).reshape(info.shape)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # nothing can be mapped from an empty file
        raise ModelLoadError(f"{path}: the file is empty, not a GGUF file.") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}).") from error


def _read_header(reader: _Reader) -> tuple[int, int]:
    """(number of tensors, number of metadata keys)"""
    if reader.data[:4] != b"GGUF":
        raise reader.error(f"not a GGUF file: it begins with {reader.data[:4]!r}, not with b'GGUF'.")
    _, version = reader.numbers("4sI")
    if version not in (2, 3):
        raise reader.error(
            f"GGUF version {version} is not supported (version 2 and 3, little-endian, are). Convert the model again "
            "with a current llama.cpp."
        )
    num_tensors, num_keys = reader.numbers("QQ")
    reader.check_count(num_tensors, _MIN_TENSOR_INFO_BYTES, "tensors")
    reader.check_count(num_keys, _MIN_METADATA_BYTES, "metadata keys")
    return num_tensors, num_keys


def _read_tensor_info(reader: _Reader) -> tuple[str, TensorInfo]:
    """(name, info), where info.start still counts from the beginning of the tensor data."""
    name = reader.string()
    (num_dimensions,) = reader.numbers("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible.")
    shape = reader.numbers(f"{num_dimensions}Q")[::-1]
    type_id, offset = reader.numbers("IQ")
    if type_id not in TENSOR_TYPES:
        supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        raise reader.error(
            f"tensor {name!r} is of type {_OTHER_TYPES.get(type_id, 'unknown')} ({type_id}), which is not supported. "
            f"Choose a file in which this model is stored as {supported}."
        )
    kind = TENSOR_TYPES[type_id]
    if min(shape) < 1 or shape[-1] % kind.block_size:
        raise reader.error(f"tensor {name!r} has shape {shape}, impossible in {kind.name} blocks of {kind.block_size}.")
    return name, TensorInfo(shape, kind, offset, math.prod(shape) // kind.block_size * kind.block_bytes)


# --- From llama.cpp's conventions to Hugging Face's ---

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def model_config(gguf: GGUFFile) -> ModelConfig:
    """Translate the metadata.

    Raises:
        ModelLoadError: an unsupported architecture or feature, a missing key, or contradicting values.
    """
    metadata, arch = gguf.metadata, gguf.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelLoadError(f"{gguf.path}: the architecture is {arch!r}; supported are {', '.join(_ARCHITECTURES)}.")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path}: there is no tensor 'token_embd.weight'; this is not a language model.")

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, (int, float)):
            raise ModelLoadError(f"{gguf.path}: {arch}.{key} is {value!r}; a number is needed.")
        return value

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    if num_heads < 1 or (f"{arch}.attention.key_length" not in metadata and hidden_size % num_heads):
        raise ModelLoadError(f"{gguf.path}: a width of {hidden_size} cannot be shared among {num_heads} heads.")
    head_dim = number("attention.key_length", hidden_size // num_heads)
    # Mixture of experts, windows, and heads of two kinds would change the arithmetic: nothing of it may be overlooked.
    for key, expected in {
        "expert_count": 0,
        "attention.sliding_window": 0,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }.items():
        if number(key, expected) != expected:
            raise ModelLoadError(f"{gguf.path}: {arch}.{key} is {number(key)}; only {expected} is supported here.")
    try:
        return ModelConfig(
            architecture=arch,
            vocab_size=gguf.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=number("block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=number("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_theta=number("rope.freq_base", 10_000.0),
            rope_scaling=_rope_scaling(gguf, arch, number),
            max_position_embeddings=number("context_length"),
            tie_word_embeddings="output.weight" not in gguf.tensors,
            attention_bias="blk.0.attn_q.bias" in gguf.tensors,
            qk_norm=arch == "qwen3",
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{gguf.path}: {error}") from None


def _rope_scaling(gguf: GGUFFile, arch: str, number: Callable[..., Any]) -> dict[str, Any] | None:
    """RoPE scaling from metadata, or from the tensor of factors that stands for Llama 3's scaling."""
    prefix = f"{arch}.rope.scaling."
    given = {key.removeprefix(prefix) for key in gguf.metadata if key.startswith(prefix)}
    kind = gguf.metadata.get(f"{prefix}type", "none")
    if unknown := given - {"type", "factor", "original_context_length", "finetuned"}:
        raise ModelLoadError(f"rope.scaling has {', '.join(sorted(unknown))}, which is not supported here.")
    if _ROPE_FACTORS in gguf.tensors:
        if kind != "none":
            raise ModelLoadError(f"RoPE is scaled twice, by {kind!r} and by the tensor {_ROPE_FACTORS}.")
        return {"rope_type": "factors", "factors": gguf.tensor(_ROPE_FACTORS).ravel().tolist()}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": number("rope.scaling.factor")}
    if kind == "yarn":
        original = number("rope.scaling.original_context_length", number("context_length"))
        return {
            "rope_type": "yarn",
            "factor": number("rope.scaling.factor"),
            "original_max_position_embeddings": original,
        }
    raise ModelLoadError(f"RoPE scaling is of type {kind!r}; supported are none, linear and yarn.")


def weights(gguf: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face's name, float32 array in Hugging Face's layout) for every weight, one at a time.

    Raises:
        ModelLoadError: the file has a tensor that no supported model has.
    """
    for name in gguf.tensors:
        if name == _ROPE_FACTORS:  # part of the config
            continue
        hf_name = _hf_name(name)
        if hf_name is None:
            raise ModelLoadError(f"{gguf.path}: tensor {name!r} is not part of any model that this engine supports.")
        weight = gguf.tensor(name)
        if config.architecture == "llama" and hf_name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            num_heads = config.num_attention_heads if "q_proj" in hf_name else config.num_key_value_heads
            if len(weight) != num_heads * config.head_dim:
                raise ModelLoadError(
                    f"{gguf.path}: tensor {name!r} has {len(weight)} rows, but {num_heads} heads of {config.head_dim} "
                    "were announced; the file is damaged."
                )
            weight = _unpermute(weight, num_heads)
        yield hf_name, weight


def _hf_name(name: str) -> str | None:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives q and k of Llama models.

    RoPE rotates pairs of numbers. Meta and llama.cpp pair neighbours (0,1), (2,3), ...; Hugging Face pairs number i of
    the first half of a head with number i of the second half. Interleaving the halves turns one into the other:

        in the file   a0 b0 a1 b1 a2 b2        rows of one head; (a, b) is a pair
        here          a0 a1 a2 b0 b1 b2
    """
    rows, *columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, *columns).swapaxes(1, 2).reshape(weight.shape)
