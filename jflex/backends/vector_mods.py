"""Vector mods applied: to the arrays of dense calls, to packed rows, and to rows that were loaded from pages.

In a dense call mods are applied to the arrays, before an implementation gets them and to what it returns. So every
implementation has them, and JAX differentiates them, with respect to the arrays that they capture too. Keys and values
in pages are not copied: there an implementation applies the mods to what it loads.

A mod sees its vector in float32, float64 of a float64 array, and its result is rounded once, to the dtype of the array.
It sees one vector alone: it cannot mix positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from jflex._mesh import leading_axes, partitioned_by_xla
from jflex.mods.signature import accept_numpy
from jflex.mods.trace import TracedMod, trace_vector_call
from jflex.mods.types import OutputMod, VectorMod


class TokenPositions(NamedTuple):
    """The positions of the queries and of the keys of a dense call; None where they count from 0."""

    queries: Int32[Array, " T"] | None = None
    keys: Int32[Array, " S"] | None = None


def modified_inputs(
    mods: Sequence[VectorMod | None],
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    layout: str,
    key_batch: int,  # batch size of the resulting keys and values: that of the query where a mod uses ``b``
    # keys beyond are replaced before the mods see them, since they may be NaN: a zero cotangent times the derivative of
    # NaN would be NaN, in the gradients of captured arrays
    kv_lengths: Int32[Array, " B"] | None,
    positions: TokenPositions | None = None,  # of queries and keys, where these do not count from 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of a dense call, as the mods make them."""
    query, key, value = arrays
    query_mod, key_mod, value_mod = mods
    positions = TokenPositions() if positions is None else positions
    if key_batch != key.shape[0]:
        key, value = (jnp.broadcast_to(x, (key_batch, *x.shape[1:])) for x in (key, value))
    used = None if kv_lengths is None else used_keys(key, layout, kv_lengths, positions.keys)
    dense = lambda mod, x, at: x if mod is None else _of_dense(mod, x, layout, at)
    clean = lambda mod, x: x if mod is None or used is None else jnp.where(used, x, jnp.ones_like(x))
    keys = lambda mod, x: dense(mod, clean(mod, x), positions.keys)
    return dense(query_mod, query, positions.queries), keys(key_mod, key), keys(value_mod, value)


def modified_output(
    mod: OutputMod,
    out: jax.Array,
    lse: Float[Array, "B Hq T"] | None,
    layout: str,
    positions: Int32[Array, " T"] | None = None,
) -> jax.Array:
    """The output of a dense call, as an ``output_mod`` makes it; `lse` is None where there is no softmax."""
    if lse is not None:
        lse = (lse.swapaxes(1, 2) if layout == "BTNH" else lse).astype(exact_dtype(out.dtype))
    return _of_dense(lambda x, *where: mod(*x, *where), (out, lse), layout, positions)


