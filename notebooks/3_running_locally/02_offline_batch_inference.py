# %% [markdown]
# # Offline batch inference
#
# You will be able to
#
# - run any number of prompts through one `LLM` object, and read what comes back: `outputs[i].outputs[j]`
# - choose between `generate()` and `chat()`, and see the very text that the model got
# - say whose sampling settings a call uses, and pin them
# - predict, in engine steps, what a loop, a list and a small memory pool cost
#
# Needs: a CPU and 4 GB of free memory, no GPU. About 40 minutes to read; all cells together run in one to two minutes.
# You should know what a token is. Everything else is explained where it comes up.

# %% tags=["parameters"]
NUM_PROMPTS = 32  # prompts in "One call or a loop"; fast: 4
LONGEST_OUTPUT = 4  # they ask for 1, 2, 3, 4, 1, 2, ... tokens; fast: 2

# %%
import html
import inspect
import json
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
from IPython.display import HTML

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.notebook import expect_error, observe, predict
from tutorial_engine.trace import Trace

# %% [markdown]
# ## The problem
#
# You have a pile of prompts and nobody is waiting for any single answer: 50,000 reviews to label, a benchmark to score,
# a data set to write. You do not want a server. You want a Python script that starts, works through the pile, and ends.
#
# That script is three lines long. The first one loads the model, which happens once. (No model is named, so it is the
# course's own small one. The other arguments fix the number type and 1 GiB of working memory, so that every machine
# prints the same page; `generation_config` has a section of its own below.)

# %%
began = time.perf_counter()
llm = LLM(dtype="float32", kv_cache_memory_bytes=2**30, generation_config="vllm")
load_seconds = time.perf_counter() - began
llm

# %% [markdown]
# Then you ask. `temperature=0` (*greedy*) means: always take the most likely token, so that you and this page get the
# same answers.

# %%
questions = ["What is the capital of France?", "Name the largest planet in our solar system."]
outputs = llm.generate(questions, SamplingParams(temperature=0))
for output in outputs:
    print(output.prompt, "->", repr(output.outputs[0].text))

# %% [markdown]
# No error, no warning, and two useless answers: the first is **empty**, the second **stops in the middle**. And if you
# had called `generate` in a loop, once for each of your 50,000 prompts, the script would also be **several times too
# slow**, just as quietly.
#
# These are the three classic mistakes of offline inference. On this page you will make each of them on purpose, see in
# numbers what it costs, and then never make it again.

# %% [markdown]
# ## The idea
#
# Think of a **bus**. The engine is the bus, a prompt is a passenger, and one *step* of the engine is a drive to the
# next stop. On each drive every passenger gets one token further. One drive with thirty aboard costs far less than
# thirty drives with one, because the expensive part is moving the bus itself: reading all weights of the model, once in
# every step.
#
# | on the bus | in the engine |
# |---|---|
# | buying the bus | `LLM(...)`: load the weights, set memory aside. Once |
# | a passenger | one prompt with its `SamplingParams` |
# | a drive to the next stop | one step: everyone aboard gets one token |
# | getting off | the request is finished; its seat is free for the next in line, at this very stop |
# | seats | `max_num_seqs` |
# | luggage space | the KV cache: what the model keeps of each prompt and answer, in blocks of 16 tokens |
# | driving one passenger at a time | a `for` loop around `generate` |
# | a **charter** tour | **offline**: all passengers known at the start, only the end of the tour counts |
# | a **public line** | **online** (a server): people arrive when they like, and each one looks at the clock |
#
# Charter and public line drive the same bus. That is the whole difference between offline and online: not another
# engine, but another way to get on.

# %%
fig, ax = plt.subplots(figsize=(10, 3))
boxes = [(0, 2, "your script,\nLLM.generate", "#cfe8cf"), (0, 0, "many clients\nover HTTP", "#f6dfc4"),
         (3, 0, "API server,\nAsyncLLM", "#f6dfc4"), (6, 1, "waiting\nqueue", "#dde6f5"),
         (9, 1, "scheduler", "#dde6f5"), (12, 1, "model and\nKV cache", "#dde6f5")]
ax.add_patch(plt.Rectangle((4.6, 0.05), 8.8, 1.9, fill=False, ec="#3b6ea5", ls="--"))
ax.text(9, 2.05, "the engine: the same for both", ha="center", color="#3b6ea5")
for x, y, text, colour in boxes:
    ax.add_patch(plt.Rectangle((x - 1.15, y - 0.4), 2.3, 0.8, fc=colour, ec="#555"))
    ax.text(x, y, text, ha="center", va="center", fontsize=9)
for start, end in [((1.2, 2), (5, 1.45)), ((1.2, 0), (1.8, 0)), ((4.2, 0.1), (5, 0.55)), ((7.2, 1), (7.8, 1)),
                   ((10.2, 1.1), (10.8, 1.1)), ((10.8, 0.9), (10.2, 0.9))]:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->"})
ax.text(10.5, 0.25, "again and again: each step,\none token for everyone aboard", ha="center", fontsize=8)
_ = ax.set(xlim=(-1.3, 13.5), ylim=(-0.5, 2.5)), ax.axis("off")

# %% [markdown]
# ## Under the hood
#
# `generate` is two halves, in [llm.py](../../tutorial_engine/llm.py) as in vLLM: `enqueue` puts everything into the
# waiting queue, `wait_for_completion` runs until everything is finished. Called one by one, they let you look at the
# engine in between. First only queue three prompts:

# %%
ids = llm.enqueue(["The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time"],
                  SamplingParams(temperature=0, max_tokens=4))
llm.llm_engine

# %% [markdown]
# Three passengers at the stop (the first number of each is its ticket), and nothing is computed: `0/5 tokens`. Now one
# single step:

# %%
llm.llm_engine.step()
llm.llm_engine

# %% [markdown]
# All three got on **in the same step**, whatever their length. Each holds one block of memory; which one is not
# important here. `5/6` means: the five tokens of the prompt are computed, and a sixth, the first of the answer, is
# known. Let it finish:

# %%
for output in llm.wait_for_completion():
    print(repr(output.prompt), "->", repr(output.outputs[0].text))

# %% [markdown]
# What is in a step? `LLMEngine.step`, in [llm_engine.py](../../tutorial_engine/llm_engine.py), starts one and finishes
# one. Most lines of these two halves care for errors. These do the work:

