"""Which primitives and dtypes of a mod the Mosaic GPU kernels support."""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.mosaic_gpu.score.tile import LIBRARY
from pallas_kernels.plan import Refusal
from pallas_kernels.program.ir import Node
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
    """Which mod of a call, with its tile programs, the kernels do not support."""
    for mod, program in ((spec.score_mod, spec.programs.score), (spec.mask_mod, spec.programs.mask)):
        missing = None if program is None else unsupported_primitive(program.nodes)
        if missing is not None:
            assert mod is not None
            return Refusal(f"cannot run in its kernels: {missing}", mod.role)
    missing = None if spec.programs.dropout is None else unsupported_primitive(spec.programs.dropout.nodes)
    return None if missing is None else Refusal(f"its kernels cannot drop weights: {missing}")
