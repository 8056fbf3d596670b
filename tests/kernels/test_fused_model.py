"""A whole model made of kernels gives the torch path's logits, decoding step by step."""

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
from tests.core.support import FakeTokenizer, make_config, make_params
from tutorial_engine.attention import AttentionMetadata
from tutorial_engine.cuda_graphs import StepGraphs
from tutorial_engine.input_batch import InputBatch
from tutorial_engine.kernels.decode_attention import decode_attention
from tutorial_engine.kv_cache import KVCache
from tutorial_engine.llm_engine import LLMEngine
from tutorial_engine.model_runner import ModelRunner
from tutorial_engine.models.config import ModelConfig
from tutorial_engine.models.decoder import Decoder
from tutorial_engine.models.linear import Linear

CPU, BLOCK_SIZE = torch.device("cpu"), 4


def tiny_model(architecture: str) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(architecture=architecture, vocab_size=50, hidden_size=32, intermediate_size=48,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         tie_word_embeddings=False, attention_bias=architecture == "qwen2",
                         qk_norm=architecture == "qwen3")
    model = Decoder(config, 32, torch.float32, CPU)
    model.load_weights((name, torch.randn_like(view()) * 0.2) for name, (_, view) in model._places().items())
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_decoding_with_kernels(architecture: str) -> None:
    model = tiny_model(architecture)
    config = model.config
    tables = torch.tensor([[3, 1, 5], [2, 6, 4]], dtype=torch.int32)
    caches = [KVCache(config, 8, BLOCK_SIZE, torch.float32, CPU) for _ in range(2)]
    for position in range(7):
        ids, positions = torch.tensor([7 + position, 30 - position]), torch.full((2,), position)
        slots = tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        lens = torch.full((2,), position + 1, dtype=torch.int32)

        def attend(query: torch.Tensor, layer: int, lens: torch.Tensor = lens) -> torch.Tensor:
            return decode_attention(query, caches[0].key[layer], caches[0].value[layer], tables, lens)

        with torch.inference_mode():
            got = model.compute_logits(model.forward_fused(ids, positions, slots, caches[0], attend))
            metadata = AttentionMetadata.build(np.array([0, 1, 2]), lens.long().numpy(), tables.long().numpy(), slots,
                                               caches[1])
            right = model.compute_logits(model(ids, positions, caches[1], metadata))
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


class EagerGraphs(StepGraphs):
    """What would be recorded, run at once."""

    def _record(self) -> None:
        self.replayed: Counter = Counter()

    def _num_splits(self, size: int) -> int:
        return 2 if size == 2 else 1

    def _replay(self, kind: str, size: int) -> torch.Tensor:
        self.replayed[kind, size] += 1
        return self._decode(size) if kind == "decode" else self._forward(size)


@pytest.mark.parametrize("tensor_cores, ahead, temperature", [
    (False, False, 0.0), (True, True, 1.0)])
def test_the_engine_gives_the_same_tokens_with_kernels(tensor_cores: bool, ahead: bool, temperature: float,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, decoding and preemption through the kernels, against the torch path."""
    monkeypatch.setattr(Linear, "pack", lambda self: None)  # as on a GPU
    answers = []
    for kernels in (False, True):
        config = make_config(32, max_num_batched_tokens=8, num_gpu_blocks_override=9, scheduler_reserve_full_isl=False,
                             async_scheduling=kernels and ahead)
        runner = ModelRunner(config, lambda: tiny_model("llama"))
        if kernels:
            runner.use_kernels, runner.use_prefill_kernel = True, tensor_cores
            runner.input_batch = InputBatch(config.max_num_seqs, 8, torch.device("cpu"), use_kernels=True)
            runner.graphs = EagerGraphs(config, runner.model, runner.kv_cache, runner.input_batch, tensor_cores)
        engine = LLMEngine(config, runner, FakeTokenizer(), 50, {})
        for i, length in enumerate((2, 3, 9)):
            engine.add_request(str(i), list(range(i, i + length)), make_params(
                8, temperature=temperature, seed=i, top_k=10 * i, top_p=1 - i / 5))
        finished, preemptions = {}, 0
        while engine.has_unfinished_requests():
            finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
            preemptions += len(engine.last_plan.preempted)
        answers.append(finished)
        assert preemptions > 0
    assert answers[0] == answers[1]
    kinds = {kind for kind, _ in runner.graphs.replayed}
    assert kinds == ({"decode", "forward"} if tensor_cores else {"decode"})
