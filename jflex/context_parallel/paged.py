"""`context_parallel_paged_attention`: paged attention whose pages are divided among devices, page by page in turn.

Few requests with long contexts: each device reads its own pages alone, and the partial states are merged by collectives
(split-KV over devices; Ye et al. 2025, FlashInfer, arXiv:2501.01005, "Attention Composition").
"""

from __future__ import annotations

import functools
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jflex._call.dispatch import Requested
from jflex._check.arguments import known_values
from jflex._jax.paged import paged_shard_of
from jflex._jax.shard import Spread
from jflex.backends.base import PagedInputs
from jflex.context_parallel.placement import Names, Placement
from jflex.entry import PagedCall, Pages, run_paged
from jflex.mods.types import ScoreMod
from jflex.options import Options, PackedOutput, PackedPair, checked, takes
from jflex.paged.attention import prepare, results_of, with_modified_query
from jflex.paged.batch import PagedBatch
from jflex.paged.cache import PagedCache
from jflex.states.merging import merge_over
from jflex.states.state import AttentionState
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray
from pallas_kernels.spec import AttentionSpec

CALLER = "context_parallel_paged_attention"


# fmt: off
@overload
def context_parallel_paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, mesh: Any = None, axis: str = "context",
    head_axes: Names = (), layer: int | AnyArray | None = None, **options: Unpack[PackedOutput],
) -> Array: ...
@overload
def context_parallel_paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, mesh: Any = None, axis: str = "context",
    head_axes: Names = (), layer: int | AnyArray | None = None, **options: Unpack[PackedPair],
) -> tuple[Array, Any]: ...
# fmt: on
@takes(Options)
def context_parallel_paged_attention(
    q: Float[AnyArray, "N Hq D"],
    cache: PagedCache,
    batch: PagedBatch,
    *,
    mesh: Any = None,
    axis: str = "context",
    head_axes: Names = (),
    score_mod: ScoreMod | None = None,
    layer: int | Int[AnyArray, ""] | None = None,
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    **options: Unpack[Options],
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
      return_lse: Also return the float32 logsumexp of the scores over the visible keys of all devices.
      return_stats: Also return these statistics, merged exactly.
      **options: The keywords of `jflex.options.Options`, as in `paged_attention`; `implementation` and `config` are of
        the kernels of each device. `sinks` and `output_mod` enter once, after the states are merged; with
        ``normalize="none"``, partial outputs are added. The weights of one device are dropped, whatever the mesh.

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
    settings = checked(score_mod=score_mod, return_lse=return_lse, return_stats=return_stats, **options)
    placement = Placement.from_mesh(mesh, axis, (), head_axes)
    whole = _whole(cache, placement)
    call = prepare(q, whole, batch, settings, layer=layer)
    _check(whole, batch, placement)
    call = with_modified_query(call, settings, batch)
    return results_of(call, _attend(call, cache, placement, settings.implementation), settings, batch)


def _whole(cache: Any, placement: Placement) -> Any:
    """The cache of all devices; its shapes where the cache is that of one device."""
    if placement.mesh is not None or not isinstance(cache, PagedCache):
        return cache
    axis = cache.k.ndim - 4

    def scaled(x: Any) -> Any:
        shape = (*x.shape[:axis], x.shape[axis] * placement.shards, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    scales = (x if x is None or x.ndim < axis + 3 else scaled(x) for x in cache.scales)
    return PagedCache(scaled(cache.k), scaled(cache.v), *scales)


def _check(whole: PagedCache, batch: PagedBatch, placement: Placement) -> None:
    """Raises ValueError unless the devices divide pages and heads, and known pages are where they must be."""
    n, pages = placement.shards, whole.num_pages
    if pages % n:
        raise ValueError(
            f"`cache` has {pages} pages, which the {n} devices along {placement.axis!r} do not divide. Make it with "
            f"{-(-pages // n) * n}."
        )
    if whole.num_kv_heads % placement.head_shards:
        raise ValueError(
            f"`head_axes` {placement.heads!r} has {placement.head_shards} devices, which do not divide the "
            f"{whole.num_kv_heads} key heads. Name fewer axes."
        )
    lengths, table = known_values(batch.kv_lengths), known_values(batch.page_table)
    if lengths is None or table is None:
        return
    entry = np.arange(table.shape[1])
    wrong = (entry < -(-lengths // whole.page_size)[:, None]) & (table // (pages // n) != entry % n)
    if wrong.any():
        request, number = np.argwhere(wrong)[0].tolist()
        run, pages_per_device = number % n, pages // n
        raise ValueError(
            f"`page_table` must hold page j of a request in the run of device j % {n}. Page {number} of request "
            f"{request} is {table[request, number]}, and the run of device {run} is {run * pages_per_device} to "
            f"{(run + 1) * pages_per_device - 1}. Take it from a pool of that run."
        )


def _attend(call: PagedCall, cache: PagedCache, placement: Placement, implementation: Requested) -> AttentionState:
    if call.spec.is_empty:  # zeros, which need no device
        return run_paged(call, implementation)
    pages = call.pages
    indptr, lengths, table = (jnp.asarray(x) for x in (pages.indptr, pages.lengths, pages.table))
    of_cache = {"key": cache.keys, "value": cache.values, "key_scale": cache.k_scale, "value_scale": cache.v_scale}
    arrays = PagedInputs(
        query=call.query, indptr=indptr, lengths=lengths, table=table, first_page=pages.first_page,
        captured=call.captured, **of_cache,
    )  # fmt: skip
    program = _on_device if placement.mesh is None else _on_mesh
    return program(call.spec, placement, implementation, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(
    spec: AttentionSpec, placement: Placement, implementation: Requested, arrays: PagedInputs
) -> AttentionState:
    """Runs the program of one device on each; `arrays` are those of the whole cache, with its axis of layers."""
    heads, layers = placement.heads or None, [None] * (arrays.key.ndim - 4)
    pages: Any = PartitionSpec(*layers, placement.axis, None, heads)
    of_scale = lambda x: pages if x.ndim == len(layers) + 3 else PartitionSpec(*layers, heads)
    specs: Any = jax.tree.map(lambda _: PartitionSpec(), arrays)
    scales = {name: jax.tree.map(of_scale, getattr(arrays, name)) for name in ("key_scale", "value_scale")}
    specs = specs._replace(query=PartitionSpec(None, heads), key=pages, value=pages, **scales)
    body = functools.partial(_on_device, spec, placement, implementation)
    return placement.mapped(body, (specs,), PartitionSpec(None, heads), arrays)


def _on_device(
    spec: AttentionSpec, placement: Placement, implementation: Requested, arrays: PagedInputs
) -> AttentionState:
    """The program of one device: the state of its keys, merged with those of the others."""
    paging = spec.paging
    assert paging is not None  # of a paged call
    n, me, size, local_pages = placement.shards, placement.shard(), paging.page_size, arrays.key.shape[-4]
    table = jnp.pad(arrays.table, ((0, 0), (0, -arrays.table.shape[1] % n)))
    table = table.reshape(*table.shape[:1], -1, n)[:, :, me] - me * local_pages
    lengths = arrays.lengths // (n * size) * size + jnp.clip(arrays.lengths % (n * size) - me * size, 0, size)
    first = arrays.first_page // (n * local_pages) * local_pages
    local = spec.replace(S=table.shape[1] * size, paging=paging._replace(num_pages=local_pages), out_dtype=spec.exact)
    number = jax.lax.axis_index(placement.heads) if placement.head_shards > 1 else 0
    local, inputs = paged_shard_of(local, arrays, placement.head_shards, number, Spread(me * size, size, n * size))
    pages = Pages(
        arrays.key, arrays.value, local_pages, first, arrays.indptr, lengths, table, key_scale=arrays.key_scale,
        value_scale=arrays.value_scale,
    )  # fmt: skip
    call = PagedCall(CALLER, local, arrays.query, pages, inputs.captured)
    return merge_over(run_paged(call, implementation), placement.axis)
