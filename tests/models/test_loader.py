"""Finding models, reading Hugging Face folders, and refusing what cannot be run."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from tests.models.gguf_files import f32, gguf_bytes, gguf_of_model, model_metadata, write
from tests.models.hf_models import SIZES, tiny_model
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.loader import resolve_model, resolve_tokenizer

# --- config.json ---

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **SIZES}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_bare_config_gets_transformers_defaults() -> None:
    config = ModelConfig.from_hf_config(LLAMA)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
    )
    without_groups = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf_config(without_groups).num_key_value_heads == 4
    assert ModelConfig.from_hf_config({**QWEN3, "head_dim": None}).head_dim == 128


def test_the_three_architectures_differ_in_two_flags() -> None:
    flags = {
        c.architecture: (c.attention_bias, c.qk_norm) for c in map(ModelConfig.from_hf_config, (LLAMA, QWEN2, QWEN3))
    }
    assert flags == {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


@pytest.mark.parametrize(
    ("v4", "v5", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}, 5e5, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
            10_000.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE, "original_max_position_embeddings": 128},
            5e5,
            {"rope_type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": 128},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
            10_000.0,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
        ),
    ],
)
def test_both_spellings_of_rope(v4: dict, v5: dict, theta: float, scaling: dict | None) -> None:
    for raw in ({**LLAMA, **v4}, {**LLAMA, "rope_parameters": {**v5, "partial_rotary_factor": 1.0}}):
        config = ModelConfig.from_hf_config(raw)
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"attention_bias": True},  # Qwen2 has its biases anyway
        {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "attention_dropout": 0.1},
    ],
)
def test_switches_that_change_nothing_are_accepted(changes: dict) -> None:
    assert ModelConfig.from_hf_config({**QWEN2, **changes}) == ModelConfig.from_hf_config(QWEN2)


def test_dtypes_and_special_tokens() -> None:
    def read(**changes: Any) -> ModelConfig:
        return ModelConfig.from_hf_config({**LLAMA, **changes})

    assert read().dtype == "float32"
    assert read(torch_dtype="bfloat16").dtype == read(dtype="torch.bfloat16").dtype == "bfloat16"
    assert (read(bos_token_id=1, eos_token_id=0).bos_token_id, read(eos_token_id=0).eos_token_id) == (1, 0)
    assert read(eos_token_id=[5, 7]).eos_token_id == 5
    assert read(eos_token_id=[]).eos_token_id is None


BAD_CONFIGS = [
    ({"architectures": ["GemmaForCausalLM"]}, r"GemmaForCausalLM.*this engine runs LlamaForCausalLM"),
    ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    ({"architectures": None}, "no architecture .model_type 'llama'"),
    ({"architectures": "LlamaForCausalLM"}, "architectures LlamaForCausalLM"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"hidden_size": "64"}, "hidden_size = '64'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": 96.0}, "vocab_size = 96.0"),
    ({"hidden_size": 66}, "hidden_size 66 cannot be shared equally among 4"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads is 3"),
    ({"num_key_value_heads": 8}, "num_attention_heads is 4 and num_key_value_heads is 8"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({"head_dim": -16}, "head_dim is -16"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ({"rope_theta": -1}, "rope_theta is -1"),
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
    ({"eos_token_id": 96}, "eos_token_id is 96"),
    ({"bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias or mlp_bias is true"),
    ({"mlp_bias": True}, "attention_bias or mlp_bias is true"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised .quant_method 'awq'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "asks for sliding_attention"),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "asks for sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": "linear"}, "RoPE parameters in config.json are 'linear'"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic'; supported are default, lin",
    ),
    ({"rope_scaling": {"type": "linear"}}, "type 'linear' lacks factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks high_freq_factor, low_freq_factor"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor above"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "has mscale, not supported"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section|rope_type 'default'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_a_config_that_cannot_be_honoured(tmp_path: Path, changes: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


# --- folders ---


def check_weights(folder: Path, model: torch.nn.Module, tied: bool = False) -> None:
    """The source yields the model's own names and values, and the dtype of its files."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    got = list(resolve_model(str(folder)).weights())
    assert len(got) == len(expected) and {name for name, _ in got} == expected.keys()
    for name, tensor in got:
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model(tmp_path: Path, architecture: str, dtype: torch.dtype, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied, eos_token_id=3).to(dtype)
    model.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    assert (source.name, source.path, source.is_gguf) == (str(tmp_path), tmp_path, False)
    assert source.config.architecture == architecture
    assert source.config.tie_word_embeddings == tied
    assert source.config.dtype == str(dtype).removeprefix("torch.")
    assert source.generation_config["eos_token_id"] == 3
    check_weights(tmp_path, model, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_shards(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(shards(tmp_path)) > 2
    check_weights(tmp_path, model, tied)


def test_rope_parameters_that_transformers_saved(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE, "original_max_position_embeddings": 64}
    tiny_model("llama", rope_parameters=dict(rope)).save_pretrained(tmp_path)
    config = resolve_model(str(tmp_path)).config
    assert config.rope_theta == rope.pop("rope_theta")
    assert config.rope_scaling == rope


def test_a_tied_head_that_is_stored_twice_is_passed_over(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored | extra, tmp_path / "model.safetensors")
    check_weights(tmp_path, model, tied=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny", max_shard_size="60KB")
    return tmp_path / "tiny"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 5]}')
    assert resolve_model(str(folder)).generation_config == {"temperature": 0.6, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").unlink()
    assert resolve_model(str(folder)).generation_config == {}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    source = resolve_model(str(folder))
    assert (source.config.eos_token_id, source.generation_config) == (7, {"eos_token_id": [7, 9]})


def test_a_single_file_wins_over_an_index(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    assert [name for name, _ in resolve_model(str(folder)).weights()] == ["model.norm.weight"]


def test_a_path_with_a_tilde(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/tiny").path == folder


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_broken_json(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=file):
        resolve_model(str(folder))


def test_weights_in_another_format(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        resolve_model(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin found: convert"):
        resolve_model(str(folder))


def test_a_missing_shard_is_reported_at_once(folder: Path) -> None:
    shard = shards(folder)[1]
    shard.rename(folder / "elsewhere")
    with pytest.raises(ModelLoadError, match=f"lacks {shard.name} .of {len(shards(folder)) + 1} files"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../../secret.safetensors"}, "outside of its folder"),
        ({"a": "/etc/passwd"}, "outside of its folder"),
        ({"a": 3}, "no usable 'weight_map'"),
        (None, "no usable 'weight_map'"),
    ],
)
def test_a_broken_index(folder: Path, weight_map: Any, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(folder))


def test_an_index_that_promises_too_much(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = shards(folder)[0].name
    index["weight_map"]["model.layers.9.x"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"{shard} is damaged.*model.layers.9.x"):
        list(resolve_model(str(folder)).weights())


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_shard(folder: Path, keep: int) -> None:
    shard = shards(folder)[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=f"{shard.name} is damaged"):
        list(resolve_model(str(folder)).weights())


# --- GGUF ---


def test_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    path = write(tmp_path / "tiny.gguf", gguf_of_model(model, "llama"))
    source = resolve_model(str(path))
    assert (source.is_gguf, source.path, source.generation_config) == (True, path, {})
    check_weights(path, model, tied=True)


def test_a_gguf_file_with_two_ends(tmp_path: Path) -> None:
    metadata = model_metadata() | {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 4}
    embedding = {"token_embd.weight": f32(np.zeros((96, 64)))}
    source = resolve_model(str(write(tmp_path / "tiny.gguf", gguf_bytes(metadata, embedding))))
    assert (source.config.eos_token_id, source.generation_config) == (3, {"eos_token_id": [3, 4]})


# --- names that are no paths ---


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"asked the network for {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name",
    ["gpt2", "smollm2-135m-instrukt", "./models/x", "/no/such/folder", "~/x", "a/b/c", "x/", "a/b.gguf", "b.gguf"],
)
def test_what_cannot_be_a_hub_id_is_refused_without_asking(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist here, and is not a Hugging Face id") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value) and "smollm2-135m-instruct" in str(caught.value)


def test_a_revision_is_for_the_hub(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="revision='main' is for Hugging Face ids only"):
        resolve_model(str(folder), revision="main")


class Hub:
    """Stands for huggingface_hub: what it is asked, and what it answers."""

    def __init__(self, folder: Path, info: Exception | str, snapshot: Exception | None = None) -> None:
        self.folder, self.info, self.snapshot, self.asked = folder, info, snapshot, {}

    def model_info(self, _: Any, model: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        assert timeout <= 15
        if isinstance(self.info, Exception):
            raise self.info
        return SimpleNamespace(sha=self.info)

    def snapshot_download(self, model: str, **settings: Any) -> str:
        self.asked = {"model": model, **settings}
        if self.snapshot is not None:
            raise self.snapshot
        return str(self.folder)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Hub":
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kw: self.model_info(*args, **kw))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        return self


def hub_error(kind: type[Exception]) -> Exception:
    """These want an HTTP response, whose class differs between versions of huggingface_hub."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub's own words")
    return error


def test_a_hub_id_is_fetched_at_one_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(folder, "abc123").install(monkeypatch)
    source = resolve_model("org/tiny", revision="v1")
    assert (source.name, source.path) == ("org/tiny", folder)
    assert (hub.asked["model"], hub.asked["revision"], hub.asked["local_files_only"]) == ("org/tiny", "abc123", False)


def test_what_is_fetched_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    hub = Hub(folder, "abc").install(monkeypatch)
    resolve_model("org/tiny")
    wanted = ["config.json", "generation_config.json", "model-1.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"]
    wanted += ["chat_template.jinja", "added_tokens.json", "tokenizer.model"]
    unwanted = ["pytorch_model.bin", "original/consolidated.safetensors", "README.md", "x.gguf", "onnx/model.onnx"]
    patterns = {key: hub.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted
    with pytest.raises(ModelLoadError):  # the folder has no tokenizer, but it was asked for
        resolve_tokenizer("org/tiny")
    patterns = {key: hub.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    fetched = set(filter_repo_objects(wanted + unwanted, **patterns))
    assert fetched == set(wanted) - {"generation_config.json", "model-1.safetensors", "model.safetensors.index.json"}


@pytest.mark.parametrize("why", [ConnectionError("no route"), TimeoutError("slow"), RuntimeError("a strange proxy")])
def test_the_cache_serves_when_the_hub_cannot_be_reached(
    folder: Path, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    hub = Hub(folder, why).install(monkeypatch)
    assert resolve_model("org/tiny", revision="v1").path == folder
    assert hub.asked["local_files_only"] and hub.asked["revision"] == "v1"


@pytest.mark.parametrize(
    ("info", "snapshot", "message"),
    [
        (hub_error(RepositoryNotFoundError), None, "neither a folder here nor a public model.*check the spelling"),
        (hub_error(RevisionNotFoundError), None, "has no revision 'v1'"),
        (hub_error(GatedRepoError), None, "is gated: accept its terms"),
        ("abc", hub_error(GatedRepoError), "is gated: accept its terms"),
        ("abc", OSError("No space left on device"), "No space left on device"),
        (
            ConnectionError("no route"),
            LocalEntryNotFoundError("x"),
            "could not be fetched: ConnectionError: no route",
        ),
    ],
)
def test_each_failure_of_the_hub_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, info: Any, snapshot: Exception | None, message: str
) -> None:
    Hub(folder, info, snapshot).install(monkeypatch)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model("org/tiny", revision="v1")
    assert "'org/tiny'" in str(caught.value)


def test_an_invalid_id_and_offline_mode_for_real() -> None:
    """HF_HUB_OFFLINE is set for the tests."""
    with pytest.raises(ModelLoadError, match="no valid Hugging Face id"):
        resolve_model("-bad-/id--x")
    with pytest.raises(ModelLoadError, match="not .completely. in this machine's Hugging Face cache.*offline mode"):
        resolve_model("no-such-org/no-such-model")


def test_a_cached_hub_model_works_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's layout on disk: refs/main names a commit, snapshots/<commit> holds the files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = resolve_model("org/tiny")
    assert source.path == home / "snapshots" / commit
    assert sum(1 for _ in source.weights()) == 2 * 9 + 3
