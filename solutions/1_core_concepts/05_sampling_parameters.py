# %% [markdown]
# # Exercise: filters and a penalty
#
# You will be able to
#
# - write `top_p`, `min_p` and the repetition penalty, each in a few lines
# - say which of them see the temperature, and which tokens each one counts
# - recognise the usual mistakes, which only show on some texts
#
# 25 minutes · difficulty ●●○ · after [the lesson](../../notebooks/1_core_concepts/05_sampling_parameters.ipynb) · needs
# no GPU and no model.

# %%
import math

from tutorial_engine.exercises import sampling_parameters as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. top_p
#
# Go down the list from the likeliest token, and add up probabilities. Stop as soon as the sum has reached `top_p`.
#
# ```
# token             1      2      0      3
# probability     0.5   0.25  0.125  0.125
# sum so far      0.5   0.75  0.875    1
# top_p 0.6      kept   kept
# ```

# %% tags=["exercise", "objective-1"]
def top_p_kept(probs, top_p):
    """The ids that are kept, likeliest first; equal ones in the order of their ids."""
    # BEGIN SOLUTION
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    return kept
    # END SOLUTION todo: Return a list of the ids that top_p keeps.


# %% tags=["check"]
nucleus = course.check_top_p_kept(top_p_kept)
nucleus

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Sort the ids by probability: `sorted(range(len(probs)), key=lambda token: -probs[token])`. `sorted` leaves equal ones
# in their order.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# A token is needed while those *before* it have not reached `top_p`. So ask before you add.
# </details>

# %% [markdown]
# ## 2. min_p
#
# Keep each token that is at least `min_p` times as likely as the likeliest one. You get logits, and the temperature
# comes first: divide the logits by it. A case to try: with logits 2, 1 and 0 at temperature 1 the tokens are 1, 0.37
# and 0.14 times as likely as the likeliest. `min_p=0.2` keeps two of them.

# %% tags=["exercise", "objective-1"]
def min_p_kept(logits, temperature, min_p):
    """The ids that are kept, in the order of the ids."""
    # BEGIN SOLUTION
    best = max(logits)
    return [token for token, x in enumerate(logits) if math.exp((x - best) / temperature) >= min_p]
    # END SOLUTION todo: Return a list of the ids that min_p keeps.


# %% tags=["check"]
bar = course.check_min_p_kept(min_p_kept)
bar

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# The probability of a token divided by that of the likeliest: in the fraction the sum of softmax cancels.
# </details>
#
# <details><summary>Hint 2: nearly the answer</summary>
#
# What is left is `math.exp((logit - largest logit) / temperature)`. (`math` is imported at the top.)
# </details>

# %% [markdown]
# ## 3. The repetition penalty
#
# For each token that occurs in the prompt or in the output: divide its logit by the penalty if it is positive, multiply
# if not. How often it occurs does not matter. With penalty 2, a logit of 3 becomes 1.5, and one of -1 becomes -2.

# %% tags=["exercise", "objective-1"]
def repetition_penalty(logits, prompt, output, penalty):
    """A new list of logits. prompt and output are lists of token ids."""
    # BEGIN SOLUTION
    seen = {*prompt, *output}
    return [x if token not in seen else x / penalty if x > 0 else x * penalty for token, x in enumerate(logits)]
    # END SOLUTION todo: Return the list of logits after the penalty.


# %% tags=["check"]
penalised = course.check_repetition_penalty(repetition_penalty)
penalised

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# A set of all ids that occur: `{*prompt, *output}`.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Dividing a negative logit would bring it nearer to 0, and so make the token *more* likely.
# </details>

# %% [markdown]
# ## See it
#
# **Predict.** Logits 2, 1, 0 and -2. How many tokens does `min_p=0.2` keep at temperature 0.5, at 1, and at 2? (`use()`
# takes your function if its check has passed, and ours if not.)

# %% tags=["predict"]
guess = predict(cold=None, neutral=None, hot=None)

# %%
keep = bar.use()

# %% tags=["experiment"]
cold, neutral, hot = (len(keep([2.0, 1.0, 0.0, -2.0], t, 0.2)) for t in (0.5, 1.0, 2.0))
observe(guess, cold=cold, neutral=neutral, hot=hot)

# %% [markdown]
# **Explain.** The bar is the same, 0.2 of the likeliest. The temperature pushes the others below it or brings them up:
# the second token has 0.14, 0.37 and 0.61 of the likeliest, the third 0.02, 0.14 and 0.37.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# **Stopping before the token that crosses the line.** What is kept does not reach `top_p`, and may be nothing.

# %% tags=["wrong"]
def top_p_kept(probs, top_p):
    kept, mass = [], 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        mass += probs[token]
        if mass <= top_p:
            kept.append(token)
    return kept


course.check_top_p_kept(top_p_kept)

# %% [markdown] tags=["solution"]
# **Reading `min_p` as a probability.** Where even the likeliest token has less, nothing is left.

# %% tags=["wrong"]
def min_p_kept(logits, temperature, min_p):
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [token for token, w in enumerate(weights) if w / sum(weights) >= min_p]


course.check_min_p_kept(min_p_kept)

# %% [markdown] tags=["solution"]
# **Forgetting the temperature.** At 1 nobody notices.

# %% tags=["wrong"]
def min_p_kept(logits, temperature, min_p):
    return [token for token, x in enumerate(logits) if math.exp(x - max(logits)) >= min_p]


course.check_min_p_kept(min_p_kept)

# %% [markdown] tags=["solution"]
# **Dividing every logit.** A token with a negative logit is then rewarded.

# %% tags=["wrong"]
def repetition_penalty(logits, prompt, output, penalty):
    return [x / penalty if token in {*prompt, *output} else x for token, x in enumerate(logits)]


course.check_repetition_penalty(repetition_penalty)

# %% [markdown] tags=["solution"]
# **Looking at the output only.** That is what the frequency and presence penalties do.

# %% tags=["wrong"]
def repetition_penalty(logits, prompt, output, penalty):
    return [x if token not in output else x / penalty if x > 0 else x * penalty for token, x in enumerate(logits)]


course.check_repetition_penalty(repetition_penalty)
