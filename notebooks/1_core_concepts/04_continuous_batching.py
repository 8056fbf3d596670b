# %% [markdown]
# # Continuous batching
#
# You will be able to
#
# - count the steps of a static and of a continuous batch with a pencil, and say how large the gain can be
# - explain why one long prompt makes everybody wait, and what cutting it into chunks costs and buys
# - say who is preempted when the memory is full, and what that costs
# - choose `max_num_seqs` and `max_num_batched_tokens` for a chat and for a night's batch
#
# Needs: a CPU and 3 GB of free memory, no GPU. About 45 minutes to read and do; all cells together run in less than one
# minute. You should have read [The KV cache](01_the_kv_cache.ipynb); for the blocks of experiment 4
# [PagedAttention](03_paged_attention.ipynb) helps.

# %% tags=["parameters"]
LENGTHS = [3, 12, 5, 20, 4, 8, 6, 10]  # tokens that the eight requests write; fast: [3, 5, 2, 6, 4, 2, 3, 4]
NUM_REQUESTS = 1024  # requests in experiment 2; fast: 64

# %%
import heapq
import random

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.notebook import expect_error, observe, predict, show_source
from tutorial_engine.simulation import Job, StaticScheduler, simulate, workload
from tutorial_engine.trace import Trace
from tutorial_engine.viz import batch_occupancy, knobs, memory_map, request_times, timeline, watch

# %% [markdown]
# ## The problem
#
# A step of the model costs nearly the same for one request as for four: either way all weights are read once. So an
# engine computes several requests together, in a *batch*. But which ones, and for how long?
#
# The obvious way: take four requests, run them until all are done, take the next four. This is *static batching*. It
# would be perfect if all answers were equally long. They are not, and nobody knows beforehand how long each will be.
#
# Here is a small engine with four *seats*: `max_num_seqs=4`, so at most four requests in a step. We give it eight
# requests, in two batches of four. (The other settings matter later. `ignore_eos=True` makes each request write exactly
# as many tokens as we say. `watch` records the steps and draws them.)

# %%
sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
llm = LLM(dtype="float32", num_gpu_blocks_override=19, max_model_len=256, generation_config="vllm", **sizes)
tokenizer = llm.get_tokenizer()


