"""What the tests of the public face share: two models, and the tokenizers that go with them.

* A *scripted model*: no weights; its logits are a function of the request, so that a test decides every token. It sits
  behind the real scheduler, sampler, detokeniser and output processor.
* A *tiny model*: two random Llama layers, saved with transformers, loaded like any other folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.core.support import make_config
from tutorial_engine import LLM, LLMEngine, RequestOutput, SamplingParams
from tutorial_engine.logits_processor import ProcessorPipeline, make_processors
from tutorial_engine.model_runner import ModelRunnerOutput
from tutorial_engine.request import Request
from tutorial_engine.sampler import Sampler, SamplingMetadata
from tutorial_engine.sampling_params import RequestOutputKind
from tutorial_engine.scheduler import SchedulerOutput

EOS, TURN = "</s>", "<|turn|>"
# Writes its own BOS, as most models' templates do; marks each turn with a special token.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}" + TURN + "{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if shout is defined %}!{% endif %}{% if add_generation_prompt %}" + TURN + "assistant: {% endif %}"
)

# Tokenizers


def piece_tokenizer(*pieces: str) -> PreTrainedTokenizerFast:
    """A made-up vocabulary: EOS (id 0), a special token (id 1), printable ASCII, then any pieces.

    Text is encoded character by character; decoding joins pieces as they are. No BOS is added.
    """
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([EOS, TURN, *characters, *pieces]))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (EOS, TURN)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, extra_special_tokens=[TURN])


def byte_tokenizer(*pieces: bytes | tuple[bytes, ...], bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE: BOS (id 0), EOS (1), a special token (2), the 256 bytes, then `pieces`.

    Args:
        pieces: any bytes, half a character too; a tuple of earlier pieces is merged from left to right.
        bos: add BOS to each text.
    """
    names = byte_names()
    vocab = {t: i for i, t in enumerate(["<s>", EOS, TURN, *names])}
    merges: dict[tuple[str, str], None] = {}
    for piece in pieces:
        parts = piece if isinstance(piece, tuple) else [piece[i:i + 1] for i in range(len(piece))]
        text = ""
        for part in ["".join(names[b] for b in part) for part in parts]:
            if text:
                merges[text, part] = None
            text += part
            vocab.setdefault(text, len(vocab))
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", EOS, TURN)])
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=EOS,
                                   extra_special_tokens=[TURN], chat_template=CHAT_TEMPLATE)


