"""Sizes of a context parallel call, and the rules by which a mesh divides them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jflex._check.arguments import device_of
from jflex.context_parallel.order import Order, checked_order
from jflex.context_parallel.placement import Placement


class Sizes(NamedTuple):
    """Sizes of the whole call."""

    B: int
    T: int
    S: int
    Hkv: int

    @classmethod
    def of(cls, arrays: list[Any], layout: str, place: Placement) -> Sizes:
        """Those of checked arrays."""
        query, key, _ = arrays
        length, heads = (1, 2) if layout == "BTNH" else (2, 1)
        own = place.shards if place.mesh is None else 1
        return cls(query.shape[0], query.shape[length] * own, key.shape[length] * own, key.shape[heads])

    def checked_order(self, order: Any, place: Placement) -> Order:
        """The order, which must fit the tokens."""
        chunks = checked_order(order, place.shards, self.T)
        if self.T != self.S:
            raise ValueError(
                f"`order` is that of queries and keys, which must be as many. Got {self.T} and {self.S}. Leave it out "
                "for attention to another sequence."
            )
        return chunks

    def check(self, place: Placement, strategy: str) -> None:
        """Raises ValueError unless the mesh divides the sizes."""
        for name, size, what in (("query", self.T, "queries"), ("key", self.S, "keys")):
            if size % place.shards:
                padded = -(-size // place.shards) * place.shards
                raise ValueError(
                    f"`{name}` has {size} {what}, which the {place.shards} devices along {place.axis!r} do not divide. "
                    f"Pad them to {padded}, as with `jnp.pad`, and mask the padding of keys (`kv_idx < {size}`)."
                )
        if self.B % place.batch_shards:
            raise ValueError(
                f"`batch_axes` {place.batch!r} has {place.batch_shards} devices, which do not divide the batch of "
                f"{self.B}. Pad the batch, or name fewer axes."
            )
        if self.Hkv % place.head_shards:
            raise ValueError(
                f"`head_axes` {place.heads!r} has {place.head_shards} devices, which do not divide the {self.Hkv} key "
                "heads. Name fewer axes."
            )
        own = self.Hkv // place.head_shards
        if strategy == "ulysses" and own % place.shards:
            raise ValueError(
                f"`strategy='ulysses'` divides the key heads of a device, {own}, among the {place.shards} devices "
                f"along {place.axis!r}; they do not divide. Pass strategy='all_gather' or 'ring'."
            )

    def whole(self, arrays: list[Any], layout: str, place: Placement) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the whole arrays, on a device of the mesh."""
        length = 1 if layout == "BTNH" else 2
        device = place.mesh.devices.flat[0] if isinstance(place.mesh, jax.sharding.Mesh) else device_of(arrays[0])
        sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
        lengths = (self.T, self.S, self.S)
        shape = lambda x, n: (*x.shape[:length], n, *x.shape[length + 1 :])
        return [
            jax.ShapeDtypeStruct(shape(x, n), x.dtype, sharding=sharding) for x, n in zip(arrays, lengths, strict=True)
        ]
