# %% [markdown]
# # The KV cache
#
# You will be able to
#
# - say what K and V are, why an engine keeps them, and why it does not keep Q
# - predict how many tokens a model computes with a cache and without one
# - work out from a model's `config.json` what a token costs in memory, and how many fit on a GPU
# - say when kept K and V may be used again, and when they must be thrown away
#
# Needs: a CPU and 3 GB of free memory, no GPU. About 45 minutes to read and do; all cells together run in less than one
# minute. You should know what a token is, and have seen
# [Getting started](../3_running_locally/05_getting_started.ipynb).

# %% tags=["parameters"]
NUM_TOKENS = 12  # tokens that are written in experiment 1; fast: 4
LONG_CONTEXT = 512  # tokens of the long text in experiment 4; fast: 64

# %%
import random

import matplotlib.pyplot as plt
import torch

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.notebook import expect_error, observe, predict, show_source
from tutorial_engine.trace import Trace

# %% [markdown]
# ## The problem
#
# A language model writes one token at a time, and each new token depends on **all** tokens before it. The most
# straightforward way to write is therefore this: run the whole text through the model, take the likeliest next token,
# put it at the end, and run the whole text again.
#
# Let us do exactly that. (`enable_prefix_caching=False` is important on this page: with it on, the engine would keep
# work from one call to the next, and that is what we want to do without. The other arguments, such as the 256 MiB for
# the cache, make every machine print the same numbers.)

# %%
llm = LLM(dtype="float32", kv_cache_memory_bytes=2**28, max_model_len=4096, enable_prefix_caching=False,
          generation_config="vllm")
tokenizer = llm.get_tokenizer()
one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def next_token(text):
    """A list of token ids goes in, all of them are computed, and the likeliest next one comes out."""
    output = llm.generate({"prompt_token_ids": text}, one_token, use_tqdm=False)[0]
    return output.outputs[0].token_ids[0]


prompt = tokenizer.encode("Large language models write one word after the other. "
                          "To write the next word, the model has to look at")
text = list(prompt)
for _ in range(4):
    token = next_token(text)
    print(f"{len(text)} tokens in, one out: {tokenizer.decode([token])!r}")
    text.append(token)

# %% [markdown]
# It works, and it is absurd. To write the second token, the model computed everything that it had just computed for
# the first one, plus one token. For an answer of 1,000 tokens it would read the prompt 1,000 times.
#
# So what could it keep, what does that save, and what does keeping cost? Those are the three questions of this page.
# The answer to the last one decides how many people a GPU can serve at the same time.

# %% [markdown]
# ## The idea
#
# Imagine a reader with a **card index**. For each word that she comes to, she files one card. On its *tab* stands what
# the word is about, so that it can be found. On the card itself stands what there is to know about it, after all that
# she has read so far. Then she writes a *question* on a slip of paper: what do I need, to understand this place? She
# compares it with all the tabs, takes what she needs from the cards, most from those that fit best, and throws the slip
# away. She never reads the old pages again.
#
# | the card index | the model |
# |---|---|
# | the tab of a card | the **key** of a token, a vector |
# | what is on the card | its **value**, another vector |
# | the slip with the question | its **query**: used once, then gone |
# | each room of the library has cards of its own | each **layer** has K and V of its own |
# | a room has several boxes of cards | a layer has several **KV heads** |
# | several readers share a box | **grouped-query attention**: several query heads read one KV head |
# | a card is never rewritten | K and V depend on a token and those *before* it; later ones cannot change them |
# | the index grows with every word | memory: so many bytes for each token |
# | give the index away, keep the book | *preemption*: forget K and V, compute them again from the text |
#
# A model is a stack of *layers*; each works on what the one below made of the text. A layer asks several questions at
# once, each with vectors of its own. Each is called a *head*, and the length of its vectors is `head_dim`, or *d*. As a
# formula, this is attention in one head, for the newest token. *q·k* is a dot product, large where the tab fits the
# question; softmax makes of these numbers weights that are positive and add up to 1:
#
# ```
# weights  w1 ... wn  =  softmax( q·k1 / √d, ..., q·kn / √d )
# result               =  w1·v1 + ... + wn·vn
# ```
#
# **Why is Q not kept?** Because nobody will ever ask an old question again. The query of token 5 computes the result of
# token 5, and that has happened. Later tokens bring questions of their own, and look at the K and V of token 5.
#
# The **KV cache** is the card index: the K and V of all tokens so far, in all layers.

