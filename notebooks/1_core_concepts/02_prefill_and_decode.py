# %% [markdown]
# # Prefill and decode
#
# You will be able to
#
# - say what a step waits for, memory or arithmetic, from one number: its *arithmetic intensity*
# - find the *ridge* of a GPU from its data sheet, and measure that of your own machine
# - read the two times that a user feels, TTFT and ITL, and recognise a stall in them
# - say what it costs and what it buys to compute a long prompt in chunks
#
# Needs: a CPU and 3 GB of free memory, no GPU. About 45 minutes to read and do; all cells together run in about one
# minute. You should have read [The KV cache](01_the_kv_cache.ipynb).

# %% tags=["parameters"]
LONG_PROMPT = 1024  # tokens of the prompt that arrives in experiment 3; fast: 128

# %%
import random
from statistics import median

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.exercises.prefill_and_decode import arithmetic_intensity
from tutorial_engine.notebook import expect_error, observe, predict
from tutorial_engine.recordings import load
from tutorial_engine.simulation import Job, simulate
from tutorial_engine.trace import Trace
from tutorial_engine.viz import batch_occupancy, request_times, timeline
from tutorial_engine.viz.roofline import GPUS, roofline

# %% [markdown]
# ## The problem
#
# Ask a model something with a prompt of 200 tokens, and let it write 8. How much work is which step?

# %%
sizes = {"max_num_seqs": 8, "max_model_len": 1280, "num_gpu_blocks_override": 129, "enable_prefix_caching": False}


def engine_with(budget):
    return LLM(dtype="float32", generation_config="vllm", max_num_batched_tokens=budget, **sizes)


