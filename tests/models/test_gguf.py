"""The GGUF reader: right on good files, and one clear error on every bad one."""

import hashlib
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.models.gguf_files import (
    ARRAY,
    BF16,
    F16,
    F32,
    FLOAT32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q8_0,
    STRING,
    UINT32,
    UINT64,
    f32,
    gguf_bytes,
    gguf_of_model,
    model_metadata,
    string,
    write,
)
from tests.models.hf_models import tiny_model
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.default_model import default_model_path
from tutorial_engine.models.gguf import TENSOR_TYPES, GGUFFile, model_config, weights
from tutorial_engine.models.tokenizer import gguf_tokenizer

# Random bytes hold infinities, and inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# --- dequantisation, against one number at a time ---


def half(data: bytes) -> np.float32:
    return np.float32(np.frombuffer(data, "<f2")[0])


def scalar_twin(type_id: int, block: bytes) -> list[np.float32]:
    """The weights of one block, in plain Python from the layout's description."""
    if type_id == F32:
        return [np.float32(struct.unpack("<f", block)[0])]
    if type_id == F16:
        return [half(block)]
    if type_id == BF16:
        return [np.float32(struct.unpack("<f", b"\0\0" + block)[0])]
    scale = half(block[:2])
    if type_id == Q8_0:
        return [np.float32(number) * scale for number in struct.unpack("<32b", block[2:])]
    packed = block[4:] if type_id == Q4_1 else block[2:]
    halves = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    if type_id == Q4_0:
        return [np.float32(number - 8) * scale for number in halves]
    return [np.float32(number) * scale + half(block[2:4]) for number in halves]


@pytest.mark.parametrize("type_id", TENSOR_TYPES)
def test_dequantised_blocks_equal_a_scalar_twin_on_random_bytes(type_id: int) -> None:
    kind = TENSOR_TYPES[type_id]
    data = np.random.default_rng(type_id).bytes(200 * kind.block_bytes)
    blocks = np.frombuffer(data, np.uint8).reshape(200, kind.block_bytes)
    got = kind.dequantize(blocks)
    expected = [scalar_twin(type_id, bytes(block)) for block in blocks]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.reshape(200, kind.block_size), np.array(expected, np.float32))


def test_tensors_of_every_type_lie_side_by_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for type_id, kind in TENSOR_TYPES.items():
        num_blocks = 3 * 64 // kind.block_size
        scales = rng.normal(size=(num_blocks, 2)).astype("<f2").view(np.uint8)
        blocks = rng.integers(0, 60, (num_blocks, kind.block_bytes), dtype=np.uint8)
        blocks[:, :4] = scales[:, : min(4, kind.block_bytes)] if kind.block_size > 1 else blocks[:, :4]
        tensors[kind.name] = (type_id, (3, 64), blocks.tobytes())
    for alignment in (32, 64):
        gguf = GGUFFile.open(write(tmp_path / f"{alignment}.gguf", gguf_bytes({}, tensors, alignment=alignment)))
        for type_id, kind in TENSOR_TYPES.items():
            encoded = tensors[kind.name][2]
            parts = [encoded[i : i + kind.block_bytes] for i in range(0, len(encoded), kind.block_bytes)]
            expected = np.array([scalar_twin(type_id, part) for part in parts], np.float32).reshape(3, 64)
            np.testing.assert_array_equal(gguf.tensor(kind.name), expected)
            assert gguf.tensor(kind.name).flags.writeable


# --- parsing ---


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_metadata_is_read(tmp_path: Path, version: int) -> None:
    scalars = {0: ("B", 200), 1: ("b", -100), 2: ("H", 60000), 3: ("h", -30000), 4: ("I", 2**32 - 1)}
    scalars |= {
        5: ("i", -(2**31)),
        6: ("f", 0.5),
        7: ("?", True),
        10: ("Q", 2**64 - 1),
        11: ("q", -(2**63)),
        12: ("d", 0.1),
    }
    metadata: dict = {f"s{kind}": struct.pack("<I" + code, kind, item) for kind, (code, item) in scalars.items()}
    metadata |= {f"a{k}": struct.pack(f"<IIQ2{c}", ARRAY, k, 2, v, v) for k, (c, v) in scalars.items()}
    metadata |= {"text": "naïve 🎈", "texts": ["", "a", "ßß"], "none": struct.pack("<IIQ", ARRAY, FLOAT32, 0)}
    gguf = GGUFFile.open(write(tmp_path / "m.gguf", gguf_bytes(metadata, {}, version)))
    for kind, (_, item) in scalars.items():
        assert gguf.metadata[f"s{kind}"] == item
        assert gguf.metadata[f"a{kind}"].tolist() == [item, item]
    assert gguf.metadata["text"] == "naïve 🎈"
    assert gguf.metadata["texts"] == ["", "a", "ßß"]
    assert len(gguf.metadata["none"]) == 0