def modified_rows(
    mod: VectorMod | OutputMod | None,
    rows: Float[Array, "N H D"] | tuple[Float[Array, "N H D"], Float[Array, "N H"] | None],
    b: Int32[Array, " N"],
    idx: Int32[Array, " N"],
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Packed vectors, as a mod makes them; a pair of output and lse for an ``output_mod``.

    `b` is the sequence of each row, negative for padding, whose output is zeros.
    """
    is_output = isinstance(rows, tuple)
    first: jax.Array = rows[0] if is_output else rows
    dtype = first.dtype if dtype is None else dtype
    if mod is None:
        return first.astype(dtype)
    if is_output:
        rows = first, None if rows[1] is None else rows[1].astype(exact_dtype(dtype))
    call = (lambda x, *where: mod(*x, *where)) if is_output else mod
    heads = jnp.arange(first.shape[1], dtype=jnp.int32)
    modified = _mapped(call, dtype, ("bi", "h"))(rows, jnp.maximum(b, 0), heads, jnp.maximum(idx, 0))
    return jnp.where((b < 0)[:, None, None], jnp.zeros_like(modified), modified) if is_output else modified


def _of_dense(mod: Callable[..., Any], x: Any, layout: str, positions: Int32[Array, " T"] | None = None) -> jax.Array:
    """`mod` of every vector of an array of four axes, or of a pair of it and an array without the last."""
    first: jax.Array = jax.tree.leaves(x)[0]
    axes = ("b", "i", "h") if layout == "BTNH" else ("b", "h", "i")
    indices = {name: jnp.arange(first.shape[axis], dtype=jnp.int32) for axis, name in enumerate(axes)}
    if positions is not None:
        indices["i"] = positions
    return _mapped(mod, first.dtype, axes)(x, indices["b"], indices["h"], indices["i"])


def modified_keys(
    mod: Callable[..., jax.Array], rows: Float[Array, "*axes H D"], b: Int32[Array, "*axes"], idx: Int32[Array, "*axes"]
) -> jax.Array:
    """Keys or values that were loaded from pages, as a traced mod makes them; unused rows may be anything, and NaN."""
    call = _mapped(mod, rows.dtype, ("bi",) * b.ndim + ("h",))
    return call(rows, b, jnp.arange(rows.shape[-2], dtype=jnp.int32), idx)


def _mapped(mod: Callable[..., Any], dtype: DTypeLike, axes: Sequence[str]) -> Callable[..., jax.Array]:
    """`mod` over the leading axes of its first argument; each names the indices, of ``b, h, i``, that belong to it.

    Every index is mapped over its own axis alone, so that what depends on the position alone is computed once for all
    heads.
    """
    mod = accept_numpy(mod)

    def one(x: Any, b: jax.Array, h: jax.Array, i: jax.Array) -> jax.Array:
        return mod(jax.tree.map(lambda leaf: leaf.astype(exact_dtype(dtype)), x), b, h, i).astype(dtype)

    def call(x: jax.Array | tuple[jax.Array | None, ...], *indices: jax.Array) -> jax.Array:
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return _over_axes(one, axes)(x, *indices)
        leaves, tree = jax.tree.flatten(x)
        vectors = [jax.ShapeDtypeStruct(leaf.shape[len(axes) :], leaf.dtype) for leaf in leaves]
        traced, operands = trace_vector_call(lambda *args: one(tree.unflatten(args[:-3]), *args[-3:]), vectors)
        return _partitioned(traced, (*axes,), leaves, indices, operands)

    return call


def _over_axes(call: Callable[..., jax.Array], axes: Sequence[str], operands: int = 0) -> Callable[..., jax.Array]:
    """`call` over the axes that `_mapped` describes, with operands that have none of them."""
    for names in reversed(axes):
        of_indices = (0 if index in names else None for index in "bhi")
        call = jax.vmap(call, in_axes=(0, *of_indices, *[None] * operands))
    return call


@functools.partial(jax.jit, static_argnums=(0, 1))
def _partitioned(
    traced: TracedMod,
    axes: tuple[str, ...],
    x: list[jax.Array],
    indices: tuple[jax.Array, ...],
    operands: tuple[jax.Array, ...],
) -> jax.Array:
    """A mod over axes in a mesh with explicit axes, where it could index no array by an index that is sharded."""
    program = jaxpr_as_fun(traced.jaxpr)
    call = _over_axes(lambda x, *more: program(*x, *more)[0], axes, len(operands))
    return partitioned_by_xla(call, lambda: leading_axes(x[0], len(axes)))(x, *indices, *operands)


def used_keys(
    key: jax.Array, layout: str, kv_lengths: Int32[Array, " B"], positions: Int32[Array, " S"] | None = None
) -> Bool[Array, "#B S 1 1"]:
    """Keys before the length of their batch entry, or of the longest one where all share them."""
    shared = key.shape[0] != kv_lengths.shape[0]
    lengths = jnp.max(kv_lengths, initial=0, keepdims=True) if shared else kv_lengths
    axis = 1 if layout == "BTNH" else 2
    positions = jnp.arange(key.shape[axis], dtype=jnp.int32) if positions is None else positions
    return jnp.expand_dims(positions, [a for a in range(4) if a != axis]) < lengths[:, None, None, None]


def exact_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype of the vectors that a mod gets, from that of the array."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
