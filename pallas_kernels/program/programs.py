"""The tile programs of the mods of a call, or why a mod is not supported."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from pallas_kernels.plan import Refusal, unreached_by_pallas
from pallas_kernels.program.build import Derivative, Program, Sizes, differentiate, trace_program
from pallas_kernels.program.ir import Node
from pallas_kernels.program.rules.views import NotOnTile
from pallas_kernels.program.vectors.vectors import Chunks, VectorProgram, VectorSizes, chunkings, trace_vector_program
from pallas_kernels.spec import AttentionSpec, Mod, Programs, Role, VectorPrograms

_OPERAND_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"}
)


def with_programs(spec: AttentionSpec) -> AttentionSpec | Refusal:
    """The spec with the tile programs of its mods."""
    sizes = Sizes(spec.B, spec.Hq, spec.T, spec.S, spec.heads_in_rows)
    programs: list[Program | None] = []
    for mod in (spec.score_mod, spec.mask_mod, None if spec.dropout is None else spec.dropout.mod):
        program = None if mod is None else program_of(mod, sizes)
        if isinstance(program, Refusal):
            return program
        programs.append(program)
    return spec.replace(programs=Programs(*programs))


def with_vector_programs(spec: AttentionSpec, key_chunks: Chunks, value_chunks: Chunks) -> AttentionSpec | Refusal:
    """The spec with the tile programs of its key and value mods.

    Args:
      spec: Of a paged call.
      key_chunks: Tiles that hold keys without a mod; with one, others may be chosen.
      value_chunks: The same of values.
    """
    programs: list[VectorProgram | None] = []
    for mod, size, plain in ((spec.key_mod, spec.D, key_chunks), (spec.value_mod, spec.Dv, value_chunks)):
        sizes = VectorSizes(spec.B, spec.Hkv, spec.S, size, spec.dtype)
        program = None if mod is None else _vector_program_of(mod, sizes, chunkings(size, plain))
        if isinstance(program, Refusal):
            return program
        programs.append(program)
    return spec.replace(vector_programs=VectorPrograms(*programs))


def derivative_of(spec: AttentionSpec, requested: Sequence[bool]) -> Derivative | Refusal | None:
    """The derivative of the score mod with respect to the score and the requested captured arrays; None without one."""
    if spec.programs.score is None:
        return None
    return _derivative_of(spec.programs.score, tuple(requested))


@functools.lru_cache(maxsize=256)
def program_of(mod: Mod, sizes: Sizes) -> Program | Refusal:
    """The tile program of a score or mask mod, or why it has none."""
    reason = _operand_reason(mod)
    if reason is not None:
        return _refusal(mod.role, reason)
    try:
        program = trace_program(mod.jaxpr, mod.operands, sizes)
    except NotOnTile as error:
        return _refusal(mod.role, str(error))
    return _refusal_of_wide(mod.role, program.nodes) or program


@functools.lru_cache(maxsize=256)
def _vector_program_of(mod: Mod, sizes: VectorSizes, ways: tuple[Chunks, ...]) -> VectorProgram | Refusal:
    """The program on the tiles that cost least."""
    reason = _operand_reason(mod)
    if reason is not None:
        return _refusal(mod.role, reason)
    try:
        programs = [trace_vector_program(mod.jaxpr, mod.operands, sizes, chunks) for chunks in ways]
    except NotOnTile as error:
        return _refusal(mod.role, str(error))
    program = min(programs, key=lambda program: program.cost)
    return _refusal_of_wide(mod.role, program.lane_programs[0].nodes) or program


def _refusal_of_wide(role: Role, nodes: Sequence[Node]) -> Refusal | None:
    wide = next((node.dtype for node in nodes if node.dtype.itemsize > 4), None)
    reason = f"it computes in {wide}, where kernels take up to 32 bits (cast it)"
    return None if wide is None else _refusal(role, reason)


@functools.lru_cache(maxsize=256)
def _derivative_of(program: Program, requested: tuple[bool, ...]) -> Derivative | Refusal:
    try:
        return differentiate(program, requested)
    except NotOnTile as error:
        return _refusal("score", f"{error} (in its derivative: without gradients, it runs)")


def _refusal(role: Role, reason: str) -> Refusal:
    rest = "implementation='xla' evaluates any mod that `jax.vmap` can"
    return Refusal(f"cannot run in a kernel: {reason}. {rest}", role)


def _operand_reason(mod: Mod) -> str | None:
    for shape, dtype in mod.operands:
        if dtype not in _OPERAND_DTYPES:
            return f"it captures an array of {dtype}{list(shape)}, where kernels take up to 32 bits (cast it)"
        if 0 in shape:
            return f"it captures an empty array of shape {list(shape)}"
        if dtype in ("bool", "int8", "uint8") and unreached_by_pallas(math.prod(shape)):
            return (
                f"it captures an array of {dtype}{list(shape)}: with more than 2 ** 31 elements in at most 2 ** 32 "
                "bytes, Pallas does not reach the last ones"
            )
    return None
