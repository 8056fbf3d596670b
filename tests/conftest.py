"""The environment every test runs in. Set before anything imports torch, which reads it once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread sums in one order: floats agree on every machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks a hub for anything fails at once, not after a timeout
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c in one instruction, as every compiler for GPUs does
