"""Scores and weights of a block in plain JAX: GEMM, scale, score mod and dropout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jflex.backends.base import Inputs
from jflex.backends.xla.blockwise import Unit, Walk, over_block
from pallas_kernels.spec import AttentionSpec


def einsum(axes: str, a: jax.Array, b: jax.Array, spec: AttentionSpec) -> jax.Array:
    """A GEMM, with results in the dtype of scores."""
    if spec.platform == "cpu":  # XLA's CPU lacks some 16-bit GEMMs with float32 results ("UNIMPLEMENTED")
        a, b = a.astype(spec.exact), b.astype(spec.exact)
    return jnp.einsum(axes, a, b, precision=spec.precision, preferred_element_type=spec.exact)


def scaled_query(q: jax.Array, spec: AttentionSpec) -> jax.Array:
    """A query times the scale, for `raw_scores`; on a CPU alone, where it is float32 and a pass over scores is slow."""
    return q.astype(spec.exact) * jnp.asarray(spec.scale, spec.exact) if spec.platform == "cpu" else q


def raw_scores(axes: str, a: jax.Array, b: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The GEMM of keys and a `scaled_query`, scaled."""
    scores = einsum(axes, a, b, spec)
    return scores if spec.platform == "cpu" else scores * jnp.asarray(spec.scale, scores.dtype)


def modified(walk: Walk, inputs: Inputs, raw: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
    """Raw scores of a block after the score mod."""
    if walk.spec.score_mod is None:
        return raw
    score = functools.partial(walk.spec.score_mod, inputs.captured.score)
    return over_block(score, (raw.astype(jnp.float32),), walk.indices(unit, column), walk.axes).astype(raw.dtype)


def kept_weights(walk: Walk, inputs: Inputs, unit: Unit, column: jax.Array) -> jax.Array | None:
    """Kept weights of a block, in the shape of its scores; None without dropout."""
    dropout = walk.spec.dropout
    if dropout is None:
        return None
    mod = functools.partial(dropout.mod, inputs.captured.dropout)
    return over_block(mod, (), walk.indices(unit, column), walk.axes)


def dropped(x: jax.Array, kept: jax.Array | None) -> jax.Array:
    """Weights or their cotangents, 0 where dropped."""
    return x if kept is None else jnp.where(kept, x, 0.0)


def scaled_up(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Multiplies a sum over kept weights, or its cotangent, by the scale of dropout."""
    return x if spec.dropout is None else x * jnp.asarray(spec.dropout.scale, x.dtype)
