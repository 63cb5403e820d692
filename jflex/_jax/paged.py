"""Paged calls under JAX's transformations: the operation of a backend, and the part of it that one device computes.

A device computes some heads, and the pages of each request that it holds.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jflex._call.dispatch import get_backend
from jflex._jax import partitioning
from jflex._jax.partitioning import Axes, BackendOp, Split
from jflex._jax.shard import Spread, Where, moved, moved_mods
from jflex.backends.base import PagedInputs, Saved
from jflex.mods.trace import VectorRole, trace_vector_mod
from pallas_kernels.spec import AttentionSpec, Mod

_ROWS, _PAGES = Axes(None, 1), Axes(None, 2, per_key=True)


class PagedOp(BackendOp[PagedInputs, Saved]):
    """``PagedInputs -> Saved``."""

    def __call__(self, inputs: PagedInputs) -> Saved:
        """Runs the backend."""
        return get_backend(self.backend).forward(self.spec, inputs)

    def axes(self, inputs: PagedInputs, outputs: Saved) -> tuple[list[Axes], list[Axes]]:
        """Axes of the flat inputs and outputs: heads alone, because requests share pages; those of MLA, heads too."""
        axes, rows = jax.tree.map(lambda _: Axes(), inputs), [_ROWS] * len(jax.tree.leaves(outputs))
        axes = axes._replace(query=_ROWS)
        if not self.spec.values_in_keys:  # which all query heads share
            of_heads = lambda x: None if x is None else Axes(None, x.ndim - 1, per_key=True)
            scales = {"key_scale": of_heads(inputs.key_scale), "value_scale": of_heads(inputs.value_scale)}
            axes = axes._replace(key=_PAGES, value=_PAGES, **scales)
        return partitioning.flat_axes(axes), rows

    def of_shard(self, inputs: PagedInputs, outputs: Saved, mesh: jax.sharding.Mesh, split: Split) -> Saved:
        """See `BackendOp`."""
        spec, pieces = self.spec, math.prod(mesh.shape[name] for name in split.heads)
        if pieces > 1:
            spec, inputs = paged_shard_of(spec, inputs, pieces, jax.lax.axis_index(split.heads))
        return PagedOp(self.backend, spec)(inputs)


def paged_shard_of(
    spec: AttentionSpec, inputs: PagedInputs, pieces: int, number: int | jax.Array, rows: Spread | None = None
) -> tuple[AttentionSpec, PagedInputs]:
    """The spec and the mods of the heads of one shard; mods still get global indices of heads, and of keys.

    `rows`: where the keys of this shard lie among those of a request; None if it has all.
    """
    head = lambda heads: None if pieces == 1 else number * (heads // pieces)
    first = Where(head=head(spec.Hq), keys=rows)
    mods, captured = moved_mods(spec, inputs.captured, first)
    key_heads = spec.Hkv if spec.values_in_keys else spec.Hkv // pieces
    first_key = Where(head=head(spec.Hkv), queries=rows)  # the index of a key is the last one of a vector mod
    key, key_operands = _moved_vector_mod(spec, spec.key_mod, inputs.captured.key, first_key)
    value, value_operands = _moved_vector_mod(spec, spec.value_mod, inputs.captured.value, first_key)
    local = spec.replace(Hq=spec.Hq // pieces, Hkv=key_heads, **mods, key_mod=key, value_mod=value)
    return local, inputs._replace(captured=captured._replace(key=key_operands, value=value_operands))


def _moved_vector_mod(
    spec: AttentionSpec, mod: Mod | None, operands: tuple[jax.Array, ...], first: Where
) -> tuple[Mod | None, tuple[jax.Array, ...]]:
    """A key or value mod that takes key heads and keys of one shard."""
    if mod is None:
        return None, operands
    role: VectorRole = "key" if mod.role == "key" else "value"
    size = spec.D if role == "key" else spec.Dv
    trace = functools.partial(trace_vector_mod, role=role, size=size, dtype=jnp.dtype(spec.exact))
    return moved(mod, operands, first, trace)
