"""Dense caches on pages: a row of the batch owns its pages for good, so that calls over them are paged ones."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.attention.caches.dense import check_room, checked_lengths, checked_size

PAGE_SIZE = 64  # keys that kernels read at once


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedPages:
    """Sequences of a batch on pages of their own, in order, from page 1 on: `DenseLatentCache` or `EightBitCache`."""

    pages: jflex.paged.PagedCache | jflex.paged.LatentCache
    lengths: Int32[Array, " B"]
    max_length: int = dataclasses.field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def table(self) -> Int32[Array, "B pages"]:
        """The pages of each sequence."""
        pages = -(-self.max_length // self.pages.page_size)
        return 1 + jnp.arange(self.batch_size * pages, dtype=jnp.int32).reshape(self.batch_size, pages)

    def with_lengths(self, lengths: Int32[Array, " B"] | list[int]) -> Self:
        """The cache with new lengths: drops tokens from the end of each sequence, as `DenseCache.with_lengths`.

        Example:
            >>> from flax_layers.nnx import EightBitCache
            >>> cache = EightBitCache.create(2, 8, num_kv_heads=1, head_dim=1, dtype=jnp.float8_e5m2)
            >>> cache.with_lengths([3, 5]).lengths.tolist()
            [3, 5]
        """
        return dataclasses.replace(self, lengths=checked_lengths(lengths, self.batch_size, self.max_length))

    def next_slots(self, tokens: int) -> Int32[Array, " N"]:
        """The slots of that many more tokens of each sequence, packed; -1, which is dropped, beyond `max_length`.

        Raises:
            ValueError: They do not fit, as far as lengths are known.

        Example:
            >>> from flax_layers.nnx import EightBitCache
            >>> cache = EightBitCache.create(2, 8, num_kv_heads=1, head_dim=1, dtype=jnp.int8).with_lengths([3, 5])
            >>> cache.next_slots(2).tolist()
            [11, 12, 21, 22]
        """
        check_room(self.lengths, self.max_length, tokens)
        at = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        slots = jflex.paged.slots_of(self.table, at, self.pages.page_size)
        return jnp.where(at < self.max_length, slots, -1).reshape(-1)

    def _batch(self, queries: int, lengths: Int32[Array, " B"]) -> jflex.paged.PagedBatch:
        """The batch of so many queries of each sequence, packed sequence by sequence."""
        indptr = queries * jnp.arange(self.batch_size + 1, dtype=jnp.int32)
        return jflex.paged.PagedBatch(indptr, lengths, self.table)


def sizes_of_pages(batch_size: int, max_length: int) -> tuple[int, int]:
    """Pages, page 0 included, and the size of a page, for so many sequences of so many tokens.

    Example:
        >>> sizes_of_pages(2, 100), sizes_of_pages(2, 8)
        ((5, 64), (3, 8))
    """
    page_size = min(PAGE_SIZE, max_length)
    return 1 + batch_size * -(-max_length // page_size), page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class EightBitCache(OwnedPages):
    """Keys and values of eight bits of B sequences, with capacity for `max_length` tokens each. A pytree.

    They are quantized as they are written, and kernels read them as they are: there is no second copy. Row `b` of the
    batch owns `ceil(max_length / page_size)` pages of `pages`, in order, from page `1 + b * ceil(...)` on, so that a
    call is one of `jflex.paged_attention`.

    Attributes:
        pages: Keys, values and their scales.
        lengths: Number of tokens of each sequence.
        max_length: Capacity of each sequence, in tokens.

    Example:
        >>> cache = EightBitCache.create(2, 100, num_kv_heads=4, head_dim=16, dtype=jnp.int8)
        >>> cache.pages.k.shape, cache.pages.k_scale.shape, cache.lengths.tolist()
        ((5, 64, 4, 16), (5, 64, 4), [0, 0])
    """

    pages: jflex.paged.PagedCache

    @classmethod
    def create(
        cls,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> EightBitCache:
        """A cache of empty sequences.

        Args:
            batch_size: B, and the other sizes, as for `DenseCache.create`.
            dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
            k_scale: One scale of the keys, or one for each head, [Hkv]. Default: one for each token and head, made from
                the largest magnitude of its row.
            v_scale: Scale of the values, in the same forms.

        Raises:
            TypeError: A size is not an integer, the dtype is another one, or a scale is not a number.
            ValueError: `batch_size` is negative, another size is not positive, there are ``2**31`` tokens, or a scale
                has another shape or is not positive.
        """
        if not has_eight_bits(dtype):
            raise TypeError(
                f"`dtype` must be `float8_e4m3fn`, `float8_e5m2` or `int8`. Got {jnp.dtype(dtype)}. Make a "
                "`DenseCache`."
            )
        rows, length = checked_size("batch_size", batch_size, 0), checked_size("max_length", max_length, 1)
        pages = jflex.paged.PagedCache.create(
            *sizes_of_pages(rows, length), num_kv_heads, head_dim, dtype=dtype, k_scale=k_scale, v_scale=v_scale
        )
        return cls(pages, jnp.zeros(rows, jnp.int32), length)

    def next_tokens(self, tokens: int) -> jflex.paged.PagedBatch:
        """The batch of a call that appends tokens to each sequence, packed sequence by sequence.

        Raises:
            ValueError: The tokens do not fit, as far as lengths are known.

        Example:
            >>> cache = EightBitCache.create(2, 100, num_kv_heads=1, head_dim=8, dtype=jnp.int8).with_lengths([3, 70])
            >>> batch = cache.next_tokens(2)
            >>> batch.qo_indptr.tolist(), batch.kv_lengths.tolist(), batch.page_table.tolist()
            ([0, 2, 4], [5, 72], [[1, 2], [3, 4]])
        """
        check_room(self.lengths, self.max_length, tokens)
        return self._batch(tokens, self.lengths + tokens)

    def append(self, k: Float[Array, "B T Hkv D"], v: Float[Array, "B T Hkv D"]) -> EightBitCache:
        """Appends T tokens to each sequence, as `DenseCache.append`; `k` and `v` in bfloat16, float16 or float32.

        Raises:
            TypeError: The dtype is another one.
            ValueError: Shapes or lengths do not fit, as for `DenseCache.append`.

        Example:
            >>> cache = EightBitCache.create(2, 4, num_kv_heads=1, head_dim=1, dtype=jnp.int8).with_lengths([0, 2])
            >>> tokens = jnp.array([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1, 1)
            >>> cache = jax.jit(EightBitCache.append, donate_argnums=0)(cache, tokens, tokens)
            >>> cache.pages.k[1:, ..., 0, 0].tolist(), cache.lengths.tolist()  # each token has its own scale
            ([[127, 127, 0, 0], [0, 0, 127, 127]], [2, 4])
        """
        rows = self.batch_size
        if k.ndim != 4 or k.shape[0] != rows or v.shape != k.shape:
            raise ValueError(
                f"`k` and `v` must be [{rows}, T, Hkv, D], with the batch of the cache. Got {list(k.shape)} and "
                f"{list(v.shape)}. Make the cache with `layer.init_cache(batch_size, max_length)`."
            )
        slots = self.next_slots(k.shape[1])
        packed = lambda x: x.reshape(slots.size, *x.shape[2:])
        pages = jflex.paged.write(self.pages, packed(k), packed(v), slots)
        return dataclasses.replace(self, pages=pages, lengths=self.lengths + k.shape[1])


def has_eight_bits(dtype: DTypeLike) -> bool:
    """Tests whether numbers of this dtype have eight bits."""
    return jnp.dtype(dtype).itemsize == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DenseLatentCache(OwnedPages):
    """Latent vectors of B sequences, with capacity for `max_length` tokens each. A pytree.

    The pages of a sequence lie side by side, so one page table, which never changes, serves `jflex.mla_attention`.
    `append` returns a new cache. Donate the old one to `jit`, so that the new one reuses its memory.

    Attributes:
        pages: The rows. Those at or after the length of a sequence hold arbitrary values, which are never attended to.
        lengths: Number of tokens of each sequence.
        max_length: Capacity of each sequence, in tokens.

    Example:
        >>> cache = DenseLatentCache.create(2, 100, latent_size=512, rope_size=64, dtype=jnp.bfloat16)
        >>> cache.pages.rows.shape, cache.table.tolist(), cache.lengths.tolist()
        ((5, 64, 1, 576), [[1, 2], [3, 4]], [0, 0])
    """

    pages: jflex.paged.LatentCache

    @classmethod
    def create(
        cls, batch_size: int, max_length: int, *, latent_size: int, rope_size: int, dtype: DTypeLike
    ) -> DenseLatentCache:
        """A cache of empty sequences; other arguments, and errors, are as for `DenseCache.create`.

        Args:
            latent_size: Columns of the latent vector.
            rope_size: Columns of the rotated key.
        """
        if jnp.dtype(dtype).itemsize == 1:
            raise TypeError(
                f"`dtype` must be floating-point, of 16 bits or more. Got {jnp.dtype(dtype)}. A paged cache, which "
                "`init_paged_cache` makes, may hold float8_e4m3fn."
            )
        rows, length = checked_size("batch_size", batch_size, 0), checked_size("max_length", max_length, 1)
        pages = jflex.paged.LatentCache.create(*sizes_of_pages(rows, length), latent_size, rope_size, dtype=dtype)
        return cls(pages, jnp.zeros(rows, jnp.int32), length)

    def batch(self, queries: int) -> jflex.paged.PagedBatch:
        """The batch whose queries are the last `queries` ones of each sequence.

        Example:
            >>> cache = DenseLatentCache.create(2, 8, latent_size=4, rope_size=2, dtype=jnp.float32)
            >>> cache.with_lengths([3, 5]).batch(queries=2).qo_indptr.tolist()
            [0, 2, 4]
        """
        return self._batch(queries, jnp.minimum(self.lengths, self.max_length))

    def append(self, latent: Float[Array, "B T latent"], rope_key: Float[Array, "B T rope"]) -> DenseLatentCache:
        """Appends T tokens to each sequence, as `DenseCache.append`.

        Args:
            latent: Latent vectors, which are cast to the dtype of the cache.
            rope_key: Rotated keys, which are cast, too.

        Raises:
            ValueError: The cache has another batch or other sizes, or the tokens do not fit.

        Example:
            >>> cache = DenseLatentCache.create(2, 4, latent_size=1, rope_size=1, dtype=jnp.float32)
            >>> cache = cache.with_lengths([0, 2])
            >>> tokens = jnp.array([[[1.0], [2.0]], [[3.0], [4.0]]])
            >>> cache.append(tokens, -tokens).pages.rows[1:, :, 0, 0].tolist()
            [[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0]]
        """
        sizes = {"latent": self.pages.latent_size, "rope_key": self.pages.rope_size}
        for (name, size), x in zip(sizes.items(), (latent, rope_key), strict=True):
            if x.ndim != 3 or (x.shape[0], x.shape[2]) != (self.batch_size, size) or x.shape[1] != latent.shape[1]:
                raise ValueError(
                    f"`{name}` must be [{self.batch_size}, T, {size}], with batch and sizes of the cache. Got "
                    f"{list(x.shape)}. Make the cache with `layer.init_cache(batch_size, max_length)`."
                )
        tokens = latent.shape[1]
        slots = self.next_slots(tokens)
        flat = lambda x: x.astype(self.pages.rows.dtype).reshape(slots.size, x.shape[-1])
        pages = jflex.paged.write_latent(self.pages, flat(latent), flat(rope_key), slots)
        return dataclasses.replace(self, pages=pages, lengths=self.lengths + tokens)

    def rows(self) -> Float[Array, "B S W"]:
        """The rows of each sequence, up to the capacity of its pages."""
        rows = self.pages.rows[self.table]
        return rows.reshape(self.batch_size, -1, rows.shape[-1])
