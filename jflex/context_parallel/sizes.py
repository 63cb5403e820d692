"""Sizes of a context parallel call, and the rules by which a mesh divides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from jflex._check.arguments import device_of
from jflex.context_parallel.order import Order, checked_order
from jflex.context_parallel.placement import Placement
from jflex.types import ArrayOrShape


class Sizes(NamedTuple):
    """Sizes of the whole call."""

    B: int
    T: int
    S: int
    Hkv: int

    @classmethod
    def from_arrays(cls, arrays: Sequence[ArrayOrShape], layout: str, placement: Placement) -> Sizes:
        """Sizes of checked arrays."""
        query, key, _ = arrays
        length, heads = (1, 2) if layout == "BTNH" else (2, 1)
        devices = placement.shards if placement.mesh is None else 1
        return cls(query.shape[0], query.shape[length] * devices, key.shape[length] * devices, key.shape[heads])

    def checked_order(self, order: ArrayLike, placement: Placement) -> Order:
        """The order, which must fit the tokens."""
        chunks = checked_order(order, placement.shards, self.T)
        if self.T != self.S:
            raise ValueError(
                f"`order` is that of queries and keys, which must be as many. Got {self.T} and {self.S}. Leave it out "
                "for attention to another sequence."
            )
        return chunks

    def check(self, placement: Placement, strategy: str) -> None:
        """Raises ValueError unless the mesh divides the sizes."""
        for name, size, what in (("query", self.T, "queries"), ("key", self.S, "keys")):
            if size % placement.shards:
                padded = -(-size // placement.shards) * placement.shards
                raise ValueError(
                    f"`{name}` has {size} {what}, which the {placement.shards} devices along {placement.axis!r} do "
                    f"not divide. Pad them to {padded}, as with `jnp.pad`, and mask the padding of keys (`kv_idx < "
                    f"{size}`)."
                )
        if self.B % placement.batch_shards:
            raise ValueError(
                f"`batch_axes` {placement.batch!r} has {placement.batch_shards} devices, which do not divide the batch "
                f"of {self.B}. Pad the batch, or name fewer axes."
            )
        if self.Hkv % placement.head_shards:
            raise ValueError(
                f"`head_axes` {placement.heads!r} has {placement.head_shards} devices, which do not divide the "
                f"{self.Hkv} key heads. Name fewer axes."
            )
        local_heads = self.Hkv // placement.head_shards
        if strategy == "ulysses" and local_heads % placement.shards:
            raise ValueError(
                f"`strategy='ulysses'` divides the key heads of a device, {local_heads}, among the {placement.shards} "
                f"devices along {placement.axis!r}; they do not divide. Pass strategy='all_gather' or 'ring'."
            )

    def whole(self, arrays: Sequence[ArrayOrShape], layout: str, placement: Placement) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the whole arrays, on a device of the mesh."""
        length = 1 if layout == "BTNH" else 2
        device = (
            placement.mesh.devices.flat[0] if isinstance(placement.mesh, jax.sharding.Mesh) else device_of(arrays[0])
        )
        sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
        lengths = (self.T, self.S, self.S)
        shape = lambda x, n: (*x.shape[:length], n, *x.shape[length + 1 :])
        return [
            jax.ShapeDtypeStruct(shape(x, n), x.dtype, sharding=sharding) for x, n in zip(arrays, lengths, strict=True)
        ]
