"""`context_parallel_attention`: checks a call, divides it among the devices of a mesh, and runs a strategy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jflex._call.checks import check_arrays, check_lse, device_of
from jflex._call.dispatch import Implementation
from jflex._jax.shard import Where
from jflex.attention import Call, attend, prepare
from jflex.backends.base import Inputs, Saved
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.context_parallel.call import (
    CALLER,
    STRATEGIES,
    ContextCall,
    Strategy,
    check_block_size,
    divided,
    own_block_mask,
)
from jflex.context_parallel.gather import attend_gathered
from jflex.context_parallel.order import Order, checked_order
from jflex.context_parallel.placement import Names, Placement
from jflex.context_parallel.ring import attend_in_ring
from jflex.context_parallel.ulysses import attend_exchanged
from jflex.mods.types import MaskMod, ScoreMod
from jflex.types import AnyArray, Key, Lse, Out, Query, Value


# Return types, by `return_lse`.
# fmt: off
@overload
def context_parallel_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None, mesh: Any = None, axis: str = "context",
    batch_axes: Names = (), head_axes: Names = (), strategy: Strategy = "all_gather", order: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax", sinks: AnyArray | None = None, scale: float | None = None,
    layout: str = "BTNH", return_lse: Literal[False] = False, dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> Array: ...
@overload
def context_parallel_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None, mesh: Any = None, axis: str = "context",
    batch_axes: Names = (), head_axes: Names = (), strategy: Strategy = "all_gather", order: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax", sinks: AnyArray | None = None, scale: float | None = None,
    layout: str = "BTNH", return_lse: Literal[True], dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, Array]: ...
@overload
def context_parallel_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None, mesh: Any = None, axis: str = "context",
    batch_axes: Names = (), head_axes: Names = (), strategy: Strategy = "all_gather", order: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax", sinks: AnyArray | None = None, scale: float | None = None,
    layout: str = "BTNH", return_lse: bool, dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> Array | tuple[Array, Array]: ...
# fmt: on
def context_parallel_attention(
    query: Query,
    key: Key,
    value: Value,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    *,
    mask_mod: MaskMod | None = None,
    mesh: Any = None,
    axis: str = "context",
    batch_axes: Names = (),
    head_axes: Names = (),
    strategy: Strategy = "all_gather",
    order: Int[AnyArray, " chunks"] | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: Float[AnyArray, " Hq"] | None = None,
    scale: float | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None,
    implementation: Implementation = None,
    config: Config | None = None,
) -> Out | tuple[Out, Lse]:
    """`flex_attention` of sequences whose tokens are divided among the devices of a mesh.

    The result is that of one device: mods see absolute positions, and gradients flow into query, key, value, sinks and
    every floating-point array that `score_mod` captures. Each device returns the output of its own queries. What
    differs is how they meet the keys of others:

    * ``"all_gather"``: every device gets all keys and values. The gradients of these are summed by a reduce-scatter.
    * ``"ring"``: keys and values pass from device to device, and states are merged. Memory for them does not grow with
      the number of devices. A device computes nothing at a step whose keys it does not attend to; a step at which no
      device does is left out if the mask is known while tracing.
    * ``"ulysses"``: an all-to-all gives every device all tokens of some heads, and another one brings the output back.

    Outside of `jax.shard_map` the arrays are whole, with an axis of tokens sharded over `axis`, and captured arrays are
    whole on each device. Inside of one, with `mesh` None, arrays are those of the shard, and mods get its indices of
    batch and heads; positions, `block_mask` and `order` are those of the whole sequence all the same.

    Args:
      query: In `layout`.
      key: In `layout`; as in `flex_attention`.
      value: In `layout`.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, at absolute positions.
      block_mask: Of the whole sequence, its tokens in their natural order, whatever `order` is. Its blocks must divide
        the chunks of `order`, or without one the tokens of a device; for ``"ulysses"`` any do.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, at absolute positions, in place of a BlockMask. The call makes one of
        it, in blocks of the largest power of two that divides the chunks, 128 at most; below 16 it evaluates the mask
        everywhere.
      mesh: The mesh; None for that of `jax.set_mesh`, or of the enclosing `jax.shard_map`.
      axis: Its axis that divides the tokens. The lengths must be multiples of its size.
      batch_axes: Its axes that divide the batch, a name or a sequence; outside of `jax.shard_map` only. What is divided
        over an axis that no argument names is gathered.
      head_axes: Its axes that divide the heads, likewise.
      strategy: ``"all_gather"``, ``"ring"`` or ``"ulysses"``. For ``"ulysses"`` the key heads of a device must be a
        multiple of the size of `axis`.
      order: The order of the tokens in query, key and value: a permutation of chunks, known while tracing, as from
        `jflex.context_parallel.zigzag_order`. None for the natural order.
      normalize: As in `flex_attention`.
      sinks: As in `flex_attention`.
      scale: As in `flex_attention`.
      layout: As in `flex_attention`.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      dropout_rate: As in `flex_attention`.
      dropout_key: Likewise. Outside of `jax.shard_map`, what is dropped does not depend on the mesh.
      implementation: As in `flex_attention`, of the kernels of each device. With ``"ring"``, ``"reference"`` stores the
        weights of all steps for its derivatives.
      config: As in `flex_attention`.

    Returns:
      The output in `layout` and the dtype of `query`, in the order of its tokens, and sharded like it; or a pair of it
      and the lse [B, Hq, T].

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: Shapes disagree, the mesh lacks an axis, lengths or heads do not divide, `order` is no permutation, or
        a ready mod was made for other sizes.
      UnsupportedError: No requested backend supports the call of a device; the message gives the reason of each.

    References:
      Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2 (all-gather, zigzag); Liu et
      al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889; Jacobs et al. 2023, DeepSpeed Ulysses,
      arXiv:2309.14509.

    >>> import jflex
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 256, 4, 32))
    >>> order = jflex.context_parallel.zigzag_order(1)
    >>> reordered = (jflex.context_parallel.reorder(x, order) for x in (query, key, value))
    >>> out = context_parallel_attention(
    ...     *reordered, mask_mod=jflex.masks.causal(), mesh=mesh, strategy="ring", order=order)
    >>> whole = jflex.flex_attention(query, key, value, mask_mod=jflex.masks.causal())
    >>> bool(jnp.allclose(jflex.context_parallel.restore(out, order), whole, atol=1e-5))
    True
    """
    check_lse(return_lse, normalize)
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(map(repr, STRATEGIES))}. Got {strategy!r}.")
    place = Placement.of(mesh, axis, batch_axes, head_axes)
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (query, key, value)]
    check_arrays(arrays[0], arrays[1], arrays[2], layout)
    sizes = _Sizes.of(arrays, layout, place)
    order = None if order is None else sizes.checked_order(order, place)
    sizes.check(place, strategy)
    shapes = sizes.whole(arrays, layout, place)
    checked = functools.partial(
        prepare, *shapes, score_mod, kv_lengths=None, normalize=normalize, sinks=sinks, scale=scale, layout=layout,
        dropout_rate=dropout_rate, dropout_key=dropout_key, config=config,
    )  # fmt: skip
    call = checked(block_mask, mask_mod=mask_mod)
    chunks = place.shards if order is None else len(order)
    chunk = sizes.T // chunks, sizes.S // chunks
    if block_mask is not None and strategy != "ulysses" and not call.spec.is_empty:
        check_block_size(block_mask, chunk)
    if mask_mod is not None and not call.spec.is_empty:
        block_mask = own_block_mask(mask_mod, (call.spec.B, call.spec.Hq, sizes.T, sizes.S), chunk)
        call = call if block_mask is None else checked(block_mask, mask_mod=None)
    saved = _run(call, arrays, block_mask, place, strategy, order, implementation)
    return (saved.out, saved.lse) if return_lse else saved.out


class _Sizes(NamedTuple):
    """Sizes of the whole call."""

    B: int
    T: int
    S: int
    Hkv: int

    @classmethod
    def of(cls, arrays: list[Any], layout: str, place: Placement) -> _Sizes:
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


def _run(
    call: Call,
    arrays: list[Any],
    block_mask: BlockMask | None,
    place: Placement,
    strategy: Strategy,
    order: Order | None,
    implementation: Implementation,
) -> Saved:
    """Runs a checked call on each device."""
    if call.spec.is_empty:  # zeros, which need no device
        local = call.spec if place.mesh is not None else dataclasses.replace(call.spec, T=call.spec.T // place.shards)
        return attend(CALLER, call._replace(spec=local), implementation)
    tables = divided(block_mask, strategy, place.shards, order)
    known = tuple(map(tuple, tables.sees.tolist())) if isinstance(tables.sees, np.ndarray) else None
    named = implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
    in_order = None if order is None else tuple(order.tolist())
    context = ContextCall(call.spec, place, strategy, in_order, named, known)
    query, key, value = arrays
    inputs = call.inputs._replace(query=query, key=key, value=value, lists=tables.lists)
    sees = None if tables.sees is None else jnp.asarray(tables.sees)
    if place.mesh is None:
        return _on_device(context, *_own_tables(inputs, sees, place, strategy))
    return _on_mesh(context, inputs, sees)


@functools.partial(jax.jit, static_argnums=0)
def _on_mesh(call: ContextCall, inputs: Inputs, sees: jax.Array | None) -> Saved:
    """Runs the program of one device on each; under `jax.jit`, without which JAX maps no `jax.custom_vjp`."""
    place = call.placement
    specs = _specs(call, inputs), None if sees is None else PartitionSpec(place.axis)
    body = functools.partial(_on_device, call)
    saved: Any = (place.rows(call.spec.layout), place.lse())
    saved = Saved(*saved)
    if jax.sharding.AxisType.Explicit in place.mesh.axis_types:  # where types say how arrays are sharded
        place_one = lambda spec, x: jax.reshard(x, NamedSharding(place.mesh, spec))
        inputs, sees = jax.tree.map(place_one, specs, (inputs, sees), is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.shard_map(body, mesh=place.mesh, in_specs=specs, out_specs=saved)(inputs, sees)


def _own_tables(
    inputs: Inputs, sees: jax.Array | None, place: Placement, strategy: Strategy
) -> tuple[Inputs, jax.Array | None]:
    """The tables of one device, inside of the caller's `jax.shard_map`, with the axis that `_specs` divides."""
    own = lambda x: jax.lax.dynamic_slice_in_dim(x, place.shard(), 1)
    if inputs.lists is not None and strategy != "ulysses":
        inputs = inputs._replace(lists=BlockLists(*map(own, inputs.lists)))
    return inputs, None if sees is None else own(sees)


