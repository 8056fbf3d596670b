"""Our engine on one GPU, against the physical limit measured in the same run: random weights, real dimensions.

    python bench/gpu.py                                   all models and workloads, JSON into bench/results/
    python bench/gpu.py --models qwen3-0.6b --workloads w256 batch1

Workloads (EOS ignored, max_model_len 4096, bfloat16, all requests submitted at once):
    w256           256 prompts of 100-1024 tokens, outputs of 100-1024 tokens, temperature 0.6   -> output tokens/s
    batch1         one prompt of 128 tokens, 512 greedy tokens                                    -> output tokens/s
    prefill        256 prompts of 1024 tokens, one token each                                     -> prompt tokens/s
    shared-prefix  256 prompts of 2048 shared and 128 own tokens, 64 greedy tokens each           -> output tokens/s

The limit: each step reads all weights, and K and V of every live token, at the bandwidth of a large copy; prompt tokens
cost two operations per weight at the rate of a big product. Only a shared prefix can be read faster: the card's own
cache serves several requests with one read. What is missing is launches, Python, and kernels that leave bandwidth
unused, which the breakdown of a step tells apart. Each figure is the best of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.kv_cache import kv_bytes_per_token
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.model_runner import ModelRunner
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.decoder import Decoder
from tutorial_engine.models.default_model import DEFAULT_MODEL
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams

MAX_MODEL_LEN = 4096
MODELS = {
    "smollm2-135m": ModelConfig(
        architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True),
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3", qk_norm=True, vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    "llama-8b": ModelConfig(
        architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),
}


class NoTokenizer:
    """The workloads are token ids."""

    eos_token_id = bos_token_id = chat_template = None


def build_engine(name: str, **kwargs: Any) -> LLMEngine:
    args = EngineArgs(**{"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, **kwargs})
    if name == DEFAULT_MODEL:
        return LLMEngine.from_engine_args(args)
    model = MODELS[name]
    config = EngineConfig.resolve(args, MAX_MODEL_LEN, "cuda", torch.cuda.get_device_capability())

    def load() -> Decoder:
        decoder = Decoder(model, MAX_MODEL_LEN, getattr(torch, config.dtype), torch.device("cuda"))
        shapes = [(name, view().shape) for name, (_, view) in decoder._places().items()]
        decoder.load_weights(
            (name, torch.randn(shape, device="cuda") * 0.02 if len(shape) > 1 else torch.ones(shape, device="cuda"))
            for name, shape in shapes)
        return decoder

    return LLMEngine(config, ModelRunner(config, load), NoTokenizer(), model.vocab_size, {})


def make_workload(name: str) -> tuple[list[list[int]], list[int], float]:
    """(prompts, output lengths, temperature), the same ones on every machine."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, 10000) for _ in range(count)]

    if name == "w256":
        prompts = [tokens(rng.randint(100, 1024)) for _ in range(256)]
        return prompts, [rng.randint(100, 1024) for _ in range(256)], 0.6
    if name == "batch1":
        return [tokens(128)], [512], 0.0
    if name == "prefill":
        return [tokens(1024) for _ in range(256)], [1] * 256, 0.0
    shared = tokens(2048)
    return [shared + tokens(128) for _ in range(256)], [64] * 256, 0.0


def run(engine: LLMEngine, prompts: list[list[int]], lengths: list[int], temperature: float) -> tuple[float, int]:
    """(seconds, steps)."""
    engine.reset_prefix_cache()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, SamplingParams(
            temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY))
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    torch.cuda.synchronize()
    return time.perf_counter() - began, steps


