"""Paged attention with the pages of each request divided among eight simulated devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from tests.support import paged_evaluation
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES, collectives, mesh_of
from tests.support.divided_pages import BY_NAME, check_in_turn, in_turn, options_of
from tests.support.rows import tiers

pytestmark = NEEDS_EIGHT_DEVICES
ROUND = {"context": 8}
HEADS = {"context": 4, "model": 2}
CASES = [
    ("decode", ROUND, "xla"), ("decode", HEADS, "xla"), ("mixed", ROUND, "xla"), ("mixed", HEADS, "xla"),
    ("mixed_with_padding_and_empty_requests", HEADS, "xla"), ("nothing_but_empty_requests", ROUND, "xla"),
    ("more_queries_than_keys", ROUND, "xla"), ("window", ROUND, "xla"), ("bias_by_key", HEADS, "xla"),
    ("random_elements", ROUND, "xla"), ("divided", ROUND, "xla"), ("sigmoid", HEADS, "xla"),
    ("divided_dropout", ROUND, "xla"), ("rotated_pages_of_64", HEADS, "xla"), ("gains_of_heads", HEADS, "xla"),
    ("e4m3", HEADS, "xla"), ("e4m3_of_heads", HEADS, "xla"), ("mixed", HEADS, "triton-interpret"),
    ("rotated_in_part", HEADS, "triton-interpret"), ("window", ROUND, "reference"),
]  # fmt: skip


@tiers(full={"name": ["decode", "bias_by_key", "rotated_pages_of_64", "gains_of_heads"]}, rest="long")
@pytest.mark.parametrize(("name", "axes", "backend"), CASES)
def test_pages_in_turn_against_float64(name, axes, backend):
    check_in_turn(BY_NAME[name], axes, backend)


def step(mesh, **options):
    """A step of decoding: writes the tokens, and attends."""

    def run(q, k, v, cache, batch):
        slots = jflex.paged.token_slots(batch, q.shape[0], cache.page_size)
        cache = jflex.paged.write(cache, k, v, slots)
        return jflex.context_parallel_paged_attention(q, cache, batch, mesh=mesh, **options), cache

    return run


def test_only_states_are_sent():
    """Of a step that writes its tokens, too: each device keeps those that lie on its pages."""
    mesh, case = mesh_of(**ROUND), BY_NAME["divided"]
    cache, table = in_turn(case, 8)
    cache = jax.device_put(cache, NamedSharding(mesh, P("context")))
    batch = paged_evaluation.batch_of(case, table)
    query = jnp.asarray(paged_evaluation.draw(case).query)
    new = jnp.ones((case.N, case.Hkv, case.D))
    run = jax.jit(step(mesh, implementation="xla"), donate_argnums=3)
    compiled = run.lower(query, new, new, cache, batch).compile()
    assert collectives(compiled) == {"all-reduce": 2}
    shape = f"f32[{case.N},{case.Hq},{case.D + 1}]"
    assert compiled.as_text().count(f"{shape}{{2,1,0}} all-reduce(") == 1
    one = jax.jit(lambda q, k, v, cache, batch: jflex.paged_attention(
        q, jflex.paged.write(cache, k, v, jflex.paged.token_slots(batch, q.shape[0], 64)), batch, implementation="xla"
    ))  # fmt: skip
    right = one(query, new, new, jax.device_get(cache), batch)
    found, written = run(query, new, new, cache, batch)
    np.testing.assert_allclose(found, right, rtol=3e-5, atol=3e-5)
    assert written.k.sharding.spec[0] == "context"


@pytest.mark.full
def test_query_and_output_mods_and_sinks():
    case, mesh = BY_NAME["mixed"], mesh_of(**HEADS)
    cache, table = in_turn(case, 4)
    rope, sinks = jflex.rope(100.0), jnp.linspace(-1, 1, case.Hq)
    gate = lambda out, lse, b, h, i: out * jax.nn.sigmoid(lse + i.astype(jnp.float32))
    options = options_of(case, "xla") | {"query_mod": rope, "key_mod": rope, "output_mod": gate, "sinks": sinks}
    given = jnp.asarray(paged_evaluation.draw(case).query), cache, paged_evaluation.batch_of(case, table)
    found = jflex.context_parallel_paged_attention(*given, mesh=mesh, head_axes="model", return_lse=True, **{
        name: x for name, x in options.items() if name != "return_stats"
    })  # fmt: skip
    right = jflex.paged_attention(*given, return_lse=True, **{n: x for n, x in options.items() if n != "return_stats"})
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5), found, right)


@pytest.mark.full
def test_results_of_float64_have_the_dtypes_of_paged_attention():
    """The lse was float64 beside a max of float32, which no state may hold: a call with sinks raised."""
    case = BY_NAME["mixed"]
    cache, table = in_turn(case, 8)
    batch, sinks = paged_evaluation.batch_of(case, table), jnp.zeros(case.Hq)
    with jax.enable_x64(True):
        cache, query = jax.tree.map(lambda x: x.astype(jnp.float64), (cache, jnp.ones((case.N, case.Hq, case.D))))
        options = {"sinks": sinks, "return_stats": ("lse", "max", "entropy"), "implementation": "xla"}
        found = jflex.context_parallel_paged_attention(query, cache, batch, mesh=mesh_of(**ROUND), **options)
        right = jflex.paged_attention(query, cache, batch, **options)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(right)]


@pytest.mark.full
def test_trees_of_drafts():
    mesh = mesh_of(**ROUND)
    batch = jflex.paged.PagedBatch(
        jnp.array([0, 4, 5]), jnp.array([40, 9]), jnp.array([[1, 9, 17, 25, 33], [2, 10, 0, 0, 0]], jnp.int32),
        jnp.zeros((2, 4), jnp.int32).at[0].set(jflex.masks.tree_bits([-1, 0, 0, 1])),
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(2, 64, 8, 2, 16)).astype(np.float32)
    cache = jflex.paged.PagedCache(*map(jnp.asarray, x))
    q = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 16)), jnp.float32)
    options = {"mask_mod": jflex.masks.sliding_window(20), "key_mod": jflex.rope(100.0), "implementation": "xla"}
    found = jflex.context_parallel_paged_attention(q, cache, batch, mesh=mesh, **options)
    right = jflex.paged_attention(q, cache, batch, **options)
    np.testing.assert_allclose(found, right, rtol=3e-5, atol=3e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_inside_of_shard_map_and_in_the_mesh_of_the_context(kind):
    case, mesh = BY_NAME["bias_by_key"], mesh_of(kind, **ROUND)
    cache, table = in_turn(case, 8)
    batch, query = paged_evaluation.batch_of(case, table), jnp.asarray(paged_evaluation.draw(case).query)
    cache = jax.device_put(cache, NamedSharding(mesh, P(None, "context")))
    query, batch = jax.device_put((query, batch), NamedSharding(mesh, P()))
    local = functools.partial(jflex.context_parallel_paged_attention, return_lse=True, **{
        name: x for name, x in options_of(case, "xla").items() if name != "return_stats"
    })  # fmt: skip
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "context"), P()), out_specs=P())
    paged_evaluation.check(case, jax.jit(run)(query, cache, batch))
    with jax.set_mesh(mesh):
        paged_evaluation.check(case, local(query, cache, batch))


@pytest.mark.full
def test_a_derivative_is_refused():
    def loss(q):
        cache = jflex.paged.PagedCache.create(64, 16, 2, 8, dtype=jnp.float32)
        batch = jflex.paged.PagedBatch(jnp.array([0, 1]), jnp.array([40]), jnp.array([[1, 9, 17]], jnp.int32))
        return jflex.context_parallel_paged_attention(
            q, cache, batch, mesh=mesh_of(**ROUND), implementation="xla"
        ).sum()

    with pytest.raises(jflex.UnsupportedError, match=r"`context_parallel_paged_attention` has no derivative on 'xla'"):
        jax.grad(loss)(jnp.ones((1, 4, 8)))