# %% [markdown]
# ## Under the hood
#
# This is the place where a layer of our engine makes them, in [decoder.py](../../tutorial_engine/models/decoder.py).
# The lines are read from the source that is running:

# %%
from tutorial_engine.models.decoder import DecoderLayer

show_source(DecoderLayer.forward,
            only=("qkv_proj(", "qkv.split", "apply_rope", "kv_cache.write", "paged_attention("))

# %% [markdown]
# Read it like this. One matrix product makes query, key and value, *for the tokens of this step only*. `apply_rope`
# turns query and key by an angle that depends on the token's position. Then K and V are **written** into the cache, and
# attention **reads** everything that is there: what this step wrote, and what all earlier steps did.
#
# Two things to remember for experiment 2. Attention is the only line in which tokens meet; everything else in a layer
# treats each token by itself. And the position is part of the key: a key that was made for position 5 does not fit
# position 6.
#
# What is a cache made of? Of two tensors for each layer. They exist from the start, full of zeros; a token gets a place
# in them when it is computed. Places are given out in *blocks* of 16 tokens:

# %%
cache = llm.llm_engine.model_runner.kv_cache
print("layers:", len(cache.key), len(cache.value))
print("key[0]: ", list(cache.key[0].shape), " = blocks, KV heads, tokens in a block, numbers in a vector")
print(f"{cache.num_bytes:,} bytes in all, room for {cache.num_blocks * cache.block_size:,} tokens")

# %% [markdown]
# And one line of arithmetic tells what a token costs, in [kv_cache.py](../../tutorial_engine/kv_cache.py):

# %%
from tutorial_engine.kv_cache import kv_bytes_per_token

show_source(kv_bytes_per_token)
shape = llm.llm_engine.model_runner.model.config
print(f"{shape.num_hidden_layers} layers, {shape.num_key_value_heads} KV heads,",
      f"{shape.head_dim} numbers of 4 bytes: {kv_bytes_per_token(shape, torch.float32):,} bytes a token")

# %% [markdown]
# ## Try it
#
# ### 1. With and without
#
# Write 12 tokens after our prompt of 22. Once the engine's way: one request, whose K and V are kept. Once the absurd
# way: 12 requests, each with the whole text so far. **How many tokens go through the model, in all steps together?**
# And is the text the same?
#
# Write your numbers in place of `None`. A wrong guess teaches more than none. (A hint: the last token that is written
# never goes in.)

# %% tags=["predict"]
guess = predict(tokens_with_cache=None, tokens_without=None, same_text=None)

# %% tags=["experiment", "objective-1", "objective-2", "R174"]
greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
with Trace(llm) as kept:
    answer = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
text = list(prompt)
with Trace(llm) as thrown_away:
    for _ in range(NUM_TOKENS):
        text.append(next_token(text))
observe(guess, tokens_with_cache=kept.tokens_computed, tokens_without=thrown_away.tokens_computed,
        same_text=text[len(prompt):] == list(answer.token_ids))

# %% [markdown]
# The same words, for a fraction of the work. Here is where the rest went. Each row is a step, each column a place in
# the text. Blue was computed in that step; grey was in the cache and only read:

