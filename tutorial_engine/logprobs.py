"""`Logprob`: what the model thought of one token. The import path is vLLM's (`vllm.logprobs`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability, <= 0 (a raw or processed logit in the "logits" modes).
        rank: 1 for the most likely token of the vocabulary, then 2, 3 ...
        decoded_token: the token's text; "" while its bytes do not yet form a character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict per position, from token id to Logprob: the sampled token first, then the most likely ones.
SampleLogprobs = list[dict[int, Logprob]]
# The first entry is None: nothing comes before the first prompt token, so nothing predicts it.
PromptLogprobs = list[dict[int, Logprob] | None]
