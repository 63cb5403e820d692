"""The dense cache of eight bits: keys and values of a batch of sequences, quantised, with scales."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

import jflex
from flax_layers.attention.caches.dense import check_room, checked_size
from flax_layers.attention.caches.owned_pages import OwnedPages, sizes_of_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class EightBitCache(OwnedPages):
    """Keys and values of eight bits of B sequences, with capacity for `max_length` tokens each. A pytree.

    They are quantised as they are written, and kernels read them as they are: there is no second copy. Row `b` of the
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
            max_length: Capacity of each sequence, in tokens.
            num_kv_heads: Hkv, the number of key heads.
            head_dim: D, the size of a head.
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
        starts = tokens * jnp.arange(self.batch_size + 1, dtype=jnp.int32)
        return jflex.paged.PagedBatch(starts, self.lengths + tokens, self.table)

    def append(self, k: Float[Array, "B T Hkv D"], v: Float[Array, "B T Hkv D"]) -> EightBitCache:
        """Appends T tokens to each sequence, as `DenseCache.append`.

        Args:
            k: Keys, in bfloat16, float16 or float32.
            v: Values, in the same dtype.

        Returns:
            The cache with T more tokens in each sequence.

        Raises:
            TypeError: The dtype is another one.
            ValueError: The cache has another batch, number of heads or head size, or the tokens do not fit.

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
