"""The paged cache: keys and values of many sequences in pages of one size, which any sequence may own or share.

A *slot* holds one token; its index is ``page * page_size + offset``. Page 0 is reserved: no pool allocates it and it
holds no token of a sequence, so that padding of page tables can point to it.

After PagedAttention (Kwon et al., 2023, https://arxiv.org/abs/2309.06180, section 4).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Self, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float32, Int32, Shaped

from jflex._check.arguments import DTYPES, LARGEST, check_is_array, checked_positive, describe_array, is_eight_bits
from jflex.paged.eight_bits import check_scale, first_scale
from jflex.types import AnyArray

MAX_PAGE_SIZE = 256
_SLOT_LIMIT = 2**31


def checked_pages(num_pages: SupportsIndex, page_size: SupportsIndex) -> tuple[int, int]:
    """Number and size of pages as Python ints."""
    num_pages, page_size = checked_positive(num_pages, "num_pages"), checked_page_size(page_size)
    if num_pages * page_size >= _SLOT_LIMIT:
        raise ValueError(
            f"`num_pages` times `page_size` must be below 2**31, since slots are int32. Got {num_pages} * {page_size} "
            f"= {num_pages * page_size}. Take at most {(_SLOT_LIMIT - 1) // page_size} pages of this size."
        )
    return num_pages, page_size


def checked_page_size(page_size: SupportsIndex) -> int:
    """Tokens in a page as a Python int."""
    page_size = checked_positive(page_size, "page_size")
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"`page_size` must be 1 to {MAX_PAGE_SIZE} tokens. Got {page_size}. Take smaller pages.")
    return page_size


class PageStore:
    """Pages of tokens: `PagedCache` or `LatentCache`. Pools, batches and page tables serve both."""

    @property
    def keys(self) -> AnyArray:
        """The keys, [P, page_size, Hkv, D] or [L, P, page_size, Hkv, D]."""
        raise NotImplementedError

    @property
    def values(self) -> AnyArray:
        """The values, likewise; the keys, if these hold them."""
        raise NotImplementedError

    @property
    def scales(self) -> tuple[AnyArray | None, AnyArray | None]:
        """Scales of keys and values of eight bits; None where there are none."""
        return None, None

    @property
    def rope_keys(self) -> AnyArray | None:
        """Rotated columns of the keys that are held apart; None where there are none."""
        return None

    def map_tokens(self, function: Callable[[jax.Array], jax.Array]) -> Self:
        """The cache that a function makes of each array [*L, P, page_size, ...]."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises TypeError or ValueError unless the arrays match."""
        raise NotImplementedError

    @property
    def num_pages(self) -> int:
        """P: total pages, page 0 included."""
        return self.keys.shape[-4]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.keys.shape[-2]

    @property
    def layers(self) -> int | None:
        """L, or None for a cache without an axis of layers."""
        return self.keys.shape[0] if self.keys.ndim == 5 else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedCache(PageStore):
    """Keys and values in pages: a pytree that passes through ``jit``, ``scan`` and ``device_put``.

    `write` and `copy_pages` return a new cache, which takes the memory of the old one if that is donated to ``jit``. In
    a ``scan`` over layers, pass a stacked cache in the *carry*, and index it by `layer`: sliced as an input, it would
    be held twice by XLA.

    Attributes:
      k: Keys, [P, page_size, Hkv, D], or [L, P, page_size, Hkv, D] for L layers that share one page table.
      v: Values, the same with Dv.
      k_scale: Of keys of eight bits, float32: of each head, [Hkv] or [L, Hkv], or of each token and head, [P,
        page_size, Hkv] or [L, P, page_size, Hkv]; a key is what is held times its scale. None for other dtypes.
      v_scale: Of the values, likewise; it may be of the other kind.

    >>> cache = PagedCache.create(64, 16, 8, 128, dtype=jnp.bfloat16, layers=4)
    >>> cache.k.shape, cache.num_pages, cache.page_size, cache.num_kv_heads, cache.layers
    ((4, 64, 16, 8, 128), 64, 16, 8, 4)
    >>> cache = PagedCache.create(64, 16, 8, 128, dtype=jnp.float8_e4m3fn, v_scale=0.02)
    >>> cache.k_scale.shape, cache.v_scale.shape  # of each token and head, of each head
    ((64, 16, 8), (8,))
    """

    k: Shaped[Array, "*L P page_size Hkv D"]
    v: Shaped[Array, "*L P page_size Hkv Dv"]
    k_scale: Float32[Array, "*L_or_tokens Hkv"] | None = None
    v_scale: Float32[Array, "*L_or_tokens Hkv"] | None = None

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: DTypeLike,
        layers: int | None = None,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> PagedCache:
        """A cache of zeros.

        Args:
          num_pages: Total pages, page 0 included, which holds no tokens.
          page_size: Tokens in a page, 1 to 256.
          v_head_dim: Dv of values; None: D.
          dtype: Of keys and values: floating-point, or of eight bits with scales: ``float8_e4m3fn``, ``float8_e5m2`` or
            ``int8``.
          layers: How many layers are stacked in one cache; None for no layer axis.
          k_scale: With eight bits: one scale, or one for each key head, [Hkv] or [L, Hkv]. None: one for each token and
            head, which `write` computes.
          v_scale: Of the values, likewise.

        Raises:
          TypeError: A size is not an integer, `dtype` is another one, or a scale is not a number or does not belong to
            `dtype`.
          ValueError: A size is not positive, a page is too large, ``num_pages * page_size`` reaches ``2**31``, or a
            scale has another shape or is not positive.

        >>> PagedCache.create(10, 1, 2, 8, v_head_dim=4, dtype="float32").v.shape
        (10, 1, 2, 4)
        """
        num_pages, page_size = checked_pages(num_pages, page_size)
        heads, key_dim = checked_positive(num_kv_heads, "num_kv_heads"), checked_positive(head_dim, "head_dim")
        value_dim = key_dim if v_head_dim is None else checked_positive(v_head_dim, "v_head_dim")
        if str(jnp.dtype(dtype)) not in (*DTYPES, *LARGEST):
            raise TypeError(
                f"`dtype` must be floating-point ({', '.join(DTYPES)}), or of eight bits with scales "
                f"({', '.join(LARGEST)}). Got {jnp.dtype(dtype)}."
            )
        stack = () if layers is None else (checked_positive(layers, "layers"),)
        shape = (*stack, num_pages, page_size, heads)
        scales = (first_scale(name, x, shape, dtype) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)))
        return cls(jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype), *scales)

    @property
    def keys(self) -> Shaped[Array, "*L P page_size Hkv D"]:
        """`k`."""
        return self.k

    @property
    def values(self) -> Shaped[Array, "*L P page_size Hkv Dv"]:
        """`v`."""
        return self.v

    @property
    def scales(self) -> tuple[jax.Array | None, jax.Array | None]:
        """`k_scale` and `v_scale`."""
        return self.k_scale, self.v_scale

    def map_tokens(self, function: Callable[[jax.Array], jax.Array]) -> PagedCache:
        """A function of each array [*L, P, page_size, ...]; scales of heads stay.

        >>> cache = PagedCache.create(4, 2, 1, 1, dtype=jnp.int8, v_scale=2.0)
        >>> [x.shape for x in jax.tree.leaves(cache.map_tokens(lambda x: x[1:]))]
        [(3, 2, 1, 1), (3, 2, 1, 1), (3, 2, 1), (1,)]
        """
        scales = (function(x) if x is not None and x.shape == self.k.shape[:-1] else x for x in self.scales)
        return PagedCache(function(self.k), function(self.v), *scales)

    def check(self) -> None:
        """Raises unless keys and values match.

        Raises:
          TypeError: Their dtypes differ, or are neither floating-point nor of eight bits with scales.
          ValueError: The shapes do not match, or a scale of a head, if it is known, is not positive.

        >>> PagedCache.create(4, 2, 1, 1, dtype="float32").check()
        """
        for name, pages in (("cache.k", self.k), ("cache.v", self.v)):
            check_is_array(pages, name)
        got = f"Got k: {describe_array(self.k)}, v: {describe_array(self.v)}."
        if str(self.k.dtype) not in (*DTYPES, *LARGEST) or self.k.dtype != self.v.dtype:
            raise TypeError(
                f"`cache` must hold keys and values of one floating-point dtype ({', '.join(DTYPES)}), or of one of "
                f"eight bits ({', '.join(LARGEST)}). {got}"
            )
        if self.k.ndim not in (4, 5) or self.k.shape[:-1] != self.v.shape[:-1]:
            raise ValueError(
                "`cache` must have `k` [P, page_size, Hkv, D] and `v` [P, page_size, Hkv, Dv], both with a leading "
                f"axis of layers or neither. {got} Make one with `PagedCache.create`."
            )
        checked_pages(self.num_pages, self.page_size)
        for name, scale, pages in (("k_scale", self.k_scale, self.k), ("v_scale", self.v_scale, self.v)):
            if scale is not None or is_eight_bits(pages.dtype):
                check_scale(f"cache.{name}", scale, pages)


