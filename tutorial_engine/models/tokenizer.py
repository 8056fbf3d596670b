"""Text to token ids and back.

It owns the choice of tokenizer for a model on disk, and the one that is rebuilt from a GGUF file. The arithmetic of BPE
is the `tokenizers` library's; the chat template, special tokens and the rest of the familiar interface come from
transformers' `PreTrainedTokenizerFast`. Wherever the files come from, the result is one of those, or becomes one as
soon as more is asked of it than text to ids and back (`LazyTokenizer`).

A byte-level BPE tokenizer is three lists and one rule, and a GGUF file holds them all:

    " 42 cats"  ──split──►  " " "4" "2" " cats"  ──bytes──►  Ġ 4 2 Ġcats  ──merges──►  ids
                  ▲                                                          ▲
            tokenizer.ggml.pre names the rule              .merges (in order of rank) and .tokens (position = id)
                                                           .token_type says which ids are special

transformers is imported inside the functions: it takes a second, which plain prompts and token ids need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.gguf import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    AnyTokenizer: TypeAlias = "PreTrainedTokenizerBase | LazyTokenizer"

_WAY_OUT = "Pass tokenizer='<Hugging Face id or folder>' to use the original model's tokenizer."

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# llama.cpp's token types.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# transformers' names for tokens with a role -> llama.cpp's.
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# How text is cut before merging. GPT-2's own rule is built into the tokenizers library; Qwen2's and Llama 3's differ
# only in how many digits stay together: contractions | a word with at most one sign before it | digits |
# punctuation | line ends | blanks but the last before a word | blanks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "qwen2", *_LLAMA3)


def load_tokenizer(path: str | Path) -> AnyTokenizer:
    """Load the tokenizer of a model on this machine.

    Args:
        path: a .gguf file, or a folder in Hugging Face's layout. Names of models are for `loader.resolve_tokenizer`.

    Raises:
        ModelLoadError: no tokenizer there, or one of a kind that cannot be built.
    """
    path = Path(path)
    return gguf_tokenizer(GGUFFile.open(path)) if path.is_file() else folder_tokenizer(path)


def folder_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers finds in `folder`. Runs no code from there, and never asks the network."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelLoadError(f"{folder} has none of {', '.join(_TOKENIZER_FILES)}, so no tokenizer. {_WAY_OUT}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with the files: transformers has no common error for it
        raise ModelLoadError(f"{folder}: no tokenizer could be loaded ({error}). {_WAY_OUT}") from error


class LazyTokenizer:
    """A `PreTrainedTokenizerFast` that comes into being when it is needed.

    Importing it takes longer than reading the default model, and generating from plain prompts needs none of it: the
    `tokenizers` library alone turns a text into ids and back. The first request for anything else, `full` included,
    makes the real one, and from then on everything goes there, so that no change made to it is ever overlooked.

    Args:
        backend: the `tokenizers` library's object, which adds no special tokens by itself.
        make_full: makes the real one around it.
        known: attributes of the real one that can be answered before it exists.
    """

    def __init__(
        self, backend: Tokenizer, make_full: Callable[[], PreTrainedTokenizerFast], known: dict[str, Any]
    ) -> None:
        self.__dict__.update(_backend=backend, _make_full=make_full, _known=known)  # __setattr__ writes to the real one

    @cached_property
    def full(self) -> PreTrainedTokenizerFast:
        """transformers' own object, for those who check its type."""
        return self._make_full()

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The `tokenizers` library's object."""
        return self._backend if self._is_enough({}) else self.full.backend_tokenizer

    def _is_enough(self, more: dict[str, Any]) -> bool:
        """Whether the backend can answer: nobody has made the real one, or asks for what only that can do."""
        return "full" not in self.__dict__ and not more

    def encode(self, text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:
        if isinstance(text, str) and self._is_enough(more):
            return self._backend.encode(text).ids
        return self.full.encode(text, add_special_tokens=add_special_tokens, **more)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **more: Any) -> str | list[str]:
        if isinstance(token_ids, list) and self._is_enough(more):
            return self._backend.decode(token_ids, skip_special_tokens)
        return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the questions of copy and pickle, which come before anything is set up
            raise AttributeError(name)
        return self._known[name] if name in self._known and self._is_enough({}) else getattr(self.full, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.full, name, value)

    def __len__(self) -> int:
        return len(self.full)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.full(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.full)


def gguf_tokenizer(gguf: GGUFFile) -> AnyTokenizer:
    """Rebuild the tokenizer that a GGUF file describes.

    Raises:
        ModelLoadError: the metadata is incomplete, or describes another kind than byte-level BPE.
    """
    metadata = gguf.metadata
    if (model := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise ModelLoadError(
            f"{gguf.path}: the tokenizer is of kind {model!r}; only byte-level BPE ('gpt2') can be rebuilt from a GGUF "
            f"file. {_WAY_OUT}"
        )
    tokens = _string_list(gguf, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelLoadError(f"{gguf.path}: {len(tokens)} tokens but {len(types)} token types; the file is damaged.")
    settings = _transformers_settings(gguf, tokens)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    special += [token for key, token in settings.items() if key in _NAMED and token and token not in special]
    backend = _byte_level_bpe(gguf, tokens, types, special)

    def make_full() -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=special, **settings)

    if settings["add_bos_token"] or settings["add_eos_token"]:  # transformers sees to that
        return make_full()
    known = {key: settings[key] for key in ("chat_template", "model_max_length", "bos_token", "eos_token")}
    known |= {f"{key}_id": backend.token_to_id(known[key] or "") for key in ("bos_token", "eos_token")}
    return LazyTokenizer(backend, make_full, known | {"truncation_side": "right"})


def _transformers_settings(gguf: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Arguments of `PreTrainedTokenizerFast` that the metadata answers."""
    metadata = gguf.metadata

    def named(role: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None

    return {
        **{name: named(role) for name, role in _NAMED.items()},
        # llama.cpp's defaults, where the file is silent: only Llama 3 begins every text with BOS.
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", _pre_tokenizer_name(gguf) in _LLAMA3)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
    }


def _byte_level_bpe(gguf: GGUFFile, tokens: list[str], types: Sequence[int], special: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kinds = list(zip(tokens, types, strict=True))
    # Unused tokens only pad the vocabulary to a round number; the original tokenizer does not have them.
    vocab = {token: i for i, (token, kind) in enumerate(kinds) if kind != _UNUSED or token in special}
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in _string_list(gguf, "merges"))]
    name = _pre_tokenizer_name(gguf)
    try:
        # Llama 3 takes a word that is a token as it is, even if no sequence of merges leads to it.
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _LLAMA3))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelLoadError(f"{gguf.path}: tokens and merges do not fit together ({error}). {_WAY_OUT}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = [token for token, kind in kinds if kind == _USER_DEFINED and token not in special]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return tokenizer


def _pre_tokenizer_name(gguf: GGUFFile) -> str:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{gguf.path}: the rule {name!r} for splitting text is unknown here; known are "
            f"{', '.join(_PRE_TOKENIZERS)}. {_WAY_OUT}"
        )
    return name


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
    from tokenizers.pre_tokenizers import Sequence as InTurn

    if name in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return InTurn([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    digits = r"\p{N}{1,3}" if name in _LLAMA3 else r"\p{N}"
    split = Split(Regex(_SPLIT.replace("DIGITS", digits)), behavior="isolated")
    return InTurn([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def _string_list(gguf: GGUFFile, key: str) -> list[str]:
    value = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelLoadError(f"{gguf.path}: there is no list tokenizer.ggml.{key}. {_WAY_OUT}")
    return value
