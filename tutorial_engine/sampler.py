"""The sampler: from logits to one token per row, and what to report about it.

    raw logits -> grammar -+-> allowed ids, logit_bias, min_tokens -> penalties -> bad words -> custom processors
                           |                   -> temperature -> min_p -> top_k -> top_p -> Gumbel-max -> token
                           +-> logprobs (by default of the raw logits: what the model thought, not what the knobs
                               made of it; a grammar is no knob, so what it forbids has -inf there too)

The order is vLLM's. Every stage works on all rows at once and is skipped when no row asks for it.

Randomness is counter-based: the noise of a token is a hash of (the request's seed, the position, the token id). It
needs no generator state, so a seeded request draws the same tokens alone, in any batch and row, chunked or preempted.
Gumbel-max: argmax(logits + g) with g = -log(-log(u)) is a draw from softmax(logits) (Maddison et al., arXiv 1411.0030,
section 2.1). `brute_force_probs` is the slow twin: the exact distribution that a row should follow.

Owns: logits processing, sampling, logprobs. Does not own: running the model, stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tutorial_engine.logits_processor import ProcessorPipeline
from tutorial_engine.request import Request
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.structured_outputs import NO_TOKEN, apply_grammars, rows_without_choice

# top_k and top_p look at this many of the most likely tokens first, and sort a whole row only if that is not enough.
HEAD = 256


@dataclass
class LogprobsLists:
    """Per row: token ids, their values and the rank of the chosen token; the chosen token comes first.

    Row i has 1 + (number asked for by that request) entries.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_ranks: list[int]


class SamplingMetadata:
    """What the rows of one step ask for, as tensors.

    Args:
        requests: one per row, in row order.
        num_tokens: of each request, before the one to be sampled: the position that the noise is drawn for.
        vocab_size: columns of the logits.
        device: of the logits.
    """

    def __init__(self, requests: Sequence[Request], num_tokens: Sequence[int], vocab_size: int, device: torch.device
                 ) -> None:
        self.requests = requests
        self.vocab_size = vocab_size
        self.device = device
        params = [r.sampling_params for r in requests]
        self.params = params
        # Truncation only makes sense for rows that draw; greedy rows have their knobs reset.
        self.random_rows = [i for i, p in enumerate(params) if not p.greedy]
        drawing = [params[i] for i in self.random_rows]
        self.temperature = self._column([p.temperature for p in drawing], torch.float32)
        self.min_p = self._column([p.min_p for p in drawing], torch.float32) if any(p.min_p for p in drawing) else None
        # A k outside of the vocabulary is no restriction.
        self.top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in drawing]
        self.top_p = [p.top_p for p in drawing]
        self.noise_keys = self._column([noise_key(requests[i].seed, num_tokens[i]) for i in self.random_rows],
                                       torch.int64)

    def _column(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None]


