"""Runs recorded on a GPU that you may not have: `load("llama-8b-stall")` gives the trace, and all pictures draw it.

A recording holds who computed what in which step, all block tables, and when each step began and ended. It holds no
text, and where weights were random (`RECORDINGS` says so) no tokens that mean anything: the time of a step does not
depend on them. `bench/record_gpu.py` made these files, on one H200 in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

from tutorial_engine.trace import Trace

RECORDINGS = {
    "llama-8b-stall": "Llama-3.1-8B's shape, random weights. Sixteen requests write, a prompt of 4,000 tokens arrives "
                      "in step 30, and a step may compute 8,192 tokens: all of the prompt at once.",
    "llama-8b-chunks": "The same, but a step may compute 512 tokens: the prompt comes in chunks.",
    "llama-8b-batch": "Llama-3.1-8B's shape, random weights. 1, 2, 4 ... 256 requests side by side, prompts of 64 "
                      "tokens: one step for these, then eight in which each request writes one token.",
    "smollm2-crowd": "SmolLM2-135M. Forty requests of 20 to 400 tokens come at once, twelve may run, the pool has room "
                     "for 2,048 tokens: some wait, some are preempted.",
}


def load(name: str) -> Trace:
    """The trace of a recorded run.

    Args:
        name: a key of `RECORDINGS`, which describes each.

    Raises:
        ValueError: there is no recording of this name.
    """
    if name not in RECORDINGS:
        raise ValueError(f"There is no recording {name!r}. There are: {', '.join(RECORDINGS)}.")
    return Trace.load(Path(__file__).parent / f"{name}.json.gz")
