# %% [markdown]
# # Why inference servers exist
#
# You will be able to
#
# - say why a machine that answers one request at a time is nearly idle while it works
# - compute, from two numbers, how many tokens per second one request can get at most
# - predict what a list of prompts gains over a loop, in steps, and say where the gain ends
# - tell an honest "tokens per second" from a wrong one, and turn it into the price of a million tokens
#
# Needs: a CPU and 3 GB of free memory, no GPU. About 40 minutes to read and do; all cells together run in less than one
# minute. You should know Python, and that a *token* is a word or a piece of one. This is the door to the course: at its
# end is a map of the rest.

# %% tags=["parameters"]
LENGTHS = [4, 16, 6, 10, 3, 12, 8, 5, 14, 7, 2, 9]  # tokens that twelve people want; fast: [2, 5, 3, 4]
DOLLARS_PER_HOUR = 4.0  # what the GPU in the last section costs; put in what yours does

# %%
import time
from statistics import median

import matplotlib.pyplot as plt
import torch

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.notebook import expect_error, observe, predict, show_source
from tutorial_engine.recordings import load
from tutorial_engine.simulation import Job, simulate
from tutorial_engine.trace import Trace
from tutorial_engine.viz import batch_occupancy, watch

# %% [markdown]
# ## The problem
#
# You have a language model, and it works: text goes in, text comes out. (To run a trained model is called *inference*.)
# Twelve people want to use it. You write what everybody writes first: a loop that answers one after the other.
#
# We do it with a real, small model, SmolLM2-135M-Instruct. (You need not know the arguments of `LLM` yet. They make
# every machine print the same numbers.) Each of the twelve wants an answer of another length. `ignore_eos=True` makes
# the model write exactly `max_tokens` tokens, and `temperature=0` makes it take the likeliest token each time.

# %%
llm = LLM(dtype="float32", kv_cache_memory_bytes=2**28, max_model_len=1024, enable_prefix_caching=False,
          generation_config="vllm")
things = ["rain", "tea", "bees", "snow", "trains", "bread", "clocks", "rivers", "cats", "maps", "moons",
          "salt"]
prompts = [f"A short story about {thing}:" for thing, _ in zip(things, LENGTHS)]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]

with Trace(llm, names=things) as loop:
    one_by_one = [llm.generate(prompt, wanted, use_tqdm=False)[0] for prompt, wanted in zip(prompts, params)]

# %% [markdown]
# `Trace` has recorded what the engine did. An engine works in **steps**: in one step the model runs once. The first
# step of a request reads its whole prompt and gives the first token (this is called *prefill*). Each further step gives
# one more (*decode*). Here is the recording up to its last step (`-1`). A row is a request, with the name of what its
# story is about, and a column is a step:

# %%
batch_occupancy(loop, -1)

# %% [markdown]
# A staircase. At any moment one of the twelve is served, and the other eleven wait. The last one waits for all the
# others, although nobody's answer has anything to do with anybody else's.
#
# That looks like a problem of *waiting*. It is worse. While the machine serves that one request, nearly all of its
# computing power is unused. This page shows how much is lost, how to get it back, and what that is worth in money.
# Programs that do this are called **inference servers**. vLLM is one. The engine of this course has vLLM's names, and
# is small enough to be read.

# %% [markdown]
# ## The idea
#
# What does a model have to do for one token? It consists of millions of numbers, its **weights**, and each of them is
# used for each token. To be used, it must come from the memory to the place where there is arithmetic. So for every
# single token **all weights are read**. Ours are half a gigabyte. Those of a usual model on a GPU (a processor that has
# very much arithmetic, and fast memory beside it) are 16 gigabytes: 8 billion of them, of 2 bytes each.
#
# Imagine a hall where somebody reads a thick book aloud, from cover to cover. After each reading, each listener may
# write down *one word*. Then the whole book is read again, for the next word.
#
# | the hall | the machine |
# |---|---|
# | the book | the **weights** |
# | how fast it is read | **memory bandwidth**, bytes per second |
# | one reading, cover to cover | a **step** |
# | a listener | a **request** |
# | the word that a listener writes after a reading | a **token** |
# | listeners who hear the same reading | a **batch** |
# | each listener does a little sum for each page | arithmetic: about 2 operations for each weight and token |
# | so many listeners that the reader waits for their sums | **compute-bound**; before that, **memory-bound** |
# | each listener's notes on what was written so far | the **KV cache**: memory that each request needs for itself |
# | words written in the hall per hour | **throughput**, tokens per second of all together |
# | how long one listener waits for the next word | **latency** |
#
# In a hall with one listener, the reader reads the whole book for one word. With a hundred in the hall, the reading
# takes as long, and a hundred words are written. *That is the whole reason.* Everything else in this course is about
# filling the hall: who gets in (scheduling), where a hundred people put their notes (the KV cache), what to do with
# those who come late or leave early (continuous batching).

