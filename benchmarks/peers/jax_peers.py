"""The JAX peers, from a problem's mods to a callable: with as many queries as keys, and serving.

All arrays are arguments of what is jitted, so that none is a constant of the program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks import roofline
from benchmarks.problems import EIGHT_BITS, Problem, requests_of
from benchmarks.variants import LARGE, VARIANTS, WINDOW, Mods, Operations

_ORDERS = {"tiles": jflex.masks.tile_order, "morton": lambda canvas, tile: jflex.masks.morton_order(canvas)}


def _neighborhood(order: str, canvas: tuple[int, int], kernel: tuple[int, int], tile: tuple[int, int]) -> jflex.MaskMod:
    cells = None if order == "rows" else _ORDERS[order](canvas, tile)
    return jflex.masks.neighborhood(canvas, kernel, order=cells)


OPERATIONS = Operations(jnp.tanh, lambda x: x.astype(jnp.float32), jnp.clip, _neighborhood)
IMPLEMENTATIONS = {
    "jflex": None, "jflex-mosaic": "mosaic_gpu", "jflex-triton": "triton", "jflex-official": "official_triton",
    "jflex-xla": "xla",
}  # fmt: skip
Captured = Mapping[str, jax.Array]
BoundMods = Callable[[Captured], Mods]
# (query, key, value, captured arrays, BlockMask or None) -> out
Attend = Callable[..., Any]
Program = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments


class Inputs(NamedTuple):
    """The arrays of a problem."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    captured: dict[str, jax.Array]
    block_mask: jflex.BlockMask | None


def mods_of(problem: Problem) -> tuple[BoundMods, dict[str, jax.Array]]:
    """A problem's mods, from the captured arrays; and these."""
    variant = VARIANTS[problem.variant]
    indices = {name: jnp.asarray(array) for name, array in variant.indices(problem).items()}
    captured = {
        name: jnp.asarray(array, problem.dtype if name in LARGE else jnp.float32)
        for name, array in variant.captured(problem).items()
    }
    return lambda captured: variant.make(problem, {**indices, **captured}, OPERATIONS), captured


def inputs_of(problem: Problem, captured: dict[str, jax.Array], block_mask: jflex.BlockMask | None) -> Inputs:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads, lengths = (problem.Hq, problem.Hkv, problem.Hkv), (problem.T, problem.S, problem.S)
    sizes = (problem.D, problem.D, problem.value_size)
    query, key, value = (
        jax.random.normal(random, (problem.B, length, H, size), problem.dtype)
        for random, length, H, size in zip(keys, lengths, heads, sizes, strict=True)
    )
    if problem.keys:
        query, key = query.astype(problem.keys), key.astype(problem.keys)
    return Inputs(query, key, value, captured, block_mask)


