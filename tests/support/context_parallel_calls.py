"""Calls of context parallel attention that its tests share: meshes, arrays sharded over them, and masks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from jflex import context_parallel
from tests.support import evaluation

NEEDS_EIGHT_DEVICES = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"
)
STRATEGIES = ("all_gather", "ring", "ulysses")
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
ZIGZAG = context_parallel.zigzag_order(4)
F32 = jnp.float32
CUBE = {"data": 2, "context": 2, "model": 2}
PAIR = {"data": 2, "context": 4}
OPS = r" (all-gather|reduce-scatter|all-reduce|collective-permute|all-to-all)(?:-start)?\("


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def drawn(axes=PAIR, T=256, heads=4, kind=AxisType.Auto):
    """A mesh, and query, key and value with their tokens and batch sharded over it."""
    mesh = mesh_of(kind, **axes)
    place = NamedSharding(mesh, P("data" if "data" in axes else None, "context"))
    x = np.random.default_rng(0).normal(size=(3, 2, T, heads, 16)).astype(np.float32)
    return mesh, [jax.device_put(a, place) for a in x]


def near(b, h, q_idx, kv_idx):
    return jnp.abs(q_idx - kv_idx) < 33


MASKS = {"causal": lambda b, h, q, k: q >= k, "near": near, "own": lambda b, h, q, k: q // 64 == k // 64}


def attend_in(mesh, strategy, **options):
    named = {"batch_axes": "data"} if "data" in mesh.shape else {}
    options = {"implementation": "xla", **named, **options}
    return functools.partial(jflex.context_parallel_attention, mesh=mesh, strategy=strategy, **options)


def collectives(compiled):
    text = compiled.as_text()
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in set(re.findall(OPS, text))}


def attend_by(case, axes, order, strategy, implementation="xla", interpret=True):
    """A function for `evaluation.everything_by`: queries, keys and values are in their natural order."""
    axis_names = {name: axis for name, axis in (("batch_axes", "data"), ("head_axes", "model")) if axis in axes}
    options = {"mesh": mesh_of(**axes), "strategy": strategy, "order": order, **axis_names}
    function = functools.partial(jflex.context_parallel_attention, **options)
    backend = f"{implementation}-interpret" if implementation == "triton" and interpret else implementation

    def attend(drawn, blocks, query, key, value, floats):
        arrays = query, key, value
        arrays = arrays if order is None else [context_parallel.reorder(x, order, 1) for x in arrays]
        results = evaluation.call(case, backend, *arrays, {**drawn.score, **floats}, drawn.mask, blocks, function)
        if order is None:
            return results
        return tuple(context_parallel.restore(x, order, axis) for x, axis in zip(results, (1, 2), strict=True))

    return attend
