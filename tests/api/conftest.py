"""The tiny model, made once, and an engine for it that every test must leave as it found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.api.support import save_tiny_model
from tests.core.support import assert_clean
from tutorial_engine import LLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two random Llama layers; the tokenizer adds a BOS."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_hf(tiny_model: Path) -> LlamaForCausalLM:
    """The same model in transformers, the judge of logits and logprobs."""
    return LlamaForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="session")
def shared_llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=128, num_gpu_blocks_override=65) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An engine without memory of earlier tests, checked to be clean afterwards."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    assert_clean(shared_llm.llm_engine)