def block_mask_of(problem: Problem, mods: Mods) -> tuple[jflex.BlockMask | None, int]:
    """In the form of the problem, and how many elements the BlockMask visits in any form."""
    if mods.mask is None:
        return None, problem.T * problem.S
    if problem.selected:
        rows = np.arange(problem.T // problem.block) + 1
        return None, int(np.minimum(rows, problem.selected).sum()) * problem.block**2
    create = functools.partial(jflex.create_block_mask, mods.mask, None, None, problem.T, problem.S)
    counted = create()
    dense = counted.to_dense()
    visited = roofline.visited_elements(np.asarray(dense[0, 0]) > 0, (problem.T, problem.S), counted.block_size)
    block_mask = counted if problem.block == 128 else create(block_size=problem.block)
    if problem.form == "partial":
        block_mask = jflex.BlockMask.from_kv_blocks(
            dense.sum(-1), jnp.argsort(-dense, stable=True), mask_mod=mods.mask, seq_lengths=(problem.T, problem.S)
        )
    return (None if problem.form == "everywhere" else block_mask), visited


def selected_blocks(problem: Problem, query: jax.Array, key: jax.Array) -> jflex.BlockMask:
    """The causal BlockMask of the best blocks of a problem, as `flax_layers.block_selection` makes it."""
    scores = jflex.block_scores(query, key, block_size=problem.block)
    indices = jflex.select_blocks(scores, problem.selected, block_size=problem.block)
    return jflex.block_mask_from_indices(
        indices, problem.T, problem.S, H=problem.Hq, block_size=problem.block, mask_mod=jflex.masks.causal()
    )


def causal_documents(ids: jax.Array) -> jflex.BlockMask:
    """The causal BlockMask of packed documents, from the number of each position's document."""
    mask_mod = jflex.and_masks(jflex.masks.causal(), jflex.masks.document(ids))
    return jflex.create_block_mask(mask_mod, None, None, *ids.shape, *ids.shape)


def attention(peer: str, problem: Problem, mods: BoundMods) -> Attend:
    """A peer's attention for a problem with as many queries as keys."""
    return _ATTEND[peer](problem, mods)


def with_residuals(attend: Attend, problem: Problem) -> Callable[..., Any]:
    """``(*inputs) -> (out, pull)``; whether captured arrays have gradients depends on the problem."""

    def both(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        if problem.differentiated:
            return jax.vjp(lambda q, k, v, c: attend(q, k, v, c, block_mask), query, key, value, captured)
        return jax.vjp(lambda q, k, v: attend(q, k, v, captured, block_mask), query, key, value)

    return both


def forward_and_backward(attend: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """``(query, key, value, cotangent) -> (out, gradients)`` of an attention."""

    def both(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(cotangent)

    return both


def backends_of(problem: Problem, mods: BoundMods, inputs: Inputs) -> dict[str, str]:
    """The backend of jflex that runs a problem, for each peer that is jflex."""
    (mask, score), (query, key, value, _, block_mask) = mods(inputs.captured), inputs
    block_mask = selected_blocks(problem, query, key) if problem.selected else block_mask
    everywhere = mask if problem.form == "everywhere" else None
    how = _weights_of(problem) | {"return_stats": tuple(problem.stats.split())}
    account = jflex.explain(query, key, value, score, block_mask, mask_mod=everywhere, **how)
    return {name: named or str(account.backend) for name, named in IMPLEMENTATIONS.items()}


def _weights_of(problem: Problem) -> dict[str, Any]:
    """Arguments of `flex_attention`, by `Problem.weights`."""
    if problem.weights == "sinks":
        return {"sinks": jnp.zeros(problem.Hq)}
    if problem.weights == "dropout":
        return {"dropout_rate": 0.1, "dropout_key": jax.random.key(1)}
    return {"normalize": "none"} if problem.weights == "sigmoid" else {}


def _jflex(problem: Problem, mods: BoundMods, implementation: str | None = None) -> Attend:
    def attend(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        mask, score = mods(captured)
        if problem.weights == "sigmoid":
            assert score is None  # of the variants of the suite
            score = jflex.scores.sigmoid(-math.log(problem.S))
        everywhere = mask if problem.form == "everywhere" else None
        block_mask = selected_blocks(problem, query, key) if problem.selected else block_mask
        attend = functools.partial(jflex.flex_attention, implementation=implementation, **_weights_of(problem))
        result = attend(
            query, key, value, score, block_mask, mask_mod=everywhere, return_stats=tuple(problem.stats.split())
        )
        return result[0] if problem.stats else result

    return attend


def _jax_nn(problem: Problem, mods: BoundMods, implementation: Any) -> Attend:
    if problem.variant == "softcap":
        raise NotImplementedError("there is no soft capping.")
    window = (min(WINDOW, problem.S // 2) - 1, 0) if problem.variant == "sliding_window" else None
    causal = problem.variant in ("causal", "sliding_window", "alibi")

    def attend(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        bias = captured["bias"][None] if "bias" in captured else None
        if "slopes" in captured:
            places = jnp.arange(problem.S, dtype=jnp.float32)
            bias = (captured["slopes"][:, None, None] * (places[None] - places[:, None])[None])[None]
            bias = bias.astype(query.dtype) if implementation == "cudnn" else bias  # cuDNN's has the query's dtype
        return jax.nn.dot_product_attention(
            query, key, value, bias, is_causal=causal, local_window_size=window, implementation=implementation
        )

    return attend


def _tokamax(problem: Problem, mods: BoundMods) -> Attend:
    import tokamax  # type: ignore

    return lambda query, key, value, captured, block_mask: tokamax.dot_product_attention(
        query, key, value, is_causal=problem.variant == "causal", implementation="mosaic"
    )


_ATTEND: dict[str, Callable[[Problem, BoundMods], Attend]] = {
    **{name: functools.partial(_jflex, implementation=named) for name, named in IMPLEMENTATIONS.items()},
    "jax-cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_jax_nn, implementation="xla"),
    "tokamax": _tokamax,
}


# Serving: queries continue sequences in decoding, with uneven lengths, pages or shared prefixes.


def served_program(peer: str, problem: Problem, mods: BoundMods, captured: Captured) -> Program:
    """A peer's function and its arguments for a problem that is `served`."""
    function, inputs = _SERVED[peer](problem, mods)
    return function, (captured, *inputs)


def _implementation(on_gpu: str | None) -> str | None:
    """What a call names on a GPU; None leaves the choice to jflex."""
    return on_gpu if jax.default_backend() == "gpu" else "xla"


def _served_mods(problem: Problem, mods: Mods) -> Mods:
    """The last position attends to every key, so one token needs no mask, unless the problem is about the mask."""
    return mods if problem.T > 1 or problem.variant == "causal" else mods._replace(mask=None)


def _normal(number: int, shape: tuple[int, ...], problem: Problem) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, problem.dtype)


def _contiguous_inputs(problem: Problem) -> tuple[Any, ...]:
    """Query, key, value and the lengths, or None; where there are pages, their contents in order."""
    if problem.page:
        query, cache, batch = _paged_inputs(problem)
        query = query.reshape(problem.B, problem.T, *query.shape[1:])
        rows = lambda x: x[batch.page_table].reshape(problem.B, -1, *x.shape[-2:])[:, : problem.S]
        key, value = rows(cache.keys), rows(cache.values)[..., : problem.value_size]
        return query, key, value, None
    query = _normal(0, (problem.B, problem.T, problem.Hq, problem.D), problem)
    key, value = (_normal(number, (problem.B, problem.S, problem.Hkv, problem.D), problem) for number in (1, 2))
    return query, key, value, jnp.asarray(requests_of(problem).keys) if problem.lengths else None


def _contiguous(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        begins = problem.S - problem.T if lengths is None else lengths - problem.T  # where q_idx 0 lies
        bound = _served_mods(problem, mods(captured))
        mask, score = (None if mod is None else jflex.with_offset(mod, begins) for mod in bound)
        known = {} if lengths is None else {"kv_lengths": lengths}
        return jflex.flex_attention(
            query, key, value, score, mask_mod=mask, implementation=_implementation(on_gpu), config=config, **known
        )

    return attend, _contiguous_inputs(problem)


def _served_jax_nn(problem: Problem, mods: BoundMods, implementation: Any) -> Program:
    def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    return attend, _contiguous_inputs(problem)


def _latents_jax_nn(problem: Problem, mods: BoundMods) -> Program:
    """Rows of latents as keys and as values, since `jax.nn` takes one head size; their rotated columns are dropped."""
    query, rows, _, _ = _contiguous_inputs(problem)

    def attend(captured: Captured, query: Any, rows: Any) -> Any:
        begins = problem.S - problem.T
        mask = jnp.arange(problem.T)[:, None] + begins >= jnp.arange(problem.S)[None] if problem.T > 1 else None
        mask = None if mask is None else mask[None, None]
        out = jax.nn.dot_product_attention(query, rows, rows, mask=mask, scale=192**-0.5, implementation="xla")
        return out[..., : problem.value_size]

    return attend, (query, rows)


def _paged_inputs(problem: Problem, prefix: int = 0) -> tuple[Any, ...]:
    """Packed queries, the cache and the batch; pages lie at random, and sequences share those of a prefix."""
    requests, shared = requests_of(problem), prefix // problem.page
    pages = -(-requests.keys // problem.page)
    count = 1 + shared + int((pages - shared).sum())  # page 0 is reserved
    places = np.random.default_rng(0).permutation(np.arange(1, count))
    table = np.zeros((problem.B, pages.max()), np.int32)
    table[:, :shared] = places[:shared]
    for row, own in zip(table, np.split(places[shared:], np.cumsum(pages - shared)[:-1]), strict=True):
        row[shared : shared + len(own)] = own
    shape = (count, problem.page, problem.Hkv, problem.D)
    if problem.keys == "latent":
        cache = jflex.paged.LatentCache(_normal(1, shape, problem), problem.D - problem.value_size)
    else:
        cache = jflex.paged.PagedCache(_normal(1, shape, problem), _normal(2, shape, problem))
    if problem.keys in EIGHT_BITS:
        cache = jax.jit(functools.partial(_in_eight_bits, problem.keys))(cache)
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (requests.indptr, requests.keys, table)))
    return _normal(0, (int(requests.queries.sum()), problem.Hq, problem.D), problem), cache, batch


def _in_eight_bits(dtype: str, cache: Any) -> Any:
    """The same pages in eight bits, with a scale for each token and head."""
    pages, size, heads, D = cache.k.shape
    rows = lambda x: x.reshape(pages * size, heads, D)
    empty = jflex.paged.PagedCache.create(pages, size, heads, D, dtype=dtype)
    return jflex.paged.write(empty, rows(cache.k), rows(cache.v), jnp.arange(pages * size, dtype=jnp.int32))


def _paged(
    problem: Problem,
    mods: BoundMods,
    on_gpu: str | None = None,
    config: jflex.Config | None = None,
    *,
    sharing: bool = False,
) -> Program:
    """Every sequence loads all of its pages by itself; with `sharing`, those of the prefix are the same pages."""

    def attend(captured: Captured, query: Any, cache: Any, batch: Any) -> Any:
        mask, score = _served_mods(problem, mods(captured))
        if problem.keys == "latent":
            how = {"score_mod": score, "mask_mod": mask, "qk_head_dim": 192, "config": config}
            return jflex.mla_attention(query, cache, batch, **how, implementation=_implementation(on_gpu))
        is_raw = problem.keys.startswith("raw")
        rotation = jflex.rope(interleaved=problem.keys == "raw neighbours") if is_raw else None
        return jflex.paged_attention(
            query,
            cache,
            batch,
            score_mod=score,
            mask_mod=mask,
            key_mod=rotation,
            implementation=_implementation(on_gpu),
            config=config,
        )

    return attend, _paged_inputs(problem, problem.prefix * sharing)


def _cascade(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    """The shared pages are loaded once: the same arrays as two levels."""
    query, cache, batch = _paged_inputs(problem, problem.prefix)
    pages = problem.prefix // problem.page
    prefix = jnp.array([problem.prefix], jnp.int32)
    rows = jnp.array([0, query.shape[0]], jnp.int32)
    shared = jflex.paged.PagedBatch(rows, prefix, batch.page_table[:1, :pages])
    own = jflex.paged.PagedBatch(batch.qo_indptr, batch.kv_lengths - problem.prefix, batch.page_table[:, pages:])

    def attend(captured: Captured, query: Any, cache: Any, shared: Any, own: Any) -> Any:
        level = jflex.CascadeLevel.paged
        levels = [level(cache, shared), level(cache, own, start=problem.prefix)]
        return jflex.cascade_attention(query, levels, implementation=_implementation(on_gpu), config=config)

    return attend, (query, cache, shared, own)


def _served_jflex(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    return (_cascade if problem.prefix else _paged if problem.page else _contiguous)(problem, mods, on_gpu, config)


_SERVED: dict[str, Callable[[Problem, BoundMods], Program]] = {
    "jflex": _served_jflex,
    "jflex-mosaic": functools.partial(_served_jflex, on_gpu="mosaic_gpu"),
    "jflex-triton": functools.partial(_served_jflex, on_gpu="triton"),
    "jflex-official": functools.partial(_served_jflex, on_gpu="official_triton"),
    "jflex-invariant": functools.partial(_served_jflex, config=jflex.Config(batch_invariant=True)),
    "jflex-contiguous": _contiguous,
    "jflex-flat": functools.partial(_paged, sharing=True),
    "jflex-copies": _paged,
    "jax-cudnn": functools.partial(_served_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_served_jax_nn, implementation="xla"),
    "jax-xla-latents": _latents_jax_nn,
}
