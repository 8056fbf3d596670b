"""Tokenizers: the one rebuilt from a GGUF file, and those of folders."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import regex

from tests.models.gguf_files import gguf_bytes, model_metadata, write
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.gguf import GGUFFile
from tutorial_engine.models.loader import resolve_model, resolve_tokenizer
from tutorial_engine.models.tokenizer import gguf_tokenizer, load_tokenizer

# --- an independent, slow byte-level BPE ---

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_names() -> dict[int, str]:
    """GPT-2's visible character for each byte: printable ones stand for themselves, the others move up to 256 + i."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


class SlowBPE:
    """Merge the best-ranked pair until none is left, word by word. Splits like llama.cpp's 'smollm'."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split()): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.names = byte_names()

    def word(self, text: str) -> list[int]:
        parts = [self.names[byte] for byte in text.encode()]
        while True:
            pairs = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False))]
            if not pairs or min(pairs)[0] == 1 << 30:
                return [self.ids[part] for part in parts]
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in regex.split(f"({'|'.join(map(regex.escape, self.special))})", text):
            if piece in self.special:
                ids.append(self.ids[piece])
                continue
            for part in regex.split(r"(\p{N})", piece):
                for word in regex.findall(GPT2_SPLIT, part):
                    ids += self.word(word)
        return ids


@pytest.fixture(scope="module")
def default_source() -> Any:
    try:
        return resolve_model("")
    except ModelLoadError as error:
        pytest.skip(f"the default model is not on this machine: {error}")


@pytest.fixture(scope="module")
def default_tokenizer(default_source: Any) -> Any:
    return default_source.tokenizer()


PROBES = [
    "",
    "Hello, world!",
    "  two  spaces   and a tail  ",
    "\n\n\ttabs\t\r\n  \n mixed \u00a0\u2003 blanks",
    "0 12 345 6789 3.14159 1,000,000 x86_64 v2.0.1",
    " 1\n 2 \n\n 3   4",
    "½ ² x² Ⅷ ٣٤ １２ 𝟙",
    "naïve café, Ångström; e\u0301 is not é",
    "你好，世界。こんにちは 안녕하세요 Привет שלום नमस्ते",
    "😀👩‍👩‍👧‍👦 🇩🇪 ☕️",
    "don't I'll we've you're it's 'S DON'T",
    'def f(x):\n    """Doc."""\n    return x ** 2  # sq\n\tif (a[0]!=b["k"]): pass',
    "https://example.org/a?b=c&d=%20#e <div class='x'>&amp;</div>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_start |im_end|> <|im_end|><|im_end|><repo_name>x",
    "\x00\x01\x1f\x7f\ufeff\ufffd",
    "supercalifragilisticexpialidocious" * 3,
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 1280), (0x2000, 0x3100), (0x4E00, 0x5000), (0x1F600, 0x1F650), (48, 58), (9, 14)]

    def character() -> str:
        return rng.choice([" ", "\n", chr(rng.randrange(*rng.choice(ranges)))])

    return ["".join(character() for _ in range(rng.randrange(60))) for _ in range(count)]


def test_the_default_tokenizer_agrees_with_a_slow_one(default_source: Any, default_tokenizer: Any) -> None:
    slow = SlowBPE(default_source.gguf.metadata)
    for text in PROBES + random_texts(200):
        assert default_tokenizer.encode(text) == slow.encode(text), repr(text)


def test_decoding_undoes_encoding(default_tokenizer: Any) -> None:
    for text in PROBES + random_texts(200):
        assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def test_the_default_tokenizers_familiar_interface(default_tokenizer: Any) -> None:
    tokenizer = default_tokenizer
    assert tokenizer.convert_ids_to_tokens([1, 4093, 216, 33, 2]) == ["<|im_start|>", "user", "Ġ", "1", "<|im_end|>"]
    assert sorted(tokenizer.all_special_ids) == list(range(17))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.model_max_length) == (49152, 49152, 8192)
    assert tokenizer.is_fast and tokenizer.backend_tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer("Hi", return_offsets_mapping=True)["offset_mapping"] == [(0, 2)]


def test_the_default_chat_template(default_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    text = default_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = default_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == default_tokenizer.encode(text)


def test_a_saved_copy_loads_from_its_folder(tmp_path: Path, default_tokenizer: Any) -> None:
    default_tokenizer.save_pretrained(tmp_path)
    for twin in (load_tokenizer(tmp_path), resolve_tokenizer(str(tmp_path))):
        assert [twin.encode(text) for text in PROBES] == [default_tokenizer.encode(text) for text in PROBES]
        assert twin.chat_template == default_tokenizer.chat_template
        assert twin.eos_token_id == 2


def test_the_default_model_by_name(default_source: Any) -> None:
    assert resolve_tokenizer("smollm2-135m-instruct").encode("Hello") == load_tokenizer(default_source.path).encode(
        "Hello"
    )


# --- the lazy one ---


def test_plain_prompts_do_not_wait_for_transformers(default_source: Any) -> None:
    code = """