def test_shapes_are_in_numpys_order(tmp_path: Path) -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    gguf = GGUFFile.open(write(tmp_path / "m.gguf", gguf_bytes({}, {"x": f32(array)})))
    np.testing.assert_array_equal(gguf.tensor("x"), array)


HEADER = struct.Struct("<4sIQQ")


def header(num_tensors: int, num_keys: int, body: bytes = b"") -> bytes:
    return HEADER.pack(b"GGUF", 3, num_tensors, num_keys) + body


def one_tensor(shape: tuple[int, ...], type_id: int = F32, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return header(1, 0, string("some.weight") + dims + struct.pack("<IQ", type_id, offset)) + bytes(4096)


BAD_FILES = {
    "empty": (b"", "empty"),
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "magic only": (b"GGUF", "truncated"),
    "version 1": (HEADER.pack(b"GGUF", 1, 0, 0), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "2^63 tensors": (header(2**63, 0), "tensors are announced"),
    "2^64-1 keys": (header(0, 2**64 - 1), "metadata keys are announced"),
    "endless key": (header(0, 1, struct.pack("<Q", 2**63) + bytes(40)), "truncated"),
    "endless string": (header(0, 1, string("k") + struct.pack("<IQ", STRING, 2**64 - 1)), "truncated"),
    "endless array": (header(0, 1, string("k") + struct.pack("<IIQ", ARRAY, UINT64, 2**61)), "truncated"),
    "endless strings": (header(0, 1, string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**61)), "strings are announced"),
    "arrays in arrays": (header(0, 1, string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 9), "value type 9"),
    "unknown value type": (header(0, 1, string("k") + struct.pack("<II", 77, 0)), "value type 77"),
    "key twice": (header(0, 2, (string("k") + struct.pack("<II", UINT32, 1)) * 2), "'k' is there twice"),
    "not UTF-8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 1)), "not UTF-8"),
    "no alignment": (gguf_bytes({"general.alignment": 0}, {}), "general.alignment is 0"),
    "text as alignment": (gguf_bytes({"general.alignment": "32"}, {}), "general.alignment is '32'"),
    "no dimension": (one_tensor(()), "0 dimensions"),
    "five dimensions": (one_tensor((1, 1, 1, 1, 1)), "5 dimensions"),
    "2^32-1 dimensions": (header(1, 0, string("x") + struct.pack("<I", 2**32 - 1) + bytes(64)), "dimensions"),
    "zero rows": (one_tensor((0, 4)), "shape"),
    "product beyond 2^64": (one_tensor((2**40, 2**40)), "truncated"),
    "half a block": (one_tensor((2, 48), Q4_0), "Q4_0 blocks of 32"),
    "offset beyond the end": (one_tensor((4, 4), offset=2**63), "truncated"),
    "Q4_K": (one_tensor((1, 256), Q4_K), r"'some.weight' is of type Q4_K \(12\)"),
    "unknown tensor type": (one_tensor((1, 32), 99), r"'some.weight' is of type unknown \(99\)"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    path = write(tmp_path / "bad.gguf", content)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - start < 2
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    info = string("x") + struct.pack("<IQIQ", 1, 1, F32, 0)
    with pytest.raises(ModelLoadError, match="same name"):
        GGUFFile.open(write(tmp_path / "m.gguf", header(2, 0, info * 2) + bytes(64)))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            GGUFFile.open(path)


def small_file() -> bytes:
    """A whole tiny model of one layer, with a tokenizer."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in "qkv"} | {"blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32)}
    tensors = {}
    for name, shape in shapes.items():
        type_id = F32 if len(shape) == 1 else Q8_0
        kind = TENSOR_TYPES[type_id]
        size = int(np.prod(shape)) // kind.block_size * kind.block_bytes
        tensors[f"{name}.weight"] = (type_id, shape, rng.bytes(size))
    sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32}
    metadata = model_metadata("llama", **sizes, attention__head_count=2, attention__head_count_kv=2)
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "c", "d", "e", "f"]}
    metadata |= {"tokenizer.ggml.token_type": [1, 1, 1, 3, 1, 1, 4, 5], "tokenizer.ggml.merges": ["a b"]}
    return gguf_bytes(metadata | {"tokenizer.ggml.bos_token_id": 3}, tensors)


def use(path: Path) -> None:
    """Everything that can be done with a file."""
    gguf = GGUFFile.open(path)
    for _ in weights(gguf, model_config(gguf)):
        pass
    gguf_tokenizer(gguf).encode("abab <s> cde")


def test_the_small_file_is_good(tmp_path: Path) -> None:
    use(write(tmp_path / "m.gguf", small_file()))


def test_a_file_cut_anywhere_is_a_load_error(tmp_path: Path) -> None:
    content = small_file()
    data_start = len(content) - 10_000
    for length in [*range(0, data_start, 7), *range(data_start, len(content), 501), len(content) - 1]:
        with pytest.raises(ModelLoadError):
            use(write(tmp_path / "cut.gguf", content[:length]))


def test_a_damaged_file_either_works_or_is_a_load_error(tmp_path: Path) -> None:
    """600 random changes to the part that is parsed: no other exception, no long wait, no big allocation."""
    content, rng = small_file(), random.Random(0)
    parsed = len(content) - 8_000
    failures = 0
    tracemalloc.start()
    start = time.process_time()
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(parsed)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        try:
            use(write(tmp_path / "damaged.gguf", bytes(damaged)))
        except ModelLoadError:
            failures += 1
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    assert 60 < failures < 600
    assert time.process_time() - start < 30


# --- whole models ---

CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
]


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_a_converted_model_comes_back_unchanged(tmp_path: Path, architecture: str, changes: dict) -> None:
    model = tiny_model(architecture, **changes)
    metadata = {"attention__head_count_kv": model.config.num_key_value_heads}
    if "head_dim" in changes:
        metadata |= {"attention__key_length": changes["head_dim"], "attention__value_length": changes["head_dim"]}
    gguf = GGUFFile.open(write(tmp_path / "m.gguf", gguf_of_model(model, architecture, **metadata)))
    config = model_config(gguf)
    assert config.architecture == architecture
    assert (config.num_attention_heads, config.head_dim) == (4, changes.get("head_dim", 16))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 64, 96)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (2, 128)
    assert config.num_key_value_heads == model.config.num_key_value_heads
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    assert (config.attention_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert (config.rope_theta, config.rope_scaling) == (5000.0, None)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.dtype == "float32"
    expected = dict(model.state_dict())
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    got = dict(weights(gguf, config))
    assert got.keys() == expected.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, expected[name].numpy(), err_msg=name)


def test_llama_biases_are_unpermuted_too(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    tensors = {"token_embd.weight": f32(np.zeros((96, 64))), "blk.0.attn_q.bias": f32(bias)}
    gguf = GGUFFile.open(write(tmp_path / "m.gguf", gguf_bytes(model_metadata(), tensors)))
    config = model_config(gguf)
    assert config.attention_bias
    got = dict(weights(gguf, config))["model.layers.0.self_attn.q_proj.bias"]
    # In the file number 1 is the partner of number 0; here the partner is 8 places further.
    assert (got[0], got[8], got[1], got[16]) == (0, 1, 2, 16)


def open_metadata(tmp_path: Path, metadata: dict, **tensors: np.ndarray) -> GGUFFile:
    arrays = {"token_embd.weight": np.zeros((96, 64)), **{k.replace("__", "."): v for k, v in tensors.items()}}
    return GGUFFile.open(write(tmp_path / "m.gguf", gguf_bytes(metadata, {k: f32(v) for k, v in arrays.items()})))


def test_rope_scaling(tmp_path: Path) -> None:
    linear = model_metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert model_config(open_metadata(tmp_path, linear)).rope_scaling == {"rope_type": "linear", "factor": 4.0}
    yarn = model_metadata(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
    )
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert model_config(open_metadata(tmp_path, yarn)).rope_scaling == expected
    factors = open_metadata(tmp_path, model_metadata(), rope_freqs__weight=np.linspace(1, 8, 8))
    assert model_config(factors).rope_scaling == {"rope_type": "factors", "factors": np.linspace(1, 8, 8).tolist()}
    assert dict(weights(factors, model_config(factors))).keys() == {"model.embed_tokens.weight"}
    none = model_metadata(rope__scaling__type="none", rope__freq_base=None)
    assert model_config(open_metadata(tmp_path, none)).rope_scaling is None
    assert model_config(open_metadata(tmp_path, none)).rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama.block_count is None; a number is needed"),
        ({"block_count": "2"}, "llama.block_count is '2'"),
        ({"block_count": 2.0}, "num_hidden_layers is 2.0"),
        ({"block_count": 0}, "num_hidden_layers is 0"),
        ({"embedding_length": 66}, "width of 66 cannot be shared among 4 heads"),
        ({"attention__head_count": 0}, "cannot be shared among 0 heads"),
        ({"attention__head_count_kv": 3}, "num_key_value_heads is 3"),
        ({"attention__head_count": [4, 4]}, "attention.head_count is"),
        ({"attention__value_length": 8}, "attention.value_length is 8"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"expert_count": 8}, "expert_count is 8"),
        ({"attention__sliding_window": 64}, "sliding_window is 64"),
        ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon is None"),
        ({"rope__scaling__type": "longrope"}, "of type 'longrope'"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor is None"),
        ({"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 2.0}, "attn_factor, which is not supported"),
    ],
)
def test_metadata_that_cannot_be_honoured(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        model_config(open_metadata(tmp_path, model_metadata(**changes)))
    assert str(tmp_path) in str(caught.value)


def test_wrong_architecture_and_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture is 'gemma3'; supported are llama, qwen2, qwen3"):
        model_config(open_metadata(tmp_path, model_metadata("gemma3")))
    with pytest.raises(ModelLoadError, match="architecture is None"):
        model_config(open_metadata(tmp_path, {}))
    with pytest.raises(ModelLoadError, match=r"no tensor 'token_embd\.weight'"):
        model_config(GGUFFile.open(write(tmp_path / "m.gguf", gguf_bytes(model_metadata(), {}))))
    with pytest.raises(ModelLoadError, match="8 numbers above 0"):
        model_config(open_metadata(tmp_path, model_metadata(), rope_freqs__weight=np.ones(4)))
    scaled_twice = model_metadata(rope__scaling__type="linear", rope__scaling__factor=2.0)
    with pytest.raises(ModelLoadError, match="scaled twice"):
        model_config(open_metadata(tmp_path, scaled_twice, rope_freqs__weight=np.ones(8)))


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias.x", "blk.0.ffn_gate_exps.weight", "v.patch_embd.weight"])
def test_an_unknown_tensor_is_an_error(tmp_path: Path, name: str) -> None:
    gguf = open_metadata(tmp_path, model_metadata(), **{name: np.ones((2, 2))})
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is not part"):
        list(weights(gguf, model_config(gguf)))


def test_rows_that_contradict_the_heads(tmp_path: Path) -> None:
    gguf = open_metadata(tmp_path, model_metadata(), **{"blk.0.attn_k.weight": np.ones((30, 64))})
    with pytest.raises(ModelLoadError, match="30 rows, but 2 heads of 16"):
        list(weights(gguf, model_config(gguf)))


# --- the real thing ---


@pytest.fixture(scope="module")
def default_gguf() -> GGUFFile:
    try:
        return GGUFFile.open(default_model_path())
    except ModelLoadError as error:
        pytest.skip(f"the default model is not on this machine: {error}")


def test_the_default_models_weights_are_those_that_transformers_reads(default_gguf: GGUFFile) -> None:
    """The digest was taken when all 272 tensors were bit-identical to transformers 5.24 (gguf 0.19) on this file."""
    config = model_config(default_gguf)
    digest = hashlib.sha256()
    count = 0
    for name, array in weights(default_gguf, config):
        digest.update(name.encode() + hashlib.sha256(array.tobytes()).digest())
        count += 1
    assert count == 2 + 9 * config.num_hidden_layers == 272
    assert digest.hexdigest() == "849ea5f33c8dcd4c792bcb8609ea8236cee2394b9438e06a6d4698563ea52262"
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (576, 9, 3)
    assert config.tie_word_embeddings
    assert config.rope_theta == 100_000
    assert (config.bos_token_id, config.eos_token_id, config.max_position_embeddings) == (1, 2, 8192)
