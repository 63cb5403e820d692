"""The GPUs that kernels are compiled for: architecture, shared memory, version of PTX."""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

import jax

from pallas_kernels.triton.compiler.emit.dialect import CUDA, GFX942, OTHER_AMD, Dialect


class Target(NamedTuple):
    """Target of the compiler."""

    backend: Literal["cuda", "hip"]
    arch: int | str  # compute capability, 90 for 9.0, or AMD's name
    shared_memory: int  # bytes that a CTA may have
    ptx: int  # version of PTX, 87 for 8.7; 0 for AMD

    @property
    def dialect(self) -> Dialect:
        """Triton as it is understood there."""
        return CUDA if self.backend == "cuda" else GFX942 if self.arch == "gfx942" else OTHER_AMD

    @property
    def warp_size(self) -> int:
        """Threads of a warp."""
        return 64 if str(self.arch).startswith("gfx9") else 32


_KIB = 1024
# XLA assembles PTX with a ptxas of its own. Triton writes the version of its own ptxas, up to 9.4, which that of CUDA
# 13.0 refuses. So 8.7 is written, of CUDA 12.8, or 8.8 for the two targets that 8.7 does not have. LLVM aborts the
# process if a version does not have the target: a compute capability that is not listed is refused.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_PTX = {103: 88, 121: 88}
CUDA_TARGETS = {arch: Target("cuda", arch, size * _KIB, _PTX.get(arch, 87)) for arch, size in _SHARED_KIB.items()}
AMD_TARGETS = {arch: Target("hip", arch, size * _KIB, 0) for arch, size in {"gfx942": 64, "gfx950": 160}.items()}

# Of devices that are not there, for which a program is only lowered: a word of the name, and the compute capability.
_BY_NAME = {
    "H100": 90, "H200": 90, "H800": 90, "H20": 90, "GH200": 90, "A100": 80, "A800": 80, "A30": 80,
    "A10": 86, "A40": 86, "A6000": 86, "L4": 89, "L40": 89, "L40S": 89, "B100": 100, "B200": 100, "GB200": 100,
    "B300": 103, "GB300": 103, "GB10": 121,
}  # fmt: skip


@functools.cache
def target_of(device_kind: str) -> Target | str:
    """The target of a device, or why there is none, as a sentence without a full stop.

    >>> target_of("NVIDIA H200").arch
    90
    """
    if not device_kind.startswith("NVIDIA"):
        return f"it launches kernels on NVIDIA GPUs, and this device is {device_kind!r}"
    capability = _capability(device_kind)
    if capability is None:
        return f"it does not know the compute capability of {device_kind!r}, of which none is here"
    if capability not in CUDA_TARGETS:
        known = ", ".join(map(str, CUDA_TARGETS))
        return f"it compiles for the compute capabilities {known} (80 for 8.0), and {device_kind!r} has {capability}"
    return CUDA_TARGETS[capability]


def _capability(device_kind: str) -> int | None:
    """The compute capability of a device of this kind, asked of one that is here, or by its name."""
    for device in jax.devices():
        if device.device_kind == device_kind and hasattr(device, "compute_capability"):
            return int(device.compute_capability.replace(".", ""))
    return next((_BY_NAME[word] for word in re.split(r"[\s-]+", device_kind) if word in _BY_NAME), None)
