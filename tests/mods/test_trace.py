"""Tracing of mods: what is captured, what is computed outside of the kernel, which programs are equal."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jflex.mods.trace import describe, trace_mask_mod, trace_score_mod

F32 = jnp.float32
HELD = jnp.ones(1)


def primitives(traced):
    jaxpr = getattr(traced.jaxpr, "jaxpr", traced.jaxpr)
    return {eqn.primitive.name for eqn in jaxpr.eqns}


def test_fresh_lambdas_with_new_values_are_equal():
    make = lambda value: trace_score_mod(lambda s, b, h, q, k: s + jnp.full(4, value)[h])
    (one, [first]), (two, [second]) = make(1.0), make(2.0)
    assert one == two
    assert hash(one) == hash(two)
    np.testing.assert_array_equal((first, second), ([1] * 4, [2] * 4))


@pytest.mark.parametrize(
    "other",
    [
        lambda s, b, h, q, k: s + 2.0,
        lambda s, b, h, q, k: s - 1.0,
        lambda s, b, h, q, k: s + b.astype(F32),
        lambda s, b, h, q, k: s + HELD[0],
    ],
    ids=["number", "operation", "argument", "capture"],
)
def test_other_programs_differ(other):
    assert trace_score_mod(lambda s, b, h, q, k: s + 1.0)[0] != trace_score_mod(other)[0]


def test_shapes_and_dtypes_of_captures_belong_to_the_program():
    make = lambda x: trace_score_mod(lambda s, b, h, q, k: s + x[q].astype(F32))[0]
    traced = [make(x) for x in (jnp.zeros(4), jnp.zeros(5), jnp.zeros(4, jnp.bfloat16))]
    assert len({*traced}) == 3


def test_two_captures_in_either_order_differ():
    x, y = jnp.zeros(4), jnp.ones(4)
    one, _ = trace_score_mod(lambda s, b, h, q, k: s + x[q] * y[k])
    two, _ = trace_score_mod(lambda s, b, h, q, k: s + x[k] * y[q])
    assert one != two


def test_a_custom_derivative_belongs_to_a_score_program():
    def program(rule):
        f = jax.custom_jvp(lambda s: s)
        f.defjvp(rule)
        return trace_score_mod(lambda s, b, h, q, k: f(s))[0]

    half = lambda primals, tangents: (primals[0], 0.5 * tangents[0])
    assert program(half) != program(lambda primals, tangents: (primals[0], 2.0 * tangents[0]))
    assert program(half) != trace_score_mod(lambda s, b, h, q, k: s)[0]


def test_work_on_captures_alone_is_done_outside():
    table = jnp.arange(4.0)
    traced, [captured] = trace_score_mod(lambda s, b, h, q, k: s + jnp.exp(table)[h])
    assert "exp" not in primitives(traced)
    np.testing.assert_allclose(captured, np.exp(np.arange(4.0)), rtol=1e-6)


def test_captures_inside_of_an_inner_jit():
    table = jnp.arange(8.0)
    inner = jax.jit(lambda s, q: s + table[q])
    traced, operands = trace_score_mod(lambda s, b, h, q, k: inner(s, q))
    assert [x.shape for x in operands] == [(8,)]
    assert float(traced(operands, F32(1), *map(jnp.int32, (0, 0, 5, 0)))) == 6


def test_tracers_of_every_enclosing_transformation():
    def run(x):
        traced, operands = trace_score_mod(lambda s, b, h, q, k: s * x[q])
        return traced(operands, F32(3), *map(jnp.int32, (0, 0, 1, 0)))

    x = jnp.array([1.0, 2.0])
    assert float(jax.jit(run)(x)) == 6
    np.testing.assert_array_equal(jax.grad(run)(x), [0, 3])
    np.testing.assert_array_equal(jax.vmap(run)(jnp.stack([x, 2 * x])), [6, 12])
    np.testing.assert_array_equal(jax.lax.scan(lambda c, y: (c, run(y)), 0, jnp.stack([x, x]))[1], [6, 6])
    np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(run)))(x), [0, 3])


@given(st.lists(st.sampled_from("bhqk"), min_size=1, max_size=4), st.integers(0, 3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_indexing_evaluates_as_written(axes, seed):
    """A traced mod with its operands is the mod."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(5,) * len(axes)), F32)
    place = dict(zip("bhqk", map(jnp.int32, rng.integers(-2, 7, 4)), strict=True))

    def mod(s, b, h, q, k):
        at = {"b": b, "h": h, "q": q, "k": k}
        return s + table[tuple(at[axis] for axis in axes)]

    traced, operands = trace_score_mod(mod)
    np.testing.assert_array_equal(traced(operands, F32(1), *place.values()), mod(F32(1), *place.values()))


def test_mask_mods_may_return_python_bools():
    traced, operands = trace_mask_mod(lambda b, h, q, k: True)
    assert bool(traced(operands, *map(jnp.int32, range(4))))


def test_16_bit_scores_become_float32():
    traced, operands = trace_score_mod(lambda s, b, h, q, k: s.astype(jnp.bfloat16))
    assert traced(operands, F32(1), *map(jnp.int32, range(4))).dtype == F32


class Callable:
    def __call__(self, s, b, h, q, k):
        return s

    def method(self, s, b, h, q, k):
        return s


def test_describe_names_function_file_and_line():
    def local(b, h, q, k):
        return True

    def with_options(s, b, h, q, k, *, cap):
        return s

    named = {
        "local": local,
        "with_options": functools.partial(with_options, cap=2.0),
        "Callable": Callable(),
        "Callable.method": Callable().method,
        "<lambda>": lambda s, b, h, q, k: s,
    }
    for name, mod in named.items():
        assert describe(mod).split(" ")[0].endswith(name)
        assert "(test_trace.py:" in describe(mod)


def test_keyword_and_default_arguments():
    def mod(s, b, h, q, k, cap=2.0, *, shift=1.0):
        return cap * s + shift

    traced, operands = trace_score_mod(mod)
    assert float(traced(operands, F32(3), *map(jnp.int32, range(4)))) == 7
    trace_score_mod(lambda *args: args[0])


def test_numbers_inside_of_a_branch_belong_to_the_program():
    def program(number):
        held = jnp.float32(number)
        inner = jax.jit(lambda s: s * held)
        return trace_score_mod(lambda s, b, h, q, k: jax.lax.cond(q > k, inner, lambda s: s, s))[0]

    assert program(3.0) == program(3.0)
    assert program(3.0) != program(-2.0)
