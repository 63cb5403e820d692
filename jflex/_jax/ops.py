"""The two passes of a backend, as steps that JAX's programs hold and XLA may split over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jflex import backends
from jflex._call.problem import Problem
from jflex._jax import partitioning
from jflex._jax.partitioning import Axes, Split
from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents, Wanted


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """``Inputs -> Saved``."""

    backend: str
    problem: Problem

    def __call__(self, inputs: Inputs) -> Saved:
        """Runs the backend."""
        return backends.get(self.backend).forward(self.problem, inputs)

    def axes(self, inputs: Inputs, saved: Saved) -> tuple[list[Axes], list[Axes]]:
        """Of the flat inputs and outputs."""
        return partitioning.input_axes(self.problem, inputs), partitioning.saved_axes(self.problem, saved)

    def partitioned(self, inputs: Inputs, saved: Saved, whole: Callable[..., Any]) -> Callable[..., Any]:
        """See `jflex._jax.primitive.Pass`."""
        tree = jax.tree.structure(inputs)

        def local(mesh: Any, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            shard = partitioning.shard_of(self.problem, jax.tree.unflatten(tree, flat), mesh, split)
            return tuple(ForwardPass(self.backend, shard.problem)(shard.inputs))

        return partitioning.partitioned(self.problem, whole, local, *self.axes(inputs, saved))

    def out_specs(self, inputs: Inputs, saved: Saved, spec: Any) -> list[Any]:
        """See `jflex._jax.primitive.Pass`."""
        return _out_specs(*self.axes(inputs, saved), jax.tree.leaves(saved), spec)


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """``(Inputs, Saved, cotangent of Saved) -> Gradients``."""

    backend: str
    problem: Problem
    wanted: Wanted

    def __call__(self, arrays: tuple[Inputs, Saved, SavedCotangents]) -> Gradients:
        """Runs the backend."""
        return backends.get(self.backend).backward(self.problem, *arrays, self.wanted)

    def axes(
        self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients
    ) -> tuple[list[Axes], list[Axes]]:
        """Of the flat inputs and outputs."""
        inputs, saved, d_saved = arrays
        ins = [
            *partitioning.input_axes(self.problem, inputs),
            *partitioning.saved_axes(self.problem, saved),
            *partitioning.saved_axes(self.problem, d_saved),
        ]
        return ins, partitioning.gradient_axes(self.problem, gradients)

    def partitioned(
        self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients, whole: Callable[..., Any]
    ) -> Callable[..., Any]:
        """See `jflex._jax.primitive.Pass`."""
        tree = jax.tree.structure(arrays)

        def local(mesh: Any, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            inputs, saved, d_saved = jax.tree.unflatten(tree, flat)
            shard = partitioning.shard_of(self.problem, inputs, mesh, split)
            asked = [False] * len(shard.inputs.score_operands)
            for number, want in zip(shard.operands, self.wanted.score_operands, strict=True):
                if number is not None:
                    asked[number] = want
            own = BackwardPass(self.backend, shard.problem, self.wanted._replace(score_operands=tuple(asked)))
            found = own((shard.inputs, saved, d_saved))
            captured = []
            for number, x in zip(shard.operands, gradients.score_operands, strict=True):
                if x is not None:
                    part = jnp.zeros(x.shape, x.dtype) if number is None else found.score_operands[number]
                    assert part is not None  # what is wanted of the whole was asked of the shard
                    captured.append(_sum(part, (*split.batch, *split.heads)))
            shared = split.batch if self.problem.Bkv < self.problem.B else ()
            keys = [_sum(x, shared) for x in (found.key, found.value) if x is not None]
            return (*([] if found.query is None else [found.query]), *keys, *captured)

        return partitioning.partitioned(self.problem, whole, local, *self.axes(arrays, gradients))

    def out_specs(self, arrays: tuple[Inputs, Saved, SavedCotangents], gradients: Gradients, spec: Any) -> list[Any]:
        """See `jflex._jax.primitive.Pass`."""
        return _out_specs(*self.axes(arrays, gradients), jax.tree.leaves(gradients), spec)


def _sum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, names) if names else x


def _out_specs(in_axes: Sequence[Axes], out_axes: Sequence[Axes], outputs: Sequence[Any], spec: Any) -> list[Any]:
    """Shardings of the outputs in a mesh with explicit axes, where types tell them."""
    named = lambda axis: () if spec[axis] is None else spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    split = Split(named(in_axes[0].batch), named(in_axes[0].heads))
    return [split.spec(axes, len(x.shape)) for axes, x in zip(out_axes, outputs, strict=True)]
