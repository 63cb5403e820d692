"""Tile programs of key and value mods, evaluated on arrays: each primitive that moves or reduces lanes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.mods.trace import trace_vector_mod
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Node
from pallas_kernels.program.vectors.vectors import VECTOR, VectorSizes, chunkings, trace_vector_program
from pallas_kernels.triton.head_chunks import plain_chunks
from tests.support.rows import tiers
from tests.support.tile_programs import DenseSpace

B, H, KEYS = 3, 2, 6
TABLE = np.random.default_rng(1).normal(size=(H, KEYS, 96)).astype(np.float32)
ORDER = jnp.asarray(np.random.default_rng(2).permutation(96))


def permuted(x, b, h, i):
    return x[jnp.argsort(ORDER[: x.size])]


def norm(x, b, h, i):
    return x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-6)


def norms_of_groups(x, b, h, i):
    groups = x.reshape(4, -1)
    return (groups / jnp.sum(jnp.abs(groups), axis=1, keepdims=True)).reshape(-1)


def replaced(x, b, h, i):
    return jax.lax.dynamic_update_slice(x, jnp.ones(4), (h * 3 + i,))


def clipped_gather(x, b, h, i):
    return x + jnp.asarray(TABLE)[h].at[i, : x.size].get(mode="fill", fill_value=0.0)


MODS = {
    "identity": lambda x, b, h, i: x,
    "halves": jflex.rope(100.0),
    "neighbors": jflex.rope(100.0, interleaved=True),
    "part": jflex.rope(100.0, rotary_dim=16),
    "far": jflex.rope(100.0, is_far=True),
    "positions": jflex.rope(100.0, positions=3 * jnp.arange(KEYS)),
    "norm": norm,
    "norm and halves": lambda x, b, h, i: jflex.rope(100.0)(norm(x, b, h, i), b, h, i),
    "norm and neighbors": lambda x, b, h, i: jflex.rope(100.0, interleaved=True)(norm(x, b, h, i), b, h, i),
    "norms of groups": norms_of_groups,
    "sums of pairs": lambda x, b, h, i: jnp.repeat(x.reshape(-1, 2).sum(1), 2),
    "small matrix": lambda x, b, h, i: (x.reshape(-1, 2) @ jnp.array([[1.0, 2.0], [3.0, 4.0]])).reshape(-1),
    "softmax": lambda x, b, h, i: jax.nn.softmax(x),
    "least": lambda x, b, h, i: x - jnp.min(x),
    "dot product": lambda x, b, h, i: x - jnp.dot(x, jnp.ones(x.size)) / x.size,
    "roll": lambda x, b, h, i: jnp.roll(x, 3),
    "reverse": lambda x, b, h, i: x[::-1] / jnp.linalg.norm(x),
    "transpose": lambda x, b, h, i: x.reshape(2, -1).T.reshape(-1),
    "permutation": permuted,
    "strided": lambda x, b, h, i: jnp.concatenate([x[1::2], x[::2]]),
    "padded": lambda x, b, h, i: jnp.concatenate([x[4:], jnp.zeros(4)]) + x[0],
    "table": lambda x, b, h, i: x * jnp.asarray(TABLE)[h, i, : x.size],
    "filled": clipped_gather,
    "window": lambda x, b, h, i: x * jax.lax.dynamic_slice(jnp.arange(200.0), (i * b,), (x.size,)),
    "replaced": replaced,
    "branches": lambda x, b, h, i: jax.lax.cond(i % 2 == 0, lambda y: 2 * y, lambda y: -y, x),
    "lanes": lambda x, b, h, i: (
        jnp.where(jnp.arange(x.size) < 5, x, x * jnp.arange(0.0, x.size)) * (1 + b).astype(jnp.float32)
    ),
    "clip": lambda x, b, h, i: jnp.clip(x, -0.5, 0.5) + jax.lax.clamp(0.0, x, 1.0),
    "formulas": lambda x, b, h, i: jax.scipy.special.erf(x) + jnp.round(4 * x) / 4,
}


class Arrays(DenseSpace):
    """Values as arrays [keys, lanes]; loads are within bounds."""

    def __init__(self, vectors, operands, width):
        rows = len(vectors)
        super().__init__({"q": (rows, 1), "k": (1, width), "qk": (rows, width)}, {VECTOR: vectors, **operands})

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        for index, size in zip(indices, self.operands[node.value].shape, strict=True):
            assert int(jnp.min(index)) >= 0
            assert int(jnp.max(index)) < size
        return super().load(node, indices)


def evaluated(mod, vectors, b, h, way):
    """What the program in one way of holding lanes makes of vectors [KEYS, D]."""
    size = vectors.shape[1]
    traced, operands = trace_vector_mod(mod, "key", size, jnp.float32)
    chunks = chunkings(size, plain_chunks(size))[way]
    program = trace_vector_program(traced.jaxpr, traced.operands, VectorSizes(B, H, KEYS, size, "float32"), chunks)
    out = np.full(vectors.shape, np.nan, np.float32)
    for of in program.lane_programs:
        values = {"b": b, "h": h, "q": jnp.arange(KEYS, dtype=jnp.int32)[:, None]}
        values["k"] = jnp.arange(of.width, dtype=jnp.int32)[None]
        values = {of.argument(name): jnp.asarray(x, jnp.int32) for name, x in values.items()}
        evaluation = Evaluation(Arrays(jnp.asarray(vectors), dict(enumerate(operands)), of.width), values)
        for chunk, node in of.outputs:
            lanes = chunk.first + chunk.step * np.arange(chunk.width)
            found = np.asarray(evaluation.tile(node))
            np.testing.assert_array_equal(found[:, lanes >= size], 0)
            out[:, lanes[lanes < size]] = found[:, lanes < size]
    return out


@tiers({"size": 20, "name": ["halves", "norm", "softmax", "table"]}, {"size": 20}, rest="full", in_turns=True)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("size", [32, 48, 20])
def test_against_vmap(name, size):
    vectors = np.random.default_rng(0).normal(size=(KEYS, size)).astype(np.float32)
    for b, h in ((0, 1), (2, 0)):
        over_keys = jax.vmap(MODS[name], in_axes=(0, None, None, 0))
        right = over_keys(jnp.asarray(vectors), jnp.int32(b), jnp.int32(h), jnp.arange(KEYS, dtype=jnp.int32))
        for way in range(len(chunkings(size, plain_chunks(size)))):
            np.testing.assert_allclose(evaluated(MODS[name], vectors, b, h, way), right, rtol=2e-5, atol=2e-5)
