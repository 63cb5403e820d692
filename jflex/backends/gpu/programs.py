"""The tile programs of a problem's mods, for the backends whose kernels evaluate them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from jflex._call.problem import Problem
from jflex._jax.primitive import no_mesh
from jflex.mods.trace import TracedMod
from jflex.paged.problem import PagedProblem

_OPERAND_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"}
)


_F = TypeVar("_F", bound=Callable[..., Any])


def traced_alone(function: _F) -> _F:
    """Traces kernels and programs by themselves.

    That is without ``jax_enable_x64``, under which the Python numbers in them would have 64 bits, and outside of the
    mesh of an enclosing `jax.shard_map`, in which derivatives hold steps that say how an array lies on the mesh.
    """

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        with jax.enable_x64(False), no_mesh():
            return function(*args)

    return cast(_F, traced)


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Tile programs (`pallas_kernels.program.build.Program`), or None where there is no mod."""

    score: Any
    mask: Any

    @traced_alone
    def derivative(self, wanted: tuple[bool, ...]) -> Any:
        """The derivative of the score program, with respect to the wanted operands."""
        from pallas_kernels.program.build import differentiate

        return differentiate(self.score, wanted)


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why a mod has no program; without the name of the mod, which another one of the same program does not share."""

    kind: str
    reason: str


def programs_of(problem: Problem | PagedProblem, *, heads_in_rows: bool = False) -> Programs | str:
    """The programs of a problem, or the reason why there are none.

    `heads_in_rows`: for tiles whose rows are of several query heads.
    """
    made = _programs_of(problem, heads_in_rows)
    if isinstance(made, Programs):
        return made
    mod = problem.score if made.kind == "score" else problem.mask
    assert mod is not None
    return (
        f"`{mod.kind}_mod` {mod.source} cannot run in a kernel: {made.reason}. implementation='xla' evaluates any mod "
        "that `jax.vmap` can"
    )


@functools.lru_cache(maxsize=256)
@traced_alone
def _programs_of(problem: Problem | PagedProblem, heads_in_rows: bool) -> Programs | _Refusal:
    from pallas_kernels.program.build import Sizes, differentiate, trace_program
    from pallas_kernels.program.views import NotOnTile

    sizes = Sizes(problem.B, problem.Hq, problem.T, problem.S, heads_in_rows)
    made: list[Any] = []
    for mod in (problem.score, problem.mask):
        if mod is None:
            made.append(None)
            continue
        reason = _operand_reason(mod)
        if reason is not None:
            return _Refusal(mod.kind, reason)
        try:
            program = trace_program(mod.jaxpr, mod.operands, sizes)
            wide = next((node.dtype for node in program.nodes if node.dtype.itemsize > 4), None)
            if wide is not None:
                return _Refusal(mod.kind, f"it computes in {wide}, where kernels take up to 32 bits (cast it)")
            if mod.kind == "score" and isinstance(problem, Problem):  # paged attention has no derivative
                differentiate(program, [True] * len(mod.operands))
        except NotOnTile as error:
            return _Refusal(mod.kind, str(error))
        made.append(program)
    return Programs(*made)


def _operand_reason(mod: TracedMod) -> str | None:
    for shape, dtype in mod.operands:
        if dtype not in _OPERAND_DTYPES:
            return f"it captures an array of {dtype}{list(shape)}, where kernels take up to 32 bits (cast it)"
        if 0 in shape:
            return f"it captures an empty array of shape {list(shape)}"
        # Pallas counts elements in 32 bits, with a sign, up to 2 ** 32 bytes, and in 64 from there on.
        if dtype in ("bool", "int8", "uint8") and 1 << 31 < math.prod(shape) <= 1 << 32:
            return (
                f"it captures an array of {dtype}{list(shape)}, more than 2 ** 31 elements in at most 2 ** 32 bytes, "
                "of which Pallas does not reach the last ones"
            )
    return None
