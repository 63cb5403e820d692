"""Calls that are refused inside of `jax.shard_map` or by every backend; messages: `tests/cases/errors`."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jflex
from jflex.context_parallel import prepare
from tests.support.context_parallel_calls import MASKS, drawn

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"),
]


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
