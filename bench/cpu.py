"""Our engine against `transformers.generate` on a CPU: same weights, same requests, same process, turn by turn.

    python bench/cpu.py                     1, 8 and 32 requests, best of 5, JSON into bench/results/
    python bench/cpu.py --requests 8 --repeats 2

Workload: prompts of 20-200 and outputs of 16-96 random tokens, greedy, EOS ignored, float32, all submitted at once.
Only tokens that a request asked for count ("useful"): `generate` pads all prompts to the longest one and decodes
until the last request is done, and what it computes beyond that is its loss.

The limits are measured in the same run. Memory: each step reads all weights, and K and V of every live token, at the
bandwidth of a large copy. Arithmetic: each prompt token costs two operations per weight at the rate of a big product.
Machines are noisy: compare ratios, not absolute numbers, and let nothing else run. OMP_WAIT_POLICY=passive, which is
good manners while others work, costs both sides a fifth here: leave it unset.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.auto import tqdm

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.kv_cache import kv_bytes_per_token
from tutorial_engine.models.loader import ModelSource, resolve_model


def make_workload(num_requests: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths), the same ones on every machine."""
    rng = random.Random(num_requests)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(20, 200))] for _ in range(num_requests)]
    return prompts, [rng.randint(16, 96) for _ in range(num_requests)]


def build_transformers_model(source: ModelSource) -> torch.nn.Module:
    """transformers' Llama with exactly our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = source.config
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=c.bos_token_id, eos_token_id=c.eos_token_id))
    missing, unexpected = model.load_state_dict(dict(source.weights()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def run_transformers(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """One padded call, as a user would write it. Left padding, since the next token goes to the right."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(input_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=max(lengths),
                             eos_token_id=None, pad_token_id=0)
    return [row[longest:longest + n] for row, n in zip(out.tolist(), lengths, strict=True)]


def run_engine(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    out = run()
    return time.perf_counter() - began, out


def measure_limits() -> tuple[float, float]:
    """(copy bandwidth in bytes/s, float32 matrix product in operations/s), each the best of several."""
    a = torch.ones(32 << 20)
    b = torch.empty_like(a)
    x, w = torch.ones(1024, 1024), torch.ones(1024, 1024)
    copy = min(_seconds(lambda: b.copy_(a)) for _ in range(7))
    product = min(_seconds(lambda: x @ w) for _ in range(7))
    return 2 * a.numel() * a.itemsize / copy, 2 * 1024**3 / product


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def limit_seconds(source: ModelSource, prompts: list[list[int]], lengths: list[int], bandwidth: float, flops: float
                  ) -> float:
    """Least time for a workload: decode at the memory limit, plus prompts at the arithmetic limit."""
    c = source.config
    q_and_kv = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    per_layer = c.hidden_size * (q_and_kv + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    body = c.num_hidden_layers * per_layer
    weights = (body + c.vocab_size * c.hidden_size) * 4
    live_tokens = sum(len(p) + t for p, n in zip(prompts, lengths, strict=True) for t in range(n))
    memory = max(lengths) * weights + live_tokens * kv_bytes_per_token(c, torch.float32)
    return memory / bandwidth + 2 * body * sum(map(len, prompts)) / flops


def compare(source: ModelSource, llm: LLM, model: torch.nn.Module, num_requests: int, repeats: int) -> dict:
    """Run both `repeats` times, turn by turn, so that a noisy minute hits both."""
    prompts, lengths = make_workload(num_requests, source.config.vocab_size)
    run_engine(llm, prompts[:1], [2])
    run_transformers(model, prompts[:1], [2])
    ours, theirs = [], []
    for _ in tqdm(range(repeats), desc=f"{num_requests} requests"):
        llm.reset_prefix_cache()  # every repeat computes its prompts
        seconds, engine_ids = timed(lambda: run_engine(llm, prompts, lengths))
        ours.append(seconds)
        seconds, transformers_ids = timed(lambda: run_transformers(model, prompts, lengths))
        theirs.append(seconds)
    bandwidth, flops = measure_limits()
    useful = sum(lengths)
    return {
        "requests": num_requests, "prompt_tokens": sum(map(len, prompts)), "output_tokens": useful,
        "tok_s": useful / min(ours), "transformers_tok_s": useful / min(theirs), "ratio": min(theirs) / min(ours),
        "fraction_of_limit": limit_seconds(source, prompts, lengths, bandwidth, flops) / min(ours),
        "copy_gb_s": bandwidth / 1e9, "matmul_gflop_s": flops / 1e9,
        "same_tokens": sum(a == b for a, b in zip(engine_ids, transformers_ids, strict=True)),
        "seconds": ours, "transformers_seconds": theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import transformers

    source = resolve_model("")
    llm, model = LLM(), build_transformers_model(source)
    rows = [compare(source, llm, model, n, args.repeats) for n in args.requests]
    print(f"{'requests':>8} {'engine tok/s':>13} {'transformers':>13} {'ratio':>6} {'of limit':>9} {'same ids':>9}")
    for r in rows:
        print(f"{r['requests']:>8} {r['tok_s']:>13.1f} {r['transformers_tok_s']:>13.1f} {r['ratio']:>6.2f} "
              f"{r['fraction_of_limit']:>9.0%} {r['same_tokens']:>6}/{r['requests']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": platform.machine(),
              "threads": args.threads, "torch": torch.__version__, "transformers": transformers.__version__,
              "model": "smollm2-135m", "dtype": "float32", "rows": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
