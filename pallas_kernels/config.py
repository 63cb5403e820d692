"""Tile sizes that a user may set instead of the tuned ones."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile of one kernel.

    Attributes:
      block_q: Queries in a tile. The forward kernel of `mosaic_gpu` also takes 192, with 12 warps.
      block_kv: Keys in a tile. That kernel also takes 192, with 128 queries and 8 warps.
      num_warps: Warps that share a tile (GPU kernels only).
      num_stages: Depth of the software pipeline over the loop (GPU kernels only). The kernels of `triton` take 1 where
        a score mod indexes an array by the score, which Triton does not pipeline rightly.

    Raises:
      ValueError: A size is not a positive integer, or not a power of two where the hardware wants one.

    >>> Tiles(128, 64, num_warps=8)
    Tiles(block_q=128, block_kv=64, num_warps=8, num_stages=2)
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"`{field.name}` of a `Tiles` must be a positive integer. Got {size!r}.")
            is_of_three = (self.block_q, self.num_warps) == (192, 12) and (field.name != "block_kv" or size == 96)
            is_wide = (self.block_q, self.block_kv, self.num_warps) == (128, 192, 8)
            if field.name != "num_stages" and size & (size - 1) and not (is_of_three or is_wide):
                raise ValueError(
                    f"`{field.name}` of a `Tiles` must be a power of two. Got {size}; the nearest are "
                    f"{1 << (size.bit_length() - 1)} and {1 << size.bit_length()}."
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.block_q, self.block_kv


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of the kernels of one call; jflex chooses a field that is None.

    Attributes:
      forward: Tile of the forward kernel.
      dkv: Tile of the backward kernel that computes dK and dV.
      dq: Tile of the backward kernel that computes dQ.
      decode: Tile of the kernel for few queries, which runs where it can unless `forward` is set. Its `block_q` is not
        used: the tile holds the queries of all query heads that share a key head.
      deterministic: The same bits from run to run of a compiled call, of the output and of all gradients. Kernels could
        add faster in any order: `mosaic_gpu` then computes the gradient of the query by a kernel of its own, and
        gradients of captured arrays at positions that repeat are sorted before they are added. Gradients of captured
        arrays that are read by query and key at once, and the same elements repeatedly (a table of distances), are
        refused by the GPU kernels, and by ``"reference"`` on a GPU those of all captured arrays; ``"xla"`` adds them
        in order, but for mods that read an array at an index that uses the score.
      batch_invariant: The same bits for a request, whatever else is in the batch. Promised for output and lse of
        `flex_attention`, `paged_attention`, `mla_attention` and `cascade_attention`, for calls that differ in the
        number of batch entries or requests, in what these hold, in lengths, in the room for keys (`S` with
        `kv_lengths`, or the width of page tables), in the place in the batch, and in where pages lie. Also for how many
        tokens of a request `paged_attention` and `mla_attention` get at once: a token that is prefilled in one chunk,
        in several, or decoded has the same bits. And for how many requests of a cascade share a level.
        Not promised: the same bits by another implementation, by another of these functions, with and without a
        cascade, by another version of JAX, on another device, with other settings, mods, sizes of heads, pages or
        blocks of the mask, for another number of queries of a dense call, for gradients, and for what XLA computes
        around the call. Keys are divided into splits of 1024, whose sums are added in ascending order, and tiles do
        not depend on the batch: those of `forward` for all queries of pages. Backends are chosen without looking at
        the batch. Refused: ``"entropy"`` of `return_stats` by splits, latent pages by `mosaic_gpu`, ``"xla"`` except
        on a CPU, and ``"reference"``.
      contain_nan: Keep NaN (and infinity) that a mask hides out of all sums: a key or value that no query may attend to
        reaches neither output nor gradient. A second launch computes tiles again whose sums are not finite. Where all
        are, it takes a masked call 3 us forward and 12 to 22 us backward: 0.8 to 2.6 % of sequences of 16384 tokens,
        1 to 6 % of 256 to 1024 (H200, bf16, 16 heads, `mosaic_gpu`). False saves that, where arrays are known to be
        finite. Decoding and paged attention, ``"xla"`` and ``"reference"`` contain it always.
      forward_mode: Derivatives of `flex_attention`, `flex_attention_varlen` and layers in forward mode too: `jax.jvp`,
        `jax.linearize`, `jax.jacfwd`, and `jax.jvp` of a gradient or tangent, so `jax.hessian`. Gradients are computed
        as without it. Tangents are computed by kernels of ``"mosaic_gpu"`` and ``"triton"``, or by ``"xla"``, second
        derivatives by ``"xla"`` on every device, in linear memory; a mod with a `jax.custom_vjp` has none. Without it
        the call is a `jax.custom_vjp`.
      interpret: Run the GPU kernels on the CPU by Pallas' interpreter: slow, for tests. The bits of a row of a GEMM may
        then depend on its place in the tile.

    Raises:
      TypeError: A tile is not a `Tiles`.

    >>> Config(forward=Tiles(64, 64)).dq is None
    True
    """

    forward: Tiles | None = None
    dkv: Tiles | None = None
    dq: Tiles | None = None
    decode: Tiles | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    contain_nan: bool = True
    forward_mode: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "dkv", "dq", "decode"):
            tiles = getattr(self, name)
            if tiles is not None and not isinstance(tiles, Tiles):
                raise TypeError(f"`{name}` of a `Config` must be a `Tiles`, as `Tiles(64, 64)`. Got {tiles!r}.")
