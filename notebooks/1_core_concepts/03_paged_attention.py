# %% [markdown]
# # PagedAttention
#
# You will be able to
#
# - name the three ways in which a reservation wastes memory, and say how much each of them costs
# - follow a token from its place in the text through the block table to its place in memory
# - explain why attention gives the same result, wherever the blocks lie
# - choose a block size, and say what two answers to the same prompt can share
#
# Needs: a CPU and 3 GB of free memory, no GPU. About 60 minutes to read and do; all cells together run in one to two
# minutes. You should have read [The KV cache](01_the_kv_cache.ipynb).

# %% tags=["parameters"]
NUM_JOBS = 2000  # requests in the simulation of the older systems; fast: 100
NUM_PAGED_JOBS = 120  # requests in the simulation with blocks; fast: 60

# %%
import inspect
import random
from collections import deque
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from tutorial_engine import LLM, SamplingParams
from tutorial_engine.exercises.paged_attention import slot_mapping
from tutorial_engine.notebook import compare, expect_error, observe, predict, show_source
from tutorial_engine.simulation import Job, simulate
from tutorial_engine.trace import Trace
from tutorial_engine.viz import block_table, memory_map, watch

# %% [markdown]
# ## The problem
#
# The KV cache of a request grows by one token a step, and nobody knows how long the answer will be. So how much memory
# do you give to a request when it arrives?
#
# The systems of 2022 did the obvious thing. Attention read one tensor for each request, in one piece. A piece cannot
# grow when the next one begins right behind it, so they reserved room for the longest possible text. This is the
# machine of the PagedAttention paper: OPT-13B, at most 2,048 tokens, 12 GiB for the cache.

# %%
bytes_per_token = 2 * 40 * 5120 * 2  # K and V, 40 layers, 5,120 numbers, 2 bytes each
SLOTS = 12 * 2**30 // bytes_per_token
print(f"{SLOTS:,} slots, each for the K and V of one token: {SLOTS // 2048} requests of 2,048")
print(f"an average conversation: 161 tokens of prompt and 338 of answer, so room for {SLOTS // (161 + 338)}")

# %% [markdown]
# (The paper's Table 1 has 15.7K slots. The average lengths are its Figure 11, for conversations from ShareGPT.)
#
# Seven people at a time, on a card that has room for about thirty. Each step reads all weights, for seven or for
# thirty, so most of the card's throughput is lost to empty memory. A *slot* is a place for one token's K and V. Look at
# the slots of one request, in the middle of its work:
#
# ```
# |<------------------- 2,048 slots reserved ------------------->|
# | prompt | answer so far | answer to come |      never used     | too small for others
#      holds a token           reserved            internal         external
#                                              fragmentation        fragmentation
# ```
#
# - **Reserved**: it will be used, but not yet. Somebody else could have had it until then.
# - **Internal fragmentation**: it will never be used, and nobody knows before the request ends.
# - **External fragmentation**: it belongs to nobody, and nobody can have it, because it is not in one piece.
#
# How large is each of them? And can one get rid of all three?

# %% [markdown]
# ## The idea
#
# Remember the reader with her card index, one card for each word. Now there are many readers and **one long shelf**.
# Formerly each reader was given two metres of shelf, to be safe, and most of it stayed empty. Now there are small
# **boxes** of 16 cards. When her box is full, a reader takes any empty box, wherever it stands, and notes its number on
# a **list**. To look something up she goes through her list, box by box. When she leaves, all her boxes are free.
#
# | the shelf | the engine | the operating system |
# |---|---|---|
# | the shelf | the KV cache: one *pool*, made at the start | memory |
# | a box for 16 cards | a **block** of 16 slots | a page |
# | the number on a box | the *physical block* | the page frame |
# | "my third box" | the *logical block* | the page of a process |
# | the reader's list | the **block table** of a request | the page table |
# | the room left in her last box | internal fragmentation, at most 15 slots | the same |
# | a box on two readers' lists | a *shared* block, with a count of its readers | shared memory |
# | a full box is closed | a full block is never written again | – |
#
# The third column is where the idea comes from: since the sixties, operating systems give memory to processes in this
# way (Kilburn et al., 1962). It needs one thing that attention did not have in 2022: a *kernel* (a function that
# runs on the GPU) which reads K and V by a list. That is **PagedAttention**.
#
# All boxes have the same size, so any free box will do for anybody: external fragmentation is gone. Nothing is reserved
# for an answer that may never come. What is left is the room in each reader's last box.

# %% [markdown]
# ## Under the hood
#
# Three places in the engine, read from the source that is running. First, **who gets a block**. The pool keeps its free
# blocks in a queue, takes from the front, and counts for each block how many tables name it, in
# [block_manager.py](../../tutorial_engine/block_manager.py):

