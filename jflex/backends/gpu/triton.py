"""Adapter of the Triton kernels: says what they cannot do, picks tiles, and hands them the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jflex._call import kv_lengths
from jflex._call.problem import Problem
from jflex.backends.base import Backend, Gradients, Inputs, Saved, SavedCotangents, Wanted
from jflex.backends.gpu.inputs import arrays_of, known_programs, setting_of
from jflex.backends.gpu.programs import programs_of, traced_alone
from jflex.config import Tiles
from jflex.paged.problem import PagedProblem

KERNELS = ("forward", "dkv", "dq")
MOST_DECODED = 16  # queries of a sequence that are decoded
MOST_ROWS = 64  # query heads of a key head times queries, which a tile of the decoding kernel holds
SMALLEST_TILE = 16  # of queries or keys: what a product of Triton takes
LENGTHS_BLOCK = 128  # of lists that lengths alone lead to


class Triton(Backend):
    """Fused kernels for NVIDIA GPUs from Ampere on, through Pallas and Triton."""

    name: ClassVar[str] = "triton"

    def unsupported(self, problem: Problem) -> str | None:
        """The first thing that stands in the way."""
        reason = limit_of_kernels(problem)
        if reason is not None:
            return reason
        programs = programs_of(problem)
        if isinstance(programs, str):
            return programs
        if problem.kv_lengths:  # which the mask of some kernels compares with
            programs = programs_of(_without_lengths(problem))
            if isinstance(programs, str):
                return programs
        sizes = [_tiles(_as_run(problem, kernel), kernel) for kernel in _kernels(problem)]
        smallest = min(min(tiles.block_q, tiles.block_kv) for tiles in sizes)
        if smallest < SMALLEST_TILE:
            where = "the blocks of the mask" if problem.blocks is not None else "what `config` sets"
            return (
                f"its tiles are powers of two from {SMALLEST_TILE} on, and {where} ask for {smallest} (create the "
                f"mask with a "
                f"`block_size` that is a multiple of {SMALLEST_TILE})"
            )
        return None

    def describe(self, problem: Problem, *, forward_alone: bool = False) -> str:
        """The tiles of its three kernels, and whether `config`, a measured table or a rule gave them."""
        return ", ".join(
            f"{kernel} {t.block_q} x {t.block_kv} ({t.num_warps} warps, {t.num_stages} stages, by {source})"
            for kernel in _kernels(problem)[: 1 if forward_alone else None]
            for t, source in [_tiles_and_source(_as_run(problem, kernel), kernel)]
        )

    @traced_alone
    def forward(self, problem: Problem, inputs: Inputs) -> Saved:
        """Runs the forward kernel, or that for few queries."""
        from pallas_kernels.triton import forward
        from pallas_kernels.triton.decode import kernel as decode_kernel

        if decodes(problem):
            setting, tiles = setting_of(problem, heads_in_rows=True), _kernel_tiles(problem, "decode")
            return Saved(*decode_kernel.decode(setting, tiles, arrays_of(inputs), inputs.kv_lengths))
        if problem.kv_lengths:
            problem, inputs = kv_lengths.without_lengths(problem, inputs, _block_size(problem))
        return Saved(*forward.forward(setting_of(problem), _kernel_tiles(problem, "forward"), arrays_of(inputs)))

    @traced_alone
    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> Gradients:
        """Runs the kernel for dK and dV, and the one for dQ, as far as they are wanted."""
        from pallas_kernels.triton.backward import gradients as backward

        if problem.kv_lengths:
            lengthless = kv_lengths.without_lengths(problem, inputs, _block_size(problem))
            return kv_lengths.shared_again(problem, self.backward(*lengthless, saved, d_saved, wanted))
        setting, programs = setting_of(problem), known_programs(problem)
        derivative = None if problem.score is None else programs.derivative(wanted.score_operands)
        plan = backward.Plan(wanted.query, wanted.key or wanted.value, derivative)
        tiles = backward.BackwardTiles(_kernel_tiles(problem, "dkv"), _kernel_tiles(problem, "dq"))
        found = backward.backward(
            setting, tiles, arrays_of(inputs), plan, (saved.out, saved.lse), (d_saved.out, d_saved.lse)
        )
        captured = tuple(
            g if want else None for g, want in zip(found.score_operands, wanted.score_operands, strict=True)
        )
        return Gradients(found.query, found.key, found.value, captured)


def repair_forward(setting: Any, arrays: Any, found: Any) -> Any:
    """Out and lse of another backend, in which rows are computed again that it marked (`pallas_kernels.marks`)."""
    from pallas_kernels.triton import repairs

    return repairs.forward(setting, arrays, found)


def repairs_of(setting: Any, arrays: Any, derivative: Any, saved: Any, d_saved: Any) -> Any:
    """How gradients of another backend are computed again where it marked them."""
    from pallas_kernels.triton import repairs

    return repairs.backward(setting, arrays, derivative, saved, d_saved)


def limit_of_kernels(problem: Problem | PagedProblem) -> str | None:
    """What of the device, the dtype or the head sizes stands in the way of every kernel here."""
    if problem.platform != "gpu" and not problem.config.interpret:
        return (
            f"it needs an NVIDIA GPU, and this call runs on {problem.platform} (for tests, "
            "config=jflex.Config(interpret=True) interprets the kernels)"
        )
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return f"its kernels compute in bfloat16, float16 or float32, not {problem.dtype}"
    if max(problem.D, problem.Dv) > 256:
        return f"its kernels take head sizes up to 256, not {max(problem.D, problem.Dv)}"
    return None


def decodes(problem: Problem) -> bool:
    """Whether the kernel for few queries runs: they fit into a tile, and share one row of the mask's lists."""
    blocks = problem.blocks
    one_row = blocks is None or (blocks.size[0] >= problem.T and (blocks.heads == 1 or problem.group == 1))
    few = 0 < problem.T <= MOST_DECODED and problem.group * problem.T <= MOST_ROWS
    return few and one_row and problem.config.forward is None