def writes(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def some_text(num_tokens, seed=0):
    return {"prompt_token_ids": random.Random(seed).choices(range(1000, 20_000), k=num_tokens)}


llm = engine_with(2048)
with Trace(llm) as trace:
    llm.generate(some_text(200), writes(8), use_tqdm=False)
print("tokens computed in each step:", [record.num_tokens for record in trace])

# %% [markdown]
# The first step computes the whole prompt. That is called **prefill**. Each later step computes one token, the one that
# was written last. That is **decode**. So the first step has 200 times the work. Has it 200 times the time? (The
# number is your machine's.)

# %% tags=["timing", "nbval-ignore-output"]
prefill, decode = trace.records[0].seconds, min(record.seconds for record in trace.records[1:])
print(f"200 times the work, {prefill / decode:.1f} times the time")

# %% [markdown]
# Not nearly. A token of the prompt is much cheaper than a token of the answer. Why, when the model does the same with
# both?

# %% [markdown]
# ## The idea
#
# Imagine a translator with a **dictionary of sixteen volumes**. For each word she has to go through all volumes, from
# the first page to the last, and to look something up on every page. Turning the pages takes long. The look itself is
# quick.
#
# If she has 200 words in front of her, she goes through the volumes *once*, and on every page looks up all 200. She is
# nearly as fast as with one word. But a text that she is writing herself she cannot do like this. The second word
# depends on what comes out for the first. So it is once through all volumes, for one word; then again, for the next.
#
# | the translator | the machine |
# |---|---|
# | the sixteen volumes | the **weights**: 16 GB for a model of 8 billion parameters |
# | turning the pages | reading them from memory: **bandwidth**, bytes per second |
# | a look | a multiply-add: **peak speed**, floating-point operations (FLOP) per second |
# | looks on each page | **arithmetic intensity**: FLOP for each byte read |
# | so many words that looking takes as long as turning | the **ridge** |
# | a page of text that is there already | **prefill**: many tokens, one pass |
# | the text she writes | **decode**: one token, one pass |
# | words of several clients, looked up in the same pass | a **batch** |
# | somebody brings a thick manuscript, the others wait | a **stall** |
# | she takes some pages of it in each pass | **chunked prefill** |
#
# As a formula, with everything counted for one step:
#
# ```
# intensity    = operations / bytes
# seconds     >= max(operations / peak speed, bytes / bandwidth)
# the ridge    = peak speed / bandwidth:  below it a step waits for memory, above it for arithmetic
# ```
#
# This is the **roofline** model (Williams, Waterman and Patterson, 2009). It is a limit, not a forecast: no real step
# is faster, and most are slower.

# %% [markdown]
# ## Under the hood
#
# Does the engine have one code for prefill and one for decode? It has not. A step is a row of tokens, as many as the
# scheduler says, and each weight matrix is multiplied with all of them. Here are the matrices of a layer:

# %%
layer = llm.llm_engine.model_runner.model.layers[0]
for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
    matrix = getattr(layer, name)
    print(f"{name:13}{matrix.in_features:5} numbers in, {matrix.out_features:5} out")

# %% [markdown]
# For n tokens, a matrix of `in` × `out` weights takes 2 · n · in · out operations: a multiplication and an addition for
# each weight and each token. What moves is the matrix itself, n rows that go in, and n rows that come out. If n is
# small against `in` and `out`, nearly all of it is the matrix, *and it is read once, whatever n is*:
#
# ```
# intensity  ≈  2 · n · in · out / (in · out · bytes a number)  =  2 · n / bytes a number
# ```
#
# With 16-bit numbers, the intensity is simply n, the number of tokens in the step.

# %% [markdown]
# ## Try it
#
# ### 1. Looks on each page
#
# A matrix of Llama-3.1-8B has 4,096 × 14,336 weights of 2 bytes. **Predict** its intensity, in FLOP a byte: for one
# token, for 64 requests that each write one, and for a prompt of 4,096 tokens. (The last is not 4,096: at that size the
# rows that go in and out count too. Is it more or less than half?)

# %% tags=["predict"]
guess = predict(one_token=None, sixty_four_writers=None, prompt_of_4096=None)

# %% tags=["experiment", "objective-1", "R175"]
def llama_matrix(num_tokens, bytes_per_number=2):
    return round(arithmetic_intensity(num_tokens, 4096, 14_336, bytes_per_number))


observe(guess, one_token=llama_matrix(1), sixty_four_writers=llama_matrix(64), prompt_of_4096=llama_matrix(4096))

# %% [markdown]
# 64 tokens of one prompt, or one token each of 64 requests: to the matrix it is the same. What counts is how many
# tokens share the reading.
#
# Now your machine. Steps of 1 to 256 tokens, with the small model of this page:

# %% tags=["timing", "nbval-ignore-output"]
def fastest_prefill(num_tokens):
    with Trace(llm) as trace:
        for seed in range(2):
            llm.generate(some_text(num_tokens, seed), writes(1), use_tqdm=False)
    return min(record.seconds for record in trace)


SMOLLM2 = 134_515_008  # parameters of 4 bytes
seconds = {n: fastest_prefill(n) for n in (1, 4, 16, 64, 256)}
print("tokens in the step   time, one token = 1   tokens per second, one token = 1")
for n, took in seconds.items():
    print(f"{n:18}{took / seconds[1]:22.1f}{n * seconds[1] / took:35.1f}")
bandwidth, speed = 4 * SMOLLM2 / seconds[1], 2 * 256 * SMOLLM2 / seconds[256]
print(f"the ridge of this machine is near {speed / bandwidth:.0f} FLOP a byte: {2 * speed / bandwidth:.0f} tokens")

# %% [markdown]
# Read the last column from the top. At first, more tokens are nearly free. Then the curve bends, and from there on
# twice the tokens take twice the time. The bend is your machine's ridge, found with two measurements: the step of one
# token gives the bandwidth (it reads all weights), the step of 256 the speed. With 4-byte numbers, one FLOP a byte is
# two tokens. (This is rough: the *LM head*, the matrix that turns a result into a number for each token of the
# vocabulary, works for the last token only, and the small step has other costs than reading.)
#
# **What this proves.** Prefill and decode are the same computation at two intensities. Batching lifts decode towards
# the ridge. A long prompt is above it already, so to batch prompts gains little.
#
# **Now change one thing:** weights and activations of 1 byte: `llama_matrix(1, 1)` and `llama_matrix(64, 1)`. Predict.
#
# <details><summary>What happens</summary>
#
# 2 and 125: half the bytes for the same operations. That is why quantised weights make *decode* faster, by up to the
# factor by which they are smaller.
# </details>

# %% [markdown]
# ### 2. Where is the ridge?
#
# From the data sheets (16-bit floats, dense):
#
# | | T4 | A100 80 GB | H100 | H200 |
# |---|---|---|---|---|
# | peak speed, TFLOP/s | 65 | 312 | 989 | 989 |
# | bandwidth, TB/s | 0.32 | 2.04 | 3.35 | 4.8 |
#
# **Predict** the ridges of H100 and H200, in FLOP a byte. And which of the four needs the *smallest* batch to be busy?

# %% tags=["predict"]
guess = predict(ridge_h100=None, ridge_h200=None, smallest_batch_is_enough_for=None)

# %% tags=["experiment", "objective-2"]
ridges = {name: round(gpu.ridge) for name, gpu in GPUS.items()}
observe(guess, ridge_h100=ridges["H100"], ridge_h200=ridges["H200"],
        smallest_batch_is_enough_for=min(ridges, key=ridges.get))

# %%
LLAMA_8B = 8_030_261_248 - 128_256 * 4096  # parameters, without the table of embeddings
print("       ridge = requests in a decode step   8B model, one request: tokens per second, at most")
for name, gpu in GPUS.items():
    print(f"{name:6}{ridges[name]:18}{gpu.bandwidth / (2 * LLAMA_8B):40.0f}")

# %% [markdown]
# (Of the table of embeddings a step reads a row for each token, so it does not count. The rest is 15 GB.)
#
# From T4 to H100 arithmetic has grown fifteen times and bandwidth ten times. So the newer card needs *more* requests at
# once to be busy. H200 is an H100 with faster memory: its ridge is lower, and a single request gets 43 % more tokens a
# second. Above 295 FLOP a byte both are equally fast.
#
# In the picture both axes are powers of ten. Left of a bend a step waits for memory. The two points are a decode step
# of 16 requests and a prefill of 2,048 tokens, for the matrix of experiment 1:

# %%
roofline({"16 write": llama_matrix(16), "prompt of 2,048": llama_matrix(2048)})

# %% [markdown]
# **One part does not move.** Attention in a decode step multiplies each request's query with *its own* K and V. Nobody
# shares these, so a larger batch reads more of them. Each key is used by the query heads of its group, once:

# %%
def attention_intensity(batch, context, heads, kv_heads, head_dim=128):
    operations = batch * context * heads * head_dim * 2 * 2  # a multiply-add for q·k, another one for w·v
    numbers = batch * context * kv_heads * head_dim * 2  # K and V
    return operations / (2 * numbers)


print("Llama-3.1-8B, 32 heads, 8 KV heads:", [attention_intensity(batch, 4096, 32, 8) for batch in (1, 16, 256)])
print("without grouped queries:           ", [attention_intensity(batch, 4096, 32, 32) for batch in (1, 16, 256)])

# %% [markdown]
# It is the group size, whatever the batch and the context: 4, far below any ridge. So with long contexts a decode step
# waits for memory even in the largest batch.
#
# **What this proves.** "Decode is memory-bound" is a sentence about a batch size, a context and a machine. The ridge
# tells where it ends.
#
# **Now change one thing:** a GPU whose memory is twice as fast as H200's, with the same arithmetic. Where is its ridge?
#
# <details><summary>What happens</summary>
#
# `GPUS["H200"].flops / (2 * GPUS["H200"].bandwidth)` is 103. Half as many requests fill it, and a single one is twice
# as fast.
# </details>

# %% [markdown]
# ### 3. A thick manuscript
#
# Two times matter to a user:
#
# * **TTFT**, *time to first token*: from the request to the first token. Waiting in the queue, and prefill.
# * **ITL**, *inter-token latency*: the gap between a token and the one before it. One decode step, if all goes well.
#
# Now four requests are writing, and somebody comes with a prompt of 1,024 tokens. Everything that is computed in one
# step ends at the same time. So if all of the prompt is in one step, the four wait for it. `max_num_batched_tokens` is
# the most tokens that a step may have. We try 2,048, 256 and 64.
#
# **Predict**, for each budget: how many tokens has the largest step after the arrival? How many steps does the
# newcomer's prompt need? (In each step the four who write come first, with a token each.) And do all write the same in
# all three cases?

# %% tags=["predict"]
guess = predict(largest_step_2048=None, largest_step_256=None, largest_step_64=None,
                prompt_steps_2048=None, prompt_steps_256=None, prompt_steps_64=None, same_texts=None)

# %% tags=["experiment", "objective-3", "objective-4"]
def late_arrival(llm, num_writers=4):
    """The writers begin; after six steps the newcomer arrives. Returns the trace, and what everybody wrote."""
    engine, texts = llm.llm_engine, {}
    with Trace(llm) as trace:
        for i in range(num_writers):
            engine.add_request(f"writer {i}", some_text(8, seed=i), writes(32))
        while engine.has_unfinished_requests():
            if len(trace) == 6:
                engine.add_request("newcomer", some_text(LONG_PROMPT, seed=9), writes(4))
            texts |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return trace, texts


# %%
runs = {2048: late_arrival(llm)}
for budget in (256, 64):
    del llm  # one model in memory is enough
    llm = engine_with(budget)
    runs[budget] = late_arrival(llm)

# %%
def chunks(trace):
    """Tokens of the newcomer's prompt in each step."""
    spans = [record.scheduled["newcomer"] for record in trace if "newcomer" in record.scheduled]
    return [count for first, count in spans if first < LONG_PROMPT]


largest = {budget: max(r.num_tokens for r in trace.records[6:]) for budget, (trace, _) in runs.items()}
steps = {budget: len(chunks(trace)) for budget, (trace, _) in runs.items()}
observe(guess, largest_step_2048=largest[2048], largest_step_256=largest[256], largest_step_64=largest[64],
        prompt_steps_2048=steps[2048], prompt_steps_256=steps[256], prompt_steps_64=steps[64],
        same_texts=all(texts == runs[2048][1] for _, texts in runs.values()))

# %%
print("chunks with 256:", chunks(runs[256][0]))
batch_occupancy(runs[256][0])

# %% [markdown]
# 256 − 4 = 252 are left for the newcomer in each step: four times 252, and 16. With 64 it is 60 in each step, seventeen
# times, and 4. Nobody's text changes. Look at the four upper rows: there is no step without them.
#
# In steps, the three runs look alike for those who write: a token in each. The stall is in the *length* of a step. So
# here is the same with a clock, first in one piece, then in chunks of at most 60. Each thin line is a token. (Your
# machine's times.)

# %% tags=["timing", "nbval-ignore-output"]
timeline(runs[2048][0], clock="seconds")

# %% tags=["timing", "nbval-ignore-output"]
timeline(runs[64][0], clock="seconds")

# %% tags=["timing", "nbval-ignore-output"]
print("budget   longest gap of a writer, in usual gaps   newcomer's TTFT, budget 2,048 = 1")
for budget, (trace, _) in runs.items():
    times = request_times(trace, "seconds")
    gaps = times["writer 0"].itl
    print(f"{budget:6}{max(gaps) / median(gaps[:5]):30.0f}"
          f"{times['newcomer'].ttft / request_times(runs[2048][0], 'seconds')['newcomer'].ttft:32.1f}")

# %% [markdown]
# The hole in the first picture is the stall. Four people see their text stop, because a fifth has come. In the second
# the tokens come a bit slower for a while, and never stop.
#
# **What this proves.** The token budget bounds the largest step, so it bounds the pause. It changes the order of the
# work and no result.
#
# **Now change one thing:** seven who write instead of four, with the budget of 64: `late_arrival(llm, 7)`. How many
# steps does the prompt need?
#
# <details><summary>What happens</summary>
#
# 64 − 7 = 57 are left for it. Seventeen chunks of 57, and one of 55: 18 steps, as with four. The last chunk was nearly
# empty before.
# </details>

# %% [markdown]
# ### 4. The same on an H200
#
# The runs behind this experiment are recorded: this engine, on one H200, with a model of Llama-3.1-8B's shape in
# bfloat16. (The weights are random. A step's time does not depend on them.) First 1 to 256 requests side by side, each
# with a prompt of 64 tokens: a prefill step for all prompts together, then decode steps.
#
# **Predict.** How many times as long as a decode step of one request takes one of 256? And a prefill step of 8,192
# tokens, against one of 4,096? By the data sheet, to read 15 GB takes 3.1 ms. What share of the bandwidth does the
# decode step of one request reach?

# %% tags=["predict"]
guess = predict(decode_256_against_1=None, prefill_8192_against_4096=None, percent_of_bandwidth=None)

# %% tags=["experiment", "objective-3", "objective-4"]
batch = load("llama-8b-batch").records
decode_ms, prefill_ms = {}, {}
for i in range(0, len(batch), 9):  # a prefill step and eight decode steps for each size
    prefill_ms[batch[i].num_tokens] = 1000 * batch[i].seconds
    decode_ms[batch[i + 1].num_tokens] = 1000 * median(record.seconds for record in batch[i + 1:i + 9])
limit_ms = 1000 * 2 * LLAMA_8B / GPUS["H200"].bandwidth
observe(guess, decode_256_against_1=round(decode_ms[256] / decode_ms[1], 1),
        prefill_8192_against_4096=round(prefill_ms[8192] / prefill_ms[4096], 1),
        percent_of_bandwidth=round(100 * limit_ms / decode_ms[1]))

# %%
print("decode:  requests      ms  tokens/s      prefill:  tokens      ms  tokens/s")
for (n, ms), (m, prefill) in zip(decode_ms.items(), prefill_ms.items(), strict=True):
    print(f"{n:18}{ms:8.1f}{1000 * n / ms:10,.0f}{m:24,}{prefill:8.1f}{1000 * m / prefill:10,.0f}")

# %% [markdown]
# On the left, 256 times the tokens in about twice the time: these steps wait for memory, and the further requests ride
# along. On the right it is much the same up to 256 tokens. Above 1,024, twice the tokens take twice the time, at about
# 46,000 tokens a second. The data sheet put the bend at 206.
#
# Now the thick manuscript: sixteen write, and a prompt of 4,000 tokens comes. First with a budget of 8,192,
# then with 512:

# %%
stall, cut = load("llama-8b-stall"), load("llama-8b-chunks")
timeline(stall, clock="seconds")

# %%
timeline(cut, clock="seconds")

# %% [markdown]
# And as numbers, next to those of the paper that made chunks known. Sarathi-Serve (2024) measured Yi-34B on two A100,
# with many chats, prompts mixed into decode steps: once whole, once cut.

# %%
def longest_gap_and_ttft(trace):
    times = request_times(trace, "seconds")
    return 1000 * max(max(t.itl) for name, t in times.items() if name != "long"), 1000 * times["long"].ttft


(gap_whole, ttft_whole), (gap_cut, ttft_cut) = longest_gap_and_ttft(stall), longest_gap_and_ttft(cut)
print("                                            paper           ours")
print(f"slowest gaps, prompts whole / cut     680 / 140 ms    {gap_whole:.0f} / {gap_cut:.0f} ms")
print(f"                     that many times {680 / 140:8.1f}       {gap_whole / gap_cut:8.1f}")
print(f"first token, cut / whole              760 / 530 ms    {ttft_cut:.0f} / {ttft_whole:.0f} ms")
print(f"                     that many times {760 / 530:8.1f}       {ttft_cut / ttft_whole:8.1f}")
print("our steps with a chunk, ms:", [round(1000 * r.seconds, 1) for r in cut.records[30:38]])

# %% [markdown]
# Not the same measurement (theirs: the 99th percentile of gaps and the median of first tokens in a whole workload;
# ours: one arrival), and yet the same bargain: gaps five or six times shorter, and a first token that comes
# some 30 to 40 % later.
#
# The last line says *what chunking costs*. Each chunk has 512 − 16 = 496 tokens, and the steps get longer: every chunk
# has to read the K and V of all chunks before it.
#
# **What this proves.** The stall is as long as the prefill, on any machine. A budget turns it into many small delays,
# and the newcomer pays for that.
#
# **Now change one thing:** which share of H200's peak does the prefill of 8,192 tokens reach? The layers have 6.98
# billion weights, with 2 operations each for every token. (The LM head works for the last token only.)
#
# <details><summary>What happens</summary>
#
# 2 × 6.98e9 × 8,192 / 0.1794 s = 637 TFLOP/s, 64 % of 989. (Attention adds a little to that.)
# </details>

# %% [markdown]
# ## Dial it in
#
# | knob | default in vLLM | what it does here |
# |---|---|---|
# | `max_num_batched_tokens` | 2,048 to 16,384, by machine and use | the largest step: small for even gaps |
# | `enable_chunked_prefill` | on | off: each prompt in one step |
# | `long_prefill_token_threshold` | 0: none | the largest chunk of one prompt |
# | `max_num_seqs` | 256 to 1,024, by machine | how many decodes share a reading of the weights |
#
# The recordings give a rule for the time of a step on that H200: 5.1 ms, as where sixteen write, or 0.0225 ms for each
# token, whichever is longer. With it, the scheduler without a model plays the arrival for any budget. **Predict**:
# which is the largest of these budgets with which those who write notice nothing at all: 1,024, 512, 256, 128 or 64?

# %% tags=["predict"]
guess = predict(nobody_notices=None)

# %% tags=["experiment", "objective-4"]
def h200(num_tokens):
    return max(0.0051, 0.0000225 * num_tokens)


found = {}
print("budget   longest gap   newcomer's first token")
for budget in (8192, 2048, 1024, 512, 256, 128, 64):
    jobs = [*[Job(8, 300)] * 16, Job(4000, 4, arrival=0.1)]
    times = request_times(simulate(jobs, num_blocks=800, seconds=h200, max_num_batched_tokens=budget,
                                   max_num_seqs=32), "seconds")
    found[budget] = round(1000 * max(times["0"].itl), 1)
    print(f"{budget:6}{found[budget]:11} ms{1000 * times['16'].ttft:21.0f} ms")
observe(guess, nobody_notices=max(b for b in found if found[b] == min(found.values())))

# %% [markdown]
# 128, where the first token takes twice as long already. With 256 the gap is 0.7 ms longer, and the newcomer pays next
# to nothing: that is the better bargain. With 64 he waits twice as long again, and nobody has anything of it, since the
# weights must be read in any case. It is the ridge once more: 5.1 / 0.0225 = 227 tokens. (With a budget of 512 the rule
# says 11.5 ms, and the recording has up to 17. The rule knows nothing of the K and V that chunks read again, nor of the
# time between steps.)

# %% [markdown]
# ## Where it bites you
#
# **1. "The mean gap is fine."** It is, and somebody sees the text stop. Mean and longest gap of a writer in the two
# recordings:

# %%
for name, trace in (("whole", stall), ("cut", cut)):
    gaps = request_times(trace, "seconds")["0"].itl
    print(f"{name:6} mean {1000 * sum(gaps) / len(gaps):.1f} ms   longest {1000 * max(gaps):.0f} ms")

# %% [markdown]
# **2. "Our server makes 40,000 tokens a second."** Of which kind? Prompt tokens are many times cheaper than written
# ones. Ask for both numbers.
#
# **3. "TTFT is the time of prefill."** On an idle server. On a busy one it is mostly the queue.
#
# **4. "A larger GPU makes the small model faster."** A 135M model is read in 0.06 ms by an H200, and starting a few
# hundred kernels takes far longer. The roofline is a limit; a small model on a large GPU is nowhere near it.
#
# **5. "One token more in a chunk does not matter."** It can. GPUs multiply in tiles: Sarathi-Serve found a chunk of 257
# tokens up to 32 % slower than one of 256.
#
# **6. "The smallest budget gives the best latency."** Not below the ridge (see above), and not below
# `max_num_seqs`: then not even those who write would all get their token. That is refused:

# %%
with expect_error(ValueError):
    LLM(max_num_batched_tokens=4, max_num_seqs=8)

# %% [markdown]
# ## In production
#
# | you serve | what to do |
# |---|---|
# | a chat, short prompts | the default is fine; look at the slowest gaps, not at the mean |
# | a chat, and now and then a document | a smaller `max_num_batched_tokens`; tell the document's owner what it costs |
# | a night's batch | a large budget: nobody reads along |
# | long prompts all the time, strict gaps | *disaggregated prefill*: one GPU for prompts, one for writing |
#
# What to watch on a running vLLM:
#
# * `vllm:time_to_first_token_seconds`, and `vllm:request_queue_time_seconds` to see how much of it is the queue
# * `vllm:inter_token_latency_seconds`: the slowest percent shows stalls
# * `vllm:prompt_tokens_total` and `vllm:generation_tokens_total`: two kinds of work, two counters
#
# `vllm bench serve` reports TTFT, ITL and TPOT. TPOT (*time per output token*) is the mean gap of a request, so a stall
# hides in it.
#
# ### Exercise: work, chunks and gaps (25 minutes)
#
# Write the intensity of a matrix product, the chunks of a prompt, and the two times of a user, in
# [a notebook of its own](../../exercises/1_core_concepts/02_prefill_and_decode.ipynb). A check looks at your code and
# says what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● What is prefill, what is decode?</summary>
#
# Prefill computes the tokens of the prompt, many in a step. Decode computes one token for each request in a step, the
# one that was written last.
# </details>
#
# <details><summary>2. ● What is arithmetic intensity, and what is the ridge?</summary>
#
# Operations for each byte moved: a property of the computation. Peak speed divided by bandwidth: a property of the
# machine. Below the ridge a step waits for memory.
# </details>
#
# <details><summary>3. ● What are TTFT and ITL?</summary>
#
# The time from the request to its first token, and the gap between a token and the one before it.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● Why does batching help decode so much, and prefill hardly?</summary>
#
# A decode step reads all weights for a few tokens; more requests share the reading. A long prompt already has enough
# tokens to be limited by arithmetic, and two prompts take twice the time of one.
# </details>
#
# <details><summary>5. ●● 16-bit weights, a GPU of 400 TFLOP/s and 2 TB/s. From how many requests on does decode wait
# for arithmetic?</summary>
#
# 400 / 2 = 200 FLOP a byte, so about 200 requests. This counts the weights; attention stays below the ridge.
# </details>
#
# <details><summary>6. ●● Budget 512, twelve requests write, a prompt of 2,000 tokens comes. How many steps until its
# first token?</summary>
#
# 500 are left for it in each step: four.
# </details>
#
# <details><summary>7. ●● Why do later chunks of the same size take longer?</summary>
#
# The tokens of each chunk attend to everything before them, so they read the K and V of all earlier chunks.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● What does a chunk of 64 cost in total time, compared with one of 512?</summary>
#
# Below the ridge a step is not shorter for being smaller, so eight steps of 64 take several times as long as one of
# 512, if nothing else fills them. On a machine with its ridge at 20 tokens it costs next to nothing.
# </details>
#
# <details><summary>9. ●●● You may choose: H200 instead of H100, at the same arithmetic. Who gains?</summary>
#
# Those whose steps wait for memory: chats with few requests at once, long contexts. (And there is more room for the
# cache, so batches can be larger.) Prefill of long prompts gains nothing.
# </details>
#
# <details><summary>10. ●●●● Your gaps must stay below 30 ms, and prompts of 30,000 tokens come all the time. Chunks, or
# prompts on a GPU of their own?</summary>
#
# Chunks keep the gaps, but if there is nearly always a prompt in work, then nearly all steps are long ones, and the
# first tokens come late. Measure how large the share of steps with a chunk is. If it is most of them, separate: decode
# steps are then always short, and prefill can use large steps. The price is a second GPU that idles when no prompts
# come, and the transfer of K and V: 30,000 tokens of an 8B model are 3.7 GiB.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# intensity of a step    ≈ 2 × tokens in the step / bytes a number          16 bits: the number of tokens
# intensity of attention ≈ query heads / KV heads, in decode, 16 bits       whatever the batch
# ridge                  = peak speed / bandwidth     T4 203, A100 153, H100 295, H200 206 FLOP a byte
# a decode step          ≥ weights / bandwidth        8B on H200: 3.1 ms; recorded: 4.5 ms
# TTFT                   = first token - arrival: queue + prefill
# ITL                    = gap between two tokens; its largest value shows the stall, its mean hides it
# steps of a prompt      = prompt / (budget - those who write), rounded up
# budget                 bounds the largest step; below the ridge a smaller one gains nothing
# ```
#
# **Sources.** Roofline: Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for
# Multicore Architectures*, Communications of the ACM, 2009. Peak speeds and bandwidths: NVIDIA's data sheets of T4,
# A100 80 GB SXM, H100 SXM and H200 SXM, without sparsity. Stalls and chunks: Agrawal et al., *SARATHI*, 2023, [arXiv
# 2308.16369](https://arxiv.org/abs/2308.16369), and *Taming Throughput-Latency Tradeoff in LLM Inference with
# Sarathi-Serve*, OSDI 2024, [arXiv 2403.02310](https://arxiv.org/abs/2403.02310): Table 4 (Yi-34B, ShareGPT; "hybrid
# batching only" and "combined"), and section 4.3 for the chunk of 257. Intensity of decode: Pope et al., *Efficiently
# Scaling Transformer Inference*, 2022, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102). Tuning: vLLM
# documentation, [Optimization and Tuning](https://docs.vllm.ai/en/latest/configuration/optimization/). Defaults: vLLM
# 0.33, read in its source. The recordings are ours, made by `bench/record_gpu.py`.
#
# **Next** in the course: [PagedAttention](03_paged_attention.ipynb), on where the K and V of all of them find room.
