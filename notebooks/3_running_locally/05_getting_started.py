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
# **Needs** a CPU and 2 GB of free memory; no GPU, no account. 10 minutes to read, less than a minute to run. The
# very first run also fetches the model (93 MB).

# %% tags=["parameters"]
prompts = ["The capital of France is", "1, 2, 3, 4, 5,", "A language model is", "Once upon a time"]
max_tokens = 24  # per prompt, at most; fast: 4
kv_cache_bytes = 2**30  # memory for the KV cache: 1 GiB

# %% [markdown]
# ## The problem
#
# Four lines, and a language model writes. The second one loads it, which takes a few seconds and happens once. (Its
# arguments are explained below; a plain `LLM()` works too.)

# %%
from tutorial_engine import LLM, SamplingParams

llm = LLM(dtype="float32", max_model_len=1024, kv_cache_memory_bytes=kv_cache_bytes)
output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1))
print(output[0].outputs[0].text)

# %% [markdown]
# That was one **token**: a word, or a piece of one. A model writes one token at a time, and for each of them the
# machine reads all of the model's numbers. Ours is tiny, and that is still half a gigabyte per token. And every
# token that the model has read leaves notes behind (its **K and V** vectors), which all later tokens of that text
# need.
#
# So whoever serves a model has two scarce things to share out:
#
# - **time**: one trip through the model's numbers should serve as many people as possible;
# - **memory**: everybody's notes must fit, and nobody knows beforehand how long an answer will be.
#
# A `for` loop around a model shares out neither. An *engine* does. vLLM is one. `tutorial_engine` is another:
# small enough to read, with vLLM's names and vLLM's rules.

# %% [markdown]
# ## The idea
#
# Two everyday things are enough to picture the whole engine.
#
# **Time is a bus.** A trip with eight passengers costs far less than eight trips with one. So the bus leaves with
# everyone who is ready, and people get on and off at every stop. The engine calls a trip a **step**: one pass
# through the model's numbers, in which each running **request** gets its next token.
#
# **Memory is a stack of loose sheets.** Each sheet has a number and 16 lines. You take a new sheet when yours is
# full, and you keep a list of your sheets' numbers. Nobody reserves a whole book, and two people whose notes
# begin with the same text list the same sheets. The engine calls a sheet a **block**, the stack the **pool** or
# KV cache, and the list a **block table**.
#
# The bus is called *continuous batching*, and was first described in
# [Orca](https://www.usenix.org/conference/osdi22/presentation/yu) (2022). The sheets are called *paging*, and come from
# [PagedAttention](https://arxiv.org/abs/2309.06180) (2023), the paper that vLLM grew out of.

# %% [markdown]
# ## Under the hood
#
# The line `llm = LLM(...)` did four things: it found the model's file, read the numbers in it (the **weights**)
# into memory, set memory aside for the KV cache, and cut that into blocks. Its arguments say how:
#
# - `dtype="float32"`: a number has 4 bytes. It is the default on a CPU; here it makes a GPU print the same
#   numbers.
# - `kv_cache_memory_bytes`: how much memory the KV cache gets. Here it is 1 GiB.
# - `max_model_len=1024`: the longest request, prompt and answer together, that will be accepted.
#
# How much text fits, then? To work it out you only need the shape of the model. (The next cell also counts the weights.
# You may skip how; the two lines that it prints are what matters.)

# %%
from tutorial_engine.models.loader import resolve_model

shape = resolve_model("smollm2-135m-instruct").config
h, ff, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
per_layer = 2 * h * h + 2 * h * kv + 3 * h * ff + 2 * h  # Q and output; K and V; the MLP; two norms
weights = shape.vocab_size * h + shape.num_hidden_layers * per_layer + h  # embedding; layers; last norm

print(f"{shape.num_hidden_layers} layers, {shape.num_key_value_heads} KV heads, head_dim {shape.head_dim}")
print(f"{weights:,} weights of 4 bytes: {weights * 4:,} bytes")

