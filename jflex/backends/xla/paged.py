"""Paged attention in plain JAX: one tile of queries after another, each over the keys that it may attend to.

The work follows the lengths, not the size of the cache or of the tables: the trip counts of both loops are data. Tiles
at either end that interval arithmetic proves fully masked are skipped.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jflex._mesh import isolated_trace
from jflex.backends.base import PagedInputs, Saved
from jflex.backends.eight_bits import dequantized, dequantized_latents
from jflex.backends.vector_mods import modified_keys
from jflex.backends.xla import softmax
from jflex.backends.xla.block_scores import dropped, scaled_up
from jflex.backends.xla.blockwise import over_block
from jflex.backends.xla.containment import masked_product
from jflex.backends.xla.narrow import read
from pallas_kernels.plan import Refusal
from pallas_kernels.spec import AttentionSpec, Mod

if TYPE_CHECKING:
    from pallas_kernels.program.build import Program

# 32 decoding requests of 1024 keys, Hq 8, Hkv 2, D 64, float32 take 14, 16, 13, 13 and 12 ms on 2 cores with 64, 128,
# 256, 512 and 1024; smaller tiles waste less on short requests.
KEYS = 256
MOST_JUDGED = 1024  # runs of tiles whose bounds are evaluated at once
FEW = 16  # a request with more queries takes larger tiles
_AXES = "kgqs"


class _Source(NamedTuple):
    """Pages of keys or of values, their scale, and the mod of what they hold with the arrays that it captures."""

    pages: jax.Array
    scale: jax.Array | None
    mod: Mod | None
    operands: tuple[jax.Array, ...]


class _Work(NamedTuple):
    """Requests with a number of queries between bounds, and their queries per tile."""

    least: int
    most: int
    queries: int


def attend(spec: AttentionSpec, inputs: PagedInputs) -> Saved:
    """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over the pages of each request."""
    p, spare = spec, 64
    mean = -(-p.T // p.B)
    works = [_Work(1, FEW, min(mean, FEW) if mean <= FEW else 1)]
    if p.T > FEW:
        works.append(_Work(FEW + 1, p.T, spare))
    if p.config.batch_invariant:  # on a CPU, the bits of a GEMM may depend on the row
        works = [_Work(1, p.T, 1)]
    padded = jnp.pad(inputs.query, ((0, spare), (0, 0), (0, 0)))
    fields = ("key", "value", "key_scale", "value_scale", "rope_key")
    inputs = inputs._replace(**{name: _by_layer(p, getattr(inputs, name)) for name in fields})
    out = jnp.zeros((p.T + spare, p.Hq, p.Dv), p.out_dtype)
    fill = lambda x: jnp.full((p.T + spare, p.Hq), x, jnp.float32)
    stats = {name: fill(-jnp.inf if name == "max" else 0.0) for name in p.stats}
    saved = Saved(out, fill(-jnp.inf), **stats)
    for work in works:
        saved = _run(spec, inputs._replace(query=padded), work, saved)
    return jax.tree.map(lambda x: x[: p.T], saved)


def _by_layer(p: AttentionSpec, pages: jax.Array | None) -> jax.Array | None:
    """Pages, or scales of their tokens, as [L, P, page_size, ...] if there are several layers.

    This undoes the reshape of a stacked cache. XLA's CPU compiler copies an argument that is reshaped before a loop
    (JAX 0.10.2 and 0.11.2): 4 requests of 20 keys in a cache of two layers and 2049 pages of 64 tokens took 24 ms that
    way, and take 0.2 ms.
    """
    if pages is None or pages.ndim == 1 or len(pages) == p.num_pages:  # a scale of each head has one axis
        return pages
    return pages.reshape(-1, p.num_pages, *pages.shape[1:])


def _run(spec: AttentionSpec, inputs: PagedInputs, work: _Work, saved: Saved) -> Saved:
    """Computes and writes the rows of the requests in `work`."""
    start, end = inputs.indptr[:-1], inputs.indptr[1:]
    counts = end - start
    tiles = jnp.where((counts >= work.least) & (counts <= work.most), -(-counts // work.queries), 0)
    ends = jnp.cumsum(tiles)

    def tile(number: jax.Array, written: Saved) -> Saved:
        request = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        nth = number - (ends[request] - tiles[request])
        first = start[request] + nth * work.queries
        rows = _tile(spec, inputs, work.queries, request, first)
        exists = first + jnp.arange(work.queries, dtype=jnp.int32) < end[request]
        return jax.tree.map(lambda x, new: _write(x, first, new, exists), written, rows)

    return lax.fori_loop(jnp.int32(0), ends[-1], tile, saved)


def _write(x: jax.Array, first: jax.Array, rows: jax.Array, exists: jax.Array) -> jax.Array:
    """Writes the rows that exist."""
    before = lax.dynamic_slice_in_dim(x, first, rows.shape[0])
    keep = exists.reshape(-1, *[1] * (rows.ndim - 1))
    return lax.dynamic_update_slice_in_dim(x, jnp.where(keep, rows.astype(x.dtype), before), first, axis=0)


def _tile(p: AttentionSpec, inputs: PagedInputs, count: int, request: jax.Array, first: jax.Array) -> Saved:
    """Output and row statistics of some queries of a request, [count, Hq, Dv] and [count, Hq]."""
    exact, last = jnp.dtype(p.exact), inputs.indptr[request + 1] - 1
    n = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), last)
    h = jnp.arange(p.Hq, dtype=jnp.int32)
    length = jnp.clip(inputs.lengths[request], 0, p.S)
    q = lax.dynamic_slice_in_dim(inputs.query, first, count)
    q = q.reshape(count, p.Hkv, p.group, p.D).astype(exact).transpose(1, 2, 0, 3)  # [Hkv, group, count, D]

    def step(number: jax.Array, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        j = number * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        exists, j = j < length, jnp.minimum(j, p.S - 1)
        of_key = _Source(inputs.key, inputs.key_scale, p.key_mod, inputs.captured.key)
        k = _rows(p, inputs, of_key, request, j, exists)
        of_value = _Source(inputs.value, inputs.value_scale, p.value_mod, inputs.captured.value)
        v = k[..., : p.Dv] if p.values_in_keys else _rows(p, inputs, of_value, request, j, exists)
        s = jnp.einsum("kgqd,skd->kgqs", q, k, precision=p.precision, preferred_element_type=exact) * p.scale
        at = (request, h.reshape(p.Hkv, p.group), n, j)
        if p.score_mod is not None:
            score = functools.partial(p.score_mod, inputs.captured.score)
            s = over_block(score, (s.astype(jnp.float32),), at, _AXES).astype(exact)
        visible = exists[None, None, None]  # [Hkv, group, count, KEYS]
        if p.mask_mod is not None:
            visible = visible & over_block(functools.partial(p.mask_mod, inputs.captured.mask), (), at, _AXES)
        kept = None
        if p.dropout is not None:
            kept = over_block(functools.partial(p.dropout.mod, inputs.captured.dropout), (), at, _AXES)
        return _accumulate(state, s, v, visible, kept, p)

    begin, end = walk_of(p, inputs, request, n, h, length, KEYS)
    state = lax.fori_loop(begin, end, step, softmax.start(p, (p.Hkv, p.group, count), exact))
    state = state._replace(out=scaled_up(state.out, p))
    by_row = lambda x: x.transpose(2, 0, 1, *range(3, x.ndim)).reshape(count, p.Hq, *x.shape[3:])
    if p.normalize == "none":
        return Saved(by_row(state.out), jnp.zeros((count, p.Hq), exact))
    return jax.tree.map(by_row, softmax.finish(p, state))


def _rows(
    p: AttentionSpec, inputs: PagedInputs, source: _Source, request: jax.Array, j: jax.Array, exists: jax.Array
) -> jax.Array:
    """Keys or values of a request, [KEYS, Hkv, D], in the accumulator dtype; zeros where they do not exist."""
    pages, scale, mod, operands = source
    page = jnp.clip(inputs.table[request, j // p.page_size], 0, p.num_pages - 1)
    layer = (inputs.first_page[0] // p.num_pages,) if pages.ndim == 5 else ()
    at = (*layer, page, j % p.page_size)
    rows = read(lambda: pages[at], exists[0], p.platform)
    if p.has_latent_tiles:
        rope_key = inputs.rope_key
        assert rope_key is not None  # what has tiles has them apart
        assert scale is not None
        rotated = read(lambda: rope_key[at], exists[0], p.platform)
        rows = dequantized_latents(rows, scale[at], rotated, p.exact)
    elif scale is not None:
        rows = dequantized(rows, scale if scale.ndim == 1 else scale[at], p.exact)
    if mod is not None:
        rows = modified_keys(functools.partial(mod, operands), rows, jnp.broadcast_to(request, j.shape), j)
    return jnp.where(exists[:, None, None], rows, 0).astype(p.exact)


def _accumulate(
    state: softmax.SoftmaxState,
    s: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    kept: jax.Array | None,
    p: AttentionSpec,
) -> softmax.SoftmaxState:
    """One step of the online softmax; without one, scores are the weights."""
    gemm = lambda a, b: jnp.einsum("kgqs,skd->kgqd", a, b, precision=p.precision, preferred_element_type=v.dtype)
    seen = None if p.mask_mod is None else lambda: visible
    pv_dot = lambda weights: masked_product(gemm, dropped(weights, kept).astype(p.dtype).astype(v.dtype), v, seen)
    if p.normalize == "none":
        return state._replace(out=state.out + pv_dot(jnp.where(visible, s, 0)))
    return softmax.update(state, jnp.where(visible, s, -jnp.inf), pv_dot)


# --- bounds


def walk_of(
    p: AttentionSpec, inputs: PagedInputs, request: jax.Array, n: jax.Array, h: jax.Array, length: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array]:
    """The first tile, and the one after the last."""
    end = (length + tile - 1) // tile
    program = None if p.mask_mod is None else _mask_program(p)
    if program is None:  # no mask, or one without a kernel program
        return jnp.zeros_like(end), end
    from pallas_kernels.program import intervals
    from pallas_kernels.program.evaluate import ArraySpace, Evaluation

    rows = jnp.stack([x.reshape(-1) for x in jnp.meshgrid(n, h, indexing="ij")])
    indices = {"b": request, "q": rows[0], "h": rows[1]}
    space = ArraySpace(inputs.captured.mask, {"q": rows.shape[1:]})
    known = Evaluation(space, {node: indices[node.value] for node in program.arguments if node.value in indices})
    tiles = -(-p.S // tile)
    run = -(-tiles // MOST_JUDGED)
    nth = jnp.arange(-(-tiles // run), dtype=jnp.int32)
    first = nth * (run * tile)
    seen = intervals.visibility(program, known, first, first + (run * tile - 1)).some & (nth * run < end)
    begin = jnp.min(jnp.where(seen, nth, len(nth))) * run
    return jnp.minimum(begin, end), jnp.minimum((jnp.max(jnp.where(seen, nth, -1)) + 1) * run, end)


@isolated_trace
def _mask_program(p: AttentionSpec) -> Program | None:
    """The kernel program of the mask, with heads in rows; None if there is none."""
    from pallas_kernels.plan import with_programs

    planned = with_programs(p.replace(score_mod=None, heads_in_rows=True))
    return None if isinstance(planned, Refusal) else planned.programs.mask
