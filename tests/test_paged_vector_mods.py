"""Vector mods where keys are stored: pages and levels, and what is made of keys before they are written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests import vector_pairs as pairs
from tests.test_vector_mods import BACKENDS, CASES, Case, assert_close, causal, drawn, mods_of

pytestmark = pytest.mark.usefixtures("in_haste")


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
