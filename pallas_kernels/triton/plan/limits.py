"""Limits of the Triton kernels and of their two compilers, whatever the mods: asked before Pallas is imported."""

from __future__ import annotations

from pallas_kernels.plan import exceeds_pallas_indexing, limit_of_pallas
from pallas_kernels.spec import AttentionSpec, Compiler, is_amd
from pallas_kernels.triton.compiler.launch.installed import launcher
from pallas_kernels.triton.compiler.launch.target import target_of

MAX_DECODED = 16  # queries of a sequence that are decoded
MAX_DECODED_ROWS = 64  # query heads of a key head times queries, which a tile of the decoding kernel holds
MAX_HEAD_SIZE = 256
MAX_LATENT_SIZE, MAX_ROPE_SIZE = 512, 64  # of multi-head latent attention
# Words, up to a dash, in the names of devices of compute capability 8.0 to 8.7.
_BEFORE_ADA = ("A100", "A800", "A30", "A10", "A16", "A40", "A2", "A4000", "A4500", "A5000", "A5500", "A6000", "3050",
               "3060", "3070", "3080", "3090", "Orin")  # fmt: skip
KEYS_OF_SPLIT = 1024  # of a split where the batch must not matter (`pallas_kernels.split_kv.fixed_splits`)
_E4M3 = 89  # the compute capability from which on official Triton loads float8_e4m3fn
MIN_TILE = 16  # of queries or keys: what an MMA of Triton takes


def limit_of_device(spec: AttentionSpec) -> str | None:
    """Device, configuration, dtype or head sizes that every kernel here refuses, as a sentence, or None."""
    elsewhere = limit_of_platform(spec.platform, interpret=spec.config.interpret)
    if elsewhere is not None:
        return elsewhere
    if spec.config.batch_invariant and "entropy" in spec.stats:
        return "its splits of a constant number of keys have no entropy (leave out `batch_invariant`, or the statistic)"
    if spec.dtype not in ("bfloat16", "float16", "float32"):
        return f"its kernels compute in bfloat16, float16 or float32, not {spec.dtype}"
    if is_amd(spec.device_kind) and (spec.qk_dtype or (spec.paging and spec.paging.dtype)):
        return f"it loads eight bits by PTX, which {spec.device_kind} has not (take bfloat16)"
    if loads_e4m3(spec) and _lacks_e4m3(spec.device_kind):
        other = "float8_e5m2" if spec.paging is None else "bfloat16" if spec.values_in_keys else "int8"
        return (
            f"its compiler converts float8_e4m3fn from Ada and Hopper on, and this is {spec.device_kind} (take {other})"
        )
    if spec.values_in_keys:
        return _limit_of_latent(spec.Dv, spec.D - spec.Dv)
    if max(spec.D, spec.Dv) > MAX_HEAD_SIZE:
        return f"its kernels take head sizes up to {MAX_HEAD_SIZE}, not {max(spec.D, spec.Dv)}"
    return None


def limit_of_platform(platform: str, *, interpret: bool) -> str | None:
    """Why no kernel runs on a platform, or None: they are compiled for NVIDIA GPUs, and interpreted anywhere."""
    if platform == "gpu" or interpret:
        return None
    return (
        f"it needs an NVIDIA GPU, and this call runs on {platform} (for tests, "
        "config=jflex.Config(interpret=True) interprets the kernels)"
    )


def loads_e4m3(spec: AttentionSpec) -> bool:
    """True if a kernel loads float8_e4m3fn: of pages, and of keys in decoding; other calls widen arrays before."""
    if spec.paging is not None:
        return spec.paging.dtype == "float8_e4m3fn"
    return spec.qk_dtype == "float8_e4m3fn" and decodes(spec)


def _lacks_e4m3(device_kind: str) -> bool:
    """True if a device of this name is known to be older than compute capability 8.9."""
    return any(word.split("-")[0] in _BEFORE_ADA for word in device_kind.split())


def _limit_of_latent(latent: int, rope: int) -> str | None:
    """Sizes of a latent cache that are refused: the values must be whole chunks of columns of the keys."""
    if latent > MAX_LATENT_SIZE or rope > MAX_ROPE_SIZE:
        return (
            f"its kernels take latent sizes up to {MAX_LATENT_SIZE} and rotated keys up to {MAX_ROPE_SIZE}, not "
            f"{latent} and {rope}"
        )
    if latent % MIN_TILE or latent.bit_count() > 2:
        return (
            "its kernels take a latent size that is a power of two of at least 16, or the sum of two of them, not "
            f"{latent}"
        )
    return None


def decodes(spec: AttentionSpec) -> bool:
    """True if the kernel for few queries runs: they fit into a tile, and share one row of the mask's lists."""
    blocks = spec.blocks
    one_row = blocks is None or (blocks.size[0] >= spec.T and (blocks.heads == 1 or spec.group == 1))
    few = 0 < spec.T <= MAX_DECODED and spec.group * spec.T <= MAX_DECODED_ROWS
    return few and one_row and spec.config.forward is None


# --- compilers: the Triton inside Pallas, and official Triton, the package `triton`


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
    paging = spec.paging
    if paging is None or paging.dtype is None:
        return None
    sides = [(spec.Dv, None)] if spec.has_latent_tiles else [(spec.D, spec.key_mod), (spec.Dv, spec.value_mod)]
    in_words = lambda size, mod: spec.may_hold_pairs(size, mod) and not spec.has_latent_tiles
    in_bytes = [spec.paged_rows * size for size, mod in sides if not in_words(size, mod)]
    unreached = [elements for elements in in_bytes if exceeds_pallas_indexing(elements)]
    if not unreached:
        return None
    return (
        f"pages of {paging.dtype} have {unreached[0]} elements: with more than 2 ** 31 in at most 2 ** 32 bytes, "
        "Pallas does not reach the last ones ('official_triton' does; or take fewer or more pages)"
    )
