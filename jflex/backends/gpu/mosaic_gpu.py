"""Adapter of the Hopper kernels: says what they cannot do, picks tiles, and hands them the arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jflex._call import kv_lengths
from jflex._call.problem import Problem
from jflex.backends.base import Backend, Gradients, Inputs, Saved, SavedCotangents, Wanted
from jflex.backends.gpu import triton
from jflex.backends.gpu.inputs import arrays_of, known_programs, setting_of
from jflex.backends.gpu.programs import programs_of, traced_alone
from jflex.config import Tiles

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # parts of the names of devices with compute capability 9.0
ROWS = 64  # of a product of a warp group: what the blocks of a mask must be a multiple of
WARPS_OF_GROUP = 4
SHORTEST = 256  # queries and keys from which on it may be preferred
NARROW = 64  # head size up to which few tiles, and gradients of short sequences, are faster in 'triton'
VERY_NARROW = 32  # head size up to which that goes for longer ones
LENGTHS_BLOCK = 128  # of lists that lengths alone lead to
_READ_BY_BOTH = "that are read by query and key at once"
MOST_ELEMENTS = 1 << 31  # of a captured array: it is indexed by 32 bits


class MosaicGpu(Backend):
    """Fused kernels for Hopper, through Pallas and Mosaic GPU: TMA, wgmma, warp specialisation."""

    name: ClassVar[str] = "mosaic_gpu"

    def unsupported(self, problem: Problem) -> str | None:
        """The first thing that stands in the way."""
        reason = _limit_of_machine(problem) or _limit_of_arrays(problem)
        if reason is not None:
            return reason
        programs = programs_of(problem)
        if isinstance(programs, str):
            return programs
        return _limit_of_mods(problem) or _limit_of_tiles(_as_run(problem)) or _limit_of_gradients(problem)

    def slower(self, problem: Problem) -> str | None:
        """What leaves most of a block of threads, or of the GPU, without work, or computes little by products.

        H200, jax 0.11.2, bf16, 16 heads, TFLOP/s beside those of `triton`: causal, 64 texts of 256 tokens, 220 and 202
        at head size 64, 328 and 235 at 128, and one such text at 128, 49 and 33. No mask, head size 32, 222 and 232 at
        384 tokens, 267 and 271 at 768; with a pair bias 188 and 171, 222 and 199. A sine of each score, causal, 4 x
        4096 tokens, head size 64: 6031 us and 2475.
        """
        from pallas_kernels.mosaic_gpu.cost import is_periodic
        from pallas_kernels.mosaic_gpu.tile_order import MULTIPROCESSORS

        if triton.decodes(problem):
            return "for so few queries only 'triton' has kernels of their own"
        length, tiles = min(problem.T, problem.S), problem.B * problem.Hq * math.ceil(problem.T / 128)
        widest = max(problem.D, problem.Dv)
        if length < SHORTEST:
            return f"below {SHORTEST} queries or keys only the kernels of 'triton' were tuned"
        if length < 4 * SHORTEST and widest <= VERY_NARROW and problem.score is None:
            return f"below {4 * SHORTEST} queries or keys, at head sizes up to {VERY_NARROW}, 'triton' is faster"
        if length < 2 * SHORTEST and tiles < MULTIPROCESSORS and widest <= NARROW:
            return f"{tiles} tiles of 128 queries leave some of the {MULTIPROCESSORS} multiprocessors without work"
        if _tiles(_as_run(problem)).num_warps == WARPS_OF_GROUP:
            return (
                "blocks of 64 queries keep one of its two computing warp groups idle (a `block_size` of 128 does not)"
            )
        if is_periodic(known_programs(problem).score):
            return "a sine or its like of each score takes longer beside products (H200, head size 64: 2.4 times)"
        return None

    def faster_gradients(self, problem: Problem) -> tuple[str, str] | None:
        """`triton`, where few products of narrow heads do not outweigh what else takes time.

        H200, jax 0.11.2, bf16, TFLOP/s beside those of `triton`, causal: head size 64, 157 and 176 for 256 tokens, 207
        and 219 for 512, 281 and 265 for 1024; head size 128, 211 and 183 for 256. Head size 32, no mask, us: 689 and
        654 for 1024 tokens, 1178 and 1221 for 2048.
        """
        config, length, widest = problem.config, min(problem.T, problem.S), max(problem.D, problem.Dv)
        if config.dkv is not None or config.dq is not None or config.deterministic or widest > NARROW:
            return None
        least, size = (2048, VERY_NARROW) if widest <= VERY_NARROW else (1024, NARROW)
        if length >= least:
            return None
        return "triton", f"below {least} queries or keys, at head sizes up to {size}, it is faster"

    def describe(self, problem: Problem, *, forward_alone: bool = False) -> str:
        """The tiles of its kernels, and which backend computes gradients where its own kernels cannot."""
        forward = _told("forward", _tiles(problem))
        if _declared(problem, _tiles(problem)).brings:
            forward += " with elements of captured arrays by the copy engine"
        if forward_alone:
            return forward
        mine, theirs = _shared_out(problem, _all_wanted(problem))
        own = _own_backward(_as_run(problem), mine)
        if isinstance(own, str):
            return f"{forward}; gradients by 'triton', because {own}"
        kernels = [_told("dkv" if own.dq else "dkv and dq", own.dkv), *([_told("dq", own.dq)] if own.dq else [])]
        told = ", ".join([forward, *kernels])
        return told if theirs is None else f"{told}; gradients of arrays {_READ_BY_BOTH} by 'triton'"

    @traced_alone
    def forward(self, problem: Problem, inputs: Inputs) -> Saved:
        """Runs the forward kernel."""
        from pallas_kernels.marks import may_hide
        from pallas_kernels.mosaic_gpu.forward import kernel as forward_kernel

        if problem.kv_lengths:
            problem, inputs = kv_lengths.without_lengths(problem, inputs, (LENGTHS_BLOCK, LENGTHS_BLOCK))
        facts, arrays = setting_of(problem), arrays_of(inputs)
        found = forward_kernel.forward(facts, _kernel_tiles(problem), arrays)
        return Saved(*(triton.repair_forward(facts, arrays, found) if may_hide(facts) else found))

    @traced_alone
    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> Gradients:
        """Runs the backward kernels, or those of `triton` where these cannot compute what is wanted."""
        from pallas_kernels.gradients import Plan
        from pallas_kernels.mosaic_gpu.backward import gradients

        others, (mine, theirs) = triton.Triton(), _shared_out(problem, wanted)
        tiles = _own_backward(_as_run(problem), mine)
        if isinstance(tiles, str):
            return others.backward(problem, inputs, saved, d_saved, wanted)
        if problem.kv_lengths:
            lengthless = kv_lengths.without_lengths(problem, inputs, (LENGTHS_BLOCK, LENGTHS_BLOCK))
            return kv_lengths.shared_again(problem, self.backward(*lengthless, saved, d_saved, wanted))
        if theirs is not None:
            found = self.backward(problem, inputs, saved, d_saved, mine)
            captured = others.backward(problem, inputs, saved, d_saved, theirs).score_operands
            both = zip(found.score_operands, captured, strict=True)
            return found._replace(score_operands=tuple(a if b is None else b for a, b in both))
        plan = Plan(wanted.query, wanted.key or wanted.value, _derivative(problem, wanted))
        facts, arrays = setting_of(problem), arrays_of(inputs)
        states = (saved.out, saved.lse), (d_saved.out, d_saved.lse)
        found = gradients.backward(
            facts, tiles, arrays, plan, *states, triton.repairs_of(facts, arrays, plan.derivative, *states)
        )
        captured = tuple(
            g if want else None for g, want in zip(found.score_operands, wanted.score_operands, strict=True)
        )
        return Gradients(found.query, found.key, found.value, captured)


def _as_run(problem: Problem) -> Problem:
    """The problem as the kernels see it: they know no lengths."""
    if not problem.kv_lengths:
        return problem
    bounded = kv_lengths.bounded_problem(problem, (LENGTHS_BLOCK, LENGTHS_BLOCK))
    return dataclasses.replace(bounded, Bkv=problem.B)


def _all_wanted(problem: Problem) -> Wanted:
    operands = () if problem.score is None else problem.score.operands
    return Wanted(True, True, True, tuple(jnp.issubdtype(dtype, jnp.floating) for _, dtype in operands))


def _shared_out(problem: Problem, wanted: Wanted) -> tuple[Wanted, Wanted | None]:
    """What these kernels compute of what is wanted, and what a kernel of `triton` does beside them, or None.

    That is gradients of arrays which are read by query and key, but along some axes alike (a bias that the batch
    shares, a table of distances): `triton` sums them in a kernel of their own.
    """
    from pallas_kernels.program.cotangents import group_loads

    groups = group_loads(setting_of(problem), _derivative(problem, wanted))
    if not groups.repeated or groups.stores or groups.atomics:
        return wanted, None
    numbers = {load.value for _, loads in groups.repeated for load in loads}
    theirs = tuple(want and i in numbers for i, want in enumerate(wanted.score_operands))
    mine = tuple(want and i not in numbers for i, want in enumerate(wanted.score_operands))
    return wanted._replace(score_operands=mine), Wanted(False, False, False, theirs)


def _derivative(problem: Problem, wanted: Wanted) -> Any:
    return None if problem.score is None else known_programs(problem).derivative(wanted.score_operands)


def _own_backward(problem: Problem, wanted: Wanted) -> Any:
    """Tiles of the backward kernels (`gradients.BackwardTiles`), or the reason why they cannot run."""
    from pallas_kernels import spec
    from pallas_kernels.mosaic_gpu import cost
    from pallas_kernels.mosaic_gpu import smem as memory
    from pallas_kernels.mosaic_gpu.backward import gradients
    from pallas_kernels.mosaic_gpu.support import lacking
    from pallas_kernels.program.cotangents import group_loads

    facts, derivative = setting_of(problem), _derivative(problem, wanted)
    groups = group_loads(facts, derivative)
    reason = gradients.unsupported_groups(groups)
    if reason is None and derivative is not None:
        reason = lacking(derivative.nodes)
        if cost.too_much_arithmetic(derivative):
            reason = "the derivative of the score mod computes more on each element than registers hold"
    if reason is not None:
        return reason
    one_pass = not (problem.config.deterministic or groups.rows)
    given = problem.config.dkv, problem.config.dq
    if any(given):
        dkv, dq = (None if x is None else spec.Tiles(*dataclasses.astuple(x)) for x in given)
        reason = gradients.unsupported_tiles(facts, dkv, dq, one_pass=one_pass)
        if reason is not None:
            return reason
        assert dkv is not None  # or there was a reason
        tiles = gradients.BackwardTiles(dkv, dq)
    else:
        tiles = _best_backward(problem, one_pass=one_pass)
        if one_pass and tiles is not None and not gradients.is_one_pass_faster(facts, tiles, groups):
            tiles = _best_backward(problem, one_pass=False)
    if tiles is None:
        return "no tile of them divides the blocks of the mask"
    needed = [memory.bytes_of(jax.tree.leaves(x)) for x in gradients.declare(facts, tiles, problem.dtype, groups)]
    if max(needed) > memory.LIMIT:
        return f"their tiles need {max(needed)} bytes of shared memory, of which there are {memory.LIMIT}"
    return tiles


def _told(kernel: str, tiles: Any) -> str:
    t = tiles
    return f"{kernel} {t.block_q} x {t.block_kv} ({t.num_warps} warps that compute, {t.num_stages} stages)"


def _limit_of_machine(problem: Problem) -> str | None:
    if problem.config.interpret:
        return "its kernels have no interpreter; they run on a Hopper GPU"
    if problem.platform != "gpu" or not any(name in problem.device_kind for name in HOPPER):
        where = problem.platform if problem.platform != "gpu" else problem.device_kind
        return f"it needs a Hopper GPU (H100, H200), and this call runs on {where}"
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11 or later, and this is {jax.__version__}"
    from pallas_kernels.mosaic_gpu.cuda_version import miscompiling_cuda

    cuda = miscompiling_cuda()
    if cuda is not None:
        return f"the assembler of CUDA {cuda} miscompiles attention through Mosaic GPU (from 12.9.1 on it does not)"
    return None


def _limit_of_arrays(problem: Problem) -> str | None:
    if problem.dtype not in ("bfloat16", "float16"):
        return f"its kernels compute in bfloat16 or float16, not {problem.dtype}"
    if max(problem.D, problem.Dv) > 256:
        return f"its kernels take head sizes up to 256, not {max(problem.D, problem.Dv)}"
    blocks = problem.blocks
    if blocks is not None and any(size % ROWS for size in blocks.size):
        return (
            f"its tiles are multiples of {ROWS} rows, and the blocks of the mask are {blocks.size[0]} x "
            f"{blocks.size[1]} (create the mask with a `block_size` that is a multiple of {ROWS})"
        )
    for mod in (problem.score, problem.mask):
        for shape, dtype in () if mod is None else mod.operands:
            if math.prod(shape) >= MOST_ELEMENTS:
                return f"a mod captures an array of {dtype}{list(shape)}, which has 2 ** 31 elements or more"
    return None


def _limit_of_mods(problem: Problem) -> str | None:
    from pallas_kernels.mosaic_gpu.support import lacking

    programs = known_programs(problem)
    for mod, program in ((problem.score, programs.score), (problem.mask, programs.mask)):
        missing = None if program is None else lacking(program.nodes)
        if missing is not None:
            assert mod is not None
            return f"`{mod.kind}_mod` {mod.source} cannot run in its kernels: {missing}"
    return None


def _limit_of_tiles(problem: Problem) -> str | None:
    from pallas_kernels.mosaic_gpu import smem as memory

    tiles, given = _tiles(problem), problem.config.forward
    if given is not None and (tiles.num_warps not in (4, 8) or tiles.block_q * 4 // tiles.num_warps not in (64, 128)):
        return (
            f"a warp group of 4 warps takes 64 or 128 queries, one or two of them a tile; `config` sets "
            f"{tiles.block_q} queries and {tiles.num_warps} warps"
        )
    if tiles.block_kv % ROWS:
        return f"its tiles are multiples of {ROWS} keys, and `config` sets tiles of {tiles.block_kv}"
    needed = memory.bytes_of(jax.tree.leaves(_declared(problem, tiles)))
    if needed > memory.LIMIT:
        return f"its tile needs {needed} bytes of shared memory, of which there are {memory.LIMIT}"
    return None


def _limit_of_gradients(problem: Problem) -> str | None:
    """Why neither these kernels nor those of `triton` could compute gradients."""
    mine, theirs = _shared_out(problem, _all_wanted(problem))
    own = _own_backward(_as_run(problem), mine)
    if theirs is None and not isinstance(own, str):
        return None
    others = triton.Triton().unsupported(problem)
    reason = own if isinstance(own, str) else f"'triton' computes those of arrays {_READ_BY_BOTH}"
    return None if others is None else f"for gradients, {reason}; and of 'triton': {others}"


def _tiles(problem: Problem) -> Tiles:
    """The user's tiles, else measured ones where they divide the mask's blocks, else a rule's."""
    from pallas_kernels import spec
    from pallas_kernels.mosaic_gpu import tile_rules

    if problem.config.forward is not None:
        return problem.config.forward
    facts, dtype = setting_of(problem), jnp.dtype(problem.dtype)
    measured = _measured_tiles(problem, "forward_sm90", problem.S)
    if measured is not None and measured.block_q <= problem.T:
        of_kernel = spec.Tiles(*dataclasses.astuple(measured))
        if tile_rules.suits(facts, of_kernel, dtype):
            return measured
    return Tiles(*tile_rules.forward_tiles(facts, dtype))


