"""Where official Triton was measured to be faster than that of Pallas."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tuning import tables


def faster(spec: AttentionSpec, kernels: tuple[str, ...]) -> str | None:
    """Why these kernels are faster with official Triton, by the table of the device, or None.

    Args:
      spec: The call, with its tile programs.
      kernels: ``("forward",)`` or ``("dkv", "dq")``.
    """
    length = lambda kernel: spec.T if kernel == "dkv" else spec.S
    itemsize, head_size = jnp.dtype(spec.dtype).itemsize, max(spec.D, spec.Dv)
    keys = [tables.key_of(kernel, head_size, itemsize, spec.programs, length(kernel)) for kernel in kernels]
    theirs = [tables.microseconds(spec.device_kind, key) for key in keys]
    ours = [tables.microseconds(spec.device_kind, tables.official(key)) for key in keys]
    if None in (*theirs, *ours):
        return None
    before, after = (sum(x for x in times if x is not None) for times in (theirs, ours))
    if after >= before:
        return None
    return f"official Triton was measured to be faster ({' and '.join(kernels)}: {after:.1f} us, not {before:.1f})"
