"""What users of other engines ran into, as small inputs with the right answer.

Each test names the public report that it comes from. B16, B23 and more of B13 are about preemption (`tests/core`); B10
and B11 are here without their server.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.support import (
    byte_ids,
    byte_tokenizer,
    greedy,
    piece_ids,
    piece_tokenizer,
    run_steps,
    save_tiny_model,
    scripted_engine,
    scripted_llm,
    stream,
)
from tests.core.support import assert_clean
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.trace import Trace

LETTERS = piece_tokenizer()


def ids_of(llm: LLM, prompt: Any, params: SamplingParams) -> list[int]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_b01_no_part_of_a_stop_string_is_streamed() -> None:
    """vllm-project/vllm #3574."""
    pieces = ["AB", "C DEF", "G", "HI", "J tail"]
    tokenizer = piece_tokenizer(*pieces)
    ids = piece_ids(tokenizer, *pieces)
    deltas, last = stream(tokenizer, ids, stop=["DEFGHIJ"])
    assert deltas == ["", "A", "B", "C ", ""]
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "DEFGHIJ")
    (whole,) = scripted_llm(tokenizer, ids).generate("p", greedy(stop=["DEFGHIJ"]), use_tqdm=False)
    assert whole.outputs[0].text == "ABC " and whole.outputs[0].token_ids == ids


def test_b02_stop_string_over_two_pieces() -> None:
    """mzau/mlx-knife #68."""
    tokenizer = piece_tokenizer("alpha beta", " gamma delta")
    llm = scripted_llm(tokenizer, piece_ids(tokenizer, "alpha beta", " gamma delta"))
    (output,) = llm.generate("p", greedy(10, stop=["beta gamma"]), use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("alpha ", "stop", 2)


def test_b03_characters_over_several_tokens() -> None:
    """waybarrios/vllm-mlx PR #109."""
    pieces = [b"\xc4", b"\x8f", b"\xf0\x9f", b"\x98\x80"]
    tokenizer = byte_tokenizer(*pieces)
    ids = piece_ids(tokenizer, *pieces)
    deltas, _ = stream(tokenizer, ids, max_tokens=4)
    assert deltas == ["", "\u010f", "", "\U0001f600"] and "".join(deltas) == tokenizer.decode(ids)


def test_b04_stop_string_within_min_tokens() -> None:
    """vllm-project/vllm #21987."""
    pieces = ["STOP", " a", " b", " STOP", " c"]
    tokenizer = piece_tokenizer(*pieces)
    llm = scripted_llm(tokenizer, piece_ids(tokenizer, *pieces))
    (output,) = llm.generate("p", greedy(10, stop=["STOP"], min_tokens=3), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text == "STOP a b " and len(completion.token_ids) == 4 and completion.finish_reason == "stop"


def test_b05_ignore_eos_ignores_the_further_ids_too() -> None:
    """vllm-project/vllm #4589."""
    tokenizer = piece_tokenizer()
    tokenizer.eos_token = " "  # id 2
    script = [7, 5, 7, 2, 7, 7]

    def run(**params: Any) -> tuple[list[int], str | None, int | str | None]:
        llm = scripted_llm(tokenizer, script, generation_config={"eos_token_id": [2, 5]})
        (completion,) = llm.generate("p", greedy(6, **params), use_tqdm=False)[0].outputs
        return completion.token_ids, completion.finish_reason, completion.stop_reason

    assert run(ignore_eos=True) == (script, "length", None)
    assert run(ignore_eos=True, stop_token_ids=[5]) == ([7, 5], "stop", 5)
    assert run() == ([7, 5], "stop", 5)
    assert run(min_tokens=3)[0][:3] == [7, 0, 7]  # masked: the most likely of the others is said


def test_b05_with_a_model_folder(tiny_model: Path, tmp_path: Path) -> None:
    with LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=9) as llm:
        first = ids_of(llm, "a", greedy(6, ignore_eos=True))
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, first[2]]}))
    with LLM(str(tmp_path / "model"), max_model_len=64, num_gpu_blocks_override=9) as llm:
        assert ids_of(llm, "a", greedy(6, ignore_eos=True)) == first
        assert ids_of(llm, "a", greedy(6)) == first[:first.index(first[2]) + 1]


