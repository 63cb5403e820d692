"""Definition of a call of attention for the kernels: the static spec, and the operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar, cast

import jax

from pallas_kernels.config import Config
from pallas_kernels.program.build import Program
from pallas_kernels.program.vectors.vectors import VectorProgram
from pallas_kernels.types import A, Mod

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LATENT_TILE = 128  # columns of a latent vector of eight bits that share a scale


Normalize = Literal["softmax", "none"]
Compiler = Literal["pallas", "official"]
"""Triton compiler: the one bundled with Pallas, or official Triton."""
Route = Literal["interpreted", "pallas", "official"]
"""Runner of a Triton kernel: Pallas' interpreter, or code of a compiler."""


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The static part of the dropout of weights."""

    rate: float  # which share of the weights is dropped, between 0 and 1, both excluded
    mod: Mod  # which weights are kept: traced as a mask mod is

    @property
    def scale(self) -> float:
        """The factor of what is kept."""
        return 1.0 / (1.0 - self.rate)


class Programs(NamedTuple):
    """Tile programs of the mods, None where there is no mod; that of dropout is True where a weight is kept."""

    score: Program | None = None
    mask: Program | None = None
    dropout: Program | None = None


class VectorPrograms(NamedTuple):
    """Tile programs of the key and value mods of a paged call, None where there is no mod."""

    key: VectorProgram | None = None
    value: VectorProgram | None = None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The static part of a BlockMask."""

    size: tuple[int, int]  # queries and keys in a block
    batch: int  # batch size of the lists: 1 or B
    heads: int  # heads of the lists: 1 or Hq
    follow_mod: bool = False  # whether the mask mod alone defines the mask, so that lists need not be read


class Dense(NamedTuple):
    """Memory of a dense call."""

    layout: str = "BTNH"  # order of the axes of the arrays, ``"BTNH"`` or ``"BNTH"``
    blocks: Blocks | None = None  # the static part of the BlockMask; None without one
    kv_lengths: bool = False  # whether each batch entry has its own number of keys


class Paging(NamedTuple):
    """Memory of a paged call: the static part of its cache."""

    page_size: int  # keys in a page
    num_pages: int  # physical pages that a table may name (of one layer)
    dtype: str | None = None  # of keys and values with scales; None for that of the query, without scales
    layers: int = 1  # whose pages lie in one array
    hides_zeros: bool = False  # whether the mask hides nothing but zeros, so that no masked NaN reaches a sum
    values_in_keys: bool = False  # whether the values are the first Dv columns of the keys, of one key head (MLA)


