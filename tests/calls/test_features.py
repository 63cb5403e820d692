"""Features of calls: one program for all values, under `jax.vmap` and `jax.checkpoint`, and on eight devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from tests.cases.features import BACKENDS, FEATURES, REFERENCE, ROWS, D
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.rows import tiers
from tests.support.traces import Traced

backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
pytestmark = NEEDS_EIGHT_DEVICES


def features(*left_out):
    return pytest.mark.parametrize("name", [name for name in FEATURES if name not in left_out])


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def placed(name, mesh, sharded=None):
    """The arrays of a feature, all or some of them sharded."""
    arrays, spec = FEATURES[name].draw(), FEATURES[name].spec
    place = lambda x: NamedSharding(mesh, spec(x) if sharded is None or x in sharded else P())
    return {x: jax.device_put(array, place(x)) for x, array in arrays.items()}


def check(name, found):
    """Compares results and gradients with those of one device."""
    right = jax.jit(functools.partial(FEATURES[name].differentiated, REFERENCE))(FEATURES[name].draw())
    jax.tree.map(lambda x, y: assert_close(np.asarray(x), np.asarray(y)), found, right)


@tiers(rest="full", in_turns=True, share=3)
@backends
@features("packed")
def test_jit_of_sharded_arrays_gathers_no_keys(name, backend):
    feature, arrays = FEATURES[name], placed(name, mesh_of())
    run = jax.jit(functools.partial(feature.differentiated, BACKENDS[backend])).lower(arrays).compile()
    found = (_, results), gradients = run(arrays)
    check(name, found)
    [spec, *_] = jax.tree.leaves(feature.results, is_leaf=lambda x: isinstance(x, P))
    assert jax.tree.leaves(results)[0].sharding.is_equivalent_to(NamedSharding(mesh_of(), spec), 4)
    assert all(gradients[x].sharding.is_equivalent_to(arrays[x].sharding, 4) for x in "qk")
    gathered = re.findall(r"= (\S+?)\{.*? all-gather", run.as_text())
    assert not [shape for shape in gathered if re.search(rf"\d+,\d+,\d+,{D}\]", shape)], gathered


@tiers(default={"name": ["plain", "lengths"], "backend": "xla"}, in_turns=True, share=3)
@backends
@features("packed", "vector mods")
def test_explicit_mesh(name, backend):
    """Types say how inputs, captured arrays and outputs are sharded."""
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(FEATURES[name].differentiated, BACKENDS[backend]))(placed(name, mesh))
        assert jax.typeof(jax.tree.leaves(found[0][1])[0]).sharding.spec[:2] == (
            ("data", None) if name != "weights" else ("data", "model")
        )
    check(name, found)


@tiers(rest="full", in_turns=True, share=3)
@backends
@features("dropout", "selected blocks")  # dropout has the indices of a shard
def test_shard_map_over_batch_and_heads(name, backend):
    """Programs of mods, and of their derivatives, are traced outside of the mesh."""
    feature, mesh, arrays = FEATURES[name], mesh_of(), FEATURES[name].draw()
    specs = {x: feature.spec(x) for x in arrays}
    local = lambda arrays: feature.attend(BACKENDS[backend], **arrays)
    whole = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=feature.results)
    sharded = feature._replace(attend=lambda options, **arrays: whole(arrays))
    check(name, jax.jit(functools.partial(sharded.differentiated, {}))(arrays))


@tiers(default={"backend": "xla"})
@backends
def test_a_gradient_inside_of_shard_map(backend):
    arrays = tuple(FEATURES["plain"].draw()[x] for x in "qkv")
    attend = functools.partial(jflex.flex_attention, **BACKENDS[backend])
    local = lambda q, k, v: jax.grad(lambda q: attend(q, k, v).sum())(q)
    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=(ROWS,) * 3, out_specs=ROWS)
    assert_close(jax.jit(sharded)(*arrays), local(*arrays))


@tiers(rest="full")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_constants_of_mods_inside_of_shard_map(compiled, kind):
    """They are computed while tracing, outside of the mesh; without `jit` JAX evaluates each operation in turn."""
    key = jax.random.key(0)

    def attend(q):
        table = jnp.cumsum(jnp.ones(64))
        mod = lambda score, b, h, q_idx, kv_idx: (
            score * jnp.sqrt(2.0) + jnp.exp(-jnp.arange(64.0))[kv_idx] + table[q_idx]
        )
        causal = lambda b, h, q_idx, kv_idx: jnp.tri(64, dtype=bool)[q_idx, kv_idx]
        mask = jflex.create_block_mask(causal, None, None, 64, 64, block_size=16, max_blocks=4)
        dropout = {"dropout_rate": 0.5, "dropout_key": key}
        return jflex.flex_attention(q, q, q, mod, mask, implementation="xla", **dropout)

    mesh, q = mesh_of(kind), jax.random.normal(jax.random.key(1), (2, 64, 4, D))
    expected = jnp.concatenate([attend(x[None]) for x in q])
    run = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with jax.set_mesh(mesh):
        found = (jax.jit(run) if compiled else run)(jax.device_put(q, NamedSharding(mesh, P("data"))))
    assert_close(np.asarray(found), expected)


IDS = np.arange(64) // 20
MADE_INSIDE = {
    "causal document": lambda _: jflex.masks.causal_document(IDS),
    "padding": lambda _: jflex.masks.padding(np.array([30])),
    "array of the mesh": lambda ids: lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
}


@tiers(full={"compiled": True}, rest="long")
@pytest.mark.parametrize("name", MADE_INSIDE)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_ready_mods_made_inside_of_shard_map(compiled, kind, name):
    """Their arrays are known, and computed outside of the mesh."""

    def attend(q, ids):
        options = {"block_size": 16, "max_blocks": 4}
        mask = jflex.create_block_mask(MADE_INSIDE[name](ids), int(name == "padding") or None, None, 64, 64, **options)
        slopes = jflex.scores.alibi(jflex.scores.alibi_slopes(4))
        return jflex.flex_attention(q, q, q, slopes, mask, implementation="xla")

    mesh, q = mesh_of(kind), jax.random.normal(jax.random.key(1), (2, 64, 4, D))
    expected = jnp.concatenate([attend(x[None], jnp.asarray(IDS)) for x in q])
    with jax.set_mesh(mesh):
        local = functools.partial(attend, ids=jnp.asarray(IDS))
        run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        found = (jax.jit(run) if compiled else run)(jax.device_put(q, NamedSharding(mesh, P("data"))))
    assert_close(np.asarray(found), expected)


@tiers(rest="full")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_blocks_selected_inside_of_shard_map(compiled):
    def attend(q):
        blocks = jflex.select_blocks(jflex.block_scores(q, q, block_size=16), 2, block_size=16)
        options = {"block_size": 16, "mask_mod": jflex.masks.causal(), "H": 4}
        mask = jflex.block_mask_from_indices(blocks, 64, 64, **options)
        return jflex.flex_attention(q, q, q, block_mask=mask, implementation="xla")

    q = jax.random.normal(jax.random.key(0), (2, 64, 4, D))
    run = jax.shard_map(attend, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))
    assert_close((jax.jit(run) if compiled else run)(q), attend(q))


@tiers(full={"strategy": [None]}, rest="long")
@pytest.mark.parametrize("strategy", [None, "ring"])
def test_eager_shard_map(strategy):
    """JAX evaluates no `custom_vjp` with symbolic zeros there by itself."""

    def attend(q, **options):
        call = jflex.context_parallel_attention if options else jflex.flex_attention
        return call(q, q, q, mask_mod=jflex.masks.causal(), implementation="xla", **options)

    q = jax.random.normal(jax.random.key(0), (2, 64, 4, D))
    local, spec = (attend, P("data")) if strategy is None else (
        functools.partial(attend, axis="model", strategy=strategy), P("data", "model"))  # fmt: skip
    run = jax.shard_map(local, mesh=mesh_of(), in_specs=spec, out_specs=spec)
    loss = lambda attend, q: jnp.sum(attend(q) ** 2)
    assert_close(run(q), attend(q))
    if strategy is None:  # the gradient of an eager ring compiles for a minute
        with jax.disable_jit():
            assert_close(run(q), attend(q))
        assert_close(jax.grad(functools.partial(loss, run))(q), jax.grad(functools.partial(loss, attend))(q))


@pytest.mark.full
@backends
def test_eager_call_with_sharded_arrays(backend):
    attend = functools.partial(FEATURES["plain"].attend, BACKENDS[backend])
    jax.tree.map(assert_close, attend(**placed("plain", mesh_of())), attend(**FEATURES["plain"].draw()))


@pytest.mark.full
def test_uneven_heads_are_computed_whole():
    """Three key heads over two devices: nothing can be split, and the result is right."""
    arrays = FEATURES["plain"].draw()
    q, k = jnp.tile(arrays["q"], (1, 1, 3, 1))[:, :, :6], jnp.tile(arrays["k"], (1, 1, 2, 1))[:, :, :3]
    run = jax.jit(functools.partial(jflex.flex_attention, implementation="xla"))
    place = NamedSharding(mesh_of(), P(None, None, None))
    assert_close(run(*(jax.device_put(x, place) for x in (q, k, k))), run(q, k, k))


@tiers(default={"name": "sinks", "backend": "xla"}, in_turns=True, share=3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEATURES)
def test_new_values_vmap_and_remat(name, backend):
    feature, arrays = FEATURES[name], [FEATURES[name].draw(seed) for seed in range(2)]
    run = Traced(functools.partial(feature.differentiated, BACKENDS[backend]))
    once = jax.jit(run)
    alone = [once(x) for x in arrays]
    assert run.count == 1
    right = jax.jit(functools.partial(feature.differentiated, REFERENCE))
    jax.tree.map(assert_close, alone, [right(x) for x in arrays])

    stack = lambda *xs: jnp.stack(xs)
    mapped = jax.jit(jax.vmap(run))(jax.tree.map(stack, *arrays))
    jax.tree.map(assert_close, mapped, jax.tree.map(stack, *alone))

    if backend == "xla":
        attend = lambda options, **arrays: jax.checkpoint(lambda x: feature.attend(options, **x))(arrays)
        remat = functools.partial(feature._replace(attend=attend).differentiated, BACKENDS[backend])
        jax.tree.map(assert_close, jax.jit(remat)(arrays[0]), alone[0])