# %%
from tutorial_engine.block_manager import BlockPool, KVCacheManager

show_source(BlockPool.get_new_blocks)
print()
show_source(BlockPool.free_blocks)

# %% [markdown]
# `ref_cnt` is the number of tables that name a block. It becomes free when the last of them lets go. Some free blocks
# have a *hash*: their content can still be found, by a later request that begins with the same text, so they are reused
# last. (That is prefix caching, and has a notebook of its own.)
#
# Second, **how many**: only what the tokens of this step need, counted in whole blocks.

# %%
show_source(KVCacheManager.allocate_slots,
            only=("num_new_blocks =", "get_num_free_blocks", "return None", "get_new_blocks"))

# %% [markdown]
# `num_slots` is how many tokens there will be after this step, and `num_owned` how many blocks the request has already;
# `cdiv` divides and rounds up; `num_wanted` is more on arrival: the whole prompt must fit then; `reserve` is a
# safety margin, 0 unless you ask for one. No word of `max_tokens`: nobody asks how long the answer may become. If there
# are too few blocks, the request gets none, and the scheduler must decide who waits.
#
# Third, **where a token goes**, in [model_runner.py](../../tutorial_engine/model_runner.py). This is the block table at
# work, for all tokens of a step at once:

# %%
from tutorial_engine.model_runner import ModelRunner

show_source(ModelRunner, only=("slots = self",))

# %% [markdown]
# Each request has one row of the table, and `rows` says whose token it is. The quotient is the logical block, a column
# of the table. There stands the physical block; the remainder is the place inside it. With a table `[7, 2, 5]` and
# blocks of 4, position 9 is in the third logical block, which is physical block 5, at offset 1:

# %%
print("position 9 is in slot", slot_mapping([7, 2, 5], [9], 4)[0], "= 5 × 4 + 1")

# %% [markdown]
# ## Try it
#
# ### 1. The paper's Figure 2, rebuilt
#
# Four systems, the same 15,728 slots, the same requests, always somebody waiting. Three are the paper's versions of
# Orca, the strongest rival it compares with. Each reserves one piece of memory for a request:
#
# - **Max**: 2,048 slots, always.
# - **Pow2**: the prompt, and the answer's length rounded up to a power of two (an answer of 25 gets 32).
# - **Oracle**: exactly what will be needed. No real system can know it; it is an upper bound.
#
# Pieces come from a *buddy allocator*, an old way to hand out memory in pieces: sizes are powers of two, and a piece
# that is too large is halved. `reserving` plays the steps and adds up what the slots hold: a token, the two wastes
# inside a reservation, and `"other"`, the rest. (That is what lies between the pieces, and what rounding up to a power
# of two adds.)

# %%
class Buddy:
    """Pieces of memory, as (size, start)."""

    def __init__(self, capacity):
        self.free, start = set(), 0
        for size in (2**i for i in reversed(range(capacity.bit_length()))):
            if capacity & size:
                self.free.add((size, start))
                start += size

    def take(self, n):
        size = 1 << (n - 1).bit_length()
        large_enough = [piece for piece in self.free if piece[0] >= size]
        if not large_enough:
            return None
        found, start = min(large_enough)
        self.free.remove((found, start))
        while found > size:  # halve it, and keep the first half
            found //= 2
            self.free.add((found, start + found))
        return size, start

    def give_back(self, size, start):
        while (size, start ^ size) in self.free:  # its other half is free too: they become one piece again
            self.free.remove((size, start ^ size))
            size, start = 2 * size, start & ~size
        self.free.add((size, start))


def reserving(jobs, reserve):
    """One token a step for everybody aboard; whoever is first in line gets on when there is a piece for it."""
    memory, waiting, running, steps = Buddy(SLOTS), deque(jobs), [], 0
    token = reserved = internal = aboard = 0
    while waiting:
        while waiting and (piece := memory.take(reserve(*waiting[0]))):
            running.append([*waiting[0], reserve(*waiting[0]), piece, 0])
            waiting.popleft()
        for request in running:
            request[4] += 1  # one more token
            prompt, answer, room, _, written = request
            token += prompt + written
            reserved += answer - written
            internal += room - prompt - answer
        for request in [r for r in running if r[4] == r[1]]:  # its answer is complete
            memory.give_back(*request[3])
            running.remove(request)
            aboard += request[1]  # it was there for so many steps
        steps += 1
    aboard += sum(request[4] for request in running)
    return shares(steps, aboard, token, reserved, internal)


def shares(steps, aboard, token, reserved=0, internal=0):
    """Percent of all slots, and requests, on average over the steps."""
    result = {kind: 100 * slots / steps / SLOTS
              for kind, slots in (("token", token), ("reserved", reserved), ("internal", internal))}
    return {**result, "other": 100 - sum(result.values()), "aboard": aboard / steps}

