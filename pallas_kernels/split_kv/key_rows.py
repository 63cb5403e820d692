"""Tiles of keys and values of a request, loaded from the pages that hold them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.spec import LATENT_TILE, AttentionSpec
from pallas_kernels.split_kv import byte_pairs
from pallas_kernels.split_kv.work import PagedOperands, WorkItem
from pallas_kernels.triton.head_chunks import Columns, chunks, key_chunks, plain_chunks
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.triton.vectors import PreparedVectors
from pallas_kernels.types import Index, Ref


class KeyRows(NamedTuple):
    """Pages and rows of a tile of keys."""

    spec: AttentionSpec
    h: Index
    first: jax.Array  # the logical position of the first key
    exists: jax.Array  # which keys lie before the request's length, [count]
    page: jax.Array  # physical page of all of them, or of each, [count]
    row: jax.Array  # the first row within the page, or that of each key
    may_end: bool  # whether the tile may reach past the request's length

    @classmethod
    def look_up(
        cls,
        spec: AttentionSpec,
        arrays: PagedOperands[Ref],
        work_item: WorkItem,
        h: Index,
        first: jax.Array,
        count: int,
        *,
        may_end: bool,
    ) -> KeyRows:
        """Looks up the pages of `count` keys from the logical position `first` on."""
        page_size = spec.page_size
        position = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
        exists = position < work_item.length
        if spec.max_pages == 1:
            assert work_item.page is not None  # the one of the request
            page, row = work_item.page, first
        elif page_size % count == 0:
            page, row = arrays.table[(work_item.request, lax.div(first, page_size))], lax.rem(first, page_size)
        else:
            at = arrays.table.at[(work_item.request, lax.div(position, page_size))]
            page = runner_of(spec).load(at, mask=exists if may_end else None)
            row = lax.rem(position, page_size)
        page = jnp.minimum(jnp.maximum(page, 0), spec.num_pages - 1) + arrays.first_page[0]
        return cls(spec, h, first, exists, page, row, may_end)

    def load_scaled(
        self, ref: Ref, scales: Ref | None, mod: PreparedVectors | None, *, weighs: bool = False
    ) -> tuple[Columns, jax.Array | None]:
        """Rows of key or value, and what is left to multiply scores or weights by: None, a scalar or [count].

        The scales of keys multiply the scores, and those of values the weights: fewer than the elements of the rows,
        which are then only cast. Under a mod they multiply the rows, and so do those of values in a float16 call that
        loads no pairs: float16 holds no small weights. `weighs` says that the rows are values.
        """
        scale, spec = self._scales(scales), self.spec
        if spec.holds_pairs(spec.Dv if weighs else spec.D, None if mod is None else mod.program):
            return tuple(
                x for chunk in chunks(ref.shape[3]) for x in byte_pairs.columns_of(spec, self._load_chunk(ref, *chunk))
            ), scale
        on_rows = mod is not None or (weighs and self.spec.dtype == "float16")
        return (self._load(ref, mod, scale), None) if on_rows else (self._load(ref, mod, None), scale)

    def load_latents(self, arrays: PagedOperands[Ref]) -> tuple[Columns, tuple[jax.Array, ...] | None]:
        """Latent vectors of eight bits and their rotated columns, and the scales of tiles of columns, [count] each.

        The scales are None where they have multiplied the rows already: they are powers of two, which round none.
        """
        spec, columns = self.spec, []
        pairs = spec.holds_pairs(spec.Dv, None)
        assert arrays.key_scale is not None  # what has tiles has them
        assert arrays.rope_key is not None
        scales = tuple(
            self._scales_at(arrays.key_scale, jnp.full((), tile, jnp.int32)) for tile in range(spec.Dv // LATENT_TILE)
        )
        width = arrays.key.shape[3] // len(scales)
        for tile, scale in enumerate(scales):
            rows = self._load_chunk(arrays.key, tile * width, width)
            if pairs:
                columns += byte_pairs.columns_of(spec, rows)
            else:
                columns.append(runner_of(spec).computed_once(functools.partial(self._scaled, rows, scale)))
        for first, width in chunks(spec.D - spec.Dv):
            columns.append(self._load_chunk(arrays.rope_key, first, width).astype(spec.dtype))
        return tuple(columns), scales if pairs else None

    def _scales(self, ref: Ref | None) -> jax.Array | None:
        """The scale of the head, a scalar, or of each key, [count]: zeros past the request's length; None without."""
        if ref is None:
            return None
        return ref[self.h] if len(ref.shape) == 1 else self._scales_at(ref, self.h)

    def _scales_at(self, ref: Ref, column: Index) -> jax.Array:
        """A column of the scales of each key, [count]: zeros past the request's length."""
        row = lax.broadcasted_iota(jnp.int32, self.exists.shape, 0) + self.row if self._is_one_page else self.row
        mask = self.exists if self.may_end else None
        return runner_of(self.spec).load(ref.at[(self.page, row, column)], mask=mask)

    def _load(self, ref: Ref, mod: PreparedVectors | None, scale: jax.Array | None) -> Columns:
        """Rows [count, D or Dv], multiplied by a scale, and as a mod makes them; zeros past the request's length."""
        if mod is None:
            pieces = key_chunks(self.spec) if self.spec.values_in_keys else plain_chunks(ref.shape[3])
            return tuple(self._scaled(self._load_chunk(ref, first, width), scale) for first, width, _ in pieces)
        position = self.first + lax.broadcasted_iota(jnp.int32, (self.exists.shape[0], 1), 0)
        if self.may_end:  # indices of captured arrays are in range
            position = jnp.minimum(position, self.spec.S - 1)
        rows = mod.tile(position, lambda lanes: self._scaled(self._load_lanes(ref, lanes), scale))
        if not self.may_end:
            return rows
        return tuple(jnp.where(self.exists[:, None], x, jnp.zeros_like(x)) for x in rows)  # a mod may make NaN of zeros

    def _load_chunk(self, ref: Ref, start: int, width: int) -> jax.Array:
        count, size = self.exists.shape[0], ref.shape[3]
        if self._is_one_page and not self.may_end and start + width <= size:
            return runner_of(self.spec).load(ref.at[(self.page, pl.ds(self.row, count), self.h, pl.ds(start, width))])
        column = start + lax.broadcasted_iota(jnp.int32, (count, width), 1)
        return self._load_lanes(ref, column, column < size)

    def _load_lanes(self, ref: Ref, lanes: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Elements of each row, at lanes [count, lanes]; zeros past the request's length and outside of a mask."""
        row = self.row
        if self._is_one_page:
            pages, rows = self.page, row + lax.broadcasted_iota(jnp.int32, lanes.shape, 0)
        else:
            pages, rows = (jnp.broadcast_to(x[:, None], lanes.shape) for x in (self.page, row))
        if self.may_end:
            exists = jnp.broadcast_to(self.exists[:, None], lanes.shape)
            mask = exists if mask is None else mask & exists
        return runner_of(self.spec).load(ref.at[(pages, rows, self.h, lanes)], mask=mask)

    @property
    def _is_one_page(self) -> bool:
        return not self.page.ndim

    def _scaled(self, rows: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Rows in the dtype of the query, which holds each number of eight bits; rounded if there is a scale."""
        if self.spec.paging is None or self.spec.paging.dtype is None:
            return rows
        if scale is not None:
            rows = rows.astype(jnp.float32) * (scale[:, None] if scale.ndim else scale)
        return rows.astype(self.spec.dtype)
