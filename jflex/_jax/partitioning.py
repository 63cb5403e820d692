"""Partitioning over batch, heads and queries under plain `jax.jit`.

XLA cannot see into kernels, and would gather everything. These rules tell its partitioner that batch, heads and queries
are independent, and give it the program of one shard, in which the mods still get global indices. Where queries are
divided, each device gets all keys, as in `jflex.context_parallel_attention(..., strategy="all_gather")`.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jflex._jax import shard
from jflex._jax.primitive import Flat, lower_separately
from jflex._jax.shard import Shard, Span, Where
from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.block_mask.lists import lists_of_rows
from pallas_kernels.spec import AttentionSpec

X = TypeVar("X")  # pytrees of arrays
Y = TypeVar("Y")


class Axes(NamedTuple):
    """The axes of batch, heads and queries in an array, if any; `per_key`: key heads, not query heads."""

    batch: int | None = None
    heads: int | None = None
    per_key: bool = False
    queries: int | None = None


def row_axes(spec: AttentionSpec) -> Axes:
    """Axes of query and output."""
    heads, queries = (2, 1) if spec.layout == "BTNH" else (1, 2)
    return Axes(0, heads, queries=queries)


def key_axes(spec: AttentionSpec) -> Axes:
    """Axes of key and value."""
    return Axes(0 if spec.Bkv == spec.B else None, row_axes(spec).heads, per_key=True)


def input_axes(spec: AttentionSpec, inputs: Inputs) -> list[Axes]:
    """Axes of all inputs, flat."""
    blocks, keys = spec.blocks, key_axes(spec)
    lists = Axes()
    if blocks is not None:
        lists = Axes(0 if blocks.batch == spec.B else None, 1 if blocks.heads == spec.Hq else None)
    every = lambda axes, arrays: jax.tree.map(lambda _: axes, arrays)
    return flat_axes(
        inputs._replace(
            query=row_axes(spec),
            key=keys,
            value=keys,
            lists=every(lists, inputs.lists),
            captured=every(Axes(), inputs.captured),
            kv_lengths=every(Axes(0), inputs.kv_lengths),
            sinks=every(Axes(None, 0), inputs.sinks),
        )
    )


def flat_axes(tree: object) -> list[Axes]:
    """Axes in the order of the leaves of the arrays that have them."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Axes))


def saved_axes(spec: AttentionSpec, saved: Saved | SavedCotangents) -> list[Axes]:
    """Axes of output and row statistics, or of their cotangents, flat."""
    return [row_axes(spec), *(Axes(0, 1, queries=2) for _ in jax.tree.leaves(saved[1:]))]


def gradient_axes(spec: AttentionSpec, gradients: Gradients) -> list[Axes]:
    """Axes of the requested gradients, flat."""
    keys = key_axes(spec)
    axes = (row_axes(spec), keys, keys, *(Axes() for _ in gradients.score_operands), Axes(None, 0))
    arrays = (*gradients[:3], *gradients.score_operands, gradients.sinks)
    return [axes_of_x for x, axes_of_x in zip(arrays, axes, strict=True) if x is not None]


class Split(NamedTuple):
    """Names of the mesh axes over which batch, heads and queries are split."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...] = ()

    def pspec(self, axes: Axes, ndim: int) -> PartitionSpec:
        """The sharding of an array."""
        names: list[tuple[str, ...] | None] = [None] * ndim
        for axis, split in ((axes.batch, self.batch), (axes.heads, self.heads), (axes.queries, self.queries)):
            if axis is not None and split:
                names[axis] = split
        return PartitionSpec(*names)


def shard_of(spec: AttentionSpec, inputs: Inputs, mesh: jax.sharding.Mesh, split: Split) -> Shard:
    """The local spec and inputs, inside the program of one shard."""
    pieces = [math.prod(mesh.shape[name] for name in names) for names in split]
    batch, head, query = (
        jax.lax.axis_index(names) * (size // n) if n > 1 else None
        for names, size, n in zip(split, (spec.B, spec.Hq, spec.T), pieces, strict=True)
    )
    if query is None:
        return shard.shard_of(spec, inputs, Where(batch, head))
    T = spec.T // pieces[2]
    if inputs.lists is not None and spec.blocks is not None:
        size = spec.blocks.size[0]
        inputs = inputs._replace(lists=lists_of_rows(inputs.lists, query // size, T // size))
    return shard.shard_of(spec, inputs, Where(batch, head, Span(query[None], T)))


@dataclasses.dataclass(frozen=True)
class BackendOp(Generic[X, Y]):
    """A pass of a backend that divides batch, heads and queries: an `Op` of `jflex._jax.primitive`."""

    backend: str
    spec: AttentionSpec

    def axes(self, arrays: X, results: Y) -> tuple[list[Axes], list[Axes]]:
        """Axes of the flat arrays, the query first, and of the flat results."""
        raise NotImplementedError

    def of_shard(self, arrays: X, results: Y, mesh: jax.sharding.Mesh, split: Split) -> Y:
        """Computes one shard, from its arrays; `results` are shapes of the whole call."""
        raise NotImplementedError

    def partitioned(self, arrays: X, results: Y, whole: Flat) -> Flat:
        """Lets XLA's partitioner run `of_shard` on each shard."""
        call, tree = custom_partitioning(whole), jax.tree.structure(arrays)
        in_axes, out_axes = self.axes(arrays, results)

        def partition(mesh, in_shapes, out_shapes):
            query, key, value = (x.sharding for x in in_shapes[:3])
            split = _split(self.spec, mesh, in_shapes[0].sharding, in_axes[0])
            divided = next(filter(None, (_divided_tokens(self.spec, x) for x in (query, key, value))), None)
            if divided is not None and not split.queries:
                warnings.warn(f"Every device gathers and computes all tokens. {divided}", stacklevel=2)
            sharding = lambda x, axes: NamedSharding(mesh, split.pspec(axes, len(x.shape)))
            out_shardings = tuple(map(sharding, jax.tree.leaves(out_shapes), out_axes))
            local = lambda *xs: jax.tree.leaves(self.of_shard(jax.tree.unflatten(tree, xs), results, mesh, split))

            def without_mesh(*xs: jax.Array) -> tuple[jax.Array, ...]:
                # A mesh with explicit axes would put shardings into a shard's program.
                with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                    return lower_separately(local, *xs)

            return mesh, without_mesh, out_shardings, tuple(map(sharding, in_shapes, in_axes))

        def rule(mesh, in_types, out_types):
            ranks = ([len(t.shape) for t in types] for types in (in_types, out_types))
            return _shardy_rule(self.spec, in_axes, out_axes, *ranks)

        call.def_partition(partition, sharding_rule=rule)
        return call

    def out_specs(self, arrays: X, results: Y, pspec: PartitionSpec) -> list[PartitionSpec]:
        """Shardings of the results in a mesh with explicit axes, which are part of their types, from the query's."""

        def names(axis: int | None) -> tuple[str, ...]:
            entry = None if axis is None else pspec[axis]
            return () if entry is None else entry if isinstance(entry, tuple) else (entry,)

        (query, *_), out_axes = self.axes(arrays, results)
        split = Split(names(query.batch), names(query.heads))
        return [split.pspec(axes, len(x.shape)) for axes, x in zip(out_axes, jax.tree.leaves(results), strict=True)]


