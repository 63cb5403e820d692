"""Each primitive of a mod, in each dtype, on each kind of value: forward and derivative of tile programs against JAX.

The tile program is evaluated on the CPU here; `test_primitive_kernels` compiles the same table for a GPU, and runs it
on one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_gpu.score.tile import unsupported_primitive
from pallas_kernels.program.build import IndexRanges, differentiate
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.rules.views import NotOnTile
from pallas_kernels.triton.compiler.emit import emit
from tests.cases.primitives import PRIMITIVES, REFUSED_BY_MOSAIC, ROWS, is_coarse, mod_of, operands_of
from tests.support.rows import tiers
from tests.support.tile_programs import DenseSpace, program_of

B, H, T, S = 2, 3, 5, 7


SIZES = IndexRanges(B, H, T, S)
SHAPES = {"q": (T, 1), "k": (1, S), "qk": (T, S)}


def run_program(mod, operands, score, d_score, h):
    """Output, cotangents of the score, and of every array."""
    program = program_of(mod, operands, SIZES)
    derivative = differentiate(program, [True] * len(operands))
    q, k = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)[None, :]
    known = dict(zip(program.arguments, (score, jnp.int32(0), jnp.int32(h), q, k), strict=True))
    evaluation = Evaluation(DenseSpace(SHAPES, operands), {**known, derivative.cotangent: d_score})
    gradients = [jnp.zeros(x.shape, jnp.float32) for x in operands]
    for load, node in derivative.d_loads.items():
        at = tuple(evaluation.tile(index) for index in load.inputs)
        gradients[load.value] = gradients[load.value].at[at].add(evaluation.tile(node))
    return evaluation.tile(program.output), evaluation.tile(derivative.d_score), gradients


def run_jax(mod, operands, score, d_score, h):
    """The same by `jax.vjp` of the mod; what each element of the tile adds to an array is summed in float32."""
    q, k = (x.astype(jnp.int32) for x in jnp.meshgrid(jnp.arange(T), jnp.arange(S), indexing="ij"))
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]

    def at_element(s, q, k, d):
        out, pull = jax.vjp(lambda s, xs: mod(s, jnp.int32(0), jnp.int32(h), q, k, *xs), s, operands)
        d_s, d_operands = pull(d)
        return out, d_s, [g.astype(jnp.float32) if f else None for g, f in zip(d_operands, floats, strict=True)]

    out, d_s, gradients = jax.vmap(jax.vmap(at_element))(score, q, k, d_score)
    return out, d_s, [None if g is None else g.sum(axis=(0, 1)) for g in gradients]


FIRST = {"float": "float32", "int": "int32", "bool": "bool"}


def tier_of(primitive, *dtypes):
    """`full` in the first dtype that has arithmetic of its own: 16 bits are widened, and mixtures are cast first."""
    return pytest.mark.full if set(dtypes) == {FIRST[primitive.takes[0]]} else pytest.mark.long


@pytest.mark.parametrize(
    ("primitive", "x_dtype", "y_dtype"),
    [pytest.param(*row, marks=tier_of(*row)) for row in ROWS],
    ids=lambda v: getattr(v, "name", v),
)
def test_values_and_derivatives(primitive, x_dtype, y_dtype):
    mod, operands = mod_of(primitive), operands_of((x_dtype, y_dtype), H, T, S)
    rng = np.random.default_rng(2)
    score, d_score = (jnp.asarray(rng.uniform(0.1, 0.9, size=(T, S)), jnp.float32) for _ in range(2))
    with jax.numpy_dtype_promotion("standard"):
        run = lambda run: jax.jit(lambda *arrays: run(mod, *arrays, 1))(operands, score, d_score)  # compiles once
        found, wanted = run(run_program), run(run_jax)
    tolerance = 0.03 if is_coarse(primitive, x_dtype, y_dtype) else 2e-5
    for name, x, y in zip(("out", "score"), found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(x, y, err_msg=name, rtol=tolerance, atol=tolerance)
    for i, (x, y) in enumerate(zip(found[2], wanted[2], strict=True)):
        if y is not None:
            np.testing.assert_allclose(x, y, err_msg=f"operand {i}", rtol=tolerance, atol=tolerance)


@pytest.mark.full
def test_a_stopped_array_is_indexed_later():
    """Of an array too large to be loaded at once, too."""
    mod = lambda s, b, h, q, k, x: s * jax.lax.stop_gradient(x[q])[k] + x[q, k]
    x = jnp.arange(T * 100, dtype=jnp.float32).reshape(T, 100) / 100
    score = d_score = jnp.ones((T, S), jnp.float32)
    found, wanted = (run(mod, [x], score, d_score, 0) for run in (run_program, run_jax))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@jax.custom_jvp
def _without_derivative(x):
    return x


@_without_derivative.defjvp
def _refuse(x, t):
    raise NotImplementedError("there is no derivative")


def test_what_jax_cannot_differentiate_is_refused():
    program = program_of(lambda s, b, h, q, k: _without_derivative(s), [], SIZES)
    with pytest.raises(NotOnTile, match=r"JAX cannot differentiate it: there is no derivative"):
        differentiate(program, [])


def nodes_of(mod, operands=()):
    program = program_of(mod, operands, SIZES)
    return [*program.nodes, *differentiate(program, [True] * len(operands)).nodes]


NO_PRIMITIVES = {"input", "literal", "load", "call"}
TAKE_ACCURACY = {"cbrt", "cos", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rsqrt", "sin", "sqrt",
                 "tan", "tanh"}  # fmt: skip


@tiers(default={"primitive": ["gelu", "ldexp", "polynomial"]})
@pytest.mark.parametrize("primitive", [p for p in PRIMITIVES if "float" in p.takes], ids=lambda p: p.name)
def test_all_that_value_and_derivative_become_is_compiled(primitive):
    """A later JAX may write derivatives with primitives, or with parameters, that no compiler behind Pallas has."""
    with jax.numpy_dtype_promotion("standard"):
        nodes = nodes_of(mod_of(primitive), operands_of(("float32", "float32"), H, T, S))
    assert {node.op for node in nodes} - NO_PRIMITIVES <= set(emit.RULES)
    assert unsupported_primitive(nodes) is None or primitive.name in REFUSED_BY_MOSAIC
    for node in (node for node in nodes if node.op in TAKE_ACCURACY):
        [eqn] = jax.make_jaxpr(node.apply)(*(jax.ShapeDtypeStruct((), n.dtype) for n in node.inputs)).jaxpr.eqns
        assert eqn.params["accuracy"] is None


POLYNOMIALS = {
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "erfcinv": lambda x: jax.scipy.special.erfcinv(x),
    "ndtri": jax.scipy.special.ndtri,
    "many_terms": lambda x: jax.lax.polynomial(x, [1 / n for n in range(1, 20)]),
}


@pytest.mark.skipif(not hasattr(jax.lax, "polynomial"), reason="the primitive `polynomial` is of JAX 0.12 and later")
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_become_multiply_adds(name):
    """Which JAX 0.12 uses for the error functions and their derivatives, beside an `exp` of the highest accuracy."""
    function = POLYNOMIALS[name]
    differentiated = str(jax.make_jaxpr(jax.value_and_grad(function))(0.5))
    assert "polynomial" in differentiated
    mod = lambda s, b, h, q, k: function(s)
    assert "polynomial" not in {node.op for node in nodes_of(mod)}
    rng = np.random.default_rng(5)
    score, d_score = (jnp.asarray(rng.uniform(0.1, 0.9, size=(T, S)), jnp.float32) for _ in range(2))
    for found, wanted in zip(*(run(mod, [], score, d_score, 0)[:2] for run in (run_program, run_jax)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["flip", "empty"])
def test_of_a_scalar(name):
    mod = {"flip": lambda s, b, h, q, k: jnp.flip(s),
           "empty": lambda s, b, h, q, k: jnp.where(q >= 0, s, jnp.empty_like(s))}[name]  # fmt: skip
    score = d_score = jnp.full((T, S), 0.5, jnp.float32)
    out, d_s, _ = run_program(mod, [], score, d_score, 0)
    np.testing.assert_array_equal(out, score)
    np.testing.assert_array_equal(d_s, d_score)


@jax.custom_vjp
def _looked_up(x, i):
    return x[i]


def _pull_look_up(saved, ct):
    x, i = saved
    return 0.7 * ct * (jnp.arange(x.shape[0], dtype=jnp.int32) == i).astype(x.dtype), None


_looked_up.defvjp(lambda x, i: (x[i], (x, i)), _pull_look_up)


@pytest.mark.full
def test_a_rule_may_take_a_captured_array():
    """Of which the value needs one element and the derivative all."""
    mod = lambda s, b, h, q, k, x: s + s * _looked_up(x, k % 3)
    x = jnp.asarray([0.5, 1.5, -1.0], jnp.float32)
    rng = np.random.default_rng(4)
    score, d_score = (jnp.asarray(rng.normal(size=(T, S)), jnp.float32) for _ in range(2))
    found, wanted = (run(mod, [x], score, d_score, 0) for run in (run_program, run_jax))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