# %% [markdown]
# ## Under the hood
#
# How thick is the book? The model is a stack of layers, each with a few matrices. You may skip how the weights are
# counted. What is printed matters: that is the *135M* in the model's name.

# %%
shape = llm.llm_engine.model_runner.model.config
h, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
layer = 2 * h * h + 2 * h * kv + 3 * h * shape.intermediate_size + 2 * h  # attention; the MLP; two norms
weights = shape.vocab_size * h + shape.num_hidden_layers * layer + h  # vocabulary; layers; last norm
print(f"{weights:,} weights of 4 bytes: {4 * weights / 1e6:.0f} MB are read for each token")

# %% [markdown]
# And where in the engine is the hall? This is [llm_engine.py](../../tutorial_engine/llm_engine.py). The lines are read
# from the source that is running:

# %%
from tutorial_engine.llm_engine import LLMEngine

show_source(LLMEngine._start_step, only=("schedule()", "execute_model"))

# %% [markdown]
# `schedule()` decides **who** is in the next step. `execute_model(plan)` runs the model **once**, for all of them. (It
# is `pending` because the result is fetched later.) The plan of a loop names one request. Give the engine a list, and
# the plan names many.

# %% [markdown]
# ## Try it
#
# ### 1. A loop and a list
#
# The same twelve prompts, but now in one call: `llm.generate(prompts, params)`. The twelve want 4, 16, 6, 10, 3, 12, 8,
# 5, 14, 7, 2 and 9 tokens. **Predict**, with a pencil: how many steps did the loop need? How many will the list need?
# And will the texts be the same?
#
# Write your guesses in place of `None`. A wrong one teaches more than none. (In the cell after it, `watch` is a `Trace`
# that also draws the picture.)

# %% tags=["predict"]
guess = predict(loop_steps=None, list_steps=None, same_texts=None)

# %% tags=["experiment", "objective-1", "objective-3", "R27", "R52", "R171"]
with watch(llm, batch_occupancy, names=things) as together:
    all_at_once = llm.generate(prompts, params, use_tqdm=False)

# %%
texts = [[output.outputs[0].text for output in outputs] for outputs in (one_by_one, all_at_once)]
print(f"tokens that went through the model: {loop.tokens_computed} and {together.tokens_computed}")
observe(guess, loop_steps=len(loop), list_steps=len(together), same_texts=texts[0] == texts[1])

# %% [markdown]
# The loop needs a step for each token that is written: the **sum**. The list needs as many as its longest member: the
# **maximum**. The texts are the same. So is the number of tokens that went through the model: 12 prompts of 6 tokens,
# and 84 of the 96 that were written, as the last one of an answer need not go in again. But the book was read six times
# less often.
#
# Is it also six times *faster*? Measure (your machine's number, compared with nothing):

# %% tags=["timing", "nbval-ignore-output"]
fewer, faster = len(loop) / len(together), loop.seconds / together.seconds
print(f"{fewer:.1f} times fewer steps, {faster:.1f} times less time")

# %% [markdown]
# Probably less than six. A CPU has little arithmetic to spare, so a step with twelve takes clearly longer than a step
# with one. Experiment 3 is about that.
#
# **What this proves.** The loop does the same work, and reads the weights six times as often. Nothing about the model
# had to change, and no word of the answers did.
#
# **Now change one thing:** at the top, let all twelve want 8 tokens, `LENGTHS = [8] * 12`. That is 96 tokens
# again. Predict both counts, then run everything down to here.
#
# <details><summary>What happens</summary>
#
# 96 against 8, twelve times fewer. It is the most that twelve requests can give: all of them stay to the end. In the
# picture above there is white at the right, where those who wanted little have left and nobody has taken their place.
# </details>

