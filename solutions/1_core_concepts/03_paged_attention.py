# %% [markdown]
# # Exercise: PagedAttention's bookkeeping
#
# You will be able to
#
# - find the place of any token in memory, given its request's block table
# - write the allocator that hands blocks out, shares them and takes them back
# - say what goes wrong when a block is freed too early, too late or twice
#
# 30 minutes · difficulty ●●○ · after [PagedAttention](../../notebooks/1_core_concepts/03_paged_attention.ipynb) · needs
# no GPU and no model.

# %%
from tutorial_engine.exercises import paged_attention as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. Where is token 9?
#
# A request sees its tokens in one row: positions 0, 1, 2 and so on. In memory they lie in blocks, anywhere in the pool.
# A *slot* is one place for one token; slots are numbered through the whole pool. The block table leads from one to the
# other. Here it is `[7, 2, 5]`, and a block holds 4 tokens:
#
# ```
# position          0   1   2   3 |  4   5   6   7 |  8   9  10  11
# logical block           0       |        1       |        2
# physical block          7       |        2       |        5
# slot             28  29  30  31 |  8   9  10  11 | 20  21  22  23
# ```
#
# Position 9 is in logical block 2, which is physical block 5. That block begins at slot 20, and position 9 is the
# second token in it: slot 21. In each step, the engine needs this for every token that it computes, so that the model
# knows where to write K and V.

# %% tags=["exercise", "objective-2"]
def slot_mapping(block_table, positions, block_size):
    """The slot of each of the positions, as a list of ints in the same order."""
    # BEGIN SOLUTION
    slots = []
    for position in positions:
        logical_block, offset = position // block_size, position % block_size
        slots.append(block_table[logical_block] * block_size + offset)
    return slots
    # END SOLUTION todo: Return a list with the slot of each position.


# %% tags=["check"]
slots = course.check_slot_mapping(slot_mapping)
slots

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Do it by hand for position 6 in the picture. Which three numbers did you need on the way?
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# `6 // 4` is 1 and `6 % 4` is 2: the logical block, and the place inside it. The block table turns a logical block into
# a physical one.
# </details>
#
# <details><summary>Hint 3: nearly the answer</summary>
#
# Physical block × block size + place inside the block, for each position. The positions need not begin at 0: in a
# decode step there is just one, and it may be 9.
# </details>

# %% [markdown] tags=["solution"]
# Division gives the logical block, the remainder the place inside it, and the table does the rest. In the engine the
# same line runs on whole arrays, in [model_runner.py](../../tutorial_engine/model_runner.py).

# %% [markdown]
# ## 2. The allocator
#
# Now the other side: who gets which block? Write a pool with three rules.
#
# - `allocate(n)` takes `n` blocks from the **front** of the queue of free blocks and returns their numbers. If there
#   are fewer than `n`, it returns `None` and takes nothing.
# - `share(blocks)` says that one more block table names these blocks, as when two prompts begin with the same text. (It
#   is written already.)
# - `free(blocks)` says that one table less names them. A block that *nobody* names any more goes to the **back** of the
#   queue, in the order of the list. (The engine puts blocks without a hash in front; here all go to the back.) To free
#   a block that is free already is a `ValueError`.

# %% tags=["exercise", "objective-4"]
class BlockAllocator:
    """A pool of blocks, numbered from 0."""

    def __init__(self, num_blocks):
        self.queue = list(range(num_blocks))  # free blocks, the next one to be handed out first
        self.readers = dict.fromkeys(self.queue, 0)  # how many tables name each block

    def allocate(self, n):
        """A list of n blocks, or None if there are fewer."""
        # BEGIN SOLUTION
        if n > len(self.queue):
            return None
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            self.readers[block] = 1
        return taken
        # END SOLUTION todo: Take n blocks from the front of the queue, note one reader for each, return them.

    def share(self, blocks):
        """One more table names these blocks."""
        for block in blocks:
            self.readers[block] += 1

    def free(self, blocks):
        """One table less names these blocks."""
        # BEGIN SOLUTION
        for block in blocks:
            if self.readers[block] == 0:
                raise ValueError(f"block {block} is free already")
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.queue.append(block)
        # END SOLUTION todo: One reader less for each block; those without a reader go to the back of the queue.


# %% tags=["check"]
allocator = course.check_block_allocator(BlockAllocator)
allocator

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Write `allocate` first, and in it the case that does not fit. It must come before anything is taken.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# `self.queue[:n]` are the first n blocks and `self.queue[n:]` the rest. Who has just been allocated has one reader.
# </details>
#
# <details><summary>Hint 3: nearly the answer</summary>
#
# `free` goes through the blocks one by one: no reader is an error; else one reader less; and if that was the last, the
# block is appended to the queue.
# </details>