def _declared(problem: Problem, tiles: Tiles) -> Any:
    """The shared memory of the forward kernel."""
    from pallas_kernels import spec
    from pallas_kernels.mosaic_gpu.forward import kernel as forward_kernel

    of_kernel = spec.Tiles(*dataclasses.astuple(tiles))
    return forward_kernel.declare(setting_of(problem), of_kernel, jnp.dtype(problem.dtype))


def _measured_tiles(problem: Problem, kernel: str, length: int) -> Tiles | None:
    """Those of a table, for the kernel's name there and the length of its loop.

    The mods there compute little, and the elements that they read are brought by the copy engine.
    """
    from pallas_kernels.mosaic_gpu import bias_tiles
    from pallas_kernels.mosaic_gpu.cost import much_arithmetic
    from pallas_kernels.tuning import tables

    programs, itemsize = known_programs(problem), jnp.dtype(problem.dtype).itemsize
    if much_arithmetic(programs.score) or much_arithmetic(programs.mask):
        return None
    key = tables.key_of(kernel, max(problem.D, problem.Dv), itemsize, (programs.score, programs.mask), length)
    found = tables.look_up(problem.device_kind, key)
    if found is None or (key.mods == "elements" and not bias_tiles.planes_of(setting_of(problem))):
        return None
    tiles, blocks = Tiles(*found), problem.blocks
    divide = blocks is None or (blocks.size[0] % tiles.block_q == 0 and blocks.size[1] % tiles.block_kv == 0)
    return tiles if divide else None


