"""Launching a kernel through Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.spec import Operands
from pallas_kernels.types import Ref

WARP_GROUP = "warp_group"
_CTA = "block"


def launch(
    kernel: Callable[..., None],
    inputs: object,
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,  # JAX's type of a tree of declarations is private
    *,
    name: str,
    num_ctas: int,
    warp_groups: int,
) -> list[jax.Array]:
    """Runs ``kernel(cta_id, inputs, outputs, scratch)`` in every warp group of every CTA.

    Args:
      kernel: The kernel; it gets pytrees of refs.
      inputs: A pytree of arrays.
      outputs: Shapes and dtypes of the outputs.
      scratch: A pytree of declarations: shared memory and barriers.
      name: In profiles.
      num_ctas: Size of the grid.
      warp_groups: Warp groups of a CTA: consumers and one producer.
    """
    flat, tree = jax.tree.flatten(inputs)

    def body(*refs: Ref, declared: object) -> None:
        ins, outs = jax.tree.unflatten(tree, refs[: len(flat)]), refs[len(flat) :]
        kernel(lax.axis_index(_CTA), ins, outs, declared)

    return plg.kernel(
        body,
        out_type=list(outputs),
        scratch_types={"declared": scratch},
        grid=(num_ctas,),  # one axis: the hardware bounds the others by 65535
        grid_names=(_CTA,),
        num_threads=warp_groups,
        thread_name=WARP_GROUP,
        kernel_name=name,
        compiler_params=plg.CompilerParams(
            lowering_semantics=plg.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*flat)


def flatten_captured(arrays: Operands[jax.Array]) -> Operands[jax.Array]:
    """The operands, with captured arrays flattened to one dimension."""
    return arrays._replace(captured=jax.tree.map(lambda x: x.reshape(-1), arrays.captured))
