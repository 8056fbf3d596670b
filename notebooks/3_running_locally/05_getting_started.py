# %% [markdown]
# # Getting started: first tokens, and a first number you can defend
#
# **You will be able to**
#
# - run a real language model in a small engine that has vLLM's names, on the machine in front of you;
# - say how much text fits into the engine's memory before you start it;
# - show, in steps rather than seconds, why a list of prompts is faster than a loop;
# - read a block table: who holds which piece of memory, and who shares it.
#
# **Needs** a CPU and 3 GB of free memory; no GPU, no account. 10 minutes to read, about half a minute to run. The very
# first run also fetches the model (93 MB).

# %% tags=["parameters"]
prompts = ["The capital of France is", "1, 2, 3, 4, 5,", "A language model is", "Once upon a time"]
max_tokens = 24  # per prompt, at most
kv_cache_bytes = 2**30  # memory for the KV cache: 1 GiB

# %% [markdown]
# ## The problem
#
# A language model writes one **token** at a time: a word, or a piece of one. To write it, the machine reads all of the
# model's numbers once. Ours is tiny, and that is still half a gigabyte per token. And each token that the model has read
# leaves notes behind (its **K and V** vectors), which every later token of that text needs.
#
# So whoever serves a model has two scarce things to share out:
#
# - **time**: one trip through the weights should serve as many people as possible;
# - **memory**: everybody's notes must fit, and nobody knows beforehand how long an answer will be.
#
# A `for` loop around the model shares out neither. An *engine* does. vLLM is one; `tutorial_engine` is another, small
# enough to read, with the same names and the same rules. This notebook runs it on a real model.

# %% [markdown]
# ## The idea
#
# Two everyday things are enough to picture the whole engine.
#
# | | in everyday life | in the engine |
# |---|---|---|
# | time | A **bus**. One trip costs about the same with one passenger or with eight. It stops at each token: people get on and off at every stop. | a **step**: one trip through the weights; each running **request** gets at most one new token |
# | memory | **Loose sheets** of 16 lines, in one numbered stack. You take the next sheet when yours is full, and keep a list of your sheet numbers. | **blocks** of 16 tokens in one **pool** (the KV cache); the list is the request's **block table** |
#
# Two people whose notes begin with the same text need not copy them: both lists can name the same sheets. Remember that
# for the picture below.

# %% [markdown]
# ## Under the hood
#
# `LLM(...)` does four things when it is built: it finds the model's files, reads the weights into memory, sets memory
# aside for the KV cache, and cuts that into blocks. All of it happens once, before the first prompt. So you can work out
# beforehand how much will fit. You only need the shape of the model:

# %%
from tutorial_engine.models.loader import resolve_model

shape = resolve_model("smollm2-135m-instruct").config
h, ff, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
per_layer = 2 * h * h + 2 * h * kv + 3 * h * ff + 2 * h  # Q and output; K and V; the MLP; two norms
parameters = shape.vocab_size * h + shape.num_hidden_layers * per_layer + h  # embedding, layers, last norm

print(f"{shape.num_hidden_layers} layers, {shape.num_key_value_heads} KV heads, head_dim {shape.head_dim}")
print(f"{parameters:,} weights of 4 bytes: {parameters * 4:,} bytes")

# %% [markdown]
# **Predict.** In each layer, for each KV head, a token leaves one K and one V vector of `head_dim` numbers; a number has
# 4 bytes (float32). How many bytes is that per token? How many blocks of 16 tokens does 1 GiB (1,073,741,824 bytes)
# hold, and how many tokens? How many requests of 1,024 tokens fit at the same time? Write your numbers in place of
# `None`; a rough guess is better than none.

# %% tags=["predict"]
from tutorial_engine.notebook import expect_error, observe, predict

guess = predict(bytes_per_token=None, blocks=None, tokens=None, max_concurrency=None)

# %% [markdown]
# **Run.** Now build the engine. `kv_cache_memory_bytes` fixes the size of the cache, and `max_model_len` is the longest
# request (prompt and answer together) that it accepts.

# %% tags=["experiment"]
from tutorial_engine import LLM, SamplingParams

llm = LLM(dtype="float32", max_model_len=1024, kv_cache_memory_bytes=kv_cache_bytes)
cache = llm.llm_engine.model_runner.kv_cache
measured = {
    "bytes_per_token": cache.num_bytes // (cache.num_blocks * cache.block_size),
    "blocks": cache.num_blocks,
    "tokens": cache.num_blocks * cache.block_size,
    "max_concurrency": cache.num_blocks / (1024 / cache.block_size),
}
observe(guess, **measured)

# %% [markdown]
# **Explain.** The whole card is one formula and two divisions. Here they are; the column "yours" is now the formula's.

# %%
def kv_bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return 2 * layers * kv_heads * head_dim * bytes_per_number  # 2: one K and one V


