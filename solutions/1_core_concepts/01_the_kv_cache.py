# %% [markdown]
# # Exercise: a KV cache of your own
#
# You will be able to
#
# - read from a model's `config.json` what each token will cost in memory
# - write the cache: keep K and V of every token, and let the newest one look at all of them
# - show that the cached row is the row that computing everything gives, also when heads share their K and V
#
# 25 minutes · difficulty ●●○ · after [The KV cache](../../notebooks/1_core_concepts/01_the_kv_cache.ipynb) · needs no
# GPU and no model; a little PyTorch for the second task.

# %%
import torch

from tutorial_engine.exercises import the_kv_cache as course
from tutorial_engine.notebook import observe, predict

# %% [markdown]
# ## 1. What does a token cost?
#
# Every model comes with a file `config.json`. These lines of it decide how large its cache is:
#
# ```
#                        SmolLM2-135M    Qwen3-0.6B    OPT-13B
# hidden_size                     576          1024       5120
# num_hidden_layers                30            28         40
# num_attention_heads               9            16         40
# num_key_value_heads               3             8    (missing)
# head_dim                   (missing)          128   (missing)
#
# numbers of               4 bytes       2 bytes    2 bytes
# a token costs             46,080             ?          ?
# ```
#
# Two entries may be missing. Without `num_key_value_heads`, every attention head keeps its own K and V. Without
# `head_dim`, the hidden size is shared out evenly among the attention heads.

# %% tags=["exercise", "objective-3"]
def cache_bytes_per_token(config, bytes_per_number):
    """Bytes of K and V that one token leaves in the cache. config: a dict with the entries above."""
    # BEGIN SOLUTION
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_number
    # END SOLUTION todo: Return the bytes that one token leaves in all layers together.


# %% tags=["check"]
cost = course.check_cache_bytes_per_token(cache_bytes_per_token)
cost

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# Forget the missing entries, and get 46,080 for SmolLM2 with a pencil: two vectors, for each KV head, in each layer.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# `config.get("num_key_value_heads", other)` gives `other` if the entry is missing; the same for `head_dim`. Divide with
# `//`, so that the result is a whole number.
# </details>

# %% [markdown] tags=["solution"]
# The engine's own is `kv_bytes_per_token` in [kv_cache.py](../../tutorial_engine/kv_cache.py). By then the missing
# entries are filled in, once, when the file is read.

# %% [markdown]
# ## 2. The cache
#
# Now the thing itself, for one request and one layer. A step with one new token goes like this:
#
# ```
# append(key, value)     one more column:   keys    [k0 k1 k2 k3]      values  [v0 v1 v2 v3]
#
# attend(query)          scores   s_t = query · k_t / root of head_dim       for t = 0, 1, 2, 3
#                        weights  softmax over t
#                        result   w0·v0 + w1·v1 + w2·v2 + w3·v3
# ```
#
# There may be more heads than KV heads, always a multiple. Neighbours share: with 4 heads and 2 KV heads, heads 0 and 1
# read KV head 0, and heads 2 and 3 read KV head 1.