class Sampler:
    """Chooses one token per row.

    Args:
        logprobs_mode: which values are reported, see `EngineArgs`.
        processors: the engine's custom logits processors.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", processors: ProcessorPipeline | None = None) -> None:
        self.logprobs_mode = logprobs_mode
        self.processors = processors or ProcessorPipeline()

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[list[int], LogprobsLists | None]:
        """Args: logits [rows, vocab_size] float32, not kept. Returns: (token id per row, logprobs or None).

        A row whose grammar and other rules leave no token at all gets NO_TOKEN.
        """
        apply_grammars(logits, metadata.requests)
        wants_logprobs = any(p.logprobs is not None for p in metadata.params)
        # The stages below work in place, so the raw values are copied first, if someone will ask for them.
        raw = logits.clone() if wants_logprobs and self.logprobs_mode.startswith("raw") else None
        apply_token_rules(logits, metadata)
        apply_penalties(logits, metadata)
        apply_bad_words(logits, metadata)
        logits = self.processors.apply(logits, metadata.requests, metadata.random_rows)
        sampled = logits.argmax(dim=-1)
        if metadata.random_rows:
            rows = torch.tensor(metadata.random_rows, device=logits.device)
            drawn = logits[rows].div_(metadata.temperature)
            apply_min_p(drawn, metadata.min_p)
            sampled[rows] = self._draw(drawn, metadata)
            if wants_logprobs and raw is None:
                logits[rows] = truncate(drawn, metadata.top_k, metadata.top_p)
        token_ids = sampled.tolist()
        for row in rows_without_choice(logits, metadata.requests):
            token_ids[row] = NO_TOKEN
        if not wants_logprobs:
            return token_ids, None
        values = logits if raw is None else raw
        return token_ids, self.gather_logprobs(values, sampled, [p.logprobs for p in metadata.params])

    @staticmethod
    def _draw(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """One token per row of `logits` [rows, vocab_size], after temperature and min_p."""
        keys, vocab_size = metadata.noise_keys, metadata.vocab_size
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        free = [k == vocab_size and p == 1.0 for k, p in zip(metadata.top_k, metadata.top_p)]
        whole = [i for i, f in enumerate(free) if f]
        if whole:
            ids = torch.arange(vocab_size, device=logits.device)
            out[whole] = (logits[whole] + gumbel_noise(keys[whole], ids)).argmax(dim=-1)
        rest = [i for i, f in enumerate(free) if not f]
        if rest:
            top_k, top_p = [metadata.top_k[i] for i in rest], [metadata.top_p[i] for i in rest]
            kept, ids, enough = truncate_head(logits[rest], top_k, top_p)
            noisy = kept + gumbel_noise(keys[rest], ids)
            out[rest] = ids.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]
            if short := [r for r, e in enumerate(enough) if not e]:
                rows = [rest[r] for r in short]
                kept = truncate(logits[rows], [top_k[r] for r in short], [top_p[r] for r in short])
                ids = torch.arange(vocab_size, device=logits.device)
                out[rows] = (kept + gumbel_noise(keys[rows], ids)).argmax(dim=-1)
        return out

    def gather_logprobs(self, values: torch.Tensor, chosen: torch.Tensor, asked: Sequence[int | None],
                        is_prompt: bool = False) -> LogprobsLists:
        """Logprobs of the chosen tokens and of the most likely ones.

        Args:
            values: [rows, vocab_size] logits. chosen: [rows] token ids. asked: alternatives per row, -1 for all.
            is_prompt: always logprobs, as in vLLM: the mode is about what is generated.
        """
        if is_prompt or self.logprobs_mode.endswith("logprobs"):
            values = values.log_softmax(dim=-1)
        own = values.gather(1, chosen[:, None])
        ranks = (values > own).sum(dim=-1) + 1
        vocab_size = values.shape[1]
        num = [0 if n is None else vocab_size if n == -1 else min(n, vocab_size) for n in asked]
        top, ids = values.topk(max(num), dim=-1)
        return LogprobsLists(
            token_ids=[[c, *row[:n]] for c, row, n in zip(chosen.tolist(), ids.tolist(), num)],
            logprobs=[[o, *row[:n]] for o, row, n in zip(own[:, 0].tolist(), top.tolist(), num)],
            sampled_ranks=ranks.tolist())


NEVER = 1 << 62


def plain_from(request: Request) -> int:
    """Length in tokens from which on this request's next token can be drawn without the host, from its logits by
    temperature, min_p, top_k and top_p alone; NEVER if it always wants more."""
    p = request.sampling_params
    plain = (p.logprobs is None and p.repetition_penalty == 1.0 and p.frequency_penalty == 0.0
             and p.presence_penalty == 0.0 and not p.logit_bias and p.allowed_token_ids is None
             and not request.bad_words_token_ids and request.grammar is None)
    return request.num_prompt_tokens + p.min_tokens if plain else NEVER


def apply_token_rules(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """allowed_token_ids, logit_bias and min_tokens, in place."""
    biased: list[tuple[int, int, float]] = []
    forbidden: list[tuple[int, int]] = []
    for row, (request, p) in enumerate(zip(metadata.requests, metadata.params)):
        if p.allowed_token_ids is not None:
            allowed = logits[row, p.allowed_token_ids]
            logits[row] = -torch.inf
            logits[row, p.allowed_token_ids] = allowed
        if p.logit_bias:
            biased += [(row, token_id, bias) for token_id, bias in p.logit_bias.items()]
        if request.num_output_tokens < p.min_tokens and _can_go_on(request, logits[row]):
            forbidden += [(row, token_id) for token_id in request.masked_stop_ids]
    if biased:
        rows, ids, values = zip(*biased)
        logits[list(rows), list(ids)] += torch.tensor(values, device=logits.device)
    if forbidden:
        rows, ids = zip(*forbidden)
        logits[list(rows), list(ids)] = -torch.inf


def _can_go_on(request: Request, logits: torch.Tensor) -> bool:
    """False if a grammar leaves nothing but stop tokens in `logits` [vocab_size]; then min_tokens has to yield."""
    if request.grammar is None:
        return True
    others = logits.clone()
    others[list(request.masked_stop_ids)] = -torch.inf
    return others.max().item() > -torch.inf


def apply_penalties(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Repetition (prompt and output), then frequency and presence (output only), in place.

    Repetition is from CTRL (Keskar et al., arXiv 1909.05858, section 4.1): positive logits are divided, negative ones
    multiplied. Frequency and presence are OpenAI's.
    """
    rows = [i for i, p in enumerate(metadata.params)
            if p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0]
    if not rows:
        return
    requests, params = [metadata.requests[i] for i in rows], [metadata.params[i] for i in rows]
    counts = _count_tokens([r.output_token_ids for r in requests], metadata)
    seen = (counts > 0) | (_count_tokens([r.prompt_token_ids for r in requests], metadata) > 0)
    repetition, frequency, presence = (
        torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=logits.device)[:, None]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"))
    x = logits[rows]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts
    x -= presence * (counts > 0)
    logits[rows] = x


