"""What does it cost to compute plain attention blockwise, beside JAX's own?"""

from __future__ import annotations

import functools

import jax

import jflex
from benchmarks.baselines import forward_and_backward
from benchmarks.results import Figure
from benchmarks.timing import figure, ratios, take_turns

TITLE = "no mod, no mask; B 1, S 2048, H 4, D 64, float32; `xla` beside jax.nn.dot_product_attention (XLA)"


def measure() -> list[Figure]:
    query, key, value, cotangent = jax.random.normal(jax.random.key(0), (4, 1, 2048, 4, 64))

    def blockwise(query, key, value):
        return jflex.flex_attention(query, key, value, implementation="xla")

    def dense(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, implementation="xla")

    figures = []
    for name, transform, arguments in (
        ("forward", lambda f: f, (query, key, value)),
        ("forward and backward", forward_and_backward, (query, key, value, cotangent)),
    ):
        calls = {"jflex": jax.jit(transform(blockwise)), "jax.nn": jax.jit(transform(dense))}
        times = take_turns({peer: functools.partial(f, *arguments) for peer, f in calls.items()}, 60)
        figures += [figure(f"{name}, {peer}", [t * 1e3 for t in values], "ms") for peer, values in times.items()]
        figures.append(figure(f"{name}, time relative to jax.nn", ratios(times["jflex"], times["jax.nn"]), "x", 3,
                              at_most=1.3))  # fmt: skip
    return figures
