# %% [markdown]
# # Exercise: a city bus of your own
#
# You will be able to
#
# - count the steps that continuous batching needs, for any list of lengths
# - plan a step: who gets how many tokens out of one budget
# - see what your plan does with a long prompt, and what a smaller budget changes
#
# 25 minutes · difficulty ●●○ · after [the lesson](../../notebooks/1_core_concepts/04_continuous_batching.ipynb) · needs
# no GPU and no model; plain Python.

# %%
from tutorial_engine.exercises import continuous_batching as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. How many steps?
#
# Requests stand in a queue. Each needs a seat, writes one token a step, and leaves. A free seat is taken at once by the
# next in the queue. Answers of 3, 9, 4 and 2 tokens, two seats:
#
# ```
# step     0 1 2 3 4 5 6 7 8
# seat 0   a a a c c c c d d       a writes 3, then c writes 4, then d writes 2
# seat 1   b b b b b b b b b       b writes 9
# ```
#
# So it is 9 steps. (In two static batches: 9 + 4 = 13.)

# %% tags=["exercise", "objective-1"]
def continuous_steps(lengths, seats):
    """Steps until all answers are written. lengths: tokens of each, in the order of the queue."""
    # BEGIN SOLUTION
    free_at = [0] * seats
    for length in lengths:
        first = free_at.index(min(free_at))
        free_at[first] += length
    return max(free_at)
    # END SOLUTION todo: Return the number of steps.


# %% tags=["check"]
counting = course.check_continuous_steps(continuous_steps)
counting

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Keep a list with one number for each seat: the step in which it becomes free. At the beginning all are 0.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# The next in the queue takes the seat with the smallest number (`free_at.index(min(free_at))` finds it), and adds its
# length to that number. When the queue is empty, the largest number is the answer.
# </details>

# %% [markdown] tags=["solution"]
# No loop over steps is needed: only the moments count in which a seat becomes free. With many seats a heap finds the
# smallest number faster, and the lesson uses one.

# %% [markdown]
# ## 2. Plan a step
#
# Each request has some tokens to compute: a prompt of 20 that nobody has computed yet, the remaining 14 of a prompt, or
# a single one if it is writing. A step has one budget for all of them. Those that run come first, in order, and then
# those that wait, while budget *and* seats last:
#
# ```
# plan_step(running=[1, 1], waiting=[20], budget=8, seats=4)   ->  [1, 1, 6]      the prompt gets what is left
# plan_step([1, 14, 1], [], 8, 4)                              ->  [1, 7, 0]      it runs, so it keeps its seat, with 0
# plan_step([1, 1], [6, 4], 8, 4)                              ->  [1, 1, 6]      the 4 does not get on
# ```

# %% tags=["exercise", "objective-2"]
def plan_step(running, waiting, budget, seats):
    """Tokens of each request in this step: one number for each that runs, then one for each that gets on."""
    # BEGIN SOLUTION
    plan = []
    for wanted in running:
        plan.append(min(wanted, budget))
        budget -= plan[-1]
    for wanted in waiting:
        if budget == 0 or len(plan) == seats:
            break
        plan.append(min(wanted, budget))
        budget -= plan[-1]
    return plan
    # END SOLUTION todo: Return the tokens of each running request, and of each waiting one that gets on.


# %% tags=["check"]
planning = course.check_plan_step(plan_step)
planning

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Whoever it is, gets `min(wanted, budget)`, and the budget becomes smaller by as much. Write the loop over `running`
# first.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# The loop over `waiting` is the same, but it ends as soon as nothing is left of the budget or of the seats. The length
# of the plan says how many seats are taken.
# </details>

# %% [markdown] tags=["solution"]
# The engine's scheduler has a third reason to end the second loop: no free blocks. And if there is no block for one
# that *runs*, somebody is preempted.

# %% [markdown]
# ## See it
#
# Three requests are writing, and a prompt of 100 tokens comes. `planning.use()` takes your plan if it has passed, and
# ours if not. The function below it calls the plan, step by step, until the prompt is computed.
#
# **Predict.** In how many steps is the prompt computed with a budget of 128, and with 23? How many tokens has the
# largest step in each case?

# %% tags=["predict"]
guess = predict(steps_128=None, largest_128=None, steps_23=None, largest_23=None)

# %%
plan = planning.use()

# %% tags=["experiment"]
def steps_of_the_prompt(prompt, budget):
    """The tokens of each step, until the prompt is computed."""
    shares = [plan([1, 1, 1], [prompt], budget, 4)]
    while sum(share[3] for share in shares) < prompt:
        left = prompt - sum(share[3] for share in shares)
        shares.append(plan([1, 1, 1, left], [], budget, 4))
    return shares


large, small = steps_of_the_prompt(100, 128), steps_of_the_prompt(100, 23)
observe(guess, steps_128=len(large), largest_128=max(map(sum, large)), steps_23=len(small),
        largest_23=max(map(sum, small)))

# %%
for number, share in enumerate(small):
    print(f"step {number}:", "w" * sum(share[:3]) + "P" * share[3])

# %% [markdown]
# **Explain.** With 128 all is done in one step of 103 tokens, and the three who write wait for it. With 23 they get
# their token in every step, 20 are left for the prompt, and it takes five steps. The budget is the largest step.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **The tour bus**: whole batches, one after the other.

# %% tags=["wrong"]
def continuous_steps(lengths, seats):
    return sum(max(lengths[i:i + seats]) for i in range(0, len(lengths), seats))


course.check_continuous_steps(continuous_steps)

# %% [markdown] tags=["solution"]
# **Sharing the work out evenly.** No answer can be split between two seats.

# %% tags=["wrong"]
def continuous_steps(lengths, seats):
    return -(-sum(lengths) // seats)


course.check_continuous_steps(continuous_steps)

# %% [markdown] tags=["solution"]
# **All or nothing**: a prompt gets on only if it fits as a whole. A prompt that is larger than the budget never does.

# %% tags=["wrong"]
def plan_step(running, waiting, budget, seats):
    shares = list(running)
    for wanted in waiting:
        if sum(shares) + wanted <= budget and len(shares) < seats:
            shares.append(wanted)
    return shares


course.check_plan_step(plan_step)

# %% [markdown] tags=["solution"]
# **Forgetting the seats.** Each further request needs memory for its answer, so somebody must count them.

# %% tags=["wrong"]
def plan_step(running, waiting, budget, seats):
    shares = []
    for wanted in [*running, *waiting]:
        if budget or len(shares) < len(running):
            shares.append(min(wanted, budget))
            budget -= shares[-1]
    return shares


course.check_plan_step(plan_step)

# %% [markdown] tags=["solution"]
# **Newcomers first.** It sounds polite, and everybody who reads along sees the text stop.

# %% tags=["wrong"]
def plan_step(running, waiting, budget, seats):
    shares = []
    for wanted in [*waiting[:seats - len(running)], *running]:
        shares.append(min(wanted, budget))
        budget -= shares[-1]
    return shares


course.check_plan_step(plan_step)