# %% [markdown]
# ### 2. The speed limit
#
# How many tokens per second can *one* request get, if everything else were free? All weights are read for each token,
# so it cannot be more than
#
# ```
# tokens per second  <=  bandwidth / (number of weights × bytes of a weight)
# ```
#
# Data sheets say the bandwidth: an NVIDIA T4 has 320 GB/s (billion bytes), an H200 has 4,800 GB/s. Take Llama-3.1-8B,
# which has 8,030,261,248 weights, in a 16-bit format, 2 bytes each. **Predict** the limit for one request on an H200
# and on a T4. (The T4's memory is in fact a little too small for it. The limit of a machine that has the same bandwidth
# and more memory is the same.)

# %% tags=["predict"]
guess = predict(tokens_per_second_H200=None, tokens_per_second_T4=None)

# %% tags=["experiment", "objective-2", "R123"]
def tokens_per_second_bound(params, bytes_per_param, bandwidth):
    return bandwidth / (params * bytes_per_param)


LLAMA_8B = 8_030_261_248
observe(guess, tokens_per_second_H200=tokens_per_second_bound(LLAMA_8B, 2, 4800e9),
        tokens_per_second_T4=tokens_per_second_bound(LLAMA_8B, 2, 320e9))

# %% [markdown]
# 299 on a GPU that is made for data centres, whoever writes the program. (It is a sum for orientation. This model has
# two tables of its vocabulary. From the one for tokens that go in, a step reads a single row: that is 7 % less to read.
# And *speculative decoding*, which guesses tokens ahead and checks them together, can give several in one step.)
#
# Does a real engine come near it? We have recorded this course's engine on an H200, with a model of the same shape as
# Llama-3.1-8B. (Its weights are random: they are read as fast as trained ones.) The recording has the true time of each
# step, and replays here, without a GPU. For each number of requests we take the median of eight decode steps:

# %%
recorded = load("llama-8b-batch")
step_ms, size = {}, [len(record.scheduled) for record in recorded]
for n in sorted(set(size)):
    decode = [r.seconds for r, k in zip(recorded, size) if k == n == r.num_tokens]  # one token for each
    step_ms[n] = 1000 * median(decode)  # of eight steps
limit = tokens_per_second_bound(LLAMA_8B, 2, 4800e9)
print(f"one request: {step_ms[1]:.2f} ms a token, {1000 / step_ms[1]:.0f} tokens per second,",
      f"{1000 / step_ms[1] / limit:.0%} of the limit")

# %% [markdown]
# Three quarters of what is possible. So for one request even perfect code could win no more than about a third.
#
# And your own machine? Bandwidth can be measured: add up a large array, which reads each number once. Then compare with
# the decode steps that the loop did (your machine's numbers, compared with nothing):

# %% tags=["timing", "nbval-ignore-output"]
numbers, tries = torch.ones(2**25), []  # 134 MB: more than a processor keeps near itself
for _ in range(40):
    start = time.perf_counter()
    numbers.sum()
    tries.append(time.perf_counter() - start)
bandwidth = 4 * numbers.numel() / min(tries)
mine = 1 / min(record.seconds for record in loop if record.num_tokens == 1)
bound = tokens_per_second_bound(weights, 4, bandwidth)
print(f"bandwidth {bandwidth / 1e9:.0f} GB/s, so at most {bound:.0f} tokens per second for one request")
print(f"the loop's fastest decode step: {mine:.0f} tokens per second, {mine / bound:.0%} of that")

# %% [markdown]
# (More than 100 % means that something else used the machine while the array was added up. Run the cell again.)
#
# **What this proves.** One request is limited by *reading*, on a laptop and on an H200. What does the arithmetic do
# meanwhile? It needs about 2 operations for each weight, one multiplication and one addition. An H200 can do 989
# million million of them per second (989 TFLOP/s, in 16 bits):

# %% tags=["objective-1"]
arithmetic_ms = 1000 * 2 * LLAMA_8B / 989e12
print(f"arithmetic for one token: {arithmetic_ms:.3f} ms, in a step of {step_ms[1]:.2f} ms: "
      f"busy {arithmetic_ms / step_ms[1]:.1%} of the time")

