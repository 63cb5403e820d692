"""Where context parallel attention stands: inside of `shard_map`, in a mesh, in a plain call that `jit` divides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from jflex import context_parallel
from jflex.context_parallel import run as running
from tests.support.context_parallel_calls import (
    CUBE,
    F32,
    MASKS,
    NEEDS_EIGHT_DEVICES,
    assert_close,
    attend_in,
    collectives,
    drawn,
    strategies,
)
from tests.support.rows import tiers

pytestmark = NEEDS_EIGHT_DEVICES


@tiers(full={"strategy": "all_gather"}, rest="long")
@strategies
def test_inside_of_shard_map(strategy):
    """Arrays are those of the shard, and so are the indices of batch and heads; positions are absolute."""
    mesh, (q, k, v) = drawn(CUBE, T=64)
    rows, order = P("data", "context", "model"), context_parallel.zigzag_order(2)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 64)), F32)
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 64, 64, block_size=16)

    def whole(q, k, v, bias):
        mod = lambda s, b, h, i, j: s + bias[b, h, i]
        return jflex.flex_attention(q, k, v, mod, mask, return_lse=True, implementation="reference")

    def local(q, k, v, bias):
        mod = lambda s, b, h, i, j: s + bias[b, h, i]
        return jflex.context_parallel_attention(
            q, k, v, mod, mask, strategy=strategy, order=order, return_lse=True, implementation="xla"
        )

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows,) * 3 + (P("data", "model"),), out_specs=(rows, P("data", "model", "context"))
    )

    def turned(q, k, v, bias):
        out, lse = sharded(*(context_parallel.reorder(x, order) for x in (q, k, v)), bias)
        return context_parallel.restore(out, order), context_parallel.restore(lse, order, 2)

    loss = lambda attend, *x: sum(jnp.sum(jnp.sin(y)) for y in attend(*x))
    run = lambda attend: jax.jit(jax.value_and_grad(functools.partial(loss, attend), argnums=range(4)))(q, k, v, bias)
    jax.tree.map(functools.partial(assert_close, rtol=2e-4), run(turned), run(whole))


@pytest.mark.full
def test_a_new_value_compiles_nothing(monkeypatch):
    """Mods of eager calls with the same program and other values are the same program of a device."""
    mesh, arrays = drawn(T=64)
    traces, on_device = [], running._on_device
    monkeypatch.setattr(running, "_on_device", lambda *x: traces.append(1) or on_device(*x))
    scaled = lambda slope: lambda s, b, h, i, j: s * slope
    run = lambda slope: attend_in(mesh, "ring")(*arrays, scaled(slope), mask_mod=MASKS["causal"])
    first, count = run(jnp.float32(1)), len(traces)
    second = run(jnp.float32(2))
    assert len(traces) == count > 0
    assert not np.allclose(first, second)


@tiers(full={"strategy": "all_gather"}, rest="long")
@strategies
def test_without_tokens(strategy):
    mesh, (q, k, v) = drawn(T=64)
    out, lse = attend_in(mesh, strategy, return_lse=True)(q, k[:, :0], v[:, :0])
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


@tiers(full={"strategy": "all_gather"}, rest="long")
@strategies
def test_second_derivatives_are_refused(strategy):
    mesh, arrays = drawn(T=64)
    run = jax.jit(lambda *x: jax.jvp(attend_in(mesh, strategy), x, x)[1])
    with pytest.raises(NotImplementedError, match=r"first derivatives in reverse mode only"):
        run(*arrays)


def test_axes_of_batch_inside_of_shard_map_are_refused():
    mesh, arrays = drawn(T=64)
    rows = P("data", "context")
    local = functools.partial(jflex.context_parallel_attention, batch_axes="data")
    with pytest.raises(ValueError, match=r"`batch_axes` and `head_axes` must be empty inside of `jax\.shard_map`"):
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows))(*arrays)


@pytest.mark.parametrize("named", [False, True])
def test_a_shard_map_over_other_axes_alone_is_refused(named):
    mesh, arrays = drawn(T=64)
    local = functools.partial(jflex.context_parallel_attention, mesh=mesh if named else None)
    call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"}))
    with pytest.raises(ValueError, match=r"is manual, 'data'.*Got 'context'\. Add it to the `axis_names`"):
        call(*arrays)


# --- plain calls of sharded tokens


DENSE = {
    "nothing": {},
    "lists": {"block_mask": 32},
    "learned": {"block_mask": 16, "score_mod": lambda c: lambda s, b, h, q, k: s * c[h] + c[0] * (q - k).astype(F32)},
    "sinks and lengths": {"kv_lengths": jnp.array([100, 200], jnp.int32), "sinks": lambda c: c},
    "dropout in the other layout": {"layout": "BNTH", "dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
}


@tiers(default={"name": "lists-xla"}, full={"name": ["nothing", "learned", "sinks and lengths"]})
@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "xla") for name in DENSE), ("lists", "triton"), ("learned", "triton")]
)
def test_plain_jit_divides_the_queries(name, implementation):
    """A call of `flex_attention` with tokens that are sharded: as by all-gather, and by itself."""
    mesh, arrays = drawn()
    given = dict(DENSE[name])
    bnth = given.get("layout") == "BNTH"
    if "block_mask" in given:
        size = given["block_mask"]
        given["block_mask"] = jflex.create_block_mask(MASKS["causal"], None, None, 256, 256, block_size=size)
    arrays = [
        jax.device_put(x.swapaxes(1, 2), NamedSharding(mesh, P("data", None, "context"))) if bnth else x for x in arrays
    ]
    config = jflex.Config(interpret=True) if implementation == "triton" else None

    def loss(implementation, config, q, k, v, captured):
        made = {n: x(captured) if callable(x) and not isinstance(x, jflex.BlockMask) else x for n, x in given.items()}
        out, lse = jflex.flex_attention(q, k, v, **made, return_lse=True, implementation=implementation, config=config)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), out

    run = lambda *how: jax.jit(jax.value_and_grad(functools.partial(loss, *how), argnums=range(4), has_aux=True))
    captured = jnp.linspace(0.1, 0.4, 4)
    compiled = run(implementation, config).lower(*arrays, captured).compile()
    (_, out), gradients = compiled(*arrays, captured)
    plain = [jnp.asarray(np.asarray(x)) for x in arrays]
    (_, right), right_gradients = run("reference", None)(*plain, captured)
    assert_close(out, right)
    jax.tree.map(functools.partial(assert_close, rtol=1e-3, atol=1e-4), gradients, right_gradients)
    assert out.sharding.is_equivalent_to(arrays[0].sharding, 4)
    assert collectives(compiled)["all-gather"] == 2  # of keys and values


@tiers(full={"divided": "queries that cut blocks"}, rest="long")
@pytest.mark.parametrize("divided", ["keys", "queries that cut blocks"])
def test_jit_of_tokens_that_it_cannot_divide_says_what_divides_the_work(divided):
    """XLA's partitioner tells how arrays are sharded too late for an error that Python could raise."""
    mesh, arrays = drawn(T=64)
    options = {"implementation": "xla"}
    if divided == "keys":
        arrays[0] = jax.device_put(arrays[0], NamedSharding(mesh, P("data")))
    else:
        options["block_mask"] = jflex.create_block_mask(MASKS["causal"], None, None, 64, 64, block_size=32)
    run = jax.jit(functools.partial(jflex.flex_attention, **options))
    with pytest.warns(
        UserWarning, match=r"gathers and computes all tokens\. They are sharded over 'context'\..*axis='con"
    ):
        found = run(*arrays)
    assert_close(found, jflex.flex_attention(*[np.asarray(x) for x in arrays], **options))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_divided_tokens_of_an_explicit_mesh_are_refused(layout):
    mesh, arrays = drawn(T=64, kind=AxisType.Explicit)
    run = jax.jit(functools.partial(jflex.flex_attention, layout=layout, implementation="xla"))
    with jax.set_mesh(mesh):
        arrays = [x if layout == "BTNH" else x.swapaxes(1, 2) for x in arrays]
        with pytest.raises(ValueError, match=r"all their tokens on each.*jflex\.context_parallel_att"):
            run(*arrays)
