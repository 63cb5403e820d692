"""The JAX peers with as many queries as keys, from a problem's mods to a callable.

All arrays are arguments of what is jitted, so that none is a constant of the program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks import roofline
from benchmarks.problems import EIGHT_BITS, Problem
from benchmarks.variants import LARGE, VARIANTS, WINDOW, Mods, Operations, document_offsets

_ORDERS = {
    "rows": lambda canvas, tile: None,
    "tiles": jflex.masks.tile_order,
    "morton": lambda canvas, tile: jflex.masks.morton_order(canvas),
}
OPERATIONS = Operations(
    jnp.tanh,
    lambda x: x.astype(jnp.float32),
    jnp.clip,
    lambda order, canvas, kernel, tile: jflex.masks.neighborhood(canvas, kernel, order=_ORDERS[order](canvas, tile)),
)
IMPLEMENTATIONS = {
    "jflex": None, "jflex-mosaic": "mosaic_gpu", "jflex-triton": "triton", "jflex-official": "official_triton",
    "jflex-xla": "xla",
}  # fmt: skip
Captured = Mapping[str, jax.Array]
BoundMods = Callable[[Captured], Mods]
Attend = Callable[..., Any]  # (query, key, value, captured arrays, BlockMask or None) -> out


def mods_of(problem: Problem) -> tuple[BoundMods, dict[str, jax.Array]]:
    """A problem's mods, as a function of the captured arrays, and these arrays."""
    variant = VARIANTS[problem.variant]
    indices = {name: jnp.asarray(array) for name, array in variant.indices(problem).items()}
    captured = {
        name: jnp.asarray(array, problem.dtype if name in LARGE else jnp.float32)
        for name, array in variant.captured(problem).items()
    }
    return lambda captured: variant.make(problem, {**indices, **captured}, OPERATIONS), captured


def inputs_of(problem: Problem, captured: Captured, block_mask: jflex.BlockMask | None) -> tuple[Any, ...]:
    """Random query, key and value, captured arrays and the BlockMask."""
    B, S, Hkv, D = problem.B, problem.S, problem.Hkv, problem.D
    shapes = (B, problem.T, problem.Hq, D), (B, S, Hkv, D), (B, S, Hkv, problem.value_size)
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(x, shape, problem.dtype) for x, shape in zip(keys, shapes, strict=True))
    if problem.keys in EIGHT_BITS:
        query, key = query.astype(problem.keys), key.astype(problem.keys)
    return query, key, value, captured, block_mask


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
    """The causal BlockMask of the best blocks of a problem, as `flax_layers.attention.selection` makes it."""
    scores = jflex.block_scores(query, key, block_size=problem.block)
    indices = jflex.select_blocks(scores, problem.selected, block_size=problem.block)
    return jflex.block_mask_from_indices(
        indices, problem.T, problem.S, H=problem.Hq, block_size=problem.block, mask_mod=jflex.masks.causal()
    )


def with_residuals(attend: Attend, problem: Problem) -> Callable[..., Any]:
    """``(*inputs) -> (out, pull)``; whether captured arrays have gradients depends on the problem."""

    def both(*inputs: Any) -> Any:
        *arrays, captured, block_mask = inputs
        if problem.differentiated:
            return jax.vjp(lambda *x: attend(*x, block_mask), *arrays, captured)
        return jax.vjp(lambda *x: attend(*x, captured, block_mask), *arrays)

    return both


def with_tangents(peer: str, problem: Problem, mods: BoundMods) -> Callable[..., Any]:
    """``(tangents, *inputs) -> (out, its tangent)``; whether captured arrays have tangents depends on the problem."""
    if peer in IMPLEMENTATIONS:
        attend = _jflex(problem, mods, IMPLEMENTATIONS[peer], jflex.Config(forward_mode=True))
    else:
        attend = ATTENTION[peer](problem, mods)

    def both(tangents: Sequence[Any], *inputs: Any) -> Any:
        moved = 4 if problem.differentiated else 3
        return jax.jvp(lambda *x: attend(*x, *inputs[moved:]), inputs[:moved], tuple(tangents[:moved]))

    return both


def forward_and_backward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """``(query, key, value, cotangent) -> (out, gradients)`` of an attention."""

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(attend, *arrays[:-1])
        return out, pull(arrays[-1])

    return both