# %% [markdown]
# You have rented a very fast calculator, and it calculates for less than half a percent of the time.
#
# **Now change one thing:** store each weight in 4 bits, half a byte. What is the limit on an H200 now?
#
# <details><summary>What happens</summary>
#
# `tokens_per_second_bound(LLAMA_8B, 0.5, 4800e9)` is 1,195: four times as high, because there is a quarter to read.
# That is one of the two reasons for *quantisation*. The other is that the model needs less memory.
# </details>

# %% [markdown]
# ### 3. A full hall
#
# The recording goes on: 1, 2, 4 ... 256 requests at once, on the same GPU, with the same model. **Predict.** How many
# times as long as a step with one request does a step with 32 take? With 256? And how many times as many tokens per
# second do the 256 get, all together? (What you have: 0.016 ms of arithmetic for each token, 4.47 ms for a step with
# one request.)

# %% tags=["predict"]
guess = predict(step_32_takes_times=None, step_256_takes_times=None, tokens_per_second_256_times=None)

# %% tags=["experiment", "objective-1", "objective-3", "R121", "R122"]
longer = {n: ms / step_ms[1] for n, ms in step_ms.items()}
observe(guess, step_32_takes_times=longer[32], step_256_takes_times=longer[256],
        tokens_per_second_256_times=256 / longer[256])

# %%
print("requests   a step   tokens per second: each      all   arithmetic busy")
for n, ms in step_ms.items():
    print(f"{n:8}{ms:6.2f} ms{1000 / ms:25.0f}{1000 * n / ms:9,.0f}{n * arithmetic_ms / ms:18.1%}")

# %% [markdown]
# With 256 in the hall a step takes 2.2 times as long, and gives 256 tokens instead of one. Read the columns:
#
# - *Each* gets 101 tokens per second instead of 224. That is still far more than anybody can read.
# - *All* get 25,844 instead of 224: 116 times as many, from the same GPU.
# - *Arithmetic* is busy 42 % of the time instead of 0.4 %.
#
# The same as a strip. A whole bar is a step, each drawn equally long. Coloured is the share of it in which memory or
# arithmetic *must* be busy; what is grey is idle, or lost on the way:

# %%
reading_ms = 1000 * 2 * LLAMA_8B / 4800e9
fig, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
labels = []
for n in (1, 16, 256):
    for what, busy, color in (("memory", reading_ms, "#74c3ec"), ("arithmetic", n * arithmetic_ms, "#d55e00")):
        ax.barh(len(labels), 1, color="#e4e4e4")
        ax.barh(len(labels), busy / step_ms[n], color=color)
        labels.append(f"{n} request{'s' * (n > 1)}, {what}")
ax.set_yticks(range(len(labels)), labels)
ax.invert_yaxis()
_ = ax.set(xlim=(0, 1), xlabel="share of a step, H200 and 8B model")

# %% [markdown]
# (*Memory* counts the weights only. With 256 requests a step reads their notes too, and each of its many small
# computations begins with some waiting.)
#
# Does the gain go on for ever? No. Two lines bound it. From the left, the **reader's line**: as long as the reading is
# the limit, twice the listeners write twice the words. From above, the **listeners' line**: the operations per second
# that the machine has, divided by 2 for each weight. They cross where a batch needs as long to compute as to read:

# %%
for name, flops, bytes_per_second in (("T4", 65e12, 320e9), ("H200", 989e12, 4800e9)):
    ceiling, one_request = flops / (2 * LLAMA_8B), tokens_per_second_bound(LLAMA_8B, 2, bytes_per_second)
    print(f"{name:5} arithmetic allows {ceiling:7,.0f} tokens per second in all;",
          f"the lines cross at {ceiling / one_request:.0f} requests")

# %% [markdown]
# Now the same on your machine, with the small model and 1 to 32 requests, next to the recorded GPU. (The reader's line
# is drawn through the *measured* point of one request. On the H200 that is three quarters of the limit, so here the
# lines cross later, at 275. For your machine the upper line is measured too: what a prompt gets, where 128 tokens share
# one reading.)

# %% tags=["timing", "nbval-ignore-output"]
def fastest_step(num_requests, prompt_tokens=1, steps=4):
    """Seconds of the fastest decode step with so many requests; of the prefill, if steps=1."""
    ids = [{"prompt_token_ids": [1000 + i] * prompt_tokens} for i in range(num_requests)]
    with Trace(llm) as trace:
        llm.generate(ids, SamplingParams(max_tokens=steps, ignore_eos=True), use_tqdm=False)
    return min(record.seconds for record in trace.records[1:] or trace.records)


