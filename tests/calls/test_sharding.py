"""Eight simulated devices: `jax.shard_map` over batch and heads, and plain `jax.jit` of sharded arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from tests.support.rows import in_turns, tiers

B, T, HQ, HKV, D = 4, 48, 4, 2, 16
BACKENDS = {
    "xla": {"implementation": "xla"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
}
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"),
]


def mesh_of(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "q": draw(B, T, HQ, D), "k": draw(B, T, HKV, D), "v": draw(B, T, HKV, D), "bias": draw(B, HQ, T),
        "slopes": draw(HQ), "ids": jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), axis=1), jnp.int32),
    }  # fmt: skip


def local_attention(options, q, k, v, bias, ids, shared):
    """Attention of one shard, whose captures are its own, but for `shared`."""

    def score_mod(s, b, h, q_idx, kv_idx):
        return s * shared + bias[b, h, q_idx]

    def documents(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    block_mask = jflex.create_block_mask(documents, q.shape[0], None, T, T, block_size=16)
    return jflex.flex_attention(q, k, v, score_mod, block_mask, return_lse=True, **options)


def sum_of(out, lse):
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


@pytest.mark.full
@backends
def test_shard_map_over_batch_and_heads(backend, arrays):
    x, shared = arrays, jnp.float32(1.25)
    rows, shards = P("data", None, "model"), P("data", "model")
    specs = (rows, rows, rows, shards, P("data"), P())
    inputs = (x["q"], x["k"], x["v"], x["bias"], x["ids"], shared)

    def loss(sharded, q, k, v, bias, shared):
        attend = functools.partial(local_attention, BACKENDS[backend] if sharded else {"implementation": "reference"})
        if sharded:
            attend = jax.shard_map(attend, mesh=mesh_of(), in_specs=specs, out_specs=(rows, shards))
        return sum_of(*attend(q, k, v, bias, x["ids"], shared))

    floats = inputs[:4] + inputs[5:]
    runs = [
        jax.jit(jax.value_and_grad(functools.partial(loss, sharded), argnums=range(5))) for sharded in (True, False)
    ]
    jax.tree.map(assert_close, *(run(*floats) for run in runs))


@tiers(default={"backend": "xla"})
@backends
def test_shard_map_without_mods_inside_of_a_gradient(backend, arrays):
    rows = P("data", None, "model")
    attend = functools.partial(jflex.flex_attention, **BACKENDS[backend])
    local = lambda q, k, v: jax.grad(lambda q: attend(q, k, v).sum())(q)
    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=(rows,) * 3, out_specs=rows)
    args = arrays["q"], arrays["k"], arrays["v"]
    assert_close(jax.jit(sharded)(*args), local(*args))


@pytest.mark.full
@backends
def test_shard_map_with_captured_integers(backend, arrays):
    """Programs of mods, and of their derivatives, are traced outside of the mesh."""
    rows, x = P("data", None, "model"), arrays

    def local(q, ids):
        mod = lambda s, b, h, i, j: jnp.where(ids[b, i] == ids[b, j], s, s - 1)
        return jflex.flex_attention(q, q, q, mod, **BACKENDS[backend])

    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=(rows, P("data")), out_specs=rows)
    assert_close(jax.jit(sharded)(x["q"], x["ids"]), local(x["q"], x["ids"]))


def whole_attention(options, x, block_mask):
    """Attention whose mods see the indices of the whole arrays."""

    def score_mod(s, b, h, q_idx, kv_idx):
        return s + x["bias"][b, h, q_idx] - x["slopes"][h] * jnp.abs(q_idx - kv_idx).astype(jnp.float32)

    return jflex.flex_attention(x["q"], x["k"], x["v"], score_mod, block_mask, return_lse=True, **options)


def mask_of(x):
    mod = lambda b, h, q, k: (x["ids"][b, q] == x["ids"][b, k]) & (q >= k)
    return jflex.create_block_mask(mod, B, None, T, T, block_size=16)


def placed(x, mesh, specs):
    return {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, P()))) for name, a in x.items()}


SPECS = {
    "batch": dict.fromkeys("qkv", P("data")),
    "heads": dict.fromkeys("qkv", P(None, None, "model")),
    "batch_and_heads": dict.fromkeys("qkv", P("data", None, "model")),
}


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize("axes", SPECS)
def test_jit_of_sharded_arrays_gathers_no_keys(backend, axes, arrays):
    floats = {name: a for name, a in arrays.items() if name != "ids"}
    block_mask = mask_of(arrays)

    def loss(options, x, block_mask):
        out, lse = whole_attention(options, x, block_mask)
        return sum_of(out, lse), out

    run = lambda options: jax.jit(jax.value_and_grad(functools.partial(loss, options), has_aux=True))
    sharded = placed(floats, mesh_of(), SPECS[axes])
    compiled = run(BACKENDS[backend]).lower(sharded, block_mask).compile()
    (value, out), grads = compiled(sharded, block_mask)
    (right, _), right_grads = run({"implementation": "reference"})(floats, block_mask)
    assert_close(value, right, rtol=1e-4)
    jax.tree.map(assert_close, grads, right_grads)
    assert out.sharding.is_equivalent_to(sharded["q"].sharding, 4)
    for name in "qkv":
        assert grads[name].sharding.is_equivalent_to(sharded[name].sharding, 4)
    gathered = re.findall(r"= (\S+?)\{.*? all-gather", compiled.as_text())
    assert not [shape for shape in gathered if shape.endswith(f",{D}]")], gathered


@pytest.mark.full
@backends
def test_eager_call_with_sharded_arrays(backend, arrays):
    sharded = placed(arrays, mesh_of(), SPECS["batch_and_heads"])
    args = [x[name] for x in (sharded, arrays) for name in "qkv"]
    attend = functools.partial(jflex.flex_attention, **BACKENDS[backend])
    assert_close(attend(*args[:3]), attend(*args[3:]))


@pytest.mark.full
def test_uneven_heads_are_computed_whole(arrays):
    """Three key heads over two devices: nothing can be split, and the result is right."""
    q, k = jnp.tile(arrays["q"], (1, 1, 3, 1))[:, :, :6], jnp.tile(arrays["k"], (1, 1, 2, 1))[:, :, :3]
    run = jax.jit(functools.partial(jflex.flex_attention, implementation="xla"))
    place = NamedSharding(mesh_of(), P(None, None, None))
    assert_close(run(*(jax.device_put(x, place) for x in (q, k, k))), run(q, k, k))


def test_explicit_mesh(arrays):
    """Where types say how arrays are sharded, the type of the output says it too."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(arrays[name], NamedSharding(mesh, SPECS["batch_and_heads"][name])) for name in "qkv")
        run = jax.jit(functools.partial(jflex.flex_attention, implementation="xla"))
        out = run(q, k, v)
        assert jax.typeof(out).sharding.spec == P("data", None, "model", None)
    assert_close(out, run(arrays["q"], arrays["k"], arrays["v"]))
