"""What tile programs make of a mod: cheap forms of arithmetic, and along which axes captured arrays are read alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.program import evaluate
from pallas_kernels.program.broadcast_axes import BroadcastAxes, broadcast_axes
from pallas_kernels.program.build import IndexRanges
from pallas_kernels.program.evaluate import Evaluation, OfMultiple, Product
from tests.support import tile_programs
from tests.support.specs import spec_of

SIZES = IndexRanges(B=3, Hq=4, T=70, S=90)


def program_of(mod, *shapes):
    return tile_programs.program_of(mod, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], SIZES)


class CountingSpace(tile_programs.DenseSpace):
    """Tiles of one shape; counts the multiply-adds."""

    def __init__(self):
        super().__init__({"q": (5, 1), "k": (1, 7), "qk": (5, 7)})
        self.multiply_adds = 0

    def multiply_add(self, a, b, c):
        self.multiply_adds += 1
        return super().multiply_add(a, b, c)


@pytest.mark.parametrize("operation", [jnp.floor_divide, jnp.remainder])
@pytest.mark.parametrize("divisor", [1, 8, 12, 1 << 20])
@pytest.mark.parametrize("offset", [0, -5])
def test_indices_are_divided_by_powers_of_two_without_a_division(operation, divisor, offset):
    program = program_of(lambda s, b, h, q, k: s * operation(k + offset, divisor).astype(jnp.float32))
    keys = 13 * jnp.arange(7, dtype=jnp.int32)[None, :]

    def evaluate(k):
        known = {node: {"score": jnp.ones((5, 7)), "k": k}.get(node.value) for node in program.arguments}
        return Evaluation(CountingSpace(), known)(program.output)

    expected = np.broadcast_to(operation(keys + offset, divisor), (5, 7))
    np.testing.assert_array_equal(evaluate(keys), expected)
    operations = {equation.primitive.name for equation in jax.make_jaxpr(evaluate)(keys).eqns}
    assert operations.isdisjoint({"div", "rem", "jit"}) == (offset == 0 and divisor != 12)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_an_index_is_clipped_in_its_own_dtype(dtype):
    """A negative distance as an unsigned index is large."""
    of = lambda table: lambda s, b, h, q, k: s + jnp.take(table, (q - k).astype(dtype), mode="clip")
    table, q, k = jnp.arange(3.0), jnp.arange(5)[:, None], jnp.arange(7)[None]
    program = tile_programs.program_of(lambda *args: of(args[-1])(*args[:-1]), [table], SIZES)
    known = {node: {"score": jnp.zeros((5, 7)), "q": q, "k": k}.get(node.value) for node in program.arguments}
    space = tile_programs.DenseSpace({"q": (5, 1), "k": (1, 7), "qk": (5, 7)}, [table])
    np.testing.assert_array_equal(Evaluation(space, known)(program.output), of(table)(0.0, 0, 0, q, k))


@pytest.mark.parametrize(("mod", "expected"), [
    (lambda s, b, h, q, k: s - 0.5 * (q - k).astype(jnp.float32), 1),
    (lambda s, b, h, q, k: s * s + s, 1),
    (lambda s, b, h, q, k: (s * s - q.astype(jnp.float32)) + 1.0, 1),
    (lambda s, b, h, q, k: q.astype(jnp.float32) - s * s, 1),
    (lambda s, b, h, q, k: s + s, 1),  # the score itself is a product with the scale
    (lambda s, b, h, q, k: 3.0 * s + 1.0, 1),
    (lambda s, b, h, q, k: jnp.maximum(s, 0.0) + 1.0, 0),
])  # fmt: skip
def test_sums_of_products_are_one_step(mod, expected):
    check_multiply_adds(CountingSpace(), mod, expected)


class SigmoidSpace(CountingSpace):
    """The logistic by an exponential of base 2, whose exponent is one FMA where the argument was one."""

    def substitutes_of_multiples(self, kind):
        del kind
        return {"logistic": OfMultiple(-np.log2(np.e).item(), lambda exponent: 1 / (1 + jnp.exp2(exponent)))}


@pytest.mark.parametrize(("mod", "expected"), [
    (lambda s, b, h, q, k: jax.nn.sigmoid(s), 0),
    (lambda s, b, h, q, k: jax.nn.sigmoid(s * 3.0), 0),
    (lambda s, b, h, q, k: jax.nn.sigmoid(s - 3.0), 2),
    (lambda s, b, h, q, k: jax.nn.sigmoid(3.0 - s * 2.0), 2),
    (lambda s, b, h, q, k: jax.nn.sigmoid(s - q.astype(jnp.float32)), 2),
    (lambda s, b, h, q, k: jax.nn.sigmoid(k.astype(jnp.float32) + s) * s, 2),
    (lambda s, b, h, q, k: jax.nn.sigmoid(jnp.maximum(s, 0.0)), 0),
    (lambda s, b, h, q, k: jax.nn.sigmoid(s * s + 1.0), 1),
    (lambda s, b, h, q, k: jax.nn.sigmoid(s + s), 1),
    (lambda s, b, h, q, k: jax.nn.sigmoid(q.astype(jnp.float32) - s) * jax.nn.sigmoid(s), 2),
])  # fmt: skip
def test_logistic_of_a_sum_is_one_step_and_the_function(mod, expected):
    check_multiply_adds(SigmoidSpace(), mod, expected)


def check_multiply_adds(space, mod, expected):
    """Values are those of the mod; of two multiply-adds for a logistic one is dead code, the argument itself."""
    program = program_of(mod)
    raw = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    q, k = jnp.arange(5, dtype=jnp.int32)[:, None], jnp.arange(7, dtype=jnp.int32)[None, :]
    named = dict(zip("sbhqk", program.arguments, strict=True))
    begun = Evaluation(space, {named["b"]: jnp.int32(0), named["h"]: jnp.int32(0), named["q"]: q, named["k"]: k})
    found = begun.child({}, {named["s"]: Product(jnp.asarray(raw), jnp.float32(0.125))}).tile(program.output)
    assert space.multiply_adds == expected
    per_element = jax.vmap(jax.vmap(lambda s, i, j: mod(s, 0, 0, i, j), (0, None, 0)), (0, 0, None))
    want = per_element(jnp.asarray(raw) * 0.125, jnp.arange(5, dtype=jnp.int32), jnp.arange(7, dtype=jnp.int32))
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)


BATCH = BroadcastAxes(True, False, False)
HEADS = BroadcastAxes(False, True, False)
DIAGONAL = BroadcastAxes(False, False, True)


@pytest.mark.parametrize(("mod", "shape", "expected"), [
    (lambda s, b, h, q, k, x: s + x[b, h, q, k], (3, 4, 70, 90), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[h, q, k], (4, 70, 90), BATCH),
    (lambda s, b, h, q, k, x: s + x[b, q, k], (3, 70, 90), HEADS),
    (lambda s, b, h, q, k, x: s + x[b, h, q - k + 90], (3, 4, 160), DIAGONAL),
    (lambda s, b, h, q, k, x: s + x[h, q - k + 90], (4, 160), BroadcastAxes(True, False, True)),
    (lambda s, b, h, q, k, x: s + x[jnp.clip(k - q, -8, 8) + 8], (17,), BroadcastAxes(True, True, True)),
    (lambda s, b, h, q, k, x: s + x[b, h, jnp.log1p(jnp.abs(q - k).astype(jnp.float32)).astype(jnp.int32)],
     (3, 4, 8), DIAGONAL),
    (lambda s, b, h, q, k, x: s + x[b, h, (2 * q - 2 * k) // 2 + 90], (3, 4, 200), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[jnp.clip(s, 0, 3).astype(jnp.int32)], (4,), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, q.astype(jnp.int8) - k.astype(jnp.int8)], (3, 4, 256), DIAGONAL),
    (lambda s, b, h, q, k, x: s + x[b, h, (q.astype(jnp.int8) + jnp.int8(100)).astype(jnp.int32) - k],
     (3, 4, 256), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, q.astype(bool).astype(jnp.int32) - k], (3, 4, 9),
     BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, (q.astype(jnp.bfloat16) - k.astype(jnp.bfloat16)).astype(jnp.int32)],
     (3, 4, 99), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, (q.astype(jnp.float32) - 10.5).astype(jnp.int32) - k], (3, 4, 99),
     BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, q + k], (3, 4, 160), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, q // 2 - k // 2 + 45], (3, 4, 80), BroadcastAxes(False, False, False)),
    (lambda s, b, h, q, k, x: s + x[b, h, jnp.clip(s, 0, 3).astype(jnp.int32)], (3, 4, 4),
     BroadcastAxes(False, False, False)),
])  # fmt: skip
def test_invariance(mod, shape, expected):
    program = program_of(mod, shape)
    [load] = [node for node in program.loads if node.kind == "qk"]
    spec = spec_of(B=SIZES.B, T=SIZES.T, S=SIZES.S, Hq=SIZES.Hq, D=16, scale=0.25)
    assert broadcast_axes(spec, load) == expected


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_remainder_is_exact_though_its_quotient_is_not(off):
    """On a GPU the quotient of floats is off by up to 2 ULP: a whole one may come out one too small or too large."""
    rng = np.random.default_rng(off + 1)
    divisors = rng.integers(1, 99, 500) * rng.choice([-1.0, 0.25, 1.0], 500)
    numbers = np.float32(np.concatenate([divisors * rng.integers(-999, 999, 500), rng.normal(size=500) * 99]))
    divisors = np.float32(np.tile(divisors, 2))
    quotients = np.trunc(np.float64(numbers) / divisors)
    rest = np.float32(numbers - (quotients + off * (quotients != 0)) * divisors)
    found = evaluate.repair_remainder(*map(jnp.asarray, (numbers, divisors, rest)))
    np.testing.assert_array_equal(found, np.fmod(numbers, divisors))


def test_a_remainder_by_infinity_is_the_number():
    x = jnp.asarray([-0.0, 3.0, -3.0, jnp.inf, jnp.nan, 1.0], jnp.float32)
    y = jnp.asarray([2.0, jnp.inf, -jnp.inf, 2.0, 2.0, 0.0], jnp.float32)
    np.testing.assert_array_equal(evaluate.remainder(x, y), np.float32([0, 3, -3, np.nan, np.nan, np.nan]))
