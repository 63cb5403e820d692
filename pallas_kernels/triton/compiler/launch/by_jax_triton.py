"""Launches kernels by `jax_triton.triton_call`, which compiles them itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import ModuleType

import jax

from pallas_kernels.triton.compiler.compile import jit_function
from pallas_kernels.triton.compiler.emit.emit import Source
from pallas_kernels.triton.compiler.launch.target import Target


def call(
    *args: jax.Array,
    source: Source,
    target: Target,
    num_warps: int,
    num_stages: int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
) -> list[jax.Array]:
    """Calls a kernel; the arguments are those of `pallas_kernels.triton.compiler.launch.direct.call`."""
    with warnings.catch_warnings():
        # Refs, which it wants in place of aliases, cannot be made where a call is lowered.
        warnings.filterwarnings("ignore", message="input_output_aliases is deprecated", category=DeprecationWarning)
        return _jax_triton().triton_call(
            *args,
            kernel=jit_function(source),
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
            grid=source.grid,
            name=source.name,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=target.arch,
            backend_options={"ptx_version": target.ptx, "enable_fp_fusion": True},
            input_output_aliases={argument: output for output, argument in aliases.items()},
        )


def _jax_triton() -> ModuleType:
    """The package; its import removes the folder of Triton's cache from the environment, which is put back."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton  # pyright: ignore[reportMissingImports]

    if folder is not None:
        os.environ["TRITON_CACHE_DIR"] = folder
    return jax_triton
