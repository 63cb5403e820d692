"""What the Triton kernels cannot run, whatever the mods: asked before Pallas is imported."""

from __future__ import annotations

import functools
import importlib

import jax

from pallas_kernels.spec import AttentionSpec

MAX_DECODED = 16  # queries of a sequence that are decoded
MAX_DECODED_ROWS = 64  # query heads of a key head times queries, which a tile of the decoding kernel holds
MAX_HEAD_SIZE = 256
MIN_TILE = 16  # of queries or keys: what an MMA of Triton takes


def limit_of_device(spec: AttentionSpec) -> str | None:
    """What of the device, the dtype or the head sizes every kernel here refuses."""
    if spec.platform != "gpu" and not spec.config.interpret:
        return (
            f"it needs an NVIDIA GPU, and this call runs on {spec.platform} (for tests, "
            "config=jflex.Config(interpret=True) interprets the kernels)"
        )
    if spec.dtype not in ("bfloat16", "float16", "float32"):
        return f"its kernels compute in bfloat16, float16 or float32, not {spec.dtype}"
    if max(spec.D, spec.Dv) > MAX_HEAD_SIZE:
        return f"its kernels take head sizes up to {MAX_HEAD_SIZE}, not {max(spec.D, spec.Dv)}"
    return None


@functools.cache
def limit_of_pallas() -> str | None:
    """Why Pallas cannot compile for Triton here, or None."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return (
            f"JAX {jax.__version__} has no `jax.experimental.pallas.triton`; implementation='official_triton' runs the "
            "same kernels"
        )
    return None


def decodes(spec: AttentionSpec) -> bool:
    """Whether the kernel for few queries runs: they fit into a tile, and share one row of the mask's lists.

    It has no `spec.stats`.
    """
    blocks = spec.blocks
    one_row = blocks is None or (blocks.size[0] >= spec.T and (blocks.heads == 1 or spec.group == 1))
    few = 0 < spec.T <= MAX_DECODED and spec.group * spec.T <= MAX_DECODED_ROWS
    return few and one_row and spec.config.forward is None and not spec.stats
