"""Which captured arrays TMA loads as bias tiles in the Hopper kernels, and what is declared for them."""

import jax
import jax.numpy as jnp
import pytest

from jflex.mods.trace import TracedMod
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.program.build import IndexRanges, trace_program
from pallas_kernels.spec import Programs
from tests.support.specs import spec_of

SIZES = IndexRanges(2, 4, 1024, 2048)
BF16, F32 = jnp.bfloat16, jnp.float32


def spec_with(mod, *operands, D=64):
    shapes = [(shape, str(jnp.dtype(dtype))) for shape, dtype in operands]
    scalars = [jax.ShapeDtypeStruct((), F32), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    jaxpr = jax.make_jaxpr(mod)(*scalars, *(jax.ShapeDtypeStruct(*x) for x in operands))
    program = trace_program(jaxpr, shapes, SIZES)
    return spec_of(
        **{name: getattr(SIZES, name) for name in ("B", "T", "S", "Hq")},
        D=D,
        programs=Programs(program),
        score_mod=TracedMod("score", "", tuple(shapes), jaxpr, "mod"),
    )


def plus(index):
    return lambda s, b, h, q, k, x: s + x[index(b, h, q, k)].astype(F32)


@pytest.mark.parametrize(
    ("index", "shape", "dtype", "found"),
    [
        (lambda b, h, q, k: (h, q, k), (4, 1024, 2048), BF16, (4, 1024, 2048)),
        (lambda b, h, q, k: (q, k), (1024, 2048), F32, (1, 1024, 2048)),
        (lambda b, h, q, k: (b, h // 2, q, k), (2, 2, 1024, 2048), BF16, (4, 1024, 2048)),
        (lambda b, h, q, k: (q, k), (1504, 2112), BF16, (1, 1504, 2112)),  # longer than what is read
        (lambda b, h, q, k: (q, k), (1025, 2048), BF16, None),  # not whole tiles of 8 rows
        (lambda b, h, q, k: (q, k), (1024, 2080), BF16, None),  # and 128 bytes
        (lambda b, h, q, k: (q, k), (1024, 2080), F32, (1, 1024, 2080)),
        (lambda b, h, q, k: (q, k), (1000, 2048), BF16, None),  # the last row is read again and again
        (lambda b, h, q, k: (k, q), (2048, 1024), BF16, None),
        (lambda b, h, q, k: (q, k, h), (1024, 2048, 4), BF16, None),
        (lambda b, h, q, k: (q // 2, k), (1024, 2048), BF16, None),
        (lambda b, h, q, k: (q, q, k), (1024, 1024, 2048), BF16, None),
        (lambda b, h, q, k: (q, k), (1024, 2048), jnp.int8, None),
    ],
)
def test_which_loads_are_planes(index, shape, dtype, found):
    assert [x.shape for x in bias_tiles.bias_loads(spec_with(plus(index), (shape, dtype)))] == (
        [found] if found else []
    )
