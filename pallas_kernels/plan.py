"""Parts of a plan of kernels: the request, tiles with their source, or a refusal.

``plan(spec, requested) -> Plan | Refusal`` stands beside each set of kernels (`pallas_kernels.triton.plan.plan`,
`pallas_kernels.mosaic_gpu.plan.plan`). It is pure and cached. Dispatch, errors, `jflex.explain` and execution
read the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.program.build import Derivative, IndexRanges, Program, differentiate, trace_program
from pallas_kernels.program.ir import Node
from pallas_kernels.program.rules.views import NotOnTile
from pallas_kernels.program.tangents import Tangent, push_forward
from pallas_kernels.program.vectors.vectors import Chunks, VectorProgram, VectorSizes, chunkings, trace_vector_program
from pallas_kernels.spec import AttentionSpec, Programs, VectorPrograms
from pallas_kernels.types import Mod, Role

Kernel = Literal["forward", "decode", "dkv", "dq", "tangent"]
_OPERAND_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"}
)


class GradientRequest(NamedTuple):
    """Requested gradients: no others are computed. A request of None means forward only."""

    query: bool
    key: bool
    value: bool
    score_operands: tuple[bool, ...]
    sinks: bool = False

    @property
    def moves_scores(self) -> bool:
        """True if scores depend on a requested input."""
        return self.query or self.key or any(self.score_operands)


def all_gradients(spec: AttentionSpec) -> GradientRequest:
    """The request of every gradient there is."""
    captured = () if spec.score_mod is None else spec.score_mod.operands
    captured = tuple(jnp.issubdtype(dtype, jnp.floating) for _, dtype in captured)
    return GradientRequest(True, True, True, captured, spec.sinks)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a call cannot run."""

    reason: str  # one sentence without a full stop
    # the mod that stands in the way, which then begins the sentence. It is named by `sentence` and not here: equal
    # specs share a plan, and their mods may come from different functions.
    mod: Role | None = None

    def sentence(self, spec: AttentionSpec) -> str:
        """The reason, with the user's function."""
        if self.mod is None:
            return self.reason
        mods = {"score": spec.score_mod, "mask": spec.mask_mod, "key": spec.key_mod, "value": spec.value_mod}
        mod = mods[self.mod]
        assert mod is not None  # it was refused
        return f"`{self.mod}_mod` {mod.source} {self.reason}"


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """The tiles of one kernel."""

    tiles: Tiles
    source: Literal["config", "table", "rule"]  # of the choice: the user's `Config`, a measured table or a rule

    def describe(self) -> str:
        """Sizes, and the source of the choice."""
        block_q, block_kv, warps, stages = dataclasses.astuple(self.tiles)
        return f"{block_q} x {block_kv} ({warps} warps, {stages} stages, by {self.source})"


@dataclasses.dataclass(frozen=True)
class TangentPlan:
    """The tangent of a dense call."""

    spec: AttentionSpec  # the call, with its tile programs
    requested: GradientRequest  # the inputs that have tangents
    tangent: Tangent | None  # of the score mod; None without one, or where no score moves
    choice: TileChoice

    def describe(self) -> str:
        """Tiles and their source, for `jflex.explain`."""
        return self.choice.describe()


def exceeds_pallas_indexing(elements: int) -> bool:
    """True if Pallas' Triton does not reach the last elements of an array of 8 bits.

    It counts elements in 32 bits, with a sign, up to 2 ** 32 bytes, and in 64 bits from there on.
    """
    return 1 << 31 < elements <= 1 << 32


def limit_of_pallas() -> str | None:
    """Why Pallas cannot compile for Triton here, or None."""
    missing = missing_from_pallas()
    return None if missing is None else f"{missing}; implementation='official_triton' runs the same kernels"


@functools.cache
def missing_from_pallas() -> str | None:
    """The part of Pallas for Triton that is missing, or None."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return f"JAX {jax.__version__} has no `jax.experimental.pallas.triton`"
    return None


def with_programs(spec: AttentionSpec) -> AttentionSpec | Refusal:
    """The spec with the tile programs of its mods."""
    sizes = IndexRanges(spec.B, spec.Hq, spec.T, spec.S, spec.heads_in_rows)
    programs: list[Program | None] = []
    for mod in (spec.score_mod, spec.mask_mod, None if spec.dropout is None else spec.dropout.mod):
        program = None if mod is None else program_of(mod, sizes)
        if isinstance(program, Refusal):
            return program
        programs.append(program)
    return spec.replace(programs=Programs(*programs))


def with_vector_programs(spec: AttentionSpec, key_chunks: Chunks, value_chunks: Chunks) -> AttentionSpec | Refusal:
    """The spec of a paged call with the tile programs of its key and value mods.

    The chunks are tiles that hold keys and values without a mod; with one, others may be chosen.
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


def tangent_of(spec: AttentionSpec, requested: GradientRequest) -> Tangent | Refusal | None:
    """The tangent of the score mod along the requested inputs; None without a score mod, or where no score moves."""
    if spec.programs.score is None or not requested.moves_scores:
        return None
    return _tangent_of(spec.programs.score, requested.score_operands, moves_score=requested.query or requested.key)


@functools.lru_cache(maxsize=256)
def program_of(mod: Mod, sizes: IndexRanges) -> Program | Refusal:
    """The tile program of a score or mask mod, or why it has none."""
    try:
        _check_operands(mod)
        program = trace_program(mod.jaxpr, mod.operands, sizes)
    except NotOnTile as error:
        return _refusal(mod.role, str(error))
    return _refusal_of_wide(mod.role, program.nodes) or program


@functools.lru_cache(maxsize=256)
def _vector_program_of(mod: Mod, sizes: VectorSizes, ways: tuple[Chunks, ...]) -> VectorProgram | Refusal:
    """The program on the tiles that cost least."""
    try:
        _check_operands(mod)
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


@functools.lru_cache(maxsize=256)
def _tangent_of(program: Program, captured: tuple[bool, ...], *, moves_score: bool) -> Tangent | Refusal:
    try:
        return push_forward(program, captured, moves_score=moves_score)
    except NotOnTile as error:
        return _refusal("score", f"{error} (in its tangent)")


def _refusal(role: Role, reason: str) -> Refusal:
    advice = "implementation='xla' evaluates any mod that `jax.vmap` can"
    return Refusal(f"cannot run in a kernel: {reason}. {advice}", role)


def _check_operands(mod: Mod) -> None:
    for shape, dtype in mod.operands:
        captured = f"it captures an array of {dtype}{list(shape)}"
        if dtype not in _OPERAND_DTYPES:
            raise NotOnTile(f"{captured}, where kernels take up to 32 bits (cast it)")
        if 0 in shape:
            raise NotOnTile(f"it captures an empty array of shape {list(shape)}")
        if dtype in ("bool", "int8", "uint8") and exceeds_pallas_indexing(math.prod(shape)):
            raise NotOnTile(
                f"{captured}: with more than 2 ** 31 elements in at most 2 ** 32 bytes, Pallas does not reach the last "
                "ones"
            )
