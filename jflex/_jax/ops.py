"""The passes of a backend as operations for `call_as_primitive`, which XLA may partition over devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jflex import backends
from jflex._jax import partitioning
from jflex._jax.paged_shard import paged_shard_of
from jflex._jax.partitioning import Axes, Split
from jflex._jax.primitive import Flat
from jflex.backends.base import Gradients, Inputs, PagedInputs, Saved, SavedCotangents
from jflex.backends.results import sinks_gradient
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ForwardOp:
    """``Inputs -> Saved``."""

    backend: str
    spec: AttentionSpec

    def __call__(self, inputs: Inputs) -> Saved:
        """Runs the backend."""
        return backends.get(self.backend).forward(self.spec, inputs)

    def axes(self, inputs: Inputs, saved: Saved) -> tuple[list[Axes], list[Axes]]:
        """Batch and head axes of the flat inputs and outputs."""
        return partitioning.input_axes(self.spec, inputs), partitioning.saved_axes(self.spec, saved)

    def partitioned(self, inputs: Inputs, saved: Saved, whole: Flat) -> Flat:
        """See `jflex._jax.primitive.Op`."""
        tree = jax.tree.structure(inputs)

        def local(mesh: jax.sharding.Mesh, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            shard = partitioning.shard_of(self.spec, jax.tree.unflatten(tree, flat), mesh, split)
            return tuple(jax.tree.leaves(ForwardOp(self.backend, shard.spec)(shard.inputs)))

        return partitioning.partitioned(self.spec, whole, local, *self.axes(inputs, saved))

    def out_specs(self, inputs: Inputs, saved: Saved, pspec: PartitionSpec) -> list[PartitionSpec]:
        """See `jflex._jax.primitive.Op`."""
        return _out_specs(*self.axes(inputs, saved), jax.tree.leaves(saved), pspec)


@dataclasses.dataclass(frozen=True)
class BackwardOp:
    """``(Inputs, Saved, cotangent of Saved) -> Gradients``."""

    backend: str
    spec: AttentionSpec
    requested: GradientRequest

    def __call__(self, arrays: tuple[Inputs, Saved, SavedCotangents]) -> Gradients:
        """Runs the backend; sinks have their gradient here, the same for all."""
        gradients = backends.get(self.backend).backward(self.spec, *arrays, self.requested)
        if not self.requested.sinks:
            return gradients
        inputs, saved, d_saved = arrays
        assert inputs.sinks is not None  # their gradient is requested
        return gradients._replace(sinks=sinks_gradient(self.spec, inputs.sinks, saved, d_saved))

    def axes(
        self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients
    ) -> tuple[list[Axes], list[Axes]]:
        """Batch and head axes of the flat inputs and outputs."""
        inputs, saved, d_saved = arrays
        ins = [
            *partitioning.input_axes(self.spec, inputs),
            *partitioning.saved_axes(self.spec, saved),
            *partitioning.saved_axes(self.spec, d_saved),
        ]
        return ins, partitioning.gradient_axes(self.spec, gradients)

    def partitioned(self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients, whole: Flat) -> Flat:
        """See `jflex._jax.primitive.Op`."""
        tree = jax.tree.structure(arrays)

        def local(mesh: jax.sharding.Mesh, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            inputs, saved, d_saved = jax.tree.unflatten(tree, flat)
            shard = partitioning.shard_of(self.spec, inputs, mesh, split)
            local_op = BackwardOp(self.backend, shard.spec, shard.requested(self.requested))
            gradients_of_shard = local_op((shard.inputs, saved, d_saved))
            captured = []
            for number, x in zip(shard.operands, gradients.score_operands, strict=True):
                if x is not None:
                    part = jnp.zeros(x.shape, x.dtype) if number is None else gradients_of_shard.score_operands[number]
                    assert part is not None  # a shard has the same requested gradients as the whole
                    captured.append(_sum(part, (*split.batch, *split.heads, *split.queries)))
            shared = (*(split.batch if self.spec.Bkv < self.spec.B else ()), *split.queries)
            keys = [_sum(x, shared) for x in (gradients_of_shard.key, gradients_of_shard.value) if x is not None]
            sinks = (
                []
                if gradients_of_shard.sinks is None
                else [_sum(gradients_of_shard.sinks, (*split.batch, *split.queries))]
            )
            return (*([] if gradients_of_shard.query is None else [gradients_of_shard.query]), *keys, *captured, *sinks)

        return partitioning.partitioned(self.spec, whole, local, *self.axes(arrays, gradients))

    def out_specs(
        self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients, pspec: PartitionSpec
    ) -> list[PartitionSpec]:
        """See `jflex._jax.primitive.Op`."""
        return _out_specs(*self.axes(arrays, gradients), jax.tree.leaves(gradients), pspec)


def _sum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, names) if names else x


def _out_specs(
    in_axes: Sequence[Axes], out_axes: Sequence[Axes], outputs: Sequence[jax.ShapeDtypeStruct], pspec: PartitionSpec
) -> list[PartitionSpec]:
    """Shardings of the outputs in a mesh with explicit axes, which are part of their types."""
    names = lambda entry: () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    split = Split(names(pspec[in_axes[0].batch]), names(pspec[in_axes[0].heads]))
    return [split.pspec(axes, len(x.shape)) for axes, x in zip(out_axes, outputs, strict=True)]


_ROWS, _PAGES = Axes(None, 1), Axes(None, 2, per_key=True)


@dataclasses.dataclass(frozen=True)
class PagedOp:
    """``PagedInputs -> Saved``."""

    backend: str
    spec: AttentionSpec

    def __call__(self, inputs: PagedInputs) -> Saved:
        """Runs the backend."""
        return backends.get(self.backend).forward(self.spec, inputs)

    def axes(self, inputs: PagedInputs, outputs: Saved) -> tuple[list[Axes], list[Axes]]:
        """Axes of the flat inputs and outputs: heads alone, because requests share pages; those of MLA, heads too."""
        axes, rows = jax.tree.map(lambda _: Axes(), inputs), [_ROWS] * len(jax.tree.leaves(outputs))
        axes = axes._replace(query=_ROWS)
        if not self.spec.values_in_keys:  # which all query heads share
            of_heads = lambda x: None if x is None else Axes(None, x.ndim - 1, per_key=True)
            scales = {"key_scale": of_heads(inputs.key_scale), "value_scale": of_heads(inputs.value_scale)}
            axes = axes._replace(key=_PAGES, value=_PAGES, **scales)
        return partitioning.flat_axes(axes), rows

    def partitioned(self, inputs: PagedInputs, outputs: Saved, whole: Flat) -> Flat:
        """See `jflex._jax.primitive.Op`."""
        tree = jax.tree.structure(inputs)

        def local(mesh: jax.sharding.Mesh, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            spec, local_inputs = _paged_shard_of(self.spec, jax.tree.unflatten(tree, flat), mesh, split.heads)
            return tuple(jax.tree.leaves(PagedOp(self.backend, spec)(local_inputs)))

        return partitioning.partitioned(self.spec, whole, local, *self.axes(inputs, outputs))

    def out_specs(self, inputs: PagedInputs, outputs: Saved, pspec: PartitionSpec) -> list[PartitionSpec]:
        """See `jflex._jax.primitive.Op`."""
        names = () if pspec[1] is None else pspec[1] if isinstance(pspec[1], tuple) else (pspec[1],)
        split = Split((), names)
        return [split.pspec(_ROWS, len(x.shape)) for x in jax.tree.leaves(outputs)]


def _paged_shard_of(
    spec: AttentionSpec, inputs: PagedInputs, mesh: jax.sharding.Mesh, names: tuple[str, ...]
) -> tuple[AttentionSpec, PagedInputs]:
    """The spec of the heads of one shard, inside its program; mods still get global head indices."""
    pieces = math.prod(mesh.shape[name] for name in names)
    if pieces == 1:
        return spec, inputs
    number = jax.lax.axis_index(names)
    return paged_shard_of(spec, inputs, pieces, number)
