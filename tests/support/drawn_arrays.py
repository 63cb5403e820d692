"""The arrays of a case, its BlockMask, and what its masks show."""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases.table import Case


class Drawn(NamedTuple):
    """The arrays of a case, in numpy; query, key, value and d_out in the layout BTNH.

    The cotangent of the lse is one of statistics where these are requested.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_out: np.ndarray
    d_lse: Any
    score: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]

    def floats(self) -> dict[str, np.ndarray]:
        """The captured arrays that get gradients: numbers, but for those that are called fixed."""
        wanted = lambda name, x: jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("fixed")
        return {name: x for name, x in self.score.items() if wanted(name, x)}


@functools.cache
def draw(case: Case) -> Drawn:
    """Draws the arrays in their own dtype."""
    n, rng = case.sizes, np.random.default_rng(zlib.crc32(case.name.encode()))
    shapes = [(n.B, n.T, n.Hq, n.D), (n.Bkv, n.S, n.Hkv, n.D), (n.Bkv, n.S, n.Hkv, n.Dv), (n.B, n.T, n.Hq, n.Dv)]
    q, k, v, d_out = (rng.normal(size=shape) for shape in shapes)
    if case.positive:
        q, k = np.abs(q) + 0.3, np.abs(k) + 0.3
    dtype = jnp.dtype(case.dtype)
    d_lse = rng.normal(size=(n.B, n.Hq, n.T)).astype(np.float32)
    captured = [
        {} if pair is None else {name: np.asarray(x) for name, x in pair.captures(rng, case.capture_sizes).items()}
        for pair in (case.score, case.mask)
    ]
    if case.sinks:  # far below, among and far above the scores
        captured[0]["sinks"] = np.linspace(-20.0, 5.0, n.Hq, dtype=np.float32)
    qk_dtype = jnp.dtype(case.qk_dtype or dtype)
    return Drawn(q.astype(qk_dtype), k.astype(qk_dtype), v.astype(dtype), d_out.astype(dtype), d_lse, *captured)


def drawn_tangents(tree: Any, seed: int = 1) -> Any:
    """Random tangents of arrays, in their dtypes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=np.shape(x)), x.dtype), tree)


def poisoned(case: Case) -> Drawn:
    """The arrays of a case, with NaN in all keys and values that no length reaches."""
    x, n = draw(case), case.sizes
    if case.kv_lengths is None:
        return x
    lengths = np.array(case.kv_lengths if n.Bkv == n.B else [max(case.kv_lengths)])
    inside = (np.arange(n.S) < lengths[:, None])[:, :, None, None]
    return x._replace(key=nan_outside(inside, x.key), value=nan_outside(inside, x.value))


def nan_outside(inside: np.ndarray, x: np.ndarray) -> np.ndarray:
    """NaN in all that lies outside."""
    return np.where(inside, x, np.array(np.nan, x.dtype))


def block_mask(case: Case) -> jflex.BlockMask | None:
    """The BlockMask of a case, or None."""
    if case.block is None:
        return None
    n, captures = case.sizes, jax.tree.map(jnp.asarray, draw(case).mask)
    if case.max_blocks is not None:
        return jax.jit(lambda captures: _create_block_mask(case, case.mask.jax(captures)))(captures)
    mod = None if case.mask is None else case.mask.jax(captures)
    if case.states is None:
        return _create_block_mask(case, mod)
    lists = []
    for kind in (1, 2):
        is_kind = case.states == kind
        lists += [is_kind.sum(-1), np.argsort(~is_kind, axis=-1, stable=True)]
    return jflex.BlockMask.from_kv_blocks(*lists, block_size=case.block, mask_mod=mod, seq_lengths=(n.T, n.S))


def _create_block_mask(case: Case, mod: Any) -> jflex.BlockMask:
    n = case.sizes
    by_batch, by_head = n.B if case.by_batch else None, n.Hq if case.by_head else None
    return jflex.create_block_mask(mod, by_batch, by_head, n.T, n.S, block_size=case.block, max_blocks=case.max_blocks)


def visible(case: Case, b, h, q, k, _: Any = None) -> Any:
    """What the masks of a case show, at open grids of indices."""
    shown = True if case.mask is None else case.mask.exact(b, h, q, k, draw(case).mask)
    if case.states is not None:
        states = np.kron(case.states, np.ones((1, 1, case.block, case.block), int))
        states = states[:, :, : case.sizes.T, : case.sizes.S]
        shown = (states == 2) | ((states == 1) & shown)
    return shown & case.within & (True if case.kv_lengths is None else k < np.array(case.kv_lengths)[b])


def visible_places(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """The dense mask, and b, h, q_idx, kv_idx of every element: of a visible one of its head where masked.

    What a mod makes of masked elements shall not disturb its derivative. Where a head sees nothing, it gets the second
    query and the first key: a mod may be undefined up to the diagonal.
    """
    n = case.sizes
    shown = np.broadcast_to(visible(case, *case.places), (n.B, n.Hq, n.T, n.S))
    flat = shown.reshape(n.B, n.Hq, -1)
    seen = np.where(flat.any(-1), flat.argmax(-1), n.S if n.T > 1 else 0)[..., None]
    places = []
    for place in case.places:
        place = np.broadcast_to(place, shown.shape).astype(np.int32)
        elsewhere = np.take_along_axis(place.reshape(flat.shape), seen, axis=-1)[..., None]
        places.append(np.where(shown, place, elsewhere))
    return shown, places
