"""`CascadeLevel`: keys that groups of packed queries share, dense or in pages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jflex._check.arguments import check_int32, checked_lengths, describe_array
from jflex.paged.batch import PagedBatch, check_fields
from jflex.paged.cache import PagedCache
from jflex.types import AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CascadeLevel:
    """Keys that groups of packed queries share: a pytree, made by `dense` or `paged`.

    Group ``g`` has the query rows ``groups.qo_indptr[g]`` up to ``groups.qo_indptr[g + 1]``, which attend to
    ``groups.kv_lengths[g]`` keys at the absolute positions ``start[g]``, ``start[g] + 1`` and so on. A row that belongs
    to no group attends to nothing on this level.

    Attributes:
      cache: Keys and values; those of `dense` are pages of S keys each, one for each group.
      groups: Which rows, how many keys, on which pages.
      start: Absolute position of the first key of each group, int32 [G].
      layer: Which layer of a stacked cache, or None.
      is_dense: Whether `dense` made it.
    """

    cache: PagedCache
    groups: PagedBatch
    start: Int32[Array, " G"]
    layer: int | Int[AnyArray, ""] | None = None
    is_dense: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def dense(
        cls,
        key: Float[AnyArray, "G S Hkv D"],
        value: Float[AnyArray, "G S Hkv Dv"],
        *,
        qo_indptr: Int32[AnyArray, " G_and_1"],
        lengths: Int32[AnyArray, " G"] | None = None,
        start: int | Int32[AnyArray, ""] | Int32[AnyArray, " G"] = 0,
    ) -> CascadeLevel:
        """A level from dense arrays.

        Args:
          key: Keys of each group.
          qo_indptr: Where the queries of each group begin, ascending from 0, and where the last ones end.
          lengths: Keys of each group, int32; S for None. Keys at or beyond the length are masked.
          start: Absolute position of the first key, for all groups or for each.

        Raises:
          TypeError: An argument is not an array of its dtype.
          ValueError: Shapes do not match.

        >>> k = v = jnp.ones((1, 8192, 8, 128), jnp.bfloat16)  # one prefix for 64 sequences of one query each
        >>> CascadeLevel.dense(k, v, qo_indptr=jnp.array([0, 64])).groups.kv_lengths.tolist()
        [8192]
        """
        shapes = [getattr(x, "shape", ()) for x in (key, value)]
        if not all(len(shape) == 4 for shape in shapes) or shapes[0][:3] != shapes[1][:3]:
            raise ValueError(
                "`key` and `value` must be arrays [G, S, Hkv, D] and [G, S, Hkv, Dv], one entry for each group. Got "
                f"shapes {shapes[0]} and {shapes[1]}. A prefix that all share is one group: add its axis with "
                "`key[None]`."
            )
        groups, length = key.shape[:2]
        filled = np.full((groups,), length, np.int32) if lengths is None else lengths
        table = np.arange(groups, dtype=np.int32)[:, None]
        batch = PagedBatch(qo_indptr, checked_lengths(filled, groups, length, "lengths"), jnp.asarray(table))
        check_fields(batch)
        key, value = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (key, value))
        return cls(PagedCache(key, value), batch, _starts(start, groups), is_dense=True)

    @classmethod
    def paged(
        cls,
        cache: PagedCache,
        groups: PagedBatch,
        *,
        start: int | Int32[AnyArray, ""] | Int32[AnyArray, " G"] = 0,
        layer: int | Int[AnyArray, ""] | None = None,
    ) -> CascadeLevel:
        """A level from pages of a cache.

        Args:
          cache: The cache; levels may share it.
          groups: For each group: its query rows, its number of keys, and the pages of these keys alone. (So a suffix
            starts on a page of its own.)
          start: Absolute position of the first key, for all groups or for each.
          layer: Which layer of a stacked cache.

        Raises:
          TypeError: An argument has a wrong type.
          ValueError: `start` has another shape, or `groups` have trees.

        >>> cache = PagedCache.create(16, 64, 8, 128, dtype=jnp.bfloat16)
        >>> prefix = PagedBatch(jnp.array([0, 4]), jnp.array([128]), jnp.array([[3, 9]]))  # four queries share it
        >>> CascadeLevel.paged(cache, prefix).start.tolist()
        [0]
        """
        if not isinstance(groups, PagedBatch):
            raise TypeError(
                f"`groups` must be a `PagedBatch`, of groups instead of requests. Got {type(groups).__name__}."
            )
        if groups.ancestors is not None:
            raise ValueError(
                "`groups` must have no `ancestors`: levels have no trees. Got some. Use `paged_attention`, or a "
                "mask_mod that says which drafted tokens a query sees."
            )
        return cls(cache, groups, _starts(start, groups.requests), layer)


def _starts(start: int | AnyArray, groups: int) -> jax.Array:
    start = np.asarray(start, np.int32) if type(start) is int else start
    check_int32("start", start, "positions")
    assert not isinstance(start, int)  # a bool was refused
    if start.shape not in ((), (groups,)):
        raise ValueError(
            f"`start` must be one position, or one for each of the {groups} groups. Got {describe_array(start)}."
        )
    return jnp.broadcast_to(jnp.asarray(start), (groups,))
