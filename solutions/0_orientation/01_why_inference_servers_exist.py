# %% [markdown]
# # Exercise: numbers that you can defend
#
# You will be able to
#
# - work out how many tokens per second one request can get at most, on any machine
# - count the tokens that a model wrote, and no others
# - turn tokens per second into the price of a million tokens
#
# 15 minutes · difficulty ●○○ · after
# [the lesson](../../notebooks/0_orientation/01_why_inference_servers_exist.ipynb) · needs no GPU and no model; plain
# Python.

# %%
from tutorial_engine.exercises import why_inference_servers_exist as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. The speed limit
#
# For each token of a request, all weights of the model are read from memory once. `bandwidth` is how many bytes the
# memory can deliver per second. A tiny case: 10 weights of 1 byte, and 100 bytes per second. All weights can be read 10
# times in a second, so one request gets at most 10 tokens per second.

# %% tags=["exercise", "objective-2"]
def tokens_per_second_bound(params, bytes_per_param, bandwidth):
    """The most tokens per second of one request. params: how many weights. bandwidth: bytes per second."""
    # BEGIN SOLUTION
    return bandwidth / (params * bytes_per_param)
    # END SOLUTION todo: Return the most tokens per second of one request.


# %% tags=["check"]
limit = course.check_tokens_per_second_bound(tokens_per_second_bound)
limit

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# How many bytes is the whole model? They must be read for one token.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Bytes per second, divided by bytes per token, are tokens per second. Use `/`, which keeps the fraction.
# </details>

# %% [markdown] tags=["solution"]
# The units lead the way: (bytes / second) / (bytes / token) = token / second. Arithmetic does not occur: for one
# request it has time enough.

# %% [markdown]
# ## 2. What may be counted
#
# `generate` of `transformers` gives back one list of ids for each prompt: the prompt itself, then what the model wrote,
# and then filling, if another answer was longer. `eos` is the id with which the model says that it is done. It wrote
# that as well, so it counts, once:
#
# ```
# prompt   written     filling
# 7 5 9    4 8 6 2     2 2 2      prompt_len=3, eos=2  ->  4 tokens
# 7 2      4 8 6 5 1              prompt_len=2, eos=2  ->  5 tokens: cut off, no eos
# ```

# %% tags=["exercise", "objective-4"]
def count_output_tokens(output_ids, prompt_len, eos):
    """Tokens that the model wrote, up to and with the first eos. output_ids begin with the prompt."""
    # BEGIN SOLUTION
    written = output_ids[prompt_len:]
    if eos in written:
        return written.index(eos) + 1
    return len(written)
    # END SOLUTION todo: Return how many tokens the model wrote.


# %% tags=["check"]
counting = course.check_count_output_tokens(count_output_tokens)
counting

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Cut off the prompt first: a slice does it. What is left without an `eos` in it?
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# A list has `index(value)`, the place of the *first* one. Places are counted from 0, so how many tokens is that?
# </details>

# %% [markdown] tags=["solution"]
# Cut off the prompt *before* looking for the end: chat formats put the same id into prompts, after each speaker.

# %% [markdown]
# ## 3. What it costs
#
# A machine costs so many dollars per hour, and writes so many tokens per second, all the time. What do a million tokens
# cost? A case to try: 1,000 tokens per second are 3.6 million per hour. At 3.60 dollars per hour a million costs 1
# dollar.

# %% tags=["exercise", "objective-4"]
def cost_per_million(tokens_per_second, dollars_per_hour):
    """Dollars for a million tokens."""
    # BEGIN SOLUTION
    tokens_per_hour = tokens_per_second * 3600
    return dollars_per_hour / tokens_per_hour * 1_000_000
    # END SOLUTION todo: Return the price of a million tokens in dollars.


# %% tags=["check"]
price = course.check_cost_per_million(cost_per_million)
price

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# How many tokens does the machine write in an hour?
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Dollars per hour, divided by tokens per hour, is the price of *one* token.
# </details>

# %% [markdown]
# ## See it
#
# A colleague has measured a baseline: three prompts of 6 tokens, one call, and this came back after 0.2 seconds. (2 is
# the `eos`, and the filling. The machine costs 2 dollars an hour.) He multiplies rows and columns, gets 36 tokens, and
# says "180 tokens per second".

