"""Adding at positions that repeat, in a fixed order: XLA's scatter on a GPU adds by atomics, in any."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ordered_add(x: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """``x.at[positions].add(values, mode="drop")``, with the same bits in each run.

    Sorts the positions, which keeps the order of equal ones, sums each run of them by a segmented scan (Blelloch 1990,
    Prefix Sums and Their Applications, section 1.5), and adds one sum to each element.

    `x` is [n], `positions` int32 [m], and `values` [m]; a position outside of the array, or below 0, is dropped.

    >>> ordered_add(jnp.zeros(3), jnp.array([2, 0, 2, 7, -1]), jnp.arange(1.0, 6.0)).tolist()
    [2.0, 0.0, 4.0]
    """
    order = jnp.argsort(positions, stable=True)
    positions, values = positions[order], values[order]
    differs = positions[1:] != positions[:-1]
    yes = jnp.ones((min(1, positions.size),), bool)
    begins, ends = jnp.concatenate([yes, differs]), jnp.concatenate([differs, yes])

    def combine(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    _, sums = lax.associative_scan(combine, (begins, values))
    inside = ends & (positions >= 0) & (positions < x.size)
    return x.at[jnp.where(inside, positions, x.size)].add(jnp.where(inside, sums, 0), mode="drop")


def flat_positions(at: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
    """Indices of an array as positions in it, flattened, as `jax.numpy` understands them; -1 for those outside."""
    position, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for i, size in zip(at, shape, strict=True):
        i = jnp.where(i < 0, i + size, i)
        position, inside = position * size + i, inside & (i >= 0) & (i < size)
    return jnp.where(inside, position, -1).reshape(-1)
