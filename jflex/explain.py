"""The account that `jflex.explain` gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jflex import backends
from jflex._call.dispatch import Implementation, Selection, select, select_passes
from jflex._call.kv_lengths import bounded_lists, known_lengths
from jflex.backends.base import Plan
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask
from jflex.errors import UnsupportedError
from pallas_kernels.plan import Refusal, all_gradients
from pallas_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Account:
    """What a call of `flex_attention` would do; ``print`` it.

    Attributes:
      backend: The backend that runs it, or None if none of the named ones can.
      reasons: Why the backends before it in the order do not.
      tiles: Kernels and tile sizes of both passes, as text.
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
        spec: AttentionSpec,
        implementation: Implementation,
        block_mask: BlockMask | None = None,
        kv_lengths: jax.Array | jax.ShapeDtypeStruct | None = None,
    ) -> Account:
        """Takes the account of one call."""
        selection = select(implementation, spec)
        visited, full, total = _count(spec, block_mask, kv_lengths)
        lengths = known_lengths(kv_lengths)
        keys, longest = spec.B * spec.S, spec.S  # of the whole batch, and of one entry
        if lengths is not None:
            keys, longest = int(lengths.sum()), int(lengths.max(initial=0))
        pairs = spec.Hq * spec.T * keys
        if visited is not None and total:
            pairs = spec.B * spec.Hq * spec.T * spec.S * visited // total
        width = jnp.dtype(spec.dtype).itemsize
        rows = spec.B * spec.Hq * spec.T, spec.Hkv * (longest if spec.Bkv < spec.B else keys)
        return cls(
            backend=selection.name,
            reasons=selection.rejections,
            tiles=_describe(spec, implementation, selection),
            visited=visited,
            full=full,
            blocks=total,
            flops=2 * pairs * (spec.D + spec.Dv),
            bytes=width * (spec.D + spec.Dv) * sum(rows),
        )

    def __str__(self) -> str:
        lines = [f"backend   {self.backend or 'none of the requested'}"]
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
            lines.append("blocks    not counted (no BlockMask, or traced)")
        lines.append(f"work      {self.flops / 1e9:.3f} GFLOP forward, {self.bytes / 1e6:.3f} MB")
        return "\n".join(lines)


def _describe(spec: AttentionSpec, implementation: Implementation, selection: Selection) -> str:
    """Kernels and tiles of both passes, and who computes the gradients."""
    if selection.name is None or selection.plan is None:
        return ""
    forward, requested = selection.plan.describe(), all_gradients(spec)
    if spec.paging is not None:
        return forward
    try:
        passes = select_passes(implementation, spec, requested)
    except UnsupportedError:
        refusal = backends.get(selection.name).plan(spec, requested)
        reason = refusal.sentence(spec) if isinstance(refusal, Refusal) else ""
        return f"{forward}; no gradients, because {reason}"
    if passes.forward != selection.name:
        return f"{forward}; with gradients, {passes.forward!r} runs both passes"
    if passes.backward != selection.name:
        return f"{forward}; gradients by {passes.backward!r}, because {passes.reason}"
    both = backends.get(passes.backward).plan(spec, requested)
    return both.describe() if isinstance(both, Plan) else forward


def _count(
    spec: AttentionSpec, block_mask: BlockMask | None, kv_lengths: jax.Array | jax.ShapeDtypeStruct | None
) -> tuple[int | None, int | None, int | None]:
    lists = None if block_mask is None else _known_lists(spec, block_mask, kv_lengths)
    if lists is None:
        return None, None, None
    batch, heads, rows = lists.kv_num_blocks.shape
    repeat = (spec.B // batch) * (spec.Hq // heads)
    full = int(lists.full_kv_num_blocks.sum()) * repeat
    columns = lists.q_num_blocks.shape[-1]
    return int(lists.kv_num_blocks.sum()) * repeat + full, full, rows * columns * spec.B * spec.Hq


def _known_lists(
    spec: AttentionSpec, block_mask: BlockMask, kv_lengths: jax.Array | jax.ShapeDtypeStruct | None
) -> BlockLists | None:
    """The lists that are walked, or None where they cannot be known."""
    lengths = known_lengths(kv_lengths)
    if any(isinstance(x, Tracer) for x in block_mask.lists) or (kv_lengths is not None and lengths is None):
        return None
    if lengths is None:
        return block_mask.lists
    return bounded_lists(spec, block_mask.lists, jnp.asarray(lengths), block_mask.block_size)
