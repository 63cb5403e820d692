"""The paged cache: keys and values of many sequences in pages of one size, which any sequence may own or share.

A *slot* holds one token; its index is ``page * page_size + offset``. Page 0 is reserved: no pool allocates it and it
holds no token of a sequence, so that padding of page tables can point to it.

After PagedAttention (Kwon et al., 2023, https://arxiv.org/abs/2309.06180, section 4).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jflex._call.checks import DTYPES, current_device, describe_array
from jflex.backends.xla.narrow import read, set_rows
from jflex.paged.sizes import checked_pages, checked_positive
from jflex.paged.store import PageStore
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

    >>> cache = PagedCache.create(64, 16, 8, 128, dtype=jnp.bfloat16, layers=4)
    >>> cache.k.shape, cache.num_pages, cache.page_size, cache.num_kv_heads, cache.layers
    ((4, 64, 16, 8, 128), 64, 16, 8, 4)
    """

    k: Float[Array, "*L P page_size Hkv D"]
    v: Float[Array, "*L P page_size Hkv Dv"]

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
    ) -> PagedCache:
        """A cache of zeros.

        Args:
          num_pages: Total pages, page 0 included, which holds no tokens.
          page_size: Tokens in a page, 1 to 256.
          num_kv_heads: Hkv.
          head_dim: D of keys.
          v_head_dim: Dv of values; None: D.
          dtype: Floating-point, of keys and values.
          layers: How many layers are stacked in one cache; None for no layer axis.

        Returns:
          The cache.

        Raises:
          TypeError: A size is not an integer, or `dtype` is not floating-point.
          ValueError: A size is not positive, a page is too large, or ``num_pages * page_size`` reaches ``2**31``.

        >>> PagedCache.create(10, 1, 2, 8, v_head_dim=4, dtype="float32").v.shape
        (10, 1, 2, 4)
        """
        num_pages, page_size = checked_pages(num_pages, page_size)
        heads, key_dim = checked_positive(num_kv_heads, "num_kv_heads"), checked_positive(head_dim, "head_dim")
        value_dim = key_dim if v_head_dim is None else checked_positive(v_head_dim, "v_head_dim")
        if str(jnp.dtype(dtype)) not in DTYPES:
            raise TypeError(f"`dtype` must be floating-point ({', '.join(DTYPES)}). Got {jnp.dtype(dtype)}.")
        shape = (num_pages, page_size, heads)
        if layers is not None:
            shape = (checked_positive(layers, "layers"), *shape)
        return cls(jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype))

    @property
    def keys(self) -> Float[Array, "*L P page_size Hkv D"]:
        """`k`."""
        return self.k

    @property
    def values(self) -> Float[Array, "*L P page_size Hkv Dv"]:
        """`v`."""
        return self.v

    def check(self) -> None:
        """Raises unless keys and values match.

        Raises:
          TypeError: Their dtypes differ or are not floating-point.
          ValueError: The shapes do not match.

        >>> PagedCache.create(4, 2, 1, 1, dtype="float32").check()
        """
        for name, pages in (("cache.k", self.k), ("cache.v", self.v)):
            if not (hasattr(pages, "shape") and hasattr(pages, "dtype")):
                raise TypeError(f"`{name}` must be an array. Got {type(pages).__name__}.")
        got = f"Got k: {describe_array(self.k)}, v: {describe_array(self.v)}."
        if str(self.k.dtype) not in DTYPES or self.k.dtype != self.v.dtype:
            raise TypeError(
                f"`cache` must hold keys and values of one floating-point dtype ({', '.join(DTYPES)}). {got}"
            )
        if self.k.ndim not in (4, 5) or self.k.shape[:-1] != self.v.shape[:-1]:
            raise ValueError(
                "`cache` must have `k` [P, page_size, Hkv, D] and `v` [P, page_size, Hkv, Dv], both with a leading "
                f"axis of layers or neither. {got} Make one with `PagedCache.create`."
            )
        checked_pages(self.num_pages, self.page_size)


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

    Args:
      cache: The cache.
      k: Keys of N tokens, in the dtype of the cache.
      v: Their values.
      slots: The slot of each token, ``page * page_size + offset``; `jflex.paged.slots_of` and `jflex.paged.token_slots`
        compute them from page tables. A token with slot -1, or any other outside of the cache, is dropped: slots
        neither wrap nor clamp. Slots must not repeat, except in page 0: which token is kept is undefined.
      layer: Which layer of a stacked cache, a Python int or traced; a traced one outside of the cache drops all tokens.

    Returns:
      The new cache.

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
    _check_tokens(cache, k, v, slots)
    index = slot_index(cache, slots, layer)
    return PagedCache(set_rows(cache.k, index, k), set_rows(cache.v, index, v))


