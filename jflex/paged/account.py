"""The report of `jflex.explain` for `paged_attention`, and for each level of `cascade_attention`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jflex._call.account import NOTHING, Choice, Described, choice_of, work_of
from jflex._call.dispatch import Implementation, Selection, select
from jflex._check.arguments import known_values
from jflex.backends.base import Plan
from jflex.entry import PagedCall, no_derivative
from jflex.paged.eight_bits import ROPE_DTYPE
from pallas_kernels.spec import AttentionSpec

NOT_KNOWN = "not known (traced, or a shape alone)"


@dataclasses.dataclass(frozen=True)
class PagedAccount(Choice):
    """The plan of a call of `paged_attention`, or of a level of `cascade_attention`; ``print`` it.

    Fields that follow from lengths, boundaries or the page table are None if these are not known.

    Attributes:
      requests: Requests; for a level, groups of queries.
      queries: Rows that belong to a request.
      pages: Entries of the page table that are in use.
      different_pages: Different pages among them: fewer than `pages` if requests share pages.
      query_tiles: Query tiles of the split-KV kernels, per key head; None if keys are not split.
      splits: KV splits of these tiles, per key head, at least one per tile; None likewise.
      splits_keys: Whether the kernels can split the keys of a request among CTAs.
      flops: Floating-point operations, 2 for a multiply-add, over all keys of a query's request: the mask is not
        evaluated.
      bytes: Lower bound on the bytes moved: each query and output once, keys and values, without scales, once for each
        request.
    """

    requests: int
    rows: int
    queries: int | None
    keys: int | None
    page_size: int
    pages: int | None
    different_pages: int | None
    query_tiles: int | None
    splits: int | None
    splits_keys: bool
    flops: int | None
    bytes: int | None

    @classmethod
    def from_call(cls, call: PagedCall, implementation: Implementation) -> PagedAccount:
        """Makes the account of one call; query, key and value may be shapes."""
        spec, pages = call.spec, call.pages
        selection = select(implementation, spec)
        indptr, lengths, table = map(known_values, (pages.indptr, pages.lengths, pages.table))
        query_tiles, splits = _splits(spec, selection, indptr, lengths)
        used, different = _pages(spec.page_size, lengths, table)
        flops, moved = _work(spec, indptr, lengths)
        return cls(
            **choice_of(spec, selection, functools.partial(_describe, call.caller)),
            requests=spec.B,
            rows=spec.T,
            queries=None if indptr is None else int(indptr[-1]),
            keys=None if lengths is None else int(lengths.sum(dtype=np.int64)),
            page_size=spec.page_size,
            pages=used,
            different_pages=different,
            query_tiles=query_tiles,
            splits=splits,
            splits_keys=not spec.is_empty and selection.plan is not None and selection.plan.count_splits is not None,
            flops=flops,
            bytes=moved,
        )

    def lines(self) -> list[str]:
        """The account as lines."""
        count = lambda number, noun: f"{noun} {NOT_KNOWN}" if number is None else f"{number} {noun}"
        lines = super().lines()
        lines.append(
            f"tokens    {self.rows} rows of {self.requests} requests: {count(self.queries, 'queries')}, "
            f"{count(self.keys, 'keys')}"
        )
        different = "" if self.different_pages is None else f", {self.different_pages} different"
        used = NOT_KNOWN if self.pages is None else f"{self.pages} of {self.page_size} keys{different}"
        lines.append(f"pages     {used}")
        if self.backend is not None:
            lines.append(f"splits    {self._splits()}")
        without = "" if self.flops is None else ", ignoring the mask"
        return [*lines, f"work      {work_of(self.flops, self.bytes)}{without}"]

    def _splits(self) -> str:
        if not self.splits_keys:
            return "none: the keys of a request are not split"
        if self.splits is None:
            return NOT_KNOWN
        return f"{self.splits} of the keys of {self.query_tiles} query tiles, per key head"


@dataclasses.dataclass(frozen=True)
class CascadeAccount:
    """The plan of a call of `cascade_attention`; ``print`` it.

    Attributes:
      levels: The account of each level, in the order of the call; None for a level that is left out, because it has no
        queries or no room for keys.
      merge_bytes: Lower bound on the bytes that merging the partial outputs moves; 0 if there are not several.
      flops: Floating-point operations of all levels; None if those of one are not known.
      bytes: Lower bound on the bytes that the levels and the merge move; None likewise.
    """

    levels: tuple[PagedAccount | None, ...]
    merge_bytes: int
    flops: int | None
    bytes: int | None

    @classmethod
    def from_levels(cls, calls: Sequence[PagedCall | None], implementation: Implementation) -> CascadeAccount:
        """Makes the account of one call, from those of its levels."""
        levels = tuple(None if call is None else PagedAccount.from_call(call, implementation) for call in calls)
        merge_bytes = _merge_bytes([call.spec for call in calls if call is not None])
        run = [level for level in levels if level is not None]
        flops, moved = [level.flops for level in run], [level.bytes for level in run]
        return cls(
            levels,
            merge_bytes,
            None if None in flops else sum(n for n in flops if n is not None),
            None if None in moved else merge_bytes + sum(n for n in moved if n is not None),
        )

    @property
    def merged(self) -> int:
        """Number of computed levels; the partial outputs of several are merged."""
        return sum(level is not None for level in self.levels)

    def __str__(self) -> str:
        lines = []
        for number, level in enumerate(self.levels):
            lines.append(f"level {number}")
            lines += [f"  {line}" for line in ([f"left out: {NOTHING}"] if level is None else level.lines())]
        several = f"{self.merged} partial outputs, by XLA, {self.merge_bytes / 1e6:.3f} MB"
        lines.append(f"merge     {several if self.merged > 1 else 'none: fewer than two levels'}")
        return "\n".join([*lines, f"work      {work_of(self.flops, self.bytes)} in all"])


def _describe(caller: str, name: str, plan: Plan) -> Described:
    reason = no_derivative(caller, name)
    return Described(plan.describe(), name if reason is None else None, reason or "")


def _splits(
    spec: AttentionSpec, selection: Selection, indptr: np.ndarray | None, lengths: np.ndarray | None
) -> tuple[int | None, int | None]:
    """Query tiles, and the splits of their keys."""
    count = None if selection.plan is None else selection.plan.count_splits
    if count is None or indptr is None or lengths is None or spec.is_empty:
        return None, None
    return count(indptr, lengths)


def _pages(page_size: int, lengths: np.ndarray | None, table: np.ndarray | None) -> tuple[int | None, int | None]:
    """Entries of the table in use, and how many different pages they name."""
    if lengths is None:
        return None, None
    used = -(-lengths // page_size)
    if table is None:
        return int(used.sum()), None
    return int(used.sum()), np.unique(table[np.arange(table.shape[1]) < used[:, None]]).size


def _work(spec: AttentionSpec, indptr: np.ndarray | None, lengths: np.ndarray | None) -> tuple[int | None, int | None]:
    """Floating-point operations, and bytes."""
    if indptr is None or lengths is None:
        return None, None
    keys = lengths.astype(np.int64)
    pairs = spec.Hq * int((np.diff(indptr) * keys).sum())
    eight_bits = spec.paging is not None and spec.paging.dtype is not None
    width, out_width = (jnp.dtype(dtype).itemsize for dtype in (spec.dtype, spec.out_dtype))
    of_queries = spec.T * spec.Hq * (width * spec.D + out_width * spec.Dv)
    row = (1 if eight_bits else width) * (spec.D if spec.values_in_keys else spec.D + spec.Dv)
    if spec.has_latent_tiles:
        row = spec.Dv + jnp.dtype(ROPE_DTYPE).itemsize * (spec.D - spec.Dv)
    of_keys = int(keys[np.diff(indptr) > 0].sum()) * spec.Hkv * row
    return 2 * pairs * (spec.D + spec.Dv), of_queries + of_keys


def _merge_bytes(specs: Sequence[AttentionSpec]) -> int:
    """Bytes of the merge: reads out, lse and statistics of each level, and writes the merged ones."""
    if len(specs) < 2:
        return 0
    [first, *_] = specs
    rows, lse = first.T * first.Hq, 4 * (1 + len(first.stats))
    read = len(specs) * rows * (first.Dv * jnp.dtype(first.out_dtype).itemsize + lse)
    return read + rows * (first.Dv * jnp.dtype(first.dtype).itemsize + lse)