cpu = {n: fastest_step(n) for n in (1, 2, 4, 8, 16, 32)}
cpu_ceiling = 128 / fastest_step(1, prompt_tokens=128, steps=1)
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for ax, title, seconds, ceiling in ((axes[0], "this machine, 135M model", cpu, cpu_ceiling),
                                    (axes[1], "H200, 8B model (recorded)",
                                     {n: ms / 1000 for n, ms in step_ms.items()}, 989e12 / (2 * LLAMA_8B))):
    n = list(seconds)
    ax.loglog(n, [k / seconds[1] for k in n], "--", color="#74c3ec", label="reader's line")
    ax.axhline(ceiling, ls="--", color="#d55e00", label="listeners' line")
    ax.loglog(n, [k / seconds[k] for k in n], "o-", color="#333333", label="measured")
    ax.set(title=title, xlabel="requests in a step", ylabel="tokens per second, all")
    ax.set_xticks(n, n)
    ax.legend()
print(f"this machine: 32 requests get {32 * cpu[1] / cpu[32]:.1f} times as many tokens per second as one")

# %% [markdown]
# Two machines, one shape: up along the first line, then flatter, towards the second. On a CPU the curve leaves the line
# early, since it has little arithmetic for its bandwidth. (There, twice the requests may even gain nothing at one
# place: for one row, a few and many there is different code.) On the GPU, 256 requests have not reached the end.
#
# **What this proves.** The hardware was not slow. It was empty.
#
# **Now change one thing:** your users want a token every 6 ms at the latest. With how many requests at once can this
# GPU serve them, and how many tokens per second is that?
#
# <details><summary>What happens</summary>
#
# 32 of the sizes in the table: a step takes 5.73 ms, and all together get 5,580 tokens per second. At 8 ms it would be
# 128 requests and 16,578. Two milliseconds of patience give three times as many. So *latency against throughput* is a
# choice, and whoever quotes a throughput should say at which latency.
# </details>

# %% [markdown]
# ### 4. What may be counted
#
# "Our server makes 2,000 tokens per second." Which tokens? The loop that most people compare with uses `generate` of
# Hugging Face's `transformers`. What does that give back? A toy model with random weights is enough to see it. The two
# prompts have 3 and 5 tokens. They must form a rectangle, so the shorter one is filled up with zeros in front (which
# the `attention_mask` tells the model to ignore):

# %%
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
toy = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                   num_attention_heads=2, eos_token_id=None, pad_token_id=0)).eval()
two = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
tensor = toy.generate(two, attention_mask=(two != 0).long(), max_new_tokens=4, do_sample=False)
print("in:", tuple(two.shape), " out:", tuple(tensor.shape),
      " begins with the prompts:", torch.equal(tensor[:, :5], two))

# %% [markdown]
# Four tokens were asked for, and nine came back in each row: **the prompt comes along**, its filling too. And if one
# row is done before the others, its rest is filled up as well. Whoever counts what came back counts all of that. (An
# engine such as vLLM gives prompt and answer apart, in `prompt_token_ids` and `outputs[0].token_ids`.)
#
# Now four short questions to our model. With what the chat format adds, each has 34 to 39 tokens. Answers have at most
# 16. **Predict.** How many times too high is the count if somebody counts prompt and answer? And if all four went
# through `generate` as one rectangle, and that is counted?

# %% tags=["predict"]
guess = predict(prompts_counted_times=None, rectangle_counted_times=None)

# %% tags=["experiment", "objective-4", "R56"]
questions = ("Name three fruits.", "What color is the sky?", "Say hello in French.",
             "Is fire hot? Answer yes or no.")
