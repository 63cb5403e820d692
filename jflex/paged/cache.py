"""The paged cache: keys and values of many sequences in pages of one size, which any sequence may own or share.

A *slot* holds one token; its index is ``page * page_size + offset``. Page 0 is reserved: no pool allocates it and it
holds no token of a sequence, so that padding of page tables can point to it.

After PagedAttention (Kwon et al., 2023, https://arxiv.org/abs/2309.06180, section 4).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from jflex._check.arguments import DTYPES, check_int32, checked_positive, current_device, describe_array
from jflex.backends.xla.narrow import read, set_rows
from jflex.paged.checks import check_copies, check_slots_differ, check_tokens
from jflex.paged.eight_bits import check_scale, first_scale, quantised, row_scales
from jflex.paged.store import LARGEST, PageStore, checked_pages, is_eight_bits
from jflex.types import AnyArray

Cache = TypeVar("Cache", bound=PageStore)


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
            if not (hasattr(pages, "shape") and hasattr(pages, "dtype")):
                raise TypeError(f"`{name}` must be an array. Got {type(pages).__name__}.")
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


def write(
    cache: PagedCache,
    k: Float[AnyArray, "N Hkv D"],
    v: Float[AnyArray, "N Hkv Dv"],
    slots: Int32[AnyArray, " N"],
    *,
    layer: int | Int[AnyArray, ""] | None = None,
) -> PagedCache:
    """Writes keys and values of tokens to their slots; all other slots are unchanged.

    Under ``jit`` with the cache donated, no second cache is made, whatever `layer` is.

    To a cache of eight bits a row ``x`` of a token and head is written as ``x / scale``, computed as
    ``x * (1 / scale)`` in float32, cut to the range of the dtype, and rounded to the nearest number, ties to even.
    Where the cache has a scale for each token and head, that is ``max(abs(x)) / largest``, by multiplication likewise,
    with the largest number of the dtype: 448 of ``float8_e4m3fn``, 57344 of ``float8_e5m2``, 127 of ``int8``. A row
    with NaN or an infinity then becomes NaN. With a scale of each head NaN stays NaN, but becomes 0 in ``int8``.

    Args:
      k: Keys of N tokens, in the dtype of the cache; for eight bits, in bfloat16, float16 or float32.
      slots: The slot of each token, ``page * page_size + offset``; `jflex.paged.slots_of` and `jflex.paged.token_slots`
        compute them from page tables. A token with slot -1, any other outside of the cache, or one in page 0, which
        holds no tokens, is dropped: slots neither wrap nor clamp. Other slots must not repeat: what is written is then
        undefined.
      layer: Which layer of a stacked cache, a Python int or traced; a traced one outside of the cache drops all tokens.

    Raises:
      TypeError: `cache` is not a PagedCache, dtypes differ from the cache, `slots` are not int32, or `layer` is not an
        integer.
      ValueError: Shapes do not match; `layer` is missing, superfluous or, if known, outside of the cache; known `slots`
        repeat.

    >>> cache = PagedCache.create(4, 2, 1, 1, dtype=jnp.float32)
    >>> tokens = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> step = jax.jit(write, donate_argnames="cache")
    >>> step(cache, tokens, tokens, jnp.array([6, -1, 3], jnp.int32)).k.ravel().tolist()
    [0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 1.0, 0.0]
    """
    check_cache(cache, PagedCache)
    check_tokens(cache, k, v, slots)
    index = slot_index(cache, slots, layer)
    if not is_eight_bits(cache.k.dtype):
        return PagedCache(set_rows(cache.k, index, k), set_rows(cache.v, index, v))
    k_pages, k_scale = _written(cache, cache.k, cache.k_scale, index, k)
    v_pages, v_scale = _written(cache, cache.v, cache.v_scale, index, v)
    return PagedCache(k_pages, v_pages, k_scale, v_scale)


def _written(
    cache: PagedCache, pages: jax.Array, scale: jax.Array | None, index: tuple[jax.Array, ...], rows: AnyArray
) -> tuple[jax.Array, jax.Array]:
    """Pages with new rows, quantised, and their scales."""
    assert scale is not None  # `check_cache` asks for it
    if scale.shape != pages.shape[:-1]:
        layer_scale = scale if cache.layers is None else scale.at[index[0]].get(mode="clip")
        return set_rows(pages, index, quantised(rows, layer_scale[None], pages.dtype)), scale
    scales = row_scales(rows, pages.dtype)
    return set_rows(pages, index, quantised(rows, scales, pages.dtype)), set_rows(scale, index, scales)


def copy_pages(cache: Cache, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> Cache:
    """Copies whole pages, in all layers: required after a `PagePool.fork` that returned another page.

    All are read before any is written. Under ``jit`` with the cache donated, no second cache is made.

    Args:
      cache: The cache, a `PagedCache` or a `LatentCache`.
      dst: Pages to write, without duplicates. A pair with a `dst` of -1, or any other outside of the cache, is dropped,
        so that lists can be padded to a fixed length.

    Raises:
      TypeError: `cache` is not a paged cache, or the page ids are not int32.
      ValueError: Shapes do not match; or, if values are known, a page in `src` is outside of the cache, or one in `dst`
        repeats.

    >>> cache = PagedCache(*jnp.arange(6.0).reshape(2, 3, 1, 1, 1))
    >>> copy_pages(cache, jnp.array([2, 0]), jnp.array([1, -1])).k.ravel().tolist()
    [0.0, 2.0, 2.0]
    """
    _check_pairs(cache, src, dst, "pages")
    check_copies(src, dst, cache.num_pages)
    src, dst = jnp.asarray(src), jnp.asarray(dst)
    return cache.map_tokens(lambda pages: _copied(cache, pages, (src,), (dst,)))


def copy_slots(cache: Cache, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> Cache:
    """Copies keys and values of single tokens, in all layers: such as those of an accepted branch of a drafted tree.

    All are read before any is written. Under ``jit`` with the cache donated, no second cache is made.

    Args:
      cache: The cache, a `PagedCache` or a `LatentCache`.
      src: Slots to read; one outside of the cache reads another.
      dst: Slots to write, without duplicates. A pair with a `dst` of -1, any other outside of the cache, or one in page
        0, is dropped.

    Raises:
      TypeError: `cache` is not a paged cache, or the slots are not int32.
      ValueError: Shapes do not match; or, if values are known, a slot in `dst` repeats.

    >>> cache = PagedCache(*jnp.arange(12.0).reshape(2, 3, 2, 1, 1))
    >>> copy_slots(cache, jnp.array([5, 4, 2]), jnp.array([4, 3, -1])).k.ravel().tolist()
    [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    """
    _check_pairs(cache, src, dst, "slots")
    check_slots_differ(dst, cache.num_pages, cache.page_size, "dst")
    src = jnp.asarray(src)
    taken, written = (src // cache.page_size, src % cache.page_size), _written_index(cache, dst)
    return cache.map_tokens(lambda x: _copied(cache, x, taken, written))


def slot_index(cache: PageStore, slots: Int32[AnyArray, " N"], layer: int | AnyArray | None) -> tuple[jax.Array, ...]:
    """The index of slots in the arrays of a cache, checked: layer if there is one, page, offset.

    >>> [i.tolist() for i in slot_index(PagedCache.create(4, 2, 1, 1, dtype="float32"), jnp.array([6, 3, 1]), None)]
    [[3, 1, -1], [0, 1, 1]]
    """
    check_slots_differ(slots, cache.num_pages, cache.page_size, "slots")
    index = _written_index(cache, slots)
    checked = checked_layer(cache, layer)
    return index if checked is None else (checked, *index)


def _written_index(cache: PageStore, slots: Int32[AnyArray, " N"]) -> tuple[jax.Array, jax.Array]:
    """Pages and offsets of slots to write; page -1, which is dropped, for page 0: its slots may repeat."""
    slots = jnp.asarray(slots)
    page = slots // cache.page_size
    return jnp.where(page == 0, -1, page), slots % cache.page_size


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


def _check_pairs(cache: PageStore, src: AnyArray, dst: AnyArray, content: str) -> None:
    check_cache(cache)
    for name, x in (("src", src), ("dst", dst)):
        check_int32(name, x, content)
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(
            f"`src` and `dst` must have one shape [M]. Got src: {describe_array(src)}, dst: {describe_array(dst)}. Pad "
            "the shorter one; a -1 in `dst` copies nothing."
        )


def _copied(cache: PageStore, x: jax.Array, src: tuple[jax.Array, ...], dst: tuple[jax.Array, ...]) -> jax.Array:
    """Copies from and to indices of pages, or of pages and offsets, in all layers."""
    layers = () if cache.layers is None else (jnp.arange(x.shape[0], dtype=jnp.int32)[:, None],)
    at = lambda index: (*layers, *(i[None] for i in index)) if layers else index
    part = lambda: x.at[at(src)].get(mode="clip")
    return set_rows(x, at(dst), read(part, jnp.any(dst[0] >= 0), current_device(x)[0]))