class Sizes(NamedTuple):
    """Sizes of the arrays of a call.

    In a paged call, B counts requests, T packed queries, and S the keys that a request may have; its mods get the
    request as ``b`` and the index of the packed query as ``q_idx``.
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    D: int  # head size of query and key
    Dv: int  # head size of value
    Bkv: int  # batch of key and value: B, or 1 if it is shared


class Mods(NamedTuple):
    """The traced mods of a call; key and value mods of paged calls alone, because dense calls apply them before."""

    score: Mod | None = None
    mask: Mod | None = None
    key: Mod | None = None
    value: Mod | None = None
    dropout: Dropout | None = None


class Numerics(NamedTuple):
    """Dtypes and the rule from scores to results."""

    dtype: str  # of query, key and value; keys and values with scales have that of `Paging`
    scale: float  # factor of the scores
    # of query and key where these have eight bits (dense calls without gradients); None for `dtype`
    qk_dtype: str | None = None
    out_dtype: str | None = None  # of partial results of splits that are merged; None for `dtype`
    precision: str | None = None  # of GEMMs of float32; None for JAX's default
    normalize: Normalize = "softmax"  # ``"softmax"``, or ``"none"``: scores are the weights, and the lse is 0
    # row statistics besides the lse: of ``"max"`` and ``"entropy"``, in this order
    stats: tuple[Literal["max", "entropy"], ...] = ()
    sinks: bool = False  # whether each head has a sink


class Device(NamedTuple):
    """The device of a call, and the compiler of its Triton kernels."""

    platform: str
    kind: str
    compiler: Compiler = "pallas"


def is_amd(device_kind: str) -> bool:
    """True for the name of an AMD GPU, as ``"gfx942"`` or ``"AMD Instinct MI300X"``."""
    return device_kind.startswith(("gfx", "AMD"))


class Planned(NamedTuple):
    """Decisions of a plan that its kernels read; a spec without a plan has the defaults."""

    programs: Programs = Programs()  # tile programs of score mod, mask and dropout
    vector_programs: VectorPrograms = VectorPrograms()  # tile programs of key and value mod
    # whether the rows of a tile belong to several query heads (decoding packs a GQA group into a tile)
    heads_in_rows: bool = False
    pairs: bool = False  # whether a launch loads keys and values of eight bits two columns at a time, where it may


X = TypeVar("X")


def _shorthand(get: Callable[[AttentionSpec], X]) -> X:
    """A read-only attribute of `AttentionSpec`: a field of one of its parts."""
    return cast(X, property(get))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything static in a call of attention, dense or paged; hashable, so that it keys caches.

    Fields of the parts have shorthands, because kernels read them several hundred times: ``spec.T`` and ``spec.dtype``
    stand for ``spec.sizes.T`` and ``spec.numerics.dtype``.
    """

    sizes: Sizes
    numerics: Numerics
    device: Device
    mods: Mods = dataclasses.field(default_factory=Mods)
    memory: Dense | Paging = dataclasses.field(default_factory=Dense)
    config: Config = dataclasses.field(default_factory=Config)
    planned: Planned = dataclasses.field(default_factory=Planned)

    B = _shorthand(lambda spec: spec.sizes.B)
    T = _shorthand(lambda spec: spec.sizes.T)
    S = _shorthand(lambda spec: spec.sizes.S)
    Hq = _shorthand(lambda spec: spec.sizes.Hq)
    Hkv = _shorthand(lambda spec: spec.sizes.Hkv)
    D = _shorthand(lambda spec: spec.sizes.D)
    Dv = _shorthand(lambda spec: spec.sizes.Dv)
    Bkv = _shorthand(lambda spec: spec.sizes.Bkv)
    dtype = _shorthand(lambda spec: spec.numerics.dtype)
    scale = _shorthand(lambda spec: spec.numerics.scale)
    qk_dtype = _shorthand(lambda spec: spec.numerics.qk_dtype)
    out_dtype = _shorthand(lambda spec: spec.numerics.out_dtype or spec.numerics.dtype)
    precision = _shorthand(lambda spec: spec.numerics.precision)
    stats = _shorthand(lambda spec: spec.numerics.stats)
    sinks = _shorthand(lambda spec: spec.numerics.sinks)
    platform = _shorthand(lambda spec: spec.device.platform)
    device_kind = _shorthand(lambda spec: spec.device.kind)
    score_mod = _shorthand(lambda spec: spec.mods.score)
    mask_mod = _shorthand(lambda spec: spec.mods.mask)
    key_mod = _shorthand(lambda spec: spec.mods.key)
    value_mod = _shorthand(lambda spec: spec.mods.value)
    dropout = _shorthand(lambda spec: spec.mods.dropout)
    programs = _shorthand(lambda spec: spec.planned.programs)
    vector_programs = _shorthand(lambda spec: spec.planned.vector_programs)
    heads_in_rows = _shorthand(lambda spec: spec.planned.heads_in_rows)
    pairs = _shorthand(lambda spec: spec.planned.pairs)

    # Of a dense call; in a paged one, the defaults.
    layout = _shorthand(lambda spec: spec.memory.layout if isinstance(spec.memory, Dense) else "BTNH")
    blocks = _shorthand(lambda spec: spec.memory.blocks if isinstance(spec.memory, Dense) else None)
    kv_lengths = _shorthand(lambda spec: isinstance(spec.memory, Dense) and spec.memory.kv_lengths)
    values_in_keys = _shorthand(lambda spec: isinstance(spec.memory, Paging) and spec.memory.values_in_keys)
    group = _shorthand(lambda spec: spec.Hq // spec.Hkv)  # query heads for each key head
    exact = _shorthand(lambda spec: "float64" if spec.dtype == "float64" else "float32")  # dtype of scores and sums
    is_empty = _shorthand(lambda spec: 0 in (spec.B, spec.T, spec.S))  # nothing to compute
    kept_scale = _shorthand(lambda spec: 1.0 if spec.dropout is None else spec.dropout.scale)  # of weights not dropped
    block_size = _shorthand(lambda spec: None if spec.blocks is None else spec.blocks.size)  # queries, keys
    list_batch = _shorthand(lambda spec: 1 if spec.blocks is None else spec.blocks.batch)  # 1 or B
    list_heads = _shorthand(lambda spec: 1 if spec.blocks is None else spec.blocks.heads)  # 1 or Hq

    def replace(self, **fields: object) -> AttentionSpec:
        """Returns the spec with other values, each by the name of its shorthand, of `paging` or of `config`."""
        parts: dict[str, dict[str, object]] = {}
        for name, value in fields.items():
            part, field = _PLACES[name]
            parts.setdefault(part, {})[field] = value
        spec = dataclasses.replace(self, **parts.pop("spec", {}))
        changed = {part: getattr(spec, part)._replace(**values) for part, values in parts.items()}
        return dataclasses.replace(spec, **changed)

    @property
    def normalize(self) -> Normalize:
        """``"softmax"``, or ``"none"``: scores are the weights, and the lse is 0."""
        return self.numerics.normalize

    @property
    def paging(self) -> Paging | None:
        """The cache of a paged call; None for a dense one."""
        return self.memory if isinstance(self.memory, Paging) else None

    @property
    def route(self) -> Route:
        """Compiler or interpreter that runs a Triton kernel."""
        return "interpreted" if self.config.interpret else self.device.compiler

    @property
    def heads_to_divide(self) -> int:
        """Heads that devices may divide among them: key heads, each with its group; of MLA, query heads."""
        return self.Hq if self.values_in_keys else self.Hkv

    @property
    def has_latent_tiles(self) -> bool:
        """True if keys are latent vectors of eight bits: tiles of columns with a scale each, rotated columns apart."""
        return self.values_in_keys and self.paging is not None and self.paging.dtype is not None

    @property
    def paged_rows(self) -> int:
        """Rows of the pages of all layers: a key head of a token each."""
        assert self.paging is not None  # of a paged call
        return self.paging.layers * self.paging.num_pages * self.paging.page_size * self.Hkv

    @property
    def page_size(self) -> int:
        """Keys in a page."""
        assert self.paging is not None  # of a paged call
        return self.paging.page_size

    @property
    def num_pages(self) -> int:
        """Pages that a table may name."""
        assert self.paging is not None  # of a paged call
        return self.paging.num_pages

    @property
    def max_pages(self) -> int:
        """Pages that a request may have."""
        return self.S // self.page_size

    def may_hold_pairs(self, size: int, mod: object) -> bool:
        """True if a launch may load keys or values of this size, with this mod or None, as words of two columns.

        They have eight bits, which float16 holds, and the GEMMs are of 16. See `pallas_kernels.split_kv.byte_pairs`.
        """
        in_bytes = self.paging is not None and self.paging.dtype is not None
        return in_bytes and self.dtype != "float32" and mod is None and size % 2 == 0

    def holds_pairs(self, size: int, mod: object) -> bool:
        """True if the launch loads words of two columns."""
        return self.pairs and self.may_hold_pairs(size, mod)

    @property
    def needs_marks(self) -> bool:
        """True if masked NaN is kept out of all sums (`pallas_kernels.softmax.mark`)."""
        if self.programs.mask is None:  # only padding is masked, which is zeros
            return False
        if self.paging is not None:
            return not self.paging.hides_zeros
        return self.config.contain_nan or self.heads_in_rows

    @property
    def score_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the captured arrays of the score mod."""
        return () if self.score_mod is None else tuple(shape for shape, _ in self.score_mod.operands)

    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output: in the layout of the call, or [T, Hq, Dv] of a paged one."""
        return (self.T, self.Hq, self.Dv) if self.paging is not None else self.rows_shape(self.Dv)

    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the lse: [B, Hq, T], or [T, Hq] of a paged call."""
        return (self.T, self.Hq) if self.paging is not None else (self.B, self.Hq, self.T)

    def walk_passes_end(self, axis: str, tile: int) -> bool:
        """True if a walk over queries (``"q"``) or keys (``"k"``) may have tiles with padding, or of padding alone.

        Lists are walked by whole blocks: a last block that is cut short holds tiles of padding alone.
        """
        length, which = (self.T, 0) if axis == "q" else (self.S, 1)
        return length % (tile if self.block_size is None else self.block_size[which]) != 0

    def rows_shape(self, size: int) -> tuple[int, int, int, int]:
        """Shape of an array over queries, as `query`."""
        return (self.B, self.T, self.Hq, size) if self.layout == "BTNH" else (self.B, self.Hq, self.T, size)

    def keys_shape(self, size: int) -> tuple[int, int, int, int]:
        """Shape of an array over keys of the whole batch, as `key`."""
        return (self.B, self.S, self.Hkv, size) if self.layout == "BTNH" else (self.B, self.Hkv, self.S, size)


_PARTS = {"sizes": Sizes, "numerics": Numerics, "memory": Dense, "planned": Planned}
_PLACES = {field: (part, field) for part, kind in _PARTS.items() for field in kind._fields}
_PLACES |= {f"{role}_mod": ("mods", role) for role in ("score", "mask", "key", "value")}
_PLACES |= {"dropout": ("mods", "dropout"), "values_in_keys": ("memory", "values_in_keys")}
_PLACES |= {"platform": ("device", "platform"), "device_kind": ("device", "kind"), "compiler": ("device", "compiler")}
_PLACES |= {"config": ("spec", "config"), "paging": ("spec", "memory")}
"""Of each name that `AttentionSpec.replace` takes, the part and the field."""


class Captured(NamedTuple, Generic[A]):
    """Captured arrays of each mod; in kernels, booleans are int8."""

    score: tuple[A, ...] = ()
    mask: tuple[A, ...] = ()
    key: tuple[A, ...] = ()
    value: tuple[A, ...] = ()
    dropout: tuple[A, ...] = ()


class Operands(NamedTuple, Generic[A]):
    """The inputs of all kernels (in a kernel: refs to them)."""

    query: A  # [B, T, Hq, D] or [B, Hq, T, D], by the layout of the spec; of `qk_dtype`, as the key
    key: A  # [Bkv, S, Hkv, D] or [Bkv, Hkv, S, D]
    value: A  # [Bkv, S, Hkv, Dv] or [Bkv, Hkv, S, Dv]
    lists: tuple[A, ...] | None  # the eight index arrays of a block mask, or None
    captured: Captured[A]  # without arrays of key and value mods
    sinks: A | None = None  # float32 [Hq], or None; only forward kernels read them


def as_int8(x: jax.Array) -> jax.Array:
    """Booleans as int8, because GPU memory has no booleans."""
    return x.astype("int8") if x.dtype == bool else x