per_token = kv_bytes_per_token(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim, 4)
blocks = kv_cache_bytes // (per_token * 16)
by_hand = {
    "bytes_per_token": per_token,
    "blocks": blocks,
    "tokens": blocks * 16,
    "max_concurrency": blocks / (1024 / 16),
}
observe(by_hand, **measured)

# %% [markdown]
# vLLM prints the last two lines of this card when it starts, as `KV cache size: 23,296 tokens` and `Maximum concurrency
# for 1,024 tokens per request: 22.75x`. Note what `max_model_len` is *not*: a reservation. A request of 20 tokens takes
# two blocks, not 64. The arithmetic is in [kv_cache.py](../../tutorial_engine/kv_cache.py).

# %% [markdown]
# ## Try it
#
# ### Four prompts
#
# `generate` takes a list of prompts and continues each of them. `temperature=0` always takes the likeliest token, so the
# text below is the same on your machine. Each answer ends at the first full stop, or after 24 tokens.

# %% tags=["demo-output"]
params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=".")
outputs = llm.generate(prompts, params)
for output in outputs:
    print(f"{output.prompt} →{output.outputs[0].text}")

# %% [markdown]
# `outputs` is in the order of the prompts. Each entry has a list `outputs` of its own, because one prompt may have
# several answers: hence the doubled name. Always look at `finish_reason` too: it tells you whether the model was done
# (`stop`) or was cut off (`length`).

# %%
for output in outputs:
    answer = output.outputs[0]
    print(f"{len(output.prompt_token_ids):2} tokens in, {len(answer.token_ids):2} out, finish_reason {answer.finish_reason}")

# %% [markdown]
# ### A chat
#
# This model was trained on conversations, in a format with markers for who speaks. `chat` writes the markers for you.
# The second half of the output is what the model really saw.

# %%
(reply,) = llm.chat([{"role": "user", "content": "Name three fruits."}], SamplingParams(temperature=0, max_tokens=64))
print(reply.outputs[0].text)
print("----- the prompt was:")
print(reply.prompt)

# %% [markdown]
# ### A list or a loop?
#
# **Predict.** Eight prompts get 12 tokens each (`ignore_eos` makes sure that nobody stops early). A step gives each
# running request one token. How many steps does the engine make if you call `generate` once per prompt in a loop? How
# many if you call it once with the list?

# %% tags=["predict"]
guess = predict(loop_steps=None, list_steps=None)

# %% tags=["experiment"]
from tutorial_engine.trace import Trace

eight = [f"Here is a short story about the number {n}:" for n in range(1, 9)]
twelve = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

with Trace(llm) as loop:
    one_by_one = [llm.generate(prompt, twelve, use_tqdm=False)[0] for prompt in eight]
with Trace(llm) as together:
    all_at_once = llm.generate(eight, twelve, use_tqdm=False)

observe(guess, loop_steps=len(loop), list_steps=len(together))

# %%
print("loop:", loop)
print("list:", together)
print("same text:", [o.outputs[0].text for o in one_by_one] == [o.outputs[0].text for o in all_at_once])

# %% [markdown]
# **Explain.** Both computed the same number of tokens, and wrote the same text. But the loop made one trip through the
# weights for each token, and the list one trip for eight tokens. That is *continuous batching*: the bus leaves with
# everyone who is ready. What is it worth in seconds? The next cell's numbers are your machine's own.

# %% tags=["timing", "nbval-ignore-output"]
loop_s, list_s = loop.records[-1].time, together.records[-1].time
print(f"loop {loop_s:.2f} s, list {list_s:.2f} s: the list is {loop_s / list_s:.1f} times faster")
print(f"list: {8 * 12 / list_s:.0f} tokens per second")

# %% [markdown]
# Less than eight times, because a trip with eight passengers has more to compute than a trip with one. And there it is,
# your first measured number. To be defensible it needs its conditions: *so many tokens per second, 8 requests at once,
# 12 tokens each, SmolLM2-135M in float32, on this CPU, model already loaded*. Without them it means nothing.

# %% [markdown]
# ### See the memory
#
# 1,456 blocks are too many to draw. So we close this engine and build a small one: 24 blocks, and two seats
# (`max_num_seqs=2`: at most two requests run at the same time).
#
# **Predict.** Three readers ask a librarian. Their prompts begin with the same 35 tokens, the librarian's instructions.
# Only *full* blocks of 16 tokens can be shared. How many blocks will the first two requests share? The third has to wait
# for a seat. Its prompt has 46 tokens: how many of them will be computed when it gets one?

# %% tags=["predict"]
guess = predict(shared_blocks=None, computed_for_the_third=None)

# %% tags=["experiment"]
llm.close()
small = LLM(dtype="float32", max_model_len=128, num_gpu_blocks_override=24, max_num_seqs=2)

