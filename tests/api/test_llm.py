"""`LLM`: batches in, batches out, in order; and whatever goes wrong in between, the engine is as it was before."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

from tests.api.support import (
    ScriptedRunner,
    byte_ids,
    greedy,
    piece_ids,
    piece_tokenizer,
    scripted_engine,
    scripted_llm,
)
from tests.core.support import assert_clean
from tutorial_engine import LLM, RequestOutput, SamplingParams
from tutorial_engine.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind

LETTERS = piece_tokenizer()
ABC = piece_ids(LETTERS, "a", "b", "c")


def echo(request: Request) -> int:
    """Repeats the prompt."""
    return request.prompt_token_ids[request.num_output_tokens % request.num_prompt_tokens]


@pytest.fixture
def echo_llm() -> Iterator[LLM]:
    llm = scripted_llm(LETTERS, echo, max_num_seqs=2)
    yield llm
    assert_clean(llm.llm_engine)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [o.outputs[0].text for o in outputs]


# The tiny model, end to end


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny_hf: LlamaForCausalLM) -> None:
    prompts = ["hello", "the quick brown fox", "\U0001f600 described", ""]
    outputs = llm.generate(prompts, greedy(20, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        expected = tiny_hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                                    eos_token_id=None)
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.outputs[0].token_ids == expected[0, ids.shape[1]:].tolist()
        # Half a character at the end is never shown.
        text = llm.get_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert text.startswith(output.outputs[0].text) and text.rstrip("\ufffd").startswith(output.outputs[0].text)


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = [0, *byte_ids(b"ab")]
    forms = ["ab", ids, {"prompt": "ab"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "shown"}]
    outputs = llm.generate(forms, greedy(4), use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["ab", None, "ab", None, "shown"]
    assert [o.prompt_token_ids for o in outputs] == [ids] * 5
    for single in ("ab", ids, {"prompt": "ab"}):
        (output,) = llm.generate(single, greedy(4), use_tqdm=False)
        assert output.outputs[0] == outputs[0].outputs[0]
    assert len(llm.generate(("ab", "cd"), greedy(1), use_tqdm=False)) == 2
    assert llm.generate([], use_tqdm=False) == [] == llm.generate((), [], use_tqdm=False)


def test_output_of_a_request(llm: LLM) -> None:
    (output,) = llm.generate("hello", greedy(3, ignore_eos=True), use_tqdm=False)
    (completion,) = output.outputs
    assert output.finished and completion.finished() and completion.index == 0
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.cumulative_logprob is completion.logprobs is output.prompt_logprobs is output.metrics is None
    assert output.num_cached_tokens == 0 and len(completion.token_ids) == 3


def test_sixteen_tokens_unless_said(llm: LLM) -> None:
    (output,) = llm.generate([5], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16
    (output,) = llm.generate([5], SamplingParams(ignore_eos=True, max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 127  # up to the context limit


def test_seeds(llm: LLM) -> None:
    def run(seed: int | None, prompts: list[str]) -> list[list[int]]:
        params = SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    alone = run(7, ["ab"])
    assert run(7, ["ab"]) == alone and run(7, ["xyz", "ab", "q"])[1] == alone[0]
    assert run(8, ["ab"]) != alone and run(None, ["ab"]) != run(None, ["ab"])


def test_prefix_cache(llm: LLM) -> None:
    prompt = byte_ids(b"x" * 40)
    first, second = (llm.generate([prompt], greedy(4), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32) and first.outputs == second.outputs
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], greedy(4), use_tqdm=False)[0].num_cached_tokens == 0
    with pytest.raises(VLLMValidationError, match="no KV connector"):
        llm.reset_prefix_cache(reset_connector=True)


# Batches


def test_ids_count_on_from_call_to_call(echo_llm: LLM) -> None:
    prompts = ["abc", "d", "efghi"]
    for first in (0, 3):
        outputs = echo_llm.generate(prompts, [greedy(n) for n in (6, 1, 3)], use_tqdm=False)
        assert [o.request_id for o in outputs] == [str(first + i) for i in range(3)]
        assert [o.prompt for o in outputs] == prompts and texts(outputs) == ["abcabc", "d", "efg"]


@pytest.mark.parametrize("kwargs, name", [
    ({"sampling_params": [greedy(), greedy()]}, "params"), ({"sampling_params": []}, "params"),
    ({"lora_request": [None]}, "lora_request"), ({"priority": [0] * 4}, "priority")])
def test_one_for_each_prompt(echo_llm: LLM, kwargs: dict[str, Any], name: str) -> None:
    (given,) = kwargs.values()
    with pytest.raises(VLLMValidationError) as caught:
        echo_llm.generate(["a", "b", "c"], use_tqdm=False, **kwargs)
    assert str(caught.value) == f"The lengths of prompts (3) and {name} ({len(given)}) must be the same."
    assert caught.value.parameter == name


def test_params_of_the_caller_are_made_final_only(echo_llm: LLM) -> None:
    """As in vLLM: on the caller's own object, and on nothing else of it."""
    params = greedy(3, output_kind=RequestOutputKind.DELTA)
    (output,) = echo_llm.generate("abc", params, use_tqdm=False)
    assert output.outputs[0].text == "abc" and params == greedy(3, output_kind=RequestOutputKind.FINAL_ONLY)


