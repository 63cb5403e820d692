"""The plan of the kernel for prompts over pages, for Hopper: limits, tiles, and which requests it takes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.decode.plan import limit_of_call
from pallas_kernels.mosaic_gpu.launch import NUM_SMS, ROWS_MULTIPLE
from pallas_kernels.mosaic_gpu.prompt import kernel
from pallas_kernels.mosaic_gpu.score.tile import is_heavy
from pallas_kernels.mosaic_gpu.split_kv import limit_of_kernel, run_work
from pallas_kernels.plan import Refusal, with_programs
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import items, paged
from pallas_kernels.split_kv import plan as paged_plan
from pallas_kernels.split_kv.work import PagedOperands, Work

MAX_WIDE = 128  # head size up to which a tile has 128 keys
MAX_STAGES = 4


@dataclasses.dataclass(frozen=True)
class PromptPlan:
    """The plan of a call: its tiles, and the requests that the kernel takes."""

    spec: AttentionSpec  # the call, with its tile programs; `Hkv` counts query heads
    group: int  # query heads of a key head
    work: Work
    query_stages: int
    few: paged_plan.PagedPlan  # the Triton kernels that take the other requests, if there may be any

    def describe(self) -> str:
        """Kernel and tiles, for `jflex.explain`."""
        tiles = self.work.tiles
        text = f"prompt {tiles.block_q} x {tiles.block_kv} (8 warps that compute, {tiles.num_stages} stages)"
        if not self.few.launches:
            return text
        return f"{text} for {self.work.min_queries} queries of a request or more, {self.few.describe()} for fewer"

    def run(self, arrays: PagedOperands[jax.Array]) -> list[jax.Array]:
        """Out and lse of a paged call, before repairs: of prompts, and after them of requests with few queries."""
        attend = functools.partial(kernel.attend, self.spec, self.work.tiles, self.group, self.query_stages)
        result = run_work(self.spec, self.work, arrays, attend)
        return paged.attend(self.few.spec, self.few.launches, arrays, result)

    def count_splits(self, indptr: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
        """Tiles of queries, and the splits of their keys, for each key head."""
        tiles, splits = items.count_splits(self.spec, self.work, indptr, lengths)
        others = self.few.count_splits(indptr, lengths) if self.few.launches else (0, 0)
        return tiles * self.group + others[0], splits * self.group + others[1]


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec) -> PromptPlan | Refusal:
    """Plans a paged call with prompts, on a machine that `limits.limit_of_machine` does not refuse."""
    reason = limit_of_call(spec)
    if kernel.gathers(spec) and spec.paged_rows > jnp.iinfo(jnp.int32).max:
        reason = f"its threads count rows of pages of {spec.page_size} keys in 32 bits, and there are {spec.paged_rows}"
    if reason is not None:
        return Refusal(reason)
    launches = paged_plan.plan(spec)
    if isinstance(launches, Refusal):
        return launches
    keys = 128 if max(spec.D, spec.Dv) <= MAX_WIDE else 64
    # Tiles may pass the room for keys, but for the mods they do not.
    traced = with_programs(spec.replace(Hkv=spec.Hq, S=-(-spec.S // keys) * keys))
    if isinstance(traced, Refusal):
        return traced
    if is_heavy(traced.programs.score):
        keys = 64
    tiles, query_stages = _tiles(traced, keys)
    refusal = limit_of_kernel(traced, lambda: kernel.declare(traced, tiles, jnp.dtype(spec.dtype), query_stages))
    if refusal is not None:
        return refusal
    *few, many = launches.launches
    # A few tiles of queries, whose keys are split, leave SMs without work otherwise.
    may_split = spec.T * spec.Hq <= 2 * NUM_SMS * tiles.block_q
    work = Work(
        tiles, many.min_queries, many.max_queries, may_split, queries_of_tile=tiles.block_q, resident=NUM_SMS,
        alignment=ROWS_MULTIPLE, last_first=True,
    )  # fmt: skip
    few = dataclasses.replace(launches, launches=tuple(few))
    return PromptPlan(traced, spec.group, work, query_stages, few)


def _tiles(spec: AttentionSpec, keys: int) -> tuple[Tiles, int]:
    """The tile, with as many stages as fit, and the tiles of queries that are loaded at once."""
    dtype = jnp.dtype(spec.dtype)
    choices = [(stages, queries) for queries in (2, 1) for stages in range(MAX_STAGES, 1, -1)]
    for stages, queries in choices:
        tiles = Tiles(kernel.BLOCK_Q, keys, 8, stages)
        if smem.bytes_of(jax.tree.leaves(kernel.declare(spec, tiles, dtype, queries))) <= smem.LIMIT:
            return tiles, queries
    return Tiles(kernel.BLOCK_Q, keys, 8, 2), 1
