"""`LLM`: offline inference. A list of prompts in, a list of outputs in the same order out.

    llm = LLM()                                   loads the model, sizes the KV cache: once per process
    outputs = llm.generate(prompts, params)       everything at once; the scheduler decides who runs when
    outputs[i].outputs[0].text

Owns: batches of prompts, progress bars, conversations. Does not own: the loop (`llm_engine.py`).
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm.auto import tqdm

from tutorial_engine.beam_search import BeamSearchOutput, beam_search
from tutorial_engine.config import EngineArgs
from tutorial_engine.exceptions import EngineGenerateError, VLLMValidationError
from tutorial_engine.inputs import split_prompts
from tutorial_engine.kv_cache import GIB
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.metrics import Metric
from tutorial_engine.models.default_model import DEFAULT_MODEL
from tutorial_engine.outputs import RequestOutput
from tutorial_engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a second thread wait until the first is done: a step belongs to one caller."""
    @functools.wraps(method)
    def locked(self: LLM, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)
    return locked


class LLM:
    """A model, ready to generate. Threads that share one wait for each other; for askers who come and go at any time
    there is `AsyncLLM`.

    Args:
        model: "" or "smollm2-135m-instruct" for the course's own model (fetched once, then offline), a local folder, a
            .gguf file, or a Hugging Face id.
        **kwargs: the other fields of `EngineArgs`, by vLLM's names.

    Raises:
        TypeError: unknown argument. VLLMValidationError: a value out of range, or a cache too small for one request.
        ModelLoadError: the model cannot be found or loaded.

    >>> with LLM() as llm:
    ...     print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(self, model: str = "", **kwargs: Any) -> None:
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **kwargs))
        self._request_ids = itertools.count()
        self._lock = threading.RLock()
        self._enqueued: dict[str, RequestOutput | None] = {}
        self._num_completions: dict[str, int] = {}  # of each enqueued prompt, for the bar

    @_one_at_a_time
    def generate(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable[..., tqdm] = True, lora_request: Any = None,
                 priority: Sequence[int] | None = None, tokenization_kwargs: dict[str, Any] | None = None,
                 mm_processor_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Continue each prompt. No chat template is applied: see `chat`.

        Args:
            prompts: one prompt or a list of them: text, token ids, or a dict (see `inputs.py`).
            sampling_params: one for all, one for each, or None for the model's own defaults.
            use_tqdm: show progress; or a callable to make the bar with.
            priority: one number per prompt, lower goes first (scheduling_policy="priority").
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens, truncation_side.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts.

        Raises:
            TypeError, VLLMValidationError: a bad prompt or parameter. Nothing of this call is left in the engine.
        """
        added = self.enqueue(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority,
                             tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        return self._run(added, use_tqdm)

    @_one_at_a_time
    def chat(self, messages: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool | Callable[..., tqdm] = True, lora_request: Any = None,
             priority: Sequence[int] | None = None, chat_template: str | None = None,
             chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer conversations: render each with the model's chat template, then generate.

        Args:
            messages: one conversation (a list of {"role", "content"} dicts) or a list of conversations.
            chat_template: Jinja text or file to use instead of the model's.
            add_generation_prompt: end with the marker that makes the model answer.
            continue_final_message: let the model continue the last message instead.
            tools, chat_template_kwargs: handed to the template.

        Raises:
            ChatTemplateResolutionError: the model has no template. VLLMValidationError: bad messages or parameters.
        """
        added = self.enqueue_chat(
            messages, sampling_params, use_tqdm, lora_request, priority, chat_template, chat_template_content_format,
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        return self._run(added, use_tqdm)

    @_one_at_a_time
    def enqueue_chat(self, messages: Sequence[Any],
                     sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                     use_tqdm: bool | Callable[..., tqdm] = True, lora_request: Any = None,
                     priority: Sequence[int] | None = None, chat_template: str | None = None,
                     chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
                     continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
                     chat_template_kwargs: dict[str, Any] | None = None) -> list[str]:
        """First half of `chat`: render and queue the conversations, and return their request ids."""
        if chat_template_content_format not in ("auto", "string"):
            raise VLLMValidationError("chat_template_content_format must be 'auto' or 'string': this engine serves "
                                      "text only.", parameter="chat_template_content_format",
                                      value=chat_template_content_format)
        if not isinstance(messages, (list, tuple)):
            raise TypeError("messages should be a list of messages, or a list of such lists, "
                            f"got {type(messages).__name__}. A text without roles goes to generate(), or in here as "
                            "[{'role': 'user', 'content': 'the text'}].")
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        prompts = []
        for conversation in self._bar(use_tqdm, conversations, "Rendering conversations"):
            prompts.append(self.llm_engine.input_processor.render_chat(
                conversation, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, tools=tools, chat_template_kwargs=chat_template_kwargs))
        # The template writes the special tokens itself; adding them again would double the BOS.
        return self.enqueue(prompts, sampling_params, use_tqdm=False, lora_request=lora_request, priority=priority,
                            tokenization_kwargs={"add_special_tokens": False})

    @_one_at_a_time
    def beam_search(self, prompts: Any, params: BeamSearchParams, lora_request: Any = None,
                    use_tqdm: bool | Callable[..., tqdm] = False, concurrency_limit: int | None = None
                    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, as far as a beam search finds them (see `beam_search.py`).

        Slower than `generate` by about the beam width; the prefix cache spares it from computing the beams' common
        beginnings again, so leave enable_prefix_caching on. Logprobs are those of the engine's logprobs_mode.

        Args:
            prompts: as in `generate`. concurrency_limit: prompts searched at a time; None: all.

        Returns:
            One `BeamSearchOutput` per prompt, in order.

        Raises:
            TypeError, VLLMValidationError: a bad prompt, or 2 * beam_width > max_logprobs.
        """
        prompts = split_prompts(prompts)
        return beam_search(self, prompts, params, concurrency_limit=concurrency_limit,
                           lora_requests=self._one_each("lora_request", lora_request, len(prompts), lambda: None),
                           bar=lambda steps, desc: self._bar(use_tqdm, steps, desc, unit="token"))

    @_one_at_a_time
    def enqueue(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                use_tqdm: bool | Callable[..., tqdm] = True, lora_request: Any = None,
                priority: Sequence[int] | None = None, tokenization_kwargs: dict[str, Any] | None = None,
                mm_processor_kwargs: dict[str, Any] | None = None) -> list[str]:
        """First half of `generate`: queue the prompts and return their request ids, without computing anything."""
        if mm_processor_kwargs is not None:
            raise VLLMValidationError("mm_processor_kwargs: this engine serves text only; leave it None.",
                                      parameter="mm_processor_kwargs", value=mm_processor_kwargs)
        prompts = split_prompts(prompts)
        params = self._one_each("params", sampling_params, len(prompts), self.get_default_sampling_params)
        loras = self._one_each("lora_request", lora_request, len(prompts), lambda: None)
        priorities = self._one_each("priority", priority, len(prompts), lambda: 0)
        added: list[str] = []
        rendering = False
        try:
            for prompt, p, lora, prio in self._bar(
                    use_tqdm, list(zip(prompts, params, loras, priorities)), "Rendering prompts"):
                rendering = True
                if isinstance(p, SamplingParams):
                    p.output_kind = RequestOutputKind.FINAL_ONLY  # on the caller's object, as vLLM does
                request_id = next(i for i in map(str, self._request_ids) if not self.llm_engine.is_in_use(i))
                self.llm_engine.add_request(request_id, prompt, p, lora_request=lora, priority=prio,
                                            tokenization_kwargs=tokenization_kwargs)
                added.append(request_id)
        except BaseException as error:
            if rendering and len(prompts) > 1 and isinstance(error, (TypeError, VLLMValidationError)):
                error.add_note(f"It was prompt {len(added)} of {len(prompts)} (counted from 0); none of them was run.")
            self.llm_engine.abort_request(added)
            raise
        self._enqueued.update(dict.fromkeys(added))
        self.llm_engine.reserved_ids.update(added)
        for i, p in zip(added, params):
            self._num_completions[i] = p.n
        return added

    @_one_at_a_time
    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool | Callable[..., tqdm] = True
                            ) -> list[RequestOutput]:
        """Second half of `generate`: run until everything queued is finished, and return it in order of arrival."""
        if output_type not in (None, RequestOutput):
            raise VLLMValidationError("output_type must be RequestOutput: this engine only generates.",
                                      parameter="output_type", value=output_type)
        return self._run(list(self._enqueued), use_tqdm)

    def _run(self, request_ids: list[str], use_tqdm: bool | Callable[..., tqdm]) -> list[RequestOutput]:
        """Step until these requests are finished. One that somebody aborts through llm_engine has no output: who
        aborts is handed it."""
        engine, outputs = self.llm_engine, self._enqueued
        engine.check_alive()
        pending = {i for i in request_ids if outputs[i] is None}
        total = sum(self._num_completions[i] for i in pending)
        began, num_input, num_output = time.perf_counter(), 0, 0
        try:
            with self._bar(use_tqdm, None, "Processed prompts", total=total) as bar:
                while pending and engine.has_unfinished_requests():
                    if engine.is_sleeping():
                        raise EngineGenerateError("The engine sleeps, so it will never be done: call wake_up() first.",
                                                  pending)
                    for output in self._keep(engine.step()):
                        if output.request_id not in pending:
                            continue
                        pending.remove(output.request_id)
                        num_input += len(output.prompt_token_ids) * len(output.outputs)
                        num_output += sum(len(c.token_ids) for c in output.outputs)
                        seconds = time.perf_counter() - began
                        bar.set_postfix_str(f"est. speed input: {num_input / seconds:.2f} toks/s, "
                                            f"output: {num_output / seconds:.2f} toks/s", refresh=False)
                        bar.update(len(output.outputs))
            return [output for i in request_ids if (output := outputs[i]) is not None]
        except EngineGenerateError as error:
            self._keep(error.outputs)  # those of earlier calls that ended with this step are still to be asked for
            pending -= set(error.request_ids)
            raise
        finally:
            # After an error or an interrupt something is pending: leave the engine as it was before.
            engine.abort_request(pending)
            for request_id in request_ids:
                del outputs[request_id], self._num_completions[request_id]
                engine.reserved_ids.discard(request_id)

    def _keep(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Store what belongs to `enqueue`; the rest was added by hand through llm_engine."""
        for output in outputs:
            if output.request_id in self._enqueued:
                self._enqueued[output.request_id] = output
        return outputs

    @staticmethod
    def _bar(use_tqdm: bool | Callable[..., tqdm], iterable: Any, desc: str, **kwargs: Any) -> tqdm:
        make = use_tqdm if callable(use_tqdm) else tqdm
        return make(iterable, desc=desc, disable=not use_tqdm, dynamic_ncols=True, **kwargs)

    @staticmethod
    def _one_each(name: str, given: Any, count: int, default: Callable[[], Any]) -> list[Any]:
        """`given` for each prompt: None -> defaults, one object -> the same for all, a sequence -> one by one."""
        if given is None:
            return [default() for _ in range(count)]
        if not isinstance(given, Sequence):
            return [given] * count
        if len(given) != count:
            raise VLLMValidationError(f"The lengths of prompts ({count}) and {name} ({len(given)}) must be the same.",
                                      parameter=name)
        return list(given)

    def get_tokenizer(self) -> Any:
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's recommended sampling (generation_config.json), or neutral values with
        generation_config="vllm"."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    @_one_at_a_time
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False if requests hold some."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms under vLLM's names, see `metrics.py`.

        Raises:
            AssertionError: they are not kept, which is the default offline; build with disable_log_stats=False.
        """
        return self.llm_engine.get_metrics()

    @_one_at_a_time
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`, see `LLMEngine.sleep`."""
        self._keep(self.llm_engine.sleep(level, mode))

    @_one_at_a_time
    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo `sleep`; with tags ("weights", "kv_cache", "scheduling") by parts. True if fully awake."""
        return self.llm_engine.wake_up(tags)

    @_one_at_a_time
    def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back until `wake_up`."""
        self.llm_engine.release_kv_cache_memory()

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method, or a function with the worker as its first argument; one result per worker: one."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)`, in a list: one result per worker."""
        return self.llm_engine.apply_model(func)

    @_one_at_a_time
    def close(self) -> None:
        """Give the memory back; afterwards this object is of no use."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self.llm_engine
        if engine.model_runner is None:
            return "LLM(closed)"
        config, cache = engine.config, engine.model_runner.kv_cache
        size = "released" if cache is None else (
            f"{cache.num_bytes / GIB:.2f} GiB = {cache.num_blocks} blocks of {config.block_size} tokens")
        return (f"LLM({config.args.model or DEFAULT_MODEL}, {config.dtype} on {config.device}, KV cache {size}, "
                f"max_model_len={config.max_model_len})")
