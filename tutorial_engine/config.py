"""`EngineArgs` and `EngineConfig`: every argument of `LLM(...)`, checked before anything is loaded.

Owns: names, defaults and ranges of the arguments (vLLM's), and the choice of device, dtype and limits that follow from
them. Does not own: the shape of the model (`models/config.py`) or the number of blocks (`kv_cache.py`).

    LLM(**kwargs) -> EngineArgs(**kwargs)      what the user said, None where they said nothing
                  -> EngineConfig              what it means for this model on this device; frozen
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.kv_events import KVEventsConfig
from tutorial_engine.logits_processor import resolve_processors
from tutorial_engine.models.default_model import DEFAULT_MODEL

DEFAULT_BLOCK_SIZE = 16
DTYPES = ("float32", "float16", "bfloat16")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
# What is read from generation_config.json, besides its EOS ids: the file's names -> those of SamplingParams.
GENERATION_KEYS = {"repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
                   "frequency_penalty": "frequency_penalty", "temperature": "temperature", "top_k": "top_k",
                   "top_p": "top_p", "min_p": "min_p", "max_new_tokens": "max_tokens"}

# vLLM's arguments for things that this engine does not have. Each may be passed with its neutral value, so that a
# notebook can be moved over unchanged; any other value raises instead of being ignored.
_NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False, True),  # a permission, and one that is never needed: no code comes from a model
    "quantization": (None,),
    "prefix_caching_hash_algo": ("sha256",),
    "kv_cache_dtype": ("auto",),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "speculative_config": (None,),
    "enable_lora": (False, None),
    "hf_overrides": (None, {}),
    "cpu_offload_gb": (0,),
}


@dataclass
class EngineArgs:
    """Arguments of `LLM(...)`, under vLLM's names.

    Attributes (None means "derive it"):
        model: "" or "smollm2-135m-instruct" for the course's own model, a folder, a .gguf file or a hub id.
        tokenizer: folder or hub id to take the tokenizer from; None: the model's own.
        revision: the model's version, for a hub id. tokenizer_revision: the tokenizer's.
        dtype: "auto", or one of float32, float16, bfloat16. auto: float32 on a CPU, where greedy ids then do not
            depend on the batch; on a GPU bfloat16 from compute capability 8.0, else float16.
        seed: seeds the engine's own generator, which draws the seeds of unseeded requests; None: another one each time.
        max_model_len: longest prompt + output in tokens; None: what the model allows; -1 or "auto": what fits.
        block_size: tokens per KV-cache block.
        num_gpu_blocks_override: number of blocks, the null block included (a small pool to watch preemption).
        kv_cache_memory_bytes: size of the KV cache; overrides gpu_memory_utilization.
        gpu_memory_utilization: fraction of device memory for weights, activations and KV cache. On a CPU: of the
            memory that is free, and the cache never takes more than 2 GiB unless kv_cache_memory_bytes says so.
        enable_prefix_caching: reuse blocks of equal prefixes.
        enable_chunked_prefill: let a prompt be computed over several steps.
        max_num_batched_tokens: token budget of one step. max_num_seqs: most requests running at once.
        long_prefill_token_threshold: most prompt tokens of one request per step; 0: no cap.
        scheduling_policy: "fcfs" or "priority" (lower value first).
        scheduler_reserve_full_isl: admit a request only if its whole sequence fits into the free blocks.
        watermark: fraction of the blocks kept free when admitting while others run.
        generation_config: "auto" reads sampling defaults from the model, "vllm" ignores them, else a folder.
        override_generation_config: entries that replace those of the file, see `GENERATION_KEYS`.
        max_logprobs: most alternatives a request may ask for; -1: no cap. logprobs_mode: before ("raw") or after
            ("processed") penalties, temperature and truncation.
        disable_log_stats: keep no per-request timestamps (`RequestOutput.metrics` is None).
        enforce_eager: no CUDA graphs; a CPU always runs eagerly.
        async_scheduling: plan and start a step while the device still computes the one before. None: on a GPU, unless
            enforce_eager.
        chat_template: Jinja text or path of a file that replaces the model's own template.
        skip_tokenizer_init: work with token ids only; texts stay empty.
        enable_sleep_mode: nothing to prepare here: `sleep` gives memory back either way.
        kv_events_config: note what enters and leaves the prefix cache, see `KVEventsConfig`.
        structured_outputs_config: {"backend": "auto" or "guidance", "disable_any_whitespace": bool,
            "disable_additional_properties": bool}; the last two hold for every request with JSON, False unless said.
        logits_processors: classes, or texts "package.module:Class", that change the logits of every step, in this
            order (see `logits_processor.py`).
        served_model_name: what a server's clients and the metrics call the model, one name or several; None: `model`.
    """

    model: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"
    seed: int | None = 0
    max_model_len: int | str | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    disable_log_stats: bool = True
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False
    enable_sleep_mode: bool = False
    kv_events_config: Any = None  # a KVEventsConfig from here on
    structured_outputs_config: dict[str, Any] | None = None
    logits_processors: list | None = None
    served_model_name: str | list[str] | None = None
    # Accepted with their neutral value only, see _NEUTRAL_ONLY.
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    quantization: str | None = None
    prefix_caching_hash_algo: str = "sha256"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    speculative_config: dict | None = None
    enable_lora: bool | None = False
    hf_overrides: dict | None = None
    cpu_offload_gb: float = 0

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL_ONLY.items():
            if getattr(self, name) not in neutral:
                _fail(name, getattr(self, name), f"is not in this engine; leave it at {neutral[0]!r}")
        for name in ("model", "tokenizer", "revision", "tokenizer_revision", "generation_config", "chat_template"):
            self._check_type(name, str, "text")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "scheduler_reserve_full_isl",
                     "disable_log_stats", "enforce_eager", "async_scheduling", "skip_tokenizer_init",
                     "enable_sleep_mode"):
            self._check_type(name, bool, "True or False")
        self.kv_events_config = KVEventsConfig.from_argument(self.kv_events_config)
        self.dtype = str(self.dtype).removeprefix("torch.")
        _check_choice("dtype", self.dtype, ("auto", *DTYPES, "float", "half"))
        self.dtype = {"float": "float32", "half": "float16"}.get(self.dtype, self.dtype)
        _check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        for name, low in (("block_size", 1), ("num_gpu_blocks_override", 2), ("kv_cache_memory_bytes", 1),
                          ("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("long_prefill_token_threshold", 0),
                          ("max_logprobs", -1)):
            self._check_int(name, low)
        if self.seed is not None:
            self._check_int("seed", -(2**63))
        if self.max_model_len == "auto":
            self.max_model_len = -1
        if self.max_model_len != -1:
            self._check_int("max_model_len", 1)
        if self.logits_processors is not None:
            self.logits_processors = resolve_processors(self.logits_processors)
        _check_fraction("gpu_memory_utilization", self.gpu_memory_utilization, zero=False)
        _check_fraction("watermark", self.watermark, zero=True)
        _check_structured_outputs_config(self.structured_outputs_config)
        if not isinstance(self.override_generation_config, dict):
            _fail("override_generation_config", self.override_generation_config, "must be a dict")
        if unknown := sorted(self.override_generation_config.keys() - GENERATION_KEYS.keys()):
            _fail("override_generation_config", unknown, f"can replace {', '.join(GENERATION_KEYS)} only")

        if not all(isinstance(name, str) and name for name in self.served_model_names):
            _fail("served_model_name", self.served_model_name, "must be a name or a list of names")

    @property
    def served_model_names(self) -> list[str]:
        """At least one."""
        names = self.served_model_name or self.model or DEFAULT_MODEL
        return [names] if isinstance(names, str) else list(names)

    def _check_type(self, name: str, kind: type, wanted: str) -> None:
        """None is fine where it is the default."""
        value = getattr(self, name)
        if not isinstance(value, kind) and value is not getattr(type(self), name):
            _fail(name, value, f"must be {wanted}")

    def _check_int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is None and getattr(type(self), name) is None:
            return
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            _fail(name, value, "must be an integer")
        if value < low:
            _fail(name, value, f"must be at least {low}")
        setattr(self, name, int(value))


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM` and the server: those of `EngineArgs`, and one more.

    Attributes:
        enable_log_requests: write each request's arrival and parameters to the log.
        disable_log_stats: None: keep statistics if the package prometheus_client is there to keep them in.
    """

    enable_log_requests: bool = False
    disable_log_stats: bool | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.disable_log_stats is None:
            # A server's numbers are read all the time; offline they are off by default.
            self.disable_log_stats = find_spec("prometheus_client") is None
        super().__post_init__()
        self._check_type("enable_log_requests", bool, "True or False")


