"""What the checks share: a scripted engine to see one completion or one row of logits, and how a refusal looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.api.support import byte_ids, byte_tokenizer, piece_ids, piece_tokenizer, scripted_llm
from tutorial_engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import StructuredOutputsParams

LETTERS = piece_tokenizer()  # id 0 is EOS, 1 a special token, then one id per printable character
EOS = 0


def ids(text: str) -> list[int]:
    return piece_ids(LETTERS, *text)


def letters_llm(script: Any, **args: Any) -> LLM:
    """A scripted model whose tokens are letters. `script`: a text, ids, or a function of the request."""
    return scripted_llm(LETTERS, ids(script) if isinstance(script, str) else script, **args)


def one(llm: LLM, prompt: Any, *args: Any, **params: Any) -> RequestOutput:
    """The output of a single prompt."""
    (output,) = llm.generate([prompt], SamplingParams(*args, **params), use_tqdm=False)
    return output


def say(script: Any, prompt: Any = "p", **params: Any) -> CompletionOutput:
    """The greedy completion of a scripted model."""
    return one(letters_llm(script), prompt, **{"temperature": 0.0, **params}).outputs[0]


def held_to(wish: str, structured: StructuredOutputsParams, **params: Any) -> CompletionOutput:
    """What a model says that would like to say `wish`, byte by byte, and is held to a grammar."""
    llm = scripted_llm(byte_tokenizer(), byte_ids(wish.encode()))
    return one(llm, "p", temperature=0, structured_outputs=structured, **params).outputs[0]


def shaped(logits: dict[int, float], *, prompt: Sequence[int] = (50,), said: Sequence[int] = (),
           mode: str = "processed_logits", **params: Any) -> dict[int, float]:
    """What the parameters make of a row of logits, after the model has said some tokens.

    Args:
        logits: of a few tokens; all others are out of the question.
        said: tokens said before. mode: of the values that come back.
    """
    def script(request: Request) -> int | torch.Tensor:
        if request.num_output_tokens < len(said):
            return said[request.num_output_tokens]
        row = torch.full((len(LETTERS),), -1e4)
        row[list(logits)] = torch.tensor(list(logits.values()))
        return row

    llm = letters_llm(script, logprobs_mode=mode, max_logprobs=-1)
    output = one(llm, list(prompt), **{"seed": 0, "logprobs": -1, "ignore_eos": True, **params,
                                       "max_tokens": len(said) + 1})
    last = output.outputs[0].logprobs[len(said)]
    return {token_id: last[token_id].logprob for token_id in logits}


def kept(probs: Sequence[float], **params: Any) -> list[int]:
    """Positions of the probabilities that the parameters leave a chance; ids 10, 11, 12 ... stand for them."""
    logits = {10 + i: math.log(p) for i, p in enumerate(probs)}
    return [i - 10 for i, value in shaped(logits, **params).items() if value > -math.inf]


def refuses(parameter: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call is refused, and the error knows which parameter is wrong."""
    with pytest.raises(VLLMValidationError) as error:
        call(*args, **kwargs)
    assert error.value.parameter == parameter, error.value


def steps(llm: LLM) -> list[RequestOutput]:
    """Run what was added to `llm.llm_engine` to its end."""
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return outputs
