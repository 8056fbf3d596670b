# %% [markdown]
# # Exercise: a batch that nobody has to watch
#
# You will be able to
#
# - tell from a batch's finish reasons whether it can be used
# - finish what was cut off, without asking anybody twice who was done
# - keep the engine full while you do so: one call for each round
#
# 25 minutes · difficulty ●●○ · needs no GPU and no model ·
# after [Offline batch inference](../../notebooks/3_running_locally/02_offline_batch_inference.ipynb)

# %%
from tutorial_engine import SamplingParams
from tutorial_engine.exercises import offline_batch_inference as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. The audit
#
# `llm.generate` has come back with a list of outputs, one for each prompt. With `n=2`, each has two completions. Count
# how all of them ended:
#
# ```
# outputs[0].outputs[0].finish_reason   "stop"
# outputs[0].outputs[1].finish_reason   "length"
# outputs[1].outputs[0].finish_reason   "length"
# outputs[1].outputs[1].finish_reason   "length"
#
# audit(outputs)   {"stop": 1, "length": 3}
# ```

# %% tags=["exercise", "objective-1"]
def audit(outputs):
    """A dict: finish reason -> number of completions that ended with it."""
    # BEGIN SOLUTION
    counts = {}
    for output in outputs:
        for completion in output.outputs:
            counts[completion.finish_reason] = counts.get(completion.finish_reason, 0) + 1
    return counts
    # END SOLUTION todo: Return a dict with the number of completions for each finish reason.


# %% tags=["check"]
counting = course.check_audit(audit)
counting

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Two loops, one inside the other: over the outputs, and over the completions of each.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# `counts.get(reason, 0)` is 0 for a reason that has not been seen yet.
# </details>

# %% [markdown] tags=["solution"]
# `collections.Counter` does the same in one line. The loop over the completions is what is easily forgotten.

# %% [markdown]
# ## 2. Until everybody is done
#
# Some answers are cut off at `max_tokens`, and how many is known only afterwards. Write `finish(llm, prompts,
# max_tokens)`, which returns the **whole** answer of each prompt:
#
# - the first round asks all prompts, in **one** call of `llm.generate`, with `max_tokens`;
# - the next round asks only those that were cut off (`finish_reason` is `"length"`), again in one call, with twice as
#   many tokens; and so on, until nobody is cut off;
# - the result is a list of texts in the order of the prompts. One completion for each prompt (`n` is 1).
#
# For answers of 2, 5, 1 and 9 tokens, and `max_tokens=4`:
#
# ```
# generate(["a", "b", "c", "d"], 4 tokens)      a and c are done
# generate(["b", "d"],           8 tokens)      b is done
# generate(["d"],               16 tokens)      d is done
# ```

# %% tags=["exercise", "objective-1"]
def finish(llm, prompts, max_tokens):
    """A list of texts: the whole answer to each prompt, in the same order."""
    # BEGIN SOLUTION
    texts = [None] * len(prompts)
    todo = list(range(len(prompts)))  # places in the list, since a prompt may occur twice
    while todo:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.generate([prompts[i] for i in todo], params)
        cut_off = []
        for i, output in zip(todo, outputs):
            if output.outputs[0].finish_reason == "length":
                cut_off.append(i)
            else:
                texts[i] = output.outputs[0].text
        todo = cut_off
        max_tokens *= 2
    return texts
    # END SOLUTION todo: Return the whole answer to each prompt, asking again only those that were cut off.


# %% tags=["check"]
finishing = course.check_finish(finish)
finishing

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Keep a list of what is still to do, at first everything, and write a `while` loop around it.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Keep *places*, not prompts: `todo = list(range(len(prompts)))`. A round asks `[prompts[i] for i in todo]`, and
# `zip(todo, outputs)` says which output belongs to which place.
# </details>
#
# <details><summary>Hint 3: nearly the answer</summary>
#
# `texts = [None] * len(prompts)` has a place for each answer. In a round, an output that was cut off goes to the list
# for the next round; any other fills its place in `texts`. Then double `max_tokens`.
# </details>

