"""The paged cache of multi-head latent attention: one vector of a token for all heads, which is key and value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32, Int, Int32

from jflex._check.arguments import DTYPES, check_is_array, checked_positive, describe_array
from jflex.backends.xla.narrow import set_rows
from jflex.paged.cache import PageStore, check_cache, checked_pages
from jflex.paged.eight_bits import (
    ROPE_DTYPE,
    TILES_DTYPE,
    check_latent_size,
    check_tiles,
    has_tiles,
    quantized_tiles,
    tile_scales,
)
from jflex.paged.write import TokenRows, check_rows, slot_index
from jflex.types import AnyArray
from pallas_kernels.spec import LATENT_TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LatentCache(PageStore):
    """Latent vectors in pages: what `jflex.mla_attention` reads, a pytree as `PagedCache`.

    A row is the latent vector of a token, then its rotated key, which all heads share: 512 and 64 columns in
    DeepSeek-V2 and V3. The whole row is the key; its latent columns are the value too. So a token takes 576 elements,
    where 8 key heads of size 128 take 2048.

    With ``float8_e4m3fn``, latent vectors have eight bits, and each tile of 128 columns a scale, a power of two. The
    rotated key is held apart, in bfloat16: the row that FlashMLA has for DeepSeek-V3.2, 656 bytes for 512 and 64
    columns, in three arrays.

    `jflex.paged.write_latent` writes it; `PagePool`, `PagedBatch`, `copy_pages` and `copy_slots` serve it as they serve
    a `PagedCache`.

    Attributes:
      rows: [P, page_size, 1, W], or [L, P, page_size, 1, W] for L layers that share one page table. Of eight bits, the
        latent columns alone.
      rope_size: Columns of the rotated key, the last ones; the first ``W - rope_size`` are the latent vector.
      rope: The rotated keys of a cache of eight bits, [P, page_size, 1, rope_size] or with a leading axis of layers;
        None for other dtypes, whose `rows` hold them.
      scale: Of each token and tile of 128 latent columns, [P, page_size, tiles], likewise; a latent vector is what is
        held times its scales.

    References:
      DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    >>> cache = LatentCache.create(64, 64, 512, 64, dtype=jnp.bfloat16, layers=4)
    >>> cache.rows.shape, cache.latent_size, cache.num_pages, cache.page_size, cache.layers
    ((4, 64, 64, 1, 576), 512, 64, 64, 4)
    >>> cache = LatentCache.create(64, 64, 512, 64, dtype=jnp.float8_e4m3fn)
    >>> cache.rows.shape, cache.scale.shape, cache.rope.shape, sum(x[0, 0].nbytes for x in jax.tree.leaves(cache))
    ((64, 64, 1, 512), (64, 64, 4), (64, 64, 1, 64), 656)
    """

    rows: Float[Array, "*L P page_size 1 W"]
    rope_size: int = dataclasses.field(metadata={"static": True})
    rope: BFloat16[Array, "*L P page_size 1 rope"] | None = None
    scale: Float32[Array, "*L P page_size tiles"] | None = None

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        latent_size: int,
        rope_size: int,
        *,
        dtype: DTypeLike,
        layers: int | None = None,
    ) -> LatentCache:
        """A cache of zeros.

        Args:
          num_pages: Total pages, page 0 included, which holds no tokens.
          page_size: Tokens in a page, 1 to 256.
          latent_size: Columns of the latent vector; with eight bits a multiple of 128.
          rope_size: Columns of the rotated key, at least 1.
          dtype: Floating-point, or ``float8_e4m3fn`` for latent vectors of eight bits, with scales.
          layers: How many layers are stacked in one cache; None for no layer axis.

        Raises:
          TypeError: A size is not an integer, or `dtype` is another one.
          ValueError: A size is not positive, a page is too large, ``num_pages * page_size`` reaches ``2**31``, or the
            latent size is not a multiple of 128 with eight bits.

        >>> LatentCache.create(10, 1, 8, 4, dtype="float32").rows.shape
        (10, 1, 1, 12)
        """
        num_pages, page_size = checked_pages(num_pages, page_size)
        latent, rope = checked_positive(latent_size, "latent_size"), checked_positive(rope_size, "rope_size")
        if str(jnp.dtype(dtype)) not in (*DTYPES, TILES_DTYPE):
            raise TypeError(
                f"`dtype` must be floating-point ({', '.join(DTYPES)}), or {TILES_DTYPE}, with scales. Got "
                f"{jnp.dtype(dtype)}."
            )
        shape = (*(() if layers is None else (checked_positive(layers, "layers"),)), num_pages, page_size)
        if not has_tiles(dtype):
            return cls(jnp.zeros((*shape, 1, latent + rope), dtype), rope)
        check_latent_size(latent)
        scale = jnp.ones((*shape, latent // LATENT_TILE), jnp.float32)
        return cls(jnp.zeros((*shape, 1, latent), dtype), rope, jnp.zeros((*shape, 1, rope), ROPE_DTYPE), scale)

    @property
    def keys(self) -> Float[Array, "*L P page_size 1 W"]:
        """`rows`."""
        return self.rows

    @property
    def values(self) -> Float[Array, "*L P page_size 1 W"]:
        """`rows`: their latent columns are the values."""
        return self.rows

    @property
    def scales(self) -> tuple[jax.Array | None, jax.Array | None]:
        """`scale`, of keys and values alike: the second is None."""
        return self.scale, None

    @property
    def rope_keys(self) -> BFloat16[Array, "*L P page_size 1 rope"] | None:
        """`rope`."""
        return self.rope

    def map_tokens(self, function: Callable[[jax.Array], jax.Array]) -> LatentCache:
        """A function of `rows`, and of `rope` and `scale` if there are any.

        >>> LatentCache.create(4, 2, 8, 4, dtype="float32").map_tokens(lambda x: x[1:]).num_pages
        3
        """
        return jax.tree.map(function, self)

    @property
    def latent_size(self) -> int:
        """Columns of the latent vector."""
        return self.rows.shape[-1] - (self.rope_size if self.rope is None else 0)

    @property
    def row_size(self) -> int:
        """W: columns of the latent vector and of the rotated key."""
        return self.latent_size + self.rope_size

    def check(self) -> None:
        """Raises unless the rows are those of a latent cache.

        Raises:
          TypeError: They are no array, or neither floating-point nor of eight bits with scales.
          ValueError: The shapes do not fit.

        >>> LatentCache.create(4, 2, 8, 4, dtype="float32").check()
        """
        check_is_array(self.rows, "cache.rows")
        got = f"Got rows: {describe_array(self.rows)}, rope_size: {self.rope_size}."
        if str(self.rows.dtype) not in (*DTYPES, TILES_DTYPE):
            raise TypeError(
                f"`cache` must hold rows of a floating-point dtype ({', '.join(DTYPES)}), or of {TILES_DTYPE} with "
                f"scales. {got}"
            )
        most = None if has_tiles(self.rows.dtype) else self.rows.shape[-1]  # columns of a row, with the rotated ones
        fits = self.rope_size > 0 and (most is None or self.rope_size < most)
        if self.rows.ndim not in (4, 5) or self.rows.shape[-2] != 1 or not fits:
            raise ValueError(
                "`cache` must have `rows` [P, page_size, 1, W], or these with a leading axis of layers, and a "
                f"`rope_size` of 1 to W - 1. {got} Make one with `LatentCache.create`."
            )
        check_tiles(self.rows, self.rope_size, self.rope, self.scale)
        checked_pages(self.num_pages, self.page_size)


def write_latent(
    cache: LatentCache,
    latent: Float[AnyArray, "N latent"],
    rope_key: Float[AnyArray, "N rope"],
    slots: Int32[AnyArray, " N"],
    *,
    layer: int | Int[AnyArray, ""] | None = None,
) -> LatentCache:
    """Writes the rows of tokens to their slots; all other slots are unchanged.

    Under ``jit`` with the cache donated, no second cache is made.

    To a cache of ``float8_e4m3fn`` a tile of 128 latent columns is written divided by its scale, in float32, rounded to
    the nearest number, ties to even. The scale is the least power of two with which no magnitude exceeds 448, at least
    ``2**-126``; a tile with NaN or an infinity becomes NaN. Rotated keys are rounded to bfloat16.

    Args:
      latent: The latent vectors of N tokens, normalized as the model does it, in the dtype of the cache; for eight
        bits, in bfloat16, float16 or float32.
      rope_key: Their rotated keys, likewise.
      slots: The slot of each token, as in `jflex.paged.write`; one outside of the cache or in page 0 drops its token.
      layer: Which layer of a stacked cache, a Python int or traced.

    Raises:
      TypeError: `cache` is not a LatentCache, dtypes differ, `slots` are not int32, or `layer` is not an integer.
      ValueError: Shapes do not match; `layer` is missing, superfluous or, if known, outside of the cache; known `slots`
        repeat.

    >>> cache = LatentCache.create(4, 2, 2, 1, dtype=jnp.float32)
    >>> cache = write_latent(cache, jnp.ones((1, 2)), jnp.full((1, 1), 5.0), jnp.array([6]))
    >>> cache.rows[3, 0, 0].tolist()
    [1.0, 1.0, 5.0]
    """
    check_latent_cache(cache)
    latent_size, rope_size, rule = cache.latent_size, cache.rope_size, "as the rows of the cache are divided"
    rows = {
        "latent": TokenRows(latent, (latent_size,), f"[N, {latent_size}], {rule}"),
        "rope_key": TokenRows(rope_key, (rope_size,), f"[N, {rope_size}], {rule}"),
    }
    check_rows("write_latent", rows, slots, cache.rows.dtype)
    index = slot_index(cache, slots, layer)
    if cache.rope is None or cache.scale is None:
        rows = jnp.concatenate([latent, rope_key], axis=1)[:, None]
        return LatentCache(set_rows(cache.rows, index, rows), cache.rope_size)
    scale = tile_scales(latent)
    rows = set_rows(cache.rows, index, quantized_tiles(latent, scale)[:, None])
    rope = set_rows(cache.rope, index, jnp.asarray(rope_key).astype(ROPE_DTYPE)[:, None])
    return LatentCache(rows, cache.rope_size, rope, set_rows(cache.scale, index, scale))


def check_latent_cache(cache: object) -> None:
    """Raises unless `cache` is a LatentCache whose rows fit."""
    if not isinstance(cache, LatentCache):
        raise TypeError(
            f"`cache` must be a `LatentCache`. Got {type(cache).__name__}. Make one with `LatentCache.create`."
        )
    check_cache(cache)