def _block_size(problem: Problem) -> tuple[int, int]:
    """Of lists that are made for lengths alone: large enough for all tiles, not much larger than the problem."""
    given = [t for t in (problem.config.forward, problem.config.dkv, problem.config.dq) if t is not None]
    cover = lambda length: min(LENGTHS_BLOCK, max(SMALLEST_TILE, 1 << (length - 1).bit_length()))
    return max([cover(problem.T), *(t.block_q for t in given)]), max([cover(problem.S), *(t.block_kv for t in given)])


def _without_lengths(problem: Problem) -> Problem:
    return dataclasses.replace(kv_lengths.bounded_problem(problem, _block_size(problem)), Bkv=problem.B)


def _as_run(problem: Problem, kernel: str) -> Problem:
    """The problem that a kernel is given: the one for few queries knows lengths."""
    return _without_lengths(problem) if problem.kv_lengths and kernel != "decode" else problem


def _kernels(problem: Problem) -> tuple[str, ...]:
    """Names of the kernels that run."""
    return ("decode", "dkv", "dq") if decodes(problem) else KERNELS


def _tiles(problem: Problem, kernel: str) -> Tiles:
    return _tiles_and_source(problem, kernel)[0]


def _tiles_and_source(problem: Problem, kernel: str) -> tuple[Tiles, str]:
    """The tiles, and where they come from; of one stage where the loop must not be pipelined."""
    from pallas_kernels.triton import cost

    tiles, source = _chosen_tiles(problem, kernel)
    if cost.can_pipeline(known_programs(problem, heads_in_rows=kernel == "decode").score):
        return tiles, source
    return dataclasses.replace(tiles, num_stages=1), source


def _chosen_tiles(problem: Problem, kernel: str) -> tuple[Tiles, str]:
    """The user's tiles, else measured ones, else a rule's; and which of these: ``config``, ``table`` or ``rule``.

    Those of jflex are cut to what divides the mask's blocks and is no larger than the problem.
    """
    given = getattr(problem.config, kernel)
    if given is not None and kernel == "decode":
        from pallas_kernels.tuning import triton_rules as rules

        return dataclasses.replace(given, block_q=rules.decode_rows(problem.group * problem.T)), "config"
    if given is not None:
        return given, "config"
    measured = _measured_tiles(problem, kernel) if kernel in KERNELS else None
    tiles = _tiles_by_rule(problem, kernel) if measured is None else measured
    block_q, block_kv = tiles.block_q, tiles.block_kv
    if kernel == "decode":  # rows of its tile are queries of several heads
        block_kv = min(block_kv, problem.blocks.size[1] & -problem.blocks.size[1] if problem.blocks else block_kv)
    elif problem.blocks is not None:
        block_q, block_kv = (
            min(tile, block & -block) for tile, block in zip((block_q, block_kv), problem.blocks.size, strict=True)
        )
    else:
        block_q = min(block_q, max(16, 1 << (problem.T - 1).bit_length()))
        block_kv = min(block_kv, max(16, 1 << (problem.S - 1).bit_length()))
    cut = dataclasses.replace(tiles, block_q=block_q, block_kv=block_kv)
    cut = dataclasses.replace(cut, num_stages=_stages(problem, kernel, cut))
    return cut, "rule" if measured is None else "table"


def _stages(problem: Problem, kernel: str, tiles: Tiles) -> int:
    """Stages of tiles, fewer where mods that read much by element would take more shared memory than there is."""
    from pallas_kernels import spec as setting
    from pallas_kernels.triton import cost

    programs = known_programs(problem, heads_in_rows=kernel == "decode")
    by_element = cost.bytes_by_element(kernel, (programs.score, programs.mask))
    if by_element == 0:
        return tiles.num_stages
    itemsize = jnp.dtype(problem.dtype).itemsize
    sizes = setting.Tiles(*dataclasses.astuple(tiles))
    return cost.stages_that_fit(kernel, sizes, (problem.D, problem.Dv), itemsize, by_element, problem.device_kind)


def _measured_tiles(problem: Problem, kernel: str) -> Tiles | None:
    from pallas_kernels.tuning import tables

    programs, itemsize = known_programs(problem), jnp.dtype(problem.dtype).itemsize
    length = problem.T if kernel == "dkv" else problem.S
    key = tables.key_of(kernel, max(problem.D, problem.Dv), itemsize, (programs.score, programs.mask), length)
    found = tables.look_up(problem.device_kind, key)
    return None if found is None else Tiles(*found)


def _tiles_by_rule(problem: Problem, kernel: str) -> Tiles:
    from pallas_kernels.tuning import triton_rules as rules

    programs = known_programs(problem)
    need = rules.Need(
        max(problem.D, problem.Dv),
        jnp.dtype(problem.dtype).itemsize,
        rules.is_heavy(programs.score, programs.mask),
        programs.score is not None,
        rules.has_large_memory(problem.device_kind),
    )
    if kernel == "decode":
        return Tiles(*rules.decode_tiles(need, problem.group * problem.T))
    return Tiles(*getattr(rules, f"{kernel}_tiles")(need))


def _kernel_tiles(problem: Problem, kernel: str):
    from pallas_kernels import spec as setting

    return setting.Tiles(*dataclasses.astuple(_tiles(problem, kernel)))
