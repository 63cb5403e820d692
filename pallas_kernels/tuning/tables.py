"""Tiles by device: measured tables, and rules of the Triton kernels where no table has an entry.

`python -m benchmarks.tune` writes the tables and the library only reads them. A table is a JSON file with its
provenance (machine, versions, date, command) and entries: a key, the tiles that won, the microseconds that they took,
and the runner-up. Keys are buckets: a table is small, and a problem that was not measured takes the tiles of one like
it. Each rule has its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from importlib import resources
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.program.build import Program
from pallas_kernels.program.ir import Axes, Node, reachable
from pallas_kernels.spec import AttentionSpec

KERNELS = ("forward", "dkv", "dq")  # of Triton
HOPPER_KERNELS = ("forward_sm90", "one_pass_sm90", "dkv_sm90", "dq_sm90")  # of Mosaic GPU; one pass: dK, dV and dQ
OFFICIAL_KERNELS = tuple(f"{kernel}_official" for kernel in KERNELS)  # the same kernels, of official Triton
HEAD_SIZES = (32, 64, 80, 96, 128, 192, 256)
MODS = ("none", "arithmetic", "functions", "elements")  # and "other", of which no table has an entry
LENGTHS = ("short", "long")
FEW = 8  # tile values of a score mod; ALiBi and a soft cap have 4, and together 7
LONGEST_SHORT = 2048  # keys (for dK and dV: queries): a few tiles do not amortise the prologue and epilogue of a loop

_FUNCTIONS = frozenset({"tanh", "exp", "exp2", "log", "log1p", "logistic", "erf", "pow", "sin", "cos", "rsqrt", "sqrt"})
# The chips of one architecture with the same SMs; H200 and H100 differ in memory alone.
_SAME_AS = {"h100": "nvidia-h200", "h800": "nvidia-h200", "gh200": "nvidia-h200", "h200": "nvidia-h200"}


class Key(NamedTuple):
    """Key of a table entry: the inputs of the choice of tiles."""

    kernel: str  # one of `KERNELS` or `HOPPER_KERNELS`
    head_size: int  # one of `HEAD_SIZES`: the first that holds both D and Dv
    itemsize: int  # bytes of an element of query, key and value
    mods: str  # the kind of the mods, by `mods_of`
    length: str  # one of `LENGTHS`, of the loop


def key_of(kernel: str, head_size: int, itemsize: int, programs: tuple[Program | None, ...], length: int) -> Key:
    """The bucket of a problem, with the programs of its score mod, its mask and its dropout.

    >>> key_of("forward", 72, 2, (None, None), 4096)
    Key(kernel='forward', head_size=80, itemsize=2, mods='none', length='long')
    """
    bucket = next((size for size in HEAD_SIZES if size >= head_size), HEAD_SIZES[-1])
    return Key(kernel, bucket, itemsize, mods_of(*programs), "short" if length <= LONGEST_SHORT else "long")


def mods_of(score: Program | None, mask: Program | None, dropout: Program | None = None) -> str:
    """The bucket of mods: those that are like the measured ones, and ``"other"``.

    No score mod; a light one; one with functions such as tanh; or mods with one tile load of at most 16 bits, such as a
    pair bias. Heavier mods, more loads or gathers need other registers and more shared memory: in the tiles of a pair
    bias (head size 64) a gathered float32 table spills 444 bytes and took 5 to 10 per cent longer on an H200 than in
    the rule's. Nothing was measured with dropout, which spills 68 bytes in the tiles of causal attention.
    """
    of_score = [] if score is None else [node for node in score.nodes if node.kind == Axes.TILE]
    of_mask = [] if mask is None else [node for node in mask.nodes if node.kind == Axes.TILE]
    by_key = score is not None and any(node.kind == Axes.COLUMN for node in score.loads)
    functions = any(node.op in _FUNCTIONS for node in of_score)
    loads = [node for node in (*of_score, *of_mask) if node.op == "load"]
    if dropout is not None or by_key or len(of_score) > FEW or len(of_score) + len(of_mask) > HEAVY:
        return "other"
    if loads:
        return "elements" if len(loads) == 1 and not functions and _is_like_pair_bias(loads[0]) else "other"
    return "none" if score is None else "functions" if functions else "arithmetic"


def _is_like_pair_bias(load: Node) -> bool:
    return load.dtype.itemsize <= 2 and all(index.kind != Axes.TILE for index in load.inputs)


def table_name(device_kind: str) -> str | None:
    """The file for a device, without its ending; None if there cannot be one.

    >>> table_name("NVIDIA H200"), table_name("NVIDIA H100 80GB HBM3"), table_name("cpu")
    ('nvidia-h200', 'nvidia-h200', None)
    """
    if not device_kind.startswith("NVIDIA"):
        return None
    words = re.findall(r"[a-z0-9]+", device_kind.lower())
    return next((_SAME_AS[word] for word in words if word in _SAME_AS), "-".join(words))


def look_up(device_kind: str, key: Key) -> Tiles | None:
    """The fastest tiles measured on a device, or None if there is no entry."""
    name = table_name(device_kind)
    return None if name is None else entries(name).get(key)


def official(key: Key) -> Key:
    """The bucket of the same problem for official Triton."""
    return key._replace(kernel=f"{key.kernel}_official")


def microseconds(device_kind: str, key: Key) -> float | None:
    """Measured time of the fastest tiles, or None if there is no entry."""
    name = table_name(device_kind)
    records = () if name is None else read(name).get("entries", ())
    return next((entry["microseconds"] for entry in records if Key(**entry["key"]) == key), None)


@functools.cache
def entries(name: str) -> dict[Key, Tiles]:
    """All entries of a table; empty if there is no such file."""
    return {Key(**entry["key"]): Tiles(**entry["tiles"]) for entry in read(name).get("entries", ())}


def read(name: str) -> dict[str, Any]:  # JSON
    """The content of a table with its provenance."""
    file = resources.files("pallas_kernels.tuning").joinpath("tables", f"{name}.json")
    return json.loads(file.read_text()) if file.is_file() else {}


HEAVY = 24  # tile values of mods: with more they need the registers of a large tile


def is_heavy(score: Program | None, mask: Program | None, dropout: Program | None = None) -> bool:
    """True if mods make a large tile spill: they have tile loads, many tile values, or column loads in the score mod.

    Compiled for sm_90a at head size 64, 128 x 128, 4 warps: a table with tile loads spills 516 bytes, a float32 bias by
    key 4200; a mask by key (document ids) spills nothing.
    """
    nodes = [node for program in (score, mask, dropout) if program is not None for node in program.nodes]
    tiles = [node for node in nodes if node.kind == Axes.TILE]
    by_key = score is not None and any(node.kind == Axes.COLUMN for node in score.loads)
    return by_key or len(tiles) > HEAVY or any(node.op == "load" for node in tiles)


def can_pipeline(score: Program | None) -> bool:
    """True if the mainloop may be software-pipelined: not where a score mod indexes an array by the score.

    Such a load waits for an MMA of the same iteration, which Triton (XLA of JAX 0.11) then moves to an earlier one. On
    an H200 (bf16, tiles of 64 x 64, wgmma) dK came out wrong, by 0.25 in the mean; that the move is the cause was read
    off the PTX, where with one stage nothing is moved.
    """
    if score is None:
        return True
    return not any(score.argument("score") in reachable(load.inputs) for load in score.loads)


SHORT = 1024  # keys of a request, up to which the prologue of a deep pipeline takes longer than it saves
SHORT_WALK = 2048  # keys of a program over pages, up to which more programs on an SM save more than deep pipelines


class Need(NamedTuple):
    """Inputs of the choice of tiles."""

    head_size: int  # the larger one, D or Dv
    itemsize: int  # bytes of an element of query, key and value
    heavy: bool  # whether the mods make a large tile spill, by `is_heavy`
    score: bool  # whether there is a score mod beside a softmax, or dropout, which computes as much on each element
    # whether a CTA may have 227 KiB of shared memory (Hopper and later), or 99 (Ada; Ampere has 99 or 163)
    large_memory: bool
    in_bytes: bool = False  # whether keys and values have eight bits and are loaded two columns at a time


def need_of(spec: AttentionSpec) -> Need:
    """Properties of a call that the rules for tiles depend on."""
    return Need(
        head_size=max(spec.D, spec.Dv),
        itemsize=jnp.dtype(spec.dtype).itemsize,
        heavy=is_heavy(*spec.programs),
        score=(spec.programs.score is not None and spec.normalize == "softmax") or spec.programs.dropout is not None,
        large_memory=has_large_memory(spec.device_kind),
        in_bytes=spec.may_hold_pairs(spec.D, spec.vector_programs.key)
        and spec.may_hold_pairs(spec.Dv, spec.vector_programs.value),
    )


def has_large_memory(device_kind: str) -> bool:
    """True if a device of this name is known to have Hopper's shared memory."""
    return any(
        name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "GB200", "B300")
    )