def byte_names() -> list[str]:
    """GPT-2's trick: each byte is written as a printable character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def byte_ids(data: bytes) -> list[int]:
    """Ids of a `byte_tokenizer`, one per byte."""
    return [3 + b for b in data]


def piece_ids(tokenizer: PreTrainedTokenizerFast, *pieces: str | bytes) -> list[int]:
    """Ids of whole pieces; bytes name the pieces of a `byte_tokenizer`."""
    vocab, names = tokenizer.get_vocab(), byte_names()
    return [vocab[piece if isinstance(piece, str) else "".join(names[b] for b in piece)] for piece in pieces]


# The scripted model

Script = Sequence[int] | Callable[[Request], "int | torch.Tensor"]


class ScriptedRunner:
    """Stands in for `ModelRunner`; samples for real.

    Args:
        script: the tokens to say in order (the last one again and again), or a function of the request that returns
            the next token or a row of logits.
        before: called with each plan; may raise.
    """

    def __init__(self, script: Script, vocab_size: int, num_gpu_blocks: int, max_model_len: int, logprobs_mode: str,
                 before: Callable[[SchedulerOutput], None] | None = None, processors: ProcessorPipeline | None = None
                 ) -> None:
        self.script, self.vocab_size, self.before = script, vocab_size, before
        self.num_gpu_blocks, self.max_model_len = num_gpu_blocks, max_model_len
        self.sampler = Sampler(logprobs_mode, processors)
        self.plans: list[SchedulerOutput] = []

    def logits(self, request: Request) -> torch.Tensor:
        if callable(self.script):
            said = self.script(request)
        else:
            said = self.script[min(request.num_output_tokens, len(self.script) - 1)]
        if isinstance(said, torch.Tensor):
            return said.clone()
        row = torch.zeros(self.vocab_size)
        row[said] = 50.0  # so much that temperatures up to 2 change nothing
        return row

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        if self.before:
            self.before(plan)
        requests = [s.request for s in plan.scheduled.values() if s.samples]
        if not requests:
            return ModelRunnerOutput()
        metadata = SamplingMetadata(requests, [r.num_tokens for r in requests], self.vocab_size, torch.device("cpu"))
        token_ids, logprobs = self.sampler(torch.stack([self.logits(r) for r in requests]), metadata)
        return ModelRunnerOutput({r.request_id: [t] for r, t in zip(requests, token_ids, strict=True)}, logprobs)

    def close(self) -> None:
        pass


def scripted_engine(tokenizer: PreTrainedTokenizerFast, script: Script, *, max_model_len: int = 64,
                    num_gpu_blocks: int = 129, generation_config: dict[str, Any] | None = None,
                    before: Callable[[SchedulerOutput], None] | None = None, **args: Any) -> LLMEngine:
    config = make_config(max_model_len, **args)
    vocab_size = len(tokenizer)
    runner = ScriptedRunner(script, vocab_size, num_gpu_blocks, max_model_len, config.args.logprobs_mode, before,
                            make_processors(config, torch.device("cpu")))
    return LLMEngine(config, runner, tokenizer, vocab_size, generation_config or {})


def llm_of(engine: LLMEngine) -> LLM:
    """`LLM` around an engine that a test has built."""
    with mock.patch.object(LLMEngine, "from_engine_args", return_value=engine):
        return LLM()


def scripted_llm(tokenizer: PreTrainedTokenizerFast, script: Script, **kwargs: Any) -> LLM:
    return llm_of(scripted_engine(tokenizer, script, **kwargs))


def greedy(max_tokens: int | None = 16, **kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **kwargs})


def run_steps(engine: LLMEngine, prompt: Any, params: SamplingParams, request_id: str = "r") -> list[RequestOutput]:
    """Every output that one request produces, in order."""
    engine.add_request(request_id, prompt, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def stream(tokenizer: PreTrainedTokenizerFast, script: Script, prompt: Any = "p", **params: Any
           ) -> tuple[list[str], RequestOutput]:
    """(text pieces as they arrive, last output) of a scripted greedy request, streamed as deltas."""
    outputs = run_steps(scripted_engine(tokenizer, script), prompt,
                        greedy(**{"max_tokens": 16, "output_kind": RequestOutputKind.DELTA, **params}))
    return [o.outputs[0].text for o in outputs], outputs[-1]


# The tiny model


def save_tiny_model(folder: Path, *, chat_template: bool = True, bos: bool = True, vocab_size: int = 320) -> Path:
    """Two random Llama layers and a byte-level tokenizer, in Hugging Face's layout. The context is 256 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         bos_token_id=0, eos_token_id=1, pad_token_id=None, initializer_range=0.15,
                         tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # " described" is one token, "described" two; the emoji U+1F600 is cut in its middle.
    tokenizer = byte_tokenizer(b"desc", b"ribed", b"he", b"\xf0\x9f", b"\x98\x80", b" the",
                               (b" ", b"desc", b"ribed"), bos=bos)
    if not chat_template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


# Statistics


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of observing `counts` under `probs`; categories with fewer than 5 expected are merged into one.

    An observation where `probs` is 0 makes it 0.
    """
    if counts[probs == 0].sum() > 0:
        return 0.0
    expected = probs.double() * counts.sum()
    large = expected >= 5
    observed = torch.cat([counts[large].double(), counts[~large].sum()[None].double()])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    dof = int(used.sum()) - 1
    if dof == 0:
        return 1.0
    return torch.special.gammaincc(torch.tensor(dof / 2), statistic / 2).item()


def logsumexp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))
