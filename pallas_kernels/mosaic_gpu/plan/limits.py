"""Limits of the Hopper kernels, whatever the mods; this module does not import Pallas."""

from __future__ import annotations

import math

import jax

from pallas_kernels.spec import AttentionSpec

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # parts of the names of devices with compute capability 9.0
ROWS = 64  # of a wgmma: blocks of a mask must be multiples
MAX_HEAD_SIZE = 256
MAX_ELEMENTS = 1 << 31  # of a captured array: it is indexed by 32 bits
MISCOMPILES = (12080, 12091)  # versions of CUDA: from the first, before the second


def limit_of_machine(spec: AttentionSpec) -> str | None:
    """The limit of device or versions that refuses every kernel here, or None."""
    if spec.has_latent_tiles:
        return "its kernel for latent pages takes no eight bits"
    if spec.paging is not None and spec.config.batch_invariant:
        return "its kernels for pages divide keys by the number of SMs, and so are not batch invariant"
    if spec.config.interpret:
        return "its kernels have no interpreter; they run on a Hopper GPU"
    if spec.platform != "gpu" or not any(name in spec.device_kind for name in HOPPER):
        where = spec.platform if spec.platform != "gpu" else spec.device_kind
        return f"it needs a Hopper GPU (H100, H200), and this call runs on {where}"
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11 or later, and this is {jax.__version__}"
    cuda = miscompiling_cuda()
    if cuda is not None:
        return f"the assembler of CUDA {cuda} miscompiles attention through Mosaic GPU (from 12.9.1 on it does not)"
    return None


def limit_of_arrays(spec: AttentionSpec) -> str | None:
    """The limit of dtype, sizes or blocks that refuses every kernel here, or None."""
    if spec.dtype not in ("bfloat16", "float16"):
        return f"its kernels compute in bfloat16 or float16, not {spec.dtype}"
    if max(spec.D, spec.Dv) > MAX_HEAD_SIZE:
        return f"its kernels take head sizes up to {MAX_HEAD_SIZE}, not {max(spec.D, spec.Dv)}"
    size = spec.block_size
    if size is not None and any(x % ROWS for x in size):
        return (
            f"its tiles are multiples of {ROWS} rows, and the blocks of the mask are {size[0]} x {size[1]} (create "
            f"the mask with a `block_size` that is a multiple of {ROWS})"
        )
    return limit_of_captured(spec)


def limit_of_captured(spec: AttentionSpec) -> str | None:
    """Captured arrays that every kernel here refuses."""
    for mod in (spec.score_mod, spec.mask_mod):
        for shape, dtype in () if mod is None else mod.operands:
            if math.prod(shape) >= MAX_ELEMENTS:
                return f"a mod captures an array of {dtype}{list(shape)}, which has 2 ** 31 elements or more"
    return None


def miscompiling_cuda() -> str | None:
    """The version of CUDA, if it is one whose assembler is known to miscompile attention kernels like these.

    JAX's own kernel through Mosaic GPU (`jax.experimental.pallas.ops.gpu.attention_mgpu`) refuses causal masks there.
    """
    version = _runtime_version()
    if version is None or not MISCOMPILES[0] <= version < MISCOMPILES[1]:
        return None
    return f"{version // 1000}.{version % 1000 // 10}.{version % 10}"


def _runtime_version() -> int | None:
    """The CUDA version as CUDA counts, 12080 for 12.8.0; None without a plugin of JAX for CUDA."""
    # The one import of a private module of JAX.
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
