# %% [markdown]
# # Sampling parameters
#
# You will be able to
#
# - say which tokens `top_k`, `top_p` and `min_p` keep, and in which order an engine applies its knobs
# - read `logprobs` correctly: what they say, and what they do not
# - make a sampled answer repeatable, and say why one seed per request is enough
# - say where a setting comes from that you did not write, and what `n=4` costs
#
# Needs: a CPU and 4 GB of free memory, no GPU. About 45 minutes to read and do; all cells together run in less than one
# minute. You should have read [The KV cache](01_the_kv_cache.ipynb); experiment 4 uses blocks, from
# [PagedAttention](03_paged_attention.ipynb).

# %% tags=["parameters"]
NUM_DRAWS = 50  # times that one token is drawn in experiment 1; fast: 8
NUM_TOKENS = 12  # tokens of the answers in experiment 3; fast: 6

# %%
import inspect

import matplotlib.pyplot as plt
import torch

from tutorial_engine import LLM, SamplingParams, sampler
from tutorial_engine.notebook import expect_error, observe, predict, show_source
from tutorial_engine.sampler import Sampler, apply_min_p, truncate
from tutorial_engine.viz import block_table, watch

# %% [markdown]
# ## The problem
#
# A model does not write words. For a text it computes one number for *each* token of its vocabulary, a **logit**.
# *Softmax* makes probabilities of them (e to the power of each, divided by the sum), and somebody has to choose. Let us
# ask for all. (`logprobs=-1` asks for the *logprob*, the logarithm of the probability, of each of the 49,152 tokens,
# and `max_logprobs=-1` allows that. An ordinary engine gives at most 20. `sizes` keeps this page's engines small.)

# %%
sizes = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 256}
llm = LLM(generation_config="vllm", max_logprobs=-1, **sizes)
tokenizer = llm.get_tokenizer()
prompt = "The best thing to do on a rainy day is to"


def generate(prompts, *args):
    return llm.generate(prompts, *args, use_tqdm=False)


entry = generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=-1))[0].outputs[0].logprobs[0]
row = torch.tensor([entry[token].logprob for token in range(len(entry))])  # one number for each token
for token in row.topk(8).indices.tolist():
    print(f"{row[token].exp():6.1%}  {tokenizer.decode([token])!r}")
print(f"the {len(row) - 8:,} others together: {1 - row.topk(8).values.exp().sum():.0%}")

# %% [markdown]
# Now choose. The likeliest one each time? The answer is then always the same, and often it repeats itself. By lot, with
# these probabilities? Then six times in ten the next token is none of the eight, and far down in the long tail there is
# nonsense. One such token is enough to lead a text astray: the model goes on from whatever stands there.
#
# Sampling parameters are the compromise between the two. This page is about what each does, in which order, what the
# engine tells you about it, and which values hold when you say nothing.

# %% [markdown]
# ## The idea
#
# Think of a **wheel of fortune**. Each token has a slice, as wide as its probability. Somebody spins, and where the
# wheel stops, that token is written. Then the model paints a new wheel.
#
# | the wheel | the engine |
# |---|---|
# | widths of the slices | softmax of the **logits** |
# | paint it again with the large slices larger, or all more alike | **temperature** below 1, above 1 |
# | keep the *k* widest slices | **top_k** |
# | from the widest on, keep slices until they cover 90 % | **top_p** = 0.9 |
# | keep slices at least a tenth as wide as the widest | **min_p** = 0.1 |
# | what is left fills the wheel again | probabilities are scaled to sum 1 |
# | make slices narrower whose token was already written | **penalties** |
# | do not spin: take the widest | **greedy**, `temperature=0` |
# | how the wheel was pushed | **seed** |
# | a photo of the wheel as the model painted it, before anybody touched it | **logprobs** |
#
# `top_k` counts, `top_p` measures what is covered, `min_p` compares with the widest. So on the same wheel they keep
# different slices, and when the wheel changes they react differently. That is experiment 1.

# %% [markdown]
# ## Under the hood
#
# Everything happens in one short file, [sampler.py](../../tutorial_engine/sampler.py). The beginning of its description
# is the order of operations, and it is vLLM's (that of its newer model runner; in the older one custom processors come
# before the penalties):

