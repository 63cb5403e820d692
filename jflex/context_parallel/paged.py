"""`context_parallel_paged_attention`: paged attention whose pages are divided among devices, page by page in turn.

Few requests with long contexts: each device reads its own pages alone, and the partial states are merged by collectives
(split-KV over devices; Ye et al. 2025, FlashInfer, arXiv:2501.01005, "Attention Composition").
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jflex._call.checks import check_lse
from jflex._call.dispatch import Implementation
from jflex._call.kv_lengths import known_lengths
from jflex._call.vector_mods import modified_rows
from jflex._jax.paged_shard import paged_shard_of
from jflex._jax.shard import Spread
from jflex.backends.base import PagedInputs
from jflex.config import Config
from jflex.context_parallel.placement import Names, Placement
from jflex.mods.signature import answers_keywords
from jflex.mods.types import MaskMod, OutputMod, ScoreMod, VectorMod
from jflex.paged.attention import indices_of, prepare, results_of
from jflex.paged.batch import PagedBatch
from jflex.paged.cache import PagedCache
from jflex.paged.run import PagedCall, Pages, attend
from jflex.states.merging import merge_over
from jflex.states.state import AttentionState, Normalize
from jflex.states.stats import AttentionStats, Stat, check_stats
from jflex.types import AnyArray
from pallas_kernels.spec import AttentionSpec

CALLER = "context_parallel_paged_attention"


# Return types, by `return_lse` and `return_stats`.
# fmt: off
@overload
def context_parallel_paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, mesh: Any = None, axis: str = "context",
    head_axes: Names = (), score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, normalize: Normalize = "softmax", sinks: AnyArray | None = None,
    scale: float | None = None, layer: int | AnyArray | None = None, return_lse: Literal[False] = False,
    return_stats: tuple[()] = (), dropout_rate: float = 0.0, dropout_key: AnyArray | None = None,
    implementation: Implementation = None, config: Config | None = None,
) -> Array: ...
@overload
def context_parallel_paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, mesh: Any = None, axis: str = "context",
    head_axes: Names = (), score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, normalize: Normalize = "softmax", sinks: AnyArray | None = None,
    scale: float | None = None, layer: int | AnyArray | None = None, return_lse: Literal[True],
    return_stats: tuple[()] = (), dropout_rate: float = 0.0, dropout_key: AnyArray | None = None,
    implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, Array]: ...
@overload
def context_parallel_paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, mesh: Any = None, axis: str = "context",
    head_axes: Names = (), score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, normalize: Normalize = "softmax", sinks: AnyArray | None = None,
    scale: float | None = None, layer: int | AnyArray | None = None, return_lse: Literal[False] = False,
    return_stats: tuple[Stat, ...], dropout_rate: float = 0.0, dropout_key: AnyArray | None = None,
    implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, AttentionStats]: ...
# fmt: on
@answers_keywords
def context_parallel_paged_attention(
    q: Float[AnyArray, "N Hq D"],
    cache: PagedCache,
    batch: PagedBatch,
    *,
    mesh: Any = None,
    axis: str = "context",
    head_axes: Names = (),
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None,
    key_mod: VectorMod | None = None,
    value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None,
    normalize: Normalize = "softmax",
    sinks: Float[AnyArray, " Hq"] | None = None,
    scale: float | None = None,
    layer: int | Int[AnyArray, ""] | None = None,
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None,
    implementation: Implementation = None,
    config: Config | None = None,
) -> Float[Array, "N Hq Dv"] | tuple[Float[Array, "N Hq Dv"], Float[Array, "N Hq"] | AttentionStats]:
    """`paged_attention` over a cache whose pages are divided among the devices of a mesh.

    For few requests with long contexts: n devices hold and read 1 / n of the keys of each request. The arguments and
    the result are those of `paged_attention` on one device, to rounding: mods see absolute positions, and every device
    has all queries and the whole result. Devices exchange partial states alone, N * Hq * (Dv + 2) float32 numbers, by a
    maximum and a sum; no key is sent.

    The physical pages of the cache are cut into n equal runs, one for each device. Page ``j`` of a request, counted
    from its beginning, must lie in run ``j % n``. So every device has as many keys of each request, up to a page,
    and a growing request adds them to each in turn. `jflex.paged.write`, `jflex.paged.token_slots` and checks of
    batches take the same cache and the same page table. Page 0 is reserved as always, and no page of the other runs.

    Outside of `jax.shard_map`, arrays are whole, and those of the cache should be sharded over `axis` by pages. Inside
    of one, with `mesh` None, the cache is the run of the device; `batch` is whole, with the page numbers of the whole
    cache.

    Args:
      q: As in `paged_attention`, whole on each device.
      cache: Its number of pages must be a multiple of the devices.
      batch: As in `paged_attention`; its arrays are whole on each device. Known page tables are checked; in a
        traced one, a page of another device reads some page of this one.
      mesh: The mesh; None for that of `jax.set_mesh`, or of the enclosing `jax.shard_map`.
      axis: Its axis that divides the pages.
      head_axes: Its axes that divide the heads, a name or a sequence; outside of `jax.shard_map` only.
      score_mod: As in `paged_attention`, and so are all arguments below.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``.
      query_mod: ``(query[D], b, h, q_idx) -> [D]``.
      key_mod: ``(key[D], b, h_kv, kv_idx) -> [D]``.
      value_mod: ``(value[Dv], b, h_kv, kv_idx) -> [Dv]``.
      output_mod: ``(out[Dv], lse, b, h, q_idx) -> [Dv]``, after the states are merged.
      normalize: With ``"none"``, partial outputs are added.
      sinks: They enter once, after the states are merged.
      scale: Multiplies the raw scores; ``D ** -0.5`` for None.
      layer: Which layer of a stacked cache.
      return_lse: Also return the float32 logsumexp of the scores over the visible keys of all devices.
      return_stats: Also return these statistics, merged exactly.
      dropout_rate: The weights of one device are dropped, whatever the mesh.
      dropout_key: A random key.
      implementation: Of the kernels of each device.
      config: Likewise.

    Returns:
      As `paged_attention`.

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: As `paged_attention`; the mesh lacks an axis, devices do not divide pages or heads, or a known page is
        on another device than its place in the request says.
      UnsupportedError: No requested backend supports this call, or a derivative is requested.

    >>> import jflex
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> cache = jflex.paged.PagedCache.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1]), jnp.array([33]), jnp.array([[1, 7, 3]]))
    >>> context_parallel_paged_attention(jnp.ones((1, 8, 64)), cache, batch, mesh=mesh).shape
    (1, 8, 64)
    """
    check_lse(return_lse, normalize)
    stats = () if return_stats == () else check_stats(return_stats, return_lse, normalize)
    place = Placement.of(mesh, axis, (), head_axes)
    whole = _whole(cache, place)
    call = prepare(
        q, whole, batch, score_mod=score_mod, mask_mod=mask_mod, query_mod=query_mod, key_mod=key_mod,
        value_mod=value_mod, output_mod=output_mod, normalize=normalize, sinks=sinks, scale=scale, layer=layer,
        config=config, return_stats=stats, dropout_rate=dropout_rate, dropout_key=dropout_key,
    )  # fmt: skip
    _check(whole, batch, place)
    if query_mod is not None:
        call = call._replace(query=modified_rows(query_mod, call.query, *indices_of(batch, q.shape[0])))
    state = _attend(call, cache, place, implementation)
    return results_of(state, batch, sinks, output_mod, call.query.dtype, stats, return_lse=return_lse)


def _whole(cache: Any, place: Placement) -> Any:
    """The cache of all devices; its shapes where the cache is that of one device."""
    if place.mesh is not None or not isinstance(cache, PagedCache):
        return cache
    axis = cache.k.ndim - 4

    def scaled(x: Any) -> Any:
        shape = (*x.shape[:axis], x.shape[axis] * place.shards, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    scales = (x if x is None or x.ndim < axis + 3 else scaled(x) for x in cache.scales)
    return PagedCache(scaled(cache.k), scaled(cache.v), *scales)


def _check(whole: PagedCache, batch: PagedBatch, place: Placement) -> None:
    """Raises ValueError unless the devices divide pages and heads, and known pages are where they must be."""
    n, pages = place.shards, whole.num_pages
    if pages % n:
        raise ValueError(
            f"`cache` has {pages} pages, which the {n} devices along {place.axis!r} do not divide. Make it with "
            f"{-(-pages // n) * n}."
        )
    if whole.num_kv_heads % place.head_shards:
        raise ValueError(
            f"`head_axes` {place.heads!r} has {place.head_shards} devices, which do not divide the "
            f"{whole.num_kv_heads} key heads. Name fewer axes."
        )
    lengths, table = known_lengths(batch.kv_lengths), known_lengths(batch.page_table)
    if lengths is None or table is None:
        return
    entry = np.arange(table.shape[1])
    wrong = (entry < -(-lengths // whole.page_size)[:, None]) & (table // (pages // n) != entry % n)
    if wrong.any():
        request, number = np.argwhere(wrong)[0].tolist()
        run, own = number % n, pages // n
        raise ValueError(
            f"`page_table` must hold page j of a request in the run of device j % {n}. Page {number} of request "
            f"{request} is {table[request, number]}, and the run of device {run} is {run * own} to "
            f"{(run + 1) * own - 1}. Take it from a pool of that run."
        )


class _Arrays(NamedTuple):
    """What the program of a device takes."""

    query: Any
    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    indptr: Any
    lengths: Any
    table: Any
    first_page: Any
    captured: Any


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static part of a call of all devices."""

    spec: AttentionSpec
    place: Placement
    implementation: str | tuple[str, ...] | None


