"""Vector mods, lengths and statistics of context parallel calls: results and gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jflex
from jflex import context_parallel
from tests.support.context_parallel_calls import CUBE, MASKS, NEEDS_EIGHT_DEVICES, drawn, mesh_of, strategies
from tests.support.rows import in_turns, tiers

pytestmark = NEEDS_EIGHT_DEVICES
T, HEADS, KV_HEADS, D = 64, 8, 4, 16
QUAD = {"context": 4}


def captured():
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"gain": normal(T, D), "gates": normal(HEADS, D), "mix": normal(KV_HEADS, D, D), "by_batch": normal(2, D)}


def vector_mods(c):
    rope = jflex.rope(100.0)
    return {
        "query_mod": lambda x, b, h, i: rope(x, b, h, i) * c["gain"][i],
        "key_mod": lambda x, b, h, i: rope(x * c["by_batch"][b], b, h, i),
        "value_mod": lambda x, b, h, i: c["mix"][h] @ x,
        "output_mod": lambda x, lse, b, h, i: x * jax.nn.sigmoid(c["gates"][h] + jnp.where(lse > -10, lse, 0)),
    }


LENGTHS = jnp.array([41, 0], jnp.int32)
causal_block = functools.partial(jflex.create_block_mask, MASKS["causal"], None, None, T, T)
# Axes, the order, and the arguments, which may need the captured arrays.
CASES = {
    "vector mods": (QUAD, "zigzag", lambda c: {**vector_mods(c), "mask_mod": MASKS["causal"]}),
    "vector mods of shards": (CUBE, "zigzag", lambda c: {**vector_mods(c), "kv_lengths": LENGTHS}),
    "shared keys by batch": (CUBE, None, lambda c: {"key_mod": vector_mods(c)["key_mod"], "mask_mod": MASKS["causal"]}),
    "lengths alone": (QUAD, "zigzag", lambda c: {"kv_lengths": LENGTHS}),
    "lengths and lists": (QUAD, None, lambda c: {"kv_lengths": LENGTHS, "block_mask": causal_block(block_size=16)}),
    "lengths and a mask, shared": (CUBE, "zigzag", lambda c: {"kv_lengths": LENGTHS, "mask_mod": MASKS["causal"]}),
    "statistics": (QUAD, "zigzag", lambda c: {"mask_mod": MASKS["causal"], "return_stats": ("max", "entropy")}),
    "statistics with sinks": (
        CUBE,
        "zigzag",
        lambda c: {"mask_mod": lambda b, h, q, k: q > k, "return_stats": ("lse", "max", "entropy"),
                   "sinks": c["gates"][:, 0], "score_mod": lambda s, b, h, q, k: s * c["gates"][h, 1]},
    ),
    "dropout": (
        QUAD,
        "zigzag",
        lambda c: {"mask_mod": MASKS["causal"], "dropout_rate": 0.3, "dropout_key": jax.random.key(1),
                   "return_stats": ("entropy",)},
    ),
}  # fmt: skip


def arrays(name):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, T, HEADS, D)).astype(np.float32)
    k, v = k[:, :, :KV_HEADS], v[:, :, :KV_HEADS]
    return (q, k[:1], v[:1]) if "shared" in name else (q, k, v)


def differentiated(attend, arrays, c):
    def loss(q, k, v, c):
        found = attend(q, k, v, c)
        leaves = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves(found)]
        return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(leaves)), found

    return jax.jit(jax.value_and_grad(loss, argnums=range(4), has_aux=True))(*arrays, c)


@functools.cache
def on_one_device(name):
    make = CASES[name][2]
    attend = lambda q, k, v, c: jflex.flex_attention(q, k, v, implementation="reference", **make(c))
    return differentiated(attend, arrays(name), captured())


@tiers(rest="full", in_turns=True, share=2)
@strategies
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_one_device(name, strategy):
    axes, order, make = CASES[name]
    mesh = mesh_of(**axes)
    named = {name: axis for name, axis in (("batch_axes", "data"), ("head_axes", "model")) if axis in axes}
    order = context_parallel.zigzag_order(axes["context"]) if order else None
    turn = (lambda x: x) if order is None else lambda x: context_parallel.reorder(x, order)
    back = (lambda x, axis: x) if order is None else lambda x, axis: context_parallel.restore(x, order, axis)

    def attend(q, k, v, c):
        found = jflex.context_parallel_attention(
            *map(turn, (q, k, v)), mesh=mesh, strategy=strategy, order=order, implementation="xla", **named, **make(c)
        )
        out, stats = found if isinstance(found, tuple) else (found, None)
        out = back(out, 1)
        return out if stats is None else (out, jax.tree.map(lambda x: back(x, 2), stats))

    given = arrays(name)
    if "kv_lengths" in make(captured()):
        unused = np.arange(T) >= np.asarray(LENGTHS)[:, None]
        unused = unused.all(0, keepdims=True) if "shared" in name else unused
        given = given[0], *(np.where(unused[:, :, None, None], np.nan, x) for x in given[1:])
    (_, found), gradients = differentiated(attend, given, captured())
    (_, right), right_gradients = on_one_device(name)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=3e-5), found, right)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-4), gradients, right_gradients)


@pytest.mark.full
@in_turns
@strategies
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eagerly_in_the_mesh_of_the_context(strategy, kind):
    mesh, given = drawn(kind=kind, T=64)
    rope, order = jflex.rope(100.0), context_parallel.zigzag_order(4)
    options = {"query_mod": rope, "key_mod": rope, "output_mod": lambda x, lse, b, h, i: x + lse, "kv_lengths": LENGTHS}
    options |= {"mask_mod": MASKS["causal"], "implementation": "xla"}
    with jax.set_mesh(mesh):
        turned = [context_parallel.reorder(x, order) for x in given]
        how = {"batch_axes": "data", "strategy": strategy, "order": order}
        found = jflex.context_parallel_attention(*turned, **how, **options)
        assert found.sharding.is_equivalent_to(given[0].sharding, 4)
        found = context_parallel.restore(found, order)
    right = jflex.flex_attention(*[jnp.asarray(np.asarray(x)) for x in given], **options)
    np.testing.assert_allclose(found, right, rtol=3e-5, atol=3e-5)