system = ("You are a friendly librarian. Answer every question in one short sentence and use simple words that a child "
          "knows. Do not explain anything.")
questions = ["What is the capital of France?", "Who wrote Hamlet?", "What do bees make?"]
chats = [[{"role": "system", "content": system}, {"role": "user", "content": question}] for question in questions]
with Trace(small) as trace:
    for answer in small.chat(chats, SamplingParams(temperature=0, max_tokens=16)):
        print(answer.outputs[0].text)

# %%
first = trace.records[0].tables
admitted = next(record for record in trace if "2" in record.scheduled)
observe(
    guess,
    shared_blocks=len(set(first["0"]) & set(first["1"])),
    computed_for_the_third=admitted.scheduled["2"][1],
)

# %%
from tutorial_engine.viz import block_table

block_table(trace, step=2)

# %% [markdown]
# **How to read it.** On the left is the pool: every box is a physical block, its big number is the block's name. On the
# right are the block tables: request 0's tokens 0–15 are in physical block 1, its tokens 16–31 in block 2, and so on.
#
# - Blocks 1 and 2 have two colours: both tables name them. 32 of the 35 common tokens are stored once. The other 3 lie in
#   a block that is not the same to its end, so they are stored twice.
# - `#` marks a full block. It can be found again by its content.
# - Block 5 is request 0's last one and has room left. Nothing was reserved beyond it.
# - Block 0 belongs to nobody: it is the *null block*, a place for writes that nobody needs.
# - Request 2 waits, and the engine says why.
#
# Three steps later, request 1 has finished:

# %%
block_table(trace, step=5)

# %% [markdown]
# Request 2 took its seat at once, without waiting for request 0: people get on and off at every stop. Its table begins
# with blocks 1 and 2, so 14 of its 46 tokens had to be computed. And look at block 4: it is free, but its content is
# still there. The next request that starts with the same 48 tokens would find it, unless somebody needs the sheet first.

# %% [markdown]
# ## Dial it in
#
# Change one thing, and predict before you run. The small engine has two seats; the big one had 256, the default.
#
# **Predict.** The same eight prompts, 12 tokens each, given as a list to the engine with two seats: how many steps?

# %% tags=["predict"]
guess = predict(steps_with_two_seats=None)

# %% tags=["experiment"]
with Trace(small) as two_seats:
    small.generate(eight, twelve, use_tqdm=False)
observe(guess, steps_with_two_seats=len(two_seats))

# %% [markdown]
# Four rounds of two, 12 steps each. Now edit `max_num_seqs` where `small` is built, and run from there: with 4 seats you
# should get 24 steps. These are the knobs that matter most, with vLLM's names and defaults:
#
# | knob | default | more of it | less of it |
# |---|---|---|---|
# | `max_num_seqs` | 256 | more requests share each step | each waits longer for a seat |
# | `kv_cache_memory_bytes` | what is free (here at most 2 GiB) | more and longer requests fit | requests wait for blocks |
# | `max_model_len` | the model's limit (8,192) | longer texts are accepted | a smaller cache suffices |
# | `block_size` | 16 | shorter tables | less is wasted, more can be shared |
# | `max_num_batched_tokens` | 4,096 on a CPU | long prompts are read in fewer steps | others wait less for a long prompt |

# %% [markdown]
# ## Where it bites you
#
# **An answer stops in mid-word.** `SamplingParams()` allows 16 tokens, as in vLLM. The finish reason gives it away.

# %%
(output,) = small.generate("Once upon a time", SamplingParams(temperature=0))
print(len(output.outputs[0].token_ids), output.outputs[0].finish_reason, repr(output.outputs[0].text))

# %% [markdown]
# **A question gets no answer.** `generate` continues text; it does not know that your text is a question. Here the model
# finds that the text is complete and ends it with its first token. `chat` is what you want.

# %%
question = "What is the capital of France?"
greedy = SamplingParams(temperature=0, max_tokens=32)
print("generate:", repr(small.generate(question, greedy)[0].outputs[0].text))
print("chat:    ", repr(small.chat([{"role": "user", "content": question}], greedy)[0].outputs[0].text))

# %% [markdown]
# **The answer is wrong.** A model of 135 million weights writes fluent nonsense. It is here to show you the engine; do
# not believe it.

# %%
print(small.chat([{"role": "user", "content": "What is the capital of Italy?"}], greedy)[0].outputs[0].text)

# %% [markdown]
# **The prompt is too long.** You get an error before anything is computed, with the number to change:

# %%
from tutorial_engine.exceptions import VLLMValidationError

with expect_error(VLLMValidationError):
    small.generate("far too long " * 100, greedy)

