"""Paged attention as it is defined: every key of every request gathered, dense scores. For tests and small cases."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jflex.backends.base import PagedInputs, Saved
from jflex.backends.dense_scores import softmax, stats_of
from jflex.backends.eight_bits import dequantized, dequantized_latents
from jflex.backends.vector_mods import modified_keys
from pallas_kernels.spec import AttentionSpec, Mod


def attend(spec: AttentionSpec, inputs: PagedInputs) -> Saved:
    """Softmax over all logical keys of a query's request: N x S scores, and as many copies of keys."""
    p, exact = spec, jnp.dtype(spec.exact)
    n, j = jnp.arange(p.T, dtype=jnp.int32), jnp.arange(p.S, dtype=jnp.int32)
    request = jnp.searchsorted(inputs.indptr[1:], n, side="right").astype(jnp.int32)
    real, request = request < p.B, jnp.minimum(request, p.B - 1)
    exists = real[:, None] & (j[None] < inputs.lengths[request][:, None])  # [N, S]

    visible = jnp.broadcast_to(exists[:, None], (p.T, p.Hq, p.S))
    if p.mask_mod is not None:
        visible &= _seen(p.mask_mod, inputs.captured.mask, request, jnp.arange(p.Hq, dtype=jnp.int32), n, j)

    def keys(pages: jax.Array, mod: Mod | None, operands: tuple[jax.Array, ...], scale: jax.Array | None) -> jax.Array:
        """Keys of each query's request, [N, S, Hq, D]; zeros where masked, because 0 times NaN is NaN."""
        rows = _rows(p, inputs, pages, scale)
        if mod is not None:  # of ones past the end: zero times the derivative of NaN would be NaN
            used = j[None] < inputs.lengths[:, None]  # [R, S]
            at = jnp.broadcast_arrays(jnp.arange(p.B, dtype=jnp.int32)[:, None], j[None])
            rows = modified_keys(functools.partial(mod, operands), jnp.where(used[..., None, None], rows, 1), *at)
        selected = jnp.repeat(rows[request].astype(exact), p.group, axis=2)
        return jnp.where(visible.swapaxes(1, 2)[..., None], selected, 0)

    key = keys(inputs.key, p.key_mod, inputs.captured.key, inputs.key_scale)
    value = keys(inputs.value, p.value_mod, inputs.captured.value, inputs.value_scale)
    value = value[..., : p.Dv]  # of a latent cache, the keys
    s = jnp.einsum("nhd,nshd->nhs", inputs.query.astype(exact), key, precision="highest") * p.scale
    if p.score_mod is not None:
        s = _modified(p.score_mod, inputs.captured.score, s.astype(jnp.float32), visible, request).astype(exact)
    drop = lambda weights: weights
    if p.dropout is not None:
        kept = _seen(p.dropout.mod, inputs.captured.dropout, request, jnp.arange(p.Hq, dtype=jnp.int32), n, j)
        drop = lambda weights: jnp.where(kept, weights * p.kept_scale, 0)
    if p.normalize == "none":
        weights = drop(jnp.where(visible, s, 0))
        out = jnp.einsum("nhs,nshd->nhd", weights, value, precision="highest")
        return Saved(out.astype(p.out_dtype), jnp.zeros((p.T, p.Hq), jnp.float32))
    return _softmax(p, s, value, visible, drop)


def _rows(p: AttentionSpec, inputs: PagedInputs, pages: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The rows of the pages of each request, [R, S, Hkv, D]; of eight bits, dequantized."""
    pages_of = jnp.clip(inputs.table, 0, p.num_pages - 1) + inputs.first_page[0]
    rows = pages[pages_of].reshape(p.B, p.S, p.Hkv, pages.shape[3])
    if p.has_latent_tiles:
        assert inputs.rope_key is not None  # what has tiles has them apart
        assert inputs.key_scale is not None
        tiles, rope = (x[pages_of].reshape(p.B, p.S, -1) for x in (inputs.key_scale, inputs.rope_key))
        return dequantized_latents(rows, tiles, rope[:, :, None], jnp.dtype(p.exact))
    if scale is None:
        return rows
    scale = scale if scale.ndim == 1 else scale[pages_of].reshape(p.B, p.S, p.Hkv)
    return dequantized(rows, scale, jnp.dtype(p.exact))


def _softmax(
    p: AttentionSpec, s: jax.Array, value: jax.Array, visible: jax.Array, drop: Callable[[jax.Array], jax.Array]
) -> Saved:
    """Output, lse and statistics from scores [N, Hq, S] and values [N, S, Hq, Dv]; `drop` applies dropout."""
    weights, lse = softmax(s, visible)
    out = jnp.einsum("nhs,nshd->nhd", drop(weights), value, precision="highest")
    stats = stats_of(s, visible, weights, lse, None) if p.stats else ()
    lse, *stats = (x.astype(jnp.float32) for x in (lse, *stats))
    named_stats = {name: x for name, x in zip(("max", "entropy"), stats, strict=False) if name in p.stats}
    return Saved(out.astype(p.out_dtype), lse, **named_stats)


def _seen(mask: Mod, operands, request, h, n, j) -> jax.Array:
    """A mask, or the mod of dropout, on [N, Hq, S]."""
    at = functools.partial(mask, operands)
    at = jax.vmap(at, in_axes=(None, None, None, 0))
    at = jax.vmap(at, in_axes=(None, 0, None, None))
    return jax.vmap(at, in_axes=(0, None, 0, None))(request, h, n, j)


def _modified(mod: Mod, operands, s: jax.Array, visible: jax.Array, request: jax.Array) -> jax.Array:
    """The score mod on [N, Hq, S]; a masked position is replaced by a visible one of the same head.

    A mod may be NaN where masked (``sqrt(q_idx - kv_idx)``), and so would be 0 times its derivative.
    """
    n, h, j = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in range(3))
    seen = jnp.argmax(visible.swapaxes(0, 1).reshape(s.shape[1], -1), axis=1).astype(jnp.int32)
    at = (seen // s.shape[2], jnp.arange(s.shape[1], dtype=jnp.int32), seen % s.shape[2])
    s, n, j = (jnp.where(visible, x, x[at][None, :, None]) for x in (s, n, j))
    call = functools.partial(mod, operands)
    for _ in range(3):
        call = jax.vmap(call)
    return call(s, request[n], h, n, j)
