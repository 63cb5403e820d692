"""The table of elementwise primitives: each as an expression of Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule
from pallas_kernels.triton.compiler.emit.text import DTYPES, Value, is_float, number_of
from pallas_kernels.triton.compiler.rules.primitives import FUNCTIONS, constraints, pack
from pallas_kernels.types import aval_of


def _texts(emitter: Emitter, ins: Sequence[Value]) -> list[str]:
    """Operands of one dtype. A number stays one only beside a value for which Triton gives it the right dtype."""
    weak = any(not x.is_number and x.dtype.name in ("int32", "float32") for x in ins)
    return [x.text if weak else emitter.tensor(x) for x in ins]


def _rounded(emitter: Emitter, expression: str, dtype: np.dtype) -> str:
    """16-bit results, which Triton may hold in float32, rounded to their dtype."""
    return emitter.dialect.cast(f"({expression})", dtype) if is_float(dtype) and dtype.itemsize == 2 else expression


def _rule(write: Callable[..., str]) -> Rule:
    """A rule from ``write(emitter, dtype of the operands, *their texts)``."""

    def rule(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        text = write(emitter, ins[0].dtype, *_texts(emitter, ins))
        return emitter.out(eqn, _rounded(emitter, text, np.dtype(aval_of(eqn.outvars[0]).dtype)))

    return rule


def _infix(operator: str) -> Rule:
    return _rule(lambda emitter, dtype, x, y: f"{x} {operator} {y}")


def _comparison(operator: str) -> Rule:
    """Compares booleans as integers: with one bit they would have a sign."""

    def write(emitter: Emitter, dtype: np.dtype, *args: str) -> str:
        x, y = (f"{text}.to(tl.int32)" for text in args) if dtype == np.bool_ else args
        return f"{x} {operator} {y}"

    return _rule(write)


def _extreme(name: str, of_booleans: str) -> Rule:
    """The larger or the smaller one; NaN where there is one."""

    def write(emitter: Emitter, dtype: np.dtype, x: str, y: str) -> str:
        if dtype == np.bool_:
            return f"{x} {of_booleans} {y}"
        return f"tl.{name}({x}, {y}{', propagate_nan=tl.PropagateNan.ALL' if is_float(dtype) else ''})"

    return _rule(write)


def _clamp(emitter: Emitter, dtype: np.dtype, low: str, x: str, high: str) -> str:
    nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(dtype) else ""
    return f"tl.minimum(tl.maximum({x}, {low}{nan}), {high}{nan})"


def _math(name: str) -> Rule:
    """A function of libdevice."""
    return _of_float32(lambda emitter, *args: emitter.dialect.math(name, *args))


def _of_float32(write: Callable[..., str]) -> Rule:
    """A function ``write(emitter, *texts)`` that takes float32, as Triton has none of 16 bits: others are cast."""

    def rule(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        cast = lambda x: "" if x.dtype in (np.float32, np.float64) else ".to(tl.float32)"
        wide = [emitter.tensor(x) + cast(x) for x in ins]
        return emitter.out(eqn, _rounded(emitter, write(emitter, *wide), np.dtype(aval_of(eqn.outvars[0]).dtype)))

    return rule


def _div(emitter: Emitter, dtype: np.dtype, x: str, y: str) -> str:
    return f"{x} / {y}" if is_float(dtype) else f"{x} // {y}"  # `//` truncates integers, as `lax.div`


def _sign(emitter: Emitter, dtype: np.dtype, x: str) -> str:
    if is_float(dtype):  # NaN and zeros stay as they are
        return f"tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))"
    return f"({x} > 0).to({DTYPES[dtype.name]}) - ({x} < 0).to({DTYPES[dtype.name]})"


def _not(emitter: Emitter, dtype: np.dtype, x: str) -> str:
    # `~` is the exclusive or with -1, which the interpreter refuses of an integer without a sign.
    all_bits = f"tl.full((), {(1 << 8 * dtype.itemsize) - 1}, {DTYPES[dtype.name]})"
    return f"{x} ^ {all_bits}" if dtype.kind == "u" else f"~{x}"


def _select(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    which, *cases = ins
    index, texts = emitter.tensor(which), _texts(emitter, cases)
    if which.dtype == np.bool_:
        expression = f"tl.where({index}, {texts[1]}, {texts[0]})"
    else:
        expression = texts[-1]
        for n in reversed(range(len(cases) - 1)):
            expression = f"tl.where({index} == {n}, {texts[n]}, {expression})"
    return emitter.out(eqn, _rounded(emitter, expression, np.dtype(aval_of(eqn.outvars[0]).dtype)), "select")


def _cast(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    new, text = np.dtype(eqn.params["new_dtype"]), emitter.tensor(ins[0])
    if new == ins[0].dtype:
        return ins
    if ins[0].number is not None:
        return [number_of(ins[0].number.astype(new), new)]
    return emitter.out(eqn, f"{text} != 0" if new == np.bool_ else emitter.dialect.cast(text, new), "cast")


def _integer_pow(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """By repeated squaring."""
    aval, power = aval_of(eqn.outvars[0]), eqn.params["y"]
    dtype, base, result = np.dtype(aval.dtype), emitter.tensor(ins[0]), ""
    remaining = abs(power)
    while remaining:
        if remaining & 1:
            result = f"{result} * {base}" if result else base
        remaining >>= 1
        if remaining:
            base = emitter.let("square", _rounded(emitter, f"{base} * {base}", dtype), aval.shape, dtype).text
    result = result or f"tl.full({aval.shape}, 1, {DTYPES[dtype.name]})"
    return emitter.out(eqn, _rounded(emitter, result if power >= 0 else f"1.0 / ({result})", dtype))


def _bitcast(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    new = np.dtype(eqn.params["new_dtype"])
    return emitter.out(eqn, f"{emitter.tensor(ins[0])}.to({DTYPES[new.name]}, bitcast=True)", "bits")


def _shift(write: Callable[[str, str, np.dtype], str]) -> Rule:
    """A shift by fewer bits than there are, and what JAX defines of one by more, which LLVM leaves open.

    `write` gets the operand, the number of bits, an expression, and the dtype.
    """

    def rule(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        (x, by), bits = ins, 8 * ins[0].dtype.itemsize
        if by.is_number and int(by.text.strip("()")) in range(bits):
            text = write(emitter.tensor(x), by.text, x.dtype)
            return emitter.out(eqn, text, "shift")
        amount, unsigned = emitter.tensor(by), DTYPES[f"uint{bits}"]
        few = emitter.let("few", f"{amount}.to({unsigned}, bitcast=True) < {bits}", by.shape, np.dtype("bool")).text
        clipped = f"tl.where({few}, {amount}, {bits - 1})"
        text = write(emitter.tensor(x), clipped, x.dtype)
        arithmetic = eqn.primitive.name == "shift_right_arithmetic"
        return emitter.out(eqn, text if arithmetic else f"tl.where({few}, {text}, 0)", "shift")

    return rule


def _as(text: str, dtype: np.dtype, kind: str) -> str:
    """An integer as the one of the same bits that has a sign (``"int"``) or has none (``"uint"``)."""
    name = f"{kind}{8 * dtype.itemsize}"
    return text if dtype.name == name else f"{text}.to({DTYPES[name]}, bitcast=True)"


def _shift_right(kind: str) -> Callable[[str, str, np.dtype], str]:
    """``>>`` of the kind of integer that has it."""

    def write(x: str, by: str, dtype: np.dtype) -> str:
        name = f"{kind}{8 * dtype.itemsize}"
        by = by if by.isdigit() else f"{by}.to({DTYPES[name]})"
        shifted = f"({_as(x, dtype, kind)} >> {by})"
        return shifted if dtype.name == name else f"{shifted}.to({DTYPES[dtype.name]}, bitcast=True)"

    return write


def _population_count(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Adds pairs of bits, then pairs of sums; libdevice has it for NVIDIA alone."""
    dtype, shape = ins[0].dtype, aval_of(eqn.outvars[0]).shape
    let = lambda text: emitter.let("bits", text, shape, np.dtype("uint32")).text
    x = let(f"{_as(emitter.tensor(ins[0]), dtype, 'uint')}.to(tl.uint32)")
    x = let(f"{x} - (({x} >> 1) & 0x55555555)")
    x = let(f"({x} & 0x33333333) + (({x} >> 2) & 0x33333333)")
    x = let(f"(({x} + ({x} >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24")
    return emitter.out(eqn, f"{x}.to({DTYPES[dtype.name]})")


