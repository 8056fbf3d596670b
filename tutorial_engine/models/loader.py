"""From the name of a model to its config, weights and tokenizer.

It owns where a model is looked for, and Hugging Face's folder layout: config.json, safetensors, one file or several. It
does not own the default model's file (`default_model`), GGUF (`gguf`), or what is done with the weights (`decoder`).

    "" or "smollm2-135m-instruct"   ─► default_model ─► one .gguf file ─┐
    "./folder", "/path/model.gguf"  ─► taken as it is ──────────────────┼─► ModelSource
    "organisation/name"             ─► Hugging Face hub, or its cache ──┘

Whatever cannot be a hub's id is refused at once: asking a network that may not be there about a misspelt folder would
cost the user a minute and then blame the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models import gguf as gguf_format
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.default_model import DEFAULT_MODEL, default_model_path, is_default_model

if TYPE_CHECKING:
    import torch

    from tutorial_engine.models.tokenizer import AnyTokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_PATTERNS = ["*token*.json", "vocab.json", "merges.txt", "chat_template*", "config.json", "*.model"]
_HUB_TIMEOUT_S = 10
_MODEL_PATTERNS = ["*.safetensors", _INDEX, "generation_config.json", *_TOKENIZER_PATTERNS]


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine, described but not yet loaded.

    Attributes:
        name: the name it was asked for by.
        path: the .gguf file, or the folder with config.json.
        config: its shape.
        generation_config: content of generation_config.json, {} if there is none. If the checkpoint names several EOS
            ids elsewhere, they are under "eos_token_id" here.
        gguf: the parsed file, or None for a folder.
    """

    name: str
    path: Path
    config: ModelConfig
    generation_config: dict[str, Any]
    gguf: gguf_format.GGUFFile | None = None

    @property
    def is_gguf(self) -> bool:
        return self.gguf is not None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face's name, CPU tensor), one at a time, so that two copies of the model are never in memory.

        Safetensors come in the dtype of the file, GGUF tensors dequantised to float32. "lm_head.weight" is among them
        only if the config says that it differs from the embedding.

        Raises:
            ModelLoadError: a file is damaged or missing.
        """
        weights = self._gguf_weights() if self.gguf else _safetensors_weights(self.path)
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue  # some checkpoints store the tied matrix a second time
            if name.endswith(".rotary_emb.inv_freq"):
                continue  # old Llama checkpoints store a table that follows from the config
            yield name, tensor

    def _gguf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name, array in gguf_format.weights(self.gguf, self.config):
            yield name, torch.from_numpy(array)

    def tokenizer(self) -> AnyTokenizer:
        """Load the tokenizer that came with the model. Raises ModelLoadError if there is none that can be loaded."""
        from tutorial_engine.models.tokenizer import folder_tokenizer, gguf_tokenizer

        return gguf_tokenizer(self.gguf) if self.gguf else folder_tokenizer(self.path)


def resolve_model(model: str, revision: str | None = None) -> ModelSource:
    """Find a model, fetch it if it is not on this machine, and read what it says about itself.

    Args:
        model: "" or "smollm2-135m-instruct" for the default model; a folder with config.json and safetensors; a
            .gguf file; or a Hugging Face id such as "Qwen/Qwen2.5-0.5B-Instruct".
        revision: branch, tag or commit of a Hugging Face id.

    Raises:
        ModelLoadError: not found, not reachable, damaged, or not supported; the text says which and what to do.
    """
    path = _locate(model, revision, _MODEL_PATTERNS)
    if path.is_file():
        gguf = gguf_format.GGUFFile.open(path)
        return ModelSource(model, path, gguf_format.model_config(gguf), _gguf_generation_config(gguf), gguf)
    raw = _read_json(path / "config.json")
    if raw is None:
        raise ModelLoadError(
            f"{path} has no config.json, so it is not a model in Hugging Face's layout. For a GGUF model, pass the "
            "path of the .gguf file itself."
        )
    try:
        config = ModelConfig.from_hf_config(raw)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None
    _weight_files(path)  # a missing file is reported now rather than halfway through loading
    generation_config = _read_json(path / "generation_config.json")
    if generation_config is None:
        eos = raw.get("eos_token_id")
        generation_config = {"eos_token_id": eos} if isinstance(eos, list) else {}
    return ModelSource(model, path, config, generation_config)


def resolve_tokenizer(tokenizer: str, revision: str | None = None) -> AnyTokenizer:
    """Like `resolve_model`, for a tokenizer alone: nothing but its files is fetched."""
    from tutorial_engine.models.tokenizer import load_tokenizer

    return load_tokenizer(_locate(tokenizer, revision, _TOKENIZER_PATTERNS))


def _locate(model: str, revision: str | None, patterns: list[str]) -> Path:
    """A .gguf file or a folder on this machine, after fetching it if need be."""
    path = Path(model).expanduser()
    if is_default_model(model):
        found = default_model_path()
    elif path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(f"{model} is a file, but not a .gguf file. Pass a .gguf file, or the folder of a model.")
    elif path.exists():
        found = path
    else:
        return _fetch_from_hub(model, revision, patterns)
    if revision is not None:
        raise ModelLoadError(f"revision={revision!r} is for Hugging Face ids only, but {model!r} is on this machine.")
    return found


def _fetch_from_hub(model: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's current snapshot of `model`, or the cached one if the hub cannot be reached."""
    # Ids without an organisation exist on the hub, but none of an architecture that runs here.
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or model.endswith((".gguf", "/")):
        raise ModelLoadError(
            f"{model!r} does not exist here, and is not a Hugging Face id, which has the form 'organisation/name'. "
            f"Check the spelling, or use the default model, {DEFAULT_MODEL!r}. (The working folder is {Path.cwd()}.)"
        )
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    unreachable = None
    try:
        # snapshot_download asks the same, but with no limit on the time that a silent network may take.
        revision = HfApi().model_info(model, revision=revision, timeout=_HUB_TIMEOUT_S).sha
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelLoadError(_explain_hub_error(error, model, revision)) from error
    except Exception as error:  # offline mode, no network, a proxy's page, ...: they have no common class
        unreachable = error
    try:
        # Sub-folders hold the same weights in other formats.
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=unreachable is not None,
        )
    except Exception as error:
        raise ModelLoadError(_explain_hub_error(unreachable or error, model, revision)) from error
    return Path(folder)


