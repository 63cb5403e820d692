# %% [markdown]
# # Speculative decoding with a tree
#
# A draft proposes several continuations as a tree. One call of `paged_attention` verifies all: each node attends
# to the tokens before the tree, to its ancestors and to itself.

# %%
import jax
import jax.numpy as jnp

import jflex
from jflex import masks
from jflex.paged import PagedBatch, PagedCache, copy_slots, slots_of, write

PAGE, HEADS, D, VOCABULARY = 16, 4, 32, 16
EMBED, OUT = jax.random.normal(jax.random.key(0), (2, VOCABULARY, HEADS * D))
PARENTS = [-1, 0, 0, 1, 1, 2, 2]  # the known token, two drafts of the next, and two after each
WORDS = jnp.asarray(masks.tree_bits(PARENTS))[None]
SLOTS = slots_of(jnp.arange(1, 9), jnp.arange(8 * PAGE), PAGE)


# %%
@jax.jit
def following(cache, tokens, length, words):
    """The token after each of these, which lie at the end of a text of `length` tokens."""
    rows = EMBED[jnp.asarray(tokens)].reshape(-1, HEADS, D)
    cache = write(cache, rows, rows, jax.lax.dynamic_slice(SLOTS, (length - len(rows),), (len(rows),)))
    batch = PagedBatch(jnp.array([0, len(rows)]), length[None], jnp.arange(1, 9)[None], ancestors=words)
    out = jflex.paged_attention(rows, cache, batch, mask_mod=masks.causal())
    return cache, (out.reshape(len(rows), -1) @ OUT.T).argmax(-1)


# %% [markdown]
# The draft here knows the truth half of the time. Accepted tokens are the model's own, so the text does not change.


# %%
def main(tokens: int = 40):
    cache = lambda: PagedCache.create(9, PAGE, HEADS, D, dtype=jnp.float32)
    plain, state, none = [3], cache(), jnp.zeros((1, 1), jnp.int32)
    while len(plain) <= tokens + 3:
        state, token = following(state, plain[-1:], jnp.int32(len(plain)), none)
        plain.append(int(token[0]))
    text, state, calls = [3], cache(), 0
    while len(text) <= tokens:
        a, b = plain[len(text) : len(text) + 2]
        guess = (calls % 2) * [a, 0, b, 0, 0, 0] or [0, a, 0, 0, 0, (b + 1) % VOCABULARY]
        state, token = following(state, [text[-1], *guess], jnp.int32(len(text) + 6), WORDS)
        path, start, calls = [0], len(text) - 1, calls + 1
        while child := [n for n in range(1, 7) if PARENTS[n] == path[-1] and guess[n - 1] == token[path[-1]]]:
            path.append(child[0])
        text += [int(token[node]) for node in path]
        state = copy_slots(state, SLOTS[start + jnp.array(path)], SLOTS[start : start + len(path)])
    assert text[: tokens + 1] == plain[: tokens + 1]
    print(f"{len(text) - 1} tokens in {calls} calls, {(len(text) - 1) / calls:.1f} a call")


if __name__ == "__main__":
    main()