# %% [markdown]
# The fourth system is **paged**, and it is no sketch: `simulate` runs this engine's own scheduler and block manager,
# with a model that takes no time. What no token is in counts as "other".

# %%
def paged(jobs, block_size):
    trace = simulate([Job(*job) for job in jobs], num_blocks=SLOTS // block_size + 1, block_size=block_size,
                     max_num_seqs=256, max_num_batched_tokens=2560, enable_prefix_caching=False)
    busy = [record for record in trace if record.waiting]  # as above: as long as somebody waits
    tokens, aboard = sum(sum(r.lengths.values()) for r in busy), sum(len(r.tables) for r in busy)
    return shares(len(busy), aboard, tokens), sum(len(record.preempted) for record in trace)

# %% [markdown]
# The requests. The paper gives the average lengths, 161 and 338, and not the lengths themselves. We draw them from a
# distribution with many short and few long texts (log-normal, cut at 2,048), and with averages close to these:

# %%
def draw_job(rng):
    """(tokens of the prompt, tokens of the answer)"""
    while True:
        prompt, answer = (max(1, round(rng.lognormvariate(mu, sigma))) for mu, sigma in ((4.62, 1.0), (5.51, 0.86)))
        if prompt + answer <= 2048:
            return prompt, answer


rng = random.Random(4)  # a seed whose averages are close to the paper's
jobs = [draw_job(rng) for _ in range(NUM_JOBS)]
print("averages:", *(round(sum(lengths) / len(jobs)) for lengths in zip(*jobs)))

# %% [markdown]
# **Predict.** In *Max*, how many percent of the memory hold a token? Which waste is the largest: `"reserved"`,
# `"internal"` or `"other"`? And if Max has 7 requests aboard, how many are aboard with blocks?

# %% tags=["predict"]
guess = predict(percent_with_a_token_in_Max=None, largest_waste_in_Max=None, aboard_with_blocks=None)

# %% tags=["experiment", "objective-1", "R120", "R176"]
ours = {"Max": reserving(jobs, lambda prompt, answer: 2048),
        "Pow2": reserving(jobs, lambda prompt, answer: min(2048, prompt + (1 << (answer - 1).bit_length()))),
        "Oracle": reserving(jobs, lambda prompt, answer: prompt + answer)}
ours["paged"], preemptions = paged(jobs[:NUM_PAGED_JOBS], 16)
observe(guess, percent_with_a_token_in_Max=round(ours["Max"]["token"]),
        largest_waste_in_Max=max(("reserved", "internal", "other"), key=ours["Max"].get),
        aboard_with_blocks=round(ours["paged"]["aboard"]))

# %% [markdown]
# The same numbers beside the paper's (Figures 2 and 13a):

# %%
kinds = ("token", "reserved", "internal", "other", "aboard")
paper = {"Max": (20.4, 13.3, 57.3, 8.9, 7.00), "Pow2": (26.8, 17.9, 13.6, 41.6, 9.81),
         "Oracle": (38.2, 25.2, 0.0, 36.6, 13.62), "paged": (96.3, 0.0, 0.0, 3.7, 30.42)}
paper = {system: dict(zip(kinds, numbers)) for system, numbers in paper.items()}
compare(**{f"{system}, {whose}": numbers[system]
           for system in paper for whose, numbers in (("paper", paper), ("ours", ours))})

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 2.8), sharey=True, layout="constrained")
colours = {"token": "#74c3ec", "reserved": "#f0c36d", "internal": "#d97b66", "other": "#d0d0d0"}
for ax, title, numbers in zip(axes, ("paper", "ours"), (paper, ours)):
    for y, system in enumerate(paper):
        left = 0
        for kind, colour in colours.items():
            width = numbers[system][kind]
            ax.barh(y, width, left=left, color=colour, edgecolor="white", label=kind if y == 0 else None)
            left += width
    ax.set(title=title, xlabel="percent of the memory", yticks=range(4), yticklabels=paper)
axes[0].invert_yaxis()
_ = fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

# %% [markdown]
# **How honest is this?** Two things were fitted, the average lengths and how widely the answers vary; the latter by the
# *reserved* part of Max. So Max agrees partly because it had to. That 8.9 % of it is external waste is no fit but
# arithmetic: 1 − 7 × 2,048 / 15,728. Oracle, Pow2 and paged are **predictions**. They come within a few points; the
# worst is the external waste of Pow2. With blocks we have more requests aboard than the paper: in front of our pool
# there is always a queue, while theirs was fed two requests a second.
#
# **What this proves.** A reservation wastes four fifths of the memory. Even an oracle, which reserves not one slot too
# many, wastes more than half: it holds what is not written yet, and pieces of different sizes never fill the memory.
# Guessing better is not the cure. *Not reserving, and not needing one piece*, is.
#
# **Now change one thing:** let Max reserve only 1,024 slots, and cut the longer requests out of `jobs`. Do the shares
# get as good as Oracle's?
#
# <details><summary>What happens</summary>
#
# `short = [j for j in jobs if sum(j) <= 1024]` and `reserving(short, lambda prompt, answer: 1024)`: about twice as many
# are aboard, and a third of the memory holds a token. Still less than Oracle's 39 %, although you have refused all
# long conversations.
# </details>