# %%
print(inspect.getdoc(sampler).split("\n\n")[1])

# %% [markdown]
# Some of these are not knobs of this page. A *grammar* forces a format such as JSON. *Allowed ids* and *bad words* say
# what may be written and what not, `min_tokens` forbids an early end, and a *custom processor* is code of your own.
#
# The same order in the code that is running. (`logits` has one row for each request of the step.)

# %% tags=["objective-1"]
show_source(Sampler.__call__, only=("raw = ", "apply_token_rules", "apply_penalties", "apply_bad_words",
                                    "processors.apply", "argmax", "div_(", "apply_min_p", "_draw(", "gather_logprobs"))

# %% [markdown]
# Four things to see.
#
# - `raw` is copied **first**, and that copy is what `gather_logprobs` gets as `values`.
# - `argmax`, the greedy choice, comes after penalties and biases. They work at `temperature=0` too.
# - Rows that are drawn by lot are divided by the temperature (`div_`). Only then comes `min_p`, and then `top_k` and
#   `top_p`, inside `_draw`.
# - Greedy rows never get there. So the filters mean nothing to them, and are reset:

# %%
params = SamplingParams(temperature=0, top_p=0.1, top_k=3)
print(params.top_p, params.top_k)

# %% [markdown]
# Here is a filter. A dropped token gets the logit minus infinity, which is probability 0:

# %%
show_source(apply_min_p)

# %% [markdown]
# **And the spin?** One way is: a random number between 0 and 1, then walk along the slices. Engines use a trick that
# has no walk, *Gumbel-max*: add a random bonus to each logit, and take the largest sum. If the bonuses have the right
# distribution (Gumbel's), each token wins exactly as often as its probability says. (vLLM's newer model runner does
# this too, its older one a close relative.) Where does a bonus come from? (`whole` are the rows without `top_k` and
# `top_p`; of the last two functions you see the arguments, and one line.)

# %%
show_source(Sampler._draw, only=("whole] =",))
show_source(sampler.noise_key, only=("def ",))
show_source(sampler.gumbel_noise, only=("def ", "x = keys"))

# %% [markdown]
# It is computed from three numbers: the request's **seed**, the **position** in the text, the **token**. There is no
# generator that others use as well. Who else is in the batch cannot change a draw. Experiment 4 tries it.

# %% [markdown]
# ## Try it
#
# ### 1. Three filters on three wheels
#
# This function does what the engine does, with the engine's own functions, for our one row. (`truncate` is `top_k`,
# then `top_p`. The row holds logprobs, which are the logits minus one constant. Softmax gives the same for both.)

