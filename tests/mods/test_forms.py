"""Forms of score mods that the Hopper kernels compute in fewer steps: which mods have them, and what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.program import patterns
from pallas_kernels.program.build import IndexRanges, trace_program

SIZES = IndexRanges(2, 4, 1024, 2048)


def program_of(mod, sizes=SIZES):
    scalars = [jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    return trace_program(jax.make_jaxpr(mod)(*scalars), [], sizes)


ALIBI = program_of(lambda s, b, h, q, k: s + jnp.exp2(-h.astype(jnp.float32)) * (k - q).astype(jnp.float32))


@pytest.mark.parametrize(
    ("mod", "factor"),
    [
        (lambda s, b, h, q, k: 20.0 * jnp.tanh(s / 20.0), 20.0),
        (lambda s, b, h, q, k: jnp.tanh(s) * 3.0, 3.0),
        (lambda s, b, h, q, k: jnp.tanh(s) * -3.0, None),
        (lambda s, b, h, q, k: jnp.tanh(s) * 0.0, None),
        (lambda s, b, h, q, k: jnp.tanh(s) * jnp.exp2(-h.astype(jnp.float32)), None),
        (lambda s, b, h, q, k: jnp.tanh(s) + 3.0, None),
    ],
)
def test_a_positive_number_multiplied_last(mod, factor):
    found = patterns.multiple(program_of(mod))
    assert (found and found.factor) == factor


def test_what_is_added():
    found = patterns.addend(ALIBI, 0.125)
    assert found.sign == 1
    assert found.factor.kind == ""
    assert patterns.addend(ALIBI, 2.0**-30) is None
    assert patterns.addend(program_of(lambda s, b, h, q, k: s + s), 1.0) is None


SIGMOIDS = [
    (lambda s, b, h, q, k: jax.nn.sigmoid(s - 3.0), True),
    (lambda s, b, h, q, k: s - 2.0 * jax.nn.sigmoid(jnp.where(q < k, s, jnp.exp(s))), True),
    (lambda s, b, h, q, k: s * s, True),  # without one
    (lambda s, b, h, q, k: jnp.where(q < k, jax.nn.sigmoid(s), s), False),
    (lambda s, b, h, q, k: jnp.maximum(jax.nn.sigmoid(s), 0.5), False),
    (lambda s, b, h, q, k: s * jax.nn.sigmoid(s), False),
    (lambda s, b, h, q, k: jnp.log(jax.nn.sigmoid(s)), False),
    (lambda s, b, h, q, k: 1.0 / jax.nn.sigmoid(s), False),
    (lambda s, b, h, q, k: jnp.round(jax.nn.sigmoid(s)).astype(jnp.int32).astype(jnp.float32), False),
]


@pytest.mark.parametrize(("mod", "linear"), SIGMOIDS)
def test_linear_in_logistics(mod, linear):
    assert patterns.is_linear_in(program_of(mod), "logistic") == linear
    assert not patterns.is_linear_in(None, "logistic")


@pytest.mark.parametrize(("walked", "fixed", "signs"), [("k", "q", (1, -1)), ("q", "k", (-1, 1))])
def test_a_distance_is_that_of_the_walked_index(walked, fixed, signs):
    (found,) = patterns.distances(ALIBI, walked, fixed)
    assert (found.walked_sign, found.other_sign) == signs
    assert found.other.inputs[0] is ALIBI.argument(fixed)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + (k - q).astype(jnp.float32) / (1.0 + q.astype(jnp.float32)),
        lambda s, b, h, q, k: s - jnp.abs(q - k).astype(jnp.float32),
        lambda s, b, h, q, k: s + (q // 3 + k).astype(jnp.float32),
    ],
)
def test_distances_within_larger_expressions(mod):
    program = program_of(mod)
    (found,) = patterns.distances(program, "k", "q")
    q, k = np.arange(7, dtype=np.float32), np.arange(11, dtype=np.float32)[:, None]
    other = np.floor(q / 3) if found.other_sign == found.walked_sign else q
    assert found.node in program.nodes
    assert np.array_equal(found.walked_sign * k + found.other_sign * other, _value(found.node, program, q, k))


def _value(node, program, q, k):
    if node is program.argument("q") or node is program.argument("k"):
        return (q if node is program.argument("q") else k).astype(np.int32)
    if node.op == "literal":
        return node.value
    return np.asarray(node.apply(*np.broadcast_arrays(*(_value(x, program, q, k) for x in node.inputs))))


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + (q * 2 - k * 2).astype(jnp.float32),  # the walked index is not itself a part
        lambda s, b, h, q, k: s + (q.astype(jnp.float32) * 0.5 - k.astype(jnp.float32)),  # no integer
        lambda s, b, h, q, k: s + k.astype(jnp.float32),
    ],
)
def test_other_sums_are_no_distances(mod):
    assert patterns.distances(program_of(mod), "k", "q") == []


def test_distances_that_float32_does_not_hold_are_left_alone():
    long = IndexRanges(1, 1, 1 << 23, 1 << 23)
    mod = lambda s, b, h, q, k: s + (k - q).astype(jnp.float32)
    assert patterns.distances(program_of(mod, long), "k", "q") == []


@pytest.mark.parametrize(
    ("mod", "size"),
    [
        (lambda s, b, h, q, k: 20.0 * jnp.tanh(s / 20.0), 20.0),
        (lambda s, b, h, q, k: -3.0 * jnp.sin(s) + 0.5, 3.5),
        (lambda s, b, h, q, k: jax.nn.sigmoid(s) - jnp.abs(jnp.cos(s)), 2.0),
        (lambda s, b, h, q, k: jnp.tanh(s) * s, None),
        (lambda s, b, h, q, k: jnp.tanh(s) * jnp.exp2(-h.astype(jnp.float32)), None),
        (lambda s, b, h, q, k: jnp.tanh(s) / 0.25, 4.0),
        (lambda s, b, h, q, k: jnp.tanh(s) * jnp.inf, None),
        (lambda s, b, h, q, k: jnp.where(q >= k, jnp.tanh(s), -jnp.inf), None),
        (lambda s, b, h, q, k: s, None),
    ],
)
def test_bounded_scores(mod, size):
    assert patterns.bound(program_of(mod)) == size


def mask_program(mod, *operands):
    jaxpr = jax.make_jaxpr(mod)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 4, *operands)
    return trace_program(jaxpr, [(x.shape, str(x.dtype)) for x in operands], SIZES)


@pytest.mark.parametrize(
    ("mod", "shape", "count"),
    [
        (lambda b, h, q, k, x: x[q] == x[k], (2048,), 1),
        (lambda b, h, q, k, x: x[b, q] == x[b, k], (2, 2048), 1),
        (lambda b, h, q, k, x: x[b, q] == x[b, k], (2, 2049), 0),  # a row may begin at an odd place
        (lambda b, h, q, k, x: x[k] == x[k + 1], (2050,), 1),
        (lambda b, h, q, k, x: x[k] == x[q], (2049,), 0),
        (lambda b, h, q, k, x: q - k < x, (), 0),
        (lambda b, h, q, k, x: x[q, k] == 0, (1024, 2048), 0),
        (lambda b, h, q, k, x: x[k, b] == 0, (2048, 2), 0),
    ],
)
def test_loads_that_follow_each_other(mod, shape, count):
    program = mask_program(mod, jnp.zeros(shape, jnp.int32))
    assert len(patterns.runs(program, "k", [shape])) == count


def test_clauses_of_a_mask():
    mod = lambda b, h, q, k, x: (q >= k) & (x[q] == x[k]) & (q - k < 5) & (jnp.sin(k.astype(jnp.float32)) > 0)
    ordered, others = patterns.clauses(mask_program(mod, jnp.zeros(2048, jnp.int32)))
    assert sorted(node.op for node in ordered) == ["ge", "lt"]
    assert sorted(node.op for node in others) == ["eq", "gt"]
    assert patterns.clauses(None) == ([], [])
    either = mask_program(lambda b, h, q, k: (q >= k) | (k < 5))
    assert [[node.op for node in part] for part in patterns.clauses(either)] == [["or"], []]


@pytest.mark.parametrize(
    ("mod", "shape", "by_key", "by_query"),
    [
        (lambda b, h, q, k, x: x[q - k + 2047] > 0, (4096,), -1, 1),
        (lambda b, h, q, k, x: x[h, q - k + 2047] > 0, (4, 4096), -1, 1),
        (lambda b, h, q, k, x: x[b, q, k] > 0, (2, 1024, 2048), 1, 2048),
        (lambda b, h, q, k, x: x[k, q] > 0, (2048, 1024), 1024, 1),
        (lambda b, h, q, k, x: x[2 * k + 3 * q] > 0, (8192,), 2, 3),
        (lambda b, h, q, k, x: x[k - (q - 1024)] > 0, (4096,), 1, -1),
        (lambda b, h, q, k, x: x[k, k + q] > 0, (2048, 4096), 4097, 1),
        (lambda b, h, q, k, x: x[jnp.minimum(k, 5) + q] > 0, (4096,), None, 1),
        (lambda b, h, q, k, x: x[k * q % 64] > 0, (64,), None, None),
        (lambda b, h, q, k, x: x[k // 2 + q // 2] > 0, (4096,), None, None),
    ],
)
def test_steps_of_loads(mod, shape, by_key, by_query):
    program = mask_program(mod, jnp.zeros(shape, jnp.float32))
    (load,) = (x for x in program.loads if x.kind == "qk")
    assert patterns.step(load, "k", shape) == by_key
    assert patterns.step(load, "q", shape) == by_query
