"""Write small GGUF files, good and bad. Written from the format's description, sharing nothing with the reader."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, BF16 = 0, 1, 2, 3, 8, 12, 30
UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    """A Python value with its type in front, in the types that llama.cpp's converter uses."""
    if isinstance(item, bytes):  # already encoded by the test
        return item
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", UINT32, item)
    if isinstance(item, float):
        return struct.pack("<If", FLOAT32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if all(isinstance(part, str) for part in item):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
    return struct.pack(f"<IIQ{len(item)}i", ARRAY, 5, len(item), *item)


def tensor_info(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), type_id, offset)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file. tensors: name -> (type, shape in numpy's order, encoded data)."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (type_id, shape, encoded) in tensors.items():
        data += bytes(-len(data) % alignment)
        head += tensor_info(name, shape, type_id, len(data))
        data += encoded
    return head + bytes(-len(head) % alignment) + data


def f32(array: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    return F32, array.shape, array.astype("<f4").tobytes()


HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("model.layers."):
        layer, module = module.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
    return f"{prefix}{HF_TO_GGUF[module]}.{kind}"


def permute_like_llama_cpp(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Head by head and pair by pair, as slowly and plainly as can be: the partner follows its number."""
    head_dim = len(rows) // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * pair] = rows[start + pair]
            out[start + 2 * pair + 1] = rows[start + pair + head_dim // 2]
    return out


def model_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a 2-layer model, 64 wide, with 4 query and 2 key/value heads of 16. A change to None removes a key;
    keys are written without the architecture, and with __ for a dot."""
    settings: dict[str, Any] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }
    settings.update({key.replace("__", "."): item for key, item in changes.items()})
    metadata = {f"{architecture}.{key}": item for key, item in settings.items() if item is not None}
    return {"general.architecture": architecture, **metadata}


def gguf_of_model(model: Any, architecture: str, **changes: Any) -> bytes:
    """The F32 GGUF file of a small transformers model."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture == "llama" and "q_proj" in name:
            array = permute_like_llama_cpp(array, model.config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            array = permute_like_llama_cpp(array, model.config.num_key_value_heads)
        tensors[to_gguf_name(name)] = f32(array)
    return gguf_bytes(model_metadata(architecture, **changes), tensors)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