# %% [markdown]
# **Predict.** In each layer, for each KV head, a token leaves one K and one V vector of `head_dim` numbers.
#
# - How many bytes is that per token?
# - How many blocks of 16 tokens fit into 1 GiB (1,073,741,824 bytes)? How many tokens is that?
# - How many requests of 1,024 tokens fit at the same time? (vLLM calls this the *maximum concurrency*.)
#
# Write your numbers in place of `None`. A rough guess is better than none.

# %% tags=["predict"]
from tutorial_engine.notebook import expect_error, observe, predict

guess = predict(bytes_per_token=None, blocks=None, tokens=None, max_concurrency=None)

# %% tags=["experiment", "objective-2"]
cache = llm.llm_engine.model_runner.kv_cache
engine = {
    "bytes_per_token": cache.num_bytes // (cache.num_blocks * cache.block_size),
    "blocks": cache.num_blocks,
    "tokens": cache.num_blocks * cache.block_size,
    "max_concurrency": cache.num_blocks / (1024 / cache.block_size),
}
observe(guess, **engine)

# %% [markdown]
# **Explain.** This is the engine's capacity card. One formula and a little arithmetic give all of it. In the next
# table, the column "yours" is worked out by hand:

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
observe(by_hand, **engine)

# %% [markdown]
# The notes of one token weigh 46 kB, and those of 11,700 tokens as much as the whole model. That is why memory,
# and not only speed, decides how many people an engine can serve.
#
# vLLM prints the last two lines when it starts. Given the same model, number type and cache size on a CPU, vLLM 0.32
# reported a `KV cache size` of `23,296 tokens` and, for 1,024 tokens per request, a `Maximum concurrency` of `22.75x`:
# your numbers, with one digit more.
#
# Note what `max_model_len` is *not*: a reservation. A request of 20 tokens takes two blocks, not 64. All of this
# arithmetic is in [kv_cache.py](../../tutorial_engine/kv_cache.py).

# %% [markdown]
# ## Try it
#
# ### Four prompts
#
# `generate` takes a list of prompts and continues each of them. With `temperature=0` the likeliest token is taken every
# time, so you should get the same text as this page. Each answer ends at the first full stop, or after 24 tokens.

# %% tags=["objective-1"]
params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=".")
outputs = llm.generate(prompts, params)

# %% tags=["demo-output"]
for output in outputs:
    print(f"{output.prompt}\n   …{output.outputs[0].text}")

# %% [markdown]
# `outputs` is in the order of the prompts. Each entry has a list `outputs` of its own, because one prompt may
# have several answers: hence the doubled name. Always look at `finish_reason` too: it tells you whether the model
# was done (`stop`) or was cut off (`length`).

# %%
for output in outputs:
    answer = output.outputs[0]
    print(f"{len(output.prompt_token_ids):2} tokens in, {len(answer.token_ids):2} out: {answer.finish_reason}")

# %% [markdown]
# ### A chat
#
# This model was trained on conversations, in a format with markers for who speaks. `chat` writes the markers for
# you. Below the line is what the model really saw, up to the place where it had to go on.

