"""The vector mods of a call of a layer."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

import jflex


class VectorMods(NamedTuple):
    """What a call makes of each query, key, value and output: the arguments of `jflex.flex_attention`.

    Example:
        >>> rope = jflex.rope(10000.0)
        >>> VectorMods(query_mod=rope, key_mod=rope).any
        True
    """

    query_mod: jflex.VectorMod | None = None
    key_mod: jflex.VectorMod | None = None
    value_mod: jflex.VectorMod | None = None
    output_mod: jflex.OutputMod | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(mod is not None for mod in self)

    def of_queries(self, first: Int32[Array, " B"]) -> VectorMods:
        """Those of queries and outputs, for queries whose positions begin at `first`."""
        move = lambda mod: None if mod is None else jflex.with_offset(mod, first)
        return VectorMods(query_mod=move(self.query_mod), output_mod=move(self.output_mod))

    def stored(
        self,
        key: Float[Array, "*rows H D"],
        value: Float[Array, "*rows H Dv"],
        positions: Int32[Array, "*rows"],
        requests: Int32[Array, "*rows"],
    ) -> tuple[Float[Array, "*rows H D"], Float[Array, "*rows H Dv"]]:
        """Keys and values as they are written into a cache, at their positions in the whole sequence."""

        def modified(mod: jflex.VectorMod | None, x: Array) -> Array:
            if mod is None:
                return x
            packed = x.reshape(-1, *x.shape[-2:])
            return jflex.apply_vector_mod(mod, packed, positions.reshape(-1), requests.reshape(-1)).reshape(x.shape)

        return modified(self.key_mod, key), modified(self.value_mod, value)

    def examples(self, head_dim: int) -> list[tuple[str, object, tuple[Array, ...]]]:
        """Name, mod and example arguments of each."""
        vector, index = jnp.zeros(head_dim), (jnp.int32(0),) * 3
        return [
            (name, mod, (vector, jnp.float32(0), *index) if name == "output_mod" else (vector, *index))
            for name, mod in self._asdict().items()
        ]
