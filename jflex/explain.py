"""The account that `jflex.explain` gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from jflex import backends
from jflex._call.kv_lengths import bounded_lists, known_lengths
from jflex._call.problem import Problem
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask


@dataclasses.dataclass(frozen=True)
class Account:
    """What a call of `flex_attention` would do; ``print`` it.

    Attributes:
      backend: The backend that runs it, or None if none of the named ones can.
      reasons: Why the backends before it in the order do not.
      tiles: With which tiles.
      visited: Blocks that are visited, over batch and heads, or None without a BlockMask or while its lists, or the
        lengths of keys, are not known.
      full: Those of them in which the mask is not evaluated.
      blocks: All blocks.
      flops: Floating-point operations of the forward pass over the visited blocks, 2 for a multiply-add; without a
        BlockMask, over the keys within their lengths, where these are known.
      bytes: Bytes that it must move at least: each of query, key, value and out once, of keys and values what lies
        within the lengths.
    """

    backend: str | None
    reasons: dict[str, str]
    tiles: str
    visited: int | None
    full: int | None
    blocks: int | None
    flops: int
    bytes: int

    @classmethod
    def of(
        cls,
        problem: Problem,
        block_mask: BlockMask | None,
        reasons: dict[str, str | None],
        gradients: tuple[str, str],
        kv_lengths: Any = None,
    ) -> Account:
        """Takes the account of one problem; `gradients` as `jflex._call.dispatch.gradients_by` gives them."""
        backend = next((name for name, reason in reasons.items() if reason is None), None)
        tiles = ""
        if backend is not None:
            by_other = gradients[0] != backend
            tiles = backends.get(backend).describe(problem, forward_alone=by_other)
            tiles += f"; gradients by {gradients[0]!r}, because {gradients[1]}" if by_other else ""
        visited, full, total = _count(problem, block_mask, kv_lengths)
        lengths = known_lengths(kv_lengths)
        keys, longest = problem.B * problem.S, problem.S  # of the whole batch, and of one entry
        if lengths is not None:
            keys, longest = int(lengths.sum()), int(lengths.max(initial=0))
        pairs = problem.Hq * problem.T * keys
        if visited is not None and total:
            pairs = problem.B * problem.Hq * problem.T * problem.S * visited // total
        width = jnp.dtype(problem.dtype).itemsize
        rows = problem.B * problem.Hq * problem.T, problem.Hkv * (longest if problem.Bkv < problem.B else keys)
        size = width * (problem.D + problem.Dv) * sum(rows)
        return cls(
            backend,
            {k: v for k, v in reasons.items() if v is not None},
            tiles,
            visited,
            full,
            total,
            2 * pairs * (problem.D + problem.Dv),
            size,
        )

    def __str__(self) -> str:
        lines = [f"backend   {self.backend or 'none of those asked for'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.tiles:
            lines.append(f"tiles     {self.tiles}")
        if self.visited is not None and self.full is not None and self.blocks:
            partial = self.visited - self.full
            lines.append(
                f"blocks    {self.visited} of {self.blocks} visited ({self.full} full, {partial} partial), "
                f"{100 * (1 - self.visited / self.blocks):.1f} % skipped"
            )
        elif self.blocks is None:
            lines.append("blocks    no BlockMask, or one that is not known: not counted")
        lines.append(f"work      {self.flops / 1e9:.3f} GFLOP forward, {self.bytes / 1e6:.3f} MB")
        return "\n".join(lines)


def _count(
    problem: Problem, block_mask: BlockMask | None, kv_lengths: Any
) -> tuple[int | None, int | None, int | None]:
    lists = None if block_mask is None else _known_lists(problem, block_mask, kv_lengths)
    if lists is None:
        return None, None, None
    batch, heads, rows = lists.kv_num_blocks.shape
    repeat = (problem.B // batch) * (problem.Hq // heads)
    full = int(lists.full_kv_num_blocks.sum()) * repeat
    columns = lists.q_num_blocks.shape[-1]
    return int(lists.kv_num_blocks.sum()) * repeat + full, full, rows * columns * problem.B * problem.Hq


def _known_lists(problem: Problem, block_mask: BlockMask, kv_lengths: Any) -> BlockLists | None:
    """The lists that are walked, or None where they cannot be known."""
    lengths = known_lengths(kv_lengths)
    if any(isinstance(x, Tracer) for x in block_mask.lists) or (kv_lengths is not None and lengths is None):
        return None
    if lengths is None:
        return block_mask.lists
    return bounded_lists(problem, block_mask.lists, jnp.asarray(lengths), block_mask.block_size)