# %%
messages = [{"role": "user", "content": "Name three fruits."}]
(reply,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
print(reply.outputs[0].text)
print("-" * 40)
print(reply.prompt)

# %% [markdown]
# ### A list or a loop?
#
# **Predict.** Eight prompts get 10 tokens each (`ignore_eos=True`: nobody may stop early). A request's first step
# reads its whole prompt and writes its first token; every further step writes one more. How many steps does the
# engine make if you call `generate` in a loop, once per prompt? How many if you call it once, with the list?

# %% tags=["predict"]
guess = predict(loop_steps=None, list_steps=None)

# %% [markdown]
# `Trace` records what the engine does, step by step.

# %% tags=["experiment", "objective-3", "R27"]
from tutorial_engine.trace import Trace

eight = [f"Here is a short story about the number {n}:" for n in range(1, 9)]
ten_tokens = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

with Trace(llm) as loop:
    one_by_one = [llm.generate(prompt, ten_tokens, use_tqdm=False)[0] for prompt in eight]
with Trace(llm) as together:
    all_at_once = llm.generate(eight, ten_tokens, use_tqdm=False)

observe(guess, loop_steps=len(loop), list_steps=len(together))

# %%
print("loop:", loop)
print("list:", together)
print("same text:", [o.outputs[0].text for o in one_by_one] == [o.outputs[0].text for o in all_at_once])

# %% [markdown]
# **Explain.** Both wrote the same text, and both pushed the same 160 tokens through the model: eight times 11 prompt
# tokens and 9 written ones (the tenth is the last, so nobody reads it). But the loop's bus drove 80 times with one
# passenger, and the list's 10 times with eight. What is that worth in seconds? The next cell's numbers belong to the
# machine that ran it.

# %% tags=["timing", "nbval-ignore-output"]
loop_s, list_s = loop.records[-1].time, together.records[-1].time
print(f"loop {loop_s:.2f} s, list {list_s:.2f} s: the list is {loop_s / list_s:.1f} times as fast")
print(f"list: {8 * 10 / list_s:.0f} tokens per second")

# %% [markdown]
# Expect less than eight times: a trip with eight passengers does cost more than a trip with one.
#
# And there it is, your first measured number. What makes it one that you can defend is the rest of the sentence:
# *so many tokens per second, eight requests at once, prompts of 11 tokens, 10 tokens each, greedy, SmolLM2-135M
# in float32, on this CPU, model already loaded, measured once*. And the count of steps, 80 against 10, is true on
# every machine.

# %% [markdown]
# ### See the memory
#
# 1,456 blocks are too many to draw. So we close this engine and build a small one: a pool of 24 blocks, and two
# seats on the bus (`max_num_seqs=2`: at most two requests run at the same time).
#
# **Predict.** Three readers ask a librarian. Their prompts begin with the same 35 tokens: the librarian's
# instructions. Only *full* blocks of 16 tokens can be shared.
#
# - How many blocks will the first two requests share?
# - The third has to wait for a seat. Its prompt has 46 tokens. How many of them must be computed when it gets
#   one?
#
# `watch` records the steps as `Trace` does, and shows them: first live, then as a player with a slider.

# %% tags=["predict"]
guess = predict(shared_blocks=None, computed_for_the_third=None)

# %% tags=["experiment", "objective-4"]
from tutorial_engine.viz import block_table, watch

llm.close()
small = LLM(dtype="float32", max_model_len=128, num_gpu_blocks_override=24, max_num_seqs=2)

system = """You are a friendly librarian. Answer every question in one short sentence and use simple words \
that a child knows. Do not explain anything."""
questions = ["What is the capital of France?", "Who wrote Hamlet?", "What do bees make?"]
chats = [[{"role": "system", "content": system}, {"role": "user", "content": q}] for q in questions]

with watch(small, block_table) as trace:
    for answer in small.chat(chats, SamplingParams(temperature=0, max_tokens=16)):
        print(answer.outputs[0].text)

# %%
first = trace.records[0].tables  # request -> its blocks, in the first step
admitted = next(record for record in trace if "2" in record.scheduled)
start, num_tokens = admitted.scheduled["2"]  # the first token to compute, and how many
observe(guess, shared_blocks=len(set(first["0"]) & set(first["1"])), computed_for_the_third=num_tokens)

# %% [markdown]
# Now look at single steps. Move the slider above, or ask for one. This is the third (they count from 0): two requests
# run, one waits.

# %%
block_table(trace, step=2)

# %% [markdown]
# **How to read it.** On the left is the pool. Each box is a physical block, and the big number is its name. On
# the right are the block tables. Request 0's first 16 tokens (`0 →`, its *logical* block 0) are in physical block
# 1, the next 16 (`1 →`) in block 2, and so on.
#
# - Blocks 1 and 2 have two colours, because both tables name them: 32 of the 35 common tokens are stored once.
#   The other three lie in a block that does not stay the same up to its end, so each request has its own.
# - `#` marks a full block. It can be found again by its content; that is how request 1 came to blocks 1 and 2.
# - Block 5 is request 0's last. It has room left, and nothing is reserved beyond it.
# - Request 2 waits, and the picture says why.
# - The free blocks stand in a queue. The line below the pool says which will be taken next, after this step.
# - Block 0 belongs to nobody. It is the *null block*, where the engine puts what nobody needs. That leaves 23.
#
# Three steps later, request 1 has finished:

# %%
block_table(trace, step=5)

# %% [markdown]
# Request 2 took the seat at once, without waiting for request 0: people get on and off at every stop. Its table
# begins with blocks 1 and 2, so only 14 of its 46 tokens had to be computed.
#
# And look at block 4. It is free, but what request 1 wrote there is still readable. A request that begins with the same
# 48 tokens would find it, unless somebody needs the sheet first. So the free blocks double as a memory of what was read
# before. All of this is *prefix caching*, and its rules are in
# [block_manager.py](../../tutorial_engine/block_manager.py), in less than 400 lines.

# %% [markdown]
# ## Dial it in
#
# Change one thing, and predict before you run. The small engine has two seats; the first one had 256, the
# default.
#
# **Predict.** The same eight prompts, 10 tokens each, given as a list to the engine with two seats: how many
# steps?

# %% tags=["predict"]
guess = predict(steps_with_two_seats=None)

# %% tags=["experiment", "objective-3"]
with Trace(small) as two_seats:
    small.generate(eight, ten_tokens, use_tqdm=False)
observe(guess, steps_with_two_seats=len(two_seats))

# %% [markdown]
# The same trace as a time table, one row for each request:

# %%
from tutorial_engine.viz import batch_occupancy

batch_occupancy(two_seats)

# %% [markdown]
# Four rounds of two, 10 steps each. Now change `max_num_seqs` to 4 where `small` is built, and run everything
# from there: 20 steps. These five knobs matter most. Their names are vLLM's:
#
# | knob | here | more of it | less of it |
# |---|---|---|---|
# | `max_num_seqs` | 256 | more requests share a step | requests wait longer for a seat |
# | `kv_cache_memory_bytes` | at most 2 GiB | more and longer requests fit | requests wait for blocks |
# | `max_model_len` | 8,192 (the model's) | longer texts are accepted | a smaller cache is enough |
# | `block_size` | 16 | tables are shorter | less is wasted, more can be shared |
# | `max_num_batched_tokens` | 4,096 on a CPU | long prompts take fewer steps | a long prompt delays others less |

# %% [markdown]
# ## Where it bites you
#
# **An answer stops in the middle.** The default is `max_tokens=16`, as in vLLM. The finish reason gives it away.

# %%
answer = small.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0]
print(answer.text)
print(len(answer.token_ids), "tokens, finish_reason:", answer.finish_reason)