def refuse_divided_tokens(spec: AttentionSpec, *arrays: jax.Array) -> None:
    """Raises ValueError if types, those of a mesh with explicit axes, say that tokens are divided among devices."""
    for x in arrays:
        divided = _divided_tokens(spec, jax.typeof(x).sharding)
        if divided is not None:
            raise ValueError(f"`query`, `key` and `value` must have all their tokens on each device. {divided}")


def _divided_tokens(spec: AttentionSpec, sharding: NamedSharding | None) -> str | None:
    """Says over which axes the tokens of an array of a dense call are divided, and what to do; None if they are not."""
    pspec, axis = getattr(sharding, "spec", ()), 1 if spec.layout == "BTNH" else 2
    entry = pspec[axis] if spec.paging is None and axis < len(pspec) else None
    names = (entry,) if isinstance(entry, str) else entry
    if sharding is None or not names or all(sharding.mesh.shape[name] == 1 for name in names):
        return None
    return (
        f"They are sharded over {', '.join(map(repr, names))}. To divide the work, call "
        f"`jflex.context_parallel_attention(..., mesh=mesh, axis={names[0]!r})`."
    )


def _split(spec: AttentionSpec, mesh: jax.sharding.Mesh, sharding: NamedSharding | None, axes: Axes) -> Split:
    """Sharding of the query; an axis is kept only if batch, key heads, or blocks of queries divide evenly."""
    pspec = getattr(sharding, "spec", ())
    names = []
    block = 1 if spec.blocks is None else spec.blocks.size[0]
    queries = spec.T // block if spec.T % block == 0 else 1
    for axis, size in ((axes.batch, spec.B), (axes.heads, spec.heads_to_divide), (axes.queries, queries)):
        entry = pspec[axis] if axis is not None and axis < len(pspec) else None
        entry = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        names.append(entry if size % math.prod(mesh.shape[name] for name in entry) == 0 else ())
    return Split(*names)


def _shardy_rule(
    spec: AttentionSpec,
    in_axes: Sequence[Axes],
    out_axes: Sequence[Axes],
    in_ranks: Sequence[int],
    out_ranks: Sequence[int],
) -> tuple[str, dict[str, int | tuple[str, ...]]]:
    """The rule in Shardy's notation: batch, key heads and queries are shared factors, others must not be sharded."""
    others: list[str] = []
    group = spec.Hq // spec.heads_to_divide
    grouped = "(g r)" if group > 1 else "g"

    def describe(axes: Axes, rank: int) -> str:
        factors = []
        for axis in range(rank):
            if axis == axes.batch:
                factors.append("b")
            elif axis == axes.heads:
                factors.append("g" if axes.per_key else grouped)
            elif axis == axes.queries:
                factors.append("t")
            else:
                others.append(f"x{len(others)}")
                factors.append(others[-1])
        return " ".join(factors)

    arrays = lambda axes, ranks: ", ".join(map(describe, axes, ranks))
    text = f"{arrays(in_axes, in_ranks)} -> {arrays(out_axes, out_ranks)}"
    return text, ({"r": group} if group > 1 else {}) | {"need_replication_factors": tuple(others)}
