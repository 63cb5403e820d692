"""Launching a kernel through Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.spec import Arrays

WARP_GROUP = "warp_group"
_BLOCK = "block"


def launch(
    kernel: Callable[..., None],
    inputs: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    *,
    name: str,
    blocks: int,
    warp_groups: int,
) -> Any:
    """Runs ``kernel(number, inputs, outputs, scratch)``, the number being that of the block of threads.

    Args:
      kernel: The kernel; it gets pytrees of refs.
      inputs: A pytree of arrays.
      outputs: What it computes.
      scratch: A pytree of declarations: shared memory and barriers.
      name: In profiles.
      blocks: How many blocks of threads.
      warp_groups: Of each block.
    """
    flat, tree = jax.tree.flatten(inputs)

    def body(*refs: Any, declared: Any) -> None:
        ins, outs = jax.tree.unflatten(tree, refs[: len(flat)]), refs[len(flat) :]
        kernel(lax.axis_index(_BLOCK), ins, outs, declared)

    return plg.kernel(
        body,
        out_type=list(outputs),
        scratch_types={"declared": scratch},
        grid=(blocks,),  # one axis: the hardware bounds the others by 65535
        grid_names=(_BLOCK,),
        num_threads=warp_groups,
        thread_name=WARP_GROUP,
        kernel_name=name,
        compiler_params=plg.CompilerParams(
            lowering_semantics=plg.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*flat)


def flat_operands(arrays: Arrays) -> Arrays:
    """What the mods capture, as arrays of one dimension."""
    flat = lambda operands: tuple(x.reshape(-1) for x in operands)
    return arrays._replace(score_operands=flat(arrays.score_operands), mask_operands=flat(arrays.mask_operands))
