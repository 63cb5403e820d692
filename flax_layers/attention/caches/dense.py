"""The dense cache: keys and values of a batch of sequences, with a row for each."""

from __future__ import annotations

import dataclasses
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.sampling import checked_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DenseCache:
    """Keys and values of B sequences, with capacity for `max_length` tokens each. A pytree.

    `append` returns a new cache. Donate the old one to `jit`, so that the new one reuses its memory.

    Attributes:
        k: Keys. Positions at or after the length of a sequence hold arbitrary values, which are never attended to.
        v: Values, in the same layout.
        lengths: Number of tokens of each sequence.

    Example:
        >>> cache = DenseCache.create(batch_size=2, max_length=64, num_kv_heads=4, head_dim=16, dtype=jnp.bfloat16)
        >>> cache.k.shape, cache.lengths.tolist()
        ((2, 64, 4, 16), [0, 0])
    """

    k: Float[Array, "B max_length Hkv D"]
    v: Float[Array, "B max_length Hkv D"]
    lengths: Int32[Array, " B"]

    @classmethod
    def create(
        cls, batch_size: int, max_length: int, num_kv_heads: int, head_dim: int, *, dtype: DTypeLike
    ) -> DenseCache:
        """A cache of empty sequences.

        Args:
            batch_size: B, the number of sequences.
            max_length: Capacity of each, in tokens.
            num_kv_heads: Hkv, the number of key heads.
            head_dim: D, the size of a head.
            dtype: Dtype of keys and values, floating-point, of 16 bits or more.

        Raises:
            TypeError: A size is not an integer, or the dtype is not floating-point or has eight bits.
            ValueError: `batch_size` is negative, or another size is not positive.
        """
        sizes = {"max_length": max_length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        shape = (checked_size("batch_size", batch_size, 0), *(checked_size(*size, 1) for size in sizes.items()))
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            raise TypeError(
                f"`dtype` must be floating-point, of 16 bits or more. Got {jnp.dtype(dtype)}. An `EightBitCache` holds "
                "eight bits, with scales."
            )
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[:1], jnp.int32))

    @property
    def batch_size(self) -> int:
        """B."""
        return self.k.shape[0]

    @property
    def max_length(self) -> int:
        """Capacity of each sequence, in tokens."""
        return self.k.shape[1]

    def append(self, k: Float[Array, "B T Hkv D"], v: Float[Array, "B T Hkv D"]) -> DenseCache:
        """Appends T tokens to each sequence; in place under `jit` with the cache donated.

        Traced lengths cannot be checked: tokens beyond `max_length` are dropped, and other tokens do not change.

        Args:
            k: Keys, which are cast to the dtype of the cache.
            v: Values, which are cast, too.

        Raises:
            ValueError: The cache has another batch, number of heads or head size, or the tokens do not fit.

        Example:
            >>> cache = DenseCache.create(2, 4, num_kv_heads=1, head_dim=1, dtype=jnp.float32).with_lengths([0, 2])
            >>> tokens = jnp.array([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1, 1)
            >>> cache = jax.jit(DenseCache.append, donate_argnums=0)(cache, tokens, tokens)
            >>> cache.k[..., 0, 0].tolist(), cache.lengths.tolist()
            ([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0]], [2, 4])
        """
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (self.batch_size, *self.k.shape[2:]) or x.shape != k.shape:
                batch, _, heads, size = self.k.shape
                raise ValueError(
                    f"`{name}` must be [{batch}, T, {heads}, {size}], with batch, heads and head size of the cache. "
                    f"Got {list(x.shape)}. Make the cache with `layer.init_cache(batch_size, max_length)`."
                )
        tokens = k.shape[1]
        check_room(self.lengths, self.max_length, tokens)
        row = jnp.arange(self.batch_size, dtype=jnp.int32)[:, None]
        position = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
        # A scatter: `dynamic_update_slice` would move tokens that do not fit onto earlier ones.
        write = lambda x, new: jflex.set_rows(x, (row, position), new.astype(x.dtype))
        return DenseCache(write(self.k, k), write(self.v, v), self.lengths + tokens)

    def with_lengths(self, lengths: Int32[Array, " B"] | list[int]) -> DenseCache:
        """The cache with new lengths: drops tokens from the end of each sequence.

        Use it for rejected speculated tokens, or for the padding of prompts that were appended as one array.

        Args:
            lengths: New lengths, one for each sequence. Traced lengths are not checked.

        Raises:
            ValueError: There is not one length for each sequence, or one is out of range.

        Example:
            >>> cache = DenseCache.create(2, 8, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
            >>> cache.with_lengths([3, 5]).lengths.tolist()
            [3, 5]
        """
        return dataclasses.replace(self, lengths=checked_lengths(lengths, self.batch_size, self.max_length))

    def block_mask(
        self, mask_mod: jflex.MaskMod, tokens: int, *, block_size: int | tuple[int, int] = 128
    ) -> jflex.BlockMask:
        """The BlockMask of the next tokens and the cache. Only the listed blocks are read.

        Make it before the tokens are appended, once for all layers that share the mask. The lengths may be traced.

        Args:
            mask_mod: A mask of positions in whole sequences, as for training.
            tokens: Number of tokens that are appended to each sequence.
            block_size: Block size of queries and keys, one number or a pair.

        Returns:
            The mask of `tokens` queries and `max_length` keys for each sequence.

        Example:
            >>> from jflex.masks import sliding_window
            >>> cache = DenseCache.create(1, 1024, num_kv_heads=1, head_dim=1, dtype=jnp.float32).with_lengths([700])
            >>> cache.block_mask(sliding_window(99), tokens=1).to_dense()[0, 0].tolist()  # keys 601 to 700
            [[0, 0, 0, 0, 1, 1, 0, 0]]
        """
        mod = jflex.with_offset(mask_mod, self.lengths)
        return jflex.create_block_mask(mod, self.batch_size, None, tokens, self.max_length, block_size=block_size)