def checked_layer(cache: PageStore, layer: int | AnyArray | None) -> Int32[Array, ""] | None:
    """The index of a layer as a scalar int32; None for a cache without layers.

    >>> int(checked_layer(PagedCache.create(4, 2, 1, 1, dtype="float32", layers=2), 1))
    1
    """
    if (layer is None) != (cache.layers is None):
        if layer is None:
            raise ValueError(f"`layer` is missing: the cache stacks {cache.layers} layers. Pass the number of one.")
        raise ValueError(f"`layer` is {layer!r}, but the cache has no axis of layers. Leave `layer` out.")
    if layer is None:
        return None
    if isinstance(layer, jax.Array | np.ndarray) and (layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer)):
        raise TypeError(f"`layer` must be an integer, or a scalar array of one. Got {describe_array(layer)}.")
    if isinstance(layer, Tracer):
        return layer.astype(jnp.int32)
    try:
        number = None if isinstance(layer, bool) else operator.index(layer)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"`layer` must be an integer, or a scalar array of one. Got {layer!r}.")
    if not 0 <= number < (cache.layers or 0):
        raise ValueError(f"`layer` must lie within 0 and {(cache.layers or 0) - 1}, the last layer. Got {number}.")
    return jnp.int32(number)


def check_cache(cache: object, kind: type[PageStore] = PageStore) -> None:
    """Raises unless `cache` is a paged cache, or one of some kind, whose arrays match."""
    if not isinstance(cache, kind):
        raise TypeError(
            f"`cache` must be a `PagedCache`. Got {type(cache).__name__}. Make one with `PagedCache.create`, or of "
            "arrays [P, page_size, Hkv, D] with `PagedCache(k, v)`."
        )
    cache.check()
