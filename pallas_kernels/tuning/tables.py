"""Measured tiles: tables by device, which `python -m benchmarks.tune` writes and the library only reads.

A table is a JSON file with its provenance (machine, versions, date, command) and entries: a key, the tiles that won,
the microseconds that they took, and the runner-up. Keys are buckets: a table is small, and a problem that was not
measured takes the tiles of one like it; what has no entry takes a rule.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any, NamedTuple

from pallas_kernels.config import Tiles
from pallas_kernels.program.build import Program
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.tuning import triton_rules

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
    """The key of a table entry: what the choice of tiles depends on.

    Attributes:
      kernel: One of `KERNELS` or `HOPPER_KERNELS`.
      head_size: One of `HEAD_SIZES`: the first that holds both D and Dv.
      itemsize: Bytes of an element of query, key and value.
      mods: See `mods_of`.
      length: One of `LENGTHS`, of the loop.
    """

    kernel: str
    head_size: int
    itemsize: int
    mods: str
    length: str


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
    the rule's, and two float32 biases (head size 128) did not fit. Nothing was measured with dropout: compiled for
    sm_90a, the tiles of causal attention at head size 64, 128 x 128, spill 68 bytes with it.
    """
    of_score = [] if score is None else [node for node in score.nodes if node.kind == Axes.TILE]
    of_mask = [] if mask is None else [node for node in mask.nodes if node.kind == Axes.TILE]
    by_key = score is not None and any(node.kind == Axes.COLUMN for node in score.loads)
    functions = any(node.op in _FUNCTIONS for node in of_score)
    loads = [node for node in (*of_score, *of_mask) if node.op == "load"]
    if dropout is not None or by_key or len(of_score) > FEW or len(of_score) + len(of_mask) > triton_rules.HEAVY:
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
    """How long the fastest tiles took where they were measured, or None if there is no entry."""
    name = table_name(device_kind)
    found = () if name is None else read(name).get("entries", ())
    return next((entry["microseconds"] for entry in found if Key(**entry["key"]) == key), None)


@functools.cache
def entries(name: str) -> dict[Key, Tiles]:
    """All entries of a table; empty if there is no such file."""
    return {Key(**entry["key"]): Tiles(**entry["tiles"]) for entry in read(name).get("entries", ())}


def read(name: str) -> dict[str, Any]:  # JSON
    """The content of a table with its provenance."""
    file = resources.files("pallas_kernels.tuning").joinpath("tables", f"{name}.json")
    return json.loads(file.read_text()) if file.is_file() else {}