# %%
def chances(temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token after the temperature and the filters."""
    logits = row[None] / temperature
    apply_min_p(logits, torch.tensor([[min_p]]))
    return truncate(logits, [top_k or len(row)], [top_p])[0].softmax(dim=0)


def num_kept(*args, **knobs):
    return int((chances(*args, **knobs) > 0).sum())


filters = {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}
print("at temperature 1 they keep:", [num_kept(1.0, **knob) for knob in filters])

# %% [markdown]
# So at temperature 1 `top_p=0.9` keeps 147 tokens, and `min_p=0.1` keeps 26. **Predict.** How many will each keep at
# 0.5, and at 1.5? More or fewer, and which of the two changes more?

# %% tags=["predict"]
guess = predict(top_p_at_half=None, top_p_at_one_and_a_half=None, min_p_at_half=None, min_p_at_one_and_a_half=None)

# %% tags=["experiment", "objective-1", "R33", "R178"]
observe(guess, top_p_at_half=num_kept(0.5, top_p=0.9), top_p_at_one_and_a_half=num_kept(1.5, top_p=0.9),
        min_p_at_half=num_kept(0.5, min_p=0.1), min_p_at_one_and_a_half=num_kept(1.5, min_p=0.1))

# %%
order = row.argsort(descending=True)[:30]  # the 30 likeliest tokens
fig, axes = plt.subplots(3, 3, figsize=(10, 6), sharex=True, layout="constrained")
for line, temperature in zip(axes, (0.5, 1.0, 1.5)):
    for ax, knob in zip(line, filters):
        ((name, value),) = knob.items()
        ax.bar(range(30), chances(temperature, **knob)[order], color="#74c3ec")
        ax.bar(range(30), chances(temperature)[order], color="none", edgecolor="#404040", linewidth=0.8)
        ax.set(title=f"T = {temperature}, {name} = {value}: {num_kept(temperature, **knob):,} kept", xticks=[])
        ax.sharey(line[0])
for ax in axes[-1]:
    ax.set_xlabel("the 30 likeliest tokens")
for ax in axes[:, 0]:
    ax.set_ylabel("probability")

# %% [markdown]
# **How to read it.** A bar is a token, the likeliest on the left. The outline is its probability before the filter, the
# blue after it. Where nothing is blue, the token was dropped. What the dropped ones had goes to the others, so blue
# stands above the outlines.
#
# - *Temperature* changes how steep the wheel is, and drops nothing.
# - *top_k* keeps 5 whatever the wheel looks like, even if the sixth is as good as the fifth.
# - *top_p* keeps few on a steep wheel. On a flat one it must go far into the tail to collect its 90 %: 1,270 tokens.
# - *min_p* goes the same way, but far less. Its bar is tied to the likeliest token.
#
# **Does the engine itself do this?** Draw one token 50 times from `top_k=5` at temperature 1: `n=50` asks for 50
# answers to one prompt. How many different tokens come?

# %%
draws = generate(prompt, SamplingParams(top_k=5, n=NUM_DRAWS, seed=0, max_tokens=1))[0].outputs
drawn = [draw.token_ids[0] for draw in draws]
five = chances(1.0, top_k=5)
for token in five.topk(5).indices.tolist():
    print(f"{tokenizer.decode([token])!r:9}  expected {five[token] * NUM_DRAWS:4.1f} times, drawn {drawn.count(token)}")
print("any other:", sum(five[token].item() == 0 for token in drawn))

# %% [markdown]
# **What this proves.** The filters see what the temperature has made of the logits. So "top_p 0.9" is not a property of
# your application: at another temperature, or in a place where the model is surer, it is another filter.
#
# **Now change one thing:** give two filters at once, `num_kept(1.5, top_k=5, top_p=0.5)`. Alone, `top_p=0.5` keeps 75
# tokens here. Will all five of `top_k` stay?
#
# <details><summary>What happens</summary>
#
# Three. `top_k` comes first, its five fill the wheel again (24, 21, 19, 18 and 17 %), and `top_p` wants half of *that*.
# </details>

# %% [markdown]
# ### 2. What logprobs say
#
# At temperature 0.5 the token `' take'` is drawn with a probability of

# %%
take, sing = (tokenizer.encode(word)[0] for word in (" take", " sing"))
print(f"{chances(0.5)[take]:.1%}")

# %% [markdown]
# Ask the engine for its logprob in such a request. (`top_k=1` beside it, so that the draw has no choice.) And in a
# second request push `' sing'`, a most unlikely token, with a *bias*: `logit_bias={sing: 100}` adds 100 to its logit.
#
# **Predict.** As a percentage, which probability is reported for `' take'`? Is `' sing'` reported with rank 1, the
# likeliest? With `logprobs=2`, how many entries does its dictionary have, `' sing'` included?

# %% tags=["predict"]
guess = predict(percent_reported_for_take=None, sing_has_rank_1=None, entries_beside_sing=None)

# %% tags=["experiment", "objective-2"]
requests = [SamplingParams(temperature=0.5, top_k=1, max_tokens=1, logprobs=2),
            SamplingParams(temperature=0, logit_bias={sing: 100}, max_tokens=1, logprobs=2)]
cold, pushed = (output.outputs[0] for output in generate([prompt, prompt], requests))
print(repr(cold.text), repr(pushed.text))
observe(guess, percent_reported_for_take=100 * torch.tensor(cold.logprobs[0][take].logprob).exp(),
        sing_has_rank_1=pushed.logprobs[0][sing].rank == 1, entries_beside_sing=len(pushed.logprobs[0]))

# %%
for logprob in pushed.logprobs[0].values():
    print(f"rank {logprob.rank:5,}  logprob {logprob.logprob:6.2f}  {logprob.decoded_token!r}")

# %% [markdown]
# 6.94 %, as at temperature 1. With `top_k=1` it was certain, and at temperature 0.5 alone it would have been 19 %; the
# report knows of neither. `' sing'` was chosen, and keeps the rank that the model gave it. The dictionary has the
# chosen token first, and then the two likeliest: three entries, or two if the chosen one is among them.
#
# **What this proves.** `logprobs` are a photo of the wheel as the model painted it, before temperature, filters,
# penalties and bias. (Only what a grammar forbids has probability 0 in it already.) That makes them comparable between
# requests with different settings, and good for scoring a text. It also means that they are *not* the probability with
# which the token was drawn. Who needs that builds the engine with `logprobs_mode="processed_logprobs"`.
#
# **Now change one thing:** leave `logprobs` out. What is `cumulative_logprob` of the answer?
#
# <details><summary>What happens</summary>
#
# `None`. It is the sum of the chosen tokens' logprobs, and nobody has asked for those. `logprobs=0` is enough: the
# chosen token and nothing else.
# </details>

# %% [markdown]
# ### 3. Whose settings?
#
# Many models come with a file `generation_config.json`: what its makers recommend. With `generation_config="auto"`, the
# default, an engine reads it. (This page's engine was built with `"vllm"`, which ignores it.) Here is a second engine
# whose file says: temperature 0.2, and always the likeliest token. (We plant it with `override_generation_config`. Such
# files say `max_new_tokens` for `max_tokens`. `logprobs_mode` is for later, in "Where it bites you".)

# %%
recommended = {"temperature": 0.2, "top_k": 1, "max_new_tokens": NUM_TOKENS}
house = LLM(generation_config="auto", override_generation_config=recommended, logprobs_mode="raw_logits", **sizes)
defaults = house.get_default_sampling_params()
print("temperature", defaults.temperature, " top_k", defaults.top_k, " max_tokens", defaults.max_tokens)

# %% [markdown]
# Five times the same prompt. First without `SamplingParams`. Then with `SamplingParams(max_tokens=12)`, which says
# nothing of temperature or `top_k`. **Predict**: how many *different* answers of five, each time? And how many tokens
# has an answer with `SamplingParams()`, which says nothing at all?

# %% tags=["predict"]
guess = predict(different_without_params=None, different_with_max_tokens=None, tokens_with_empty_params=None)

# %% tags=["experiment", "objective-4", "R19", "R21", "R25", "R150"]
def answers(*args):
    return [output.outputs[0] for output in house.generate([prompt] * 5, *args, use_tqdm=False)]


def different(outputs):
    return len({output.text for output in outputs})


empty = answers(SamplingParams())
observe(guess, different_without_params=different(answers()),
        different_with_max_tokens=different(answers(SamplingParams(max_tokens=NUM_TOKENS))),
        tokens_with_empty_params=len(empty[0].token_ids))

# %%
print(empty[0].finish_reason)

# %% [markdown]
# **What this proves.** The file speaks only if *you pass no object at all*. An explicit `SamplingParams` is complete:
# what you did not write has its neutral value, temperature 1 and no filter, and `max_tokens` is **16**. (One thing of
# the file always holds: further end tokens that it names.) Some texts say that missing fields are taken from the file.
# Offline that is wrong.
#
# On a *server* it is right: a request is JSON, and what it leaves out comes from the file, and then from neutral
# values. So the same model with "the same settings" can write differently online and offline. To keep the file's values
# and change one thing, begin with them:
#
# ```python
# params = llm.get_default_sampling_params()
# params.max_tokens = 6
# ```
#
# **Now change one thing:** do that with `house`, with `max_tokens` 6, and call `answers(params)`. How many different
# ones?
#
# <details><summary>What happens</summary>
#
# One, of 6 tokens: `top_k` is still 1.
# </details>

# %% [markdown]
# ### 4. Seeds, and four answers to one prompt
#
# `n=4` asks for four answers. Our prompt now has 53 tokens. The engine makes four requests out of one, its *children*.
# Each is sampled by itself. They share the full blocks of the prompt, those whose 16 places are all taken.
#
# **Predict.**
#
# - A request with seed 7 runs alone, and then between two others, in another row of the batch. The same tokens?
# - Is the *second* answer of `n=4, seed=7` what a single request with seed 8 writes?
# - In the first step, how many prompt tokens does the model compute, for all four together?
# - In the second step, how many blocks are held by the four?

# %% tags=["predict"]
guess = predict(same_in_a_batch=None, second_is_seed_8=None, prompt_tokens_computed=None, blocks_held=None)

# %% tags=["experiment", "objective-3", "objective-4", "R34", "R110", "R125"]
story = ("In the small town by the sea there was a library where every book had been read by someone who loved it, and "
         "the old keeper knew each of their names. One day a stranger came in and asked for the only book that nobody "
         "had ever opened. The keeper")
seed_7, seed_8, seed_1 = (SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in (7, 8, 1))
with watch(llm, block_table, start=1) as trace:
    four = generate(story, SamplingParams(n=4, seed=7, max_tokens=8, ignore_eos=True))[0].outputs
alone, next_seed = (generate(story, params)[0].outputs[0].token_ids for params in (seed_7, seed_8))
crowded = generate(["Once upon a time", story, "One, two,"], [seed_1, seed_7, seed_8])[1].outputs[0].token_ids
observe(guess, same_in_a_batch=crowded == alone, second_is_seed_8=four[1].token_ids == next_seed,
        prompt_tokens_computed=trace.records[0].num_tokens, blocks_held=trace.records[1].blocks_held)

# %%
for name, (start, number) in trace.records[0].scheduled.items():
    print(f"answer {name.partition('_')[0]}, first step: tokens {start} to {start + number - 1} computed,",
          f"blocks {trace.records[0].tables[name]}")

# %% [markdown]
# **How to read it.** `2_0` is answer 2 of request 0 (both count from 0). Each of the four tables begins with the same
# three blocks, and ends with a block of its own: 16 entries, 7 blocks. In the pool on the left, the three belong to all
# four.
#
# The first child computes all 53 tokens. The others find 48 of them in the cache, *in the same step*, and compute the
# last 5: 53 + 3 × 5 = 68, instead of 212. A block that is not full is never shared, since each child will write its own
# next tokens into it. So nothing ever has to be copied. (Older texts say that `n > 1` copies on write. That was the
# paper, and vLLM's first version.)
#
# **What this proves.** Child *i* gets the seed `seed + i`, so four answers are four ordinary requests. A seed belongs
# to a *request*, and the draw depends on nothing else. So a seeded request can be repeated tomorrow, in another crowd.
# What must stay the same is the logits: same model, same numbers, same engine. (vLLM's older model runner keeps a
# random generator for each seeded request instead. Seen from outside it is the same.)
#
# **Now change one thing:** make `n` 8. How many blocks are held in the second step, and how many tokens are computed in
# the first?
#
# <details><summary>What happens</summary>
#
# 3 + 8 = 11 blocks, 53 + 7 × 5 = 88 tokens. (If you run it after the cells above, the first child also finds the three
# blocks in the cache, from before: 8 × 5 = 40. `llm.reset_prefix_cache()` empties it.)
# </details>

# %% [markdown]
# ## Dial it in
#
# | knob | default | keeps or changes | range |
# |---|---|---|---|
# | `temperature` | 1 | steepness; 0 is greedy | 0, or 0.01 to 2 |
# | `top_k` | 0: off | so many of the likeliest | 1 or more; 0 or -1: off |
# | `top_p` | 1: off | the likeliest until their sum reaches it | above 0, up to 1 |
# | `min_p` | 0: off | what has at least this share of the likeliest | 0 to 1 |
# | `repetition_penalty` | 1: off | prompt *and* answer: logit divided if positive, else multiplied | above 0 |
# | `presence_penalty`, `frequency_penalty` | 0: off | subtracted once, or once for each time; answer only | -2 to 2 |
# | `logit_bias` | none | added to the logits of certain tokens | per token |
# | `seed` | none: drawn for you | the draws of this request | 64 bits |
# | `max_tokens` | **16** | when to stop | `None`: until the context is full |
# | `n` | 1 | how many answers; more than 1 only if drawn | 1 or more |
#
# Each prompt of a call may have knobs of its own: give a *list* of `SamplingParams`, one for each prompt. They all run
# in one batch. Let us try four repetition penalties at once, all greedy. **Predict**: of 32 tokens, how many are
# different with penalty 1 (off)? With 2? And are the first six words the same with both?

# %% tags=["predict"]
guess = predict(different_with_1=None, different_with_2=None, same_beginning=None)

# %% tags=["experiment", "R14", "R148"]
penalties = (1.0, 1.1, 1.3, 2.0)
requests = [SamplingParams(temperature=0, repetition_penalty=p, max_tokens=32, ignore_eos=True) for p in penalties]
outputs = [output.outputs[0] for output in generate([prompt] * 4, requests)]
unique = [len(set(output.token_ids)) for output in outputs]
observe(guess, different_with_1=unique[0], different_with_2=unique[3],
        same_beginning=outputs[0].text.split()[:6] == outputs[3].text.split()[:6])

# %%
for penalty, count, output in zip(penalties, unique, outputs):
    print(f"penalty {penalty}: {count} different: {' '.join(output.text.split())[:80]}...")

# %% [markdown]
# Already 1.1 turns the text after one word. The model wanted `' a'`, but the prompt has that token too ("on *a* rainy
# day"), so its logit was made smaller, and `' it'` won. With 2, no token of the answer occurs twice, not even a comma.
# (CTRL, the paper that this penalty is from, uses about 1.2.) And all four were greedy. So "greedy" means the largest
# logit *after* the penalties, not what the model liked best.

# %% [markdown]
# ## Where it bites you
#
# **1. "My answers stop in the middle of a sentence."** `max_tokens` is 16 unless you say something. Look at
# `finish_reason`: `length` means cut off.
#
# **2. "Temperature 0, and I want three answers."** They would all be the same, and the engine says so:

# %%
with expect_error(ValueError):
    SamplingParams(temperature=0, n=3)

# %% [markdown]
# **3. "I need all logprobs."** More than 20 must be allowed when the engine is built, because 49,152 numbers for each
# token are a lot to sort, to move and to keep. `max_logprobs=-1` allows everything.

# %%
with expect_error(ValueError):
    house.generate(prompt, SamplingParams(logprobs=21), use_tqdm=False)

# %% [markdown]
# **4. "`best_of`, as in the examples."** It is gone. Ask for `n` answers and rank them yourself:

# %%
with expect_error(TypeError):
    SamplingParams(n=1, best_of=3)

# %% [markdown]
# **5. "Temperature 0 is deterministic."** The choice is; the logits need not be. Sums of floating-point numbers depend
# on the order in which they are taken, and a batch of another size may take another one. Usually the differences are in
# the last digits and change nothing, unless two tokens are nearly equal. How near do they come? The second engine
# reports raw logits. Three prompts, 8 tokens each, together and then alone:

# %% tags=["R131", "R140"]
prompts = ["Once upon a time", "In winter the birds", "To make bread you need"]
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
together = [output.outputs[0] for output in house.generate(prompts, greedy, use_tqdm=False)]
one_by_one = [house.generate(p, greedy, use_tqdm=False)[0].outputs[0] for p in prompts]
print("float32, the same tokens:", [a.token_ids == b.token_ids for a, b in zip(together, one_by_one)])
best = torch.tensor([[x.logprob for x in entry.values()] for a in together for entry in a.logprobs])  # [24, 2]
again = torch.tensor([[x.logprob for x in entry.values()] for a in one_by_one for entry in a.logprobs])
print("the logits differ by less than 0.001:", ((best - again).abs() < 1e-3).all().item())
margins = best[:, 0] - best[:, 1]
print(f"largest logit {best.max():.0f}; smallest distance between the first two {margins.min():.3f}")
ties = (best[:, 0].bfloat16() == best[:, 1].bfloat16()).sum()
print(f"decisions that are ties if these logits are rounded to bfloat16: {ties} of {len(best)}")

# %% [markdown]
# In float32 all agree: the logits of a batch and of a single request differ far less than the closest two tokens do. A
# bfloat16 has 8 significant bits, so between 16 and 32 there are only steps of 0.125. There some of our decisions
# become ties, and whatever tips them tips everything that follows. So on a GPU in 16 bits the same greedy prompt may
# write different texts in different crowds. (On the CPU on which this page was written, eight prompts wrote the same in
# bfloat16 alone and together, but three of them not what they wrote in float32.) That is no bug of sampling, and a seed
# does not help. vLLM has a mode that does, `VLLM_BATCH_INVARIANT=1`. It is slower, and of NVIDIA's GPUs it wants one of
# compute capability 8.0 or more: an A100, but no T4.

# %% tags=["gpu", "nbval-ignore-output"]
if torch.cuda.is_available():
    half = LLM(generation_config="vllm", **{**sizes, "dtype": "auto"})  # bfloat16, or float16 on a T4
    crowd = [output.outputs[0].token_ids for output in half.generate(prompts, greedy, use_tqdm=False)]
    single = [half.generate(p, greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    print(f"{half.llm_engine.config.dtype}, the same tokens:", [a == b for a, b in zip(crowd, single)])
else:
    print("With a GPU, this cell compares a batch with single requests in 16 bits.")

# %% [markdown]
# **6. "`LLM(seed=0)` makes my requests repeatable."** It makes a whole *run* repeatable: the same calls in the same
# order. A request without a seed of its own gets the next one of a random sequence when it arrives. One more request
# before it, and it gets another. For one answer that must be repeatable, set the seed in its `SamplingParams`.
#
# **7. "A small `top_p` and a high temperature."** They work against each other. Change one of the two, and leave the
# other neutral, until a measurement says otherwise.

# %% [markdown]
# ## In production
#
# | task | settings | why |
# |---|---|---|
# | extraction, classification, tests | `temperature=0`, enough `max_tokens` | one answer, nothing is drawn |
# | chat | what the model's maker recommends, in the file | they have measured it for this model |
# | several candidates, to choose from | `n=8`, temperature 0.7 to 1, a seed | they must differ, and be repeatable |
# | evaluation | everything written down, `generation_config="vllm"` | a file may change with the next revision |
# | summaries | no penalties | names and numbers *must* be repeated |
#
# * On a server, `--generation-config vllm` makes an empty request neutral, and `--override-generation-config` sets your
#   own values. vLLM logs at start-up if the model's file changes its defaults.
# * `/v1/completions` cuts at 16 tokens if `max_tokens` is missing. A chat request may go on to the end of the context:
#   set a limit there too.
# * Watch `vllm:request_success_total` by `finished_reason`. Many `length` mean that `max_tokens` is too small, or that
#   something does not stop.
# * Knobs are not free. `logprobs` costs with each token, penalties need the counts of all tokens for each row. Plain
#   temperature and greedy cost nearly nothing.
# * Speculative decoding and some knobs exclude each other: vLLM refuses `min_p` and `logit_bias` there.
#
# ### Exercise: filters and a penalty (25 minutes)
#
# Write `top_p`, `min_p` and the repetition penalty, in
# [a notebook of its own](../../exercises/1_core_concepts/05_sampling_parameters.ipynb). A check looks at your code and
# says what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● What is <code>max_tokens</code> if you pass <code>SamplingParams()</code>?</summary>
#
# 16. The answer ends with `finish_reason="length"`.
# </details>
#
# <details><summary>2. ● In which order come temperature, top_p, penalties, top_k, min_p?</summary>
#
# Penalties, temperature, `min_p`, `top_k`, `top_p`.
# </details>
#
# <details><summary>3. ● Of which distribution are <code>logprobs</code>, by default?</summary>
#
# Of the raw logits: before bias, penalties, temperature and filters.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● Probabilities 0.4, 0.3, 0.2, 0.1. What do <code>top_k=2</code>, <code>top_p=0.6</code>,
# <code>min_p=0.5</code> keep, each alone?</summary>
#
# The first two; the first two (0.4 is less than 0.6, 0.7 is enough); the first three (the bar is 0.5 × 0.4 = 0.2).
# </details>
#
# <details><summary>5. ●● What does <code>top_p=0.1</code> do at temperature 0? What does a repetition penalty do
# there?</summary>
#
# Nothing, it is reset. The penalty is applied before the largest logit is taken, so it can change the choice.
# </details>
#
# <details><summary>6. ●● A prompt of 100 tokens, <code>n=4</code>, blocks of 16. How many prompt tokens are computed,
# and how many blocks are held at first?</summary>
#
# Six full blocks are 96 tokens: 100 + 3 × 4 = 112. Blocks: 6 + 4 = 10.
# </details>
#
# <details><summary>7. ●● Why can temperature 0 write different texts in different batches?</summary>
#
# Sums are taken in another order and rounded differently. Where two logits are nearly equal, most of all in 16 bits,
# the other one may win, and everything after it is different.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● A seed for each request, or one for the engine?</summary>
#
# One for each request that must be repeatable: it holds alone, in a crowd and tomorrow. The engine's seed repeats a
# whole run, if the calls and their order are the same. That is enough for a script, and not for a server.
# </details>
#
# <details><summary>9. ●●● Somebody sets <code>repetition_penalty=1.3</code> for summaries, because one had the same
# sentence twice. What do you say?</summary>
#
# It counts the prompt too, so the words of the text to be summarised become unlikely: names, numbers, terms. Look first
# at why it repeats: a greedy choice, a cut-off prompt, a missing chat template. If a penalty at all, then a small
# `frequency_penalty`, which looks at the answer only.
# </details>
#
# <details><summary>10. ●●●● A customer says: "Your service has become more random since Monday. We changed nothing."
# What do you look at?</summary>
#
# Whether their requests leave fields out: then the model's file decides, and a new revision of the model, or a flag at
# start-up, has changed it. The log at start-up says which defaults hold. Whether somebody moved them from the server to
# an offline script, where an explicit object does not read the file. If they meant temperature 0: another batch size,
# dtype or GPU. Then pin what was not pinned: revision, settings, seeds.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# logits -> allowed tokens, bias, min_tokens -> penalties -> bad words -> custom processors
#        -> temperature 0: the largest
#        -> else: / temperature -> min_p -> top_k -> top_p -> draw
# top_k   a number of tokens        top_p   a share of what is left     min_p   a share of the likeliest
# logprobs                          raw: none of the knobs is in them; chosen token first, then the likeliest
# no SamplingParams (offline)       the model's file, then neutral values
# SamplingParams(...) (offline)     what you wrote, and neutral values; max_tokens 16
# a server's request                what it says, then the file, then neutral values
# seed=s, n=4                       seeds s, s+1, s+2, s+3; full blocks of the prompt are shared
# ```
#
# **Sources.** top_p: Holtzman et al., *The Curious Case of Neural Text Degeneration*, 2019, [arXiv
# 1904.09751](https://arxiv.org/abs/1904.09751), which also shows how likeliest texts fall into circles. top_k: Fan et
# al., *Hierarchical Neural Story Generation*, 2018, [arXiv 1805.04833](https://arxiv.org/abs/1805.04833). min_p: Nguyen
# et al., 2024, [arXiv 2407.01082](https://arxiv.org/abs/2407.01082). Repetition penalty: Keskar et al., *CTRL*, 2019,
# [arXiv 1909.05858](https://arxiv.org/abs/1909.05858), section 4.1. Gumbel-max: Maddison et al., *A\* Sampling*, 2014,
# [arXiv 1411.0030](https://arxiv.org/abs/1411.0030), section 2.1. Copy on write for `n > 1`: Kwon et al., 2023, [arXiv
# 2309.06180](https://arxiv.org/abs/2309.06180), section 4.4. Repeatable runs and batch invariance: vLLM documentation,
# [Reproducibility](https://docs.vllm.ai/en/latest/usage/reproducibility/) and [Batch
# Invariance](https://docs.vllm.ai/en/latest/features/batch_invariance/). Order of operations, defaults, ranges, the
# children of `n`, whose settings hold: vLLM 0.33, read in its source.
#
# **Next.** [Offline batch inference](../3_running_locally/02_offline_batch_inference.ipynb) puts all of this to use, on
# a pile of prompts.