import sys
from tutorial_engine.models.loader import resolve_model
tokenizer = resolve_model("").tokenizer()
assert tokenizer.decode(tokenizer.encode("Hello <|im_end|>"), skip_special_tokens=True) == "Hello "
assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (1, 2, 8192)
assert "im_start" in tokenizer.chat_template and tokenizer.truncation_side == "right"
assert "transformers" not in sys.modules
assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
assert "transformers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120)


def test_lazy_and_real_answer_alike(default_source: Any) -> None:
    real = default_source.tokenizer().full
    assert type(real).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
    lazy = default_source.tokenizer()
    for text in PROBES + random_texts(100):
        ids = real.encode(text)
        assert lazy.encode(text) == lazy.encode(text, add_special_tokens=False) == ids
        for skip in (False, True):
            assert lazy.decode(ids, skip_special_tokens=skip) == real.decode(ids, skip_special_tokens=skip)
    for name, value in lazy._known.items():
        assert getattr(real, name) == value
    assert "full" not in vars(lazy)


def test_whatever_else_is_asked_makes_the_real_one(tmp_path: Path) -> None:
    def fresh() -> Any:
        return gguf_tokenizer(tiny(tmp_path))

    assert fresh().encode("ab ab", truncation=True, max_length=1) == fresh().encode("ab")
    assert fresh().encode(["ab", "c"]) == fresh().full.encode(["ab", "c"])
    assert fresh().decode(fresh().encode("ab")[0]) == "ab"
    assert fresh().decode(fresh()("ab", return_tensors="pt")["input_ids"][0]) == "ab"
    assert len(fresh()) == len(fresh().full)
    assert repr(fresh()) == repr(fresh().full)
    assert copy.deepcopy(fresh()).encode("ab") == copy.copy(fresh()).encode("ab") == fresh().encode("ab")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = fresh().no_such_thing


def test_changes_to_the_real_one_are_seen(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tiny(tmp_path))
    assert tokenizer.chat_template is None
    tokenizer.full.chat_template = "{{ messages[0].content }}"
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    tokenizer.chat_template = "!"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "!"
    tokenizer.add_tokens(["<tool>"])
    (token_id,) = tokenizer.encode("<tool>")
    assert tokenizer.decode([token_id]) == "<tool>"


# --- small vocabularies of every kind ---

WORDS = ["ab", "abc", "Ġa", "Ġab", "12", "123", "Ã©"]
MERGES = ["a b", "Ġ a", "Ġa b", "1 2", "12 3", "Ã ©"]  # none leads to "abc"


def tiny(tmp_path: Path, **changes: Any) -> GGUFFile:
    """256 bytes, a few words, and four marked tokens. Changes are tokenizer keys, None removes one."""
    tokens = [*byte_names().values(), *WORDS, "<s>", "</s>", "<think>", "[PAD]"]
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 4) + [3, 3, 4, 5],
        "merges": MERGES,
        "bos_token_id": len(tokens) - 4,
        "eos_token_id": len(tokens) - 3,
    }
    settings.update(changes)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in settings.items() if value is not None}
    return GGUFFile.open(write(tmp_path / "tiny.gguf", gguf_bytes(model_metadata() | metadata, {})))


