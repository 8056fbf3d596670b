"""The default model's greedy tokens are those of transformers with the same weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.core.support import assert_clean, make_params
from tutorial_engine import LLM, LLMEngine, RequestOutput
from tutorial_engine.config import EngineArgs, EngineConfig
from tutorial_engine.model_runner import ModelRunner
from tutorial_engine.models.loader import ModelSource, resolve_model
from tutorial_engine.sampling_params import RequestOutputKind

NUM_TOKENS = 24
STORY = (
    "In a village at the edge of a great forest there lived a clockmaker whose clocks were never wrong. People "
    "came from far away to hear them strike, and nobody had ever asked her how she did it. One winter morning a "
    "boy came into the shop with a watch that ran backwards, and asked whether she could teach it to go forwards. "
    "She looked at it for a long time, opened the back, and saw that there was no spring inside, and no wheels "
    "either, only a folded note in a handwriting that she had not seen since she was a child herself. It said"
)
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    ",
    "Once upon a time",
    "To be, or not to be",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\n",
    "The three primary colours are red,",
    "Question: Why is the sky blue?\nAnswer:",
    "SELECT name FROM users WHERE",
    "<html>\n<head>\n<title>",
    "A KV cache stores keys and values so that",
    "Ingredients: flour, sugar, butter, eggs.\n\nMethod: First,",
    "Monday, Tuesday, Wednesday,",
    "The opposite of hot is cold. The opposite of up is",
    "Zürich liegt in der",
    "🙂🙂🙂",
    *(STORY[:end] for end in (150, 250, 350)),
    STORY,
    STORY,  # the same again: all but its last block are found
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("")


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> LlamaForCausalLM:
    """transformers' model around our weights. Made without memory first: to fill it at random would take 15 seconds."""
    c = source.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_word_embeddings,
        max_position_embeddings=c.max_position_embeddings)
    assert c.rope_scaling is None and c.tie_word_embeddings
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = dict(source.weights())
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLM(max_model_len=256, num_gpu_blocks_override=150, dtype="float32") as llm:
        yield llm.llm_engine


def run(engine: LLMEngine, prompts: list[str], num_tokens: int) -> list[RequestOutput]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, make_params(num_tokens, output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((int(output.request_id), output) for output in engine.step())
    assert_clean(engine)
    return [outputs[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def outputs(engine: LLMEngine) -> list[RequestOutput]:
    return run(engine, PROMPTS, NUM_TOKENS)


@torch.inference_mode()
def assert_greedy(reference: LlamaForCausalLM, output: RequestOutput) -> None:
    """Every token is the argmax of transformers' logits after all tokens before it: what greedy search would choose.

    Two logits may be closer than float32 can tell; then another machine may go the other way, and what follows differs.
    """
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    logits = reference(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    best = logits.argmax(dim=-1).tolist()
    if answer != best:
        first = next(i for i, (a, b) in enumerate(zip(answer, best)) if a != b)
        lost = logits[first, best[first]] - logits[first, answer[first]]
        assert lost < 1e-4, f"{output.prompt!r}: token {first} is {answer[first]}, transformers says {best[first]}"


def test_a_mixed_batch_equals_transformers(outputs: list[RequestOutput], reference: LlamaForCausalLM) -> None:
    assert [o.prompt for o in outputs] == PROMPTS and len(PROMPTS) >= 20
    lengths = [len(o.prompt_token_ids) for o in outputs]
    assert min(lengths) <= 4 and max(lengths) >= 110
    for output in outputs[:-1]:
        assert len(output.outputs[0].token_ids) == NUM_TOKENS and output.outputs[0].finish_reason == "length"
        assert_greedy(reference, output)
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[-1].num_cached_tokens == (lengths[-1] - 1) // 16 * 16
    assert outputs[-1].outputs[0].token_ids == outputs[-2].outputs[0].token_ids


def test_the_same_from_a_small_pool_in_small_steps(engine: LLMEngine, outputs: list[RequestOutput]) -> None:
    """Chunked prompts and preemption, against the run above; another engine around the same weights."""
    args = EngineArgs(max_model_len=128, num_gpu_blocks_override=9, max_num_batched_tokens=40, max_num_seqs=8,
                      dtype="float32", enable_prefix_caching=False, scheduler_reserve_full_isl=False)
    model = engine.model_runner.model
    config = EngineConfig.resolve(args, model.config.max_position_embeddings, "cpu", None)
    small = LLMEngine(config, ModelRunner(config, lambda: model), engine.tokenizer, model.config.vocab_size, {})
    preemptions: list = []
    small.listeners.append(lambda _, plan, tables, kept: preemptions.extend(plan.preempted))
    for output, right in zip(run(small, PROMPTS[-5:-2], 8), outputs[-5:-2]):
        assert output.outputs[0].token_ids == right.outputs[0].token_ids[:8]
    assert preemptions