def _best_backward(problem: Problem, *, one_pass: bool) -> Any:
    """Measured tiles of the backward kernels, or a rule's; None if no tile divides the blocks of the mask."""
    from pallas_kernels.mosaic_gpu.backward.gradients import tiles_for

    return _measured_backward(problem, one_pass=one_pass) or tiles_for(setting_of(problem), one_pass=one_pass)


def _measured_backward(problem: Problem, *, one_pass: bool) -> Any:
    """Measured tiles of the backward kernels, of one pass where that is allowed; None if nobody measured."""
    from pallas_kernels import spec
    from pallas_kernels.mosaic_gpu.backward.gradients import BackwardTiles, unsupported_tiles

    names = {"one_pass_sm90": problem.T} if one_pass else {"dkv_sm90": problem.T, "dq_sm90": problem.S}
    found = [_measured_tiles(problem, name, length) for name, length in names.items()]
    if any(tiles is None for tiles in found):
        return None
    dkv, *dq = (spec.Tiles(*dataclasses.astuple(tiles)) for tiles in found if tiles is not None)
    measured = BackwardTiles(dkv, dq[0] if dq else None)
    return None if unsupported_tiles(setting_of(problem), *measured, one_pass=one_pass) else measured


def _kernel_tiles(problem: Problem) -> Any:
    from pallas_kernels import spec

    return spec.Tiles(*dataclasses.astuple(_tiles(problem)))