@dataclass(frozen=True)
class EngineConfig:
    """What the engine runs with: every None of `EngineArgs` resolved. Sizes are in tokens, blocks or bytes by name."""

    args: EngineArgs
    device: str
    dtype: str
    max_model_len: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_scheduling: bool

    @classmethod
    def resolve(cls, args: EngineArgs, model_max_len: int, device: str, capability: tuple[int, int] | None
                ) -> EngineConfig:
        """Fill in what the user left open.

        Args:
            model_max_len: longest sequence that the model and its tokenizer allow.
            device: "cpu" or "cuda". capability: CUDA compute capability, None on a CPU.

        Raises:
            VLLMValidationError: two arguments contradict each other, or the model, or the device.
        """
        dtype = args.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16" if capability >= (8, 0) else "float16"
        if dtype == "bfloat16" and capability is not None and capability < (8, 0):
            _fail("dtype", "bfloat16", f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}; "
                  "use float16")
        max_model_len = _resolve_max_model_len(args.max_model_len, model_max_len)
        # vLLM's defaults for offline use: 4096 on a CPU, 8192 on a GPU.
        budget = args.max_num_batched_tokens
        max_num_seqs = args.max_num_seqs
        if max_num_seqs is None:
            max_num_seqs = min(256, budget or 256)
        chunked = args.enable_chunked_prefill is not False
        if budget is None:
            budget = max(4096 if device == "cpu" else 8192, max_num_seqs)
            if not chunked:
                budget = max(budget, max_model_len)
        if budget < max_num_seqs:
            _fail("max_num_batched_tokens", budget, f"must be at least max_num_seqs={max_num_seqs}: a step must be "
                  "able to give each running request one token")
        if not chunked and budget < max_model_len:
            _fail("max_num_batched_tokens", budget, f"must be at least max_model_len={max_model_len} when "
                  "enable_chunked_prefill=False, since a prompt may not be split over steps")
        ahead = args.async_scheduling
        if ahead is None:
            ahead = device == "cuda" and not args.enforce_eager
        if args.long_prefill_token_threshold > max_model_len:
            _fail("long_prefill_token_threshold", args.long_prefill_token_threshold,
                  f"must not be larger than max_model_len={max_model_len}")
        return cls(args=args, device=device, dtype=dtype, max_model_len=max_model_len,
                   block_size=args.block_size or DEFAULT_BLOCK_SIZE, max_num_batched_tokens=budget,
                   max_num_seqs=max_num_seqs, enable_prefix_caching=args.enable_prefix_caching is not False,
                   enable_chunked_prefill=chunked,
                   async_scheduling=ahead)

    def with_max_model_len(self, max_model_len: int) -> EngineConfig:
        return dataclasses.replace(self, max_model_len=max_model_len)