class Breakdown:
    """Mean milliseconds of the host's time that a step spends in each part, by wrapping the parts.

    schedule: who computes what. prepare: rows and arrays. launch: the rest of what it takes to start a step. sample:
    outside of a graph. wait: for the tokens of the step before; large if the GPU is what everything waits for.
    update, output: the books.
    """

    PARTS = {"schedule": ("scheduler", "schedule"), "launch": ("model_runner", "execute_model"),
             "prepare": ("model_runner", "_make_batch"), "sample": ("model_runner", "_sample"),
             "update": ("scheduler", "update_from_output"), "output": ("output_processor", "process")}

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        for part, (owner, method) in self.PARTS.items():
            target = getattr(engine, owner)
            setattr(target, method, self._timed(part, getattr(target, method)))
        engine._finish_step = self._timed("wait", engine._finish_step)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[part] += time.perf_counter() - began
        return timed

    def take(self, steps: int) -> dict[str, float]:
        s = self.seconds
        s["launch"] -= s["prepare"] + s["sample"]
        s["wait"] -= s["update"] + s["output"]
        means = {part: round(seconds / steps * 1e3, 3) for part, seconds in s.items()}
        s.clear()
        return means


def measure_limits() -> tuple[float, float]:
    """(copy bandwidth in bytes/s, bfloat16 matrix product in operations/s), each the best of several."""
    a = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copy = min(_seconds(lambda: b.copy_(a)) for _ in range(10))
    product = min(_seconds(lambda: x @ x) for _ in range(10))
    return 2 * a.numel() * a.itemsize / copy, 2 * 8192**3 / product


def _seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def limit_seconds(c: ModelConfig, prompts: list[list[int]], lengths: list[int], shared: int, bandwidth: float,
                  flops: float) -> float:
    """Least time for a workload. shared: leading tokens that all prompts have in common, computed once."""
    q_and_kv = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    per_layer = c.hidden_size * (q_and_kv + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    body = c.num_hidden_layers * per_layer
    weights = (body + c.vocab_size * c.hidden_size) * 2
    live_tokens = sum(n * len(p) + n * (n - 1) // 2 for p, n in zip(prompts, lengths, strict=True))
    memory = max(lengths) * weights + live_tokens * kv_bytes_per_token(c, torch.bfloat16)
    return memory / bandwidth + 2 * body * (sum(len(p) - shared for p in prompts) + shared) / flops


def measure(name: str, workloads: list[str], repeats: int, limits: tuple[float, float]) -> list[dict[str, Any]]:
    engine = build_engine(name)
    config = engine.model_runner.model.config
    breakdown, records = Breakdown(engine), []
    for workload in workloads:
        prompts, lengths, temperature = make_workload(workload)
        run(engine, prompts[:2], [min(n, 4) for n in lengths[:2]], temperature)
        breakdown.take(1)
        best, steps = min(run(engine, prompts, lengths, temperature) for _ in range(repeats))
        useful = sum(map(len, prompts)) if workload == "prefill" else sum(lengths)
        least = limit_seconds(config, prompts, lengths, 2048 if workload == "shared-prefix" else 0, *limits)
        records.append({
            "model": name, "workload": workload, "tok_s": round(useful / best), "fraction_of_limit": least / best,
            "steps": steps, "step_ms": breakdown.take(steps * repeats), "copy_tb_s": limits[0] / 1e12,
            "matmul_tflop_s": limits[1] / 1e12})
        r = records[-1]
        print(f"{name:>14} {workload:>14} {r['tok_s']:>9,} tok/s  {r['fraction_of_limit']:>4.0%} of the limit  "
              f"{best / steps * 1e3:.2f} ms a step: {r['step_ms']}", flush=True)
    engine.close()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS, DEFAULT_MODEL], choices=[*MODELS, DEFAULT_MODEL])
    parser.add_argument("--workloads", nargs="+", default=["w256", "batch1", "prefill", "shared-prefix"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    args = parser.parse_args()
    import triton

    limits = measure_limits()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
             "date": datetime.date.today().isoformat(), "commit": commit}
    records = [{**record, **about} for name in args.models
               for record in measure(name, args.workloads, args.repeats, limits)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(records, indent=1) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
