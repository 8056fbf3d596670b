# %% [markdown]
# # Exercise: work, chunks and gaps
#
# You will be able to
#
# - say for any matrix product how many operations it does for each byte that it moves
# - cut a prompt into chunks, so that nobody who writes has to wait
# - read the two times that a user feels from a list of moments
#
# 25 minutes · difficulty ●●○ · after [the lesson](../../notebooks/1_core_concepts/02_prefill_and_decode.ipynb) · needs
# no GPU and no model; plain Python.

# %%
from tutorial_engine.exercises import prefill_and_decode as course
from tutorial_engine.notebook import observe, predict
from tutorial_engine.viz.roofline import GPUS, roofline

# %% [markdown]
# ## 1. How much work for each byte?
#
# A layer multiplies the vectors of the step's tokens with a matrix of weights. Three matrices are involved:
#
# ```
# inputs [tokens, in]   ×   weights [in, out]   =   results [tokens, out]
#   read                      read                    written
# ```
#
# Each result is a sum of `in` products. A multiply-add is counted as **two** operations (FLOP). The *arithmetic
# intensity* is operations divided by bytes, with each of the three matrices moved once. For one token and 1,000 × 1,000
# weights of 2 bytes: 2,000,000 / 2,004,000, nearly 1.

# %% tags=["exercise", "objective-1"]
def arithmetic_intensity(num_tokens, num_in, num_out, bytes_per_number=2):
    """FLOP for each byte moved."""
    # BEGIN SOLUTION
    operations = 2 * num_tokens * num_in * num_out
    numbers = num_tokens * num_in + num_in * num_out + num_tokens * num_out
    return operations / (numbers * bytes_per_number)
    # END SOLUTION todo: Return operations / bytes.


# %% tags=["check"]
intensity = course.check_arithmetic_intensity(arithmetic_intensity)
intensity

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# There are `num_tokens × num_out` results, and each takes `num_in` multiply-adds. That makes the operations.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# A matrix [a, b] has a × b numbers. Add up the numbers of all three, and multiply by the bytes of one.
# </details>

# %% [markdown] tags=["solution"]
# As long as there are far fewer tokens than `in` and `out`, weights are nearly all that is moved, and the intensity is
# about 2 × tokens / bytes per number: with 16-bit numbers, the number of tokens.

# %% [markdown]
# ## 2. Cut a prompt
#
# Some requests are writing, and a prompt arrives. No step may have more tokens than the budget. Those who write come
# first in every step, with one token each; the prompt gets what is left, until nothing remains of it:
#
# ```
# chunk_prefill(remaining=100, budget=64, running=4)   ->  [(4, 60), (4, 40)]     (those who write, the prompt)
# chunk_prefill(remaining=10, budget=64, running=4)    ->  [(4, 10)]
# chunk_prefill(remaining=5, budget=4, running=4)      ->  ValueError: nothing is ever left for the prompt
# ```

# %% tags=["exercise", "objective-4"]
def chunk_prefill(remaining, budget, running):
    """For each step until the prompt is computed: (tokens of those who write, tokens of the prompt)."""
    # BEGIN SOLUTION
    if budget <= running:
        raise ValueError("nothing is left for the prompt")
    steps = []
    while remaining > 0:
        chunk = min(remaining, budget - running)
        steps.append((running, chunk))
        remaining -= chunk
    return steps
    # END SOLUTION todo: Return the list of steps.


# %% tags=["check"]
chunking = course.check_chunk_prefill(chunk_prefill)
chunking

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# In each step `budget - running` tokens are left for the prompt. The last chunk is smaller: `min(...)`.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# `while remaining > 0:` append a pair, and take the chunk away from `remaining`. Before the loop: if `budget - running`
# is not positive, the loop would never end. Raise a `ValueError` instead.
# </details>

# %% [markdown] tags=["solution"]
# The engine computes one step at a time, and in each those who write may be others. The rule is the same.

# %% [markdown]
# ## 3. What the user feels
#
# A request came at `arrival`, and its tokens were there at `times`. *Time to first token* (TTFT) is how long nothing
# was to be seen. *Inter-token latency* (ITL) is the gap between a token and the one before it:
#
# ```
# ttft_itl(10, [13, 14, 15])   ->  (3, [1, 1])
# ```

# %% tags=["exercise", "objective-3"]
def ttft_itl(arrival, times):
    """(time to first token, list of gaps)"""
    # BEGIN SOLUTION
    return times[0] - arrival, [times[i] - times[i - 1] for i in range(1, len(times))]
    # END SOLUTION todo: Return the time to first token, and the list of gaps.