# %%
work = ("schedule()", "execute_model(", "update_from_output(", "output_processor.process(")
engine = type(llm.llm_engine)
for line in (inspect.getsource(engine._start_step) + inspect.getsource(engine._finish_step)).splitlines():
    if any(call in line for call in work):
        print(line.strip())

# %% [markdown]
# `schedule` decides who computes how much. `execute_model` computes it, for all of them at once. `update_from_output`
# appends the new tokens, and those who are done get off. `process` makes text. (Why two halves? On a GPU the engine
# starts the next step before it finishes this one, so that the GPU never waits for Python.) `wait_for_completion`
# repeats this until everybody is finished. There is no "batch size" anywhere: the scheduler fills the bus anew at every
# stop.
#
# <details><summary>For readers who know vLLM: where this differs</summary>
#
# The names and the order are those of vLLM's V1 engine. Three things are simpler here. (1) vLLM's `LLM` starts the
# engine core in a *child process* by default and talks to it over ZMQ sockets on the same machine
# (`VLLM_ENABLE_V1_MULTIPROCESSING=1`); ours runs in your process. (2) vLLM's server puts an asynchronous class,
# `AsyncLLM`, in front of the same engine core, and tokenizes in the server's process. (3) On a GPU, vLLM also profiles
# memory and captures CUDA graphs while it loads. And a detail that holds for both: a prompt longer than the token
# budget of one step (`max_num_batched_tokens`) boards over several steps. That is *chunked prefill*; no prompt on this
# page is that long.
# </details>

# %% [markdown]
# ## Try it
#
# ### 1. Raw or chat?
#
# Why was the answer about France empty? Ask the same question both ways. `generate` sends your text as it is. `chat`
# takes *messages* and first lays them out with the model's **chat template**: the layout in which the model saw
# conversations when it was trained:

# %%
def as_chat(question):
    return [{"role": "user", "content": question}]


tokenizer = llm.get_tokenizer()
rendered = tokenizer.apply_chat_template(as_chat("What is the capital of France?"), tokenize=False,
                                         add_generation_prompt=True)
print(rendered)

# %% [markdown]
# On this page you guess before you measure. Write your numbers in place of `None`; a wrong guess teaches more than
# none. Here: how many tokens does each way send, and how many come back for the raw text?

# %% tags=["predict"]
guess = predict(prompt_tokens_raw=None, prompt_tokens_chat=None, output_tokens_raw=None)

# %% tags=["experiment", "objective-2"]
questions = ["What is the capital of France?", "In one sentence, what is a KV cache?"]
greedy = SamplingParams(temperature=0, max_tokens=64)
raw = llm.generate(questions, greedy)
chat = llm.chat([as_chat(question) for question in questions], greedy)
observe(guess, prompt_tokens_raw=len(raw[0].prompt_token_ids), prompt_tokens_chat=len(chat[0].prompt_token_ids),
        output_tokens_raw=len(raw[0].outputs[0].token_ids))

# %%
def before_and_after(rows):
    """A table: what the model got, and what it wrote."""
    cell = '<td style="text-align: left; vertical-align: top; border: 1px solid #999; padding: 8px">'
    pre = f'{cell}<pre style="white-space: pre-wrap; word-break: normal">'
    body = "".join(f"<tr>{cell}<b>{name}</b></td>" + "".join(f"{pre}{html.escape(text)}</pre></td>" for text in texts)
                   + "</tr>" for name, *texts in rows)
    head = "".join(f"{cell}<b>{name}</b></td>" for name in ("", "the model got", "it wrote (every token)"))
    return HTML(f"<table><tr>{head}</tr>{body}</table>")


print("chat() sent exactly the rendered template:", chat[0].prompt == rendered)
before_and_after((name, output.prompt, tokenizer.decode(output.outputs[0].token_ids))
                 for name, output in [("generate", raw[0]), ("chat", chat[0])])

# %% [markdown]
# Seven tokens became 37: role markers, a system prompt that nobody asked for but the template adds, and at the end an
# open `assistant` turn that begs for an answer.
#
# The raw question got one token, `<|im_end|>`: *end of message*. Look at the template: that is precisely what follows a
# question there. The model did continue the text correctly. It ended your message for you, and nobody had opened a turn
# for an answer. This marker is the model's end-of-sequence token, so the request was finished, and since markers are
# left out of `.text`, you saw `''`.
#
# Nothing was broken, so nothing raised. When an answer is odd, look at `output.prompt` and `output.prompt_token_ids`
# first: they are what the model really saw.
#
# And the other question?

# %%
print("raw: ", repr(raw[1].outputs[0].text))
print("chat:", repr(chat[1].outputs[0].text))

# %% [markdown]
# Chat gives a well-formed sentence that is **confident nonsense**. That is the size of the model: 135 million
# parameters are enough for fluent English and for little knowledge. The template fixes the *form*, never the *facts*.
# On this page, trust the numbers and never the statements of the model.
#
# **When raw is right.** The template is for *answering*. Do not use it for continuing or for measuring a text:
#
# * a **base model** was never trained on conversations and has no use for one
# * **continuation**: you want the text to go on, not a reply
# * **perplexity**: how probable does the model find a text that you already have?

# %%
for output in llm.generate(["1, 2, 3, 4, 5,", "The days of the week are Monday, Tuesday,"],
                           SamplingParams(temperature=0, max_tokens=8)):
    print(repr(output.prompt), "->", repr(output.outputs[0].text))

# %% [markdown]
# Perplexity needs no output at all, only how probable each prompt token was. `prompt_logprobs=0` asks for the
# logarithms of these probabilities.

# %%
import math

sentences = ["Paris is the capital of France.", "Paris is the capital of Japan.", "Capital the is France Paris of."]
for output in llm.generate(sentences, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)):
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs))[1:]  # nothing comes before the first token
    mean = sum(logprobs[token_id].logprob for token_id, logprobs in pairs) / len(pairs)
    print(f"perplexity {math.exp(-mean):#8.3g}   {output.prompt}")

# %% [markdown]
# Lower means "less surprised". The true sentence wins, the scrambled one is far out. With a chat template around it you
# would have measured the template as well.
#
# **Now change one thing:** pass `add_generation_prompt=False` to `llm.chat` for the question about France. Predict
# first: what does the model write when nobody has opened its turn?
#
# <details><summary>What happens</summary>
#
# It opens the turn itself: it writes `<|im_start|>assistant` and then the answer. The marker is left out of `.text`, so
# the text begins with a stray word, `assistant`. The template only saves the model those tokens; leaving it out spoils
# the text.
# </details>