# %%
rows = [[5, 9, 4, 7, 3, 8, 11, 12, 2, 2, 2, 2],
        [6, 1, 4, 7, 3, 8, 15, 10, 17, 14, 19, 2],
        [5, 2, 4, 7, 3, 8, 13, 2, 2, 2, 2, 2]]

# %% [markdown]
# **Predict.** How many tokens did the model write? How many tokens per second is that? And what does a million output
# tokens cost: with his number, and in truth? (`use()` takes your function if its check has passed, and ours if not.)

# %% tags=["predict"]
guess = predict(tokens_written=None, tokens_per_second=None, his_dollars=None, true_dollars=None)

# %%
count, dollars, bound = counting.use(), price.use(), limit.use()

# %% tags=["experiment"]
written = sum(count(row, 6, 2) for row in rows)
observe(guess, tokens_written=written, tokens_per_second=written / 0.2, his_dollars=dollars(36 / 0.2, 2),
        true_dollars=dollars(written / 0.2, 2))

# %% [markdown]
# **Explain.** The model wrote 3 + 6 + 2 = 11 tokens. His number is more than three times too high, and so his price is
# more than three times too low. (Row three has a 2 in its *prompt*, which ends nothing.)
#
# And the speed limits of one request, in tokens per second, with weights of 2 bytes and with weights of half a byte:

# %%
machines = {"T4": 320e9, "A100, 80 GB": 2039e9, "H100 SXM": 3350e9, "H200 SXM": 4800e9}
print(f"{'':14}{'8B':>6}{'8B, 4 bits':>13}{'135M':>9}")
for name, bandwidth in machines.items():
    print(f"{name:14}{bound(8_030_261_248, 2, bandwidth):6.0f}{bound(8_030_261_248, 0.5, bandwidth):13,.0f}"
          f"{bound(134_515_008, 2, bandwidth):9,.0f}")

# %% [markdown]
# Good engines come near the first column: in the lesson it was 75 % on an H200. They stay far below the last one (9 %
# there), as it takes longer to start the computations of so short a step than to read the weights.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Forgetting that a weight has more than one byte.**

# %% tags=["wrong"]
def tokens_per_second_bound(params, bytes_per_param, bandwidth):
    return bandwidth / params


course.check_tokens_per_second_bound(tokens_per_second_bound)

# %% [markdown] tags=["solution"]
# **Whole tokens only.** A limit is a rate: 19.9 per second are 199 in ten seconds.

# %% tags=["wrong"]
def tokens_per_second_bound(params, bytes_per_param, bandwidth):
    return bandwidth // (params * bytes_per_param)


course.check_tokens_per_second_bound(tokens_per_second_bound)

# %% [markdown] tags=["solution"]
# **Counting what came back.** It is what the colleague did.

# %% tags=["wrong"]
def count_output_tokens(output_ids, prompt_len, eos):
    return len(output_ids)


course.check_count_output_tokens(count_output_tokens)

# %% [markdown] tags=["solution"]
# **Everything after the prompt.** Filling is nobody's work.

# %% tags=["wrong"]
def count_output_tokens(output_ids, prompt_len, eos):
    return len(output_ids) - prompt_len


course.check_count_output_tokens(count_output_tokens)

# %% [markdown] tags=["solution"]
# **Filtering out the end.** It works as long as the filling is nothing but `eos`.

# %% tags=["wrong"]
def count_output_tokens(output_ids, prompt_len, eos):
    return len([token for token in output_ids[prompt_len:] if token != eos]) + (eos in output_ids[prompt_len:])


course.check_count_output_tokens(count_output_tokens)

# %% [markdown] tags=["solution"]
# **Looking for the end in the whole list.** Some prompts have the same id in them.

# %% tags=["wrong"]
def count_output_tokens(output_ids, prompt_len, eos):
    end = output_ids.index(eos) + 1 if eos in output_ids else len(output_ids)
    return end - prompt_len


course.check_count_output_tokens(count_output_tokens)

# %% [markdown] tags=["solution"]
# **Mixing seconds and hours.** The price is 3,600 times too high.

# %% tags=["wrong"]
def cost_per_million(tokens_per_second, dollars_per_hour):
    return dollars_per_hour / tokens_per_second * 1_000_000


course.check_cost_per_million(cost_per_million)
