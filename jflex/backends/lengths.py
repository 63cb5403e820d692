"""`kv_lengths`, the number of keys of each batch entry, lowered to a mask.

A backend without support for lengths gets another spec: the mask compares `kv_idx` with the lengths, as one of its
captured arrays; the lists omit the blocks beyond a length; keys and values beyond are zeroed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Int8, Int32

from jflex.backends.base import Gradients, Inputs
from jflex.block_mask.lists import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockLists,
    block_count,
    demote_tails,
    lists_from_states,
    states_from_lists,
)
from jflex.mods.fingerprint import fingerprint
from jflex.mods.trace import TracedMod, trace_mask
from pallas_kernels.spec import AttentionSpec, Blocks

LENGTHS_BLOCK = 128  # queries and keys of a block, in lists made from lengths alone


@functools.lru_cache(maxsize=256)
def with_lengths_as_mask(spec: AttentionSpec, size: tuple[int, int] | None) -> AttentionSpec:
    """The spec in which mask and lists hide keys beyond the lengths; new lists have blocks of `size`; None: none."""
    blocks = spec.blocks
    if blocks is not None:
        blocks = Blocks(blocks.size, spec.B, blocks.heads)
    elif size is not None:
        blocks = Blocks(size, spec.B, 1)
    return spec.replace(mask_mod=_bounded_mask(spec), blocks=blocks, kv_lengths=False)


def bounded_inputs(spec: AttentionSpec, inputs: Inputs, size: tuple[int, int] | None) -> Inputs:
    """The inputs for `with_lengths_as_mask`; keys and values are unchanged (see `inputs_without_lengths`)."""
    lengths, lists = _lengths(inputs), inputs.lists
    size = size if spec.blocks is None else spec.blocks.size
    if size is not None:
        lists = bounded_lists(spec, lists, lengths, size)
    captured = inputs.captured._replace(mask=(*inputs.captured.mask, lengths))
    return inputs._replace(lists=lists, captured=captured, kv_lengths=None)


def bounded_lists(
    spec: AttentionSpec, lists: BlockLists | None, lengths: Int32[Array, " B"], size: tuple[int, int]
) -> BlockLists:
    """Lists, or all blocks without lists, up to the length of their batch entry; a block that it cuts is partial."""
    if lists is None:
        shape = (spec.T, spec.S)
        matrix = tuple(block_count(n, block) for n, block in zip(shape, size, strict=True))
        states = jnp.full((1, 1, *matrix), FULL if spec.mask_mod is None else PARTIAL, jnp.int8)
        states = demote_tails(states, shape, size)
    else:
        states = states_from_lists(lists)
    return lists_from_states(bounded_states(states, lengths, size[1]))


def bounded_states(states: Int8[Array, "b H R C"], lengths: Int32[Array, " B"], block: int) -> Int8[Array, "B H R C"]:
    """The matrix of states with blocks beyond a length made empty, and full blocks that it cuts made partial.

    >>> bounded_states(jnp.full((1, 1, 1, 3), FULL, jnp.int8), jnp.array([96, 70]), 32).tolist()
    [[[[2, 2, 2]]], [[[2, 2, 1]]]]
    """
    first = jnp.arange(states.shape[-1], dtype=jnp.int32)[None, None, None, :] * block
    lengths = lengths[:, None, None, None]
    most = jnp.where(first + block <= lengths, FULL, jnp.where(first < lengths, PARTIAL, EMPTY)).astype(jnp.int8)
    shape = jnp.broadcast_shapes(states.shape, most.shape)
    return jnp.minimum(jnp.broadcast_to(states, shape), jnp.broadcast_to(most, shape))


def spec_without_lengths(spec: AttentionSpec, size: tuple[int, int] | None) -> AttentionSpec:
    """An equivalent spec for a backend without support for lengths; the spec of a call that has none."""
    return with_lengths_as_mask(spec, size).replace(Bkv=spec.B) if spec.kv_lengths else spec


def inputs_without_lengths(spec: AttentionSpec, inputs: Inputs, size: tuple[int, int] | None) -> Inputs:
    """The inputs of `spec_without_lengths`. Its gradients of key and value are those of `sum_shared_batch`.

    Keys and values beyond the lengths are set to 0: NaN there would survive a weight of 0. Those that the batch shares
    are repeated, because each batch entry has its own length.
    """
    if not spec.kv_lengths:
        return inputs
    clear = functools.partial(cleared, spec, _lengths(inputs))
    return bounded_inputs(spec, inputs, size)._replace(key=clear(inputs.key), value=clear(inputs.value))


def cleared(spec: AttentionSpec, lengths: Int32[Array, " B"], x: jax.Array) -> jax.Array:
    """Keys or values, or their tangents, of each batch entry, with zeros beyond its length."""
    axis = 1 if spec.layout == "BTNH" else 2
    shape = [spec.B, 1, 1, 1]
    shape[axis] = spec.S
    inside = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < lengths[:, None, None, None]
    x = jnp.broadcast_to(x, (spec.B, *x.shape[1:]))
    return jnp.where(jnp.broadcast_to(inside, x.shape), x, jnp.zeros_like(x))


def sum_shared_batch(spec: AttentionSpec, gradients: Gradients) -> Gradients:
    """Gradients for `spec` from those of `spec_without_lengths`: sums those of shared keys and values."""
    if spec.Bkv == spec.B or not spec.kv_lengths:
        return gradients

    def sums(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.astype(spec.exact).sum(axis=0, keepdims=True).astype(x.dtype)

    return gradients._replace(key=sums(gradients.key), value=sums(gradients.value))


def _lengths(inputs: Inputs) -> jax.Array:
    assert inputs.kv_lengths is not None  # the spec has lengths
    return inputs.kv_lengths


def _bounded_mask(spec: AttentionSpec) -> TracedMod:
    """The mask of a spec and ``kv_idx < kv_lengths[b]``; the lengths are the last captured array."""
    mask = spec.mask_mod
    captured = () if mask is None else mask.operands

    def bounded(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, *operands: jax.Array) -> jax.Array:
        visible = kv_idx < operands[-1][b]
        if mask is None:
            return visible
        return visible & jaxpr_as_fun(mask.jaxpr)(b, h, q_idx, kv_idx, *operands[:-1])[0]

    operands = (*captured, ((spec.B,), "int32"))
    jaxpr = trace_mask(bounded, operands)
    source = "kv_lengths" if mask is None else mask.source
    return TracedMod("mask", fingerprint(jaxpr, differentiable=False), operands, jaxpr, source)