def _arguments(
    problem: Problem,
    mods: BoundMods,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    captured: Captured,
    blocks: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `flex_attention`, by form, selection, `weights`, `keys` and `stats`."""
    mask, score = mods(captured)
    if problem.weights == "sigmoid":
        assert score is None  # of the variants of the suite
        score = jflex.scores.sigmoid(-math.log(problem.S))
    weights = {
        "sinks": {"sinks": jnp.zeros(problem.Hq)},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(1)},
        "sigmoid": {"normalize": "none"},
    }
    options = {**weights.get(problem.weights, {}), "return_stats": tuple(problem.stats.split())}
    options |= {"mask_mod": mask} if problem.form == "everywhere" else {}
    options |= dict.fromkeys(("query_mod", "key_mod"), jflex.rope()) if problem.keys == "raw" else {}
    blocks = selected_blocks(problem, query, key) if problem.selected else blocks
    return (query, key, value, score, blocks), options


def backends_of(problem: Problem, mods: BoundMods, inputs: tuple[Any, ...]) -> dict[str, str]:
    """The backend of jflex that runs a problem, for each peer that is jflex."""
    arguments, options = _arguments(problem, mods, *inputs)
    backend = str(jflex.explain(*arguments, **options).backend)
    return {name: named or backend for name, named in IMPLEMENTATIONS.items()}


def _rotating(problem: Problem, mods: BoundMods) -> Attend:
    """Queries and keys rotated by XLA, and the plain call."""
    plain = _jflex(dataclasses.replace(problem, keys=""), mods)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, captured: Captured, block_mask: Any) -> Any:
        query, key = (jflex.rotary.rotate(x, jnp.arange(x.shape[1])) for x in (query, key))
        return plain(query, key, value, captured, block_mask)

    return attend


def _jflex(
    problem: Problem, mods: BoundMods, implementation: str | None = None, config: jflex.Config | None = None
) -> Attend:
    def attend(*inputs: Any) -> Any:
        arguments, options = _arguments(problem, mods, *inputs)
        result = jflex.flex_attention(*arguments, implementation=implementation, config=config, **options)
        return result[0] if problem.stats else result

    return attend


def _jax_nn(problem: Problem, mods: BoundMods, implementation: Any) -> Attend:
    if problem.variant == "softcap":
        raise NotImplementedError("there is no soft capping.")
    window = (min(WINDOW, problem.S // 2) - 1, 0) if problem.variant == "sliding_window" else None
    causal = problem.variant in ("causal", "sliding_window", "alibi")

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, captured: Captured, block_mask: Any) -> Any:
        bias = captured["bias"][None] if "bias" in captured else None
        if "slopes" in captured:
            places = jnp.arange(problem.S, dtype=jnp.float32)
            bias = (captured["slopes"][:, None, None] * (places[None] - places[:, None])[None])[None]
            bias = bias.astype(query.dtype) if implementation == "cudnn" else bias  # cuDNN's has the query's dtype
        return jax.nn.dot_product_attention(
            query, key, value, bias, is_causal=causal, local_window_size=window, implementation=implementation
        )

    return attend


def _fa4_jax(problem: Problem, mods: BoundMods) -> Attend:
    import fa4_jax  # type: ignore

    options, offsets = {"causal": problem.variant != "noop", "backend": "cute"}, document_offsets(problem)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, captured: Captured, block_mask: Any) -> Any:
        if offsets is None:
            return fa4_jax.flash_attn(query, key, value, **options)
        packed = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
        return fa4_jax.flash_attn_varlen(*packed, offsets, offsets, **options).reshape(query.shape)

    return attend


def _tokamax(problem: Problem, mods: BoundMods) -> Attend:
    import tokamax  # type: ignore

    return lambda query, key, value, captured, block_mask: tokamax.dot_product_attention(
        query, key, value, is_causal=problem.variant == "causal", implementation="mosaic"
    )


ATTENTION: dict[str, Callable[[Problem, BoundMods], Attend]] = {
    **{name: functools.partial(_jflex, implementation=named) for name, named in IMPLEMENTATIONS.items()},
    "jax-cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_jax_nn, implementation="xla"),
    "tokamax": _tokamax,
    "fa4-jax": _fa4_jax,
    "jflex-rotating": _rotating,
}
