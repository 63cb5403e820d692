"""Every primitive that the emitter knows, in a kernel of its own, beside JAX: a table, and how a row runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.ref import addupdate

from pallas_kernels.config import Tiles
from pallas_kernels.triton.compiler.launch import launch
from pallas_kernels.triton.compiler.rules.primitives import element, masked_load, masked_store

ROWS, COLUMNS = 16, 32
FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int32", "int8", "uint32")
F32 = ("float32",)


class Row(NamedTuple):
    """A function of tiles [16, 32] of numbers.

    Attributes:
      name: Of the primitive; with a suffix after a dot where there are several.
      function: Of one or two tiles.
      dtypes: In which it is tested.
      inputs: How many tiles it takes.
    """

    name: str
    function: Callable[..., Any]
    dtypes: tuple[str, ...] = FLOATS
    inputs: int = 1


def _loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + c[1] * i.astype(x.dtype)), (x, x + x))[1]


def _while(x: Any) -> Any:
    end = jnp.sum(x > 0).astype(jnp.int32) % 5
    return lax.fori_loop(1, end, lambda i, c: c + x * i.astype(x.dtype), x)


def _branches(x: Any) -> Any:
    which = jnp.sum(x > 0).astype(jnp.int32) % 3
    return lax.switch(which, [lambda: x, lambda: x + x, lambda: x * x])


def _split(x: Any) -> Any:
    first, second = jnp.split(x.reshape(ROWS, COLUMNS // 2, 2), 2, axis=2)
    return first[..., 0] * 2 + second[..., 0]


def _integer(x: Any) -> Any:
    return x.astype(jnp.int32)


def _table() -> list[Row]:
    unary = lambda name, function, dtypes=FLOATS: Row(name, function, dtypes)
    both = lambda name, function, dtypes=(*FLOATS, *INTS): Row(name, function, dtypes, 2)
    positive = lambda function: lambda x: function(jnp.abs(x) + jnp.asarray(1.25, x.dtype))
    inside = lambda function: lambda x: function(jnp.clip(x / 4, -0.9, 0.9).astype(x.dtype))
    shifts = ("int32", "uint32")
    return [
        *(unary(name, getattr(lax, name)) for name in (
            "atan", "asinh", "cbrt", "ceil", "cos", "cosh", "erf", "exp", "exp2", "expm1", "floor", "logistic", "sin",
            "sinh", "tan", "tanh", "is_finite")),
        *(unary(name, inside(getattr(lax, name)), F32) for name in ("acos", "asin", "atanh", "erf_inv", "erfc")),
        *(unary(name, positive(getattr(lax, name))) for name in ("acosh", "log", "log1p", "rsqrt", "sqrt")),
        unary("log2", positive(jnp.log2), F32),
        Row("atan2", lax.atan2, F32, 2),
        Row("nextafter", lax.nextafter, F32, 2),
        Row("pow", lambda x, y: lax.pow(jnp.abs(x) + 1, y), F32, 2),
        unary("abs", lax.abs, (*FLOATS, "int32", "int8")),
        unary("neg", lax.neg, (*FLOATS, "int32")),
        unary("sign", lax.sign, (*FLOATS, "int32")),
        unary("sign.nan", lambda x: lax.sign(jnp.where(x > 1, jnp.nan, jnp.where(x > 0, -0.0, x))), F32),
        unary("square", lax.square, (*FLOATS, "int32")),
        unary("integer_pow", lambda x: lax.integer_pow(x, 3) + lax.integer_pow(x, 7), F32),
        unary("integer_pow.negative", positive(lambda x: lax.integer_pow(x, -2)), F32),
        unary("round", lambda x: lax.round(4 * x, lax.RoundingMethod.TO_NEAREST_EVEN), F32),
        unary("round.away", lambda x: lax.round(4 * x, lax.RoundingMethod.AWAY_FROM_ZERO), F32),
        both("add", lax.add), both("sub", lax.sub), both("mul", lax.mul), both("max", lax.max), both("min", lax.min),
        both("add_any", lambda x, y: jax.vjp(lambda z: (z, z), x)[1]((x, y))[0], F32),
        Row("max.nan", lambda x, y: lax.max(jnp.where(x > 1, jnp.nan, x), y), F32, 2),
        Row("max.bool", lambda x, y: lax.max(x > 0, y > 0).astype(jnp.int32), F32, 2),
        Row("div", lambda x, y: x / jnp.where(jnp.abs(y) < 0.25, 1, y).astype(x.dtype), FLOATS, 2),
        Row("div.int", lambda x, y: lax.div(x, jnp.where(y == 0, 3, y).astype(x.dtype)), INTS, 2),
        Row("rem", lambda x, y: lax.rem(x, jnp.where(y == 0, 3, y).astype(x.dtype)), INTS, 2),
        Row("rem.float", lambda x, y: lax.rem(8 * x, jnp.abs(y) + 0.5), F32, 2),
        Row("clamp", lambda x, y: lax.clamp(jnp.minimum(x, y), x * x, jnp.maximum(x, y)), F32, 2),
        *(both(name, lambda x, y, name=name: getattr(lax, name)(x, y).astype(jnp.int32))
          for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(Row(f"{name}.bool", lambda x, y, name=name: getattr(lax, name)(x > 0, y > 0).astype(jnp.int32), F32, 2)
          for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(both(name, getattr(lax, f"bitwise_{name}"), INTS) for name in ("and", "or", "xor")),
        unary("not", lax.bitwise_not, INTS),
        unary("not.bool", lambda x: (~(x > 0)).astype(jnp.int32), F32),
        *(Row(name, lambda x, y, name=name: getattr(lax, name)(x, y & jnp.asarray(63, y.dtype)), shifts, 2)
          for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical")),
        unary("shift_left.known", lambda x: (x << jnp.asarray(3, x.dtype)) ^ (x >> jnp.asarray(31, x.dtype)), shifts),
        unary("population_count", lax.population_count, shifts),
        Row("select_n", lambda x, y: jnp.where(x > y, x, y), (*FLOATS, *INTS), 2),
        Row("select_n.several", lambda x, y: lax.select_n(_integer(x > y) + _integer(x > 0), x, y, x * y), F32, 2),
        unary("convert_element_type", lambda x: x.astype(jnp.float16).astype(jnp.int32).astype(jnp.int8), F32),
        unary("convert_element_type.bfloat16", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), F32),
        unary("convert_element_type.bool", lambda x: x.astype(jnp.bool_).astype(jnp.float32), ("int32", "float32")),
        unary("bitcast_convert_type", lambda x: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF0000, jnp.float32), F32),
        unary("stop_gradient", lax.stop_gradient), unary("copy", lambda x: lax.copy_p.bind(x)),
        unary("iota", lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 0) - lax.iota(jnp.int32, COLUMNS)[None],
              ("int32",)),
        unary("broadcast_in_dim", lambda x: x + jnp.broadcast_to(jnp.max(x, axis=1)[:, None], x.shape)),
        unary("reshape", lambda x: x.reshape(COLUMNS, ROWS).reshape(x.shape) + x),
        unary("transpose", lambda x: x.T + x.T),
        unary("squeeze", lambda x: lax.squeeze(lax.expand_dims(x, (1,)), (1,)) + x),
        unary("reduce_sum", lambda x: jnp.sum(x, axis=0), (*F32, "int32")),
        unary("reduce_sum.all", lambda x: jnp.sum(x, axis=(0, 1)) + x, F32),
        unary("reduce_max", lambda x: jnp.max(x, axis=1), (*FLOATS, "int32")),
        unary("reduce_min", lambda x: jnp.min(x, axis=1), (*F32, "int32")),
        unary("reduce_or", lambda x: jnp.any(x > 2, axis=1).astype(jnp.int32), F32),
        unary("reduce_and", lambda x: jnp.all(x > -2, axis=1).astype(jnp.int32), F32),
        unary("cumsum", lambda x: lax.cumsum(x, 1) + lax.cumsum(x, 1, reverse=True), (*F32, "int32")),
        Row("dot_general", lambda x, y: lax.dot_general(
            x, y, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32), FLOATS, 2),
        Row("dot_general.turned", lambda x, y: lax.dot_general(
            x, y, (((0,), (0,)), ((), ())), precision="highest", preferred_element_type=jnp.float32), FLOATS, 2),
        unary("split", _split, ("float32",)),
        unary("scan", _loop), unary("while", _while, F32), unary("cond", _branches, F32),
    ]  # fmt: skip


TABLE = _table()
CASES = [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row in TABLE for dtype in row.dtypes]
MEMORY = {  # what is no function of tiles: kernels on refs, and what they make of x and y
    "masked": (lambda x, y, out: masked_store(out, _masked(x, y), _column() < 20), lambda x, y: np.where(
        np.arange(COLUMNS) < 20, np.where(np.arange(COLUMNS) < 7, x, -3) + y, 0)),
    "sliced": (lambda x, y, out: out.__setitem__((pl.ds(8, 8), pl.ds(0, 16)), x[pl.ds(0, 8), pl.ds(16, 16)]),
               lambda x, y: np.pad(x[:8, 16:], ((8, 0), (0, 16)))),
    "gathered": (lambda x, y, out: out.__setitem__((_row(), _column()), x[ROWS - 1 - _row(), _column() ^ 1]),
                 lambda x, y: x[::-1, np.arange(COLUMNS) ^ 1]),
    "scalar": (lambda x, y, out: out.__setitem__((2, pl.ds(0, COLUMNS)), x[3, pl.ds(0, COLUMNS)] * y[1, 5]),
               lambda x, y: np.where(np.arange(ROWS)[:, None] == 2, x[3] * y[1, 5], 0)),
    "addupdate": (lambda x, y, out: addupdate(out, (_row() // 4, _column()), x[...]),
                  lambda x, y: np.pad(x.reshape(4, 4, COLUMNS).sum(1), ((0, 12), (0, 0)))),
    "element": (lambda x, y, out: out.__setitem__(..., element("multiply_add", x[...], y[...], x[...])
                                                  + element("opaque", x[...]) + element("tanh", x[...])
                                                  + element("logistic", y[...]) + element("sin", x[...])
                                                  + element("cos", y[...])),
                lambda x, y: x * y + 2 * x + np.tanh(x) + 1 / (1 + np.exp2(y)) + np.sin(x) + np.cos(y)),
}  # fmt: skip


def _row() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0)


def _column() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1)


def _masked(x: Any, y: Any) -> jax.Array:
    return masked_load(x.at[_row(), _column()], _column() < 7, -3.0) + y[...]


def draw(dtype: str, seed: int) -> jax.Array:
    """Numbers between -4 and 4, or small integers."""
    rng = np.random.default_rng(seed)
    if dtype in INTS:
        return jnp.asarray(rng.integers(0 if dtype == "uint32" else -40, 100, (ROWS, COLUMNS)), dtype)
    return jnp.asarray(rng.uniform(-4, 4, (ROWS, COLUMNS)), dtype)


def launched(kernel: Callable[..., None], args: Sequence[jax.Array], out: jax.ShapeDtypeStruct) -> jax.Array:
    """Runs a kernel of one program, on an output of zeros."""
    zeros = jnp.zeros(out.shape, out.dtype)
    run = pl.pallas_call(
        lambda *refs: kernel(*refs[: len(args)], refs[-1]), out_shape=[out], grid=(1,),
        input_output_aliases={len(args): 0}, name="primitive",
    )  # fmt: skip
    names = (*(f"x{n}" for n in range(len(args))), "zeros", "out")
    return launch.launch(run, [*args, zeros], names, Tiles(16, 32, 4, 1), "NVIDIA H200")[0]


def program_of(row: Row, dtype: str) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """What launches a row, and its arguments."""
    args = [draw(dtype, seed) for seed in range(row.inputs)]
    expected = jax.eval_shape(row.function, *args)
    out = jax.ShapeDtypeStruct(expected.shape, jnp.int32 if expected.dtype == bool else expected.dtype)

    def kernel(*refs: Any) -> None:
        result = row.function(*(ref[...] for ref in refs[:-1]))
        refs[-1][...] = result.astype(refs[-1].dtype) if result.dtype == bool else result

    return lambda *xs: launched(kernel, xs, out), args


def check_row(row: Row, dtype: str) -> None:
    """Runs a row, and compares with JAX."""
    run, args = program_of(row, dtype)
    found, expected = jax.jit(run)(*args), row.function(*args)
    expected = expected.astype(jnp.int32) if expected.dtype == bool else expected
    assert found.dtype == expected.dtype
    wide = lambda x: np.asarray(x).astype(np.float64)
    # A result of 16 bits may be rounded twice; functions of float32 differ in their last digits.
    relative = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}.get(str(expected.dtype), 0)
    np.testing.assert_allclose(wide(found), wide(expected), rtol=relative, atol=4 * relative)


def check_memory(name: str) -> None:
    """Runs a kernel of `MEMORY`, and compares with numpy."""
    kernel, expected = MEMORY[name]
    x, y = draw("float32", 0), draw("float32", 1)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = jax.jit(lambda x, y: launched(kernel, [x, y], out))(x, y)
    # The functions of the SFU have relative errors of 2 ** -11.
    np.testing.assert_allclose(found, expected(np.asarray(x), np.asarray(y)), rtol=1e-3, atol=2e-3)
