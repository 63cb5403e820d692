"""How much a mod computes on each element of a tile."""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.mosaic_gpu.tile import LIBRARY
from pallas_kernels.program.build import Derivative, Program
from pallas_kernels.program.ir import Node

MUCH = 24  # values of a mod at the size of a tile, from which on it takes the registers of a large tile
BESIDE_PRODUCT = 16  # the same beside a product that still runs; one of 20 spills 948 bytes there, without it 468
TOO_MUCH = 32  # the same of its derivative, beside which a tile of 64 by 64 does not fit either
CALL = 16  # values that a function of CUDA's device library holds
# What the unit for exponentials computes; mods that call a library are too large for it to matter.
_SPECIAL = frozenset({"div", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sqrt", "tanh"})
_PERIODIC = frozenset({"sin", "cos", "tan"})
_CALLS = frozenset({"atan2", "cos", "sin", *LIBRARY})


def much_arithmetic(program: Program | None) -> bool:
    """Whether a mod computes so much on each element that it takes the registers of a large tile.

    Functions that reduce their argument to a period always do: a sine stores 2280 bytes away with 128 keys, and none
    with 64, where a gelu or a softplus store none with either (compiled for sm_90a, head size 64).
    """
    return is_periodic(program) or (program is not None and _values(program.nodes) > MUCH)


def is_periodic(program: Program | None) -> bool:
    """Whether a mod calls a function of each element that reduces its argument to a period."""
    return program is not None and any(x.kind == "qk" and x.op in _PERIODIC for x in program.nodes)


def fits_beside_product(program: Program | None) -> bool:
    """Whether a mod can be computed while a product holds registers."""
    return program is None or _values(program.nodes) <= BESIDE_PRODUCT


def leaves_registers(program: Program | None) -> bool:
    """Whether a mod leaves registers for more than one form of a mask: it computes little and loads no elements."""
    return fits_beside_product(program) and (program is None or all(load.kind != "qk" for load in program.loads))


def takes_special_functions(program: Program | None) -> bool:
    """Whether a mod, not too large a one, computes exponentials and their like on each element, as softmax does.

    A larger one stores 2608 bytes away where nothing keeps the assembler from starting on it early, 468 otherwise.
    """
    return (
        program is not None
        and fits_beside_product(program)
        and any(node.kind == "qk" and node.op in _SPECIAL for node in program.nodes)
    )


def too_much_arithmetic(derivative: Derivative) -> bool:
    """Whether a derivative computes so much that no tile of the backward kernels holds it.

    Compiled for sm_90a, one of three functions of the score, a sine among them, spills 3228 bytes.
    """
    return _values(derivative.nodes) > TOO_MUCH


def _values(nodes: Iterable[Node]) -> int:
    return sum(CALL if node.op in _CALLS else 1 for node in nodes if node.kind == "qk")