# %% [markdown]
# ### 2. Watch a table grow
#
# Now the real engine and the real model, with a small pool: 32 blocks, so 512 slots. Five requests, at most three
# aboard at a time. (`num_gpu_blocks_override=33`: block 0 is never given out.)

# %%
llm = LLM(dtype="float32", num_gpu_blocks_override=33, max_model_len=256, max_num_seqs=3, generation_config="vllm")
tokenizer = llm.get_tokenizer()
texts = ["Once upon a time", "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
         "1, 2, 3, 4, 5,", "A cache is", "Dear Sir or Madam, I am writing to you because the parcel that I ordered"]
prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in texts]
each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 24, 14, 26, 18)]
print("tokens:", [(len(p["prompt_token_ids"]), s.max_tokens) for p, s in zip(prompts, each)])

# %% [markdown]
# **Predict.** How many empty slots does a request hold at most, at any time? How many percent of the slots in use are
# empty, on average over the run? And how many would be, with 256 slots reserved for each (`max_model_len`)?

# %% tags=["predict"]
guess = predict(most_empty_slots_of_one_request=None, percent_empty=None, percent_if_reserved=None)

# %% tags=["experiment", "objective-2"]
with watch(llm, block_table, partial(memory_map, reserve=256)) as trace:
    answers = llm.generate(prompts, each, use_tqdm=False)

# %%
held = [(record.lengths[r], 16 * len(table)) for record in trace for r, table in record.tables.items()]
tokens, slots = map(sum, zip(*held))
if_reserved = 256 * len(held)
observe(guess, most_empty_slots_of_one_request=max(room - n for n, room in held),
        percent_empty=round(100 * (1 - tokens / slots)), percent_if_reserved=round(100 * (1 - tokens / if_reserved)))

# %% [markdown]
# **How to read the first picture.** On the left is the pool: each field is a block, coloured by the request that holds
# it. On the right is each request's table, from logical block to physical block. Move the slider, and watch a table:
# it grows when its last block is full, never before, and the new block is whichever was first in the queue.
#
# **The second picture** has a row for each block and a column for each step. Above are the sums. Grey slots hold a
# token, the thin strip on top of them (black, on a dark page white) is empty; the hatched area is what reservations
# would hold. It reaches 768 slots, and the pool has 512. So with reservations the third request would have had to
# *wait*.
#
# Here are the tables, as they were at the end of each request:

# %%
last = {request: table for record in trace for request, table in record.tables.items()}
for request, table in last.items():
    print(f"request {request}: blocks {table}")

# %% [markdown]
# The blocks of one text need not lie side by side. Does it matter to the words? Run the last request once more, alone
# and in other blocks. (The engine would find the first block of this prompt again and use it;
# `skip_reading_prefix_cache` forbids that.)

# %%
afresh = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, skip_reading_prefix_cache=True)
with Trace(llm) as single:
    alone = llm.generate(prompts[4], afresh, use_tqdm=False)[0].outputs[0].token_ids
((request, table),) = single.records[-1].tables.items()
print("blocks:", table)
print("the same tokens:", list(alone) == list(answers[4].outputs[0].token_ids))

# %% [markdown]
# **What this proves.** Memory follows the tokens that exist, not those that may come. The waste is the rest of one last
# block for each request. And where the blocks lie has no influence on the text. Why not? That is the next experiment.
#
# **Now change one thing:** make all answers four times as long (`max_tokens=4 * n`). Does the share of empty slots grow
# or shrink?
#
# <details><summary>What happens</summary>
#
# It shrinks. The waste is about half a block for each request, whatever its length, and longer requests have more
# blocks. (From 27 % to 13 %. The longest holds 114 tokens then, so 256 are still enough.)
# </details>

# %% [markdown]
# ### 3. Why it does not matter where the blocks lie
#
# Attention needs all keys and values of a text. But look at its formula, with the softmax written out (and without √d):
#
# ```
# result = ( e^(q·k1) v1 + e^(q·k2) v2 + ... ) / ( e^(q·k1) + e^(q·k2) + ... )
# ```
#
# Above and below are **sums**. A sum can be made block by block, and a block can lie anywhere. Here it is in a few
# lines, on what the last run has left in layer 15 of the cache. A random query stands for the next token's.
# `block_by_block` reads the blocks where they are; `in_one_piece` is PyTorch's own attention on a copy in a row. (A
# real kernel also subtracts the largest exponent seen so far, so that no number overflows.)

