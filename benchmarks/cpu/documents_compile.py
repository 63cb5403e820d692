"""Does training compile once, when every step packs other documents?"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.compilations import counted
from benchmarks.results import Figure
from jflex.masks import causal, document, document_ids_from_lengths

TITLE = "programs compiled in 100 training steps with new document boundaries in each; B 1, S 512, H 2, D 16"
STEPS, LENGTH, DOCUMENTS = 100, 512, 6


def measure() -> list[Figure]:
    return [figure for made in ("inside the jitted step", "outside, before each step") for figure in _count(made)]


def _count(made: str) -> list[Figure]:
    generator = np.random.default_rng(0)
    parameters = {name: jnp.asarray(generator.normal(size=(32, 32)) / 6, jnp.float32) for name in "qkv"}
    tokens = jnp.asarray(generator.normal(size=(1, LENGTH, 32)), jnp.float32)
    step = jax.jit(functools.partial(_step, inside=made.startswith("inside")))
    first, rest = 0, 0
    for number in range(STEPS):
        cuts = np.sort(generator.choice(np.arange(1, LENGTH), DOCUMENTS - 1, replace=False))
        lengths = np.diff(cuts, prepend=0, append=LENGTH).astype(np.int32)
        with counted() as count:
            mask = lengths if made.startswith("inside") else _mask(lengths)
            parameters, loss = step(parameters, tokens, mask)
            jax.block_until_ready(loss)
        first, rest = (count.programs, 0) if number == 0 else (first, rest + count.programs)
    if not np.isfinite(loss):
        raise RuntimeError(f"The loss became {loss}: this did not train.")
    bar = {"at_most": 1.0} if made.startswith("inside") else {}
    return [Figure(f"mask made {made}: compiled in step 1", first, "", **bar),
            Figure(f"mask made {made}: compiled in steps 2 to {STEPS}", rest, "", at_most=0.0)]  # fmt: skip


def _mask(lengths: jax.Array) -> jflex.BlockMask:
    documents = document_ids_from_lengths(lengths, LENGTH)
    return jflex.create_block_mask(jflex.and_masks(causal(), document(documents)), None, None, LENGTH, LENGTH)


def _step(parameters, tokens, mask, *, inside):
    block_mask = _mask(mask) if inside else mask

    def loss(parameters):
        query, key, value = (jnp.einsum("btc,cd->btd", tokens, parameters[n]).reshape(1, LENGTH, 2, 16) for n in "qkv")
        out = jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")
        return jnp.mean((out.reshape(tokens.shape) - tokens) ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value