def tiles_for(kernel: str, need: Need, rows: int) -> Tiles:
    """Tiles of a kernel: ``"forward"``, ``"decode"`` with so many rows, ``"dkv"``, ``"dq"`` or ``"tangent"``."""
    if kernel == "decode":
        return decode_tiles(need, rows)
    return {"forward": forward_tiles, "dkv": dkv_tiles, "dq": dq_tiles, "tangent": tangent_tiles}[kernel](need)


def forward_tiles(need: Need) -> Tiles:
    """Tiles of the Triton forward kernel.

    A CTA holds query, O accumulator and scores in registers, and `num_stages` tiles of key and value in shared memory,
    at occupancy 2 if possible. MMAs use wgmma from 64 rows and 4 warps on. H200, jax 0.11.2, bf16, S 16384, causal,
    ms: head size 64 (B 4, H 16) 5.47 with 128 x 128, 4 warps, 3 stages, 5.65 with 2, 5.81 with 64 x 64, 7.73 with 8
    warps; head size 128 (B 2, H 16) 4.66 with 128 x 64, 4 warps, 2 stages, 6.43 with 3, 5.44 with 128 x 128, 8 warps;
    head size 192 (H 8) 4.24 with 128 x 64, 8 warps, 6.16 with 64 x 64, 4 warps. Without Hopper's shared memory: what
    fits, unmeasured.

    Without a softmax a light score mod takes the tiles of a call without one: it holds no row_max and row_sum. Compiled
    for sm_90a, a sigmoid in 128 x 128 has 6.0 SASS instructions for each score of a full tile, and in 64 x 64 7.8.
    """
    if need.itemsize == 4:
        return Tiles(64, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 32, 4, 1)
    if not need.large_memory:
        return Tiles(64, 64, 4, 2) if need.head_size <= 128 else Tiles(32, 32, 4, 1)
    if need.head_size > 128 and need.heavy:  # tile loads need shared memory too
        return Tiles(64, 64 if need.head_size <= 192 else 32, 4, 2)
    if need.head_size > 128:
        return Tiles(128, 64, 8, 3 if need.head_size <= 192 else 2)
    stages = 3 if need.head_size <= 96 else 2
    if need.heavy or (need.score and need.head_size <= 64):
        return Tiles(64, 64, 4, stages)
    return Tiles(128, 128 if need.head_size <= 64 else 64, 4, stages)