# %% [markdown] tags=["solution"]
# A round that asks everybody again would give the same texts, and would compute most of them twice. And real models
# sometimes never stop: put a limit on the number of rounds, and keep what is cut off at the end with its reason.

# %% [markdown]
# ## See it
#
# 64 prompts on a pretended engine with a seat for each. Their answers have 3 to 10 tokens, but every 16th has 40.
#
# **Predict.** With `max_tokens=16` at first: how many rounds? How many steps does the engine make, all rounds together?
# (In a round, it makes as many steps as its longest answer has tokens, and one more for the token that ends it.) How
# many if `max_tokens` is 64 from the start?

# %% tags=["predict"]
guess = predict(rounds=None, steps=None, steps_with_64_at_once=None)

# %%
count, ask_all = counting.use(), finishing.use()

# %% tags=["experiment"]
lengths = {f"prompt {i}": 40 if i % 16 == 0 else 3 + i % 8 for i in range(64)}
careful, generous = course.PretendLLM(lengths), course.PretendLLM(lengths)
print("first round:", count(course.PretendLLM(lengths).generate(list(lengths), SamplingParams(max_tokens=16))))
same = ask_all(careful, list(lengths), 16) == ask_all(generous, list(lengths), 64)
print("same texts:", same)
observe(guess, rounds=len(careful.calls), steps=careful.steps, steps_with_64_at_once=generous.steps)

# %% [markdown]
# **Explain.** The careful way took 16 + 32 + 41 steps: the long answers were begun three times. `max_tokens` is a
# limit and not a reservation, so the generous call cost nobody anything, and was the quickest. Set it to what the task
# may need, and keep the second round for surprises.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Looking at the first completion only.** It is right as long as `n` is 1.

# %% tags=["wrong"]
def audit(outputs):
    counts = {}
    for output in outputs:
        reason = output.outputs[0].finish_reason
        counts[reason] = counts.get(reason, 0) + 1
    return counts


course.check_audit(audit)

# %% [markdown] tags=["solution"]
# **Counting the reasons that one knows.** The others vanish without a word.

# %% tags=["wrong"]
def audit(outputs):
    reasons = [completion.finish_reason for output in outputs for completion in output.outputs]
    return {reason: reasons.count(reason) for reason in ("stop", "length") if reason in reasons}


course.check_audit(audit)

# %% [markdown] tags=["solution"]
# **One call for each prompt.** The texts are right, and a job of an hour takes a day.

# %% tags=["wrong"]
def finish(llm, prompts, max_tokens):
    texts = []
    for prompt in prompts:
        tokens, reason = max_tokens, "length"
        while reason == "length":
            answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens))[0].outputs[0]
            reason, tokens = answer.finish_reason, tokens * 2
        texts.append(answer.text)
    return texts


course.check_finish(finish)

# %% [markdown] tags=["solution"]
# **Taking the texts as they come.** Half sentences, and nobody notices.

# %% tags=["wrong"]
def finish(llm, prompts, max_tokens):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [output.outputs[0].text for output in outputs]


course.check_finish(finish)

# %% [markdown] tags=["solution"]
# **Asking everybody again.** The texts are right; the work is done two or three times.

# %% tags=["wrong"]
def finish(llm, prompts, max_tokens):
    while True:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
        if all(output.outputs[0].finish_reason != "length" for output in outputs):
            return [output.outputs[0].text for output in outputs]
        max_tokens *= 2


course.check_finish(finish)

# %% [markdown] tags=["solution"]
# **Collecting texts as they get done.** The long answers end up at the end of the list, beside other people's prompts.

# %% tags=["wrong"]
def finish(llm, prompts, max_tokens):
    texts = []
    while prompts:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
        texts += [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason != "length"]
        prompts = [output.prompt for output in outputs if output.outputs[0].finish_reason == "length"]
        max_tokens *= 2
    return texts


course.check_finish(finish)
