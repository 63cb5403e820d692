"""Runs a case of paged attention, and says what is right: request by request, dense, in numpy float64.

In every case, all that no request may read holds NaN: unused slots, free pages, page 0, other layers. What a table
holds past a request's pages is out of range.
"""

from __future__ import annotations

import functools
import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases.paged_cases import PagedCase
from tests.cases.vector_pairs import VectorPair
from tests.support import dropout_bits, eight_bits_model, evaluation, oracle, plain_attention, tolerance

SPARE_PAGES, SPARE_ENTRIES = 3, 2
LAYER = 1  # of a stacked cache


class Held(NamedTuple):
    """Keys or values of each request in eight bits, [length, Hkv, D], and their scales, [length, Hkv]."""

    rows: list[np.ndarray]
    scales: list[np.ndarray]

    @classmethod
    def of(cls, case: PagedCase, rows: list[np.ndarray]) -> Held:
        """Rounds what was drawn; scales of heads cut some numbers off."""
        assert case.held is not None  # the case has a dtype of eight bits
        if case.rope is not None:
            columns = [eight_bits_model.in_tiles(x[:, 0, : case.Dv]) for x in rows]
            made = [eight_bits_model.scales_of_tiles(x) for x in columns]
            return cls([eight_bits_model.quantized(x, s, case.held) for x, s in zip(columns, made, strict=True)], made)
        of_heads = np.float32(2.5 + np.arange(case.Hkv)) / eight_bits_model.LARGEST[case.held]
        by_token = lambda x: eight_bits_model.scales_of_rows(x, case.held)
        made = [by_token(x) if case.scales == "token" else np.tile(of_heads, (len(x), 1)) for x in rows]
        return cls([eight_bits_model.quantized(x, s, case.held) for x, s in zip(rows, made, strict=True)], made)

    @property
    def dequantized(self) -> list[np.ndarray]:
        """The rows as attention takes them, float32."""
        return [eight_bits_model.dequantized(x, scale) for x, scale in zip(self.rows, self.scales, strict=True)]


class Drawn(NamedTuple):
    """Arrays in numpy: packed queries, and for each request its keys [length, Hkv, D] and values, before their mods.

    Those of eight bits are dequantized. Of latent vectors, `held` has those of keys, in tiles, twice, and `rotated` the
    other columns.
    """

    query: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    score: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]
    key: dict[str, np.ndarray]
    value: dict[str, np.ndarray]
    held: tuple[Held, Held] | None = None
    rotated: list[np.ndarray] | None = None

    @property
    def captured(self) -> tuple[dict[str, np.ndarray], ...]:
        """What the mods capture."""
        return self.score, self.mask, self.key, self.value


class Right(NamedTuple):
    """What the oracle says, and how far sums in another order may be off."""

    out: np.ndarray
    lse: np.ndarray
    max: np.ndarray
    entropy: np.ndarray
    out_rounding: np.ndarray
    lse_rounding: np.ndarray


@functools.cache
def draw(case: PagedCase) -> Drawn:
    """Draws the arrays."""
    rng, dtype = np.random.default_rng(zlib.crc32(case.name.encode())), jnp.dtype(case.dtype)
    query = (case.factor * rng.normal(size=(case.N, case.Hq, case.D))).astype(dtype)
    of_requests = lambda size: [rng.normal(size=(n, case.Hkv, size)).astype(dtype) for n in case.lengths]
    keys = of_requests(case.D)
    values = of_requests(case.Dv or case.D) if case.rope is None else [x[..., : case.Dv] for x in keys]
    held = None
    rotated = None
    if case.held is not None and case.rope is not None:
        rotated, of_latents = [x[..., case.Dv :].astype(jnp.bfloat16) for x in keys], Held.of(case, keys)
        values = [x.reshape(len(x), 1, case.Dv) for x in of_latents.dequantized]
        keys = [np.concatenate([x, y], axis=2, dtype=np.float32) for x, y in zip(values, rotated, strict=True)]
        held = of_latents, of_latents
    elif case.held is not None:
        held = Held.of(case, keys), Held.of(case, values)
        keys, values = (x.dequantized for x in held)
    captured = [
        {} if pair is None else {name: np.asarray(x) for name, x in pair.captures(rng, case).items()}
        for pair in (case.score, case.mask)
    ]
    for pair, size in ((case.key, case.D), (case.value, case.Dv or case.D)):
        drawn = {} if pair is None else pair.captures(rng, case.R, case.Hkv, case.S, size)
        captured.append({name: x.astype(np.float32) for name, x in drawn.items()})
    return Drawn(query, keys, values, *captured, held, rotated)