def _count_tokens(token_ids: Sequence[Sequence[int]], metadata: SamplingMetadata) -> torch.Tensor:
    """How often each token occurs: [rows, vocab_size] float32."""
    counts = torch.zeros(len(token_ids), metadata.vocab_size, device=metadata.device)
    for row, ids in enumerate(token_ids):
        index = torch.tensor(ids, dtype=torch.int64, device=metadata.device)
        counts[row].index_add_(0, index, torch.ones(len(ids), device=metadata.device))
    return counts


def apply_bad_words(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Forbid the last token of every bad word whose other tokens were just generated, in place."""
    for row, (request, p) in enumerate(zip(metadata.requests, metadata.params)):
        if not request.bad_words_token_ids:
            continue
        output = request.output_token_ids
        forbidden = {word[-1] for word in request.bad_words_token_ids
                     if output[len(output) - len(word) + 1:] == word[:-1]}
        if p.allowed_token_ids is not None:
            masked = request.masked_stop_ids if len(output) < p.min_tokens else frozenset()
            if forbidden.union(masked).issuperset(p.allowed_token_ids):
                continue  # something must be said: where nothing else is allowed, bad words are
        logits[row, list(forbidden)] = -torch.inf


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor | None) -> None:
    """Drop tokens less likely than min_p times the most likely one, in place (Nguyen et al., arXiv 2407.01082)."""
    if min_p is not None:
        # p < min_p * p_max, in logarithms; log(0) = -inf drops nothing.
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)


def _truncate_sorted(values: torch.Tensor, total: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
                     ) -> torch.Tensor:
    """top_k, then top_p, on rows sorted in descending order; what is dropped becomes -inf.

    Args:
        values: [rows, K] logits. total: [rows, 1] logsumexp of the whole row, of which `values` may be the head.
    """
    k = torch.tensor(top_k, device=values.device)[:, None].clamp(max=values.shape[1])
    # Tokens that tie with the k-th are kept, as in vLLM's PyTorch path: a cut through equals would be arbitrary.
    values = values.masked_fill(values < values.gather(1, k - 1), -torch.inf)
    restricted = torch.tensor([k_ < values.shape[1] for k_ in top_k], device=values.device)[:, None]
    total = torch.where(restricted, values.logsumexp(dim=-1, keepdim=True), total)
    probs = (values - total).exp()
    p = torch.tensor(top_p, device=values.device)[:, None]
    # A token is needed while those before it have not reached p; the first one always is.
    reached = (probs.cumsum(dim=-1) - probs >= p) & (p < 1.0)
    reached[:, 0] = False
    return values.masked_fill(reached, -torch.inf)


def truncate_head(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
                  ) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """top_k and top_p by looking only at the `HEAD` most likely tokens of each row.

    Returns:
        (logits [rows, HEAD] with the dropped ones at -inf, their token ids, whether the head held all that is kept).
    """
    size, vocab_size = min(HEAD, logits.shape[1]), logits.shape[1]
    # topk leaves equal values in any order; `truncate` puts the smaller id first.
    ids = logits.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    kept = _truncate_sorted(values, logits.logsumexp(dim=-1, keepdim=True), top_k, top_p)
    # Outside of the head there may be more tokens like its last one. So that one must not be among those that top_k
    # keeps, which top_p takes its fraction of, nor among those that are kept in the end.
    k, last = torch.tensor(top_k, device=logits.device), values[:, -1]
    kth = values.gather(1, k.clamp(max=size)[:, None] - 1)[:, 0]
    least = kept.masked_fill(kept == -torch.inf, torch.inf).amin(dim=-1)
    enough = ((k == vocab_size) | (kth > last)) & (least > last) | (last == -torch.inf)
    return kept, ids.gather(1, order), [size == vocab_size or e for e in enough.tolist()]


def truncate(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """top_k and top_p by sorting whole rows: [rows, vocab_size] -> the same, the dropped ones at -inf."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = _truncate_sorted(values, values.logsumexp(dim=-1, keepdim=True), top_k, top_p)
    return torch.empty_like(logits).scatter_(1, ids, kept)


def brute_force_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that one row should follow after temperature, min_p, top_k and top_p, by definition.

    Args:
        logits: [vocab_size]. Returns: [vocab_size] float64 probabilities.
    """
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs = (logits.double() / params.temperature).softmax(dim=0)
    probs[probs < params.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    if 0 < params.top_k < len(probs):
        smallest = probs[order[params.top_k - 1]].item()
        probs[probs < smallest] = 0
    probs /= probs.sum()
    mass = 0.0
    for i in order:
        if mass >= params.top_p and params.top_p < 1.0:
            probs[i] = 0
        mass += probs[i].item()
    return probs / probs.sum()


MASK64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """64-bit key of one draw, as a signed integer: splitmix64 of the seed and the position (Steele et al., 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`noise_key` of many rows at once. Args: seeds [n] uint64, positions [n]. Returns: [n] int64."""
    x = seeds * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of each (draw, token): a hash of key and id, turned into a uniform number in (0, 1).

    Args:
        keys: [rows, 1] int64 from `noise_key`. token_ids: [columns] or [rows, columns] int64.

    Returns:
        [rows, columns] float32.
    """
    # MurmurHash3's 64-bit finaliser. torch has no unsigned shift, so the sign bits that >> drags in are masked away.
    x = keys + token_ids * -7046029254386353131  # 2^64 / golden ratio, as a signed number: spreads neighbours
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -49064778989728563
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    # 52 bits and a half fit into a double exactly, so that the number is never rounded to 1.
    uniform = ((x >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()