# %% [markdown]
# **A question gets no answer.** `generate` continues a text; it does not know that yours is a question. Here the
# model decides that the text is complete: its first token is the one that ends it. What you want is `chat`.

# %%
question = "What is the capital of France?"
greedy = SamplingParams(temperature=0, max_tokens=32)
continued = small.generate(question, greedy)[0].outputs[0]
answered = small.chat([{"role": "user", "content": question}], greedy)[0].outputs[0]
print("generate:", repr(continued.text))
print("chat:    ", repr(answered.text))

# %% [markdown]
# **The answer is wrong.** A model of 135 million weights writes fluent nonsense. It is here to show you an engine
# at work; do not believe a word of it.

# %%
print(small.chat([{"role": "user", "content": "What is the capital of Italy?"}], greedy)[0].outputs[0].text)

# %% [markdown]
# **The prompt is too long.** You get an error before anything is computed, and it says what to do:

# %%
from tutorial_engine.exceptions import VLLMValidationError

with expect_error(VLLMValidationError):
    small.generate("far too long " * 100, greedy)

# %% [markdown]
# Also good to know:
#
# - `LLM(...)` is expensive and `generate` is cheap. Build one object per process, never one per prompt.
# - Without `temperature=0` every run writes another text: the default temperature is 1, which draws at random.
# - The model's file is fetched once (93 MB). After that everything works without a network.
# - The process is bigger than the card says. On a CPU this engine keeps the weights in two layouts, one that is
#   fast for a single request and one for many. With Python and PyTorch that makes about 1.6 GB.

