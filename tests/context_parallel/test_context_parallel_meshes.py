"""Where context parallel attention stands: inside of `shard_map`, eagerly in a mesh, under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jflex
from jflex import context_parallel
from jflex.context_parallel import prepare
from jflex.context_parallel import run as running
from tests.support.context_parallel_calls import (
    CUBE,
    F32,
    MASKS,
    NEEDS_EIGHT_DEVICES,
    assert_close,
    attend_in,
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


def test_a_call_that_no_backend_supports_is_refused_before_its_mask_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(prepare, "own_block_mask", lambda *_: made.append(1))
    mesh, arrays = drawn(T=64)
    with pytest.raises(jflex.UnsupportedError, match=r"None of the requested implementations supports.*mosaic_gpu"):
        jflex.context_parallel_attention(*arrays, mesh=mesh, mask_mod=MASKS["causal"], implementation="mosaic_gpu")
    assert not made