def modified(pair: VectorPair | None, rows: np.ndarray, r: int, captured: dict[str, np.ndarray]) -> np.ndarray:
    """Keys or values [length, H, D] of a request, as a mod makes them, in float64."""
    rows = rows.astype(np.float64)
    if pair is None:
        return rows
    length, heads = rows.shape[:2]
    at = (np.full((length, 1), r), np.arange(heads)[None], np.arange(length)[:, None])
    return pair.exact(rows, *at, {name: x.astype(np.float64) for name, x in captured.items()})


def placed(case: PagedCase, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Puts keys and values on pages, which ones is drawn; returns the cache and the table."""
    x, rng = draw(case), np.random.default_rng(seed)
    needed = [case.pages_of(n) for n in case.lengths]
    num_pages = 1 + sum(needed) + SPARE_PAGES
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.full((case.R, max(needed, default=0) + SPARE_ENTRIES), 10**6, np.int32)
    table[:, -1] = -7
    rows = [x.keys, x.values] if x.held is None else [of for held in x.held for of in held]
    if x.held is not None and x.rotated is not None:
        rows = [[a.reshape(len(a), 1, case.Dv) for a in x.held[0].rows], x.rotated, x.held[0].scales]
    unused = lambda dtype: 127 if dtype == np.int8 else np.nan
    pages = [np.full((num_pages, case.page_size, *a[0].shape[1:]), unused(a[0].dtype), a[0].dtype) for a in rows]
    for r, length in enumerate(case.lengths):
        for i in range(needed[r]):
            table[r, i] = free.pop()
        at = np.arange(length)
        for to, of in zip(pages, rows, strict=True):
            to[table[r, at // case.page_size], at % case.page_size] = of[r]
    if case.layers is not None:
        stack = lambda a: np.stack([a if i == LAYER else np.full_like(a, unused(a.dtype)) for i in range(case.layers)])
        pages = [stack(a) for a in pages]
    if case.rope is not None:
        apart = pages[1:] if x.rotated is not None else []
        return jflex.paged.LatentCache(jnp.asarray(pages[0]), case.rope, *map(jnp.asarray, apart)), table
    if x.held is not None:  # rows and scales of keys, then of values
        pages = [*pages[::2], *pages[1::2]]
        if case.scales == "head":
            stack = (lambda a: a) if case.layers is None else lambda a: np.tile(a, (case.layers, 1))
            pages[2:] = [stack(held.scales[0][0]) for held in x.held]
    return jflex.paged.PagedCache(*map(jnp.asarray, pages)), table


def batch_of(case: PagedCase, table: np.ndarray) -> jflex.paged.PagedBatch:
    """The batch of a case."""
    return jflex.paged.PagedBatch(*map(jnp.asarray, (case.indptr, np.array(case.lengths, np.int32), table)))


def options_of(backend: str) -> dict[str, Any]:
    """Keyword arguments that choose a backend."""
    implementation, _, interpret = backend.partition("-")
    return {"implementation": implementation, "config": jflex.Config(interpret=True) if interpret else None}


def arguments_of(case: PagedCase, backend: str, captured, layer=None, stats: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keyword arguments of `paged_attention`; `captured` is what the mods capture, up to the last one of the case."""
    captures = dict(zip(("score", "mask", "key", "value"), captured, strict=False))
    pairs = {"score": case.score, "mask": case.mask, "key": case.key, "value": case.value}
    return {
        **{f"{role}_mod": None if pair is None else pair.jax(captures[role]) for role, pair in pairs.items()},
        "scale": case.scale, "layer": layer, "normalize": case.normalize, "return_stats": stats,
        "dropout_rate": case.dropout,
        "dropout_key": jax.random.key(dropout_bits.KEY[1]) if case.dropout else None,
        **options_of(backend),
    }  # fmt: skip


def call(case: PagedCase, backend: str, query, cache, batch, captured, layer=None, stats=()) -> tuple[jax.Array, Any]:
    """Calls `paged_attention` for out and lse, or out and statistics; `mla_attention` for a case with rotated keys."""
    arguments = arguments_of(case, backend, captured, layer, stats)
    if case.rope is not None:
        names = "score_mod", "mask_mod", "scale", "layer", "implementation", "config"
        arguments = {name: arguments[name] for name in names}
        return jflex.mla_attention(query, cache, batch, **arguments, return_lse=True)
    has_lse = case.normalize == "softmax" and not stats
    result = jflex.paged_attention(query, cache, batch, **arguments, return_lse=has_lse)
    return result if has_lse or stats else (result, jnp.zeros(result.shape[:2], jnp.float32))


def layer_of(case: PagedCase) -> Any:
    """The layer of a stacked cache, or None."""
    return None if case.layers is None else jnp.int32(LAYER)


def run(case: PagedCase, backend: str, seed: int = 0, stats: tuple[str, ...] = ()) -> tuple[jax.Array, Any]:
    """Out and lse, or statistics, by a backend, with pages drawn from `seed`."""
    x, (cache, table) = draw(case), placed(case, seed)
    captured = jax.tree.map(jnp.asarray, x.captured)
    return program(case, backend, stats)(jnp.asarray(x.query), cache, batch_of(case, table), captured, layer_of(case))


@functools.cache
def program(case: PagedCase, backend: str, stats: tuple[str, ...] = ()) -> Any:
    """The compiled call."""
    return jax.jit(functools.partial(call, case, backend, stats=stats))


@functools.cache
def exact(case: PagedCase) -> Right:
    """The definition, in float64."""
    x, size = draw(case), case.Dv or case.D
    out, rows = np.zeros((case.N, case.Hq, size)), (case.N, case.Hq)
    right = Right(
        out, np.full(rows, -np.inf if case.normalize == "softmax" else 0.0), np.full(rows, -np.inf), np.zeros(rows),
        np.zeros(out.shape), np.zeros(rows),
    )  # fmt: skip
    for r, length in enumerate(case.lengths):
        at = slice(case.indptr[r], case.indptr[r + 1])
        key, value = modified(case.key, x.keys[r], r, x.key), modified(case.value, x.values[r], r, x.value)
        arrays = SimpleNamespace(query=x.query[at].astype(np.float64)[None], key=key[None], value=value[None])
        score, mask = _of_request(case, r)
        scale = case.D**-0.5 if case.scale is None else case.scale
        factors = _factors_of_request(case, r)
        found = oracle.forward(*vars(arrays).values(), scale, score, mask, {}, None, factors, case.normalize)
        rows = found.lse, oracle.row_max(found, score, {}), oracle.entropy(found)
        right.out[at] = found.out[0]
        right.lse[at], right.max[at], right.entropy[at] = (x[0].T for x in rows)
        if length:
            moves = None if case.normalize == "softmax" else found.visible  # no weight moves by more
            of_out, of_lse = tolerance.forward_rounding(arrays, found, case, moves)
            right.out_rounding[at], right.lse_rounding[at] = of_out[0], of_lse[0].T * (case.normalize == "softmax")
    return right


def _factors_of_request(case: PagedCase, r: int) -> Any:
    """What dropout multiplies the weights of one request by, whose rows the oracle counts from 0; None without."""
    offset, words = case.lengths[r] - case.queries[r], dropout_bits.KEY
    if not case.dropout:
        return None
    return lambda b, h, q, k: dropout_bits.factors(case.dropout, words, b + r, h, q + offset, k)


def _of_request(case: PagedCase, r: int) -> tuple[oracle.Score | None, Any]:
    """The mods of one request, whose rows the oracle counts from 0."""
    x, offset = draw(case), case.lengths[r] - case.queries[r]
    score = mask = None
    if case.score is not None:
        captured = {
            name: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for name, a in x.score.items()
        }
        score = oracle.Score(lambda s, b, h, q, k, _: case.score.exact.value(s, b + r, h, q + offset, k, captured))
    if case.mask is not None:
        mask = lambda b, h, q, k, _: case.mask.exact(b + r, h, q + offset, k, x.mask)
    return score, mask


@functools.cache
def plain(case: PagedCase) -> tuple[np.ndarray, ...]:
    """Plain jnp attention of the same precision, every query over the keys of its request; on the CPU.

    Output, lse, max and entropy.
    """
    x = draw(case)
    owner = np.repeat([*range(case.R), -1], [*case.queries, case.padding])
    most = max(1, *case.lengths)
    padded = [
        np.stack([np.pad(a, ((0, most - len(a)), (0, 0), (0, 0))) for a in arrays] + [np.zeros_like(arrays[0], shape=(
            most, *arrays[0].shape[1:]))])[owner]
        for arrays in (x.keys, x.values)
    ]  # fmt: skip
    lengths = np.array([*case.lengths, 0])[owner]
    positions = np.arange(case.N) + (np.array([*case.lengths, 0]) - [*case.indptr[1:], 0])[owner]
    rows = [a.astype(np.int32) for a in (np.maximum(owner, 0), positions, lengths)]
    factors = np.ones((1, 1, 1), np.float32)
    if case.dropout:
        _, h, k = np.ogrid[:1, : case.Hq, :most]
        at = (rows[0][:, None, None], h, rows[1][:, None, None], k)
        factors = dropout_bits.factors(case.dropout, dropout_bits.KEY, *at).astype(np.float32)
    with jax.default_device(jax.devices("cpu")[0]), evaluation.compiled_in_haste(True):
        found = jax.jit(functools.partial(_plain, case))(x.query, *padded, rows, x.captured, factors)
    return tuple(map(np.asarray, found))


def _plain(case: PagedCase, query, key, value, rows, captured, factors) -> tuple[jax.Array, ...]:
    """query [N, Hq, D]; key and value [N, S, Hkv, D]; request, position and length of every row; [N, Hq, S]."""
    key, value = (
        x if pair is None else _plainly_modified(pair.jax(c), x.astype(query.dtype), rows[0])
        for pair, x, c in ((case.key, key, captured[2]), (case.value, value, captured[3]))
    )
    request, position, length = (x[:, None, None, None] for x in rows)
    heads, keys = (jnp.arange(n, dtype=jnp.int32) for n in (case.Hq, key.shape[1]))
    places = jnp.broadcast_arrays(request, heads[:, None, None], position, keys)
    visible = places[3] < length
    if case.mask is not None:
        visible &= plain_attention.over_all(case.mask.jax(captured[1]))(*places)
    mod, query = None if case.score is None else case.score.jax(captured[0]), query[:, None]
    s = plain_attention.scores(query, key, mod, visible, places, case.scale)
    weights, lse = plain_attention.weights(s, visible, case.normalize)
    out = plain_attention.output(weights, value, query.dtype, factors[:, :, None])
    found = lse, plain_attention.row_max(s, visible), plain_attention.entropy(weights, lse)
    return out[:, 0], *(x[..., 0] for x in found)


def _plainly_modified(mod: Any, x: jax.Array, request: jax.Array) -> jax.Array:
    """A vector mod of [N, S, H, D] in float32, rounded once."""
    places = (request[:, None, None], *(jnp.arange(n, dtype=jnp.int32) for n in (x.shape[2], x.shape[1])))
    b, h, i = jnp.broadcast_arrays(places[0], places[1][None, None], places[2][None, :, None])
    return jax.vmap(jax.vmap(jax.vmap(mod)))(x.astype(jnp.float32), b, h, i).astype(x.dtype)


def check(case: PagedCase, found: tuple[jax.Array, jax.Array]) -> None:
    """Fails unless out and lse are right."""
    right, by_plain = exact(case), plain(case)
    extra = jax.default_backend() == "gpu" or case.dtype == "float32"
    rounding = lambda x, more, dtype: tolerance.one_rounding(x, dtype) + (more if extra else 0)
    tolerance.check("out", found[0], by_plain[0], right.out, rounding(right.out, right.out_rounding, case.dtype))
    tolerance.check("lse", found[1], by_plain[1], right.lse, rounding(right.lse, right.lse_rounding, np.float32))


def check_stats(case: PagedCase, stats: jflex.AttentionStats) -> None:
    """Fails unless max and entropy are right."""
    right, by_plain = exact(case), plain(case)
    moved = np.where(np.isfinite(right.max), right.lse_rounding + 2 * tolerance.one_rounding(right.max, np.float32), 0)
    for name, number in (("max", 2), ("entropy", 3)):
        wanted = getattr(right, name)
        allowed = moved + 2 * tolerance.one_rounding(wanted, np.float32)
        tolerance.check(name, getattr(stats, name), by_plain[number], wanted, allowed)
