"""Vector mods where keys are stored: pages and levels, and what is made of keys before they are written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases import vector_pairs as pairs
from tests.mods.test_vector_mods import BACKENDS, CASES, Case, assert_close, causal, drawn, mods_of
from tests.support.rows import tiers


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_pages_and_levels(backend):
    """As in a dense call over the whole sequences, whose last tokens are the queries."""
    how, lengths, counts = BACKENDS[backend], (20, 33), (3, 5)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 33, 4, 16))
    key, value = key[:, :, :2], value[:, :, :2]
    case = Case("pages", query=pairs.project, output=pairs.gate, T=33, Dv=16)
    mods = mods_of(case, drawn(case)[1])
    options = {"mask_mod": causal, "return_lse": True, "kv_lengths": jnp.array(lengths, jnp.int32)}
    whole = jax.jit(lambda: jflex.flex_attention(query, key, value, **options, **mods, implementation="reference"))()
    last = [slice(n - count, n) for n, count in zip(lengths, counts, strict=True)]
    right = [jnp.concatenate([x[r, at] for r, at in enumerate(last)]) for x in (whole[0], whole[1].swapaxes(1, 2))]
    packed = jnp.concatenate([query[r, at] for r, at in enumerate(last)] + [jnp.full((2, 4, 16), jnp.nan)])

    table = jnp.array([[5, 2, 0], [1, 7, 3]], jnp.int32)
    cache = jflex.paged.PagedCache.create(8, 16, 2, 16, dtype=jnp.float32)
    for r, n in enumerate(lengths):
        slots = jflex.paged.slots_of(table[r], jnp.arange(n, dtype=jnp.int32), 16)
        cache = jflex.paged.write(cache, key[r, :n], value[r, :n], slots)
    batch = jflex.paged.PagedBatch(jnp.array([0, 3, 8]), jnp.array(lengths), table)
    paged = functools.partial(jflex.paged_attention, packed, cache, batch, mask_mod=causal, return_lse=True, **how)
    out, lse = jax.jit(lambda: paged(**mods))()
    jax.tree.map(assert_close, [out[:8], lse[:8]], right)
    np.testing.assert_array_equal(out[8:], 0)
    assert jflex.explain(jflex.paged_attention, packed, cache, batch, **mods, **how).backend == how["implementation"]

    level = jflex.CascadeLevel.paged(cache, batch)
    places = {"positions": jflex.paged.token_positions(batch, 10), "requests": jflex.paged.token_requests(batch, 10)}
    cascade = functools.partial(jflex.cascade_attention, packed, [level], mask_mod=causal, return_lse=True)
    out, lse = jax.jit(lambda: cascade(**places, **mods, **how))()
    jax.tree.map(assert_close, [out[:8], lse[:8]], right)
    np.testing.assert_array_equal(out[8:], 0)


LENGTHS = (20, 33)
TABLE = np.array([[5, 2, 0], [1, 7, 3]], np.int32)
KEY, VALUE = np.random.default_rng(0).normal(size=(2, 2, 33, 2, 32)).astype(np.float32)
QUERY = np.random.default_rng(1).normal(size=(8, 4, 32)).astype(np.float32)


def stored(key_mod=None, value_mod=None):
    """A cache whose keys and values were modified before they were written, and the batch; unused slots are NaN."""
    cache = jflex.paged.PagedCache(*[jnp.full((8, 16, 2, 32), jnp.nan)] * 2)
    for r, n in enumerate(LENGTHS):
        at = jnp.arange(n, dtype=jnp.int32)
        rows = (
            x[r, :n] if mod is None else jflex.apply_vector_mod(mod, x[r, :n], at, jnp.full(n, r, jnp.int32))
            for mod, x in ((key_mod, KEY), (value_mod, VALUE))
        )
        cache = jflex.paged.write(cache, *map(jnp.asarray, rows), jflex.paged.slots_of(jnp.asarray(TABLE[r]), at, 16))
    return cache, jflex.paged.PagedBatch(jnp.array([0, 3, 8]), jnp.array(LENGTHS), jnp.asarray(TABLE))


def by_request(vector, b, h, i):
    return vector * (1.0 + b.astype(jnp.float32)) / (1 + h).astype(jnp.float32)


@tiers(full={"backend": "xla-True"}, rest="long")
@pytest.mark.parametrize(("backend", "interleaved"), [("xla", True), ("triton-interpret", False)])
def test_raw_keys_as_keys_that_were_modified_before(backend, interleaved):
    rope = jflex.rope(100.0, interleaved=interleaved)
    options = {"query_mod": rope, "mask_mod": causal, "return_lse": True, **BACKENDS[backend]}
    raw, batch = stored()
    elsewhere = jflex.rope(100.0, interleaved=interleaved, positions=3 * jnp.arange(66).reshape(2, 33))

    def attend(cache, **mods):
        return jax.jit(lambda cache: jflex.paged_attention(QUERY, cache, batch, **mods, **options))(cache)

    for mods in ({"key_mod": rope, "value_mod": by_request}, {"key_mod": elsewhere, "value_mod": rope}):
        jax.tree.map(assert_close, attend(raw, **mods), attend(stored(**mods)[0]))
    rows = {"positions": jflex.paged.token_positions(batch, 8), "requests": jflex.paged.token_requests(batch, 8)}

    def cascade(cache, **mods):
        level = jflex.CascadeLevel.paged(cache, batch)
        return jax.jit(lambda: jflex.cascade_attention(QUERY, [level], **rows, **mods, **options))()

    jax.tree.map(assert_close, cascade(raw, key_mod=rope), cascade(stored(rope)[0]))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_masked_keys_that_a_mod_makes_nan(backend):
    """They change no bit, and neither do slots that a mod makes NaN: the norm of zeros is 0 / 0."""
    hidden, (cache, batch) = 4, stored()

    def of(mod, mask):
        options = {"mask_mod": mask, "key_mod": mod, "value_mod": mod, "return_lse": True, **BACKENDS[backend]}
        return jax.jit(lambda: jflex.paged_attention(QUERY, cache, batch, **options))()

    shown = lambda b, h, q, k: k % hidden != 1
    scaled = lambda x, b, h, i: x / jnp.linalg.norm(x)
    nan = lambda x, b, h, i: jnp.where(i % hidden == 1, jnp.nan, scaled(x, b, h, i))
    jax.tree.map(np.testing.assert_array_equal, of(nan, shown), of(scaled, shown))
    assert all(np.isfinite(x).all() for x in of(scaled, None))
    assert np.isnan(of(nan, None)[0]).all()


@pytest.mark.full
def test_keys_of_a_tree_are_at_the_positions_of_its_nodes():
    """As `token_positions` are those of its queries: nodes 1 and 2 of a fork are at one position."""
    words, rope = jflex.masks.tree_bits([-1, 0, 0]), jflex.rope(100.0)
    cache = jflex.paged.PagedCache.create(4, 16, 2, 32, dtype=jnp.float32)
    lengths, table, at = jnp.array([20]), jnp.array([[1, 2]]), jnp.arange(20, dtype=jnp.int32)
    batch = jflex.paged.PagedBatch(jnp.array([0, 3]), lengths, table, words[None])
    slots, positions = jflex.paged.slots_of(table[0], at, 16), at.at[19].set(18)
    raw = jflex.paged.write(cache, jnp.asarray(KEY[1, :20]), jnp.asarray(VALUE[1, :20]), slots)
    turned = jflex.apply_vector_mod(rope, KEY[1, :20], positions)
    before = jflex.paged.write(cache, turned, jnp.asarray(VALUE[1, :20]), slots)
    attend = functools.partial(jflex.paged_attention, QUERY[:3], batch=batch, query_mod=rope, implementation="xla")
    assert_close(jax.jit(lambda: attend(cache=raw, key_mod=rope))(), jax.jit(lambda: attend(cache=before))())


@pytest.mark.full
def test_a_key_of_several_requests_has_none():
    cache, batch = stored()
    level = jflex.CascadeLevel.paged(cache, batch)
    with pytest.raises(jflex.UnsupportedError, match=r"`key_mod` of `cascade_.* cannot use `b`: .*by_request \(test_p"):
        jflex.cascade_attention(
            QUERY, [level], positions=jflex.paged.token_positions(batch, 8), requests=jnp.zeros(8, jnp.int32),
            key_mod=by_request,
        )  # fmt: skip


@pytest.mark.full
def test_the_default_takes_xla_for_a_matrix_and_explain_says_why():
    cache, batch = stored()
    how = {"implementation": ("triton", "xla"), "config": jflex.Config(interpret=True)}
    account = jflex.explain(
        jflex.paged_attention, QUERY, cache, batch, key_mod=lambda x, b, h, i: x @ jnp.eye(32), **how
    )
    assert account.backend == "xla"
    assert "primitive `dot_general`" in account.reasons["triton"]
    account = jflex.explain(jflex.paged_attention, QUERY, cache, batch, key_mod=jflex.rope(), **how)
    assert "with key_mod on each tile that is loaded" in account.tiles


@pytest.mark.full
def test_keys_before_they_are_written():
    key = jnp.asarray(drawn(CASES[1])[0][1])[0]
    at = jnp.arange(key.shape[0], dtype=jnp.int32)
    assert_close(jflex.apply_vector_mod(jflex.rope(), key, at + 3), jflex.rotary.rotate(key, at + 3))
    factors, rows = jnp.array([2.0, 3.0]), jnp.where(at < 5, 1, -1)  # padding is as request 0
    found = jflex.apply_vector_mod(lambda x, b, h, i: x * factors[b], key, at, rows)
    assert_close(found, key * factors[jnp.maximum(rows, 0)][:, None, None])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"vectors": 3}, TypeError, r"`vectors` must be.*Got int"),
        ({"vectors": jnp.ones((4, 2))}, ValueError, r"`vectors` must be.*float32\[4,2\]\. Reshape"),
        ({"vectors": jnp.ones((4, 2, 8), int)}, TypeError, r"`vectors` must be.*int32\[4,2,8\]\. Cast"),
        ({"positions": [0, 1, 2, 3]}, TypeError, r"`positions` must be int32 \[N\].*Got list"),
        ({"positions": jnp.ones(4)}, TypeError, r"`positions` must be.*float32\[4\]\. Cast"),
        ({"requests": jnp.ones(3, int)}, ValueError, r"`requests` must be.*one for each of the 4 tokens.*int32\[3\]"),
        ({"vector_mod": lambda x, b, h, i: x[1:]}, ValueError, r"`vector_mod` must return one vector"),
        (
            {"vector_mod": jflex.rope(positions=jnp.arange(3))},
            ValueError,
            r"Got 3 for a call with queries up to position 3",
        ),
        ({"vector_mod": jflex.rope(positions=jnp.zeros((3, 4), int))}, ValueError, r"row for each batch entry.*Got 3"),
    ],
    ids=["kind", "axes", "dtype", "list", "floats", "requests", "size", "positions", "rows"],
)
def test_messages_of_keys_to_write(arguments, kind, message):
    right = {"vector_mod": jflex.rope(), "vectors": jnp.ones((4, 2, 8)), "positions": jnp.arange(4)}
    with pytest.raises(kind, match=f"(?s){message}"):
        jflex.apply_vector_mod(**(right | arguments))
