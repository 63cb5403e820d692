"""The search space of tiles: conditions, the attentions that represent each, and configurations that may work.

All that the benchmarks import of the kernels' internals is imported here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jflex
from benchmarks.peers.jax import attention as jax_attention
from benchmarks.problems import Problem, square
from benchmarks.variants import VARIANTS
from pallas_kernels.config import Tiles
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import AttentionSpec, Blocks, Dense, Device, Numerics, Sizes
from pallas_kernels.triton.plan import plan as triton_plan
from pallas_kernels.tuning.tables import (
    HEAD_SIZES,
    HOPPER_KERNELS,
    KERNELS,
    LENGTHS,
    MODS,
    OFFICIAL_KERNELS,
    Key,
    table_name,
)

__all__ = [
    "HEAD_SIZES", "HOPPER_KERNELS", "KERNELS", "LENGTHS", "MODS", "OFFICIAL_KERNELS", "Key", "Tiles", "table_name",
]  # fmt: skip

EVERY_MOD = (64, 128)  # head sizes that are tuned for every bucket of mods and both lengths
BOTH_LENGTHS = (32, *EVERY_MOD)
_REGISTERS = 240  # of a thread, for what a Hopper kernel holds of a tile; a few of them may spill
_MAX_STAGES = 4


# The variants that represent each bucket of mods; where there is none, a mask and no mask.
REPRESENTATIVES = {
    "none": ("causal", "noop"),
    "arithmetic": ("alibi",),
    "functions": ("softcap",),
    "elements": ("pair_bias",),
}


def conditions(head_size: int) -> list[tuple[str, str]]:
    """Buckets of mods and lengths that are searched at a head size."""
    mods = ("none", "arithmetic", "functions", "elements") if head_size in EVERY_MOD else ("none", "elements")
    return list(itertools.product(mods, ("short", "long") if head_size in BOTH_LENGTHS else ("long",)))


def attentions(head_size: int, mods: str, length: str) -> list[Problem]:
    """The representatives of a condition; the best tiles have the least geometric mean of their times."""
    B, S = (32, 512) if length == "short" else (4, 4096) if mods == "elements" else (2, 8192)
    return [square(B, S, 16 if head_size <= 128 else 8, head_size, variant) for variant in REPRESENTATIVES[mods]]


def program(problem: Problem, kernel: str, tiles: Tiles | None, *, interpret: bool = False) -> Any:
    """``(query, key, value, d_out, captured, block_mask) -> arrays``: the kernel, after those that it depends on.

    Without tiles it takes those that jflex chooses.
    """
    pass_ = kernel.removesuffix("_sm90").removesuffix("_official")
    of_triton = "official_triton" if kernel in OFFICIAL_KERNELS else "triton"
    implementation = "mosaic_gpu" if kernel in HOPPER_KERNELS else of_triton
    config = jflex.Config(**_tiles_of(kernel, tiles), interpret=interpret)

    def run(query: Any, key: Any, value: Any, d_out: Any, captured: Any, block_mask: Any) -> Any:
        mod = VARIANTS[problem.variant].make(problem, captured, jax_attention.OPERATIONS).score
        attend = lambda query, key, value: jflex.flex_attention(
            query, key, value, mod, block_mask, implementation=implementation, config=config
        )
        if pass_ == "forward":
            return attend(query, key, value)
        if pass_ == "dq":
            return jax.vjp(lambda query: attend(query, key, value), query)[1](d_out)
        if pass_ == "one_pass":
            return jax.vjp(attend, query, key, value)[1](d_out)
        return jax.vjp(lambda *kv: attend(query, *kv), key, value)[1](d_out)

    return run


def _tiles_of(kernel: str, tiles: Tiles | None) -> dict[str, Any]:
    """Fields of `Config`; dkv and dq of Hopper are set together, and the one that is not measured gets any tiles."""
    if tiles is None:
        return {}
    if kernel in ("dkv_sm90", "dq_sm90"):
        idle = jflex.Tiles(64, 64, 4, 2)
        return {"dkv": idle, "dq": idle, kernel.removesuffix("_sm90"): tiles, "deterministic": True}
    return {"dkv" if kernel == "one_pass_sm90" else kernel.removesuffix("_sm90").removesuffix("_official"): tiles}


def inputs(problem: Problem) -> tuple[Any, ...]:
    """Random arrays, the captured ones, and the BlockMask; a bias is as large as the scores, and made on the device."""
    B, S, H, D = problem.B, problem.S, problem.Hq, problem.D
    arrays = jax.random.normal(jax.random.key(0), (4, B, S, H, D), jnp.bfloat16)
    if problem.variant == "pair_bias":
        captured = {"bias": jax.random.normal(jax.random.key(2), (H, S, S), jnp.bfloat16)}
    else:
        captured = jax_attention.mods_of(problem)[1]
    mask = VARIANTS[problem.variant].make(problem, captured, jax_attention.OPERATIONS).mask
    return (*arrays, captured, mask and jflex.create_block_mask(mask, None, None, S, S))


def configurations(kernel: str, head_size: int) -> Iterator[Tiles]:
    """Tiles that may work: 64 rows for wgmma, a second group of 4 warps where there are 64 rows for it."""
    if kernel in HOPPER_KERNELS:
        yield from _of_hopper(kernel, head_size)
        return
    kernel = kernel.removesuffix("_official")
    for rows, columns, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
        block_q, block_kv = (columns, rows) if kernel == "dkv" else (rows, columns)
        tiles = Tiles(block_q, block_kv, warps, stages)
        stages_are_right = stages == 1 if head_size > 192 else stages > 1
        needless = (warps == 8 and rows < 128) or (columns < 64 and head_size < 80)
        if stages_are_right and not needless and triton_plan.may_work(kernel, tiles, head_size, head_size, 2):
            yield tiles


def _of_hopper(kernel: str, head_size: int) -> Iterator[Tiles]:
    """One or two warp groups, each with 64 rows or 128, that fit into registers and shared memory.

    The backward in one pass takes more registers, so that not all of its tiles compile.
    """
    from pallas_kernels.mosaic_gpu import smem
    from pallas_kernels.mosaic_gpu.backward import dkv, dq, walk
    from pallas_kernels.mosaic_gpu.backward import one_pass as backward_one_pass
    from pallas_kernels.mosaic_gpu.forward import kernel as forward_kernel

    loads = LoadGroups((), (), (), (), ())
    by_key = functools.partial(walk.declare, loads=loads)
    declarations: dict[str, Callable[[AttentionSpec, Tiles, DTypeLike], object]] = {
        "forward_sm90": forward_kernel.declare,
        "dq_sm90": functools.partial(dq.declare, loads=loads),
        "one_pass_sm90": functools.partial(by_key, one_pass=True),
    }
    declare = declarations.get(kernel, by_key)
    by_keys, sums_apart = kernel in ("one_pass_sm90", "dkv_sm90"), head_size > dkv.MAX_HEAD_SIZE_BOTH_SUMS
    sizes = Sizes(B=1, T=1024, S=1024, Hq=1, Hkv=1, D=head_size, Dv=head_size, Bkv=1)
    numerics, memory = Numerics(dtype="bfloat16", scale=1.0), Dense(blocks=Blocks((128, 128), 1, 1))
    spec = AttentionSpec(sizes=sizes, numerics=numerics, device=Device("gpu", "NVIDIA H200"), memory=memory)
    for groups, rows, columns in itertools.product((1, 2), (64, 128), (64, 128)):
        # In one pass a call with its forward pass took 1 to 84 % longer with one group than with two (H200, head sizes
        # 64 to 128), but where two left no room for bias tiles.
        refused = (rows > 64 and kernel != "forward_sm90") or (groups == 1 and kernel == "one_pass_sm90")
        if refused or groups * rows > 128 or rows // 64 * _held(kernel, columns, head_size) > _REGISTERS:
            continue
        block_q, block_kv = (columns, groups * rows) if by_keys else (groups * rows, columns)
        for stages in range(2, _MAX_STAGES + 1):
            tiles = Tiles(block_q, block_kv, 4 * groups, stages)
            if kernel == "one_pass_sm90" and (sums_apart or not backward_one_pass.fits(spec, tiles)):
                continue
            if smem.bytes_of(jax.tree.leaves(declare(spec, tiles, jnp.bfloat16))) <= smem.LIMIT:
                yield tiles


def _held(kernel: str, columns: int, head_size: int) -> int:
    """Registers of a thread for 64 rows: accumulators and scores of 32 bits, probabilities of 16."""
    from pallas_kernels.mosaic_gpu.backward.dkv import MAX_HEAD_SIZE_BOTH_SUMS

    both = kernel in ("one_pass_sm90", "dkv_sm90") and head_size <= MAX_HEAD_SIZE_BOTH_SUMS
    sums = 2 * head_size if both else head_size
    tiles = columns if kernel == "forward_sm90" else 2 * columns
    return sums // 2 + tiles // 2 + columns // 4


def key(kernel: str, head_size: int, mods: str, length: str) -> Key:
    """The key of a condition in a table."""
    assert kernel in (*KERNELS, *OFFICIAL_KERNELS, *HOPPER_KERNELS)
    return Key(kernel, head_size, 2, mods, length)