# %%
cache, layer = llm.llm_engine.model_runner.kv_cache, 15
length = single.records[-1].lengths[request]
print(f"{length} tokens in blocks {table}")
query = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))  # 9 heads; 3 of them share one KV head


def block_by_block(key, value, table):
    above, below = torch.zeros(9, 64), torch.zeros(9, 1)
    for i, block in enumerate(table):
        filled = min(length - 16 * i, 16)
        k, v = (part[block, :, :filled].repeat_interleave(3, dim=0) for part in (key, value))  # [9, filled, 64]
        weights = torch.exp(k @ query[:, :, None] / 64**0.5)  # [9, filled, 1]
        above, below = above + (weights * v).sum(dim=1), below + weights.sum(dim=1)
    return above / below


def in_one_piece(key, value):
    slots = slot_mapping(table, range(length), 16)
    k, v = (part.transpose(1, 2).flatten(0, 1)[slots].transpose(0, 1)[None] for part in (key, value))
    return F.scaled_dot_product_attention(query[None, :, None], k, v, enable_gqa=True)[0, :, 0]

# %% [markdown]
# **Predict.** The result has 9 × 64 = 576 numbers. How many of them are not the same (differ by more than 0.0001)
#
# - between block by block and in one piece?
# - if all blocks of the pool are moved to other places, and the table is corrected?
# - if the first two entries of the table are *swapped*, and the blocks stay where they are?
# - if the first entry names a block of somebody else?

# %% tags=["predict"]
guess = predict(block_by_block=None, all_blocks_moved=None, two_entries_swapped=None, a_wrong_block=None)

# %% tags=["experiment", "objective-3"]
def different(result):
    return int(((result - expected).abs() > 1e-4).sum())


key, value = cache.key[layer].cpu(), cache.value[layer].cpu()
expected = in_one_piece(key, value)
place = torch.randperm(33, generator=torch.Generator().manual_seed(0))  # block b moves to place[b]
moved_key, moved_value = (torch.empty_like(part).index_copy_(0, place, part) for part in (key, value))
swapped = [table[1], table[0], *table[2:]]
wrong = [next(block for block in last["1"] if block not in table), *table[1:]]
observe(guess, block_by_block=different(block_by_block(key, value, table)),
        all_blocks_moved=different(block_by_block(moved_key, moved_value, place[table].tolist())),
        two_entries_swapped=different(block_by_block(key, value, swapped)),
        a_wrong_block=different(block_by_block(key, value, wrong)))

# %% [markdown]
# The third line surprises most people. A sum does not care about order, and the words' order is not in the table: the
# *position* of a token is inside its key (see The KV cache). So two **full** blocks may even change places in the list.
# What does depend on the order of the table is *writing*: the next token goes into the last block, and which block is
# not full.
#
# The fourth line is the danger. With a wrong block the result is wrong, and **nothing fails**: no error, no crash, only
# an answer that has somebody else's text in it. That is why the tests of an engine check after each step that every
# block is free, or named by exactly as many tables as its counter says:

# %%
print(inspect.getdoc(KVCacheManager.check_invariants))

# %% [markdown]
# **What this proves.** Paged attention is not an approximation. It computes the same sums in another order.
#
# **Now change one thing:** swap the *last* entry of the table with the first. How many numbers differ, and why?
#
# <details><summary>What happens</summary>
#
# Nearly all. The last block is not full, and now the code reads 16 slots of it, some of which hold nothing, and leaves
# out a part of the full one.
# </details>

# %% [markdown]
# ### 4. Three answers to one prompt
#
# `n=3` asks for three answers. The prompt has 52 tokens, each answer 14. `skip_reading_prefix_cache=True` forbids the
# engine to use blocks that it has already; so we can compare.
#
# **Predict.** How many blocks are in use in the last step, without sharing and with it? And how many prompt tokens does
# the model compute, for all three answers together, without and with? (A hint: only full blocks can be shared.)

# %% tags=["predict"]
guess = predict(blocks_without=None, blocks_with=None, prompt_tokens_without=None, prompt_tokens_with=None)

# %% tags=["experiment", "objective-4", "R34", "R125"]
prompt = {"prompt_token_ids": tokenizer.encode(" word" * 60)[:52]}
blocks, computed = {}, {}
for skip in (True, False):
    llm.reset_prefix_cache()
    params = SamplingParams(n=3, seed=0, max_tokens=14, ignore_eos=True, skip_reading_prefix_cache=skip)
    with Trace(llm) as samples:
        llm.generate(prompt, params, use_tqdm=False)
    blocks[skip] = samples.records[-1].blocks_held
    computed[skip] = sum(n for record in samples for start, n in record.scheduled.values() if start < 52)