def _attend(call: PagedCall, cache: PagedCache, place: Placement, implementation: Implementation) -> AttentionState:
    spec, pages = call.spec, call.pages
    if spec.is_empty:  # zeros, which need no device
        return attend(call, implementation)
    named = implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
    static = _Static(spec, place, named)
    arrays = _Arrays(
        call.query, cache.keys, cache.values, *cache.scales, jnp.asarray(pages.indptr), jnp.asarray(pages.lengths),
        jnp.asarray(pages.table), pages.first_page, call.captured,
    )  # fmt: skip
    return _on_device(static, arrays) if place.mesh is None else _on_mesh(static, arrays)


@functools.partial(jax.jit, static_argnums=0)
def _on_mesh(static: _Static, arrays: _Arrays) -> AttentionState:
    """Runs the program of one device on each."""
    place, heads = static.place, static.place.heads or None
    layers = [None] * (arrays.key.ndim - 4)
    pages: Any = PartitionSpec(*layers, place.axis, None, heads)
    of_scale = lambda x: pages if x.ndim == len(layers) + 3 else PartitionSpec(*layers, heads)
    specs: Any = jax.tree.map(lambda _: PartitionSpec(), arrays)
    scales = {name: jax.tree.map(of_scale, getattr(arrays, name)) for name in ("key_scale", "value_scale")}
    specs = specs._replace(query=PartitionSpec(None, heads), key=pages, value=pages, **scales)
    if jax.sharding.AxisType.Explicit in place.mesh.axis_types:  # where types say how arrays are sharded
        place_one = lambda spec, x: jax.reshard(x, NamedSharding(place.mesh, spec))
        arrays = jax.tree.map(place_one, specs, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rows: Any = PartitionSpec(None, heads)
    body = functools.partial(_on_device, static)
    return jax.shard_map(body, mesh=place.mesh, in_specs=(specs,), out_specs=rows)(arrays)


def _on_device(static: _Static, arrays: _Arrays) -> AttentionState:
    """The program of one device: the state of its keys, merged with those of the others."""
    spec, place, paging = static.spec, static.place, static.spec.paging
    assert paging is not None  # of a paged call
    n, me, size, own = place.shards, place.shard(), paging.page_size, arrays.key.shape[-4]
    table = jnp.pad(arrays.table, ((0, 0), (0, -arrays.table.shape[1] % n)))
    table = table.reshape(*table.shape[:1], -1, n)[:, :, me] - me * own
    lengths = arrays.lengths // (n * size) * size + jnp.clip(arrays.lengths % (n * size) - me * size, 0, size)
    first = arrays.first_page // (n * own) * own
    exact = spec.dtype if spec.dtype == "float64" else "float32"
    local = spec.replace(S=table.shape[1] * size, paging=paging._replace(num_pages=own), out_dtype=exact)
    inputs = PagedInputs(arrays.query, arrays.key, arrays.value, arrays.indptr, lengths, table, first, arrays.captured)
    number = jax.lax.axis_index(place.heads) if place.head_shards > 1 else 0
    local, inputs = paged_shard_of(local, inputs, place.head_shards, number, Spread(me * size, size, n * size))
    pages = Pages(
        arrays.key, arrays.value, own, first, arrays.indptr, lengths, table, key_scale=arrays.key_scale,
        value_scale=arrays.value_scale,
    )  # fmt: skip
    call = PagedCall(CALLER, local, arrays.query, pages, inputs.captured)
    return merge_over(attend(call, static.implementation), place.axis)
