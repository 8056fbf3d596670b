"""The capacity card: how many bytes a token leaves behind, how many blocks that makes, and whether a model fits."""

from __future__ import annotations

from tutorial_engine.checks import Answer, check

GIB = 2**30


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Bytes of K and V that one token leaves in the cache."""
    return 2 * layers * kv_heads * head_dim * bytes_per_number


def num_blocks(cache_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Whole blocks that fit into the cache."""
    return cache_bytes // (bytes_per_token * block_size)


def fits(weights: int, bytes_per_token: int, tokens: int, gib: int) -> bool:
    """Whether weights of 2 bytes each and the K and V of `tokens` tokens fit into 92 % of `gib` GiB."""
    return 2 * weights + tokens * bytes_per_token <= 0.92 * gib * GIB


@check(kv_bytes_per_token)
def check_kv_bytes_per_token(answer: Answer) -> None:
    """One formula tells what a token of any model costs, before anybody has started it."""
    answer(1, 1, 1, 2).gives(4, "the smallest model there is: one layer, one head, vectors of one number, which has 2 "
                                "bytes. Which vectors does a token leave there?")
    answer(3, 1, 1, 2).gives(12, "the layers: each of them keeps its own K and V.")
    answer(3, 5, 1, 2).gives(60, "the KV heads: each of them has vectors of its own.")
    answer(3, 5, 7, 2).gives(420, "head_dim: it says how many numbers a vector has.")
    answer(3, 5, 7, 4).gives(840, "the size of a number: bfloat16 has 2 bytes and float32 has 4. That is why "
                                  "bytes_per_number is an argument.")
    answer(30, 3, 64, 4).gives(46_080, "SmolLM2-135M, the course's model. The lesson's card shows this number.")
    answer(32, 8, 128, 2).gives(131_072, "Llama 3.1 8B in bfloat16.")


@check(num_blocks)
def check_num_blocks(answer: Answer) -> None:
    """The pool that you work out is the one that the engine prints when it starts."""
    answer(3_200, 10, 16).gives(20, "one block: it has room for block_size tokens, each of bytes_per_token bytes.")
    answer(3_199, 10, 16).gives(19, "what is left over at the end. A block that is one byte short is no block.")
    answer(159, 10, 16).gives(0, "a cache that is smaller than one block.")
    answer(3_200, 10, 1).gives(320, "block_size: here a block holds a single token.")
    answer(GIB, 46_080, 16).gives(1_456, "the first engine of the lesson: 1 GiB, and 46,080 bytes a token.")
    answer(2**62, 1, 1).gives(2**62, "large numbers: / makes a float, which keeps 15 digits or so. // keeps them all.")


@check(fits)
def check_fits(answer: Answer) -> None:
    """You can tell whether a model fits before you rent the GPU."""
    llama = {"weights": 8_030_261_248, "bytes_per_token": 131_072}
    answer(1_000, 100, 10, gib=1).gives(True, "a model of 2,000 bytes. Nearly everything fits.")
    answer(**llama, tokens=0, gib=12).gives(False, "the weights alone: 8 billion numbers of 2 bytes each make 16 GB.")
    answer(**llama, tokens=8_192, gib=24).gives(True, "Llama 3.1 8B on 24 GiB: 15.0 GiB of weights, 1 GiB of K and V.")
    answer(**llama, tokens=131_072, gib=24).gives(False, "K and V: 131,072 tokens of 131,072 bytes each make 16 GiB "
                                                         "beside the weights.")
    answer(**llama, tokens=8_192, gib=16).gives(False, "the share: 15.96 GiB are needed, and of 16 GiB only 92 % may "
                                                       "be used, which is 14.72.")
    answer(weights=0, bytes_per_token=GIB, tokens=23, gib=24).gives(
        False, "the share: 23 of 24 GiB is 95.8 %, and only 92 % may be used.")
    answer(weights=0, bytes_per_token=GIB, tokens=22, gib=24).gives(
        True, "the share: 22 of 24 GiB is 91.7 %, which is allowed. Is a GiB 2**30 bytes in your code?")