# %% [markdown]
# Also good to know:
#
# - `LLM(...)` is expensive, `generate` is cheap. Build it once, never once per prompt.
# - Without `temperature=0` you get other text in every run: the default is 1.0, which draws at random.
# - The first run fetches 93 MB. Afterwards everything works offline.
# - On a CPU the weights are float32. To be fast with one request and with many, the engine keeps them in two layouts, so
#   the process may show twice the 538 MB of the card.

# %% [markdown]
# ## In production
#
# What you have learned is vLLM. On a machine with a GPU, the same lines run there:
#
# ```diff
# - from tutorial_engine import LLM, SamplingParams
# + from vllm import LLM, SamplingParams
#
# - llm = LLM()
# + llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
#   outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, stop="."))
# ```
#
# What changes is the size of everything: weights of 16 GB instead of half of one, 2 bytes a number (bfloat16) instead of
# 4, and by default 92 % of the GPU's memory for weights and cache (`gpu_memory_utilization`). The card stays the same. So
# you can find out whether a model fits before you rent a GPU.
#
# ### Exercise: `fits` (5 minutes)
#
# Write a function that says whether a model's weights and the K and V of `tokens` tokens fit into 92 % of a GPU's memory,
# at 2 bytes a number. `kv_bytes_per_token` from above helps. The next cell checks it with Llama 3.1 8B (32 layers, 8 KV
# heads of 128) on a GPU of 24 GiB with a context of 8,192 and of 131,072 tokens, and on one of 16 GiB with 8,192.

# %% tags=["exercise"]
def fits(weights, layers, kv_heads, head_dim, tokens, gib):
    """True if `weights` numbers and `tokens` tokens of K and V, 2 bytes a number, fit into 92 % of `gib` GiB."""
    return None  # your code here


# %% tags=["check"]
llama = {"weights": 8_030_261_248, "layers": 32, "kv_heads": 8, "head_dim": 128}
observe(
    {
        "24 GiB, 8,192 tokens": fits(**llama, tokens=8_192, gib=24),
        "24 GiB, 131,072 tokens": fits(**llama, tokens=131_072, gib=24),
        "16 GiB, 8,192 tokens": fits(**llama, tokens=8_192, gib=16),
    },
    **{"24 GiB, 8,192 tokens": True, "24 GiB, 131,072 tokens": False, "16 GiB, 8,192 tokens": False},
)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def fits(weights, layers, kv_heads, head_dim, tokens, gib):
#     needed = 2 * weights + tokens * kv_bytes_per_token(layers, kv_heads, head_dim, 2)
#     return needed <= 0.92 * gib * 2**30
# ```
#
# The weights take 15.0 GiB. 8,192 tokens add 1 GiB, 131,072 tokens add 16. The GPU of 16 GiB may use 14.7 of them, so
# not even the weights fit: there you need a smaller model, or weights of fewer bits.
#
# </details>

# %% [markdown]
# ## Check yourself
#
# 1. You ask for five answers and each has exactly 16 tokens. What happened, and which field tells you?
# 2. A list of 100 prompts, 50 tokens each, on an engine with 256 seats and room for all: how many steps? And in a loop?
# 3. You double `max_model_len` and leave the cache as it is. What happens to the number of blocks, and to the maximum
#    concurrency?
# 4. Two prompts have their first 31 tokens in common, blocks hold 16. How many blocks do they share?
# 5. A colleague says "we measured 400 tokens per second". What do you ask?
#
# <details><summary>Answers</summary>
#
# 1. They were cut off by the default `max_tokens=16`: `finish_reason` is `length`.
# 2. 50 steps; 5,000 in a loop. The number of tokens computed is the same.
# 3. The blocks stay, since nothing is reserved per request. The maximum concurrency halves, since it counts requests of
#    full length.
# 4. One. The second block is not the same to its end.
# 5. Which model, which number type, which machine; how many requests at once, how long the prompts and answers; and
#    whether the prompts were already in the cache.
#
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```python
# llm = LLM()                                                    # once per process
# params = SamplingParams(temperature=0, max_tokens=64)          # greedy; the default is 16 tokens at temperature 1
# outputs = llm.generate(["prompt 1", "prompt 2"], params)       # a list, not a loop
# outputs[0].outputs[0].text                                     # prompt 0, answer 0; see .finish_reason
# llm.chat([{"role": "user", "content": "A question?"}], params) # when it is a question
#
# with Trace(llm) as trace:                                      # record the steps ...
#     llm.generate(prompts, params)
# block_table(trace, step=0)                                     # ... and look at one
# ```
#
# | quantity | formula |
# |---|---|
# | bytes of K and V per token | 2 × layers × KV heads × head_dim × bytes per number |
# | blocks | cache bytes ÷ (bytes per token × block size) |
# | maximum concurrency | blocks ÷ (max_model_len ÷ block size) |
# | steps for n prompts of t tokens | t as a list (with seats and blocks for all), n × t in a loop |
