"""Launch, roles of warp groups and stores of results, for the kernels with split-KV.

Persistent CTAs take work items (`pallas_kernels.mosaic_gpu.work_items`), with a producer warp group and two consumers.
Of an item whose keys are not split the output is stored; of the others, partial results, which a second kernel merges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flatten_captured, launch, output
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, Item, num_ctas, over_items
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Index, Ref

CONSUMERS = 2  # warp groups; the producer is the one after them


class Inputs(Protocol):
    """The inputs of such a kernel, a NamedTuple of arrays, or in it of refs."""

    @property
    def items(self) -> Any:
        """The work items, int32 [items, 8]."""
        ...

    def of_mods(self) -> Operands[Any]:
        """Inputs of scores, in the form that all kernels take."""
        ...

    def _replace(self, **fields: object) -> Any: ...


class TileRows(Protocol):
    """The rows of a tile of queries, [64] each."""

    @property
    def n(self) -> jax.Array:
        """The query, packed."""
        ...

    @property
    def h(self) -> jax.Array:
        """The query head."""
        ...

    @property
    def exists(self) -> jax.Array:
        """False for padding."""
        ...


class LaunchSizes(NamedTuple):
    """Static sizes of a launch."""

    items: int  # upper bound on the work items
    slots: int  # upper bound on partial results; 0 if no keys are split


P = TypeVar("P")
I = TypeVar("I", bound=Inputs)
S = TypeVar("S")


class Static(NamedTuple, Generic[P, I, S]):
    """State that producer and consumers share."""

    spec: AttentionSpec
    packing: P  # how queries and heads fill the rows of a tile
    rows: int  # rows of a partial result
    captured: scores.CapturedShapes  # shapes of the captured arrays
    arrays: I
    outputs: tuple[Ref, ...]  # out, lse, and partial results
    scratch: S  # shared memory and barriers
    cta_id: Index

    def over_items(self, body: Callable[[jax.Array, Item, jax.Array], jax.Array]) -> None:
        """Runs ``count = body(i, item, count)`` for the items of this CTA; `count` is the caller's, from 0 on."""
        over_items(self.arrays.items, self.spec.Hkv, self.cta_id, body)

    def prepare(self, item: Item, rows: TileRows, q: jax.Array, q_first: jax.Array) -> scores.Scores:
        """The scores of an item, whose rows have these indices of queries in mods."""
        return scores.prepare(
            self.spec,
            self.arrays.of_mods(),
            self.captured,
            (smem.WARP_GROUP_ROWS, TILE_KEYS),
            item.request,
            rows.h,
            q=q,
            q_first=q_first,
            may_end=False,
        )

    def store(
        self,
        item: Item,
        rows: TileRows,
        of_partial: Callable[[jax.Array], jax.Array],
        write: Callable[[tuple[Ref, ...], jax.Array], None],
    ) -> None:
        """Stores rows of out and lse, to the result or to the partial results.

        Args:
          of_partial: From the first line of the partial result, the line of each row.
          write: Gets the refs of out and lse, and the line of each row, -1 for padding.
        """
        exists = lambda line: jnp.where(rows.exists, line, -1)
        whole = lambda: write(self.outputs[:2], exists(rows.n * self.spec.Hq + rows.h))
        if len(self.outputs) == 2:
            whole()
            return
        first = (item.slot * self.spec.Hkv + item.group) * self.rows
        pl.when(item.slot < 0)(whole)
        pl.when(item.slot >= 0)(lambda: write(self.outputs[2:], exists(of_partial(first))))


class Roles(NamedTuple):
    """Programs of the warp groups of a CTA."""

    name: str  # of the kernel, in profiles
    produce: Callable[[Any], None]  # of the producer, with a `Static`
    consume: Callable[[Any, int], None]  # of a consumer, with a `Static` and its number


def attend(
    roles: Roles, spec: AttentionSpec, packing: object, rows: int, queries: int, sizes: LaunchSizes,
    arrays: Inputs, scratch: NamedTuple,
) -> list[jax.Array]:  # fmt: skip
    """Computes out [queries, Hq, Dv] and lse, float32 [queries, Hq], of the tiles whose keys are not split.

    After them come the partial results of the others, if there may be any: out [slots, Hkv, rows, Dv] and lse [slots,
    Hkv, rows], float32.

    Args:
      spec: The spec; its programs are traced with heads in rows.
      packing: How queries and heads fill the rows of a tile.
      rows: Rows of a partial result.
      arrays: The inputs; captured arrays have their shapes.
      scratch: Declarations of shared memory and barriers.
    """
    outputs = [output((queries, spec.Hq, spec.Dv), spec.out_dtype), output((queries, spec.Hq), jnp.float32)]
    if sizes.slots:
        slots = (sizes.slots, spec.Hkv, rows)
        outputs += [output((*slots, spec.Dv), jnp.float32), output(slots, jnp.float32)]
    of_mods = arrays.of_mods()
    flat, captured = flatten_captured(of_mods), scores.CapturedShapes.from_operands(of_mods)

    def kernel(cta_id: Index, arrays: Any, outputs: tuple[Ref, ...], scratch: Any) -> None:
        static = Static(spec, packing, rows, captured, arrays, tuple(outputs), scratch, cta_id)
        group = lax.axis_index(WARP_GROUP)
        pl.when(group == CONSUMERS)(lambda: roles.produce(static))
        for number in range(CONSUMERS):
            pl.when(group == number)(functools.partial(roles.consume, static, number))

    return launch(
        kernel,
        arrays._replace(captured=flat.captured),
        outputs,
        scratch,
        name=roles.name,
        num_ctas=num_ctas(sizes.items, spec.Hkv),
        warp_groups=CONSUMERS + 1,
    )
