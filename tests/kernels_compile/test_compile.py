"""Kernels compile ahead of time, without a GPU, for the cards they are meant for; and they fit a T4.

The real host functions run on CPU tensors, so that types, alignment and block sizes are those of a real launch; only
the launch itself is left out. What is read off: the target, shared memory, and registers spilled to memory (slow: a
spill is a round trip to memory in the middle of arithmetic).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tutorial_engine.kernels.decode_attention import decode_attention
from tutorial_engine.kernels.gumbel_sample import gumbel_sample
from tutorial_engine.kernels.int4_matvec import int4_matvec
from tutorial_engine.kernels.int8_matvec import int8_matvec
from tutorial_engine.kernels.matvec import matvec, norm_matvec, silu_matvec
from tutorial_engine.kernels.prefill_attention import cut_tiles, prefill_attention
from tutorial_engine.kernels.rms_norm import add_rms_norm
from tutorial_engine.kernels.rope_kv_write import rope_kv_write
from tutorial_engine.kernels.silu_mul import silu_mul
from tutorial_engine.kernels.top_k_top_p_sample import top_k_top_p_sample

T4 = 75
T4_SHARED_MEMORY = 64 * 1024
DIMENSIONS = {"smollm2-135m": (9, 3, 64), "qwen3-0.6b": (16, 8, 128), "llama-8b": (32, 8, 128)}


class CompileOnlyDriver:
    """Stands in for a GPU of compute capability `arch` / 10."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # the key under which compiled kernels are kept: one of its own per target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[Any]]:
    """Inside, a launch compiles and stops there. Yields the list of compiled kernels."""
    compiled, run, active = [], JITFunction.run, driver._active

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = warm_up
    driver.set_active(CompileOnlyDriver(arch))
    try:
        yield compiled
    finally:
        JITFunction.run, driver._active = run, active


