"""Writing to the pages of a cache: keys and values of tokens, copies of pages and of slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32

from jflex._check.arguments import check_int32, current_device, describe_array, is_eight_bits, known_values
from jflex.backends.xla.narrow import read, set_rows
from jflex.paged.cache import PagedCache, PageStore, check_cache, checked_layer
from jflex.paged.eight_bits import WRITTEN, quantized, row_scales
from jflex.types import AnyArray

Cache = TypeVar("Cache", bound=PageStore)


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
    heads, D, Dv = cache.num_kv_heads, cache.k.shape[-1], cache.v.shape[-1]
    rule = "with the heads of the cache: "
    keys = TokenRows(k, (heads, D), f"[N, Hkv, D], {rule}[N, {heads}, {D}]")
    values = TokenRows(v, (heads, Dv), f"[N, Hkv, Dv], {rule}[N, {heads}, {Dv}]")
    check_rows("write", {"k": keys, "v": values}, slots, cache.k.dtype)
    index = slot_index(cache, slots, layer)
    if not is_eight_bits(cache.k.dtype):
        return PagedCache(set_rows(cache.k, index, k), set_rows(cache.v, index, v))
    k_pages, k_scale = _written(cache, cache.k, cache.k_scale, index, k)
    v_pages, v_scale = _written(cache, cache.v, cache.v_scale, index, v)
    return PagedCache(k_pages, v_pages, k_scale, v_scale)


def _written(
    cache: PagedCache, pages: jax.Array, scale: jax.Array | None, index: tuple[jax.Array, ...], rows: AnyArray
) -> tuple[jax.Array, jax.Array]:
    """Pages with new rows, quantized, and their scales."""
    assert scale is not None  # `check_cache` asks for it
    if scale.shape != pages.shape[:-1]:
        layer_scale = scale if cache.layers is None else scale.at[index[0]].get(mode="clip")
        return set_rows(pages, index, quantized(rows, layer_scale[None], pages.dtype)), scale
    scales = row_scales(rows, pages.dtype)
    return set_rows(pages, index, quantized(rows, scales, pages.dtype)), set_rows(scale, index, scales)


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
    _check_copies(src, dst, cache.num_pages)
    src, dst = jnp.asarray(src), jnp.asarray(dst)
    return cache.map_tokens(lambda pages: _copied(cache, pages, (src,), (dst,)))


def copy_slots(cache: Cache, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> Cache:
    """Copies keys and values of single tokens, in all layers: such as those of an accepted branch of a drafted tree.

    All are read before any is written. Under ``jit`` with the cache donated, no second cache is made.

    Args:
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
    _check_slots_differ(dst, cache.num_pages, cache.page_size, "dst")
    src = jnp.asarray(src)
    taken, written = (src // cache.page_size, src % cache.page_size), _written_index(cache, dst)
    return cache.map_tokens(lambda x: _copied(cache, x, taken, written))


def slot_index(cache: PageStore, slots: Int32[AnyArray, " N"], layer: int | AnyArray | None) -> tuple[jax.Array, ...]:
    """The index of slots in the arrays of a cache, checked: layer if there is one, page, offset.

    >>> [i.tolist() for i in slot_index(PagedCache.create(4, 2, 1, 1, dtype="float32"), jnp.array([6, 3, 1]), None)]
    [[3, 1, -1], [0, 1, 1]]
    """
    _check_slots_differ(slots, cache.num_pages, cache.page_size, "slots")
    index = _written_index(cache, slots)
    checked = checked_layer(cache, layer)
    return index if checked is None else (checked, *index)


def _written_index(cache: PageStore, slots: Int32[AnyArray, " N"]) -> tuple[jax.Array, jax.Array]:
    """Pages and offsets of slots to write; page -1, which is dropped, for page 0: its slots may repeat."""
    slots = jnp.asarray(slots)
    page = slots // cache.page_size
    return jnp.where(page == 0, -1, page), slots % cache.page_size


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


class TokenRows(NamedTuple):
    """An argument of tokens to write."""

    array: AnyArray
    shape: tuple[int, ...]  # the axes after that of the tokens
    rule: str  # these axes, for messages


def check_rows(writer: str, rows: Mapping[str, TokenRows], slots: AnyArray, dtype: DTypeLike) -> None:
    """Raises unless two arguments, by name, fit a cache of a dtype, and have as many tokens as there are slots."""
    for name, (x, shape, rule) in rows.items():
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
        if is_eight_bits(dtype):
            if str(x.dtype) not in WRITTEN:
                raise TypeError(
                    f"`{name}` must be one of {', '.join(WRITTEN)}: the cache holds {dtype} with scales, and "
                    f"`{writer}` rounds to it. Got {describe_array(x)}. Pass what is not yet quantized."
                )
        elif x.dtype != dtype:
            raise TypeError(
                f"`{name}` must have the dtype of the cache, {dtype}. Got {describe_array(x)}. Cast it with `.astype`."
            )
        if x.shape[1:] != shape:
            raise ValueError(f"`{name}` must be {rule}. Got {describe_array(x)}. Reshape batch and tokens to one axis.")
    check_int32("slots", slots, "slots")
    (first, x), (second, y) = ((name, argument.array) for name, argument in rows.items())
    if not x.shape[:1] == y.shape[:1] == slots.shape:
        raise ValueError(
            f"`{first}`, `{second}` and `slots` must be of the same tokens: [N, ...], [N, ...] and [N]. Got {first}: "
            f"{describe_array(x)}, {second}: {describe_array(y)}, slots: {describe_array(slots)}. Give padding the "
            "slot -1."
        )


def _check_slots_differ(slots: AnyArray, num_pages: int, page_size: int, name: str) -> None:
    """Raises ValueError if known slots repeat: such a slot would hold either token."""
    known = known_values(slots)
    if known is None:
        return
    used, counts = np.unique(known, return_counts=True)
    twice = used[(counts > 1) & (used >= page_size) & (used < num_pages * page_size)]
    if twice.size:
        raise ValueError(
            f"`{name}` must not give a slot twice. Got slot {twice[0]} (page {twice[0] // page_size}) for "
            f"{counts[used == twice[0]][0]} tokens. Give all but one of them the slot -1."
        )


def _check_copies(src: AnyArray, dst: AnyArray, num_pages: int) -> None:
    """Raises ValueError if known pages are read outside of the cache, or written twice."""
    sources, targets = known_values(src), known_values(dst)
    if sources is None or targets is None:
        return
    inside = (targets >= 0) & (targets < num_pages)
    wrong = sources[inside & ((sources < 0) | (sources >= num_pages))]
    if wrong.size:
        raise ValueError(f"`src` must hold pages within 0 and {num_pages - 1}, the last page. Got {wrong[0]}.")
    pages, counts = np.unique(targets[inside], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"`dst` must not hold a page twice. Got page {pages[counts > 1][0]} more than once. Replace one by -1."
        )
