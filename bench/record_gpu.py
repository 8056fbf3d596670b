"""Record the runs in tutorial_engine/recordings on a GPU, for laptops to replay.

    python bench/record_gpu.py --out tutorial_engine/recordings
    python bench/record_gpu.py --only llama-8b-batch --out /tmp

Each workload runs once to compile kernels and capture graphs, then once more, recorded. While somebody listens, an
engine plans a step only after the step before has ended; so a recorded step takes a little longer than one of
bench/gpu.py, which has two in flight.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from gpu import DEFAULT_MODEL, build_engine

from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.sampling_params import RequestOutputKind, SamplingParams
from tutorial_engine.trace import Trace

RNG = random.Random(0)


def add(engine: LLMEngine, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
    prompt = [RNG.randint(100, 10000) for _ in range(num_prompt_tokens)]
    engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY))


def run_out(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def stall(engine: LLMEngine) -> None:
    """Sixteen requests write; in step 30 somebody comes with a prompt of 4,000 tokens."""
    for i in range(16):
        add(engine, str(i), 128, 90)
    for _ in range(30):
        engine.step()
    add(engine, "long", 4000, 20)
    run_out(engine)


def batch(engine: LLMEngine) -> None:
    """1, 2, 4 ... 256 requests side by side: one step with their prompts of 64 tokens, then 8 that write."""
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for i in range(size):
            add(engine, f"{size}.{i}", 64, 9)
        run_out(engine)


def crowd(engine: LLMEngine) -> None:
    """Forty requests of all lengths come at once, twelve may run, and the pool is too small for their answers."""
    for i in range(40):
        add(engine, str(i), int(RNG.triangular(20, 400, 60)), int(RNG.triangular(8, 200, 40)))
    run_out(engine)


RUNS: dict[str, tuple[str, Callable[[LLMEngine], None], dict[str, int]]] = {
    "llama-8b-stall": ("llama-8b", stall, {"max_num_batched_tokens": 8192}),
    "llama-8b-chunks": ("llama-8b", stall, {"max_num_batched_tokens": 512}),
    "llama-8b-batch": ("llama-8b", batch, {"max_num_batched_tokens": 16384 + 256}),
    "smollm2-crowd": (DEFAULT_MODEL, crowd, {"max_model_len": 2048, "max_num_seqs": 12,
                                             "num_gpu_blocks_override": 129, "max_num_batched_tokens": 512}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("tutorial_engine/recordings"))
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "· torch", torch.__version__)
    for name in args.only:
        model, workload, options = RUNS[name]
        engine = build_engine(model, **options)
        for _ in range(2):
            RNG.seed(0)
            engine.reset_prefix_cache()
            with Trace(engine) as trace:
                workload(engine)
        trace.save(args.out / f"{name}.json.gz")
        print(name, trace, f"{trace.records[-1].time:.3f} s")
        engine.close()
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
