"""Arrays of heads in the layout of a call, and grouped by key heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jflex.backends.xla.blockwise import Walk
from pallas_kernels.spec import AttentionSpec


def padded_query(walk: Walk, query: jax.Array) -> jax.Array:
    """[B, Hkv, group, T, D], padded to whole blocks with zeros."""
    rows = walk.rows * walk.size[0] - walk.spec.T
    return jnp.pad(split_heads(query, walk.spec), ((0, 0), (0, 0), (0, 0), (0, rows), (0, 0)))


def split_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """[B, T, Hq, D] or [B, Hq, T, D] as [B, Hkv, group, T, D]."""
    x = x if p.layout == "BNTH" else x.swapaxes(1, 2)
    return x.reshape(p.B, p.Hkv, p.group, p.T, x.shape[-1])


def join_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """The reverse of `split_heads`."""
    x = x.reshape(p.B, p.Hq, p.T, x.shape[-1])
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)


def join_key_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """[B, Hkv, S (padded), D] in the layout of the call, summed over a shared batch."""
    x = x[:, :, : p.S]
    x = x.sum(axis=0, keepdims=True) if p.Bkv < p.B else x
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)