answers = llm.chat([[{"role": "user", "content": q}] for q in questions],
                   SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
given = [len(answer.prompt_token_ids) for answer in answers]
written = [len(answer.outputs[0].token_ids) for answer in answers]
observe(guess, prompts_counted_times=(sum(given) + sum(written)) / sum(written),
        rectangle_counted_times=len(answers) * (max(given) + max(written)) / sum(written))

# %% [markdown]
# All four together wrote 63 tokens, and the prompts have 144: (144 + 63) / 63 = 3.29. The rectangle has 4 rows of
# 39 + 16. The same run, the same seconds, and a number more than three times as high. With 2,000 tokens of a document
# in a prompt, and 100 in the answer, it would be 21 times.
#
# **What this proves.** "Tokens per second" that does not say *which* tokens is no measurement. *Output* tokens are
# those that the model wrote, up to and with the one that ends the answer. Prompt tokens may be quoted as well, as a
# second number: they are work, but of another kind, since hundreds of them share one reading.
#
# A baseline is honest if it
#
# - counts output tokens on both sides, with the same prompts, the same lengths and the same stopping rule,
# - gives the baseline a batch as well (`transformers` can do that), or says that it did not,
# - warms up both sides first, and does not repeat prompts that one side may keep in a cache,
# - uses the same number format on both sides.
#
# For comparison, what vLLM claimed in the post with which it appeared (June 2023): 14 to 24 times the throughput of
# `transformers`, and 2.2 to 2.5 times that of TGI, a server that batched already, with the same models on the same
# GPUs. Elsewhere you read "three to four times as fast as one after the other". From experiment 3 you know what such a
# number depends on: how many were in a step. There four gave 3.6 times as many tokens per second as one, and 256 gave
# 116 times as many. Why vLLM had more in a step than TGI is the subject of
# [PagedAttention](../1_core_concepts/03_paged_attention.ipynb).
#
# **Now change one thing:** `max_tokens=8`. Which way does the first number go?
#
# <details><summary>What happens</summary>
#
# Up, from 3.29 to 5.5: the prompts stay as long, the answers get shorter. Nothing has become faster.
# </details>

# %% [markdown]
# ## Dial it in
#
# | knob | default in vLLM | what it does |
# |---|---|---|
# | `max_num_seqs` | 256 to 1,024, by machine | listeners in the hall: the most requests in a step |
# | `gpu_memory_utilization` | 0.92 | the memory for weights and notes: whether so many fit at all |
# | `dtype`, `quantization` | the model's | the thickness of the book |
# | how many requests you hand over | one, in a loop | none of the other knobs can fill a hall to which nobody comes |
#
# The twelve requests of experiment 1, with fewer seats. `simulate` is the scheduler of our engine without a model: it
# counts steps. A seat that becomes free is taken at once by the next in the queue. **Predict** the steps with 4 seats.

# %% tags=["predict"]
guess = predict(steps_with_4_seats=None)

# %% tags=["experiment", "objective-3"]
jobs = [Job(6, n) for n in LENGTHS]  # prompts of 6 tokens
steps = {seats: len(simulate(jobs, max_num_seqs=seats)) for seats in (1, 2, 4, 8, 12)}
print("seats -> steps:", steps)
observe(guess, steps_with_4_seats=steps[4])

# %% [markdown]
# One seat is the loop, twelve seats are the list. With four seats, 96 tokens need at least 24 steps. It is 29, since at
# the end nobody waits any more and seats stay empty. Here more seats mean fewer steps. Whether they also mean less
# *time* is the curve of experiment 3.

# %% [markdown]
# ## Where it bites you
#
# **1. "My GPU is at 100 %, so it is used well."** The percentage that `nvidia-smi` shows is the share of time in which
# *something* was running, however little of the GPU it used. One request, with its half percent of the arithmetic, can
# show nearly 100 %. Look at tokens per second, and at how many requests run.
#
# **2. "I use vLLM, so I have batching."** Not in a loop: then each call waits for the one before. Hand over a list, or
# send requests side by side to a server. And there is no batch size to set. Whoever passes one is told so:

# %% tags=["R26"]
with expect_error(TypeError):
    LLM(batch_size=12)

# %% [markdown]
# **3. "Then I start twelve processes."** Each would have the weights in memory once more, and read them for itself:
# twelve readers in twelve halls, with one listener each.
#
# **4. "Batching makes my answer faster."** A single answer gets a little *slower*, see the column "each". What falls is
# the time in the queue, and the price.
#
# **5. "The limit says 17,800 tokens per second for a 135M model on an H200."** It does, but that is not the limit that
# counts there. A step would take 56 µs, and to start a few hundred small computations takes longer. This course's
# engine, which replays a whole step as one recorded piece (a *CUDA graph*), gets 1,619, 9 %. The limit is good for
# models whose weights take milliseconds to read.

# %% [markdown]
# ## In production
#
# **What a million tokens cost.** The rent for a GPU is paid by the hour, full or empty. Say it is 4 dollars (change
# `DOLLARS_PER_HOUR` above), and the GPU is busy all the time with the steps of our recording:

# %% tags=["objective-4", "R171"]
def cost_per_million(tokens_per_second, dollars_per_hour):
    return dollars_per_hour / (tokens_per_second * 3600) * 1_000_000


print("requests in a step   tokens per second   dollars for a million output tokens")
for n in (1, 4, 16, 64, 256):
    rate = 1000 * n / step_ms[n]
    print(f"{n:18}{rate:20,.0f}{cost_per_million(rate, DOLLARS_PER_HOUR):20.2f}")

# %% [markdown]
# From nearly five dollars to four cents. That is the reason for inference servers in one column.
#
# Three cautions before you show it to anybody. The recording has short prompts: to read long ones takes time too, and a
# longer context makes each step slower. Nobody has 256 requests at every moment: a GPU that is busy for a tenth of the
# day makes tokens that cost ten times as much. And the rent is not the whole bill.
#
# **What a server does besides.** Around the hall there is an address that others can send requests to, tokens that are
# *streamed* as they are written, a queue, limits, memory that is shared out and taken back. And there are numbers that
# say how full the hall is. What to watch on a running vLLM:
#
# * `vllm:num_requests_running`: listeners in the hall. If it is 1 most of the time, this page is about you
# * `vllm:num_requests_waiting`: the queue in front of the door
# * `vllm:generation_tokens_total` and `vllm:prompt_tokens_total`: the two kinds of tokens, counted apart
#
# `vllm bench throughput` prints *total* tokens per second and *output* tokens per second side by side. The first counts
# the prompts. Both are right; quote the second, or both.
#
# ### Exercise: numbers that you can defend (15 minutes)
#
# The speed limit, what may be counted, and the price, in
# [a notebook of its own](../../exercises/0_orientation/01_why_inference_servers_exist.ipynb). A check looks at your
# code and says what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● What does a decode step read from memory?</summary>
#
# All weights, once, however many requests are in it; and the notes (the KV cache) of each of these requests.
# </details>
#
# <details><summary>2. ● Which two numbers give the limit for one request?</summary>
#
# The bytes of all weights, and the memory bandwidth. Not the TFLOP/s.
# </details>
#
# <details><summary>3. ● What is the difference between latency and throughput?</summary>
#
# How long one request waits (for its first token, for the next one, for all), and how many tokens all requests together
# get per second.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● Five prompts, answers of 10, 20, 30, 40 and 50 tokens. How many steps as a loop, how many as a
# list?</summary>
#
# 150 and 50, if there are seats and memory for all five.
# </details>
#
# <details><summary>5. ●● A model of 3 billion weights of 2 bytes on a laptop with 60 GB/s: how fast can it
# write?</summary>
#
# 60 / 6 = 10 tokens per second, at most.
# </details>
#
# <details><summary>6. ●● Why does a step with 32 requests take hardly longer than one with 1 on the H200, and much
# longer on a CPU?</summary>
#
# On both, the reading is the same. An H200 can do about 200 operations in the time in which it reads a byte, a CPU some
# ten. So the CPU's arithmetic is the limit after a few requests.
# </details>
#
# <details><summary>7. ●●● Why can a prompt of 500 tokens be read in one step, while an answer of 500 tokens needs
# 500?</summary>
#
# All tokens of the prompt are known, so they can share one reading, like 500 listeners. Of the answer, each token is
# known only when the one before it has been written.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● Users want at most 7 ms between two tokens. How many requests may be in a step of the
# recorded GPU?</summary>
#
# 64 of the sizes in the table, at 6.77 ms. In between one would have to measure. And leave some room: prompts that
# arrive make single steps longer, and so do longer contexts.
# </details>
#
# <details><summary>9. ●●● A colleague shows that your new server is 40 times as fast as transformers. Name three
# reasons why that may be unfair, in either direction.</summary>
#
# The baseline was a loop, though it could batch. One side counted prompts. One side stopped early, or had the prompts
# in its cache already. The first call paid for loading. In the other direction: the baseline counted its prompts and
# its filling as output and so looks too fast, or the server's list was too short to fill its seats.
# </details>
#
# <details><summary>10. ●●●● You serve an 8B model for 20 people in an office. Most of the time one of them is asking
# something. A vendor offers a GPU with twice the TFLOP/s and the same bandwidth. What do you say?</summary>
#
# No. With one request in a step reading is the limit, and the new GPU reads as fast. What helps: fewer bytes (a
# quantised or a smaller model), more bandwidth, or speculative decoding. Or a cheaper GPU, or somebody else's server by
# the token, because yours is idle most of the day. Measure how many requests run at once before you buy anything.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# limit for one request   tokens per second <= bandwidth / (weights × bytes of a weight)
# limit for all together  tokens per second <= FLOP/s / (2 × weights)
# they cross at           about 200 requests, on a T4 and on an H200, in 16 bits
# steps                   loop: sum of the lengths.  list: the longest, if all have a seat
# output tokens           what the model wrote, up to and with the end; no prompt, no filling
# dollars per million     dollars per hour / (tokens per second × 3600) × 1,000,000
# ```
#
# | | bandwidth | 16-bit arithmetic | limit for one request, 8B | 135M |
# |---|---|---|---|---|
# | T4 | 320 GB/s | 65 TFLOP/s | 20 | 1,189 |
# | A100, 80 GB | 2,039 GB/s | 312 TFLOP/s | 127 | 7,579 |
# | H100 SXM | 3,350 GB/s | 989 TFLOP/s | 209 | 12,452 |
# | H200 SXM | 4,800 GB/s | 989 TFLOP/s | 299 | 17,842 |
#
# **Sources.** Bandwidth and arithmetic: NVIDIA's data sheets; those of H100 and H200 print twice the number, "with
# sparsity". What a decode step reads, and why batches help: Pope et al., *Efficiently Scaling Transformer Inference*,
# 2022, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102). Batches for serving: Yu et al., *Orca*, OSDI 2022,
# [USENIX](https://www.usenix.org/conference/osdi22/presentation/yu). 14 to 24 times, 2.2 to 2.5 times: *vLLM: Easy,
# Fast, and Cheap LLM Serving with PagedAttention*, 20 June 2023,
# [vLLM blog](https://blog.vllm.ai/2023/06/20/vllm.html) (LLaMA-7B on an A10G, 13B on an A100; lengths of ShareGPT, one
# answer a request). What a GPU's utilisation counts: NVIDIA,
# [nvmlUtilization_t](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html). Defaults: vLLM 0.33, read
# in its source. The recording and the 1,619: [docs/performance.md](../../docs/performance.md) and
# [bench/record_gpu.py](../../bench/record_gpu.py), one H200, bfloat16.
#
# ### The map of the course
#
# * **0 Orientation.** Why is there a server at all? *This page.*
# * **1 Core concepts.** What happens inside a step, and where are everybody's notes?
#   [The KV cache](../1_core_concepts/01_the_kv_cache.ipynb): what the notes are, and what they cost.
#   [Prefill and decode](../1_core_concepts/02_prefill_and_decode.ipynb): the two kinds of work in a step.
#   [PagedAttention](../1_core_concepts/03_paged_attention.ipynb): how the notes of hundreds fit into one memory.
#   [Continuous batching](../1_core_concepts/04_continuous_batching.ipynb): who is in which step.
#   [Sampling parameters](../1_core_concepts/05_sampling_parameters.ipynb): how the next token is chosen.
# * **2 Going deeper.** How do the scheduler, the prefix cache, quantisation and speculative decoding work? (No
#   notebooks yet. Until then read [scheduler.py](../../tutorial_engine/scheduler.py).)
# * **3 Running locally.** How do I use it? [Getting started](../3_running_locally/05_getting_started.ipynb): the first
#   tokens. [Offline batch inference](../3_running_locally/02_offline_batch_inference.ipynb): a pile of prompts.
# * **4 Case studies.** How do I build something real with it? (No notebooks yet.)
#
# **Next.** If you have not written with the engine yourself yet,
# [Getting started](../3_running_locally/05_getting_started.ipynb) is short. Otherwise go on to
# [The KV cache](../1_core_concepts/01_the_kv_cache.ipynb): what are the notes that each listener needs, and why do they
# decide how many fit into the hall?
