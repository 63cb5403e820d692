"""Attention of a layer to sequences whose tokens are divided among devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import jflex


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """The arguments of `jflex.context_parallel_attention` that say how tokens are divided; the same for all layers.

    Inputs of a layer, and positions that it is given, are in `order`. Masks, score mods and vector mods get positions
    in the natural order.

    Attributes:
        mesh: The mesh of the devices.
        axis: Its axis that divides the tokens.
        batch_axes: Its axes that divide the batch.
        head_axes: Its axes that divide the heads.
        strategy: ``"all_gather"``, or another one of `jflex.context_parallel_attention`.
        order: The order of the tokens, a permutation of chunks; None: the natural one.

    Example:
        >>> mesh = jax.make_mesh((1,), ("context",))
        >>> order = tuple(jflex.context_parallel.zigzag_order(1).tolist())
        >>> ContextParallel(mesh, order=order).positions(8).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    mesh: jax.sharding.Mesh
    axis: str = "context"
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    strategy: str = "all_gather"
    order: tuple[int, ...] | None = None

    def positions(self, length: int) -> Int[Array, " T"]:
        """The position of each token of a sequence of that length."""
        if self.order is None:
            return jnp.arange(length, dtype=jnp.int32)
        return jnp.asarray(jflex.context_parallel.positions(np.array(self.order), length))

    def chunk(self, length: int) -> int:
        """Tokens of a chunk. A sequence is cut into equal chunks, and a device holds one or more of them."""
        return length // (self.mesh.shape[self.axis] if self.order is None else len(self.order))

    def arguments(self) -> dict[str, Any]:
        """The arguments for `jflex.context_parallel_attention`."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return named | {"order": None if self.order is None else np.array(self.order)}