def checked_lengths(lengths: Array | list[int], batch_size: int, max_length: int) -> Int32[Array, " B"]:
    """New lengths of the sequences of a cache, checked as by `DenseCache.with_lengths`.

    Example:
        >>> checked_lengths([3, 5], batch_size=2, max_length=8).tolist()
        [3, 5]
    """
    new = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    new = new if new.size else new.astype(np.int32)  # an empty list has no integers
    if new.shape != (batch_size,) or not jnp.issubdtype(new.dtype, jnp.integer):
        raise ValueError(
            f"`lengths` must be {batch_size} integers, one for each sequence of the cache. Got "
            f"{new.dtype}{list(new.shape)}."
        )
    values = known(new)
    if values is not None and values.size and not 0 <= values.min() <= values.max() <= max_length:
        raise ValueError(f"`lengths` must lie within 0 and `max_length`, {max_length}. Got {values.tolist()}.")
    return jnp.asarray(new, jnp.int32)


def check_room(lengths: Int32[Array, " B"], max_length: int, tokens: int) -> None:
    """Raises ValueError if so many more tokens do not fit into a cache, as far as lengths are known."""
    values = known(lengths)
    used = int(values.max()) if values is not None and values.size else 0
    if used + tokens > max_length:
        raise ValueError(
            f"The cache has room for {max_length} tokens per sequence. Its longest has {used}, and {tokens} "
            "more do not fit. Make it with a larger `max_length`, or drop tokens with `cache.with_lengths`."
        )


def known(x: Array | np.ndarray) -> np.ndarray | None:
    """The values; None for tracers and for arrays that are not fully addressable in this process."""
    is_known = isinstance(x, np.ndarray) or (not isinstance(x, Tracer) and x.is_fully_addressable)
    return np.asarray(x) if is_known else None


def checked_size(name: str, size: SupportsIndex, least: int) -> int:
    """A size as a Python int. Raises TypeError if it is no integer, and ValueError if it is below `least`."""
    number = checked_integer(name, size)
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}. Got {number}.")
    return number
