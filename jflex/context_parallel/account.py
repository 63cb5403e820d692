"""The report of `jflex.explain` for a context parallel call: work and transfers of each device."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jflex._call.account import Choice, dense_choice
from jflex._call.dispatch import Implementation
from jflex.block_mask.drawing import is_concrete
from jflex.context_parallel.call import ContextCall, Strategy, Tables, divided
from jflex.context_parallel.prepare import Checked
from jflex.context_parallel.ring import steps_of
from jflex.context_parallel.run import device_spec


@dataclasses.dataclass(frozen=True)
class ContextAccount(Choice):
    """The plan of a call of `context_parallel_attention`; ``print`` it.

    The first fields are those of the kernels of a device. Where other axes of the mesh divide batch or heads, numbers
    of a device are means over these axes.

    Attributes:
      axis: The axis of the mesh that divides the tokens.
      steps: Steps of the ring; None for another strategy. All of them if the mask is not known.
      visited: Visited blocks of each device; None without a BlockMask, or where its lists are not known.
      flops: Floating-point operations of each device in the forward pass, over visited blocks; without known blocks,
        over all keys.
      bytes_sent: Bytes that a device sends to others in the forward pass.
      bytes_sent_backward: Likewise in a backward pass for query, key and value.
    """

    strategy: Strategy
    axis: str
    devices: int
    steps: int | None
    visited: tuple[float, ...] | None
    flops: tuple[float, ...]
    bytes_sent: int
    bytes_sent_backward: int

    @classmethod
    def from_call(cls, checked: Checked, implementation: Implementation) -> ContextAccount:
        """Makes the account of one call."""
        context = checked.context
        local = device_spec(context, checked.call.inputs, checked.blocks())
        call, block_mask = checked.masked()
        context = dataclasses.replace(context, spec=call.spec)
        placement, n = context.placement, context.placement.shards
        order = None if context.order is None else np.array(context.order)
        known = block_mask is not None and is_concrete(block_mask.lists)
        tables = divided(block_mask, context.strategy, n, order) if known else Tables()
        steps = None
        if context.strategy == "ring":
            steps = len(steps_of(tables.sees if isinstance(tables.sees, np.ndarray) else None, n))
        visited = None if not known else _visited(context, tables) / (placement.batch_shards * placement.head_shards)
        spec = context.spec
        pairs = np.full(n, spec.B * spec.Hq * spec.T * spec.S / (n * placement.batch_shards * placement.head_shards))
        if visited is not None and block_mask is not None:
            pairs = visited * np.prod(block_mask.block_size)
        forward, backward = _bytes_sent(context, steps)
        return cls(
            **dense_choice(local, implementation),
            strategy=context.strategy,
            axis=placement.axis,
            devices=n,
            steps=steps,
            visited=None if visited is None else tuple(visited.tolist()),
            flops=tuple((2 * (spec.D + spec.Dv) * pairs).tolist()),
            bytes_sent=forward,
            bytes_sent_backward=backward,
        )

    @property
    def imbalance(self) -> float:
        """FLOPs of the device that has most over the mean: the slowest one decides."""
        mean = sum(self.flops) / len(self.flops)
        return max(self.flops) / mean if mean else 1.0

    def lines(self) -> list[str]:
        """The account as lines."""
        taken = "" if self.steps is None else f", {self.steps} of {self.devices} steps"
        shown = lambda numbers: ", ".join(numbers[:16]) + (", ..." if len(numbers) > 16 else "")
        gflops = shown([f"{x / 1e9:.3f}" for x in self.flops])
        blocks = "not counted (no BlockMask, or traced)"
        if self.visited is not None:
            blocks = f"{shown([f'{x:g}' for x in self.visited])} visited by each device"
        return [
            f"strategy  {self.strategy} over {self.devices} devices along {self.axis!r}{taken}",
            *super().lines(),
            f"blocks    {blocks}",
            f"work      {gflops} GFLOP forward of each device; largest / mean: {self.imbalance:.2f}",
            f"sent      {self.bytes_sent / 1e6:.3f} MB forward, {self.bytes_sent_backward / 1e6:.3f} MB backward, by a "
            "device",
        ]


def _visited(context: ContextCall, tables: Tables) -> np.ndarray:
    """Visited blocks of each position along the axis, over all batch entries and heads."""
    spec, placement, lists = context.spec, context.placement, tables.lists
    assert lists is not None  # the lists are known
    counts = np.asarray(lists.kv_num_blocks) + np.asarray(lists.full_kv_num_blocks)
    batch, heads = counts.shape[-3:-1]
    if context.strategy != "ulysses":
        repeat = (spec.B // batch) * (spec.Hq // heads)
        return counts.reshape(placement.shards, -1).sum(1) * float(repeat)
    of_heads = np.broadcast_to(counts.sum((0, 2)), (spec.Hq,) if heads == 1 else (heads,)) * (spec.B / batch)
    return of_heads.reshape(placement.head_shards, placement.shards, -1).sum((0, 2))


def _bytes_sent(context: ContextCall, steps: int | None) -> tuple[int, int]:
    """Bytes that a device sends forward and backward: see the table of strategies in the guide."""
    spec, placement, n = context.spec, context.placement, context.placement.shards
    width = jnp.dtype(spec.dtype).itemsize
    sums = max(width, 4)  # of the gradients that travel in a ring: float32, float64 of float64
    batch = spec.B // placement.batch_shards
    # Elements of keys and values, or of queries and outputs, in the whole sequence.
    elements = lambda batch, length, heads: batch * length * (heads // placement.head_shards) * (spec.D + spec.Dv)
    keys = elements(spec.Bkv if spec.Bkv < spec.B else batch, spec.S, spec.Hkv)
    queries = elements(batch, spec.T, spec.Hq)
    if context.strategy == "all_gather":
        sent = (n - 1) * keys * width // n
        return sent, sent
    if context.strategy == "ring":
        assert steps is not None  # of a ring
        return (steps - 1) * keys * width // n, (steps - 1) * keys * (width + sums) // n
    sent = (n - 1) * (queries + keys) * width // n**2
    return sent, sent
