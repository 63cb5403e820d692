"""The two compilers of the Triton kernels: the Triton inside Pallas, and official Triton, the package `triton`.

Asked before anything of either is imported.
"""

from __future__ import annotations

from pallas_kernels.plan import limit_of_pallas, unreached_by_pallas
from pallas_kernels.spec import AttentionSpec, Compiler
from pallas_kernels.triton.compiler.launch.installed import launcher
from pallas_kernels.triton.compiler.launch.target import target_of
from pallas_kernels.triton.plan.limits import loads_e4m3

_E4M3 = 89  # the compute capability with instructions for it


def available_compiler(spec: AttentionSpec) -> Compiler:
    """The compiler of kernels that no implementation names: Pallas', unless it cannot compile them."""
    return "pallas" if limit_of_compiler(spec, "pallas") is None else "official"


def limit_of_compiler(spec: AttentionSpec, compiler: Compiler) -> str | None:
    """Why a compiler cannot compile a call, as part of a sentence, or None; Pallas' interpreter needs neither."""
    if spec.config.interpret:
        return None
    return limit_of_pallas() or _limit_of_pages(spec) if compiler == "pallas" else _limit_of_official(spec)


def describe_compiler(spec: AttentionSpec) -> str:
    """Versions that compile and launch kernels through official Triton, for `jflex.explain`."""
    installed = launcher()
    return "Pallas' interpreter" if spec.config.interpret or isinstance(installed, str) else installed.description


def _limit_of_official(spec: AttentionSpec) -> str | None:
    """Missing packages, and devices that are not known."""
    target, installed = target_of(spec.device_kind), launcher()
    if isinstance(installed, str) or isinstance(target, str):
        return installed if isinstance(installed, str) else str(target)
    if loads_e4m3(spec) and int(target.arch) < _E4M3:
        return f"Triton loads float8_e4m3fn from compute capability 8.9 on, and {spec.device_kind!r} has less"
    return None


def _limit_of_pages(spec: AttentionSpec) -> str | None:
    """Why Pallas' Triton does not reach the last page of a cache in eight bits.

    It reaches them as words of two columns: 2 ** 32 bytes are 2 ** 31 of these.
    """
    from pallas_kernels.triton.head_chunks import may_hold_pairs

    paging = spec.paging
    if paging is None or paging.dtype is None:
        return None
    sides = [(spec.Dv, None)] if spec.has_latent_tiles else [(spec.D, spec.key_mod), (spec.Dv, spec.value_mod)]
    in_words = lambda size, mod: may_hold_pairs(spec, size, mod) and not spec.has_latent_tiles
    in_bytes = [spec.paged_rows * size for size, mod in sides if not in_words(size, mod)]
    unreached = [elements for elements in in_bytes if unreached_by_pallas(elements)]
    if not unreached:
        return None
    return (
        f"pages of {paging.dtype} have {unreached[0]} elements: with more than 2 ** 31 in at most 2 ** 32 bytes, "
        "Pallas does not reach the last ones ('official_triton' does; or take fewer or more pages)"
    )