def dkv_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dK and dV, which holds key, value and both gradients in registers.

    As above, causal, soft cap: head size 64, 9.1, 12.9 with 64 x 64, 4 warps, 3 stages, 8.9, 17.9 with 128 x 64. Head
    size 128, 8.8, 9.4 with 2 stages, 12.6, 14.6 with 3. Head size 80, causal, 5.7 with 128 x 64, 6.6 with 64 x 64. Head
    size 192, 6.8 with 32 x 64, 4 warps, 13.0 with 64 x 64, 8 warps; 256 the other way round, 11.6 and 3.7 (S 8192).
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(16, 32, 4, 1)
    if need.head_size > 128 and need.large_memory:
        return Tiles(32, 64, 4, 2) if need.head_size <= 192 else Tiles(64, 64, 8, 2)
    if need.head_size > 128:
        return Tiles(16, 32, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(32, 64, 4, 1)
    if 64 < need.head_size <= 80 and not need.heavy:
        return Tiles(128, 64, 4, 2)
    return Tiles(64, 64, 4, 3 if need.head_size <= 64 and need.large_memory else 2)


def dq_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dQ.

    As above: head size 64, 6.2, 7.3, 9.3 with 64 x 64, 4 warps, 2 stages, 6.3, 7.0, 8.7 with 128 x 64; head size 128,
    6.2, 6.6, 7.3 and 11.2, 11.9, 14.0; head size 80, causal, 4.8 and 4.1. Head size 192 (H 8), 5.9 with 64 x 32, 7.1
    with 64 x 64; head size 256 (S 8192), 2.3 with 1 stage, 2.7 with 2.
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 16, 4, 1)
    if need.head_size > 128 and need.large_memory:
        return Tiles(64, 32, 4, 2 if need.head_size <= 192 else 1)
    if need.head_size > 128:
        return Tiles(32, 16, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(64, 32, 4, 1)
    if 64 < need.head_size <= 80 and not need.heavy:
        return Tiles(128, 64, 4, 2)
    return Tiles(64, 64, 4, 2)


def tangent_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for tangents, which holds four arrays of keys for the two of the forward kernel.

    Compiled for sm_90a, causal: head size 192, 218 registers with 2 stages, 255 with 1; 256, 72 and 108 bytes spilled.
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 64 and need.large_memory else Tiles(32, 16, 4, 1)
    if not need.large_memory:
        return Tiles(64, 32, 4, 1) if need.head_size <= 64 else Tiles(32, 16, 4, 1)
    if need.head_size > 128:
        return Tiles(64, 32, 4, 2)
    return Tiles(64, 64, 4, 2) if need.head_size <= 64 else Tiles(128, 64, 8, 2)


def decode_tiles(need: Need, rows: int) -> Tiles:
    """Tiles of the split-KV decoding kernel, which packs `rows` queries into a tile and streams keys and values.

    H200, jax 0.11.2, bf16, one query, cold L2, kernels and merging in us: (B, Hq, Hkv, S, D) = (8, 32, 8, 16384, 128)
    132 with 64 keys, 4 warps, 4 stages, 134 with 3 or 5; (1, 32, 8, 65536, 128) 74.1, 74.5 with 3, 77 with 5. (4, 16,
    16, 16384, 64) 75.1 with 128 keys, 4 warps, 4 stages, 76.4 with 3, 78 with 64 keys, 1 or 2 warps.
    """
    block_q = decode_rows(rows)
    if need.itemsize == 4:
        return Tiles(block_q, 32, 4, 2 if need.head_size <= 128 else 1)
    if need.head_size > 128:
        return Tiles(block_q, 32, 4, 2)
    if not need.large_memory:
        return Tiles(block_q, 64, 2 if need.head_size <= 64 and block_q == 16 else 4, 2)
    return Tiles(block_q, 128 if need.head_size <= 64 and block_q == 16 and not need.heavy else 64, 4, 4)


def decode_rows(rows: int) -> int:
    """Rows of the tile that holds so many queries."""
    return max(16, 1 << (rows - 1).bit_length())


def paged_decode_tiles(need: Need, rows: int, pages: int, capacity: int, walked: int) -> Tiles:
    """Tiles of the paged Triton kernel for requests with few queries.

    Where pages are looked up in the mainloop, a load of keys waits for one of the page table, and the pipeline needs
    stages for both: H200, jax 0.11.2, bf16, (R, Hq, Hkv, S, D) = (32, 32, 8, 4096, 128), pages of 64, cold L2, with
    merging 138 us with 64 keys, 4 warps, 7 stages, 158 with 5. Where a program walks few keys, filling a deep pipeline
    takes longer than it saves, and more programs fit on an SM. Causal, R and S, 7 stages and 3: 64 and 1152, 93.6 and
    83.7; 128 and 2304, 289 and 281; 32 and 2304, 87.8 and 89.6; 64 and 4608, 288 and 344. At head size 64, 16 heads of
    both, 7 stages take less from 1152 keys on: R 8, 23.8 and 24.6; R 64, 88.2 and 97.7.

    A tile of keys of eight bits has twice the keys for the same bytes: H100, jax 0.11.2, 32 requests of 16384 keys, the
    same heads, e4m3 and int8 401 and 407 us with 128 keys, 4 stages, 433 and 430 with 64 keys, 6 stages; bfloat16 717.
    Of 1024 keys e4m3 43 us with 128 keys, 3 stages, 47 with 64. Head size 64: 243 us with 256 keys, 4 stages, 300 with
    64 keys, 2 warps, 7 stages. With 32 rows 453 us with 64 keys, 468 with 128. Other head sizes would spill: 80 and 96
    with 128 keys 72 bytes, 16 and 32 with 256 keys 790.

    Args:
      rows: Queries times query heads of a key head.
      pages: Pages that a request may have.
      capacity: Keys that it may have.
      walked: Keys that a program may walk.
    """
    tiles = decode_tiles(need, rows)
    if need.large_memory and need.itemsize == 2 and need.head_size <= 128:
        keys = {128: 128, 64: 256}.get(-(-need.head_size // 32) * 32)
        if need.in_bytes and tiles.block_q == 16 and keys is not None:
            return Tiles(tiles.block_q, keys, 4, 4 if capacity > SHORT else 3)
        block_kv, warps = (64, 2) if need.head_size <= 64 and tiles.block_q == 16 else (64, 4)
        is_short = capacity <= SHORT if need.head_size <= 64 else walked <= SHORT_WALK
        return Tiles(tiles.block_q, block_kv, warps, 3 if pages == 1 or is_short else 7)
    return dataclasses.replace(tiles, num_stages=2 * tiles.num_stages + 1) if pages > 1 else tiles


def latent_rows(need: Need) -> int:
    """The most rows of a tile of MLA: their queries and outputs of 576 and 512 columns fill memory and registers."""
    return 64 if need.large_memory and need.itemsize == 2 else 32 if need.itemsize == 2 else 16


def latent_tiles(need: Need, rows: int) -> Tiles:
    """Tiles of the paged Triton kernel over a latent cache.

    Compiled for sm_90a, jax 0.10.2, latent and rope size 512 and 64, causal: 64 rows by 32 keys, 8 warps, 3 stages
    spill 116 bytes, with 64 keys 356, with 4 warps 7512; 16 rows by 64 keys 68 with 4 warps, none with 8.

    Args:
      rows: Queries times query heads.
    """
    if not need.large_memory or need.itemsize == 4:
        return Tiles(rows, 16 if need.itemsize == 4 else 32, 8, 2 if need.large_memory else 1)
    return Tiles(rows, 32, 8, 3) if rows > 32 else Tiles(rows, 64, 8, 5)


def paged_prefill_tiles(need: Need) -> Tiles:
    """Tiles of the paged Triton kernel for requests with many queries.

    64 rows: each row needs indices of its own, for which tiles of 128 rows have no registers. H200,
    jax 0.11.2, bf16, 2048 causal queries at the end of 8192 keys, Hq 32, Hkv 8, D 128, the kernel alone: 548 us with 64
    x 64, 4 warps, 5 stages, 669 with 3; 606 with 128 x 64, 8 warps, 5 stages; 686 with 4 warps, 3 stages.
    """
    tiles = forward_tiles(need)
    if need.itemsize == 4 or need.head_size > 128 or not need.large_memory:
        return tiles
    return Tiles(64, 64, 4, 5)