# %% [markdown]
# ## In production
#
# What you have learned holds for vLLM, word by word:
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
# (`Trace` and the pictures are this engine's own.) What changes is the scale. A usual model there has 8 billion weights
# of 2 bytes (bfloat16), which makes 16 GB. And by default, weights and cache together get 92 % of the GPU's memory
# (`gpu_memory_utilization`). The arithmetic of the card stays. So you can find out whether a model fits before you rent
# a GPU.
#
# ### Exercise: the capacity card (15 minutes)
#
# Write that arithmetic yourself, in
# [a notebook of its own](../../exercises/3_running_locally/05_getting_started.ipynb): what a token costs, how many
# blocks there are, and whether a model fits on a GPU. A check looks at each answer and says what to look at next. Then
# your functions compare four models.

# %% [markdown]
# ## Check yourself
#
# Recall:
#
# 1. You ask for five answers, and each has exactly 16 tokens. What happened, and which field tells you?
# 2. Your text is a question. `generate` or `chat`, and why?
#
# Mechanics:
#
# 3. 100 short prompts, 50 tokens each, in one list, with a seat and memory for all: how many steps? How many in a loop?
# 4. Two prompts have their first 31 tokens in common, and a block holds 16. How many blocks do they share?
# 5. You double `max_model_len` and leave the cache as it is. What happens to the number of blocks, and to the maximum
#    concurrency?
#
# Judgement:
#
# 6. 40 requests wait, and the trace says `not enough free blocks`. You may double the seats or the cache. Which?
# 7. A colleague says "we measured 400 tokens per second". What do you ask?
#
# <details><summary>Answers</summary>
#
# 1. They were cut off by the default `max_tokens=16`: `finish_reason` is `length`.
# 2. `chat`. It writes the markers that the model knows from its training; `generate` would just continue the text.
# 3. 50 steps; 5,000 in a loop. The number of tokens computed is the same.
# 4. One. The second block is not the same up to its end.
# 5. The blocks stay, since nothing is reserved for a request. The maximum concurrency halves, since it counts requests
#    of full length.
# 6. The cache. Seats are not what they wait for: with more seats they would still wait for blocks.
# 7. Which model, number type and machine; how many requests at once, how long the prompts and the answers; whether the
#    prompts were in the cache already; and how often it was measured.
#
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```python
# llm = LLM()                                               # once per process
# params = SamplingParams(temperature=0, max_tokens=64)     # defaults: 1 and 16
#
# outputs = llm.generate(["prompt 0", "prompt 1"], params)  # a list, not a loop
# outputs[0].outputs[0].text                                # prompt 0, its first answer
# outputs[0].outputs[0].finish_reason                       # "stop": done; "length": cut off
#
# llm.chat([{"role": "user", "content": "A question?"}], params)
#
# with watch(llm) as trace:                                 # see the steps; Trace(llm) only records them
#     llm.generate(["prompt 0", "prompt 1"], params)
# len(trace)                                                # how many there were
# block_table(trace, step=0)                                # the memory in one of them
# batch_occupancy(trace)                                    # who was in which of them
# ```
#
# | quantity | formula |
# |---|---|
# | bytes of K and V per token | 2 × layers × KV heads × head_dim × bytes per number |
# | blocks | cache bytes ÷ (bytes per token × block size) |
# | maximum concurrency | blocks ÷ (max_model_len ÷ block size) |
# | steps for n prompts of t tokens each | t as a list, if all have a seat; n × t in a loop |
#
# **Where to go next.** [Why inference servers exist](../0_orientation/01_why_inference_servers_exist.ipynb) says what a
# list is worth on a GPU, and has a map of the course.
# [Offline batch inference](02_offline_batch_inference.ipynb) runs a pile of prompts and shows what else a list can do.
# To read the engine itself, take the order of the [README](../../README.md), or begin with
# [scheduler.py](../../tutorial_engine/scheduler.py), which drives the bus. And then vLLM, whose
# [documentation](https://docs.vllm.ai/) you can now read: you know the words.
