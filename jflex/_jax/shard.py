"""The part of a call that one device computes: local sizes, and mods that map local indices to those of the whole."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jflex.backends.base import Inputs
from jflex.mods.reindex import Positions, ReindexedMod
from jflex.mods.trace import TracedMod, trace_mask_mod, trace_score_mod
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec, Blocks, Captured, Dropout, Mod


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """The absolute positions of local tokens, in chunks."""

    starts: Int32[Array, " chunks"]
    chunk: int = dataclasses.field(metadata={"static": True})

    def position(self, index: jax.Array) -> jax.Array:
        """The position of a local token."""
        if self.starts.size == 1:
            return index + self.starts[0]
        chunk = jnp.int32(self.chunk)
        # Not `//` and `%`, whose programs hold the mesh in which they are traced; no index is negative.
        return self.starts[lax.div(index, chunk)] + lax.rem(index, chunk)


class Spread(NamedTuple):
    """The absolute positions of local tokens that are every so many runs, `stride` apart, of a sequence."""

    first: Int32[Array, ""]
    run: int
    stride: int

    def position(self, index: jax.Array) -> jax.Array:
        """The position of a local token."""
        run = jnp.int32(self.run)
        return lax.div(index, run) * jnp.int32(self.stride) + self.first + lax.rem(index, run)


class Where(NamedTuple):
    """Offsets of local arrays in the whole call; None where they begin at 0 and are in order."""

    batch: Int32[Array, ""] | None = None
    head: Int32[Array, ""] | None = None
    queries: Span | Spread | None = None
    keys: Span | Spread | None = None

    def positions(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        """The absolute positions of local indices."""
        add = lambda index, first: index if first is None else index + first
        position = lambda index, span: index if span is None else span.position(index)
        return Positions(
            add(b, self.batch), add(h, self.head), position(q_idx, self.queries), position(kv_idx, self.keys)
        )


class Shard(NamedTuple):
    """The call of one device."""

    spec: AttentionSpec
    inputs: Inputs
    # the index here of each array that the score mod captures in the whole call; None if it is not read
    operands: tuple[int | None, ...]

    def requested(self, of_whole: GradientRequest) -> GradientRequest:
        """The gradients that the whole call requests, in the numbering of the captured arrays here."""
        requested = [False] * len(self.inputs.captured.score)
        for number, want in zip(self.operands, of_whole.score_operands, strict=True):
            if number is not None:
                requested[number] = want
        return of_whole._replace(score_operands=tuple(requested))


def shard_of(whole: AttentionSpec, inputs: Inputs, where: Where) -> Shard:
    """The call of one device, from the spec of the whole call and local arrays."""
    mods, captured = moved_mods(whole, inputs.captured, where)
    blocks = whole.blocks
    if blocks is not None and inputs.lists is not None:
        blocks = Blocks(blocks.size, *inputs.lists[0].shape[:2], follow_mod=blocks.follow_mod)
    length, heads = (1, 2) if whole.layout == "BTNH" else (2, 1)
    query, key = inputs.query.shape, inputs.key.shape
    spec = whole.replace(
        B=query[0], T=query[length], S=key[length], Hq=query[heads], Hkv=key[heads], Bkv=key[0],
        **mods, blocks=blocks, sinks=inputs.sinks is not None,
    )  # fmt: skip
    numbers = tuple(next((i for i, y in enumerate(captured.score) if y is x), None) for x in inputs.captured.score)
    return Shard(spec, inputs._replace(captured=captured), numbers)


def moved(
    mod: Mod | None,
    operands: tuple[jax.Array, ...],
    where: Where,
    trace: Callable[..., tuple[TracedMod, tuple[jax.Array, ...]]],
) -> tuple[Mod | None, tuple[jax.Array, ...]]:
    """A mod that takes local indices."""
    if mod is None or all(x is None for x in where):
        return mod, operands
    traced, captured = trace(ReindexedMod(functools.partial(mod, operands), where.positions))
    return dataclasses.replace(traced, source=mod.source), captured


def moved_mods(
    whole: AttentionSpec, captured: Captured[jax.Array], where: Where
) -> tuple[dict[str, Mod | Dropout | None], Captured[jax.Array]]:
    """Score mod, mask mod and dropout that take local indices, by their names in a spec, and what these capture."""
    score, of_score = moved(whole.score_mod, captured.score, where, trace_score_mod)
    mask, of_mask = moved(whole.mask_mod, captured.mask, where, trace_mask_mod)
    dropout = whole.dropout
    kept, of_dropout = moved(None if dropout is None else dropout.mod, captured.dropout, where, trace_mask_mod)
    if dropout is not None and kept is not None:
        dropout = dataclasses.replace(dropout, mod=kept)
    return {"score_mod": score, "mask_mod": mask, "dropout": dropout}, Captured(of_score, of_mask, dropout=of_dropout)