# %% [markdown]
# ### 2. What comes back: two lists, one inside the other
#
# `generate` returns a list of `RequestOutput`, one for each **prompt**. Each has a list `.outputs` of
# `CompletionOutput`, one for each **completion** of that prompt. Usually there is one completion. With `n=3` there are
# three:
#
# ```
# outputs[i]               prompt i           .prompt  .prompt_token_ids  .num_cached_tokens  .finished
# outputs[i].outputs[j]    its completion j   .text  .token_ids  .finish_reason  .stop_reason  .logprobs
# ```

# %%
three = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=8)
outputs = llm.generate(["Once upon a time", "My favourite animal is"], three)
print("prompts:", len(outputs), "  completions of each:", [len(output.outputs) for output in outputs])
first = outputs[0].outputs[2]
print("prompt 0, completion 2:", first.index, len(first.token_ids), first.finish_reason, first.stop_reason)
print("different texts among the 3 of prompt 0:", len({completion.text for completion in outputs[0].outputs}))

# %% [markdown]
# The double name `outputs[i].outputs[j]` is the most common slip of all. The engine answers it:

# %%
with expect_error(AttributeError):
    outputs[0].text

# %% [markdown]
# Three completions need chance. A greedy request would give the same text three times, so it is refused:

# %%
with expect_error(ValueError):
    SamplingParams(n=3, temperature=0)

# %% [markdown]
# The `seed` makes chance repeatable, whatever else is on the bus. Behind the scenes `n=2` with seed 7 becomes two
# ordinary requests that share the memory of their prompt, with the seeds 7 and 8. Do you believe that? Predict whether
# the tokens are equal.

# %% tags=["predict"]
guess = predict(same_as_seeds_7_and_8=None)

# %% tags=["experiment", "objective-1"]
pair, seven, eight = llm.generate(
    ["Once upon a time"] * 3,
    [SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=8),
     SamplingParams(temperature=0.8, seed=7, max_tokens=8), SamplingParams(temperature=0.8, seed=8, max_tokens=8)])
together = [completion.token_ids for completion in pair.outputs]
observe(guess, same_as_seeds_7_and_8=together == [seven.outputs[0].token_ids, eight.outputs[0].token_ids])

# %% [markdown]
# One more field explains a lot of speed: `num_cached_tokens`. Blocks of 16 tokens that the engine has computed before,
# for any request, need not be computed again. All our chats begin with the same template. Empty the cache, ask three
# questions at once, then the same three again. How many of each prompt's tokens come from the cache?

# %% tags=["predict"]
guess = predict(first_time=None, second_time=None)  # two lists of three numbers

# %% tags=["experiment", "objective-1"]
llm.reset_prefix_cache()
chats = [as_chat(question) for question in ("What is 2 + 2?", "Name three fruits.", "Who are you?")]
one_token = SamplingParams(temperature=0, max_tokens=1)
first_time = llm.chat(chats, one_token)
second_time = llm.chat(chats, one_token)
print("prompt tokens:", [len(output.prompt_token_ids) for output in first_time])
observe(guess, first_time=[output.num_cached_tokens for output in first_time],
        second_time=[output.num_cached_tokens for output in second_time])

# %% [markdown]
# The first chat pays for the shared beginning, and its neighbours in the very same step use it: 16 tokens, one whole
# block. The second time both *whole* blocks hit: 32 tokens, and not 38 or 34, because a block that is not full cannot
# be shared. Remember this when you measure: **the second run of a benchmark is not the first one again**.

# %% [markdown]
# ### 3. Sixteen tokens
#
# Why did the answer about planets stop in the middle? `SamplingParams` allows **16 output tokens unless you say
# otherwise**. That is vLLM's default too. `finish_reason` tells who ended an answer:
#
# | `finish_reason` | who ended it |
# |---|---|
# | `"stop"` | the model, by its end-of-sequence token; or one of your stop strings, which is then in `stop_reason` |
# | `"length"` | you: `max_tokens` or the context limit is reached. **The answer is cut** |
# | `"abort"`, `"error"` | somebody cancelled it, or the step failed |
#
# Five questions go into one call. How many answers are cut at 16 tokens? The cut ones are asked again, with room for
# 24. How many are still cut?

# %% tags=["predict"]
guess = predict(cut_at_16=None, cut_at_24=None)

# %% tags=["experiment", "objective-1", "R25"]
questions = ["What is the capital of France?", "Name three fruits.", "How many days are in a week?",
             "Translate 'good morning' to French.", "Who painted the Mona Lisa?"]
outputs = llm.chat([as_chat(q) for q in questions], SamplingParams(temperature=0))
audit = Counter(output.outputs[0].finish_reason for output in outputs)
cut = [q for q, output in zip(questions, outputs) if output.outputs[0].finish_reason == "length"]
again = llm.chat([as_chat(q) for q in cut], SamplingParams(temperature=0, max_tokens=24))
audit_again = Counter(output.outputs[0].finish_reason for output in again)
observe(guess, cut_at_16=audit["length"], cut_at_24=audit_again["length"])

# %%
for question, output in zip(cut, again):
    print(f"{question}  [{output.outputs[0].finish_reason}]")
    print(f"   at 16 tokens: ...{outputs[questions.index(question)].outputs[0].text[-30:]!r}")
    print(f"   at 24 tokens: ...{output.outputs[0].text[-30:]!r}")

# %% [markdown]
# This little audit is the cheapest quality check there is: **count the finish reasons of every batch, and run the cut
# ones again with more room**. An answer that says `length` is not a bad answer of the model. It is half an answer. (And
# a complete one is not a correct one: that French is nonsense. See above.)
#
# **Now change one thing:** set `max_tokens=None`. It means "up to the context limit", 8,192 tokens here. Do it for one
# question only, and be ready to press the stop button: small models like to repeat themselves for ever.

# %% [markdown]
# ### 4. Each prompt its own settings, and what happens to a bad one
#
# `SamplingParams` may be one object for all prompts, or a list with one for each. Here five prompts want 9, 2, 5, 1 and
# 7 tokens. `generate` returns five outputs. In which order were they *returned*, and in which order did the engine
# *finish* them? A `Trace` records every step.