def _resolve_max_model_len(asked: int | str | None, model_max_len: int) -> int:
    if not isinstance(asked, int) or asked == -1:
        return model_max_len
    if asked > model_max_len and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        _fail("max_model_len", asked, f"is longer than the {model_max_len} tokens that the model was made for; ask for "
              "less, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if you know that it can")
    return asked


def _fail(name: str, value: Any, rule: str) -> None:
    raise VLLMValidationError(f"{name} {rule} (got {value!r}).", parameter=name, value=value)


def _check_structured_outputs_config(config: Any) -> None:
    name = "structured_outputs_config"
    if not isinstance(config, (dict, type(None))):
        _fail(name, config, "must be a dict")
    for key, value in (config or {}).items():
        if key == "backend":
            if value not in ("auto", "guidance"):
                _fail(name, value, "has a backend that is not in this engine; 'auto' and 'guidance' both mean the "
                      "library llguidance")
        elif key not in ("disable_any_whitespace", "disable_additional_properties"):
            _fail(name, key, "can hold backend, disable_any_whitespace and disable_additional_properties only")
        elif not isinstance(value, bool):
            _fail(name, value, f"must have True or False as {key}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _fail(name, value, f"must be one of {', '.join(choices)}")


def _check_fraction(name: str, value: Any, zero: bool) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        _fail(name, value, "must be a number")
    if not (0 <= value <= 1) or (value == 0 and not zero):
        _fail(name, value, f"must be between 0 {'and' if zero else '(excluded) and'} 1")