observe(guess, blocks_without=blocks[True], blocks_with=blocks[False], prompt_tokens_without=computed[True],
        prompt_tokens_with=computed[False])

# %%
block_table(samples, step=-1, names=["A", "B", "C"])

# %% [markdown]
# The picture calls the three answers A, B and C. 52 tokens are three full blocks and four
# tokens more. The three are held once, with three readers. The fourth cannot be shared: each answer will write its own
# next token into it. Two ways to deal with it are known:
#
# - **The paper: copy on write.** All three share the fourth block too. Who writes into it first finds that its counter
#   is above 1, takes a new block, and copies.
# - **vLLM today, and this engine: share full blocks only.** Nobody ever writes into a full block, so nothing is ever
#   copied. The four tokens in the fourth block are computed again, by each answer after the first. (All three begin
#   in one step, and still share: each layer writes the K and V of a step before anybody reads them.)

# %%
full, rest = divmod(52, 16)
in_use = f"{full} shared + 3 × 2 own = {full + 3 * 2} blocks"
print(f"copy on write:     {in_use}, {3 - 1} blocks copied, 52 prompt tokens computed")
print(f"full blocks only:  {in_use}, nothing copied, {52 + 2 * rest} prompt tokens computed")

# %% [markdown]
# The last one that writes need not copy: by then it is the only reader. Both ways end with the same number of blocks.
# Eight more tokens cost next to nothing, and in return a table is only ever appended to. (You will often read that vLLM
# copies on write when `n > 1`. Its old engine did. Today's, called V1, makes three requests out of one, and lets prefix
# caching find what they have in common.)
#
# **Against the paper.** It reports how much memory sharing saved for ShareGPT, with 2 to 6 answers to each prompt
# (section 6.3). From our lengths:

