"""Two servers that the tests share, and that every test must leave as it found them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import tiny_model  # noqa: F401
from tests.server.support import Live, serve, serve_letters
from tutorial_engine import AsyncEngineArgs, LLMEngine


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Live]:  # noqa: F811
    args = AsyncEngineArgs(model=str(tiny_model), served_model_name=["tiny", "also-tiny"], max_model_len=128,
                           num_gpu_blocks_override=129, max_num_seqs=16)
    with serve(LLMEngine.from_engine_args(args), enable_prompt_tokens_details=True) as live:
        yield live


@pytest.fixture
def tiny(tiny_server: Live) -> Iterator[Live]:
    """Two random layers behind a server."""
    yield tiny_server
    tiny_server.assert_clean()


@pytest.fixture(scope="session")
def letters_server() -> Iterator[Live]:
    with serve_letters("hello world") as live:
        yield live


@pytest.fixture
def letters(letters_server: Live) -> Iterator[Live]:
    """Says "hello world", then "ddd..."."""
    yield letters_server
    letters_server.assert_clean()