def _specs(call: ContextCall, inputs: Inputs) -> Any:
    """How the inputs are divided among the devices: `Inputs` of shardings."""
    spec, place, whole = call.spec, call.placement, PartitionSpec()
    keys = place.rows(spec.layout, batch=spec.Bkv == spec.B)
    lists: Any = None
    if inputs.lists is not None and spec.blocks is not None:
        leading = {"all_gather": (place.axis,), "ring": (place.axis, None), "ulysses": ()}[call.strategy]
        batch = place.batch if spec.blocks.batch == spec.B and place.batch else None
        heads = place.heads if spec.blocks.heads == spec.Hq and place.heads else None
        of_lists: Any = PartitionSpec(*leading, batch, heads)
        lists = BlockLists(*[of_lists] * len(inputs.lists))
    specs: Any = jax.tree.map(lambda _: whole, inputs._replace(lists=None))
    sinks = None if inputs.sinks is None else PartitionSpec(place.heads or None)
    return specs._replace(query=place.rows(spec.layout), key=keys, value=keys, lists=lists, sinks=sinks)


def _on_device(call: ContextCall, inputs: Inputs, sees: jax.Array | None) -> Saved:
    """The program of one device."""
    place, spec = call.placement, call.spec
    first = lambda names, n, size: jax.lax.axis_index(names).astype(jnp.int32) * (size // n) if n > 1 else None
    where = Where(
        first(place.batch, place.batch_shards, spec.B),
        first(place.heads, place.head_shards, spec.Hq),
    )
    if call.strategy == "all_gather":
        saved = attend_gathered(call, inputs, where)
    elif call.strategy == "ulysses":
        saved = attend_exchanged(call, inputs, where)
    else:
        lists = inputs.lists
        lists = None if lists is None else BlockLists(*(x[0] for x in lists))
        saved = attend_in_ring(call, inputs._replace(lists=lists), where, None if sees is None else sees[0])
    return Saved(saved.out, saved.lse)
