"""The installed Triton and the launcher of its kernels: asked once, without importing it."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Literal, NamedTuple

import jax
import jaxlib.version

OLDEST, NEWEST = (3, 6), (3, 9)  # of Triton, tested
_REMEDY = "the extra `jax-triton` installs one that was tested"
_JAX_TRITON = (0, 4), (0, 11)  # jax-triton and the JAX with which it works; on 0.12 its rule for dead code raises


class Launcher(NamedTuple):
    """Launcher of kernels."""

    # ``"jax_triton"``: by `jax_triton.triton_call`; ``"direct"``: by jaxlib's own custom call
    name: Literal["jax_triton", "direct"]
    description: str  # the versions, as text


@functools.cache
def launcher() -> Launcher | str:
    """The launcher, or the missing package and its remedy as a sentence without a full stop."""
    triton = triton_version()
    if triton is None:
        return f"it needs the package `triton`, which is not installed ({_REMEDY})"
    if not OLDEST <= _numbers(triton) <= NEWEST:
        bounds = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        return f"it was tested with Triton {bounds}, and {triton} is installed ({_REMEDY})"
    if not _has_custom_call():
        return (
            f"it needs the CUDA plugin of jaxlib {jaxlib.version.__version__}, which launches kernels of Triton "
            "(`pip install 'jax[cuda13]'` installs it)"
        )
    jax_triton = _version("jax-triton")
    if jax_triton is not None and (_numbers(jax_triton), jax.__version_info__[:2]) == _JAX_TRITON:
        return Launcher("jax_triton", f"Triton {triton}, launched by jax-triton {jax_triton}")
    return Launcher("direct", f"Triton {triton}, launched by jaxlib {jaxlib.version.__version__}")


def triton_version() -> str | None:
    """The version of Triton; None if there is none."""
    return _version("triton") or _version("pytorch-triton")


def _has_custom_call() -> bool:
    from jaxlib import gpu_triton

    return hasattr(gpu_triton, "TritonKernelCall")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])
