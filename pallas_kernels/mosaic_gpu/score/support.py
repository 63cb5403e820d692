"""Primitives and dtypes of mods that Mosaic GPU lowers, and what a mod costs on each element: registers, and the SFU.

The SFU is the special-function unit of an SM.
"""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.mosaic_gpu.score.tile import LIBRARY
from pallas_kernels.plan import Refusal
from pallas_kernels.program.build import Derivative, Program
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.spec import AttentionSpec

# Lowered by Pallas for register arrays, or by `tile.LIBRARY`.
_KNOWN = frozenset({
    "input", "literal", "load", "call", "stop_gradient",
    "abs", "add", "and", "atan2", "bitcast_convert_type", "convert_element_type", "cos", "div", "eq", "erf", "exp",
    "exp2", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "one_minus_square", "or", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "sub", "tanh", "xor",
    *LIBRARY,
})  # fmt: skip
_DTYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16", "float16"})
_LOADED = _DTYPES | {"int8", "int16", "uint8", "uint16"}
MAX_LIGHT_VALUES = 24  # tile values of a mod: with more it needs the registers of a large tile
# Tile values while a wgmma still runs: a mod with 20 spills 948 bytes beside one, and 468 without it.
MAX_VALUES_BESIDE_GEMM = 16
MAX_DERIVATIVE_VALUES = 32  # tile values of a derivative: with more a tile of 64 x 64 does not fit beside it either
MAX_MASK_VALUES = 96  # of a mask, in the backward kernels: a fold and a draw of a key have 246, and spill 11 kB at D 64
VALUES_PER_CALL = 16  # values that a function of CUDA's device library holds
# What the SFU (MUFU instructions) computes; mods that call a library are too large for it to matter.
_SPECIAL = frozenset({"div", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sqrt", "tanh"})
_PERIODIC = frozenset({"sin", "cos", "tan"})
_CALLS = frozenset({"atan2", "cos", "sin", *LIBRARY})


def unsupported_primitive(nodes: Iterable[Node]) -> str | None:
    """The first primitive or dtype of a program without a lowering, as part of a sentence, or None."""
    for node in nodes:
        if node.op not in _KNOWN:
            return f"primitive `{node.op}` has no lowering for Mosaic GPU"
        if node.op == "rem" and node.dtype.kind not in "iu":
            return "primitive `rem` has a lowering for Mosaic GPU for integers alone"
        if str(node.dtype) not in (_LOADED if node.op == "load" else _DTYPES):
            return f"it computes in {node.dtype}, for which Mosaic GPU has no arithmetic"
    return None


def limit_of_mods(spec: AttentionSpec) -> Refusal | None:
    """The mod of a call, with its tile programs, that the kernels do not support, or None."""
    for mod, program in ((spec.score_mod, spec.programs.score), (spec.mask_mod, spec.programs.mask)):
        missing = None if program is None else unsupported_primitive(program.nodes)
        if missing is not None:
            assert mod is not None
            return Refusal(f"cannot run in its kernels: {missing}", mod.role)
    missing = None if spec.programs.dropout is None else unsupported_primitive(spec.programs.dropout.nodes)
    return None if missing is None else Refusal(f"its kernels cannot drop weights: {missing}")


def is_heavy(program: Program | None) -> bool:
    """True if a mod has so many tile values that a large tile would spill.

    Functions that reduce their argument to a period always do: a sine spills 2280 bytes with 128 keys, and none with
    64, where a gelu or a softplus spills none with either (compiled for sm_90a, head size 64).
    """
    return is_periodic(program) or (program is not None and _values(program.nodes) > MAX_LIGHT_VALUES)


def is_periodic(program: Program | None) -> bool:
    """True if a mod calls, on each element, a function that reduces its argument to a period."""
    return program is not None and any(x.kind == Axes.TILE and x.op in _PERIODIC for x in program.nodes)


def fits_beside_gemm(program: Program | None) -> bool:
    """True if a mod can be evaluated while a wgmma in flight holds registers."""
    return program is None or _values(program.nodes) <= MAX_VALUES_BESIDE_GEMM


def has_spare_registers(program: Program | None) -> bool:
    """True if a mod leaves registers for more than one code path of a mask: it is light and loads no tile values."""
    return fits_beside_gemm(program) and (program is None or all(load.kind != Axes.TILE for load in program.loads))


def uses_sfu(program: Program | None) -> bool:
    """True if a mod that is not too large uses the SFU on each element, as softmax does.

    A larger one spills 2608 bytes where nothing keeps the assembler from starting on it early, 468 otherwise.
    """
    return (
        program is not None
        and fits_beside_gemm(program)
        and any(node.kind == Axes.TILE and node.op in _SPECIAL for node in program.nodes)
    )


def exceeds_registers(derivative: Derivative) -> bool:
    """True if a derivative has so many tile values that it spills in every tile of the backward kernels.

    Compiled for sm_90a, one of three functions of the score, a sine among them, spills 3228 bytes.
    """
    return _values(derivative.nodes) > MAX_DERIVATIVE_VALUES


def mask_exceeds_registers(program: Program | None) -> bool:
    """True if a mask has so many tile values that it spills in every tile of the backward kernels."""
    return program is not None and _values(program.nodes) > MAX_MASK_VALUES


def _values(nodes: Iterable[Node]) -> int:
    return sum(VALUES_PER_CALL if node.op in _CALLS else 1 for node in nodes if node.kind == Axes.TILE)