# %%
def draw_steps(ax, trace, title):
    for y, record in enumerate(trace):
        ((first, num_tokens),) = record.scheduled.values()
        ax.barh(y, first, color="#d0d0d0", edgecolor="white", height=0.9)
        ax.barh(y, num_tokens, left=first, color="#74c3ec", edgecolor="white", height=0.9)
    ax.set(title=f"{title}: {trace.tokens_computed:,} tokens computed", xlabel="place in the text", ylabel="step")
    ax.invert_yaxis()


fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), sharex=True, layout="constrained")
draw_steps(left, thrown_away, "without")
draw_steps(right, kept, "with the cache")

# %% [markdown]
# Without a cache the work is a trapezoid that grows with the *square* of the length. With it, it is the prompt in one
# step (*prefill*), and then one token a step (*decode*). For an answer of 1,000 tokens the difference is already

# %%
n, p = 1000, len(prompt)
with_cache, without = p + n - 1, sum(range(p, p + n))
print(f"{with_cache:,} tokens against {without:,}: {without / with_cache:.0f} times less work")

# %% [markdown]
# Is it also so many times *faster*? Measure (your machine's numbers, compared with nothing):

# %% tags=["timing", "nbval-ignore-output"]
times_fewer = thrown_away.tokens_computed / kept.tokens_computed
times_faster = thrown_away.seconds / kept.seconds
print(f"{times_fewer:.0f} times fewer tokens, {times_faster:.1f} times less time")

# %% [markdown]
# Much less than that. Without a cache a step has 28 tokens on average (330 / 12). A step with one is not 28 times
# cheaper: both read all weights of the model, half a gigabyte, and for few tokens that is most of the price. [Prefill
# and decode](02_prefill_and_decode.ipynb) is about this. With longer texts the gap in time grows too.
#
# **What this proves.** The cache changes the *work*, never the *words*. It is no approximation. (In half precision,
# sums taken in another order can tip a close decision. That is rounding, with or without a cache.)
#
# **Now change one thing:** set `NUM_TOKENS = 24` at the top. Predict both counts before you run.
#
# <details><summary>What happens</summary>
#
# 22 + 23 = 45 with the cache, 22 + 23 + ... + 45 = 804 without: a third more, and nearly two and a half times as much.
# </details>

# %% [markdown]
# ### 2. Is a card really never rewritten?
#
# All of this rests on one claim: the K and V of a token stay what they are, whatever comes after. Do not believe it,
# look into the cache. The next function runs a text through the model and fetches its keys from the cache. (The *block
# table* of a request says in which blocks they are. The request is over by then, but nobody has written over its blocks
# yet. V behaves as K does, so we look at K alone.)

# %%
def keys_of(text):
    """The keys of a text as they lie in the cache: [layers, tokens, KV heads, head_dim]."""
    with Trace(llm) as trace:
        next_token(text)
    (blocks,) = trace.records[-1].tables.values()
    keys = torch.stack([key[blocks] for key in cache.key])  # [layers, blocks, KV heads, 16, head_dim]
    return keys.transpose(2, 3).flatten(1, 2)[:, :len(text)]


def changed(a, b):
    """In each layer, how many of the tokens have another key."""
    return ((a - b).abs().amax(dim=(2, 3)) > 1e-3).sum(dim=1).tolist()


print("keys of the prompt:", list(keys_of(prompt).shape))

# %% [markdown]
# **Predict.** The prompt has 22 tokens.
#
# - Three words are *added at its end*. How many of the 22 old keys change in the last layer?
# - Its fourth token is *replaced* (place 3, counted from 0). How many of the 22 keys change in the first layer?
# - And in the last layer?

# %% tags=["predict"]
guess = predict(added_last_layer=None, replaced_first_layer=None, replaced_last_layer=None)

# %% tags=["experiment", "objective-1", "objective-4"]
before = keys_of(prompt)
longer = keys_of(prompt + tokenizer.encode(" three more words"))[:, :len(prompt)]
other = keys_of([*prompt[:3], tokenizer.encode(" frog")[0], *prompt[4:]])
observe(guess, added_last_layer=changed(before, longer)[-1], replaced_first_layer=changed(before, other)[0],
        replaced_last_layer=changed(before, other)[-1])