# %% tags=["predict"]
guess = predict(returned=None, finished=None)  # two orders of 0, 1, 2, 3, 4

# %% tags=["experiment", "objective-3", "R14", "R148"]
lengths = [9, 2, 5, 1, 7]
prompts = ["The capital of France is", "Once upon a time", "1, 2, 3, 4, 5,", "Dear Sir or Madam,", "import numpy as"]
each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
with Trace(llm) as trace:
    outputs = llm.generate(prompts, each)
zero = int(outputs[0].request_id)  # the engine numbers all requests of its life; we count from our first
finished = [int(request_id) - zero for record in trace for request_id in record.finished]
returned = [prompts.index(output.prompt) for output in outputs]
observe(guess, returned=returned, finished=finished)

# %% [markdown]
# The short ones get off first. `generate` keeps everybody until the last one is done, then hands them over in the order
# of their tickets. So `zip(prompts, outputs)` is always right. `ignore_eos=True` makes an output exactly as long as you
# ask, which is what you want in a measurement and never in real work.
#
# The number of settings must match the number of prompts. The engine does not guess:

# %%
with expect_error(ValueError):
    llm.generate(prompts, each[:4])

# %% [markdown]
# And if one prompt of many is bad, say empty, or longer than the context? Are the good ones run?

# %% tags=["predict"]
guess = predict(steps_that_were_run=None, requests_left_in_the_engine=None)

# %% tags=["experiment", "objective-1"]
with Trace(llm) as trace, expect_error(ValueError):
    llm.generate(["The capital of France is", "", "1, 2, 3, 4, 5,"], one_token)
observe(guess, steps_that_were_run=len(trace),
        requests_left_in_the_engine=llm.llm_engine.get_num_unfinished_requests())

# %% [markdown]
# One bad ticket, and the whole group stays at home (the last line says whose it was). Every prompt is checked before
# the first drive. Those already queued are taken out again, and the error comes to you. vLLM has the same rule.
# Nothing is lost, and the engine is clean:

# %%
llm.generate("The capital of France is", one_token)[0].outputs[0].text

# %% [markdown]
# For a job of 50,000 rows this means: **check the rows yourself before you call**, for instance their token counts, or
# feed them in portions. "In production" below does the latter.

# %% [markdown]
# ### 5. One call or a loop
#
# Now the expensive mistake. 32 prompts want between 1 and 4 tokens each, 80 in total. Once in a loop, one `generate`
# per prompt. Once as a list, one `generate` for all. How many engine steps does each need? (Think of the bus.)

# %% tags=["predict"]
guess = predict(steps_loop=None, steps_list=None, same_tokens=None)

# %% tags=["experiment", "objective-4", "R27", "R52"]
prompts = [f"The number after {i} is" for i in range(NUM_PROMPTS)]
each = [SamplingParams(temperature=0, max_tokens=1 + i % LONGEST_OUTPUT, ignore_eos=True) for i in range(NUM_PROMPTS)]
llm.generate(prompts[0], one_token, use_tqdm=False)  # warm-up: the first call is always slower
began = time.perf_counter()
with Trace(llm) as loop:
    singles = [llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, each)]
loop_seconds = time.perf_counter() - began
llm.reset_prefix_cache()  # the second leg must not profit from the first
began = time.perf_counter()
with Trace(llm) as batch:
    listed = [output.outputs[0].token_ids for output in llm.generate(prompts, each, use_tqdm=False)]
list_seconds = time.perf_counter() - began
observe(guess, steps_loop=len(loop), steps_list=len(batch), same_tokens=singles == listed)

# %% [markdown]
# The loop takes as many steps as there are output tokens: **the sum**. The list takes as many as the longest answer
# needs: **the maximum**. The tokens are the same. Here is the picture, one row for each prompt, one column for each
# step. In the first step of a prompt its tokens are read (blue), in each further one a token is written (green). The
# loop, one passenger a drive:

# %%
from tutorial_engine.viz import batch_occupancy

batch_occupancy(loop, step=-1)

# %% [markdown]
# The list, everybody aboard:

# %%
batch_occupancy(batch, step=-1)

# %% [markdown]
# And in seconds? This depends on your machine, so it is not compared with anything. A step that carries 32 prompts does
# cost more than a step that carries one, so the gain in time is smaller than the gain in steps:

# %% tags=["timing", "nbval-ignore-output"]
print(f"list: {len(loop) / len(batch):.1f} times fewer steps, {loop_seconds / list_seconds:.1f} times less time")
print(f"a step of the list took {list_seconds / len(batch) / (loop_seconds / len(loop)):.1f} times as long, for up to "
      f"{NUM_PROMPTS} times the tokens")

# %% [markdown]
# Four things made this a fair measurement. Skip any of them and the number is wrong: the **same token count** on both
# sides (`ignore_eos`, or one side may stop early), a **warm-up**, an **empty prefix cache** for the second leg, and a
# check that both sides produced the **same tokens**.
#
# **Now change one thing:** set `NUM_PROMPTS = 64` at the top and run again. Which of the two step counts about doubles?

# %% [markdown]
# ### 6. The same work, three ways
#
# "Then I give the whole list to `transformers` and have the same?" Almost. Its `generate` takes a batch as well, but as
# a rectangle: shorter prompts are **padded** to the longest, and the batch runs until its longest answer is done. Let
# us run the same eight prompts through the same weights in both libraries, and count what is really computed.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tutorial_engine.models.loader import resolve_model

source = resolve_model("")  # our model's file: shape and weights
shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
hf = LlamaForCausalLM(LlamaConfig(**{name: getattr(source.config, name) for name in shape},
                                  rope_parameters={"rope_type": "default", "rope_theta": source.config.rope_theta}))
hf.load_state_dict(dict(source.weights()), strict=False)  # the output layer is the embedding: nothing to load for it
hf.tie_weights()
sizes = []  # how many tokens each forward pass gets
hf.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
print("parameters:", f"{hf.eval().num_parameters():,}")