def spilled_bytes(kernel: Any, arch: int) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        target = f"sm_{arch}{'a' if arch >= 90 else ''}"
        report = subprocess.run([get_ptxas(arch).path, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull],
                                capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", report)[1])


def launch_on_bytes(name: str, model: str, dtype: torch.dtype, use_dot: bool, byte: torch.dtype) -> None:
    """Kernels that write and read a cache of one byte per number."""
    heads, kv_heads, dim = DIMENSIONS[model]
    cache, scale = torch.empty(8, kv_heads, 16, dim, dtype=byte), torch.empty(8, kv_heads, 16)
    query, tables = torch.empty(4, heads, dim, dtype=dtype), torch.zeros(4, 8, dtype=torch.int32)
    if name == "decode":
        decode_attention(query, cache, cache, tables, torch.ones(4).int(), 1, use_dot, scale, scale)
    elif name == "prefill":
        tiles = torch.from_numpy(cut_tiles(np.array([0, 4]), np.array([4]), heads // kv_heads))
        prefill_attention(query, cache, cache, tables, tiles, scale, scale)
    else:
        table, long = torch.empty(64, dim, dtype=dtype), torch.zeros(4, dtype=torch.int64)
        rope_kv_write(torch.empty(4, (heads + 2 * kv_heads) * dim, dtype=dtype), long, long, table, table, cache, cache,
                      heads, None, 0.0, scale, scale)


def launch(name: str, model: str, dtype: torch.dtype, use_dot: bool) -> None:
    heads, kv_heads, dim = DIMENSIONS[model]
    cache = torch.empty(8, kv_heads, 16, dim, dtype=dtype)
    tables, lens = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    long, x = torch.zeros(1, dtype=torch.int64), torch.empty(4, heads * dim, dtype=dtype)
    table = torch.empty(64, dim, dtype=dtype)
    norm = torch.empty(dim, dtype=dtype)
    calls: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode_attention(x.view(4, heads, dim), cache, cache, tables, lens, 1, use_dot),
        "decode split": lambda: decode_attention(x.view(4, heads, dim), cache, cache, tables, lens, 8, use_dot),
        "prefill": lambda: prefill_attention(x.view(4, heads, dim), cache, cache, tables, torch.from_numpy(
            cut_tiles(np.array([0, 4]), np.array([4]), heads // kv_heads))),
        "norm": lambda: (add_rms_norm(x, x, x[0], 1e-5), add_rms_norm(x, None, x[0], 1e-5)),
        "rope and write": lambda: [rope_kv_write(
            torch.empty(n, (heads + 2 * kv_heads) * dim, dtype=dtype), long.expand(n), long.expand(n), table, table,
            cache, cache, heads, norms, 1e-5) for norms in (None, (norm, norm)) for n in (4, 256, 2048)],
        "matvec": lambda: (matvec(x[:1], x.new_empty(960, x.shape[1])), silu_matvec(x.new_empty(1, 2048), x.new_empty(
            4096, 1024), x.new_empty(4096)), norm_matvec(x[:1], x[:1], x[0], 1e-5, x.new_empty(2048, x.shape[1]))),
        "silu": lambda: silu_mul(torch.empty(4, 2 * 1536, dtype=dtype)),
        "sample": lambda: gumbel_sample(torch.empty(4, 49152), torch.ones(4), long.expand(4)),
        "top_k, top_p": lambda: top_k_top_p_sample(torch.empty(4, 151936, dtype=dtype), torch.ones(4), torch.ones(4),
                                                   torch.ones(4, dtype=torch.int32), torch.ones(4), long.repeat(4)),
        "int8": lambda: [int8_matvec(torch.empty(n, 1024, dtype=dtype), torch.empty(256, 1024, dtype=torch.int8),
                                     torch.empty(256), use_dot) for n in (1, 4)],
        "int4": lambda: [int4_matvec(torch.empty(n, 1024, dtype=dtype), torch.empty(256, 512, dtype=torch.uint8),
                                     *torch.empty(2, 256, 32, dtype=torch.float16), use_dot) for n in (1, 4)],
    }
    calls[name]()


CASES = ["decode", "decode split", "norm", "rope and write", "matvec", "silu", "sample", "top_k, top_p", "int8", "int4"]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # never accept what an earlier run compiled


@pytest.mark.parametrize("name, model", [
    *((name, "qwen3-0.6b") for name in CASES), ("decode", "smollm2-135m"), ("decode", "llama-8b")])
def test_fits_a_t4(name: str, model: str) -> None:
    """float16, and no tensor cores: Triton has none to offer there."""
    with compile_only(T4) as compiled:
        launch(name, model, torch.float16, use_dot=False)
    assert compiled, "nothing was launched"
    for kernel in compiled:
        assert kernel.metadata.target.arch == T4 and ".target sm_75" in kernel.asm["ptx"]
        assert kernel.asm["cubin"][:4] == b"\x7fELF"
        assert kernel.metadata.shared <= T4_SHARED_MEMORY
        assert spilled_bytes(kernel, T4) == 0


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", [*CASES, "prefill"])
def test_compiles_for_newer_cards(name: str, arch: int) -> None:
    with compile_only(arch) as compiled:
        launch(name, "smollm2-135m", torch.bfloat16, use_dot=True)
    for kernel in compiled:
        assert kernel.metadata.target.arch == arch
        # Two registers of `_sample`: its smaller tile was measured to be a quarter faster all the same.
        assert spilled_bytes(kernel, arch) <= (8 if kernel.name == "_sample" else 0)
        if kernel.name in ("_decode", "_prefill", "_dot"):
            assert "mma" in kernel.asm["ptx"], "tensor cores"


@pytest.mark.parametrize("name, arch, byte", [
    ("decode", T4, torch.int8), ("rope and write", T4, torch.int8),
    *((name, arch, byte) for name in ("decode", "prefill", "rope and write")
      for arch, byte in ((80, torch.int8), (90, torch.int8), (90, torch.float8_e4m3fn)))])
def test_caches_of_one_byte(name: str, arch: int, byte: torch.dtype) -> None:
    """float8 needs compute capability 8.9; a T4's prompts do not go through a kernel."""
    with compile_only(arch) as compiled:
        launch_on_bytes(name, "smollm2-135m", torch.float16 if arch == T4 else torch.bfloat16, arch != T4, byte)
    assert compiled[0].metadata.target.arch == arch and compiled[0].metadata.shared <= T4_SHARED_MEMORY
    assert spilled_bytes(compiled[0], arch) == 0
    if arch != T4 and name != "rope and write":
        assert "mma" in compiled[0].asm["ptx"], "tensor cores"


@triton.jit
def _greedy_for_registers(x_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(x_ptr + tl.arange(0, SIZE), x * tl.sum(x, axis=0))


def test_the_check_can_fail() -> None:
    """A row of 8192 numbers in the registers of one warp: 256 each, and a thread has 255."""
    with compile_only(T4) as compiled:
        _greedy_for_registers[(1,)](torch.empty(8192, dtype=torch.float16), SIZE=8192, num_warps=1)
    assert spilled_bytes(compiled[0], T4) > 0