def writes(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


numbers = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
prompts = [{"prompt_token_ids": tokenizer.encode(f"{number} things to do in the rain:")} for number in numbers]
params = [writes(n) for n in LENGTHS]
print("tokens of each prompt:", [len(p["prompt_token_ids"]) for p in prompts], " to write:", LENGTHS)
with watch(llm, batch_occupancy) as static:
    static_answers = [*llm.generate(prompts[:4], params[:4], use_tqdm=False),
                      *llm.generate(prompts[4:], params[4:], use_tqdm=False)]

# %% [markdown]
# **How to read it.** A row is a request, a column is a step. A box says that the request was computed in that step:
# first its prompt, then one token a step. Below the title: how many tokens and how many requests each step had. (124
# tokens in all: 64 of prompts, and 68 − 8 of answers, because the last token of each answer is never read.)
#
# Look at the white space. The first request has its answer after three steps, and its seat stays empty for the next 17,
# because the fourth is still writing. Meanwhile four others wait outside. That is the problem of this page.

# %% [markdown]
# ## The idea
#
# Static batching is a **tour bus**. Whoever is on board when it leaves stays until the last has seen everything, and
# nobody gets on meanwhile. Continuous batching is a **city bus**. It stops after every step. Whoever has arrived gets
# off, and whoever waits at the stop gets on.
#
# | the city bus | the engine |
# |---|---|
# | it drives from one stop to the next | a **step**: the model runs once, and everybody aboard gets a token |
# | at the stop | the **scheduler** decides who is in the next step |
# | seats | `max_num_seqs` |
# | how much may be loaded at one stop | `max_num_batched_tokens`, the **token budget** of a step |
# | somebody with forty suitcases loads a few at each stop | **chunked prefill**: a long prompt is computed in pieces |
# | luggage room; each passenger's luggage grows with each stop | blocks of the **KV cache** |
# | the room is full: the last who got on gets off, loses the luggage, is the next to get on | **preemption** |
# | nobody pushes past the first in the queue | **first come, first served** |
#
# The paper that brought this to language models, Orca (2022), calls it *iteration-level scheduling*: decide after each
# iteration of the model, not after each request. Others say *continuous* or *in-flight* batching. It means the same.

# %% [markdown]
# ## Under the hood
#
# Our [scheduler](../../tutorial_engine/scheduler.py) makes one plan for each step. Who comes first? The lines are read
# from the source that is running:

# %%
from tutorial_engine.scheduler import Scheduler

show_source(Scheduler.schedule, only=("budget_left", "_schedule_running", "if out.preempted", "elif blocks_come_back",
                                      "else:", "_schedule_waiting"))

# %% [markdown]
# A plan begins with the full token budget. First those who are *running* get their tokens: one each, if they are
# writing. Then, **if nobody had to be preempted**, the *waiting* ones get on, as long as something is left of three
# things. (`blocks_come_back` is for GPUs, where a step is planned while the one before still runs. If a request ends in
# that one, its blocks are about to be free, and the plan waits for them.)

# %%
show_source(Scheduler._schedule_waiting, only=("while self.waiting", ">= self.config.max_num_seqs", "budget_left == 0",
                                               "num_new = min", "allocate_slots(", "if new_blocks is None", "popleft"))

# %% [markdown]
# Seats, budget, blocks: one `if` for each, and behind each a `return` that is not shown, so the first who does not
# fit ends the boarding. `popleft` lets the first in the queue get on. There is no "batch size" anywhere, and no
# difference between a prompt and an answer: a request has *tokens that are not computed yet*, many or one, and gets as
# many of them as the budget allows. That is all of continuous batching.
#
# Who runs when depends on lengths alone, so it can be tried without weights, thousands of steps a second: `simulate`,
# in [simulation.py](../../tutorial_engine/simulation.py), is the real scheduler and the real block manager without a
# model. To compare, it can make a tour bus of them. One rule is enough: nobody gets on once somebody writes.

# %%
show_source(StaticScheduler)

# %% [markdown]
# **One step, many lengths.** In the same step one request may compute 50 tokens of its prompt, and another a single
# token. Must the short one be padded to the length of the long one? No. The tokens of all requests lie one behind the
# other in *one flat row*, and a list says where each request begins (`query_start_loc`, in
# [attention.py](../../tutorial_engine/attention.py)). The matrix products do not care which token is whose. Only
# attention does. (Orca calls this *selective batching*.) What would a rectangle cost, as wide as the longest? Twelve
# made-up requests, with prompts of 12 to 80 tokens and answers of 6 to 40, and a budget of 64 a step:

# %% tags=["R124"]
mixed = simulate(workload(12, (12, 80), (6, 40)), num_blocks=33, **sizes)
counts = [[n for _, n in record.scheduled.values()] for record in mixed]
flat, padded = sum(map(sum, counts)), sum(len(step) * max(step) for step in counts)
print("tokens of each request in the first steps:", counts[:5])
print(f"all {len(mixed)} steps: {flat} tokens in flat rows, {padded} in rectangles: {1 - flat / padded:.0%} padding")

# %% [markdown]
# In the second step the first request writes, and the other two compute 14 and 49 tokens of their prompts: 64 tokens in
# a flat row, 3 × 49 = 147 in a rectangle. Whether `simulate` tells the truth, experiment 1 checks.

# %% [markdown]
# ## Try it
#
# ### 1. The city bus
#
# The same eight requests, handed over all at once. They write 3, 12, 5, 20, 4, 8, 6 and 10 tokens. The prompts are
# short: all that get on are computed in one step, which also gives the first token.
#
# **Predict**, with a pencil. How many steps did the two static batches need? How many does the city bus need? In which
# step, counted from 0, does the fifth request get on? And are the texts the same?

# %% tags=["predict"]
guess = predict(static_steps=None, continuous_steps=None, fifth_gets_on_in_step=None, same_texts=None)

# %% tags=["experiment", "objective-1", "R26", "R28", "R177"]
with watch(llm, batch_occupancy) as continuous:
    answers = llm.generate(prompts, params, use_tqdm=False)

# %%
def texts(outputs):
    return [output.outputs[0].text for output in outputs]


fifth = answers[4].request_id
observe(guess, static_steps=len(static), continuous_steps=len(continuous),
        fifth_gets_on_in_step=next(r.step for r in continuous if fifth in r.scheduled),
        same_texts=texts(answers) == texts(static_answers))

# %% [markdown]
# The first request gets its last token in step 2, and in step 3 the fifth has its seat. Not one step is lost between.
# (Its length was known beforehand. Where steps are planned one ahead, as vLLM does on a GPU, a text that ends by itself
# gives its seat back one step later.)
#
# Nobody writes faster: each request still gets one token a step. What is gone is the *waiting*. The fifth request had
# its first token after 21 steps (20 of the first batch, and its own first), and now it has it after 4.
#
# **Does the simulator tell the truth?** Compare it with what the real model did: who was in which step, which tokens of
# it were computed, and how many blocks it held.

# %%
def plan(trace):
    """For each step: the requests in it, each as [first token, how many], and how many blocks each holds."""
    return [[(span, len(record.tables[name])) for name, span in record.scheduled.items()] for record in trace]


jobs = [Job(len(p["prompt_token_ids"]), n) for p, n in zip(prompts, LENGTHS)]
simulated = simulate(jobs, num_blocks=19, **sizes)
simulated_static = simulate(jobs, num_blocks=19, static=True, **sizes)
print("continuous:", len(simulated), "steps, the same plan:", plan(simulated) == plan(continuous))
print("static:    ", len(simulated_static), "steps, the same plan:", plan(simulated_static) == plan(static))

# %% [markdown]
# In every step, to the block. So from here on the simulator may speak for the engine.
#
# Steps are not seconds. This is your machine's number. (The static run came first, and a first run is often slower.)

# %% tags=["timing", "nbval-ignore-output"]
times_faster = static.seconds / continuous.seconds
print(f"{len(static) / len(continuous):.2f} times fewer steps, {times_faster:.2f} times less time")

# %% [markdown]
# **What this proves.** The gain is nothing but filled seats. Both ways computed 68 tokens of answers; the static one
# had 4 × 30 = 120 places for them, the continuous one 4 × 22 = 88.
#
# **Now change one thing:** put the longest request first: `LENGTHS = [20, 12, 10, 8, 6, 5, 4, 3]`. Predict both counts.
#
# <details><summary>What happens</summary>
#
# Static: 20 + 6 = 26. Continuous: 20, since the seats of 12, 10 and 8 are refilled with 6, 5, 4 and 3 before step 20.
# With the long ones first nothing long is left for the end. An engine does not know who will be long, so it cannot do
# that.
# </details>

# %% [markdown]
# ### 2. How large can the gain be?
#
# Now 1,024 requests, and 4 to 256 seats. Their lengths are made up, but in the shape of real chats: many short answers,
# a few very long. (They are drawn around a mean of 338 tokens, that of the answers to ShareGPT chats in the
# PagedAttention paper. The spread is our choice.) Two short functions count the steps, if memory and budget are no
# limit. The last lines let the scheduler itself count 48 shorter requests, and print whether it agrees:

# %%
def static_steps(lengths, seats):
    return sum(max(lengths[i:i + seats]) for i in range(0, len(lengths), seats))


def continuous_steps(lengths, seats):
    free_at = [0] * seats  # for each seat, the step in which it is free
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)  # the next in the queue takes the seat that is free first
    return max(free_at)