def _round(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return _math("rint" if even else "round")(emitter, eqn, ins)


def _element(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """One of our own functions."""
    name = eqn.params["name"]
    ptx, portable, dtype = FUNCTIONS[name]
    args = [emitter.tensor(x) for x in ins]
    if not emitter.dialect.ptx or name == "multiply_add":
        return emitter.out(eqn, portable.format(*args), name)
    kind = f"{DTYPES[dtype]}, is_pure=True, pack={pack(dtype)}"
    code = f'"{ptx}", "{constraints(dtype, len(args))}"'
    return emitter.out(eqn, f"tl.inline_asm_elementwise({code}, [{', '.join(args)}], {kind})", name)


_LIBDEVICE = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "expm1",
    "log", "log1p", "log2", "nextafter", "pow", "sin", "sinh", "tan", "tanh",
)  # fmt: skip
_SAME: Rule = lambda emitter, eqn, ins: ins[:1]
_LOGISTIC = lambda emitter, x: f"1.0 / (1.0 + {emitter.dialect.math('exp', f'-{x}')})"

RULES: dict[str, Rule] = {
    **{name: _math(name) for name in _LIBDEVICE},
    "erf_inv": _math("erfinv"),
    "abs": _rule(lambda emitter, dtype, x: f"tl.abs({x})"),
    "add": _infix("+"),
    "add_any": _infix("+"),
    "and": _infix("&"),
    "bitcast_convert_type": _bitcast,
    "ceil": _of_float32(lambda emitter, x: f"tl.ceil({x})"),
    "clamp": _rule(_clamp),
    "convert_element_type": _cast,
    "copy": _SAME,
    "copy_p": _SAME,
    "div": _rule(_div),
    "eq": _comparison("=="),
    "exp2": _of_float32(lambda emitter, x: f"tl.exp2({x})"),
    "floor": _of_float32(lambda emitter, x: f"tl.floor({x})"),
    "ge": _comparison(">="),
    "gt": _comparison(">"),
    "integer_pow": _integer_pow,
    "is_finite": _rule(lambda emitter, dtype, x: f'tl.abs({x}) < float("inf")'),
    "jflex_element": _element,
    "le": _comparison("<="),
    "logistic": _of_float32(_LOGISTIC),
    "lt": _comparison("<"),
    "max": _extreme("maximum", "|"),
    "min": _extreme("minimum", "&"),
    "mul": _infix("*"),
    "ne": _comparison("!="),
    "neg": _rule(lambda emitter, dtype, x: f"-{x}"),
    "not": _rule(_not),
    "one_minus_square": _rule(lambda emitter, dtype, x: f"1.0 - {x} * {x}"),
    "or": _infix("|"),
    "population_count": _population_count,
    "rem": _infix("%"),  # truncates, as `lax.rem`
    "round": _round,
    "rsqrt": _of_float32(lambda emitter, x: f"tl.rsqrt({x})"),
    "select_n": _select,
    "shift_left": _shift(lambda x, by, dtype: f"({x} << {by})"),
    "shift_right_arithmetic": _shift(_shift_right("int")),
    "shift_right_logical": _shift(_shift_right("uint")),
    "sign": _rule(_sign),
    "sqrt": _of_float32(lambda emitter, x: f"tl.sqrt_rn({x})"),
    "square": _rule(lambda emitter, dtype, x: f"{x} * {x}"),
    "stop_gradient": _SAME,
    "sub": _infix("-"),
    "xor": _infix("^"),
}
