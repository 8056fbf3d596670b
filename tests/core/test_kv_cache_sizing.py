"""How many blocks there are, and what the errors say when there are too few."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.core.test_attention import model_config
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.kv_cache import (
    CPU_DEFAULT_CACHE_BYTES,
    GIB,
    available_kv_cache_bytes,
    kv_bytes_per_token,
    size_kv_cache,
)

CPU = torch.device("cpu")
MODEL = model_config(num_kv_heads=2, head_dim=8, num_layers=2)
PER_TOKEN = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, bytes
MAX_LEN = 64


def config(model_max_len: int = MAX_LEN, **args: Any) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(**{"block_size": 4, "max_num_seqs": 8, **args}), model_max_len, "cpu", None)


def size(available_bytes: int = 0, **args: Any) -> tuple[int, int]:
    return size_kv_cache(config(**args), MODEL, torch.float32, available_bytes)


def test_bytes_per_token() -> None:
    assert kv_bytes_per_token(MODEL, torch.float32) == PER_TOKEN == 256
    assert kv_bytes_per_token(MODEL, torch.bfloat16) == 128


def test_blocks_fill_the_memory() -> None:
    assert size(17 * 4 * PER_TOKEN) == (17, MAX_LEN)
    assert size(18 * 4 * PER_TOKEN - 1) == (17, MAX_LEN)
    assert size(1000 * 4 * PER_TOKEN) == (1000, MAX_LEN)


def test_the_smallest_pool_holds_one_request_and_the_null_block() -> None:
    assert size(num_gpu_blocks_override=17) == (17, MAX_LEN)
    with pytest.raises(VLLMValidationError) as error:
        size(num_gpu_blocks_override=16)
    assert error.value.parameter == "max_model_len" and error.value.value == 64
    for part in ("max seq len (64)", "16 blocks of 4 tokens are needed", "15 usable blocks", "model length is 60",
                 "max_model_len=60", "num_gpu_blocks_override"):
        assert part in str(error.value)
    # The advice is good.
    assert size(num_gpu_blocks_override=16, max_model_len=60) == (16, 60)


def test_lengths_that_are_no_multiple_of_the_block() -> None:
    assert size(num_gpu_blocks_override=17, max_model_len=61) == (17, 61)
    with pytest.raises(VLLMValidationError, match="16 blocks of 4"):
        size(num_gpu_blocks_override=16, max_model_len=61)


def test_the_override_wins_over_memory() -> None:
    assert size(10**9, num_gpu_blocks_override=20)[0] == 20


@pytest.mark.parametrize("max_model_len", [-1, "auto"])
def test_auto_takes_what_fits(max_model_len: int | str) -> None:
    assert size(11 * 4 * PER_TOKEN, max_model_len=max_model_len) == (11, 40)
    assert size(100 * 4 * PER_TOKEN, max_model_len=max_model_len) == (100, MAX_LEN)


@pytest.mark.parametrize("available", [-5, 0, 4 * PER_TOKEN, 2 * 4 * PER_TOKEN - 1])
@pytest.mark.parametrize("max_model_len", [None, -1])
def test_no_room_for_a_single_block(available: int, max_model_len: int | None) -> None:
    with pytest.raises(VLLMValidationError, match="No available memory for the cache blocks") as error:
        size(available, max_model_len=max_model_len)
    assert "needs 1,024 bytes" in str(error.value) and f"and {max(available, 0):,} bytes" in str(error.value)
    assert "gpu_memory_utilization" in str(error.value)


def test_the_log_says_how_many_requests_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        size(num_gpu_blocks_override=40)
    assert "CPU KV cache size: 160 tokens, Maximum concurrency for 64 tokens per request: 2.50x" in caplog.text


def test_available_bytes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def available(free: int, activation: int = 0, **args: Any) -> int:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        return available_kv_cache_bytes(config(**args), CPU, activation)

    assert available(1000, gpu_memory_utilization=0.5) == 500
    assert available(1000, 100, gpu_memory_utilization=0.5) == 400
    assert available(100 * GIB) == CPU_DEFAULT_CACHE_BYTES, "a laptop has other things to do"
    assert available(1000, 100, kv_cache_memory_bytes=12345) == 12345, "what the user says is taken as said"
    assert available(1000, kv_cache_memory_bytes=3 * GIB) == 3 * GIB


def test_available_bytes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    # 90 % of 1000, less the 300 that weights (or others) take already, less what a step needs.
    assert available_kv_cache_bytes(config(gpu_memory_utilization=0.9), torch.device("cuda"), 50) == 550
