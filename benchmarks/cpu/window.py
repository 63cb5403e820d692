"""How much faster is a sliding window than dense attention with the same mask?"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jflex
from benchmarks.baselines import dense_masked, forward_and_backward
from benchmarks.results import Figure
from benchmarks.timing import figure, ratios, take_turns

TITLE = "causal window of 256 keys; B 1, S 8192, H 4, D 64, float32; `xla` beside masked softmax attention in jnp"
LENGTH, WINDOW = 8192, 256


def measure() -> list[Figure]:
    query, key, value, cotangent = jax.random.normal(jax.random.key(0), (4, 1, LENGTH, 4, 64))
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)
    block_mask = jflex.create_block_mask(mask_mod, None, None, LENGTH, LENGTH)

    def sparse(query, key, value):
        return jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")

    def dense(query, key, value):
        index = jnp.arange(LENGTH)
        return dense_masked(query, key, value, mask_mod(0, 0, index[:, None], index[None, :]))

    figures = []
    for name, seconds, transform, arguments in (
        ("forward", 60, lambda f: f, (query, key, value)),
        ("forward and backward", 90, forward_and_backward, (query, key, value, cotangent)),
    ):
        calls = {"dense jnp": jax.jit(transform(dense)), "jflex": jax.jit(transform(sparse))}
        times = take_turns({peer: functools.partial(f, *arguments) for peer, f in calls.items()}, seconds)
        bar = {"at_least": 8.0} if name == "forward" else {}
        figures += [figure(f"{name}, {peer}", [t * 1e3 for t in values], "ms") for peer, values in times.items()]
        figures.append(figure(f"{name}, times faster", ratios(times["dense jnp"], times["jflex"]), "x", 3, **bar))
    return figures
