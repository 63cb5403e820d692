"""The dense cache of multi-head latent attention: latent vectors of a batch of sequences."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import jflex
from flax_layers.attention.caches.dense import checked_size
from flax_layers.attention.caches.owned_pages import OwnedPages, sizes_of_pages


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
        """A cache of empty sequences.

        Args:
            batch_size: B, the number of sequences.
            max_length: Capacity of each, in tokens.
            latent_size: Columns of the latent vector.
            rope_size: Columns of the rotated key.
            dtype: Floating-point, of 16 bits or more.

        Raises:
            TypeError: A size is not an integer, or the dtype is not floating-point, or has eight bits.
            ValueError: `batch_size` is negative, or another size is not positive.
        """
        if jnp.dtype(dtype).itemsize == 1:
            raise TypeError(
                f"`dtype` must be floating-point, of 16 bits or more. Got {jnp.dtype(dtype)}. A paged cache, which "
                "`init_paged_cache` makes, may hold float8_e4m3fn."
            )
        batch_size = checked_size("batch_size", batch_size, 0)
        max_length = checked_size("max_length", max_length, 1)
        pages = jflex.paged.LatentCache.create(
            *sizes_of_pages(batch_size, max_length), latent_size, rope_size, dtype=dtype
        )
        return cls(pages, jnp.zeros(batch_size, jnp.int32), max_length)

    def batch(self, queries: int) -> jflex.paged.PagedBatch:
        """The batch whose queries are the last `queries` ones of each sequence.

        Example:
            >>> cache = DenseLatentCache.create(2, 8, latent_size=4, rope_size=2, dtype=jnp.float32)
            >>> cache.with_lengths([3, 5]).batch(queries=2).qo_indptr.tolist()
            [0, 2, 4]
        """
        indptr = queries * jnp.arange(self.batch_size + 1, dtype=jnp.int32)
        return jflex.paged.PagedBatch(indptr, jnp.minimum(self.lengths, self.max_length), self.table)

    def append(self, latent: Float[Array, "B T latent"], rope_key: Float[Array, "B T rope"]) -> DenseLatentCache:
        """Appends T tokens to each sequence, as `DenseCache.append`.

        Args:
            latent: Latent vectors, which are cast to the dtype of the cache.
            rope_key: Rotated keys, which are cast, too.

        Returns:
            The cache with T more tokens in each sequence.

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