# %% [markdown] tags=["solution"]
# The engine's own pool is `BlockPool` in [block_manager.py](../../tutorial_engine/block_manager.py). It has the same
# three operations, called `get_new_blocks`, `touch` and `free_blocks`. A request's blocks are given back last one
# first, so that the beginning of its text can be found longest. Its queue is a linked list, because a shared block may
# be taken out of the middle of it, and one block is never handed out (the null block).

# %% [markdown]
# ## See it
#
# Three requests in a pool of 8 blocks of 4 tokens, all free, in the order 0 to 7. Request a has 10 tokens. Request b
# has 11, of which the first 4 are the same as a's. Then a is finished, gives back its blocks in the order in which it
# got them, and c comes with 13 tokens.
#
# **Predict.** Which blocks does c get? Write a list like `[1, 2]`, or `"None"` if there are not enough.

# %% tags=["predict"]
guess = predict(blocks_of_c=None)

# %%
find_slots, Allocator = slots.use(), allocator.use()

# %% tags=["experiment"]
pool = Allocator(8)
a = pool.allocate(3)
pool.share(a[:1])  # b begins with a's first block
b = a[:1] + pool.allocate(2)
pool.free(a)
c = pool.allocate(4)
observe(guess, blocks_of_c=c)

# %%
course.draw(8, 4, {"b": b, "c": c}, {"b": 11, "c": 13})

# %% [markdown]
# **Explain.** c gets 5, 6 and 7, which were never used, and then 1, which a gave back first. Block 0 is not free: b
# still reads it. The 13th token of c stands alone in block 1, and the slots say where:

# %%
print("slots of b:", find_slots(b, range(11), 4))
print("slots of c:", find_slots(c, range(13), 4))
print("no slot is used twice:", not set(find_slots(b, range(11), 4)) & set(find_slots(c, range(13), 4)))

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Forgetting the table.** It works for the first request of an empty pool, and for nobody after that.

# %% tags=["wrong"]
def slot_mapping(block_table, positions, block_size):
    return list(positions)


course.check_slot_mapping(slot_mapping)

# %% [markdown] tags=["solution"]
# **Counting instead of using the positions.** It works for a prompt, whose positions are 0, 1, 2 and so on. The first
# decode step then writes over the beginning of the prompt.

# %% tags=["wrong"]
def slot_mapping(block_table, positions, block_size):
    return [block_table[i // block_size] * block_size + i % block_size for i in range(len(positions))]


course.check_slot_mapping(slot_mapping)

# %% [markdown] tags=["solution"]
# **Swapping `//` and `%`.** As long as there is only one block and one token, both give 0.

# %% tags=["wrong"]
def slot_mapping(block_table, positions, block_size):
    return [block_table[p % block_size] * block_size + p // block_size for p in positions]


course.check_slot_mapping(slot_mapping)

# %% [markdown] tags=["solution"]
# **Taking blocks one by one until there are none.** The request is refused, and keeps what it got so far: after a while
# the pool is empty, and nobody has anything.

# %% tags=["wrong"]
class BlockAllocator(course.BlockAllocator):
    def allocate(self, n):
        taken = []
        for _ in range(n):
            if not self.queue:
                return None
            block = self.queue.pop(0)
            self.readers[block] = 1
            taken.append(block)
        return taken


course.check_block_allocator(BlockAllocator)

# %% [markdown] tags=["solution"]
# **Freeing without counting readers.** The block of the common beginning is handed out while somebody still reads it.
# The other request's answers turn into nonsense, and no error is raised.

# %% tags=["wrong"]
class BlockAllocator(course.BlockAllocator):
    def free(self, blocks):
        for block in blocks:
            if block in self.queue:
                raise ValueError(f"block {block} is free already")
            self.queue.append(block)


course.check_block_allocator(BlockAllocator)

# %% [markdown] tags=["solution"]
# **Putting freed blocks in front.** Nothing breaks, but what was in them is overwritten first, and prefix caching
# finds less.

# %% tags=["wrong"]
class BlockAllocator(course.BlockAllocator):
    def free(self, blocks):
        for block in blocks:
            if self.readers[block] == 0:
                raise ValueError(f"block {block} is free already")
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.queue.insert(0, block)


course.check_block_allocator(BlockAllocator)

# %% [markdown] tags=["solution"]
# **Not noticing a double free.** Two requests then write to the same block.

# %% tags=["wrong"]
class BlockAllocator(course.BlockAllocator):
    def free(self, blocks):
        for block in blocks:
            self.readers[block] = max(0, self.readers[block] - 1)
            if self.readers[block] == 0:
                self.queue.append(block)


course.check_block_allocator(BlockAllocator)
