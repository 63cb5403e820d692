"""The table of primitives in whole kernels: compiled for a GPU that is not there, and run on one that is.

In every dtype, on every kind of value, forward and with all gradients. What a kernel cannot compute is refused by name
before anything is compiled; no compiler's error reaches a user.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases.primitives import REFUSED_BY_MOSAIC, ROWS, is_coarse, mod_of, operands_of
from tests.support import gpu_compile
from tests.support.rows import tiers

T, H, D = 128, 2, 64
PAIRS = sorted({(x, y) for _, x, y in ROWS})
AT_ONCE = 6  # primitives in one mod, where only their compilation is tested
HEADS = 8  # primitives in one mod, each for a head of its own: compiling takes most of the time on a GPU
BACKENDS = ["triton", pytest.param("mosaic_gpu", marks=pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on"))]  # fmt: skip


def program_of(primitives, pair, backend, dtype="bfloat16", *, of_heads=False):
    """Output and all gradients as a function of arrays, and the arrays.

    One primitive after the other changes each score; or, `of_heads`, each head has one of them, and arrays, for itself.
    """
    heads = len(primitives) if of_heads else H
    mods = [mod_of(p, of_heads=of_heads) for p in primitives]
    operands = operands_of(pair, heads, T, T, of_heads=of_heads)
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, heads, D)), dtype) for _ in range(3))

    def attend(q, k, v, given):
        captured = [given[floats.index(i)] if i in floats else x for i, x in enumerate(operands)]

        def score_mod(s, b, h, q_idx, kv_idx):
            for n, mod in enumerate(mods):
                made = mod(s, b, h, q_idx, kv_idx, *captured)
                s = jnp.where(h == n, made, s) if of_heads else made
            return s

        return jflex.flex_attention(q, k, v, score_mod, implementation=backend)

    def run(q, k, v, given):
        out, pull = jax.vjp(attend, q, k, v, given)
        return out, pull(out)

    return run, (q, k, v, [operands[i] for i in floats])


def refused(primitives, pair, backend):
    """Whether the kernels refuse the mod; then it must be by the name of a primitive or dtype."""
    run, arrays = program_of(primitives, pair, backend)
    try:
        with gpu_compile.absent_gpu():
            jax.eval_shape(run, *arrays)
    except jflex.UnsupportedError as error:
        reason = str(error)
    else:
        return False
    assert re.search(r"primitive `|it computes in", reason), reason
    return True


def chunks(pair, size=AT_ONCE):
    found = [p for p, x, y in ROWS if (x, y) == pair]
    return [tuple(found[i : i + size]) for i in range(0, len(found), size)]


def name_of(x):
    return "-".join(getattr(p, "name", p) for p in x)


# In `full` two primitives of bfloat16, in which compilers lack most of them: six take 30 s. On a GPU every chunk runs.
BFLOAT16 = ("bfloat16", "bfloat16")
FEW = chunks(BFLOAT16)[0][:2]
CHUNKS = [(primitives, pair) for pair in PAIRS for primitives in chunks(pair)]


@tiers(full={"primitives": FEW}, rest="long")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("primitives", "pair"), [(FEW, BFLOAT16), *CHUNKS], ids=name_of)
def test_compiles(primitives, pair, backend):
    with jax.numpy_dtype_promotion("standard"):
        primitives = [p for p in primitives if not refused([p], pair, backend)]
        run, arrays = program_of(primitives, pair, backend)
        assert gpu_compile.compile_or_skip(run, *arrays)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_constant_is_negated(backend):
    """Pallas' Triton lowers no `not` of a literal, to which comparing a head with itself is folded."""
    mask = lambda b, h, q, k: ~(h % 7 > h % 7) | (q >= k)
    x = jax.ShapeDtypeStruct((1, T, 1, D), jnp.bfloat16)
    gpu_compile.lower(lambda x: jflex.flex_attention(x, x, x, mask_mod=mask, implementation=backend), x)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_numbers_are_divided(backend):
    """LLVM of JAX 0.12 narrows what is below 2 ** 15 to 16 bits, and ended the process."""
    mask = lambda b, h, q, k: (q * k % 7 % 5 != 2) & ((q + k) % 60 // 7 != 3)
    x = jax.ShapeDtypeStruct((1, T, 1, D), jnp.bfloat16)
    kernels = gpu_compile.compile_kernels(
        lambda x: jflex.flex_attention(x, x, x, mask_mod=mask, implementation=backend), x
    )
    assert any("forward" in kernel.name for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(
    ("primitives", "pair"), [(p, pair) for pair in PAIRS for p in chunks(pair, HEADS)], ids=name_of
)
def test_values_and_gradients(primitives, pair, backend):
    with jax.numpy_dtype_promotion("standard"):
        left_out = [p for p in primitives if refused([p], pair, backend)]
        assert backend == "mosaic_gpu" or not left_out
        assert {p.name for p in left_out} <= REFUSED_BY_MOSAIC
        primitives = [p for p in primitives if p not in left_out]
        run, arrays = program_of(primitives, pair, backend, of_heads=True)
        right, _ = program_of(primitives, pair, "xla", of_heads=True)  # it sums gradients of 16-bit arrays in float32
        (out, (*inputs, given)), (right_out, (*right_inputs, right_given)) = (jax.jit(f)(*arrays) for f in (run, right))
    heads_first = lambda x: np.moveaxis(np.asarray(x, np.float64), 2, 0)
    found, wanted = ([*map(heads_first, x), *(np.asarray(z, np.float64) for z in g)] for x, g in (
        ((out, *inputs), given), ((right_out, *right_inputs), right_given)
    ))  # fmt: skip
    for n, primitive in enumerate(primitives):
        allowed = 0.06 if is_coarse(primitive, *pair) else 0.03
        for a, b in zip(found, wanted, strict=True):
            size = np.abs(b[n]).max() + 1e-3
            np.testing.assert_allclose(a[n] / size, b[n] / size, atol=allowed, rtol=0, err_msg=primitive.name)
