"""What defines a call of attention for the kernels: the static spec, and the operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, Protocol

import jax
from jax.extend import core

from pallas_kernels.config import Config
from pallas_kernels.program.build import Program
from pallas_kernels.program.vectors.vectors import VectorProgram
from pallas_kernels.types import A

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LATENT_TILE = 128  # columns of a latent vector of eight bits that share a scale


Role = Literal["score", "mask", "key", "value"]
Compiler = Literal["pallas", "official"]
"""Who compiles Triton kernels: the Triton that Pallas brings, or official Triton."""
Route = Literal["interpreted", "pallas", "official"]
"""Who runs a Triton kernel: Pallas' interpreter, or what a compiler has made."""


class Mod(Protocol):
    """A traced mod: static, hashable, equal to those of the same program and the same shapes.

    Attributes:
      role: ``"score"``, ``"mask"``, ``"key"`` or ``"value"``.
      fingerprint: The program as text; what equality compares.
      operands: Shape and dtype of each captured array.
      jaxpr: Takes ``(score,) b, h, q_idx, kv_idx`` and the captured arrays, and returns one scalar; of a key or a value
        mod ``vector, b, h_kv, kv_idx`` and the captured arrays, and returns a vector like the one it takes.
      source: The user's function, for messages; equal mods may come from different ones.
    """

    @property
    def role(self) -> Role: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def operands(self) -> tuple[tuple[tuple[int, ...], str], ...]: ...  # noqa: D102
    @property
    def jaxpr(self) -> core.ClosedJaxpr: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    def __call__(self, operands: Sequence[jax.Array], *arguments: jax.Array) -> jax.Array: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The static part of the dropout of weights.

    Attributes:
      rate: Which share of the weights is dropped, between 0 and 1, both excluded.
      mod: Which weights are kept: traced as a mask mod is.
    """

    rate: float
    mod: Mod

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
    """The static part of a BlockMask.

    Attributes:
      size: Queries and keys in a block.
      batch: Batch size of the lists: 1 or B.
      heads: Heads of the lists: 1 or Hq.
    """

    size: tuple[int, int]
    batch: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Paging:
    """The static part of a paged cache.

    Attributes:
      page_size: Keys in a page.
      num_pages: Physical pages that a table may name (of one layer).
      dtype: Of keys and values with scales; None for that of the query, without scales.
      layers: Whose pages lie in one array.
      hides_zeros: Whether the mask hides nothing but zeros, so that no masked NaN reaches a sum.
    """

    page_size: int
    num_pages: int
    dtype: str | None = None
    layers: int = 1
    hides_zeros: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything static in a call of attention, dense or paged; hashable, so that it keys caches.

    In a paged call, B counts requests, T packed queries, and S the keys that a request may have; its mods get the
    request as ``b`` and the index of the packed query as ``q_idx``.

    Attributes:
      B: Batch.
      T: Queries.
      S: Keys.
      Hq: Query heads.
      Hkv: Key heads.
      D: Head size of query and key.
      Dv: Head size of value.
      Bkv: Batch of key and value: B, or 1 if it is shared.
      dtype: Of query, key and value; keys and values with scales have that of `paging`.
      scale: Of the scores.
      qk_dtype: Of query and key where these have eight bits (dense calls without gradients); None for `dtype`.
      score_mod: The traced score mod.
      mask_mod: The traced mask.
      key_mod: The traced key mod of a paged call; that of a dense call is applied before.
      value_mod: Likewise.
      platform: Of the device.
      device_kind: Of the device.
      config: The user's settings.
      layout: ``"BTNH"`` or ``"BNTH"``.
      blocks: Of a BlockMask, or None without one.
      paging: Of a paged cache, or None.
      out_dtype: Of the output; that of query, except for partial results of splits that are merged.
      precision: Of GEMMs of float32; None for JAX's default.
      kv_lengths: Whether each batch entry has its own number of keys.
      sinks: Whether each head has a sink.
      heads_in_rows: Whether the rows of a tile belong to several query heads (decoding packs a GQA group into a tile).
      dropout: Of the weights, or None.
      normalize: ``"softmax"``, or ``"none"``: scores are the weights, and the lse is 0.
      values_in_keys: Whether the values are the first Dv columns of the keys, of one key head (MLA); paged calls only.
      compiler: Of Triton kernels.
      stats: Row statistics besides the lse: of ``"max"`` and ``"entropy"``, in this order.
      programs: The tile programs of the mods, once a plan has made them.
      vector_programs: Those of the key and value mods.
      pairs: Whether a launch loads keys and values of eight bits two columns at a time, where it may.
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    Bkv: int
    dtype: str
    scale: float
    platform: str
    device_kind: str
    qk_dtype: str | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    key_mod: Mod | None = None
    value_mod: Mod | None = None
    config: Config = dataclasses.field(default_factory=Config)
    layout: str = "BTNH"
    blocks: Blocks | None = None
    paging: Paging | None = None
    out_dtype: str = ""
    precision: str | None = None
    kv_lengths: bool = False
    sinks: bool = False
    heads_in_rows: bool = False
    dropout: Dropout | None = None
    normalize: Literal["softmax", "none"] = "softmax"
    values_in_keys: bool = False
    stats: tuple[Literal["max", "entropy"], ...] = ()
    compiler: Compiler = "pallas"
    programs: Programs = dataclasses.field(default_factory=Programs)
    vector_programs: VectorPrograms = dataclasses.field(default_factory=VectorPrograms)
    pairs: bool = False

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)

    @property
    def route(self) -> Route:
        """Who runs a Triton kernel."""
        return "interpreted" if self.config.interpret else self.compiler

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.Hq // self.Hkv

    @property
    def heads_to_divide(self) -> int:
        """Heads that devices may divide among them: key heads, each with its group; of MLA, query heads."""
        return self.Hq if self.values_in_keys else self.Hkv

    @property
    def has_latent_tiles(self) -> bool:
        """Whether keys are latent vectors of eight bits: tiles of columns with a scale each, rotated columns apart."""
        return self.values_in_keys and self.paging is not None and self.paging.dtype is not None

    @property
    def exact(self) -> str:
        """The dtype of scores and sums."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.B, self.T, self.S)

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Queries and keys in a block of the mask's lists, or None without lists."""
        return None if self.blocks is None else self.blocks.size

    @property
    def list_batch(self) -> int:
        """Batch of the lists: 1 or B."""
        return 1 if self.blocks is None else self.blocks.batch

    @property
    def list_heads(self) -> int:
        """Heads of the lists: 1 or Hq."""
        return 1 if self.blocks is None else self.blocks.heads

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

    @property
    def contains_nan(self) -> bool:
        """Whether masked NaN is kept out of all sums (`pallas_kernels.softmax`)."""
        if self.paging is not None:
            return not self.paging.hides_zeros
        return self.config.contain_nan or self.heads_in_rows

    @property
    def needs_marks(self) -> bool:
        """Whether sums are marked (`pallas_kernels.softmax`): without a mask only padding is masked, which is zeros."""
        return self.programs.mask is not None and self.contains_nan

    @property
    def kept_scale(self) -> float:
        """The factor of weights that dropout keeps; 1 without dropout."""
        return 1.0 if self.dropout is None else self.dropout.scale

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
        """Whether a walk over queries (``"q"``) or keys (``"k"``) may have tiles with padding, or of padding alone.

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


class Operands(NamedTuple, Generic[A]):
    """The inputs of all kernels (in a kernel: refs to them).

    Attributes:
      query: [B, T, Hq, D] or [B, Hq, T, D], by the layout of the spec; of `qk_dtype`, as the key.
      key: [Bkv, S, Hkv, D] or [Bkv, Hkv, S, D].
      value: [Bkv, S, Hkv, Dv] or [Bkv, Hkv, S, Dv].
      lists: The eight index arrays of a block mask, or None.
      score_operands: Captured arrays of the score mod; booleans as int8.
      mask_operands: Captured arrays of the mask mod; booleans as int8.
      dropout_operands: Captured arrays of the mod of dropout.
      sinks: float32 [Hq], or None; only forward kernels read them.
    """

    query: A
    key: A
    value: A
    lists: tuple[A, ...] | None
    score_operands: tuple[A, ...]
    mask_operands: tuple[A, ...]
    dropout_operands: tuple[A, ...] = ()
    sinks: A | None = None


def as_int8(x: jax.Array) -> jax.Array:
    """Booleans as int8, because GPU memory has no booleans."""
    return x.astype("int8") if x.dtype == bool else x