def copy_pages(cache: Cache, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> Cache:
    """Copies whole pages, in all layers: required after a `PagePool.fork` that returned another page.

    All are read before any is written. Under ``jit`` with the cache donated, no second cache is made.

    Args:
      cache: The cache, a `PagedCache` or a `LatentCache`.
      src: Pages to read.
      dst: Pages to write, without duplicates. A pair with a `dst` of -1, or any other outside of the cache, is dropped,
        so that lists can be padded to a fixed length.

    Returns:
      The new cache.

    Raises:
      TypeError: `cache` is not a paged cache, or the page ids are not int32.
      ValueError: Shapes do not match; or, if values are known, a page in `src` is outside of the cache, or one in `dst`
        repeats.

    >>> cache = PagedCache(*jnp.arange(6.0).reshape(2, 3, 1, 1, 1))
    >>> copy_pages(cache, jnp.array([2, 0]), jnp.array([1, -1])).k.ravel().tolist()
    [0.0, 2.0, 2.0]
    """
    _check_pairs(cache, src, dst, "pages")
    _check_copies(src, dst, cache.num_pages)
    src, dst = jnp.asarray(src), jnp.asarray(dst)
    return jax.tree.map(lambda pages: _copied(pages, (src,), (dst,)), cache)


def copy_slots(cache: Cache, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> Cache:
    """Copies keys and values of single tokens, in all layers: such as those of an accepted branch of a drafted tree.

    All are read before any is written. Under ``jit`` with the cache donated, no second cache is made.

    Args:
      cache: The cache, a `PagedCache` or a `LatentCache`.
      src: Slots to read; one outside of the cache reads another.
      dst: Slots to write, without duplicates. A pair with a `dst` of -1, or any other outside of the cache, is dropped.

    Returns:
      The new cache.

    Raises:
      TypeError: `cache` is not a paged cache, or the slots are not int32.
      ValueError: Shapes do not match; or, if values are known, a slot in `dst` repeats.

    >>> cache = PagedCache(*jnp.arange(8.0).reshape(2, 2, 2, 1, 1))
    >>> copy_slots(cache, jnp.array([3, 2, 0]), jnp.array([2, 1, -1])).k.ravel().tolist()
    [0.0, 2.0, 3.0, 3.0]
    """
    _check_pairs(cache, src, dst, "slots")
    _check_slots_differ(dst, cache.num_pages, cache.page_size, "dst")
    split = lambda slots: (jnp.asarray(slots) // cache.page_size, jnp.asarray(slots) % cache.page_size)
    return jax.tree.map(lambda x: _copied(x, split(src), split(dst)), cache)


def slot_index(cache: PageStore, slots: Int32[AnyArray, " N"], layer: int | AnyArray | None) -> tuple[jax.Array, ...]:
    """The index of slots in the arrays of a cache, checked: layer if there is one, page, offset.

    Raises:
      TypeError: `layer` is not an integer.
      ValueError: It is missing, superfluous or, if known, outside of the cache; known `slots` repeat.

    >>> [i.tolist() for i in slot_index(PagedCache.create(4, 2, 1, 1, dtype="float32"), jnp.array([6, 3]), None)]
    [[3, 1], [0, 1]]
    """
    _check_slots_differ(slots, cache.num_pages, cache.page_size, "slots")
    slots = jnp.asarray(slots)
    index = (slots // cache.page_size, slots % cache.page_size)
    checked = checked_layer(cache, layer)
    return index if checked is None else (checked, *index)


def checked_layer(cache: PageStore, layer: int | AnyArray | None) -> Int32[Array, ""] | None:
    """The index of a layer as a scalar int32; None for a cache without layers.

    Raises:
      TypeError: `layer` is not an integer.
      ValueError: It is missing, superfluous or, if known, outside of the cache.

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
    """Raises unless `cache` is a paged cache, or one of some kind, whose arrays match.

    Raises:
      TypeError: It has another type, or its dtypes differ or are not floating-point.
      ValueError: The shapes do not match.

    >>> check_cache(PagedCache.create(4, 2, 1, 1, dtype="float32"))
    """
    if not isinstance(cache, kind):
        raise TypeError(
            f"`cache` must be a `PagedCache`. Got {type(cache).__name__}. Make one with `PagedCache.create`, or of "
            "arrays [P, page_size, Hkv, D] with `PagedCache(k, v)`."
        )
    cache.check()


def check_int32(name: str, x: object, of: str) -> None:
    """Raises TypeError unless an argument is an array of int32.

    >>> check_int32("slots", jnp.arange(3), "slots")
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"`{name}` must be an int32 array of {of}. Got {type(x).__name__}. Wrap it in `jnp.asarray(x, jnp.int32)`."
        )
    if x.dtype != jnp.int32:
        raise TypeError(
            f"`{name}` must be an int32 array of {of}. Got {describe_array(x)}. Cast it with `.astype(jnp.int32)`."
        )


def is_known(x: AnyArray) -> bool:
    """Whether the values can be read here: not those of tracers, nor of arrays spread over several hosts.

    >>> is_known(jnp.arange(3))
    True
    """
    return isinstance(x, np.ndarray) or (not isinstance(x, Tracer) and x.is_fully_addressable)


def _check_pairs(cache: PageStore, src: AnyArray, dst: AnyArray, of: str) -> None:
    check_cache(cache)
    for name, x in (("src", src), ("dst", dst)):
        check_int32(name, x, of)
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(
            f"`src` and `dst` must have one shape [M]. Got src: {describe_array(src)}, dst: {describe_array(dst)}. Pad "
            "the shorter one; a -1 in `dst` copies nothing."
        )


def _check_tokens(cache: PagedCache, k: AnyArray, v: AnyArray, slots: AnyArray) -> None:
    for name, x, pages in (("k", k, cache.k), ("v", v, cache.v)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
        if x.dtype != pages.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of the cache, {pages.dtype}. Got {describe_array(x)}. Cast it with "
                "`.astype`."
            )
        if x.ndim != 3 or x.shape[1:] != pages.shape[-2:]:
            raise ValueError(
                f"`{name}` must be [N, Hkv, {'D' if name == 'k' else 'Dv'}], with the heads of the cache: "
                f"[N, {pages.shape[-2]}, {pages.shape[-1]}]. Got {describe_array(x)}. Reshape batch and tokens to one "
                "axis."
            )
    check_int32("slots", slots, "slots")
    if not k.shape[:1] == v.shape[:1] == slots.shape:
        raise ValueError(
            "`k`, `v` and `slots` must be of the same tokens: [N, ...], [N, ...] and [N]. Got k: "
            f"{describe_array(k)}, v: {describe_array(v)}, slots: {describe_array(slots)}. Give padding the slot -1."
        )


def _check_slots_differ(slots: AnyArray, num_pages: int, page_size: int, name: str) -> None:
    """Raises if known slots repeat: such a slot would hold either token."""
    if not is_known(slots):
        return
    used, counts = np.unique(np.asarray(slots), return_counts=True)
    twice = used[(counts > 1) & (used >= page_size) & (used < num_pages * page_size)]
    if twice.size:
        raise ValueError(
            f"`{name}` must not give a slot twice. Got slot {twice[0]} (page {twice[0] // page_size}) for "
            f"{counts[used == twice[0]][0]} tokens. Give all but one of them the slot -1."
        )


def _check_copies(src: AnyArray, dst: AnyArray, num_pages: int) -> None:
    if not (is_known(src) and is_known(dst)):
        return
    src, dst = np.asarray(src), np.asarray(dst)
    inside = (dst >= 0) & (dst < num_pages)
    wrong = src[inside & ((src < 0) | (src >= num_pages))]
    if wrong.size:
        raise ValueError(f"`src` must hold pages within 0 and {num_pages - 1}, the last page. Got {wrong[0]}.")
    pages, counts = np.unique(dst[inside], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"`dst` must not hold a page twice. Got page {pages[counts > 1][0]} more than once. Replace one by -1."
        )


def _copied(x: jax.Array, src: tuple[jax.Array, ...], dst: tuple[jax.Array, ...]) -> jax.Array:
    """Copies from and to indices of pages, or of pages and offsets, in all layers."""
    layers = () if x.ndim == 4 else (jnp.arange(x.shape[0], dtype=jnp.int32)[:, None],)
    at = lambda index: (*layers, *(i[None] for i in index)) if layers else index
    part = lambda: x.at[at(src)].get(mode="clip")
    return set_rows(x, at(dst), read(part, jnp.any(dst[0] >= 0), current_device(x)[0]))
