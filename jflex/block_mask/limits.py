"""Limits of the rows of a mask, which kernels compare with instead of its captured arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Int32

from jflex._mesh import isolated_trace, varying_axes
from jflex.block_mask.lists import BlockLists
from jflex.mods.dependence import uses_index
from jflex.mods.fingerprint import fingerprint
from jflex.mods.trace import TracedMod, trace_mask
from pallas_kernels.row_limits import RowLimits, row_limits

MIN_ELEMENTS = 1 << 22  # of a mask: the sort behind limits takes as long as attention of fewer (not measured)
Mask = tuple[TracedMod, tuple[jax.Array, ...]]


def with_limits(
    mask: Mask, shape: tuple[int, int, int, int], lists: BlockLists, form: Mask | None = None
) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """A traced mask and its captured arrays, to which its limits are added if it has any, and two orders of `lists`.

    Rows and columns of blocks are started in these orders, those with most blocks first. `shape` is (B, H, T, S).
    `form` is the same mask in another form, of which the limits are derived.
    """
    (traced, operands), (form_traced, form_operands) = mask, form or mask
    T, S = shape[2:]
    if T * S < MIN_ELEMENTS or uses_index(form_traced, "h") or varying_axes(*form_operands):
        return mask
    batch = shape[0] if uses_index(form_traced, "b") else 1
    limits = _limits(form_traced, lax.stop_gradient(form_operands), batch, (T, S))
    if limits is None:
        return mask
    order = lambda *counts: jnp.argsort(-sum(counts), axis=-1).astype(jnp.int32)
    arrays = (*limits, order(lists[0], lists[2]), order(lists[4], lists[6]))
    added = tuple((x.shape, str(x.dtype)) for x in arrays)
    all_operands = (*traced.operands, *added)
    jaxpr = trace_mask(lambda *x: jaxpr_as_fun(traced.jaxpr)(*x[: -len(added)])[0], all_operands)
    key = fingerprint(jaxpr, differentiable=False)
    traced = dataclasses.replace(traced, fingerprint=key, operands=all_operands, jaxpr=jaxpr, limits=len(operands))
    return traced, (*operands, *arrays)


@jax.jit(static_argnames=("traced", "batch", "lengths"))
def _limits(
    traced: TracedMod, operands: tuple[jax.Array, ...], batch: int, lengths: tuple[int, int]
) -> RowLimits | None:
    """Limits [batch, 2, T] and [batch, 2, S]."""

    def of_entry(b: Int32[Array, ""]) -> RowLimits | None:
        return isolated_trace(row_limits)(traced, operands, b, batch, lengths)

    zero = jnp.zeros((), jnp.int32)
    if jax.eval_shape(of_entry, zero) is None:
        return None
    return jax.vmap(of_entry)(jnp.arange(batch, dtype=jnp.int32))