# %%
def saving(n):
    """Percent of the blocks, on average over the steps; all n answers to a prompt are equally long."""
    without = sum(n * -(-(prompt + written) // 16) for prompt, answer in jobs for written in range(1, answer + 1))
    return 100 * sum((n - 1) * (prompt // 16) * answer for prompt, answer in jobs) / without


compare(paper={"2 answers, percent saved": 16.2, "6 answers": 30.5},
        ours={"2 answers, percent saved": saving(2), "6 answers": saving(6)})

# %% [markdown]
# **What this proves.** A table that *names* blocks can name those of somebody else. With memory in one piece for each
# request that is impossible. Prefix caching and beam search live from it.
#
# **Now change one thing:** shorten the prompt to 48 tokens, exactly three blocks. Are all three shared?
#
# <details><summary>What happens</summary>
#
# Only two. An engine always computes the last token of a prompt, because the first token of the answer comes
# out of it; so the second and third answer compute their third block anew. This costs three copies of the third block
# instead of one.
# </details>

# %% [markdown] tags=["R42", "R43"]
# ## Dial it in
#
# | knob | default | what it does to the blocks |
# |---|---|---|
# | `block_size` | 16 | the grain: small wastes less and shares more, large means shorter tables and fewer look-ups |
# | `gpu_memory_utilization`, `kv_cache_memory_bytes` | 0.92, derived | how many blocks there are |
# | `num_gpu_blocks_override` | none | the number itself, for tests and for this page |
# | `enable_prefix_caching` | on | whether full blocks can be found by their content and shared |
# | `max_model_len` | the model's | the longest table. Reserves nothing |
# | `max_num_seqs` | by hardware | how many tables at most, whatever the pool could hold |
# | `--attention-backend` (vLLM) | chosen for you | which kernel walks the table; some allow certain block sizes only |
#
# **How large should a block be?** On average half of a request's last block is empty, (b − 1) / 2 slots. So the useful
# share should be about *length / (length + (b − 1) / 2)*. **Predict** it for our conversations, in percent, with blocks
# of 16 and of 256. (A request that is seen at a random moment holds about 460 tokens: long ones are seen more often.)
# And for short requests, 19 tokens of prompt and 58 of answer (the paper's averages for Alpaca), with blocks of 128?

# %% tags=["predict"]
guess = predict(conversations_16=None, conversations_256=None, short_requests_128=None)

# %% tags=["experiment", "objective-4"]
def useful(jobs, block_size):
    """Percent of the slots in use that hold a token, on average over the steps of all requests."""
    held = torch.cat([torch.arange(prompt + 1, prompt + answer + 1) for prompt, answer in jobs])
    return 100 * int(held.sum()) / int((-(-held // block_size) * block_size).sum())


short = [(19, 58)]
observe(guess, conversations_16=round(useful(jobs, 16)), conversations_256=round(useful(jobs, 256)),
        short_requests_128=round(useful(short, 128)))

# %%
average = sum(sum(range(p + 1, p + n + 1)) for p, n in jobs) / sum(n for _, n in jobs)
print("block size   conversations   formula   short requests")
for b in (1, 8, 16, 32, 64, 128, 256):
    print(f"{b:10}{useful(jobs, b):14.1f} %{100 * average / (average + (b - 1) / 2):8.1f} %{useful(short, b):13.1f} %")

# %% [markdown]
# The formula is good to a tenth of a percent for conversations. For requests that never fill a block it is too kind:
# for the short ones, which hold 48.5 tokens on average, it says 43 % with blocks of 128. And the whole engine, in the
# pool of experiment 1 (there, free blocks count as waste too):

# %%
large, _ = paged(jobs[:NUM_PAGED_JOBS], 256)
for b, result in ((16, ours["paged"]), (256, large)):
    print(f"blocks of {b:3}: {result['token']:.0f} % of the memory holds a token,",
          f"{result['aboard']:.0f} requests aboard")

# %% [markdown]
# So why not blocks of one? Because a kernel reads a block in one go, with its threads side by side; and each block is
# an entry in a table that must be kept, sent to the GPU and looked up. The paper measured it (section 7.2): on ShareGPT
# 16 to 128 were best. On the short requests of Alpaca 16 and 32 were, and larger ones were clearly slower; the last
# column says why. Hence 16. A full block is also the unit of *sharing*: with 128, a common beginning of 100 tokens
# shares nothing.

# %% [markdown]
# ## Where it bites you
#
# **1. "PagedAttention makes attention faster."** The paper's kernel was *slower*, by 20 to 26 % (section 7.1),
# because it walks a table. What it buys is four times as many requests in a step, and that is where the throughput
# comes from. For one request alone there is nothing to gain.
#
# **2. "It eliminates waste."** It leaves the rest of each last block, less than 4 % in the paper. With very short
# requests it is more; see the column above.
#
# **3. "Before, 60 to 80 % of the GPU's memory was wasted."** Of the memory *for the KV cache*. The weights are not part
# of it.
#
# **4. "What is admitted will finish undisturbed."** Nobody reserves, so everybody may grow at once, and then the pool
# is empty. The engine *preempts*: the request that came last gives up all its blocks, and is computed again later. In
# experiment 1 our engine did this

# %%
print(preemptions, "times, for", NUM_PAGED_JOBS, "requests")

# %% [markdown]
# which is the price of a pool that is always full to the brim. This is overbooking, as airlines do. It pays as long as
# few must stay behind. If your log is full of preemptions, lower `max_num_seqs`, or give the cache more memory.
#
# **5. "A longer `max_model_len` costs memory."** Not per request. But the pool must have room for one request of that
# length, or the engine refuses to start:

# %%
with expect_error(ValueError):
    LLM(dtype="float32", num_gpu_blocks_override=33, max_model_len=513)

# %% [markdown]
# 513 tokens need 33 blocks, and with block 0 gone there are 32.
#
# **6. "All blocks of a prompt are shared."** Only full ones, and only where everything before is equal.

# %% [markdown]
# ## In production
#
# At the start, vLLM logs `GPU KV cache size: ... tokens` and `Maximum concurrency for ... tokens per request: ...x`.
# Read the second as what it is, the *worst* case. For the machine of the paper:

# %%
print(f"Maximum concurrency for 2,048 tokens per request: {SLOTS / 2048:.2f}x")
print(f"requests of {average:.0f} tokens, the average at any moment: {SLOTS / average:.0f}")

# %% [markdown]
# The first number is what reservations gave you. The second is what you can expect from blocks, and what you should
# plan with, together with some reserve for the hour in which all conversations are long.
#
# What to watch:
#
# * `vllm:kv_cache_usage_perc`, the share of blocks that some table names. Near 1 while requests wait? Memory is the
#   limit
# * `vllm:num_preemptions_total`: should hardly grow
# * `vllm:num_requests_running`: how many are aboard
#
# What has changed since the paper. Kernels that read by a block table are everywhere now: FlashAttention, FlashInfer
# and others have it built in, and vLLM chooses one for your GPU. Preempted requests are computed again, no longer
# swapped to CPU memory. And models with several kinds of layers (sliding windows, Mamba) keep a table for each kind.
#
# ### Exercise: PagedAttention's bookkeeping (30 minutes)
#
# Write the two halves yourself, where a token lies and who may have which block, in
# [a notebook of its own](../../exercises/1_core_concepts/03_paged_attention.ipynb). A check looks at your code and says
# what to look at next; it needs no model.

# %% [markdown]
# ## Check yourself
#
# Answer aloud before you open. The dots say how hard it is: ● know it, ●● explain it, ●●● judge, ●●●● decide.
#
# **Recall**
#
# <details><summary>1. ● Which three kinds of waste does a reservation have?</summary>
#
# Reserved: will be used, but not yet. Internal: will never be used. External: between the pieces, and too small.
# </details>
#
# <details><summary>2. ● What does a block table say?</summary>
#
# For each logical block of a request, which physical block of the pool it is.
# </details>
#
# <details><summary>3. ● Which waste is left with blocks?</summary>
#
# The empty part of each request's last block: at most block size − 1 slots, about half a block on average.
# </details>

# %% [markdown]
# **Mechanics**
#
# <details><summary>4. ●● The table is [4, 9, 1], a block has 16 slots. In which slot is position 35?</summary>
#
# 35 = 2 × 16 + 3: logical block 2 is physical block 1, so slot 1 × 16 + 3 = 19.
# </details>
#
# <details><summary>5. ●● Why is there no external fragmentation?</summary>
#
# All blocks have one size, and a request does not need neighbours. Any free block fits anybody.
# </details>
#
# <details><summary>6. ●● A prompt of 50 tokens, four answers of 30, blocks of 16. How many blocks, if they
# share?</summary>
#
# Three full blocks (48 tokens) are shared. Each answer holds at most 79 tokens, five blocks: two of its own. That is
# 3 + 4 × 2 = 11, instead of 20. (The last token that is written is never kept.)
# </details>
#
# <details><summary>7. ●●● Why may two full blocks change places in a table, and the last one not?</summary>
#
# Attention is a sum over tokens, and each key carries its position. But the last block is not full, and its place in
# the table says how many of its slots count, and where the next token goes.
# </details>

# %% [markdown]
# **Trade-off**
#
# <details><summary>8. ●●● Why 16? What would 1 cost, and what 256?</summary>
#
# 1 wastes nothing, and makes tables as long as the texts, with a look-up for each token and kernels that cannot read
# several tokens in one go. 256 wastes a fifth of the memory with conversations, most of it with short requests, and
# shares common beginnings only in steps of 256.
# </details>
#
# <details><summary>9. ●●● Does paging make one lonely request faster?</summary>
#
# No, if anything a little slower: the kernel follows a table. The gain is that more requests fit, and share each
# reading of the weights.
# </details>
#
# <details><summary>10. ●●●● After an update, answers now and then contain words of other users' prompts. No error in
# the logs. Where do you look, and what do you do first?</summary>
#
# First take it out of service: other users' text is being shown. Then look at who frees blocks and who counts readers:
# a block that was freed while a table still named it, freed twice, or found by a content that was not written yet (an
# aborted or preempted request). Run with prefix caching off: if it stops, the fault is in sharing. And check the
# counters against the tables after every step, in a test with random arrivals and aborts.
# </details>

# %% [markdown]
# ## Cheat sheet
#
# ```
# slot of position i        = table[i // block_size] × block_size + i % block_size
# blocks of a request       = tokens / block_size, rounded up
# empty slots of a request  = 0 ... block_size − 1; on average (block_size − 1) / 2
# useful share              ≈ length / (length + (block_size − 1) / 2)
# shared by n answers       = the full blocks of the prompt, once instead of n times
# ```
#
# | system | memory that holds a token, paper | why not more |
# |---|---|---|
# | Max | 20.4 % | answers that are never written |
# | Pow2 | 26.8 % | pieces of many sizes |
# | Oracle | 38.2 % | answers not written yet, pieces of many sizes |
# | blocks | 96.3 % | the last block of each request |
#
# **Sources.** Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP
# 2023, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180): the waste, Figure 2 and section 3.1; the versions of Orca
# and the buddy allocator, section 6.1; requests aboard, Figure 13; lengths, Figure 11; slots, Table 1; copy on write,
# section 4.4; what sharing saves, section 6.3; the kernel's cost, section 7.1; block sizes, section 7.2. Pages: Kilburn
# et al., *One-level storage system*, 1962, which that paper cites. Orca: Yu et al.,
# [OSDI 2022](https://www.usenix.org/conference/osdi22/presentation/yu). "60 to 80 %" and "under 4 %": the
# [announcement of vLLM](https://blog.vllm.ai/2023/06/20/vllm.html), June 2023. Sums block by block, with the largest
# exponent subtracted: Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018,
# [arXiv 1805.02867](https://arxiv.org/abs/1805.02867). The defaults are those of vLLM 0.33, read in its source. The
# lengths of single requests are ours, drawn at random, with the paper's averages.
#
# **Next** in the course: *Continuous batching*, on who gets the room that you have just made.
