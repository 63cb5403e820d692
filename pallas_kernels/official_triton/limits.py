"""What official Triton cannot run here: asked before anything of it is imported."""

from __future__ import annotations

from pallas_kernels.official_triton.installed import launcher
from pallas_kernels.official_triton.target import target_of
from pallas_kernels.spec import AttentionSpec


def limit_of_compiler(spec: AttentionSpec) -> str | None:
    """What is missing, or not known of the device; Pallas' interpreter needs neither."""
    if spec.config.interpret:
        return None
    target, found = target_of(spec.device_kind), launcher()
    return found if isinstance(found, str) else target if isinstance(target, str) else None


def said_of_compiler(spec: AttentionSpec) -> str:
    """What compiles and launches kernels, for `jflex.explain`."""
    found = launcher()
    return "Pallas' interpreter" if spec.config.interpret or isinstance(found, str) else found.said
