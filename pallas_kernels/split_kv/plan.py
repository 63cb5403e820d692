"""Plan of a paged call: the launches of its kernel and their tiles, or a refusal."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallas_kernels.config import Tiles
from pallas_kernels.plan import Refusal, TileChoice, with_programs, with_vector_programs
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import planner
from pallas_kernels.split_kv.work import UNLIMITED, Work, requests_on_host
from pallas_kernels.triton.head_chunks import plain_chunks
from pallas_kernels.triton.plan import limits
from pallas_kernels.triton.plan.limits import MAX_DECODED, MAX_DECODED_ROWS, MIN_TILE, limit_of_device
from pallas_kernels.triton.plan.plan import describe_splits, paged_stages
from pallas_kernels.tuning import tables

MAX_GROUP = 128  # query heads of a key head in a paged call, all of them rows of a tile


@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """Plan of a paged call."""

    spec: AttentionSpec  # the call, with its tile programs
    launches: tuple[Work, ...]  # of the kernel: one, or one for few queries of a request and one for many

    def describe(self) -> str:
        """Kernels, tiles and the source of tiles, for `jflex.explain`."""
        few, *many = (f"paged {TileChoice(work.tiles, work.source).describe()}" for work in self.launches)
        text = f"{few} for up to {MAX_DECODED} queries of a request, {many[0]} for more" if many else few
        text += describe_splits(self.spec)
        programs = self.spec.vector_programs._asdict().items()
        fused = " and ".join(f"{role}_mod" for role, program in programs if program is not None)
        return f"{text}, with {fused} on each tile that is loaded" if fused else text

    def count_splits(self, indptr: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
        """Tiles of queries, and the splits of their keys, for each key head; queries begin at `indptr`."""
        planned = [requests_on_host(self.spec, work, indptr, lengths) for work in self.launches]
        counts = [(x.tiles[: lengths.size], x.splits[: lengths.size]) for x in planned]
        return sum(int(n.sum()) for n, _ in counts), sum(int((n * splits).sum()) for n, splits in counts)


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec) -> PagedPlan | Refusal:
    """Plans a paged call."""
    reason = limit_of_device(spec)
    if reason is not None:
        return Refusal(reason)
    if spec.values_in_keys:
        # An equal share of the heads, as many as a tile holds, is to the kernel a group with a key head of its own.
        # Tiles of a query lie side by side in the grid, and read the same keys from the L2 cache.
        most = tables.latent_rows(tables.need_of(spec))
        heads = max(n for n in range(1, most + 1) if spec.Hq % n == 0)
        spec = spec.replace(Hkv=spec.Hq // heads)
    if spec.group > MAX_GROUP:
        return Refusal(f"its kernels take up to {MAX_GROUP} query heads for each key head, not {spec.group}")
    traced = with_programs(spec.replace(heads_in_rows=True))
    if isinstance(traced, Refusal):
        return traced
    traced = with_vector_programs(traced, plain_chunks(spec.D), plain_chunks(spec.Dv))
    if isinstance(traced, Refusal):
        return traced
    launches = _launches(traced)
    size = next((x for work in launches for x in work.tiles.shape if x < MIN_TILE or x & (x - 1)), None)
    if size is not None:
        return Refusal(f"it needs tiles of at least {MIN_TILE}, in powers of two; `config` sets {size}")
    return PagedPlan(traced, launches)


def has_prompts(spec: AttentionSpec) -> bool:
    """True if a request may have many queries, and does in more than rare steps."""
    return max(spec.B, MAX_DECODED) < spec.T


def _launches(spec: AttentionSpec) -> tuple[Work, ...]:
    """Launches for requests from so many queries to so many.

    With no more queries than requests, a request with many is possible only beside others with none: that is right too,
    and not worth a launch (2 us) in every step of decoding.
    """
    if spec.config.batch_invariant:
        # One tile for decoding and prefill. Compiled for sm_90a, jax 0.10.2, D 128: 64 rows and 5 stages take 255
        # registers and 115 KB, so that two programs fit on an SM; with 7 stages 147 KB.
        choice = _prefill_tiles(spec)
        return (Work(choice.tiles, 0, UNLIMITED, source=choice.source),)
    work = lambda choice, least, most: Work(choice.tiles, least, most, source=choice.source)
    mean = -(-spec.T // max(spec.B, 1))
    queries = mean if mean <= MAX_DECODED else 1
    most = tables.latent_rows(tables.need_of(spec)) if spec.values_in_keys else MAX_DECODED_ROWS
    rows = min(spec.group * queries, max(most, spec.group))
    if spec.B == 1 and spec.T > MAX_DECODED:  # most likely one request with all of them, or with most
        return (work(_prefill_tiles(spec), 0, UNLIMITED),)
    if not has_prompts(spec):
        return (work(_paged_decode_tiles(spec, rows), 0, UNLIMITED),)
    return (
        work(_paged_decode_tiles(spec, rows), 0, MAX_DECODED),
        work(_prefill_tiles(spec), MAX_DECODED + 1, UNLIMITED),
    )


def _paged_decode_tiles(spec: AttentionSpec, rows: int) -> TileChoice:
    need, block_q = tables.need_of(spec), tables.decode_rows(rows)
    if spec.values_in_keys:
        default = tables.latent_tiles(need, block_q)
    else:
        share = min(1.0, spec.B * spec.Hkv / planner.MAX_RESIDENT_PROGRAMS)  # longer rows are split among programs
        default = tables.paged_decode_tiles(need, rows, spec.max_pages, spec.S, int(share * spec.S))
    return _fit_paged(spec, default, spec.config.decode, block_q=block_q)


def _prefill_tiles(spec: AttentionSpec) -> TileChoice:
    need, configured = tables.need_of(spec), spec.config.forward
    if spec.values_in_keys:
        default = tables.latent_tiles(need, tables.latent_rows(need))
    else:
        default = tables.paged_prefill_tiles(need)
    block_q = max((default if configured is None else configured).block_q, tables.decode_rows(spec.group))
    return _fit_paged(spec, default, configured, block_q=block_q)


def _fit_paged(spec: AttentionSpec, default: Tiles, configured: Tiles | None, *, block_q: int) -> TileChoice:
    """The user's tiles or a rule's, with so many rows."""
    tiles = default if configured is None else configured
    if configured is None:
        warps = 8 if block_q > 64 else tiles.num_warps
        capacity = limits.KEYS_OF_SPLIT if spec.config.batch_invariant else spec.S
        block_kv = min(tiles.block_kv, max(MIN_TILE, 1 << (capacity - 1).bit_length()))
        tiles = dataclasses.replace(tiles, num_warps=warps, block_kv=block_kv)
    stages = tiles.num_stages if tables.can_pipeline(spec.programs.score) else 1
    fitting = dataclasses.replace(tiles, block_q=block_q, num_stages=stages)
    if configured is None and any(program is not None for program in spec.vector_programs):
        fitting = dataclasses.replace(fitting, num_stages=paged_stages(spec, fitting))
    return TileChoice(fitting, "rule" if configured is None else "config")
