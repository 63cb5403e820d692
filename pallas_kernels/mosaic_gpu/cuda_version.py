"""Which CUDA compiles the kernels. The one place that imports a private module of JAX."""

from __future__ import annotations

MISCOMPILES = (12080, 12091)  # from the first, before the second


def miscompiling_cuda() -> str | None:
    """The version of CUDA, if it is one whose assembler is known to miscompile attention kernels like these.

    JAX's own kernel through Mosaic GPU (`jax.experimental.pallas.ops.gpu.attention_mgpu`) refuses causal masks there.
    """
    version = _runtime_version()
    if version is None or not MISCOMPILES[0] <= version < MISCOMPILES[1]:
        return None
    return f"{version // 1000}.{version % 1000 // 10}.{version % 10}"


def _runtime_version() -> int | None:
    """As CUDA counts: 12080 is 12.8.0; None without a plugin of JAX for CUDA."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
