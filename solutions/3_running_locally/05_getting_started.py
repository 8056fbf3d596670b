# %% [markdown]
# # Exercise: the capacity card
#
# You will be able to
#
# - work out what one token of any model costs in memory
# - say how many blocks a cache has, before the engine prints it
# - decide whether a model fits on a GPU that you have not rented yet
#
# 15 minutes · difficulty ●○○ · after [Getting started](../../notebooks/3_running_locally/05_getting_started.ipynb) ·
# needs no GPU and no model

# %%
from tutorial_engine.exercises import getting_started as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. One token
#
# When a model reads a token, every layer keeps two vectors of it for each KV head: a **K** and a **V**. A vector has
# `head_dim` numbers, and a number has `bytes_per_number` bytes. How many bytes does one token leave behind in the
# whole model?

# %% tags=["exercise", "objective-2"]
def kv_bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    """Bytes of K and V that one token leaves in the cache, an int."""
    # BEGIN SOLUTION
    return 2 * layers * kv_heads * head_dim * bytes_per_number  # 2: one K and one V
    # END SOLUTION todo: Return the bytes of K and V of one token, in all layers.


# %% tags=["check"]
one_token = course.check_kv_bytes_per_token(kv_bytes_per_token)
one_token

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Take the smallest case: one layer, one KV head, `head_dim` 1, 2 bytes a number. Which vectors are there, and how many
# bytes are they together?
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Now double one argument after the other. What does each do to the bytes?
# </details>
#
# <details><summary>Hint 3: nearly the answer</summary>
#
# A product of five factors: the four arguments, and one that is the same for every model.
# </details>

# %% [markdown] tags=["solution"]
# Every factor doubles the bytes when it doubles, so the answer is a product. The 2 is the one factor that no argument
# gives: K *and* V.

# %% [markdown]
# ## 2. The pool
#
# The engine cuts its cache into blocks of `block_size` tokens. How many whole blocks come out of `cache_bytes` bytes?

# %% tags=["exercise", "objective-2"]
def num_blocks(cache_bytes, bytes_per_token, block_size):
    """Whole blocks of block_size tokens that fit into cache_bytes bytes, an int."""
    # BEGIN SOLUTION
    return cache_bytes // (bytes_per_token * block_size)
    # END SOLUTION todo: Return the number of whole blocks.


# %% tags=["check"]
pool = course.check_num_blocks(num_blocks)
pool

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# How many bytes does one block take?
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Python has two divisions. `/` gives a fraction, `//` only whole pieces.
# </details>

# %% [markdown] tags=["solution"]
# Round down: half a block is of no use to anybody. (Later you will count the blocks that a *request* needs. There you
# round up: a block that is half full is still a whole block.)

# %% [markdown]
# ## 3. Does it fit?
#
# By default, vLLM gives 92 % of a GPU's memory to weights and cache together (`gpu_memory_utilization`). Does a model
# with so many `weights` of 2 bytes each fit into that, beside the K and V of `tokens` tokens? 1 GiB is `2**30` bytes.

# %% tags=["exercise", "objective-2"]
def fits(weights, bytes_per_token, tokens, gib):
    """True if weights and cache fit into 92 % of a GPU with gib GiB, else False."""
    # BEGIN SOLUTION
    return 2 * weights + tokens * bytes_per_token <= 0.92 * gib * 2**30
    # END SOLUTION todo: Return True if weights and cache fit into 92 % of the memory, else False.


# %% tags=["check"]
decision = course.check_fits(fits)
decision

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Write down the two things that need memory, both in bytes, and add them.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Then write down what is there, in bytes as well: 92 % of `gib` times `2**30`. A comparison, `a <= b`, is already True
# or False.
# </details>

# %% [markdown] tags=["solution"]
# `tokens` is for all requests together. 8,192 tokens are one long request or 32 of 256 tokens each; the memory does not
# care.

# %% [markdown]
# ## See it
#
# Now put your functions to work on four models, in bfloat16 (2 bytes a number), on a GPU with 24 GiB. (A function that
# does not pass yet is replaced by the course's own.)
#
# **Predict.** Which model's token is the most expensive: that of the one with the most weights? Write the name of a
# model in place of `None`.

# %% tags=["predict"]
guess = predict(dearest_token=None)

# %%
per_token, blocks_of, is_enough = one_token.use(), pool.use(), decision.use()

# %% tags=["experiment"]
models = {  # weights, layers, KV heads, head_dim
    "SmolLM2-135M": (134_515_008, 30, 3, 64),
    "Qwen2.5-0.5B": (494_032_768, 24, 2, 64),
    "Llama 3.1 8B": (8_030_261_248, 32, 8, 128),
    "Llama 2 7B": (6_738_415_616, 32, 32, 128),
}
cost = {name: per_token(*shape, 2) for name, (_, *shape) in models.items()}
for name, (weights, *_) in models.items():
    left = int(0.92 * 24 * 2**30) - 2 * weights
    print(f"{name:13} {cost[name]:7,} bytes a token, {blocks_of(left, cost[name], 16):7,} blocks of 16 tokens, "
          f"131,072 tokens fit: {is_enough(weights, cost[name], 131_072, 24)}")
observe(guess, dearest_token=max(cost, key=cost.get))

# %% [markdown]
# **Explain.** The cost of a token depends on layers, KV heads and head_dim, and not on the number of weights. Llama 2
# keeps K and V for each of its 32 heads. Llama 3.1 has 32 query heads too, but groups of four share one K and one V
# (*grouped-query attention*), so its tokens cost a quarter, although it is the larger model.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Forgetting V.** The result is exactly half of the truth, and nothing else looks odd.

# %% tags=["wrong"]
def kv_bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return layers * kv_heads * head_dim * bytes_per_number


course.check_kv_bytes_per_token(kv_bytes_per_token)

# %% [markdown] tags=["solution"]
# **Taking every number for 2 bytes.** Right for bfloat16, which is what most models are served in. This course runs in
# float32.

# %% tags=["wrong"]
def kv_bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return 2 * layers * kv_heads * head_dim * 2


course.check_kv_bytes_per_token(kv_bytes_per_token)

# %% [markdown] tags=["solution"]
# **Rounding up.** It promises a block that is not there.

# %% tags=["wrong"]
def num_blocks(cache_bytes, bytes_per_token, block_size):
    return -(-cache_bytes // (bytes_per_token * block_size))


course.check_num_blocks(num_blocks)

# %% [markdown] tags=["solution"]
# **Dividing with `/`.** The number is right and the kind is not: nobody can make a list of 20.0 blocks.

# %% tags=["wrong"]
def num_blocks(cache_bytes, bytes_per_token, block_size):
    return cache_bytes / (bytes_per_token * block_size)


course.check_num_blocks(num_blocks)

# %% [markdown] tags=["solution"]
# **Counting weights as bytes.** A weight in bfloat16 has two.

# %% tags=["wrong"]
def fits(weights, bytes_per_token, tokens, gib):
    return weights + tokens * bytes_per_token <= 0.92 * gib * 2**30


course.check_fits(fits)

# %% [markdown] tags=["solution"]
# **Using all of the memory.** The rest is for what a step needs while it computes; without it, the engine crashes in
# the middle of the work.

# %% tags=["wrong"]
def fits(weights, bytes_per_token, tokens, gib):
    return 2 * weights + tokens * bytes_per_token <= gib * 2**30


course.check_fits(fits)