def pieces(gguf: GGUFFile, text: str) -> list[str]:
    tokenizer = gguf_tokenizer(gguf)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab 123", ["ab", "Ġ", "123"]),
        (None, "ab 123", ["ab", "Ġ", "123"]),
        ("default", "ab 123", ["ab", "Ġ", "123"]),
        ("smollm", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("qwen2", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "ab 1234", ["<s>", "ab", "Ġ", "123", "4"]),
        ("gpt-2", "abc", ["ab", "c"]),
        ("llama-bpe", "abc", ["<s>", "abc"]),  # a word that is a token needs no merges
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("qwen2", "e\u0301", ["Ã©"]),  # normalised to é first
        ("gpt-2", "-ab", ["-", "ab"]),
        ("qwen2", "\n\nab\n", ["Ċ", "Ċ", "ab", "Ċ"]),
        ("gpt-2", "<s>ab</s><think>[PAD]", ["<s>", "ab", "</s>", "<think>", "[", "P", "A", "D", "]"]),
    ],
)
def test_each_rule_for_splitting(tmp_path: Path, pre: str | None, text: str, expected: list[str]) -> None:
    assert pieces(tiny(tmp_path, pre=pre), text) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["ab"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, changes: dict, expected: list[str]) -> None:
    gguf = tiny(tmp_path, **changes)
    assert pieces(gguf, "ab") == expected
    tokenizer = gguf_tokenizer(gguf)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab", add_special_tokens=False)) == ["ab"]


def test_special_added_and_unused_tokens(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tiny(tmp_path))
    special = {tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    assert special == {"<s>", "</s>"}
    ids = tokenizer.encode("<s>ab<think></s>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>"
    assert len(tokenizer) == 256 + len(WORDS) + 3
    assert "[PAD]" not in tokenizer.get_vocab()
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "is of kind 'llama'; only byte-level BPE"),
        ({"model": None}, "is of kind None"),
        ({"pre": "tekken"}, "rule 'tekken' for splitting text is unknown here; known are default, gpt-2"),
        ({"tokens": None}, r"no list tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"no list tokenizer\.ggml\.merges"),
        ({"merges": [1, 2]}, r"no list tokenizer\.ggml\.merges"),
        ({"merges": ["a zebra"]}, "tokens and merges do not fit together"),
        ({"merges": ["ab"]}, "tokens and merges do not fit together"),
        ({"token_type": [1, 1]}, "267 tokens but 2 token types"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        gguf_tokenizer(tiny(tmp_path, **changes))
    assert "tiny.gguf" in str(caught.value)
    assert "token types" in message or "Pass tokenizer='<Hugging Face id or folder>'" in str(caught.value)


def test_a_token_with_a_role_is_special_whatever_its_type(tmp_path: Path) -> None:
    size = 256 + len(WORDS) + 4
    for make_real in (False, True):
        tokenizer = gguf_tokenizer(tiny(tmp_path, token_type=[1] * (size - 1) + [5], padding_token_id=size - 1))
        if make_real:
            assert tokenizer.pad_token_id == size - 1 and len(tokenizer) == size
        assert tokenizer.encode("<s>ab[PAD]") == [size - 4, 256, size - 1]
        assert tokenizer.decode([size - 4, 256, size - 1], skip_special_tokens=True) == "ab"


def test_a_special_id_out_of_range_is_no_token(tmp_path: Path) -> None:
    assert gguf_tokenizer(tiny(tmp_path, eos_token_id=10**6)).eos_token is None


# --- folders ---


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelLoadError, match=r"has none of tokenizer\.json.*Pass tokenizer="):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file(tmp_path: Path, default_tokenizer: Any) -> None:
    default_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_a_folders_own_code_is_not_run(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ModelLoadError, match="contains custom code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