def test_b06_each_completion_has_its_seed(llm: LLM) -> None:
    """vllm-project/vllm #10852."""
    params = SamplingParams(n=4, seed=7, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate("a prompt", params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [c.index for c in first] == [0, 1, 2, 3] and first == second
    assert len({tuple(c.token_ids) for c in first}) == 4
    alone = [ids_of(llm, "a prompt", SamplingParams(seed=7 + i, max_tokens=16, ignore_eos=True)) for i in range(4)]
    assert [c.token_ids for c in first] == alone
    params.output_kind = RequestOutputKind.DELTA
    streamed: dict[int, list[int]] = {i: [] for i in range(4)}
    for output in run_steps(llm.llm_engine, "a prompt", params):
        for completion in output.outputs:
            streamed[completion.index] += completion.token_ids
    assert list(streamed.values()) == alone


def test_b06_without_a_seed(tiny_model: Path) -> None:
    """As above, but nobody gave a seed: the completions differ, the next call's too, and the engine's own seed makes
    a second engine say it all again."""
    params, said = SamplingParams(n=3, max_tokens=12, ignore_eos=True), []
    for _ in range(2):
        with LLM(str(tiny_model), max_model_len=64, num_gpu_blocks_override=33) as llm:
            said.append([[c.token_ids for c in llm.generate("a prompt", params, use_tqdm=False)[0].outputs]
                         for _ in range(2)])
    assert len({tuple(ids) for call in said[0] for ids in call}) == 6 and said[0] == said[1]


@pytest.mark.parametrize("top_k", [321, 10**6])
def test_b07_top_k_beyond_the_vocabulary(top_k: int, llm: LLM) -> None:
    """vllm-project/vllm PR #14234."""
    free, wide = (SamplingParams(seed=3, top_k=k, max_tokens=8, ignore_eos=True) for k in (0, top_k))
    expected = [o.outputs for o in llm.generate(["ab", "cd"], free, use_tqdm=False)]
    assert [o.outputs for o in llm.generate(["ab", "cd"], [wide, free], use_tqdm=False)] == expected


def test_b08_which_tokens_a_penalty_counts() -> None:
    """vllm-project/vllm-metal PR #69. The numbers of the stage alone are in test_sampler.py."""
    tokenizer = piece_tokenizer()

    def flat(request: Request) -> torch.Tensor:
        row = torch.full((len(tokenizer),), -9.0)
        row[[10, 11, 12, 13]] = torch.tensor([2.0, -2.0, 2.0, 0.5])
        return row if request.num_output_tokens else row.index_fill(0, torch.tensor([12]), 9.0)

    def last_logits(**params: Any) -> dict[int, float]:
        engine = scripted_engine(tokenizer, flat, logprobs_mode="processed_logits")
        output = run_steps(engine, [10, 11], greedy(2, logprobs=4, **params))[-1]
        assert output.outputs[0].token_ids[0] == 12
        return {i: entry.logprob for i, entry in output.outputs[0].logprobs[1].items()}

    assert last_logits(repetition_penalty=2.0) == {10: 1.0, 12: 1.0, 13: 0.5, 11: -4.0}
    assert last_logits(presence_penalty=1.0) == {10: 2.0, 12: 1.0, 13: 0.5, 11: -2.0}


def test_b09_a_bad_word_with_a_shorter_form_slips_through() -> None:
    """vllm-project/vllm #23886. As in vLLM, and as the docstring of `_tokenize_bad_words` says: of a word that is two
    tokens alone and one after a space, only the first form is forbidden."""
    tokenizer = byte_tokenizer(b"desc", b"ribed", b" a", (b" ", b"desc", b"ribed"))
    after_space = piece_ids(tokenizer, b" a", b" described", b" a")
    alone = piece_ids(tokenizer, b" a", b"desc", b"ribed")
    for script, text in ((after_space, " a described a"), (alone, " adesc")):
        params = greedy(3, bad_words=["described"])
        (output,) = scripted_llm(tokenizer, script).generate([5], params, use_tqdm=False)
        assert output.outputs[0].text.startswith(text)
        assert ("described" in output.outputs[0].text) == (script is after_space)
    both = greedy(3, bad_words=["described", " described"])  # naming both forms does not help: spaces are stripped
    (output,) = scripted_llm(tokenizer, after_space).generate([5], both, use_tqdm=False)
    assert "described" in output.outputs[0].text


def test_b10_bias_of_an_unknown_token(llm: LLM) -> None:
    """vllm-project/vllm #6866."""
    alone = ids_of(llm, "running", greedy(8, ignore_eos=True))
    engine = llm.llm_engine
    engine.add_request("a", "running", greedy(8, ignore_eos=True))
    outputs = engine.step()
    with pytest.raises(VLLMValidationError, match="325"):
        engine.add_request("b", "refused", greedy(8, logit_bias={325: 1.0}))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == alone


def test_b11_empty_prompt(tmp_path: Path, llm: LLM) -> None:
    """vllm-project/vllm #7283."""
    (output,) = llm.generate("", greedy(2, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == [0] and len(output.outputs[0].token_ids) == 2  # the BOS
    folder = save_tiny_model(tmp_path, bos=False)
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=9) as plain:
        for prompt in ("", {"prompt": ""}, {"prompt_token_ids": []}, [[]]):
            with pytest.raises(VLLMValidationError, match="The decoder prompt cannot be empty"):
                plain.generate(prompt, use_tqdm=False)
        assert len(ids_of(plain, "fine", greedy(2, ignore_eos=True))) == 2
        assert_clean(plain.llm_engine)


def test_b12_around_the_context_limit(tiny_model: Path) -> None:
    """EleutherAI/lm-evaluation-harness #2880."""
    with LLM(str(tiny_model), max_model_len=32, num_gpu_blocks_override=9) as llm:
        (output,) = llm.generate([[5] * 31], greedy(5, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
        (output,) = llm.generate([[5] * 30], greedy(None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].finish_reason == "length"
        for length in (32, 33):
            with pytest.raises(VLLMValidationError, match="maximum context length is 32 tokens"):
                llm.generate([[5] * length], greedy(5), use_tqdm=False)
            assert_clean(llm.llm_engine)


def test_b13_fully_cached_prompt(tiny_model: Path) -> None:
    """GeeeekExplorer/nano-vllm #144."""
    with LLM(str(tiny_model), max_model_len=32, block_size=4, num_gpu_blocks_override=33) as llm:
        first, second = (llm.generate([[5, 6, 7, 8, 9, 10, 11, 12]], greedy(4), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4) and first.outputs == second.outputs


@pytest.mark.parametrize("length, cached", [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_b14_prompt_of_exactly_one_block(length: int, cached: int, llm: LLM) -> None:
    """GeeeekExplorer/nano-vllm PR #117: a hit leaves one token to compute."""
    prompt = byte_ids(bytes(range(40, 40 + length)))
    first, second = (llm.generate([prompt], greedy(4), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached) and first.outputs == second.outputs


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("length", [5, 16, 17, 33])
def test_b15_the_same_prompt_twice_in_one_call(length: int, block_size: int, tiny_model: Path) -> None:
    """Wenyueh/MinivLLM PR #98: positions after a shared part go on where it ends."""
    prompt, args = byte_ids(bytes(range(40, 40 + length))), {"max_model_len": 64, "num_gpu_blocks_override": 33}
    with LLM(str(tiny_model), enable_prefix_caching=False, **args) as llm:
        alone = ids_of(llm, prompt, greedy(8, ignore_eos=True))
    with LLM(str(tiny_model), block_size=block_size, **args) as llm, Trace(llm) as trace:
        both = llm.generate([prompt, prompt], greedy(8, ignore_eos=True), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both] == [alone, alone]
    hit = (length - 1) // block_size * block_size
    assert trace.records[0].scheduled == {"0": [0, length], "1": [hit, length - hit]}


@pytest.mark.parametrize("block_size", [16, 32])
def test_b17_a_pool_that_is_too_small(block_size: int, tiny_model: Path) -> None:
    """vllm-project/vllm #35541: refused when the engine is built, so that no prompt can wait for ever; and with a pool
    that is just large enough, the longest prompts are served one after another."""
    needed = 256 // block_size
    with pytest.raises(VLLMValidationError, match=f"{needed} blocks .* has {needed - 1} usable"):
        LLM(str(tiny_model), block_size=block_size, num_gpu_blocks_override=needed)
    with LLM(str(tiny_model), block_size=block_size, num_gpu_blocks_override=needed + 1) as llm:
        prompts = [[5] * 3, [6] * 255, [7] * 250, [8] * 3]
        outputs = llm.generate(prompts, greedy(9, ignore_eos=True), use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 6, 9]
        assert_clean(llm.llm_engine)


@pytest.mark.parametrize("block_size", [16, 32])
def test_b19_prompt_logprobs_twice(block_size: int, tiny_model: Path) -> None:
    """vllm-project/vllm #8268. Their values are checked in test_logprobs.py."""
    with LLM(str(tiny_model), max_model_len=64, block_size=block_size, num_gpu_blocks_override=9) as llm:
        prompt = byte_ids(bytes(range(40, 73)))
        first, second = (llm.generate([prompt], greedy(2, prompt_logprobs=1), use_tqdm=False)[0] for _ in range(2))
    assert len(first.prompt_logprobs) == 33 and first.prompt_logprobs[0] is None
    assert first.prompt_logprobs == second.prompt_logprobs and second.num_cached_tokens == 0


def test_b20_double_bos(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """vllm-project/vllm PR #27515."""
    messages = [{"role": "user", "content": "Hi"}]
    text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (chat,) = llm.chat(messages, greedy(1), use_tqdm=False)
    assert chat.prompt_token_ids[:2] == [0, 2] and not caplog.text
    (twice,) = llm.generate(text, greedy(1), use_tqdm=False)
    assert twice.prompt_token_ids[:3] == [0, 0, 2] and "two BOS" in caplog.text
    kwargs = {"add_special_tokens": False}
    (once,) = llm.generate(text, greedy(1), use_tqdm=False, tokenization_kwargs=kwargs)
    assert once.prompt_token_ids == chat.prompt_token_ids


@pytest.mark.parametrize("num_gpu_blocks", [129, 11])
def test_b21_outputs_are_in_the_order_of_the_prompts(num_gpu_blocks: int) -> None:
    """vllm-project/vllm #394. The small pool makes requests give way to each other."""
    llm = scripted_llm(LETTERS, lambda r: r.prompt_token_ids[0], max_num_seqs=3, num_gpu_blocks=num_gpu_blocks,
                       max_model_len=32, disable_log_stats=False)
    prompts = [chr(ord("a") + i) * (1 + 7 * i % 10) for i in range(10)]
    lengths = [3, 10, 1, 8, 5, 2, 9, 7, 4, 6]
    preempted = 0
    for _ in range(2):
        outputs = llm.generate(prompts, [greedy(2 * n) for n in lengths], use_tqdm=False)
        assert [o.prompt for o in outputs] == prompts
        assert [o.outputs[0].text for o in outputs] == [p[0] * 2 * n for p, n in zip(prompts, lengths, strict=True)]
        preempted += sum(o.metrics.num_preemptions for o in outputs)
    assert (preempted > 0) == (num_gpu_blocks == 11)
    assert_clean(llm.llm_engine)