# %%
print("replaced, layer by layer:", changed(before, other))

# %% [markdown]
# *Added at the end*: nothing changes. In such a model a token may look back only (*causal* attention), so what follows
# cannot reach it. That is the licence for the cache. Models that look in both directions, as many embedding models do,
# have no KV cache.
#
# *Replaced*: in the first layer only the token itself, because there a key is made from the word and its place alone.
# From the second layer on, everything after it: those tokens have *looked at* token 3 in the layer below, and carry
# something of it in them. The tokens in front of it stay the same, in all layers.
#
# **What this proves.** K and V of a token belong to the **whole text up to it**, not to the word. They may be used
# again exactly where everything before is the same, token for token. That is why engines share beginnings (*prefix
# caching*) and not middles.
#
# **Now change one thing:** put a token *in front*: `changed(before, keys_of([prompt[0], *prompt])[:, 1:])`. How many
# change in the first layer?
#
# <details><summary>What happens</summary>
#
# All 22, already in the first layer. The words are the same, but each has moved, and the position is part of the key.
# </details>

# %% [markdown]
# ### 3. What does a token cost?
#
# The formula from above for other models. Their shapes are in their `config.json`:

# %%
models = {  # layers, attention heads, KV heads, head_dim
    "SmolLM2-135M": (30, 9, 3, 64), "Qwen2.5-0.5B": (24, 14, 2, 64), "Qwen3-0.6B": (28, 16, 8, 128),
    "Llama-3.1-8B": (32, 32, 8, 128), "Llama-3.1-70B": (80, 64, 8, 128),
}

# %% [markdown]
# **Predict**, with 2 bytes a number (float16 or bfloat16): how many KiB (1,024 bytes) does a token cost in
# Qwen2.5-0.5B, how many in Qwen3-0.6B, which is hardly larger, and how many in the 8B model?

# %% tags=["predict"]
guess = predict(KiB_qwen25_half_billion=None, KiB_qwen3_half_billion=None, KiB_llama_8_billion=None)

# %% tags=["experiment", "objective-3"]
def bytes_per_token(layers, kv_heads, head_dim, bytes_per_number=2):
    return 2 * layers * kv_heads * head_dim * bytes_per_number


cost = {name: bytes_per_token(layers, kv_heads, head_dim)
        for name, (layers, _, kv_heads, head_dim) in models.items()}
observe(guess, KiB_qwen25_half_billion=cost["Qwen2.5-0.5B"] / 1024,
        KiB_qwen3_half_billion=cost["Qwen3-0.6B"] / 1024,
        KiB_llama_8_billion=cost["Llama-3.1-8B"] / 1024)

# %%
print(f"{'':14}{'a token':>12}{'8,192 tokens':>14}{'with all heads':>16}{'one KV head':>13}")
for name, (layers, heads, _, head_dim) in models.items():
    every, one = (bytes_per_token(layers, n, head_dim) for n in (heads, 1))
    print(f"{name:14}{cost[name] / 2**10:8.1f} KiB{cost[name] * 8192 / 2**30:10.2f} GiB"
          f"{every / 2**10:12.1f} KiB{one / 2**10:9.1f} KiB")

# %% [markdown]
# Two models of about the same size, and the cache of one is nine times that of the other. **The size of a model says
# little about its cache.** Qwen3-0.6B costs nearly as much for each token as the 8B model.
#
# The last two columns show why few new models keep K and V for each head. With all heads (*multi-head attention*,
# MHA, as in 2017) a token of the 70B model would cost 2.5 MiB; with 8 KV heads (*grouped-query attention*, GQA, 2023)
# it is an eighth. A single KV head (*multi-query attention*, MQA, 2019) is cheaper still, and costs quality.
#
# **The same arithmetic, against a published table.** The PagedAttention paper (2023) asks how many tokens fit beside
# the weights of OPT models, on the GPUs that it uses. Those models are MHA, with 2-byte numbers:

# %%
opt = {"13B": (40, 5120, 12, "15.7K"), "66B": (64, 9216, 21, "9.7K"), "175B": (96, 12288, 264, "60.1K")}
print("model   memory for KV   tokens: paper      ours")
for name, (layers, hidden, gib, paper) in opt.items():
    tokens = gib * 2**30 / bytes_per_token(layers, 1, hidden)  # all heads together: hidden
    print(f"{name:8}{gib:>7} GB{paper:>19}{tokens / 1000:>9.1f}K")

# %% [markdown]
# Two of three to the last digit. For 66B the paper has 1.5 % more; its "21 GB" is a rounded number. (And its GB are
# GiB, or the first row would be 14.6K.)
#
# **Now change one thing:** give Llama-3.1-8B as many KV heads as heads, 32. What would 8,192 tokens cost?
#
# <details><summary>What happens</summary>
#
# 4 GiB instead of 1: one conversation would take a quarter of the memory of the weights.
# </details>

# %% [markdown]
# ### 4. Watch it grow
#
# Three requests at once. Their prompts have 22, 4 and 14 tokens; they want 6, 16 and 20 tokens. A block has 16 places,
# and a request takes a new one when its last is full.
#
# **Predict.** How many blocks are taken in the first step? At most, in any step? When all is done?

# %% tags=["predict"]
guess = predict(blocks_in_the_first_step=None, most_blocks_at_once=None, blocks_afterwards=None)

# %% tags=["experiment", "objective-3"]
from tutorial_engine.viz import memory_map, watch

prompts = [prompt, tokenizer.encode("Once upon a time"), tokenizer.encode("1, 2, 3, 4, 5,")]
each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 16, 20)]
free_before = llm.llm_engine.num_gpu_blocks - 1  # block 0 is never given out
with watch(llm, memory_map) as trace:
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], each, use_tqdm=False)

# %%
held = [record.blocks_held for record in trace]
observe(guess, blocks_in_the_first_step=held[0], most_blocks_at_once=max(held),
        blocks_afterwards=free_before - trace.records[-1].num_free)

# %% [markdown]
# **How to read it.** Below, a row is a block, a column is a step, and a bar says which request holds the block,
# counted from 0. Above is the sum: how many places hold a token (grey), and how many are taken and still empty. Move
# the slider or hover over a bar:
#
# - Request 0 leaves after 6 steps, and both of its blocks are free at once.
# - Request 1 takes its second block in step 13 (steps count from 0 too), when its first is full. It is a block that
#   request 0 has left.
# - Request 2 takes a third block in its very last step, for a single token. The other 15 places stay empty.
#
# **What this proves.** The cache grows with every token of *every* request, while the weights stay as they are. So
# memory, and not only speed, limits how many can be served together. Nobody reserves anything for an answer that may
# never come; why that was a discovery is the subject of the notebook on PagedAttention.
#
# **Now change one thing:** let request 1 write 60 tokens. In which step does it take its third block?
#
# <details><summary>What happens</summary>
#
# In step 29. After step *k* it holds 4 + *k* tokens, and the 33rd needs a third block.
# </details>

# %% [markdown]
# **And in time?** Each step reads all weights once, and the K and V of everybody aboard. For one request alone, how
# many percent more bytes does a step read after 512 tokens than at the start? And after how many tokens does it read
# as much cache as weights? (The model has 134,515,008 weights of 4 bytes. A token costs 46,080 bytes.)

# %% tags=["predict"]
guess = predict(percent_more_bytes_to_read=None, tokens_until_cache_equals_weights=None)