rng = random.Random(0)
chats = [min(2048, max(1, round(rng.lognormvariate(5.54, 0.755)))) for _ in range(NUM_REQUESTS)]
print(f"mean {sum(chats) / len(chats):.0f}, median {sorted(chats)[len(chats) // 2]}, longest {max(chats):,}")
few = [length // 4 + 1 for length in chats[:48]]  # the scheduler agrees with the two functions:
print(all(len(simulate([Job(4, n) for n in few], num_blocks=1000, max_num_seqs=8, static=rule is static_steps))
          == rule(few, 8) for rule in (static_steps, continuous_steps)))

# %% [markdown]
# **Predict.** With 4 seats, how many times fewer steps does the continuous batch need? With 32? With 256? And what if
# all 1,024 answers have exactly 338 tokens, with 32 seats? (Guess first: how long is the longest of 4, of 32, of 256?)

# %% tags=["predict"]
guess = predict(gain_4_seats=None, gain_32_seats=None, gain_256_seats=None, gain_equal_lengths=None)

# %% tags=["experiment", "objective-1"]
def gain(lengths, seats):
    return static_steps(lengths, seats) / continuous_steps(lengths, seats)


observe(guess, gain_4_seats=gain(chats, 4), gain_32_seats=gain(chats, 32), gain_256_seats=gain(chats, 256),
        gain_equal_lengths=gain([338] * NUM_REQUESTS, 32))

# %%
print("seats    static  continuous   gain   seats filled: static  continuous")
for seats in (1, 4, 8, 16, 32, 64, 128, 256):
    counts = static_steps(chats, seats), continuous_steps(chats, seats)
    filled = [sum(chats) / seats / steps for steps in counts]
    print(f"{seats:5}{counts[0]:10,}{counts[1]:12,}{gain(chats, seats):7.2f}{filled[0]:22.0%}{filled[1]:12.0%}")

# %% [markdown]
# Read the table from the top.
#
# - *One seat*: there is no batch, and nothing to gain.
# - *More seats, more gain*: a static batch lasts as long as its **longest** member, and among 32 there is nearly always
#   a very long one. The ceiling is (mean of the longest of a batch) / (mean of all). With 32 seats: 39,287 steps in 32
#   batches are 1,228 each, and 1,228 / 342 = 3.6.
# - *From 128 on it falls*. With 1,024 requests and 256 seats there are only four rounds, and at the end a few long
#   answers run alone: the **tail**. Look at the last column. A queue that never gets empty has no tail.
# - *Equal lengths*: 1. Continuous batching buys nothing there. Its whole gain comes from lengths that differ.
#
# **What this proves.** "Continuous batching is so many times faster" is a sentence about a workload, not about an
# engine. Orca's famous 36.9 times (GPT-3 175B, against NVIDIA's FasterTransformer, at equal latency) is a whole system
# against a whole system. Steps alone, for these lengths and from 4 seats on, give 1.85 to 3.63.
#
# **Now change one thing:** sort the requests by length before static batching: `gain(sorted(chats), 32)`. What is left?
#
# <details><summary>What happens</summary>
#
# Nothing, 1.00: each batch then has members of nearly one length. But nobody can sort answers that are not written yet.
# </details>

# %% [markdown]
# ### 3. Forty suitcases
#
# Three requests are writing. A fourth comes, with a prompt of 1,024 tokens. Our simulated machine needs 20 ms for a
# step, and from 40 tokens on 0.5 ms for each token (that is about a small model on a laptop). A budget of 2,048 takes
# the whole prompt into one step. A budget of 64 cuts it.
#
# **Predict.** For how many milliseconds do the three write nothing, at most, with a budget of 2,048? With 64? Over how
# many steps is the prompt cut with 64? And the newcomer: is its *time to first token* (TTFT) longer with 64?

# %% tags=["predict"]
guess = predict(longest_pause_ms_2048=None, longest_pause_ms_64=None, steps_for_the_prompt_64=None,
                newcomer_waits_longer=None)

# %% tags=["experiment", "objective-2"]
def late_arrival(budget, prompt=1024):
    jobs = [*[Job(8, 60)] * 3, Job(prompt, 4, arrival=0.19)]  # it comes after 0.19 seconds
    return simulate(jobs, num_blocks=301, max_num_seqs=4, max_num_batched_tokens=budget)


def pause_and_ttft(trace):
    """In ms: the longest pause of the three who write, and the newcomer's time to first token."""
    times = request_times(trace, "seconds")
    return (round(1000 * max(max(times[name].itl) for name in "012")), round(1000 * times["3"].ttft))


whole, cut = late_arrival(2048), late_arrival(64)
(pause_whole, ttft_whole), (pause_cut, ttft_cut) = pause_and_ttft(whole), pause_and_ttft(cut)
observe(guess, longest_pause_ms_2048=pause_whole, longest_pause_ms_64=pause_cut,
        steps_for_the_prompt_64=sum(r.scheduled.get("3", [1024])[0] < 1024 for r in cut),
        newcomer_waits_longer=ttft_cut > ttft_whole)

# %%
timeline(whole, clock="seconds", names={"3": "newcomer"})

# %%
timeline(cut, clock="seconds", names={"3": "newcomer"})

# %% [markdown]
# Each thin line is a token, and ITL (*inter-token latency*) is the gap between two. In the first picture is a hole in
# three rows: half a second of silence, because somebody else came. In the second the tokens come a little slower for
# a while, and never stop. (The newcomer comes in the middle of a step, and is *queued* for the 10 ms until its end.)
#
# Who pays? The newcomer: each step spends 3 of its 64 tokens on those who write, so the prompt is ready a little later:
# 548 ms instead of 524. Those who write always come first. Here is the whole curve:

# %%
print("budget   largest step   longest pause   newcomer's TTFT   all done after")
for budget in (2048, 512, 256, 128, 64, 32, 16, 8):
    trace = late_arrival(budget)
    pause, ttft = pause_and_ttft(trace)
    largest = max(r.num_tokens for r in trace)
    print(f"{budget:6}{largest:15,}{pause:13} ms{ttft:15,} ms{trace.records[-1].time:15.2f} s")

# %% [markdown]
# Down to 32 the pauses shrink. Below, they do not: a step costs 20 ms in any case, so a small step is half empty, and
# the newcomer waits for seconds. The turning point is where a step begins to cost more than reading the weights: 40
# tokens on this machine, some hundreds on a GPU.
#
# A curious thing is in the last column: down to 32, cutting even saves time. Three single tokens need a step of 20 ms
# when they are alone. In a step with a chunk they add 1.5 ms (Sarathi calls them *piggybacked*). What this simple clock
# leaves out: each chunk must read again the K and V of the chunks before it. So small chunks cost more than it says.
#
# **And the real engine?** It has the budget of 64 as well. We call its steps by hand, and a prompt of 160 tokens comes
# after 10 of them (for the simulator after 0.19 s, in the tenth step of 20 ms). Is the plan the simulator's, and does
# the newcomer write the same as when it is alone?

# %%
long_prompt = {"prompt_token_ids": (tokenizer.encode("The bus was late, and it rained. ") * 20)[:160]}
engine = llm.llm_engine
with Trace(llm) as real:
    for i in range(3):
        engine.add_request(str(i), prompts[i], writes(18))
    said = {}
    while engine.has_unfinished_requests():
        if len(real) == 10:
            engine.add_request("3", long_prompt, writes(4))
        said |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
expected = simulate([*[Job(8, 18)] * 3, Job(160, 4, arrival=0.19)], num_blocks=19, **sizes)
print("tokens of the newcomer in each step:", [r.scheduled["3"][1] for r in real if "3" in r.scheduled])
print("the simulator's plan:", plan(real) == plan(expected))
alone = llm.generate(long_prompt, writes(4), use_tqdm=False)[0].outputs[0].token_ids
print("same tokens as alone:", said["3"] == list(alone))

# %% [markdown]
# **What this proves.** The budget bounds the size of a step, and so the pause of everybody aboard. It is a promise to
# those who write, paid by those who arrive. It changes no word.
#
# **Now change one thing:** let the newcomer come with 4,096 tokens: `pause_and_ttft(late_arrival(2048, 4096))`. What is
# the longest pause now, and why is it not four times as long?
#
# <details><summary>What happens</summary>
#
# 1,024 ms, twice as long: the budget of 2,048 itself has become the limit, and cuts the prompt in three.
# </details>

# %% [markdown]
# ### 4. The luggage room is full
#
# Seats are not the only limit. Our engine has 18 blocks of 16 tokens (19 at the top, and block 0 is nobody's). Four
# requests come with prompts of 62 tokens, which is 4 blocks each, and write 12 tokens. 16 blocks for four prompts: all
# fit. But the third token that each writes is its 65th, and needs a fifth block.
#
# **Predict.** The budget of 64 lets one prompt after the other in, so each request is a step behind the one before it.
# How often is somebody preempted? Without preemptions, 4 × (62 + 11) = 292 tokens would be computed (the 12th is never
# read); how many are? And are the words those that each would have written alone?

# %% tags=["predict"]
guess = predict(preemptions=None, tokens_computed=None, same_words=None)

# %% tags=["experiment", "objective-3"]
story = tokenizer.encode("It had rained all night, and in the morning the street was a river. ") * 8
crowd = [{"prompt_token_ids": story[i:i + 62]} for i in range(4)]
with watch(llm, batch_occupancy, memory_map) as full:
    together = llm.generate(crowd, writes(12), use_tqdm=False)

# %%
victims = [request for record in full for request in record.preempted]
place = [output.request_id for output in together].index(victims[0])  # 0 to 3
alone = llm.generate(crowd[place], writes(12), use_tqdm=False)
observe(guess, preemptions=len(victims), tokens_computed=full.tokens_computed,
        same_words=texts(alone) == [texts(together)[place]])

# %%
reasons = [record.waiting.get(victims[0], "runs") for record in full]
print("who was preempted, counted from 0:", place)
print("what it did from step 4 on:", list(dict.fromkeys(reasons[4:])))
print("the simulator's plan:", plan(simulate([Job(62, 12)] * 4, num_blocks=19, **sizes)) == plan(full))

# %% [markdown]
# Follow it in the upper picture. The first two take their fifth blocks, 18 are given out, and then the third needs one.
# Nothing is free. Who must go? **Not the one who asks, but the one who came last**: the fourth, which had computed its
# prompt of 62 tokens and one more. All 63 are lost, and 292 + 63 = 355. Its words are not lost: they are a few token
# ids, and are kept. It waits at the *front* of the queue until the first leaves, computes prompt and words again in two
# chunks, and goes on where it was. In the picture this has a colour of its own. (vLLM does the same. Prefix caching,
# which is on there and off here, may still find some of the lost blocks.)
#
# Why the last? Because it has the least to lose, and because those who came first should finish first. And nobody is
# admitted in a step that preempts: the room is needed by those who are inside.
#
# **What this proves.** An engine may promise more memory than it has. If the bet is lost, it costs some work and one
# request's time, and never a word.
#
# **Now change one thing:** let the four write 5 tokens instead of 12. How many preemptions?
#
# <details><summary>What happens</summary>
#
# None. The first has written its fifth token in step 4 and leaves, one step before the third needs a fifth block.
# </details>

# %% [markdown]
# ## Dial it in
#
# | knob | default in vLLM | what it does |
# |---|---|---|
# | `max_num_seqs` | 256 to 1,024, by machine | seats |
# | `max_num_batched_tokens` | 2,048 to 16,384, by machine and use | token budget of a step |
# | `enable_chunked_prefill` | on | off: a prompt in one step; then the budget must be at least `max_model_len` |
# | `long_prefill_token_threshold` | 0: none | the largest chunk of one prompt, so that several can be loaded at once |
# | `scheduling_policy` | `"fcfs"` | `"priority"`: the smallest number gets on first, the largest is preempted first |
# | `gpu_memory_utilization` | 0.92 | share of the GPU that may be used; what the model leaves is the luggage room |
#
# Turn some of them. (Where nobody can turn anything, for instance on GitHub, you see one setting.) The made-up requests
# arrive one after the other, 20 a second. Try *static batches*, then a pool of 12 blocks, then 0 arrivals a second,
# which means all at once.

# %%
knobs()

# %% [markdown]
# **Fewer seats, fewer preemptions.** Sixteen requests, each with a prompt of 16 tokens and an answer of 48, in a pool
# of 12 blocks. Each needs 4 in the end, so three fit without any risk. Is that the best? **Predict**: with how many
# seats are all 16 done in the fewest steps: 2, 3, 4 or 8?

# %% tags=["predict"]
guess = predict(best_number_of_seats=None)

# %% tags=["experiment", "objective-4"]
steps = {}
print("seats   steps   preemptions   tokens computed")
for seats in (8, 4, 3, 2):
    trace = simulate([Job(16, 48)] * 16, num_blocks=13, max_num_seqs=seats, enable_prefix_caching=False)
    steps[seats] = len(trace)
    print(f"{seats:5}{len(trace):8}{sum(len(r.preempted) for r in trace):14}{trace.tokens_computed:18,}")
observe(guess, best_number_of_seats=min(steps, key=steps.get))

# %% [markdown]
# Eight, by a good margin over three: those who are young are small, and use the room until the others need it. It
# computes nearly 40 % more tokens, but they fit into steps that run anyway. So a preemption now and then is no fault.
# Many of them mean that memory, and not the number of seats, is the limit. Then more seats only add work.

# %% [markdown]
# ## Where it bites you
#
# **1. "What is the right batch size?"** There is none to set. Whoever passes one is told so:

# %%
with expect_error(TypeError):
    LLM(batch_size=4)

# %% [markdown]
# **2. "I call `generate` in a loop, and vLLM is slow."** A loop over single prompts is a bus with one passenger, and a
# loop over lists of four is a tour bus: it is what the start of this page did. Give *all* prompts to one call. They
# wait in the queue of the engine.
#
# **3. "Small requests slip through."** Not past the first in the queue. The second of these three needs 13 blocks, and
# 10 to 12 are free. (Its first chunk would fit, but nobody gets on whose whole prompt does not: vLLM calls this
# `scheduler_reserve_full_isl`.) The third would need one block, and waits behind it (*head-of-line blocking*). The last
# line says why each waited in step 3; the third has no reason of its own:

# %%
blocked = simulate([Job(96, 30), Job(200, 4), Job(4, 4)], num_blocks=19, **sizes)
print(batch_occupancy(blocked, -1).text)
print(blocked.records[3].waiting)

# %% [markdown]
# That is meant. If small ones might overtake, a large one might wait for ever. Who wants it otherwise takes
# `scheduling_policy="priority"`, and says who is important.
#
# **4. "A small budget is always good for latency."** Experiment 3, last lines of the table: the newcomer pays. And a
# budget smaller than the prompts needs chunking. An engine must not accept the one without the other:

# %%
with expect_error(ValueError):
    LLM(max_num_batched_tokens=64, max_model_len=256, enable_chunked_prefill=False)

# %% [markdown]
# **5. "No padding at all, then."** None between requests. But on a GPU vLLM replays recorded steps (*CUDA graphs*) of
# certain batch sizes, and fills up to the next one; and the last block of each request has empty places.
#
# **6. "Continuous batching makes my one request faster."** It does not. Alone, a request has every step for itself, on
# any bus. With others aboard a step takes a little longer. What falls is the time in the queue, and the price of a
# token.
#
# **7. "The same prompt gives the same text, whoever else is aboard."** In exact arithmetic, yes, and in float32 it was
# so on this page. In 16 bits sums are rounded differently in batches of different sizes, and a tie between two tokens
# may fall the other way. (vLLM has a slower mode that promises it, `VLLM_BATCH_INVARIANT=1`.)

# %% [markdown]
# ## In production
#
# **What a full batch is worth.** The PagedAttention paper counted how many requests were in a step on average, for
# OPT-13B, the same chats and the same GPU. All four batch continuously (Orca was not public, so the people of vLLM
# wrote their own). Only memory differs:
#
# | | Orca, memory reserved for the longest | Orca, powers of two | Orca, if lengths were known | vLLM |
# |---|---|---|---|---|
# | requests in a step | 7.00 | 9.81 | 13.62 | 30.42 |
#
# So the two ideas need each other: continuous batching fills every seat for which PagedAttention finds the memory.
#
# **What the budget is worth.** Sarathi-Serve measured a 34B model, in seconds:
#
# | | first token, median | gap between tokens, 99 % are below |
# |---|---|---|
# | prompts and answers in one step, not cut | 0.53 | 0.68 |
# | cut, but not mixed | 1.04 | 0.17 |
# | cut and mixed, as on this page | 0.76 | 0.14 |
#
# It is our experiment 3 on a real GPU: a fifth of the pause, and nearly half as much time again to the first token.
#
# | you serve | budget | why |
# |---|---|---|
# | a chat, tokens are read as they come | small: 512 to 2,048 | pauses are seen |
# | a night's batch, nobody reads along | large: 8,192 and more | a pause hurts nobody |
# | both on one GPU | small, and `priority` for the chat | the batch can wait |
#
# What to watch on a running vLLM:
#
# * `vllm:num_requests_running` at `max_num_seqs`, and `vllm:num_requests_waiting` above 0: seats are the limit
# * `vllm:kv_cache_usage_perc` near 1, and requests wait: memory is the limit. More seats will not help
# * `vllm:num_preemptions_total` rises steadily: too many seats for the memory
# * `vllm:inter_token_latency_seconds`, the slowest percent: long prompts stall the others. Lower the budget
# * `vllm:time_to_first_token_seconds` rises while the gaps are fine: the budget is too small, or the queue too long
#
# ### Exercise: a city bus of your own (25 minutes)
#
# Count the steps for any list of lengths, and write the plan of a step, in
# [a notebook of its own](../../exercises/1_core_concepts/04_continuous_batching.ipynb). A check looks at your code and
# says what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● When may a request get on with static batching, when with continuous batching?</summary>
#
# When the whole batch before has finished; before every step.
# </details>
#
# <details><summary>2. ● Which three things must be left for a waiting request to get on?</summary>
#
# A seat (`max_num_seqs`), some token budget (`max_num_batched_tokens`), and blocks in the pool. And nobody in front of
# it in the queue.
# </details>
#
# <details><summary>3. ● Which requests does the scheduler serve first in a step?</summary>
#
# Those that run. What is left of the budget goes to those who wait.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● Two seats; answers of 2, 9, 3 and 4 tokens. How many steps, static and continuous?</summary>
#
# Static 9 + 4 = 13. Continuous 9: the seat of the 2 takes the 3 and then the 4, and 2 + 3 + 4 is 9 too.
# </details>
#
# <details><summary>5. ●● Budget 256, six requests are writing, a prompt of 1,000 tokens comes. How many steps until its
# first token?</summary>
#
# 250 are left for it in each step, so four.
# </details>
#
# <details><summary>6. ●● A request of 500 tokens is preempted. What is lost, what is kept?</summary>
#
# Its K and V, so 500 tokens must be computed again (fewer if prefix caching still finds some of its blocks). Prompt and
# answer so far are kept, and the user's text only pauses.
# </details>
#
# <details><summary>7. ●● Why is no padding needed when requests of different lengths are in one step?</summary>
#
# Tokens lie in one flat row. Layers treat each token by itself; only attention must know which are together, and is
# told where each request begins.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● What sets the ceiling of the gain over static batching? For which work is there
# none?</summary>
#
# The longest of a batch against the mean. None if all answers are equally long, as when each is one token
# (classification), or with one seat.
# </details>
#
# <details><summary>9. ●●● In the table of experiment 2 the gain falls with 256 seats. Is that a reason to take
# fewer?</summary>
#
# No: 256 seats still need the fewest steps. The gain falls because 1,024 requests are few for so many seats, and the
# end is a long tail. Under steady traffic the seats are refilled.
# </details>
#
# <details><summary>10. ●●●● Users of your chat report that texts stop for a second now and then. Since last week some
# users upload documents. What do you do, and what will you tell those with the documents?</summary>
#
# Look at the slowest gaps between tokens, and at prompt lengths at those times. Lower `max_num_batched_tokens` until
# the gap is bearable. The documents' first tokens come later; measure how much. If both must be fast, give documents an
# engine of their own, or compute prompts on another GPU (*disaggregated prefill*).
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# static steps      = for each batch, its longest answer; all added up
# continuous steps  = each answer goes to the seat that is free first; the last one to end
# gain              between 1 (equal lengths, or one seat) and  mean of the longest of a batch / mean of all
# a step            running ones first, one token each; then the waiting, while seats, budget and blocks last
# longest pause     the time of the largest step, at most that of max_num_batched_tokens tokens
# steps of a prompt = prompt / (budget - those who write), rounded up
# preemption        the last who came loses its blocks; computed again later; the words stay the same
# ```
#
# **Sources.** Iteration-level scheduling, selective batching, 36.9 times: Yu et al., *Orca: A Distributed Serving
# System for Transformer-Based Generative Models*, OSDI 2022,
# [USENIX](https://www.usenix.org/conference/osdi22/presentation/yu). Chunked prefill: Agrawal et al., *SARATHI*, 2023,
# [arXiv 2308.16369](https://arxiv.org/abs/2308.16369), and *Taming Throughput-Latency Tradeoff in LLM Inference with
# Sarathi-Serve*, OSDI 2024, [arXiv 2403.02310](https://arxiv.org/abs/2403.02310): the table is its Table 4 (Yi-34B,
# ShareGPT), the budgets are from section 5.1. Requests in a step: Kwon et al., *Efficient Memory Management for Large
# Language Model Serving with PagedAttention*, SOSP 2023, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180), Figure
# 13; mean lengths: Figure 11; preemption: section 4.5. Rounding in batches of different sizes, preemption, tuning: vLLM
# documentation, [Optimization and Tuning](https://docs.vllm.ai/en/latest/configuration/optimization/) and
# [Reproducibility](https://docs.vllm.ai/en/latest/usage/reproducibility/). Defaults: vLLM 0.33, read in its source.
#
# **Next** in the course: *Sampling parameters*, on how a token is chosen once its scores are there.
