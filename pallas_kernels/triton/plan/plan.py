"""Which Triton kernels run a call, and with which tiles, or why they cannot."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import Tiles
from pallas_kernels.plan import (
    GradientRequest,
    Kernel,
    Refusal,
    TileChoice,
    derivative_of,
    with_programs,
    with_vector_programs,
)
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import group_loads, is_ordered
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import fixed_splits
from pallas_kernels.triton.head_chunks import may_hold_pairs, plain_chunks
from pallas_kernels.triton.paged.work import Work, requests_on_host
from pallas_kernels.triton.plan import cost
from pallas_kernels.triton.plan.limits import MAX_DECODED, MAX_DECODED_ROWS, MIN_TILE, decodes, limit_of_device
from pallas_kernels.tuning import tables, triton_rules

MAX_SORTED = 1 << 31  # elements of an array: positions in it have 32 bits
MAX_GROUP = 128  # query heads of a key head in a paged call, all of them rows of a tile
_UNLIMITED = 1 << 30
_UNORDERED = (
    "the gradient of a captured array of which a query reads elements for each key, and the same ones repeatedly, is "
    "added by atomics, in no fixed order, which `Config(deterministic=True)` excludes ('xla' adds it in order)"
)

_UNSORTED = (
    "`Config(deterministic=True)` sorts the positions in a captured array that gets a gradient, and 32 bits hold those "
    "of fewer than 2 ** 31 elements"
)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The backward pass.

    Attributes:
      spec: The call, with its tile programs.
      requested: The gradients that it computes.
      derivative: That of the score mod, None without one.
      dkv: Tiles of the kernel for dK and dV.
      dq: Tiles of the kernel for dQ.
    """

    spec: AttentionSpec
    requested: GradientRequest
    derivative: Derivative | None
    dkv: TileChoice
    dq: TileChoice


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call runs.

    Attributes:
      spec: The call, with its tile programs; that of few queries has heads in rows.
      forward: Tiles of the forward kernel, or of the decoding kernel if `spec.heads_in_rows`.
      backward: The backward pass; None for forward only.
      paged: Launches of the paged kernel, for a paged call.
    """

    spec: AttentionSpec
    forward: TileChoice | None
    backward: BackwardPlan | None = None
    paged: tuple[Work, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether the split-KV kernel for few queries runs."""
        return self.spec.heads_in_rows and self.spec.paging is None

    def describe(self) -> str:
        """Kernels, tiles and the source of tiles, for `jflex.explain`."""
        if self.paged:
            few, *many = (f"paged {_sizes(work.tiles, work.source)}" for work in self.paged)
            text = f"{few} for up to {MAX_DECODED} queries of a request, {many[0]} for more" if many else few
            text += self._fixed
            programs = self.spec.vector_programs._asdict().items()
            fused = " and ".join(f"{role}_mod" for role, program in programs if program is not None)
            return f"{text}, with {fused} on each tile that is loaded" if fused else text
        kernels = [("decode" if self.decodes else "forward", self.forward)]
        if self.backward is not None:
            kernels += [("dkv", self.backward.dkv), ("dq", self.backward.dq)]
        text = ", ".join(f"{kernel} {_sizes(choice.tiles, choice.source)}" for kernel, choice in kernels if choice)
        return text + (self._fixed if self.decodes else "")

    @property
    def _fixed(self) -> str:
        """What is said of splits of a constant number of keys."""
        return f" in splits of {fixed_splits.KEYS_OF_SPLIT} keys" if self.spec.config.batch_invariant else ""

    def count_splits(self, indptr: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
        """Tiles of queries of a paged call, and the splits of their keys, for each key head.

        Args:
          indptr: Where the queries of each request begin.
          lengths: Keys of each.
        """
        found = [requests_on_host(self.spec, work, indptr, lengths) for work in self.paged]
        counts = [(of.tiles[: lengths.size], of.splits[: lengths.size]) for of in found]
        return sum(int(n.sum()) for n, _ in counts), sum(int((n * splits).sum()) for n, splits in counts)


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    """Plans a call.

    Args:
      spec: The call; only the decoding kernel knows `spec.kv_lengths`.
      requested: Which gradients; None for forward only.
    """
    reason = limit_of_device(spec)
    if reason is not None:
        return Refusal(reason)
    if spec.paging is not None:
        return _plan_paged(spec)
    forward = _plan_forward(spec)
    if isinstance(forward, Refusal) or requested is None:
        return forward
    backward = _plan_backward(spec, requested)
    return backward if isinstance(backward, Refusal) else dataclasses.replace(forward, backward=backward)


def _plan_forward(spec: AttentionSpec) -> Plan | Refusal:
    decoded = decodes(spec)
    made = with_programs(spec.replace(heads_in_rows=decoded))
    if isinstance(made, Refusal):
        return made
    choice = _choose_tiles(made, "decode" if decoded else "forward")
    return choice if isinstance(choice, Refusal) else Plan(made, choice)


def _plan_backward(spec: AttentionSpec, requested: GradientRequest) -> BackwardPlan | Refusal:
    made = with_programs(spec)
    if isinstance(made, Refusal):
        return made
    derivative = derivative_of(made, requested.score_operands)
    if isinstance(derivative, Refusal):
        return derivative
    if spec.config.deterministic and not is_ordered(made, group_loads(made, derivative)):
        return Refusal(_UNORDERED)
    if spec.config.deterministic and _is_too_large_to_sort(made, requested):
        return Refusal(_UNSORTED)
    dkv, dq = _choose_tiles(made, "dkv"), _choose_tiles(made, "dq")
    if isinstance(dkv, Refusal):
        return dkv
    if isinstance(dq, Refusal):
        return dq
    return BackwardPlan(made, requested, derivative, dkv, dq)


def _is_too_large_to_sort(spec: AttentionSpec, requested: GradientRequest) -> bool:
    sizes = zip(spec.score_shapes, requested.score_operands, strict=True)
    return any(is_requested and math.prod(shape) >= MAX_SORTED for shape, is_requested in sizes)


# --- tiles


def _choose_tiles(spec: AttentionSpec, kernel: Kernel) -> TileChoice | Refusal:
    """The tiles of a kernel; of one stage where the loop must not be pipelined."""
    choice = _tiles_of(spec, kernel)
    smallest = min(choice.tiles.shape)
    if smallest < MIN_TILE:
        where = "the mask's block size allows" if spec.blocks is not None else "`config` sets"
        return Refusal(
            f"it needs tiles of at least {MIN_TILE}, in powers of two; {where} {smallest} (create the mask with a "
            f"`block_size` that is a multiple of {MIN_TILE})"
        )
    if cost.can_pipeline(spec.programs.score):
        return choice
    return dataclasses.replace(choice, tiles=dataclasses.replace(choice.tiles, num_stages=1))


def _tiles_of(spec: AttentionSpec, kernel: Kernel) -> TileChoice:
    """The user's tiles, else measured ones, else a rule's.

    Those of jflex are cut to what divides the mask's blocks and is no larger than the call.
    """
    given: Tiles | None = getattr(spec.config, kernel)
    if given is not None:
        rows = triton_rules.decode_rows(spec.group * spec.T)
        return TileChoice(dataclasses.replace(given, block_q=rows) if kernel == "decode" else given, "config")
    invariant = spec.config.batch_invariant and kernel == "forward"
    measured = None if kernel == "decode" or invariant else _measured_tiles(spec, kernel)
    tiles = triton_rules.tiles_for(kernel, need_of(spec), spec.group * spec.T) if measured is None else measured
    block_q, block_kv = tiles.shape
    if kernel == "decode":  # rows of its tile are queries of several heads
        block_kv = min(block_kv, spec.blocks.size[1] & -spec.blocks.size[1] if spec.blocks else block_kv)
    elif spec.blocks is not None:
        block_q, block_kv = (min(x, block & -block) for x, block in zip(tiles.shape, spec.blocks.size, strict=True))
    elif not invariant:
        block_q = min(block_q, max(MIN_TILE, 1 << (spec.T - 1).bit_length()))
        block_kv = min(block_kv, max(MIN_TILE, 1 << (spec.S - 1).bit_length()))
    cut = dataclasses.replace(tiles, block_q=block_q, block_kv=block_kv)
    return TileChoice(cost.fitting(spec, kernel, cut), "rule" if measured is None else "table")


def _measured_tiles(spec: AttentionSpec, kernel: Kernel) -> Tiles | None:
    length, itemsize = spec.T if kernel == "dkv" else spec.S, jnp.dtype(spec.dtype).itemsize
    key = tables.key_of(kernel, max(spec.D, spec.Dv), itemsize, spec.programs, length)
    if kernel == "forward" and spec.normalize == "none" and key.mods in ("arithmetic", "functions"):
        key = key._replace(mods="none")  # see `triton_rules.forward_tiles`
    own = tables.look_up(spec.device_kind, tables.official(key)) if spec.device.compiler == "official" else None
    return tables.look_up(spec.device_kind, key) if own is None else own


def need_of(spec: AttentionSpec) -> triton_rules.Need:
    """What the rules for tiles depend on."""
    return triton_rules.Need(
        head_size=max(spec.D, spec.Dv),
        itemsize=jnp.dtype(spec.dtype).itemsize,
        heavy=triton_rules.is_heavy(*spec.programs),
        score=(spec.programs.score is not None and spec.normalize == "softmax") or spec.programs.dropout is not None,
        large_memory=triton_rules.has_large_memory(spec.device_kind),
        in_bytes=may_hold_pairs(spec, spec.D, spec.vector_programs.key)
        and may_hold_pairs(spec, spec.Dv, spec.vector_programs.value),
    )


# --- pages


def _plan_paged(spec: AttentionSpec) -> Plan | Refusal:
    if spec.values_in_keys:  # to the kernel, heads that share a tile are a group with a key head of its own
        heads = _heads_of_tile(spec.Hq, triton_rules.latent_rows(need_of(spec)))
        spec = spec.replace(Hkv=spec.Hq // heads)
    if spec.group > MAX_GROUP:
        return Refusal(f"its kernels take up to {MAX_GROUP} query heads for each key head, not {spec.group}")
    made = with_programs(spec.replace(heads_in_rows=True))
    if isinstance(made, Refusal):
        return made
    made = with_vector_programs(made, plain_chunks(spec.D), plain_chunks(spec.Dv))
    if isinstance(made, Refusal):
        return made
    works = _paged_works(made)
    smallest = min(min(work.tiles.shape) for work in works)
    if smallest < MIN_TILE:
        return Refusal(f"it needs tiles of at least {MIN_TILE}, in powers of two; `config` sets {smallest}")
    return Plan(made, None, paged=works)


def _heads_of_tile(heads: int, most: int) -> int:
    """Query heads of a tile where all of them share one key head (MLA): an equal share, so that the kernel sees groups.

    Tiles of a query lie side by side in the grid, and read the same keys from the L2 cache.
    """
    return max(n for n in range(1, most + 1) if heads % n == 0)


def _paged_works(spec: AttentionSpec) -> tuple[Work, ...]:
    """Launches for requests from so many queries to so many.

    With no more queries than requests, a request with many is possible only beside others with none: that is right too,
    and not worth a launch (2 us) in every step of decoding.
    """
    if spec.config.batch_invariant:
        # One tile for decoding and prefill. Compiled for sm_90a, jax 0.10.2, D 128: 64 rows and 5 stages take 255
        # registers and 115 KB, so that two programs fit on an SM; with 7 stages 147 KB.
        choice = _prefill_tiles(spec)
        return (Work(choice.tiles, 0, _UNLIMITED, source=choice.source, fixed_splits=True),)
    work = lambda choice, least, most: Work(choice.tiles, least, most, source=choice.source)
    mean = -(-spec.T // max(spec.B, 1))
    queries = mean if mean <= MAX_DECODED else 1
    most = triton_rules.latent_rows(need_of(spec)) if spec.values_in_keys else MAX_DECODED_ROWS
    rows = min(spec.group * queries, max(most, spec.group))
    if spec.B == 1 and spec.T > MAX_DECODED:  # most likely one request with all of them, or with most
        return (work(_prefill_tiles(spec), 0, _UNLIMITED),)
    if max(spec.B, MAX_DECODED) >= spec.T:
        return (work(_paged_decode_tiles(spec, rows), 0, _UNLIMITED),)
    return (
        work(_paged_decode_tiles(spec, rows), 0, MAX_DECODED),
        work(_prefill_tiles(spec), MAX_DECODED + 1, _UNLIMITED),
    )


def _paged_decode_tiles(spec: AttentionSpec, rows: int) -> TileChoice:
    need, block_q = need_of(spec), triton_rules.decode_rows(rows)
    if spec.values_in_keys:
        made = triton_rules.latent_tiles(need, block_q)
    else:
        made = triton_rules.paged_decode_tiles(need, rows, spec.max_pages, spec.S)
    return _fit_paged(spec, made, spec.config.decode, block_q=block_q)


def _prefill_tiles(spec: AttentionSpec) -> TileChoice:
    need, given = need_of(spec), spec.config.forward
    if spec.values_in_keys:
        made = triton_rules.latent_tiles(need, triton_rules.latent_rows(need))
    else:
        made = triton_rules.paged_prefill_tiles(need)
    block_q = max((made if given is None else given).block_q, triton_rules.decode_rows(spec.group))
    return _fit_paged(spec, made, given, block_q=block_q)


def _fit_paged(spec: AttentionSpec, made: Tiles, given: Tiles | None, *, block_q: int) -> TileChoice:
    """The user's tiles or a rule's, with so many rows."""
    tiles = made if given is None else given
    if given is None:
        warps = 8 if block_q > 64 else tiles.num_warps
        capacity = fixed_splits.KEYS_OF_SPLIT if spec.config.batch_invariant else spec.S
        block_kv = min(tiles.block_kv, max(MIN_TILE, 1 << (capacity - 1).bit_length()))
        tiles = dataclasses.replace(tiles, num_warps=warps, block_kv=block_kv)
    stages = tiles.num_stages if cost.can_pipeline(spec.programs.score) else 1
    fitting = dataclasses.replace(tiles, block_q=block_q, num_stages=stages)
    if given is None and any(program is not None for program in spec.vector_programs):
        fitting = dataclasses.replace(fitting, num_stages=cost.paged_stages(spec, fitting))
    return TileChoice(fitting, "rule" if given is None else "config")


def _sizes(tiles: Tiles, source: str) -> str:
    return f"{tiles.block_q} x {tiles.block_kv} ({tiles.num_warps} warps, {tiles.num_stages} stages, by {source})"
