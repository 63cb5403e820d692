"""Checks a context parallel call and how a mesh divides its sizes; nothing is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jflex._call.checks import check_arrays
from jflex._check.arguments import checked_lengths, device_of
from jflex.block_mask.mask import BlockMask
from jflex.context_parallel.call import CALLER, STRATEGIES, ContextCall, Strategy, check_block_size
from jflex.context_parallel.masks import bounded_block_mask, bounded_mask_mod, own_block_mask, own_block_size
from jflex.context_parallel.order import Order, checked_order
from jflex.context_parallel.placement import Names, Placement
from jflex.entry import Call
from jflex.entry import prepare as prepare_dense
from jflex.errors import UnsupportedError
from jflex.mods.dependence import uses_index
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import MaskMod
from jflex.options import Settings
from jflex.types import AnyArray, ArrayOrShape
from pallas_kernels.spec import Blocks


class Checked(NamedTuple):
    """A checked call."""

    call: Call
    arrays: tuple[Any, Any, Any]
    context: ContextCall
    block_mask: BlockMask | None
    mask_mod: MaskMod | None
    kv_lengths: jax.Array | None
    traced: Callable[[BlockMask | None, MaskMod | None], Call]  # traces the mods anew with another mask

    @property
    def chunk(self) -> tuple[int, int]:
        """Queries and keys in a chunk."""
        spec, order = self.call.spec, self.context.order
        chunks = self.context.placement.shards if order is None else len(order)
        return spec.T // chunks, spec.S // chunks

    def blocks(self) -> Blocks | None:
        """The blocks of the mask that `masked` makes, before it is made."""
        spec = self.call.spec
        if self.block_mask is not None:
            blocks = spec.blocks
            assert blocks is not None  # of the BlockMask
            return blocks if self.kv_lengths is None else dataclasses.replace(blocks, batch=spec.B)
        size = own_block_size(self.chunk)
        if size is None or (self.mask_mod is None and self.kv_lengths is None):
            return None
        traced = None if self.mask_mod is None else trace_mask_mod(self.mask_mod)[0]
        uses_b, uses_h = (traced is not None and uses_index(traced, index) for index in ("b", "h"))
        return Blocks(size, spec.B if uses_b or self.kv_lengths is not None else 1, spec.Hq if uses_h else 1)

    def masked(self) -> tuple[Call, BlockMask | None]:
        """The call with the mask that is run, which hides the keys beyond the lengths, and its BlockMask."""
        if self.call.spec.is_empty:
            return self.call, None
        block_mask, mask_mod, lengths = self.block_mask, self.mask_mod, self.kv_lengths
        if lengths is not None:
            block_mask = None if block_mask is None else bounded_block_mask(block_mask, lengths)
            mask_mod = bounded_mask_mod(mask_mod, lengths) if block_mask is None else None
        if mask_mod is not None:
            spec = self.call.spec
            block_mask = own_block_mask(mask_mod, (spec.B, spec.Hq, spec.T, spec.S), self.chunk)
            mask_mod = mask_mod if block_mask is None else None
        if block_mask is self.block_mask and mask_mod is self.mask_mod:
            return self.call, block_mask
        return self.traced(block_mask, mask_mod), block_mask


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
        mesh = placement.mesh
        device = mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else device_of(arrays[0])
        sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
        lengths = (self.T, self.S, self.S)
        shape = lambda x, n: (*x.shape[:length], n, *x.shape[length + 1 :])
        return [
            jax.ShapeDtypeStruct(shape(x, n), x.dtype, sharding=sharding) for x, n in zip(arrays, lengths, strict=True)
        ]


class Division(NamedTuple):
    """Division of tokens, batch and heads among devices: arguments of `context_parallel_attention`."""

    mesh: Any = None
    axis: str = "context"
    batch_axes: Names = ()
    head_axes: Names = ()
    strategy: Strategy = "all_gather"
    order: ArrayLike | None = None


def prepare(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape,
    settings: Settings,
    division: Division,
    *,
    block_mask: BlockMask | None = None,
    kv_lengths: AnyArray | None = None,
    layout: str = "BTNH",
) -> Checked:
    """Checks every argument of `context_parallel_attention`; query, key and value may be shapes."""
    mesh, axis, batch_axes, head_axes, strategy, order = division
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(map(repr, STRATEGIES))}. Got {strategy!r}.")
    if strategy == "ring" and settings.config is not None and settings.config.forward_mode:
        raise UnsupportedError(
            "`strategy='ring'` has derivatives in reverse mode only, and `config` has forward_mode=True. Pass "
            "strategy='all_gather' or 'ulysses', or leave out `forward_mode`."
        )
    placement = Placement.from_mesh(mesh, axis, batch_axes, head_axes)
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (query, key, value)]
    check_arrays(arrays[0], arrays[1], arrays[2], layout)
    sizes = Sizes.from_arrays(arrays, layout, placement)
    order = None if order is None else sizes.checked_order(order, placement)
    sizes.check(placement, strategy)
    lengths = None if kv_lengths is None else checked_lengths(kv_lengths, sizes.B, sizes.S)
    q, k, v = sizes.whole(arrays, layout, placement)

    def traced(block_mask: BlockMask | None, mask_mod: MaskMod | None) -> Call:
        masked = settings._replace(mask_mod=mask_mod)
        call = prepare_dense(q, k, v, masked, block_mask=block_mask, kv_lengths=lengths, layout=layout)
        if call.spec.kv_lengths:  # the mask has them; keys of a shared batch are then those of each entry
            spec = call.spec.replace(kv_lengths=False, Bkv=call.spec.B)
            call = call._replace(spec=spec, inputs=call.inputs._replace(kv_lengths=None))
        return call._replace(caller=CALLER)

    call = traced(block_mask, settings.mask_mod)
    in_order = None if order is None else tuple(order.tolist())
    context = ContextCall(call.spec, placement, strategy, in_order, None)
    checked = Checked(call, (arrays[0], arrays[1], arrays[2]), context, block_mask, settings.mask_mod, lengths, traced)
    if block_mask is not None and strategy != "ulysses" and not call.spec.is_empty:
        check_block_size(block_mask, checked.chunk)
    return checked
