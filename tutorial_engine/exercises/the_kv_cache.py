"""The KV cache: what one token costs, read from a model's config.json; and a cache that one head or nine can ask."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tutorial_engine.checks import Answer, check

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN3 = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128}
OPT = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}


def cache_bytes_per_token(config: Mapping[str, int], bytes_per_number: int) -> int:
    """Bytes of K and V that one token leaves, for a model with this config.json."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_number


class KVCache:
    """K and V of one request, in one layer. keys, values: [num_kv_heads, tokens so far, head_dim]."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.keys = torch.zeros(num_kv_heads, 0, head_dim)
        self.values = torch.zeros(num_kv_heads, 0, head_dim)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep K and V of one more token, [num_kv_heads, head_dim] each."""
        self.keys = torch.cat([self.keys, key[:, None]], dim=1)
        self.values = torch.cat([self.values, value[:, None]], dim=1)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """What the newest token gets from all tokens so far. query and the result: [num_heads, head_dim]."""
        grouped = query.view(len(self.keys), -1, query.shape[-1])  # [num_kv_heads, heads that share one, head_dim]
        return F.scaled_dot_product_attention(grouped, self.keys, self.values).reshape(query.shape)


@check(cache_bytes_per_token)
def check_cache_bytes_per_token(answer: Answer) -> None:
    """From four lines of a config.json you know what each token of any request will cost."""
    tiny = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    answer(tiny, 1).gives(8, "the smallest model: one layer, one head of 4 numbers, one byte each. A token leaves two "
                             "vectors there.")
    answer(tiny | {"num_hidden_layers": 3}, 1).gives(24, "num_hidden_layers: every layer keeps its own K and V.")
    answer(tiny, 2).gives(16, "bytes_per_number: bfloat16 has 2 bytes, float32 has 4.")
    answer(tiny | {"num_attention_heads": 2}, 1).gives(
        8, "hidden_size: without head_dim it is shared out among the heads, so more heads make shorter vectors.")
    answer(SMOLLM2, 4).gives(46_080, "num_key_value_heads: this model has 9 heads that ask, and only 3 that keep K "
                                     "and V.")
    answer(QWEN3, 2).gives(114_688, "head_dim: where the file names it, it counts. Here it is 128, and not 1024 // 16.")
    answer(OPT, 2).gives(819_200, "a file from before 2023, which has no num_key_value_heads: each head keeps its own "
                                  "K and V.")


@check(KVCache)
def check_kv_cache(answer: Answer) -> None:
    """One row of attention is all that a new token costs, and it is the row that computing everything gives."""
    cache = answer.make("cache", 1, 1)
    one = torch.ones(1, 1)
    cache.call("append", one, 5 * one).works()
    cache.call("attend", one).gives(5 * one, "a cache with a single token: its weight is 1, so its value comes back.")
    cache.call("append", one, 9 * one).works()
    cache.call("attend", one).must(lambda result: not torch.equal(result, 9 * one), "something of the 5 as well",
                                   "the first token: is it still there after the second `append`?")
    cache.call("attend", one).gives(7 * one, "the weights: softmax makes those of all tokens add up to 1. Here are two "
                                             "tokens with equal keys, so each gets a half, and halfway between 5 and "
                                             "9 is 7.")
    cache.call("attend", one).gives(7 * one, "asking twice: attend must leave the cache as it is.")

    cache = answer.make("cache", 1, 4)
    first = torch.tensor([[2.0, 0, 0, 0]])
    cache.call("append", first, torch.ones(1, 4)).works()
    cache.call("append", torch.zeros(1, 4), torch.zeros(1, 4)).works()
    weight = torch.softmax(torch.tensor([2.0, 0.0]), 0)[0]
    cache.call("attend", first).gives(
        weight * torch.ones(1, 4), "the scores, before softmax: query times key is 4 for the first token and 0 for the "
                                   "second, and both are divided by the root of head_dim, which is 2.")

    cache = answer.make("cache", 2, 1)
    for values in ([1.0, 10], [2, 20], [6, 60]):
        cache.call("append", torch.ones(2, 1), torch.tensor(values)[:, None]).works()
    cache.call("attend", torch.ones(2, 1)).gives(
        torch.tensor([[3.0], [30.0]]), "two heads: each has a row of keys and a row of values of its own.")

    cache = answer.make("cache", 2, 1)
    cache.call("append", torch.ones(2, 1), torch.tensor([[1.0], [2.0]])).works()
    cache.call("attend", torch.ones(4, 1)).gives(
        torch.tensor([[1.0], [1.0], [2.0], [2.0]]), "which head reads what: of 4 heads and 2 KV heads, heads 0 and 1 "
                                                    "share KV head 0, and heads 2 and 3 share KV head 1.")
    for seed, (heads, kv_heads) in enumerate([(1, 1), (9, 3), (4, 1), (6, 6)]):
        _against_the_whole(answer, seed, heads, kv_heads)


def _against_the_whole(answer: Answer, seed: int, heads: int, kv_heads: int) -> None:
    """Token by token, beside PyTorch's attention over the whole text, which is computed anew for each row."""
    tokens, dim = 5, 4
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, tokens, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (key, value))
    whole = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
    cache = answer.make("cache", kv_heads, dim)
    for t in range(tokens):
        cache.call("append", key[:, t], value[:, t]).works()
        cache.call("attend", query[:, t]).gives(
            whole[:, t], f"token {t} of a random text, with {heads} heads and {kv_heads} KV heads. The expected row is "
                         "that of attention over the whole text.")


class TinyModel:
    """One layer of attention with random weights, to try a cache with. It writes nonsense, always the same.

    Attributes:
        asked: how often a token went through it.
    """

    num_heads, num_kv_heads, head_dim, vocabulary = 4, 2, 8, 50

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self._embed = torch.randn(2, self.vocabulary, 32, generator=generator)  # of tokens, of positions
        self._qkv = torch.randn(32, rows, generator=generator) / 8
        self.asked = 0

    def qkv(self, token: int, position: int) -> tuple[torch.Tensor, ...]:
        """Query [4, 8], key [2, 8] and value [2, 8] of one token."""
        self.asked += 1
        x = self._embed[0, token] + self._embed[1, position]
        return (x @ self._qkv).view(-1, self.head_dim).split([self.num_heads, self.num_kv_heads, self.num_kv_heads])

    def next_token(self, attended: torch.Tensor) -> int:
        """The likeliest token after the one whose attention this is."""
        return int((self._embed[0] @ attended.flatten()).argmax())