# %% tags=["check"]
latencies = course.check_ttft_itl(ttft_itl)
latencies

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# The first token is `times[0]`, and the clock of this request began at `arrival`.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Token *i* came `times[i] - times[i - 1]` after the one before it, for *i* from 1 on.
# </details>

# %% [markdown] tags=["solution"]
# Keep the gaps, and look at their largest or at their slowest percent. A mean hides what a user notices most.

# %% [markdown]
# ## See it
#
# Put the three together. Four requests write, a prompt of 1,000 tokens comes at the beginning of a step, and a step
# takes 5 ms, or 0.02 ms for each of its tokens, whichever is longer.
#
# **Predict.** The longest gap of those who write, and the newcomer's time to first token, in ms and rounded, with a
# budget of 2,048 and with 254.

# %% tags=["predict"]
guess = predict(gap_2048=None, ttft_2048=None, gap_254=None, ttft_254=None)

# %%
chunk, gaps_of = chunking.use(), latencies.use()

# %% tags=["experiment"]
def gap_and_ttft(budget):
    """The longest gap of those who write, and the newcomer's time to first token."""
    now, ends = 0, [0]
    for writing, prompt in chunk(1000, budget, 4):
        now += max(5, 0.02 * (writing + prompt))
        ends.append(now)
    return round(max(gaps_of(0, ends)[1])), round(gaps_of(0, [now])[0])


(gap_2048, ttft_2048), (gap_254, ttft_254) = gap_and_ttft(2048), gap_and_ttft(254)
observe(guess, gap_2048=gap_2048, ttft_2048=ttft_2048, gap_254=gap_254, ttft_254=ttft_254)

# %% [markdown]
# **Explain.** With 2,048 all 1,004 tokens are one step of 20 ms, for those who write and for the newcomer alike. With
# 254 there are four steps of 5 ms: those who write notice nothing, and on this machine the newcomer pays next to
# nothing, because a step of 254 tokens is just as long as the shortest one.
#
# And where does a layer of 4,096 × 4,096 weights stand, for 1 token and for 254?

# %%
layer = intensity.use()
roofline({"1 token": layer(1, 4096, 4096), "254 tokens": layer(254, 4096, 4096)}, {"H200": GPUS["H200"]})

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Weights read again for each token.** Then a batch would gain nothing, and one token would be as good as a hundred.

# %% tags=["wrong"]
def arithmetic_intensity(num_tokens, num_in, num_out, bytes_per_number=2):
    numbers = num_in * num_out + num_in + num_out
    return 2 * num_tokens * num_in * num_out / (num_tokens * numbers * bytes_per_number)


course.check_arithmetic_intensity(arithmetic_intensity)

# %% [markdown] tags=["solution"]
# **Weights only.** A good rule of thumb for few tokens, but inputs and results travel too.

# %% tags=["wrong"]
def arithmetic_intensity(num_tokens, num_in, num_out, bytes_per_number=2):
    return 2 * num_tokens / bytes_per_number


course.check_arithmetic_intensity(arithmetic_intensity)

# %% [markdown] tags=["solution"]
# **Chunks as large as the budget.** With those who write, the step is larger than it may be.

# %% tags=["wrong"]
def chunk_prefill(remaining, budget, running):
    return [(running, min(budget, remaining - done)) for done in range(0, remaining, budget)]


course.check_chunk_prefill(chunk_prefill)

# %% [markdown] tags=["solution"]
# **The last step is forgotten, or empty.** Counting with `//` goes wrong at one end or the other.

# %% tags=["wrong"]
def chunk_prefill(remaining, budget, running):
    room = budget - running
    return [(running, room)] * (remaining // room) + [(running, remaining % room)]


course.check_chunk_prefill(chunk_prefill)

# %% [markdown] tags=["solution"]
# **From zero.** A request that came at 10 has not waited since 0.

# %% tags=["wrong"]
def ttft_itl(arrival, times):
    return times[0], [after - before for before, after in zip(times, times[1:], strict=False)]


course.check_ttft_itl(ttft_itl)

# %% [markdown] tags=["solution"]
# **A mean.** It is what many dashboards show, and it hides the stall.

# %% tags=["wrong"]
def ttft_itl(arrival, times):
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return times[0] - arrival, [sum(gaps) // max(1, len(gaps))] * len(gaps)


course.check_ttft_itl(ttft_itl)