def _explain_hub_error(error: Exception, model: str, revision: str | None) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return f"{model!r} is no folder here and no valid Hugging Face id: {error}"
    if isinstance(error, GatedRepoError):
        return f"{model!r} is gated: accept its terms on its Hugging Face page, then run `hf auth login`."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model!r} is neither a folder here nor a public model on Hugging Face; check the spelling. A private "
            "model needs `hf auth login` first."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{model!r} has no revision {revision!r} on Hugging Face."
    return (
        f"{model!r} is no folder here, is not (completely) in this machine's Hugging Face cache, and could not be "
        f"fetched: {type(error).__name__}: {error}. Connect and try again, pass the folder of a model, or use the "
        f"default model, {DEFAULT_MODEL!r}."
    )


def _gguf_generation_config(gguf: gguf_format.GGUFFile) -> dict[str, Any]:
    """Chat models may end a turn with another token than a text; llama.cpp stops at both."""
    ends = [gguf.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    return {"eos_token_id": ends} if None not in ends and ends[0] != ends[1] else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    """The file's content, or None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def _weight_files(folder: Path) -> dict[str, list[str] | None]:
    """File name -> names of the weights to take from it; None means all."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    index = _read_json(folder / _INDEX)
    if index is None:
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        hint = f" ({', '.join(others)} found: convert them with transformers' save_pretrained)" if others else ""
        raise ModelLoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}; only safetensors can be read{hint}.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{folder / _INDEX} has no usable 'weight_map'.")
    files: dict[str, list[str] | None] = {name: [] for name in sorted(set(weight_map.values()))}
    for weight, name in weight_map.items():
        files[name].append(weight)
    if outside := [name for name in files if Path(name).name != name]:
        raise ModelLoadError(f"{folder / _INDEX} points outside of its folder: {', '.join(outside)}.")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)} (of {len(files)} files named by {_INDEX}). Fetch it again."
        )
    return files


def _safetensors_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file_name, names in _weight_files(folder).items():
        try:
            with safe_open(folder / file_name, framework="pt") as file:
                for name in names if names is not None else file.keys():
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{folder / file_name} is damaged: {error}. Fetch it again.") from error
