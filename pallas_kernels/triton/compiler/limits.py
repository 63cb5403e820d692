"""What official Triton cannot run here: asked before anything of it is imported."""

from __future__ import annotations

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.compiler.launch.installed import launcher
from pallas_kernels.triton.compiler.launch.target import target_of

_E4M3 = 89  # the compute capability with instructions for it


def limit_of_compiler(spec: AttentionSpec, *, loads_e4m3: bool) -> str | None:
    """What is missing, or not known of the device; Pallas' interpreter needs neither.

    Args:
      spec: The call.
      loads_e4m3: Whether a kernel loads float8_e4m3fn.
    """
    if spec.config.interpret:
        return None
    target, found = target_of(spec.device_kind), launcher()
    if isinstance(found, str) or isinstance(target, str):
        return found if isinstance(found, str) else str(target)
    if loads_e4m3 and int(target.arch) < _E4M3:
        return f"Triton loads float8_e4m3fn from compute capability 8.9 on, and {spec.device_kind!r} has less"
    return None


def said_of_compiler(spec: AttentionSpec) -> str:
    """What compiles and launches kernels, for `jflex.explain`."""
    found = launcher()
    return "Pallas' interpreter" if spec.config.interpret or isinstance(found, str) else found.said
