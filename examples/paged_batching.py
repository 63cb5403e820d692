"""Continuous batching over pages: requests come and go, and one compiled step serves all of them."""

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex.paged import PagedBatch, PagedCache, PagePool, token_slots, write

ROWS, STEP, PAGE, HEADS, D, VOCABULARY = 4, 32, 16, 4, 32, 64
EMBED, OUT = jax.random.normal(jax.random.key(0), (2, VOCABULARY, HEADS * D))


@jax.jit
def step(cache, tokens, batch):  # a model of one layer; returns the token after the last one of each request
    query, key, value = (EMBED[(tokens + shift) % VOCABULARY].reshape(STEP, HEADS, D) for shift in range(3))
    cache = write(cache, key, value, token_slots(batch, STEP, page_size=PAGE))
    out = jflex.paged_attention(query, cache, batch, mask_mod=jflex.masks.causal())
    return cache, (out[batch.qo_indptr[1:] - 1].reshape(ROWS, -1) @ OUT.T).argmax(-1)


class Request:
    def __init__(self, prompt, length):
        self.tokens, self.length, self.computed, self.pages = list(prompt), length, 0, []


def serve(requests):
    pool, cache = PagePool(64, PAGE), PagedCache.create(64, PAGE, HEADS, D, dtype=jnp.float32)
    waiting, running = list(requests), []
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(ROWS - len(running), len(waiting)))]
        tokens, ends = [], np.zeros(ROWS + 1, np.int32)
        lengths, table = np.zeros(ROWS, np.int32), np.zeros((ROWS, 8), np.int32)  # page 0 is padding
        for row, request in enumerate(running):  # decoding takes one token, a prompt the rest of the step
            new = request.tokens[request.computed :][: STEP - len(tokens)]
            tokens, request.computed = tokens + new, request.computed + len(new)
            request.pages += pool.alloc(pool.pages_for(request.computed) - len(request.pages))
            ends[row + 1 :], lengths[row] = len(tokens), request.computed
            table[row, : len(request.pages)] = request.pages
        batch = PagedBatch(*map(jnp.asarray, (ends, lengths, table)))
        cache, following = step(cache, jnp.array(tokens + [0] * (STEP - len(tokens))), batch)
        for request, token in zip(list(running), following.tolist(), strict=False):
            if request.computed == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == request.length:
                pool.release(request.pages)
                running.remove(request)
    return [request.tokens for request in requests]


def main(number: int = 9):
    lengths = np.random.default_rng(0).integers(5, 40, number).tolist()
    new = lambda n: Request(range(n % 7, n % 7 + n), n + 12)
    texts = serve([new(n) for n in lengths])
    assert texts == [serve([new(n)])[0] for n in lengths]  # each alone
    print(f"{number} requests, {step._cache_size()} compiled step; the first writes {texts[0][-12:]}")


if __name__ == "__main__":
    main()