# %% tags=["exercise", "objective-1"]
class KVCache:
    """K and V of all tokens so far: keys and values are [num_kv_heads, tokens, head_dim]."""

    def __init__(self, num_kv_heads, head_dim):
        self.keys = torch.zeros(num_kv_heads, 0, head_dim)  # no token yet
        self.values = torch.zeros(num_kv_heads, 0, head_dim)

    def append(self, key, value):
        """One more token. key, value: [num_kv_heads, head_dim]."""
        # BEGIN SOLUTION
        self.keys = torch.cat([self.keys, key[:, None]], dim=1)
        self.values = torch.cat([self.values, value[:, None]], dim=1)
        # END SOLUTION todo: Put the key behind the keys so far, and the value behind the values.

    def attend(self, query):
        """What the newest token gets. query: [num_heads, head_dim]; returns the same shape."""
        # BEGIN SOLUTION
        sharing = len(query) // len(self.keys)  # heads for each KV head
        keys = self.keys.repeat_interleave(sharing, dim=0)  # [num_heads, tokens, head_dim]
        values = self.values.repeat_interleave(sharing, dim=0)
        scores = torch.einsum("hd,htd->ht", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("ht,htd->hd", scores.softmax(dim=-1), values)
        # END SOLUTION todo: Return, for each head, the values weighted by softmax of the scores.


# %% tags=["check"]
caching = course.check_kv_cache(KVCache)
caching

# %% [markdown]
# <details><summary>Hint 1: where to begin</summary>
#
# `append` first. `key[:, None]` has the shape [num_kv_heads, 1, head_dim]: a row of tokens that is one long.
# `torch.cat` along the dimension of the tokens puts it behind the others.
# </details>
#
# <details><summary>Hint 2: how to go on</summary>
#
# Write `attend` for equal numbers of heads: `torch.einsum("hd,htd->ht", query, self.keys)` multiplies each head's query
# with each of its keys. Divide, `softmax(dim=-1)`, and a second einsum, `"ht,htd->hd"`, weighs the values.
# </details>
#
# <details><summary>Hint 3: nearly the answer</summary>
#
# For shared K and V, give each head a copy: `self.keys.repeat_interleave(n, dim=0)` with n heads for each KV head. It
# makes 0, 0, 1, 1 out of 0, 1. (A real kernel copies nothing, it reads the same place.)
# </details>

# %% [markdown] tags=["solution"]
# Note what is missing: a mask. The newest token may look at everything that is there, and what comes later is not there
# yet. The engine differs in one thing: `torch.cat` copies the whole cache for each token. It writes into blocks that
# were set aside at the start instead, and that is the subject of the lesson on PagedAttention.

# %% [markdown]
# ## See it
#
# A tiny model with one layer and random weights writes eight tokens, once with a cache that it keeps, and once with one
# that it builds anew, from all tokens, in each step.
#
# **Predict.** The prompt has 5 tokens. How often does a token go through the model, with the cache and without? Are the
# 8 tokens the same?

# %% tags=["predict"]
guess = predict(with_the_cache=None, without=None, same_tokens=None)

# %%
Cache = caching.use()

# %% tags=["experiment"]
def write(prompt, num_tokens, keep):
    model, tokens, seen = course.TinyModel(), list(prompt), 0
    for _ in range(num_tokens):
        if seen == 0 or not keep:
            cache, seen = Cache(model.num_kv_heads, model.head_dim), 0
        for position in range(seen, len(tokens)):  # with the cache: those that it does not have yet
            query, key, value = model.qkv(tokens[position], position)
            cache.append(key, value)
        seen = len(tokens)
        tokens.append(model.next_token(cache.attend(query)))
    return tokens, model.asked


kept, asked = write([3, 1, 4, 1, 5], 8, keep=True)
thrown_away, asked_without = write([3, 1, 4, 1, 5], 8, keep=False)
observe(guess, with_the_cache=asked, without=asked_without, same_tokens=kept == thrown_away)

# %% [markdown]
# **Explain.** With the cache: 5 of the prompt, and one for each of the 8 tokens but the last, which nobody reads: 12.
# Without: 5 + 6 + ... + 12 = 68. Only `keep` differs, and it changes the work, not the words.

# %% [markdown] tags=["solution"]
# ## Answers that look right
#
# These are the usual mistakes, and what the checks say about them.
#
# **Counting the heads that ask.** For a model with as many KV heads as heads this is right, and until 2023 most were
# like that. For SmolLM2 it is three times too much.

# %% tags=["wrong"]
def cache_bytes_per_token(config, bytes_per_number):
    return 2 * config["num_hidden_layers"] * config["hidden_size"] * bytes_per_number


course.check_cache_bytes_per_token(cache_bytes_per_token)

# %% [markdown] tags=["solution"]
# **Working out a head_dim that the file names.** Qwen3 has wider heads than its hidden size would suggest: half of its
# cache would be missing from your plan.

# %% tags=["wrong"]
def cache_bytes_per_token(config, bytes_per_number):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return 2 * config["num_hidden_layers"] * kv_heads * (config["hidden_size"] // heads) * bytes_per_number


course.check_cache_bytes_per_token(cache_bytes_per_token)

# %% [markdown] tags=["solution"]
# **Forgetting V.**

# %% tags=["wrong"]
def cache_bytes_per_token(config, bytes_per_number):
    return course.cache_bytes_per_token(config, bytes_per_number) // 2


course.check_cache_bytes_per_token(cache_bytes_per_token)

# %% [markdown] tags=["solution"]
# **Replacing instead of appending.** The model then knows only its last word.

# %% tags=["wrong"]
class KVCache(course.KVCache):
    def append(self, key, value):
        self.keys, self.values = key[:, None], value[:, None]


course.check_kv_cache(KVCache)

# %% [markdown] tags=["solution"]
# **Forgetting the root.** Softmax becomes too sharp. The text stays fluent for a while, which makes this one hard to
# find in a real model.

# %% tags=["wrong"]
class KVCache(course.KVCache):
    def attend(self, query):
        return super().attend(query * query.shape[-1] ** 0.5)


course.check_kv_cache(KVCache)

# %% [markdown] tags=["solution"]
# **Softmax in the wrong direction.** Softmax needs to be told which dimension adds up to 1, and no
# error is raised for the wrong one.

# %% tags=["wrong"]
class KVCache(course.KVCache):
    def attend(self, query):
        scores = torch.einsum("hd,htd->ht", query, self.keys) / query.shape[-1] ** 0.5
        return torch.einsum("ht,htd->hd", scores.softmax(dim=0), self.values)


course.check_kv_cache(KVCache)

# %% [markdown] tags=["solution"]
# **Dealing the heads out like cards**: 0, 1, 0, 1 instead of 0, 0, 1, 1. Shapes fit, and no error is raised. The model
# was trained with the other order, so it writes nonsense.

# %% tags=["wrong"]
class KVCache(course.KVCache):
    def attend(self, query):
        sharing = len(query) // len(self.keys)
        keys, values = self.keys.repeat(sharing, 1, 1), self.values.repeat(sharing, 1, 1)
        weights = (torch.einsum("hd,htd->ht", query, keys) / query.shape[-1] ** 0.5).softmax(dim=-1)
        return torch.einsum("ht,htd->hd", weights, values)


course.check_kv_cache(KVCache)