def test_priority() -> None:
    order: list[str] = []

    def record(request: Request) -> int:
        order.append(request.request_id.split("-")[0])
        return echo(request)

    llm = scripted_llm(LETTERS, record, max_num_seqs=1, scheduling_policy="priority")
    outputs = llm.generate(["a", "b", "c"], greedy(1), priority=[2, 0, 1], use_tqdm=False)
    assert order == ["1", "2", "0"] and texts(outputs) == ["a", "b", "c"]
    assert texts(llm.generate(["a", "b"], greedy(1), priority=5, use_tqdm=False)) == ["a", "b"]


@pytest.mark.parametrize("kwargs, parameter", [
    ({"priority": [1, 2]}, "priority"), ({"lora_request": object()}, "lora_request"),
    ({"mm_processor_kwargs": {}}, "mm_processor_kwargs")])
def test_what_this_engine_does_not_do_is_said(echo_llm: LLM, kwargs: dict[str, Any], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        echo_llm.generate(["a", "b"], greedy(1), use_tqdm=False, **kwargs)
    assert caught.value.parameter == parameter
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        echo_llm.generate("a", temperature=0)
    with pytest.raises(TypeError):
        echo_llm.generate("a", greedy(1), False)  # only prompts and parameters go by position


def test_tokenization_kwargs(llm: LLM) -> None:
    (output,) = llm.generate("abc", greedy(1), use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == byte_ids(b"abc")


def test_two_halves(echo_llm: LLM) -> None:
    assert echo_llm.enqueue(["ab", "c"], greedy(2), use_tqdm=False) == ["0", "1"]
    assert echo_llm.enqueue("d", greedy(1), use_tqdm=False) == ["2"]
    assert echo_llm.llm_engine.get_num_unfinished_requests() == 3
    outputs = echo_llm.wait_for_completion(use_tqdm=False)
    assert texts(outputs) == ["ab", "cc", "d"] and [o.request_id for o in outputs] == ["0", "1", "2"]
    assert echo_llm.wait_for_completion(RequestOutput, use_tqdm=False) == []
    with pytest.raises(VLLMValidationError, match="output_type must be RequestOutput"):
        echo_llm.wait_for_completion(str, use_tqdm=False)


def test_a_batch_returns_its_own_prompts_only(echo_llm: LLM) -> None:
    """What was queued before is computed along, and waits to be asked for."""
    echo_llm.enqueue(["a", "b"], [greedy(1), greedy(9)], use_tqdm=False)
    assert texts(echo_llm.generate(["cd"], greedy(2), use_tqdm=False)) == ["cd"]
    with pytest.raises(VLLMValidationError):
        echo_llm.generate(["e", ""], use_tqdm=False)
    assert echo_llm.llm_engine.get_num_unfinished_requests() == 1  # "b" is still on its way
    assert texts(echo_llm.wait_for_completion(use_tqdm=False)) == ["a", "b" * 9]
    assert echo_llm.wait_for_completion(use_tqdm=False) == []


def test_requests_added_by_hand_go_along(echo_llm: LLM) -> None:
    """They are computed, and are not among the answers of generate()."""
    echo_llm.llm_engine.add_request("mine", "xyz", greedy(2))
    assert texts(echo_llm.generate("abc", greedy(9), use_tqdm=False)) == ["abcabcabc"]
    assert not echo_llm.llm_engine.has_unfinished_requests()


def test_a_request_that_is_aborted_meanwhile_is_missing(echo_llm: LLM) -> None:
    """The others arrive, and nobody waits for ever."""
    echo_llm.enqueue(["ab", "cd", "ef"], greedy(2), use_tqdm=False)
    echo_llm.llm_engine.abort_request(["1"])
    outputs = echo_llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == ["0", "2"]


# Progress


class Bar(tqdm):
    """A progress bar that keeps a diary."""

    diary: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).diary.append((kwargs["desc"], kwargs["disable"]))
        super().__init__(*args, **{**kwargs, "disable": True})

    def update(self, n: float | None = 1) -> None:
        type(self).diary.append(n)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        type(self).diary.append(s)


@pytest.fixture
def diary() -> list[Any]:
    Bar.diary = []
    return Bar.diary


def test_progress(echo_llm: LLM, diary: list[Any]) -> None:
    echo_llm.generate(["ab", "c"], greedy(2), use_tqdm=Bar)
    bars = [entry for entry in diary if isinstance(entry, tuple)]
    assert bars == [("Rendering prompts", False), ("Processed prompts", False)]
    assert [entry for entry in diary if isinstance(entry, int)] == [1, 1]
    speeds = [entry for entry in diary if isinstance(entry, str)]
    assert all(s.startswith("est. speed input: ") and ", output: " in s and s.endswith(" toks/s") for s in speeds)


def test_bars_are_drawn_or_not(echo_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    echo_llm.generate("ab", greedy(2))
    shown = capsys.readouterr().err
    assert "Rendering prompts" in shown and "Processed prompts: 100%" in shown and "1/1" in shown
    echo_llm.generate("ab", greedy(2), use_tqdm=False)
    assert not capsys.readouterr().err


# Errors on the way


def test_interrupt_while_prompts_are_added(echo_llm: LLM) -> None:
    class Interrupted(Bar):
        diary: list[Any] = []

        def __iter__(self) -> Iterator[Any]:
            yield from list(self.iterable)[:2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        echo_llm.generate(["a", "b", "c"], greedy(2), use_tqdm=Interrupted)
    assert_clean(echo_llm.llm_engine)
    assert texts(echo_llm.generate(["a", "b"], greedy(2), use_tqdm=False)) == ["aa", "bb"]


@pytest.mark.parametrize("error, raised", [
    (KeyboardInterrupt(), KeyboardInterrupt), (RuntimeError("out of memory"), EngineGenerateError)])
@pytest.mark.parametrize("step", [1, 3])
def test_error_inside_the_model(error: BaseException, raised: type[BaseException], step: int) -> None:
    def fail(plan: Any) -> None:
        runner: ScriptedRunner = llm.llm_engine.model_runner
        if len(runner.plans) == step:
            raise error

    llm = scripted_llm(LETTERS, echo, before=fail, max_num_seqs=2, num_gpu_blocks=33)
    free = llm.llm_engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    with pytest.raises(raised) as caught:
        llm.generate(["abcdefgh", "ijklmnop", "qrst"], greedy(6), use_tqdm=False)
    if raised is EngineGenerateError:
        assert "RuntimeError: out of memory" in str(caught.value) and caught.value.__cause__ is error
    assert_clean(llm.llm_engine)
    assert llm.llm_engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    outputs = llm.generate(["abcdefgh", "ijklmnop"], greedy(3), use_tqdm=False)
    assert texts(outputs) == ["abc", "ijk"]
    # What the failing step was to compute must not be taken for computed; what earlier steps did, may.
    assert [o.num_cached_tokens for o in outputs] == [0 if step == 1 else 4] * 2


def test_error_of_the_real_model_leaves_its_answers_right(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the blocks that the failing step had registered are forgotten."""
    prompts = [byte_ids(b"a long prompt of more than one block" + bytes([c])) for c in b"xyz"]
    expected = [o.outputs for o in llm.generate(prompts, greedy(6), use_tqdm=False)]
    for fails_at in (1, 2, 4):
        llm.reset_prefix_cache()
        calls, real = [], llm.llm_engine.model_runner.model.forward

        def forward(*args: Any, calls: list[int] = calls, real: Any = real, fails_at: int = fails_at) -> Any:
            calls.append(1)
            if len(calls) == fails_at:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine.model_runner.model, "forward", forward)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy(6), use_tqdm=False)
        assert_clean(llm.llm_engine)
        assert [o.outputs for o in llm.generate(prompts, greedy(6), use_tqdm=False)] == expected


def test_error_does_not_touch_requests_that_others_added(echo_llm: LLM) -> None:
    engine = echo_llm.llm_engine
    engine.add_request("mine", "xyz", greedy(3))
    with pytest.raises(VLLMValidationError):
        echo_llm.generate(["a", "b", ""], greedy(2), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 1
    done = []
    while engine.has_unfinished_requests():
        done += engine.step()
    assert done[-1].outputs[0].text == "xyz"


# The end


def test_close(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=9) as llm:
        config = llm.llm_engine.config
        assert repr(llm) == (f"LLM({tiny_model}, {config.dtype} on {config.device}, KV cache 0.00 GiB = 9 blocks of 16 "
                             "tokens, max_model_len=64)")
        llm.enqueue("never answered", use_tqdm=False)
    assert repr(llm) == "LLM(closed)" and not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.model_runner is None  # weights and cache went with it
    llm.close()
    for use in (lambda: llm.generate("a", use_tqdm=False), lambda: llm.llm_engine.step(),
                lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)):
        with pytest.raises(EngineDeadError, match=r"closed by close\(\); build a new one"):
            use()
    with LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=9) as again:
        assert len(again.generate("a", greedy(1), use_tqdm=False)) == 1


def test_closed_even_if_the_body_fails() -> None:
    with pytest.raises(ZeroDivisionError), scripted_llm(LETTERS, ABC) as llm:
        1 / 0  # noqa: B018
    assert repr(llm) == "LLM(closed)"


# Defaults of the model


def with_file(folder: Path, target: Path, content: dict[str, Any]) -> str:
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(content))
    return str(target)


SIZES = {"max_model_len": 64, "num_gpu_blocks_override": 9}


def test_generation_config(tiny_model: Path, tmp_path: Path) -> None:
    file = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.5}
    model = with_file(tiny_model, tmp_path / "model", file)
    with LLM(model, **SIZES) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens, defaults.repetition_penalty) == (0.0, 5, 1.5)
        from_file, explicit = (llm.generate("ab", p, use_tqdm=False)[0].outputs[0].token_ids
                               for p in (None, greedy(5, repetition_penalty=1.5)))
        assert from_file == explicit
        # Explicit parameters take nothing from the file.
        assert len(llm.generate("ab", SamplingParams(ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 16
        chatted = llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)[0].outputs[0].token_ids
        assert len(chatted) <= 5
    with LLM(model, generation_config="vllm", **SIZES) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    other = tmp_path / "folder"
    other.mkdir()
    (other / "generation_config.json").write_text('{"max_new_tokens": 2}')
    with LLM(model, generation_config=str(other), override_generation_config={"top_k": 3}, **SIZES) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens, defaults.top_k) == (1.0, 2, 3)
    with pytest.raises(VLLMValidationError, match=r"without a generation_config\.json"):
        LLM(model, generation_config=str(tmp_path), **SIZES)


@pytest.mark.parametrize("mode", ["auto", "vllm"])
def test_eos_ids_of_the_file_hold_for_explicit_parameters_too(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    with LLM(str(tiny_model), **SIZES) as llm:
        second = llm.generate("ab", greedy(3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids[1]
    model = with_file(tiny_model, tmp_path / "model", {"eos_token_id": [1, second]})
    with LLM(model, generation_config=mode, **SIZES) as llm:
        stopped, ignored, later = llm.generate(
            ["ab"] * 3, [greedy(5), greedy(5, ignore_eos=True), greedy(5, min_tokens=4)], use_tqdm=False)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", second)
    assert len(stopped.outputs[0].token_ids) == 2
    assert (ignored.outputs[0].finish_reason, len(ignored.outputs[0].token_ids)) == ("length", 5)
    assert second not in later.outputs[0].token_ids[:4] and len(later.outputs[0].token_ids) >= 4


def test_another_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    piece_tokenizer().save_pretrained(tmp_path / "letters")
    with LLM(str(tiny_model), tokenizer=str(tmp_path / "letters"), **SIZES) as llm:
        (output,) = llm.generate("ab", greedy(2), use_tqdm=False)
        assert output.prompt_token_ids == piece_ids(LETTERS, "a", "b")
        assert llm.get_tokenizer().eos_token_id == 0


# The engine underneath


def test_engine_step_by_step() -> None:
    engine = scripted_engine(LETTERS, echo)
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.add_request("mine", "ab", greedy(2)) == "mine"
    engine.add_request("other", "cd", greedy(5))
    with pytest.raises(TypeError, match="request_id must be a string, got int"):
        engine.add_request(5, "ab", greedy(2))
    assert [o.request_id for o in engine.step()] == ["mine", "other"]
    assert engine.get_num_unfinished_requests() == 2
    engine.abort_request(["other", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    (output,) = engine.step()
    assert output.finished and output.outputs[0].text == "ab"
    assert_clean(engine)
    assert isinstance(engine.get_tokenizer(), type(LETTERS))


def test_same_id_twice() -> None:
    engine = scripted_engine(LETTERS, echo)
    engine.add_request("same", "ab", greedy(2))
    engine.add_request("same", "cd", greedy(2))
    first = engine.step()
    assert [(o.request_id, o.outputs[0].text) for o in first] == [("same", "a"), ("same", "c")]
    engine.abort_request(["same"])
    assert_clean(engine)


def test_abort_ends_all_completions_of_a_prompt() -> None:
    engine = scripted_engine(LETTERS, echo, max_num_seqs=2)
    engine.add_request("r", "ab", SamplingParams(n=4, max_tokens=9))
    engine.step()
    engine.abort_request(["r"])
    assert_clean(engine)


def test_an_error_says_which_prompt_it_was(echo_llm: LLM) -> None:
    with pytest.raises(VLLMValidationError) as error:
        echo_llm.generate(["a", "b", ""], greedy(2), use_tqdm=False)
    assert error.value.__notes__ == ["It was prompt 2 of 3 (counted from 0); none of them was run."]
    with pytest.raises(VLLMValidationError) as error:
        echo_llm.generate("", greedy(2), use_tqdm=False)
    assert not hasattr(error.value, "__notes__")
    with pytest.raises(TypeError, match=r"goes to generate\(\)"):
        echo_llm.chat("hello")


def test_l48_the_bar_counts_completions(echo_llm: LLM, diary: list[Any]) -> None:
    totals: list[int] = []

    def make(*args: Any, **kwargs: Any) -> Bar:
        totals.append(kwargs.get("total", len(args[0] or ())))
        return Bar(*args, **kwargs)

    echo_llm.generate(["a", "b"], SamplingParams(n=3, max_tokens=2, seed=1), use_tqdm=make)
    assert totals == [2, 6] and [entry for entry in diary if isinstance(entry, int)] == [3, 3]


# Sharing


def test_threads_wait_for_each_other(llm: LLM) -> None:
    prompts = [[{"prompt_token_ids": [10 + i, 20 + j]} for j in range(3)] for i in range(3)]

    def answers(i: int) -> list[list[int]]:
        outputs = llm.generate(prompts[i], greedy(12, ignore_eos=True), use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]

    alone = [answers(i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answers, range(3))) == alone


def test_ids_that_are_in_use_are_left_alone() -> None:
    llm = scripted_llm(LETTERS, echo)
    engine = llm.llm_engine
    engine.add_request("0", "mine", greedy(4))
    assert llm.enqueue("queued", greedy(1), use_tqdm=False) == ["1"]
    with pytest.raises(VLLMValidationError, match="request_id '1' belongs to a request that LLM has queued"):
        engine.add_request("1", "again", greedy(4))
    assert llm.wait_for_completion(use_tqdm=False)[0].prompt == "queued"
    (output,) = llm.generate("yours", greedy(2), use_tqdm=False)
    assert (output.prompt, output.finished, output.outputs[0].text) == ("yours", True, "yo")
    with pytest.raises(VLLMValidationError):
        llm.generate(["good", ""], greedy(2), use_tqdm=False)
    assert engine.is_in_use("0"), "another's request is not ended with those of a bad call"
    assert engine.abort_request("0")[0].outputs[0].finish_reason == "abort", "a single id may come without a list"
    assert_clean(engine)


def test_what_was_queued_before_and_failed_is_still_answered() -> None:
    failing = [RuntimeError("out of memory")]

    def fail(plan: Any) -> None:
        if failing:
            raise failing.pop()

    llm = scripted_llm(LETTERS, echo, before=fail)
    llm.enqueue("before", greedy(3), use_tqdm=False)
    with pytest.raises(EngineGenerateError) as error:
        llm.generate("now", greedy(3), use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in error.value.outputs] == ["error", "error"]
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert (output.prompt, output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("before", "error", [])
    assert_clean(llm.llm_engine)


def test_after_close_nothing_is_awaited(echo_llm: LLM) -> None:
    echo_llm.close()
    for use in (echo_llm.wait_for_completion, echo_llm.reset_prefix_cache):
        with pytest.raises(EngineDeadError):
            use()


def test_a_bar_that_cannot_be_made_says_so_itself(echo_llm: LLM) -> None:
    with pytest.raises(TypeError, match="desc"):
        echo_llm.generate(["a", "b"], greedy(2), use_tqdm=lambda iterable: iterable)