# %% tags=["experiment", "objective-3"]
weight_bytes = 4 * 134_515_008  # parameters of SmolLM2-135M in float32
per_token = kv_bytes_per_token(shape, torch.float32)
observe(guess, percent_more_bytes_to_read=round(100 * LONG_CONTEXT * per_token / weight_bytes),
        tokens_until_cache_equals_weights=weight_bytes // per_token)

# %% tags=["timing", "nbval-ignore-output"]
def decode_seconds(context):
    """Seconds of a decode step after so many tokens. The fastest of five: others use the machine too."""
    ids = random.Random(0).choices(range(1000, 20_000), k=context)
    with Trace(llm) as trace:
        llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    return min(record.seconds for record in trace.records[1:])


short, long = decode_seconds(16), decode_seconds(LONG_CONTEXT)
print(f"a decode step after {LONG_CONTEXT:,} tokens takes {long / short:.1f} times as long as one after 16")

# %% [markdown]
# A step gets slower as the text grows. On a CPU it is usually more than the bytes alone say, because our PyTorch
# attention first copies the blocks together and then reads the copy. (A GPU kernel reads them where they are.) From
# some 11,700 tokens on, this model's steps read more cache than weights. One request cannot get so long (the model ends
# at 8,192), but a few together can.

# %% [markdown]
# ## Dial it in
#
# | knob | default | what it does to the cache |
# |---|---|---|
# | `gpu_memory_utilization` | 0.92 | share of the GPU to use; the cache gets what weights and work leave |
# | `kv_cache_memory_bytes` | derived | its size in bytes, as on this page |
# | `dtype` | the model's | 2-byte numbers halve it, and the weights |
# | `kv_cache_dtype` | `"auto"`: as `dtype` | in vLLM, `"fp8"` halves the cache alone. This engine has `"auto"` only |
# | `max_model_len` | the model's | the longest request to accept; reserves nothing |
# | `block_size` | 16 | the grain in which places are given out |
#
# **Predict.** This page's engine has 256 MiB and float32. How many tokens fit, and how many would with bfloat16?

# %% tags=["predict"]
guess = predict(tokens_float32=None, tokens_bfloat16=None)

# %% tags=["experiment", "objective-3"]
def tokens_that_fit(dtype, block_size=16):
    return 2**28 // (kv_bytes_per_token(shape, dtype) * block_size) * block_size  # whole blocks only


print("as this engine has it:", tokens_that_fit(torch.float32) == cache.num_blocks * cache.block_size)
observe(guess, tokens_float32=tokens_that_fit(torch.float32), tokens_bfloat16=tokens_that_fit(torch.bfloat16))

# %% [markdown]
# A knob that an engine cannot turn must say so. Ours does:

# %%
with expect_error(ValueError):
    LLM(kv_cache_dtype="fp8")

# %% [markdown]
# ## Where it bites you
#
# **1. "The model fits, so it will start."** The cache must have room for at least one request of `max_model_len`
# tokens, and models of today declare very long ones. Ours declares 8,192:

# %%
with expect_error(ValueError):
    LLM(dtype="float32", kv_cache_memory_bytes=2**28)

# %% [markdown]
# This is a classic start-up error of vLLM, in nearly these words. Read it to the end: it names the length that would
# fit. (5,808 and not 5,824, because block 0 is never given out.) Lower `max_model_len` to what your users need, before
# you rent a larger GPU.
#
# **2. "I took the 4-bit model, so I have four times the room."** Four-bit *weights* leave the cache as it was. What you
# gain is the memory that the weights no longer need.
#
# **3. "A small model has a small cache."** Experiment 3. Look at layers, KV heads and `head_dim`, not at the name.
#
# **4. "I only changed the date in the first line."** Then everything after it must be computed again (experiment 2).
# What changes often belongs at the end of a prompt.
#
# **5. "The cache makes the prompt faster."** Not the first time. Every prompt token must go through the model once; the
# cache only keeps it from happening twice.
#
# **6. "The formula holds for every model."** For models with plain attention, yes. Some keep something else: DeepSeek's
# *latent* attention (MLA) keeps one vector of 512 + 64 numbers a layer instead of K and V for each head; layers with a
# *sliding window* keep the last hundreds or thousands of tokens only; Mamba layers keep a state that does not grow at
# all. vLLM handles each kind by rules of its own.

# %% [markdown]
# ## In production
#
# Before you rent a GPU, do this sum. Llama-3.1-8B has 8,030,261,248 parameters of 2 bytes, and a token costs 131,072
# bytes. How many conversations of 8,192 tokens fit? (It is an upper bound. vLLM also sets memory aside for the largest
# step, which it measures at start-up.)

# %%
weights, per_token = 2 * 8_030_261_248, bytes_per_token(32, 8, 128)
print("GPU memory   left for the cache    tokens   of 8,192 each   cache read per step / weights")
for gib in (16, 24, 80):
    room = int(max(0.92 * gib * 2**30 - weights, 0))
    print(f"{gib:6} GiB{room / 2**30:17.1f} GiB{room // per_token:10,}{room // per_token // 8192:16}"
          f"{room / weights:26.1f}")

# %% [markdown]
# On 16 GiB nothing fits: 92 % of it is less than the weights. The 80 GiB card has a bit more than three times the
# memory of the 24 GiB one, and room for eight times as many conversations: the weights are paid once, the rest is
# cache. Look at the last column too. With its pool full, each step there reads four times as much cache as weights. In
# long conversations the cache sets the pace, and not the model. That is why GQA, FP8 caches and latent attention exist.
#
# What to watch on a running vLLM:
#
# * the start-up log: `GPU KV cache size: ... tokens` and `Maximum concurrency for ... tokens per request: ...x`
# * `vllm:kv_cache_usage_perc` on `/metrics`: near 1 for long, and requests wait or are preempted
# * `vllm:num_preemptions_total`: how often K and V were given up, to be computed again later
#
# **Why compute again, and not move the cards away?** The text is tiny, its cards are not: 8,192 token ids of 4 bytes
# are 32 KiB, the K and V of that text in the 8B model 1 GiB. The PagedAttention paper tried both ways, and found them
# about equal with blocks of 16 to 64 tokens. When vLLM must preempt, it computes again: that needs no second memory,
# and if the pool is large enough it is rare. (To keep K and V outside the GPU pays when they are wanted again *later*,
# by the next turn of a conversation. That is what vLLM's connectors are for.)
#
# ### Exercise: a KV cache of your own (25 minutes)
#
# Read the cost of a token from any `config.json`, and write the cache itself, in
# [a notebook of its own](../../exercises/1_core_concepts/01_the_kv_cache.ipynb). A check looks at your code and says
# what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● What is in the KV cache, and for which tokens?</summary>
#
# One key and one value vector for each token so far, prompt and answer, in each layer and for each KV head.
# </details>
#
# <details><summary>2. ● What is a token's cost in bytes, as a formula?</summary>
#
# 2 × layers × KV heads × head_dim × bytes a number. The 2 is for K and V. Not the attention heads, and not the hidden
# size.
# </details>
#
# <details><summary>3. ●● Why K and V, and not Q?</summary>
#
# Row *t* of attention needs the query of token *t* and the keys and values of all tokens up to *t*. Later rows need the
# K and V of *t* again, and never its query.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● A prompt of 100 tokens, an answer of 50. How many tokens are computed with a cache, how many
# without?</summary>
#
# 100 + 49 = 149. Without: 100 + 101 + ... + 149 = 6,225.
# </details>
#
# <details><summary>5. ●● What grows with the number of requests in the batch, and what does not?</summary>
#
# The cache grows, each request has its own (but for shared beginnings), and so does what a step reads of it. The
# weights do not grow, and are read once for all of them.
# </details>
#
# <details><summary>6. ●● Two prompts agree except for the first word. What can they share?</summary>
#
# Nothing. From the second layer on, every token carries something of the first one. (In the first layer the keys would
# agree, if the positions did. That is of no use alone.)
# </details>
#
# <details><summary>7. ●●● 32 heads, and 32, 8 or 1 KV heads: how do the caches compare, and which is best?</summary>
#
# 32 : 8 : 1. Fewer KV heads mean more requests in the same memory and less to read in each step; one alone costs
# quality, and cannot be split between GPUs either: each would need a copy. 8 is common today.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● When would you rather compute K and V again than keep them?</summary>
#
# When somebody else needs the place now, and the text is short or will not be continued soon. It costs one prefill. To
# keep is better when many requests begin with the same text, or when the text is long and goes on at once.
# </details>
#
# <details><summary>9. ●●● Decode steps have become slower during the day, with the same number of requests. What do you
# look at?</summary>
#
# At the lengths. The weights that a step reads are the same, the cache is not: conversations that have grown from 500
# to 8,000 tokens read sixteen times as much K and V.
# </details>
#
# <details><summary>10. ●●●● An 8B model on a 24 GiB card serves seven conversations of 8,192 tokens. You need fourteen.
# What are your choices?</summary>
#
# Half the bytes a token: an FP8 cache, about 14 at once, after a check of the quality. Weights in 8 bits: 7.5 GiB more
# room, again about twice as many. Are they really that long? Most of the time not all are, and blocks are given out as
# texts grow, so 14 may run with a preemption now and then; measure it. Or a model with fewer layers or KV heads, or a
# larger card. Lowering `max_model_len` refuses long requests; it makes no place.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# bytes per token  = 2 × layers × KV heads × head_dim × bytes a number
# tokens that fit  = (0.92 × GPU memory − weights − working memory) / bytes per token
# tokens computed, prompt p, answer n:  with a cache  p + n − 1
#                                       without       p + (p+1) + ... + (p+n−1)
# read in a decode step = weights + bytes per token × tokens of all requests in the batch
# K and V can be used again where everything before is the same: same tokens, same places
# ```
#
# | model | a token, 2-byte numbers | 8,192 tokens |
# |---|---|---|
# | SmolLM2-135M | 22.5 KiB | 0.18 GiB |
# | Qwen2.5-0.5B | 12 KiB | 0.09 GiB |
# | Qwen3-0.6B | 112 KiB | 0.88 GiB |
# | Llama-3.1-8B | 128 KiB | 1 GiB |
# | Llama-3.1-70B | 320 KiB | 2.5 GiB |
#
# **Sources.** Table with the tokens that fit: Kwon et al., *Efficient Memory Management for Large Language Model
# Serving with PagedAttention*, SOSP 2023, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180), Table 1; computing
# again after a preemption: sections 4.5 and 7.3. Attention: Vaswani et al., *Attention Is All You Need*, 2017, [arXiv
# 1706.03762](https://arxiv.org/abs/1706.03762). One KV head: Shazeer, 2019, [arXiv
# 1911.02150](https://arxiv.org/abs/1911.02150); groups: Ainslie et al., 2023, [arXiv
# 2305.13245](https://arxiv.org/abs/2305.13245), who also report what they cost in quality. Positions in the key: Su et
# al., *RoFormer*, 2021, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864). Latent attention: DeepSeek-AI,
# *DeepSeek-V2*, 2024, [arXiv 2405.04434](https://arxiv.org/abs/2405.04434). What a decode step reads: Pope et al.,
# *Efficiently Scaling Transformer Inference*, 2022, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102). FP8 caches:
# vLLM documentation, [Quantized KV Cache](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/). The
# 0.92 is the default of vLLM 0.33, read in its source. Shapes: the `config.json` of each model on Hugging Face.
#
# **Next** in the course: [Prefill and decode](02_prefill_and_decode.ipynb), on why a step with one token costs nearly
# as much as a step with thirty.