# %%
def hf_generate(prompts, lengths):
    """Greedy, as one rectangle. Padding goes to the left, because new tokens go to the right."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        rows = hf.generate(input_ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False,
                           eos_token_id=None, pad_token_id=0).tolist()
    return [row[width:width + n] for row, n in zip(rows, lengths)]


texts = ["Once upon a time", "The capital of France is", "import numpy as np\nimport", "Dear Sir or Madam,\n",
         "The days of the week are Monday, Tuesday,", "1, 2, 3, 4, 5,",
         "A triangle has three sides, a square has four sides, and a pentagon has",
         "Paris is the capital of France, Rome is the capital of Italy, Madrid is the capital of Spain, and Berlin is"]
prompts = [tokenizer.encode(text) for text in texts]
lengths = [10, 3, 4, 6, 2, 5, 3, 2]
print("prompt lengths:", [len(p) for p in prompts], " output lengths:", lengths)

# %% [markdown]
# A request with a prompt of *p* tokens and an output of *n* needs *p + n − 1* tokens to be computed (the last one is
# never fed back). Sum this over the eight, and you have the least possible work. Predict what each way computes.

# %% tags=["predict"]
guess = predict(tokens_loop=None, tokens_padded=None, tokens_engine=None, steps_engine=None)

# %% tags=["experiment", "objective-4"]
def measure(name, run):
    sizes.clear()
    began = time.perf_counter()
    tokens = run()
    ways[name] = {"tokens": tokens, "seconds": time.perf_counter() - began, "steps": len(sizes), "work": sum(sizes)}


ways = {}
each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
hf_generate(prompts[:1], [2])  # warm-up
measure("transformers, loop", lambda: [hf_generate([p], [n])[0] for p, n in zip(prompts, lengths)])
measure("transformers, padded", lambda: hf_generate(prompts, lengths))
with Trace(llm) as trace:
    measure("our engine", lambda: [o.outputs[0].token_ids for o in llm.generate(prompts, each, use_tqdm=False)])
ways["our engine"] |= {"steps": len(trace), "work": sum(n for r in trace for _, n in r.scheduled.values())}

# %%
print(f"{'':24}{'steps':>6}{'tokens computed':>17}{'of them wasted':>16}   same tokens")
needed = sum(len(p) + n - 1 for p, n in zip(prompts, lengths))
for name, way in ways.items():
    same = way["tokens"] == ways["transformers, loop"]["tokens"]
    print(f"{name:24}{way['steps']:>6}{way['work']:>17}{way['work'] - needed:>16}   {same}")
observe(guess, tokens_loop=ways["transformers, loop"]["work"], tokens_padded=ways["transformers, padded"]["work"],
        tokens_engine=ways["our engine"]["work"], steps_engine=ways["our engine"]["steps"])

# %% [markdown]
# The loop wastes no token and many steps. The rectangle saves the steps and wastes tokens: more than half of what it
# computed was padding, or answers that were finished already. The engine has **the steps of the batch and the tokens of
# the loop**, because each row of its batch may have its own length, and leaves when it is done. All three agree on
# every token.

# %% tags=["timing", "nbval-ignore-output"]
for name, way in ways.items():
    print(f"{name:24}{way['seconds'] / ways['our engine']['seconds']:>6.1f} times the engine's time")

# %% [markdown]
# How far do these ratios travel? The counts of steps and tokens: everywhere. The times: nowhere, not even to the next
# run on this machine. vLLM's authors reported up to 24 times the throughput of `transformers`, on their GPUs, with the
# models and the traffic of 2023. And `transformers` has continuous batching of its own today (`generate_batch`), which
# is not what we ran. Measure your own work.

# %%
hf = None  # half a gigabyte; we are done with it

# %% [markdown]
# ### 7. Whose sampling settings am I using?
#
# Model makers may ship a file `generation_config.json` with the settings they recommend. `LLM` reads it by default
# (`generation_config="auto"`). So `llm.generate(prompt)` **without** `SamplingParams` can mean different things for two
# models, and for two revisions (commits of its repository) of one model. `generation_config="vllm"` ignores the file. A
# folder name reads it from there.
#
# The course's model ships no such file, so we write one into a folder and give that folder to a second `LLM`.
# Temperature and top_p are those of the example on the model's own page; the length is ours. One process, one `LLM`:
# the first is closed before the second is built, and is of no use from then on.

# %%
neutral = llm.get_default_sampling_params()
unguided = llm.generate(["Once upon a time"] * 5)  # no SamplingParams: five runs with the neutral defaults
llm.close()
with expect_error(Exception):
    llm.generate("Anybody there?")

# %%
folder = tempfile.TemporaryDirectory()
recommended = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "max_new_tokens": 8}
Path(folder.name, "generation_config.json").write_text(json.dumps(recommended))

llm = LLM(dtype="float32", kv_cache_memory_bytes=2**30, generation_config=folder.name)
file = llm.get_default_sampling_params()
for field in ("temperature", "top_p", "max_tokens"):
    print(f"{field:12} neutral {getattr(neutral, field):5}   from the file {getattr(file, field):5}")

# %% [markdown]
# Note the name: the file says `max_new_tokens`, `SamplingParams` says `max_tokens`. They are the same thing.
#
# Now one prompt, five times in one call: how many **different** texts come back? Four ways to call:
#
# * `neutral`: no `SamplingParams`, and an engine that ignores files (the run above, before closing)
# * `no_params`: no `SamplingParams`, and the engine that has the file
# * `only_max_tokens`: the same engine with `SamplingParams(max_tokens=8)`, because you only want to set the length
# * `defaults_changed`: the same engine, its defaults *fetched and changed*

# %% tags=["predict"]
guess = predict(neutral=None, no_params=None, only_max_tokens=None, defaults_changed=None)

# %% tags=["experiment", "objective-3", "R19", "R21", "R150"]
def different(outputs):
    return len({output.outputs[0].text for output in outputs})


five = ["Once upon a time"] * 5
changed = llm.get_default_sampling_params()
changed.max_tokens = 6
observe(guess, neutral=different(unguided), no_params=different(llm.generate(five)),
        only_max_tokens=different(llm.generate(five, SamplingParams(max_tokens=8))),
        defaults_changed=different(llm.generate(five, changed)))

# %% [markdown]
# The third number is the trap. An explicit `SamplingParams` object is **complete**: fields that you leave out take
# *SamplingParams'* defaults (temperature 1.0), not the file's. Nothing warns you. This is vLLM's behaviour too. (The
# one thing still taken from the file: further end-of-sequence tokens, which it may list.) To keep the recommendation
# and change one field, start from `llm.get_default_sampling_params()`, as in the fourth way.
#
# (vLLM's *server* is different: there the fields that a client leaves out **are** filled from the file. That is one way
# in which a model can look good through a server and poor offline.)
#
# What should an offline job use? For a product that people like, the maker's recommendation is a good start. For
# anything that you want to repeat or compare, write **every** field that matters yourself, temperature first, and keep
# it with the results.
#
# **Now change one thing:** add `"top_k": 1` to the file: keep only the likeliest token. Predict the four numbers again.

# %% [markdown]
# ## Dial it in
#
# The knobs that matter offline, all of them arguments of `LLM(...)` except the first. The defaults are this engine's,
# and vLLM's for most GPUs; on those with 70 GiB and more, vLLM mostly raises `max_num_seqs` and
# `max_num_batched_tokens`.
#
# | knob | default | what it moves | turn it |
# |---|---|---|---|
# | `SamplingParams.max_tokens` | 16 | longest answer | always: set what the task needs |
# | `max_num_seqs` | 256 | seats: requests in one step | up while memory lasts; down, see below |
# | `max_num_batched_tokens` | 4,096 (CPU), 8,192 (GPU) | tokens computed in one step | up for throughput |
# | `enable_prefix_caching` | on | reuse of equal beginnings | off only to measure |
# | `max_model_len` | the model's | longest prompt + answer | down to what your rows need |
# | `gpu_memory_utilization` | 0.92 of the memory | how many blocks there are | up for larger batches |
# | `kv_cache_memory_bytes` | derived (CPU: at most 2 GiB) | the same, in bytes | to fix the size, as this page does |
#
# What does "luggage space" mean in practice? Build an engine with a tiny pool: 13 blocks, and to keep the numbers
# small, of 8 tokens each. One of them, the null block, is reserved, so 12 are usable. Six prompts of 8 tokens want 12
# more: 8 + 12 − 1 = 19 tokens to keep, which is 3 blocks each. Six times three is 18. **They do not fit.**

# %%
def six_letters(llm):
    names = ("Anna", "Ben", "Clara", "David", "Emma", "Frank")
    letter = "Dear {}, thank you for your letter. It was"
    prompts = [tokenizer.encode(letter.format(name))[:8] for name in names]
    with Trace(llm) as trace:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return trace, [output.outputs[0].token_ids for output in outputs]

# %% [markdown]
# If the pool is full and somebody needs a block, the last one aboard is put off: its blocks are freed. It keeps the
# tokens that it has written, but all its luggage must be packed again later (this is called *preemption by recompute*).
# Predict how many requests that hits, and how many steps all take together. (With enough room: 12 steps, and 6 × 19 =
# 114 tokens computed.)

# %% tags=["predict"]
guess = predict(put_off=None, steps=None, tokens_computed_again=None)

# %% tags=["experiment", "objective-4"]
llm.close()
llm = LLM(dtype="float32", num_gpu_blocks_override=13, block_size=8, max_model_len=64)
crowded, crowded_tokens = six_letters(llm)
work = sum(n for record in crowded for _, n in record.scheduled.values())
observe(guess, put_off=sum(len(record.preempted) for record in crowded), steps=len(crowded),
        tokens_computed_again=work - 6 * 19)

# %% [markdown]
# Two are put off when everybody needs a third block at once. Four can finish, then the two come back and compute their
# 16 tokens each again, all in one step. Nobody got an error: preemption is silent, and only the count tells.
#
# The advice you will hear is: lower `max_num_seqs` until nobody is put off. Four seats, 4 × 3 = 12 blocks: they fit. Is
# it faster, and are the answers the same?

# %% tags=["predict"]
guess = predict(put_off=None, steps=None, same_tokens=None)

# %% tags=["experiment", "objective-4"]
llm.close()
llm = LLM(dtype="float32", num_gpu_blocks_override=13, block_size=8, max_model_len=64, max_num_seqs=4)
seated, seated_tokens = six_letters(llm)
observe(guess, put_off=sum(len(record.preempted) for record in seated), steps=len(seated),
        same_tokens=seated_tokens == crowded_tokens)

# %% [markdown]
# 256 seats, and two are put off (×). The 17 are the 16 tokens that are computed again, and the next one:

# %%
batch_occupancy(crowded)

# %% [markdown]
# Four seats, and nobody is:

# %%
batch_occupancy(seated)

# %% [markdown]
# No preemption, and yet *more* steps: 24 instead of 15. In the first picture the last two ride along for 9 steps, wait
# for 3, and repeat their beginning in one step. In the second they wait for 12. A few preemptions are a price, not a
# fault. When they become many, and thousands of tokens are computed twice, the advice is right. **So count both**:
# steps *and* tokens computed again. (In vLLM, build the engine with `disable_log_stats=False`; the counters of
# `llm.get_metrics()` then include the preemptions.)
#
# Whatever you turn here, the tokens stay the same. These knobs decide how the work is cut into steps, never what comes
# out (in float32; in half precision, sums taken in another order can tip a close decision).
#
# **Now change one thing:** predict, then try pools of 10, 16, 18 and 19 blocks.
#
# <details><summary>What happens, and one surprise</summary>
#
# With 10 blocks three are put off; with 16, one; with 19 (18 usable) everybody fits, and all is done in 12 steps. The
# surprise is 18: one is put off, and yet *no* token is computed twice. Its freed blocks were not needed by anybody at
# once, so the prefix cache still had them when it came back.
# </details>

# %% [markdown]
# ## Where it bites you
#
# Five beliefs that cost people days.
#
# **1. "I call `generate` for every row, and the engine batches it."** A loop is a batch of one. Only what is in the
# queue *together* shares a step. Section 5: 80 steps against 4.
#
# **2. "The model stops in the middle of a sentence, it is bad."** It is your 16-token default. Section 3: audit
# `finish_reason`.
#
# **3. "`for output in llm.generate(...)` streams."** The list comes when the *last* request is done; streaming is the
# business of the asynchronous engine, or of a server. Below, the first prompt needs one step and the second seven. How
# many steps are done when the loop sees its first output?

# %% tags=["predict"]
guess = predict(steps_before_the_first_output=None)

# %% tags=["experiment", "objective-1"]
prompts = ["The capital of France is", "1, 2, 3, 4, 5,"]
each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 7)]
seen = []
with Trace(llm) as trace:
    for _ in llm.generate(prompts, each):
        seen.append(len(trace))
observe(guess, steps_before_the_first_output=seen[0])

# %% [markdown]
# **4. "A fresh `LLM` for each file keeps things clean."** Loading is paid every time. What does it cost, counted in
# steps?

# %% tags=["timing", "nbval-ignore-output"]
step_seconds = loop_seconds / len(loop)
print(f"loading took as long as {load_seconds / step_seconds:.0f} steps of one prompt")

# %% [markdown]
# And this was a small model: 0.54 GB of weights. A model of 16 GB has thirty times as much to read. A second `LLM`
# beside the first is worse still: each wants 0.92 of the GPU's memory by default.
#
# So: one object per process, for the process's whole life.
#
# **5. "`generate` sends HTTP to some server."** The engine is in your program: no port, no JSON, and no `/metrics` to
# look at either. Forbid every connection that Python could open, and generate:

# %%
with mock.patch.object(socket.socket, "connect", side_effect=RuntimeError("a connection was opened")):
    print(llm.generate("The capital of France is", one_token)[0].outputs[0].text)

# %% [markdown]
# Not one connection. (vLLM does use sockets inside the machine, between your process and its engine process. No HTTP
# either.)
#
# And three smaller bites:
#
# * **Text to `chat`, messages to `generate`.** Both are refused, with a hint:

# %%
with expect_error(TypeError):
    llm.chat("What is the capital of France?")
with expect_error(TypeError):
    llm.generate(as_chat("What is the capital of France?"))

# %% [markdown]
# * **Rendering the template yourself, then `generate`.** Allowed, but models whose tokenizer adds a begin-of-sequence
#   token get two of them: one from the template, one from the tokenizer. Use `chat`, or pass
#   `tokenization_kwargs={"add_special_tokens": False}`.
# * **Greedy is not a promise of equal text everywhere.** Same model, same prompt, same settings can still differ by
#   dtype, hardware, engine version, or, in half precision, by who else is in the batch.

# %% [markdown]
# ## In production
#
# A job of six hours crashes in its fifth. With one giant `generate` call, everything is lost: the list comes back at
# the end or not at all. So **write as you go, and be able to resume**: portions, one line of JSON per row, a key that
# says which row it is.

# %%
def run_job(rows, path, params, portion):
    """Answer every row that the file does not have yet. Returns how many were computed now."""
    done = {json.loads(line)["row"] for line in path.open()} if path.exists() else set()
    todo = [row for row in range(len(rows)) if row not in done]
    for start in range(0, len(todo), portion):
        part = todo[start:start + portion]
        outputs = llm.chat([as_chat(rows[row]) for row in part], params, use_tqdm=False)
        with path.open("a") as file:
            for row, output in zip(part, outputs):
                answer = output.outputs[0]
                record = {"row": row, "text": answer.text, "finish_reason": answer.finish_reason}
                file.write(json.dumps(record) + "\n")
    return len(todo)

# %% [markdown]
# Eight rows, in portions of four. Row 5 is far too long for this engine (its context is 64 tokens). Predict how many
# rows are in the file after the crash, and how many a second run has to compute once the row is shortened.

# %% tags=["predict"]
guess = predict(saved_by_the_first_run=None, computed_by_the_second_run=None)

# %% tags=["experiment", "objective-1"]
rows = [f"Name a word that begins with {letter}." for letter in "ABCDEFGH"]
rows[5] = "word " * 200
path = Path(folder.name, "answers.jsonl")
short = SamplingParams(temperature=0, max_tokens=4)
with expect_error(ValueError):
    run_job(rows, path, short, portion=4)
saved = len(path.read_text().splitlines())
rows[5] = rows[5][:100]
computed = run_job(rows, path, short, portion=4)
observe(guess, saved_by_the_first_run=saved, computed_by_the_second_run=computed)

# %%
records = [json.loads(line) for line in path.open()]
print("rows:", [record["row"] for record in records])
print("finish reasons:", dict(Counter(record["finish_reason"] for record in records)))

# %% [markdown]
# Every row once, and the audit speaks up: all answers are cut, since 4 tokens were only enough for a demonstration.
#
# Beside the answers belongs one small file that says how they came about. Without it the job cannot be repeated, not
# even by you:

# %%
from hashlib import sha256
from importlib.metadata import version

manifest = {
    "model": "smollm2-135m-instruct", "weights_sha256": sha256(source.path.read_bytes()).hexdigest(),
    "engine": version("tutorial-engine"), "dtype": llm.llm_engine.config.dtype,
    "chat_template_sha256": sha256(tokenizer.chat_template.encode()).hexdigest(), "sampling": vars(short),
}
Path(folder.name, "manifest.json").write_text(json.dumps(manifest, indent=1, default=str))
print(*manifest, sep=", ")
folder.cleanup()

# %% [markdown]
# For a model from a hub, a pinned revision (`LLM(model, revision="<commit>")`) takes the place of the weights'
# checksum. And if the power fails while a line is being written, half a line stays behind: drop it before you resume.
#
# Four rules for the real thing:
#
# * **Portions must be large.** At the end of each one the bus drives nearly empty until its last passenger is done.
#   Take many times `max_num_seqs`: thousands of rows, not four.
# * **Audit** finish reasons, empty texts and prompt lengths at the end of every job, before anybody reads the results.
# * **Offline for capacity, online for latency.** If rows are known in advance and only the total time counts, use
#   `LLM`. If a person waits for each answer, or several programs share the model, run a server: it streams, cancels,
#   times requests out, and can be monitored. An `LLM` inside a script has no endpoint that anybody could look at.
# * **Ten times the rows?** Start more jobs, each with its own part of the rows and its own GPU. If the GPU is shared
#   with a server, run at night or give the job its own card: a full batch is a bad neighbour.
#
# ### Exercise: a batch that nobody has to watch (25 minutes)
#
# Write the audit, and a job that asks again whoever was cut off, in
# [a notebook of its own](../../exercises/3_running_locally/02_offline_batch_inference.ipynb). A check looks at your
# code and says what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open.
#
# **Recall**
#
# <details><summary>1. Does <code>generate</code> apply the chat template? Who does?</summary>
#
# No. `chat` does (and a server's chat endpoint). `generate` sends what you pass. Nothing warns you.
# </details>
#
# <details><summary>2. You pass no <code>SamplingParams</code>. Where do the settings come from?</summary>
#
# From the model's `generation_config.json` if there is one, because `generation_config="auto"` is the default; neutral
# values for the rest (temperature 1.0, 16 tokens). With `generation_config="vllm"`, neutral values only.
# </details>
#
# <details><summary>3. Explain <code>outputs[3].outputs[1].text</code>.</summary>
#
# The text of the *second completion* of the *fourth prompt*. The outer list follows the prompts, the inner one exists
# because `n` may be more than 1.
# </details>
#
# <details><summary>4. How do you tell a cut answer from a short one?</summary>
#
# By `finish_reason`: `length` is cut; `stop` ended by itself, or at one of your stop strings.
# </details>
#
# **Mechanics**
#
# <details><summary>5. 100 prompts, outputs of 20 tokens each, but one of 200. How many steps in a loop? As a list with
# 256 seats and plenty of memory? In how many of them is the batch nearly empty?</summary>
#
# Loop: 99 × 20 + 200 = 2,180. List: 200, the longest. From step 21 on only one request is left: 180 lonely steps. The
# tail of a batch is where throughput goes to die: make batches large, and if rows outnumber seats, queue the long ones
# first.
# </details>
#
# <details><summary>6. The model ships temperature 0.6. A colleague calls <code>generate(prompts,
# SamplingParams(max_tokens=256))</code>. Which temperature?</summary>
#
# 1.0. An explicit object never takes values from the file. (Through vLLM's server, leaving the temperature out would
# give 0.6.)
# </details>
#
# <details><summary>7. Good answers through the server, poor ones offline, same model. What do you check, in which
# order?</summary>
#
# (a) `output.prompt`: is the template there? (b) the sampling settings really used on both sides (question 6). (c)
# `finish_reason`: the server's chat endpoint may write to the end of the context, your script stops at 16. (d) system
# prompt, revision, dtype.
# </details>
#
# <details><summary>8. Requests finish out of order. Why is <code>zip(prompts, outputs)</code> still right?</summary>
#
# `generate` waits for all, and returns them in the order in which they were queued. For the same reason it cannot
# stream.
# </details>
#
# **Trade-off**
#
# <details><summary>9. When is an offline benchmark misleading?</summary>
#
# When you want to know about users. Offline nobody arrives later than the others: all wait in the queue from the start,
# so the batch is as full as it can be. There is no HTTP and no streaming either: throughput looks its best, and the
# time to the first token under load is not measured at all. It also misleads without warm-up, with a warm prefix cache,
# or when one side stops early.
# </details>
#
# <details><summary>10. Should an offline job use the neutral defaults
# (<code>generation_config="vllm"</code>)?</summary>
#
# For evaluations and data sets: yes, plus explicit values for everything, so that a new revision of the model cannot
# change your sampling. For text that people read: the maker's recommendation is usually better. Then read it once and
# write it down as explicit values.
# </details>
#
# <details><summary>11. An evaluation harness: what do you pin?</summary>
#
# Model and revision, tokenizer and chat template (on or off!), engine version, dtype and hardware, every sampling field
# and the seed, `max_tokens`, stop strings, and the order and text of the prompts.
# </details>
#
# <details><summary>12. Portions of 500 or of 50,000 rows?</summary>
#
# Small portions lose little in a crash, and pay for a badly filled tail each time. Large ones the other way round.
# Choose the tail as the guide: a portion should keep the bus full for far longer than its longest answer takes. With
# 256 seats and answers of about 200 tokens, some thousands.
# </details>
#
# <details><summary>13. Your run shows 40 preemptions. Lower <code>max_num_seqs</code>?</summary>
#
# Not yet. Count the tokens computed again. If they are 1 % of the work, fewer seats would probably cost more than they
# save. If they are 30 %, yes, or give the cache more memory, or lower `max_tokens`.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```python
# llm = LLM(model, revision="<commit>", generation_config="vllm")       # once per process
# params = SamplingParams(temperature=0, max_tokens=256)                # complete: the model's file is not consulted
# params = llm.get_default_sampling_params(); params.max_tokens = 256   # the file's values, one changed
# outputs = llm.chat([[{"role": "user", "content": row}] for row in rows], params)   # all at once, never in a loop
# for row, output in zip(rows, outputs):                                # same order as the rows
#     answer = output.outputs[0]                                        # .text .token_ids .finish_reason
# Counter(output.outputs[0].finish_reason for output in outputs)        # audit: "length" means cut
# ```
#
# | symptom | first look |
# |---|---|
# | empty or rambling answers | `output.prompt`: no chat template? |
# | answers stop in mid-sentence | `finish_reason == "length"`: raise `max_tokens` |
# | far too slow | a loop around `generate`; an `LLM` built more than once |
# | different style than last week | `get_default_sampling_params()`; the model's revision |
# | `RequestOutput has no 'text'` | `.outputs[0].text` |
# | fast the second time | prefix cache: `reset_prefix_cache()` before you measure |
#
# **Sources.** vLLM documentation: [Quickstart](https://docs.vllm.ai/en/stable/getting_started/quickstart/) (queue, no
# automatic template, `generation_config`), [Generative
# models](https://docs.vllm.ai/en/stable/models/generative_models/) (`generate`, `chat`), [Offline
# inference](https://docs.vllm.ai/en/stable/serving/offline_inference/), [Architecture
# overview](https://docs.vllm.ai/en/latest/design/arch_overview/) (two entry points, processes), [Optimization and
# tuning](https://docs.vllm.ai/en/stable/configuration/optimization/) (preemption, and the advice on `max_num_seqs`),
# [Metrics](https://docs.vllm.ai/en/latest/examples/observability/metrics/) (`get_metrics` offline). That an explicit
# `SamplingParams` is not merged with the file was read in the source of vLLM 0.33 (`LLM.generate`), and so were the
# default of 16 tokens (`SamplingParams`) and the defaults in "Dial it in". Blocks, and recomputing after preemption:
# Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023, [arXiv
# 2309.06180](https://arxiv.org/abs/2309.06180). Scheduling at every step: Yu et al., *Orca*, OSDI 2022. "Up to 24
# times": [vLLM's first blog post](https://blog.vllm.ai/2023/06/20/vllm.html), June 2023.
# [`generate_batch`](https://huggingface.co/docs/transformers/continuous_batching) in transformers. The settings in
# section 7: the example on the page of
# [SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
