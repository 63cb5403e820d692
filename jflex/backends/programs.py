"""The tile programs of a problem's mods, for the backends whose kernels evaluate them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jflex.problem import Problem
from jflex.trace import TracedMod

_OPERAND_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Tile programs (`pallas_kernels.mods.Program`), or None where there is no mod."""

    score: Any
    mask: Any

    def derivative(self, wanted: tuple[bool, ...]) -> Any:
        """The derivative of the score program, with respect to the wanted operands."""
        from pallas_kernels.mods import differentiate

        return differentiate(self.score, wanted)


@functools.lru_cache(maxsize=256)
def programs_of(problem: Problem) -> Programs | str:
    """The programs of a problem, or the reason why there are none."""
    from pallas_kernels.mods import Sizes, differentiate, trace_program
    from pallas_kernels.views import NotOnTile

    sizes = Sizes(problem.B, problem.Hq, problem.T, problem.S)
    made: list[Any] = []
    for mod in (problem.score, problem.mask):
        reason = None if mod is None else _operand_reason(mod)
        if reason is not None:
            return reason
        try:
            program = None if mod is None else trace_program(mod.jaxpr, mod.operands, sizes)
            if mod is not None and mod.kind == "score":
                differentiate(program, [True] * len(mod.operands))
        except NotOnTile as error:
            return f"{_speak_of(mod)} {error}. {_WAY_OUT}"
        made.append(program)
    return Programs(*made)


_WAY_OUT = "implementation='xla' evaluates any mod that `jax.vmap` can"


def _speak_of(mod: TracedMod) -> str:
    return f"`{mod.kind}_mod` {mod.source} cannot run in a kernel:"


def _operand_reason(mod: TracedMod) -> str | None:
    for shape, dtype in mod.operands:
        if dtype not in _OPERAND_DTYPES:
            captured = f"{_speak_of(mod)} it captures an array of {dtype}{list(shape)}"
            return f"{captured}. Cast it, or take another one: {_WAY_OUT}"
        if 0 in shape:
            return f"{_speak_of(mod)} it captures an empty array of shape {list(shape)}. {_WAY_OUT}"
    return None
