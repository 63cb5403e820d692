"""What the Triton kernels cannot run, whatever the mods: asked before Pallas is imported."""

from __future__ import annotations

from pallas_kernels.spec import AttentionSpec

MAX_DECODED = 16  # queries of a sequence that are decoded
MAX_DECODED_ROWS = 64  # query heads of a key head times queries, which a tile of the decoding kernel holds
MAX_HEAD_SIZE = 256
MAX_LATENT_SIZE, MAX_ROPE_SIZE = 512, 64  # of multi-head latent attention
# Words, up to a dash, in the names of devices of compute capability 8.0 to 8.7.
_BEFORE_ADA = ("A100", "A800", "A30", "A10", "A16", "A40", "A2", "A4000", "A4500", "A5000", "A5500", "A6000", "3050",
               "3060", "3070", "3080", "3090", "Orin")  # fmt: skip
KEYS_OF_SPLIT = 1024  # of a split where the batch must not matter (`pallas_kernels.split_kv.fixed_splits`)
MIN_TILE = 16  # of queries or keys: what an MMA of Triton takes


def limit_of_device(spec: AttentionSpec) -> str | None:
    """What of the device, the configuration, the dtype or the head sizes every kernel here refuses."""
    elsewhere = limit_of_platform(spec.platform, interpret=spec.config.interpret)
    if elsewhere is not None:
        return elsewhere
    if spec.config.batch_invariant and "entropy" in spec.stats:
        return "its splits of a constant number of keys have no entropy (leave out `batch_invariant`, or the statistic)"
    if spec.dtype not in ("bfloat16", "float16", "float32"):
        return f"its kernels compute in bfloat16, float16 or float32, not {spec.dtype}"
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
    """Whether a kernel loads float8_e4m3fn: of pages, and of keys in decoding; other calls widen arrays before."""
    if spec.paging is not None:
        return spec.paging.dtype == "float8_e4m3fn"
    return spec.qk_dtype == "float8_e4m3fn" and decodes(spec)


def _lacks_e4m3(device_kind: str) -> bool:
    """Whether a device of this name is known to be older than compute capability 8.9."""
    return any(word.split("-")[0] in _BEFORE_ADA for word in device_kind.split())


def _limit_of_latent(latent: int, rope: int) -> str | None:
    """What of the sizes of a latent cache is refused: the values must be whole chunks of columns of the keys."""
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
    """Whether the kernel for few queries runs: they fit into a tile, and share one row of the mask's lists."""
    blocks = spec.blocks
    one_row = blocks is None or (blocks.size[0] >= spec.T and (blocks.heads == 1 or spec.group == 1))
    few = 0 < spec.T <= MAX_DECODED and spec.group * spec.T <= MAX_DECODED_ROWS
    return few and one_row and spec.config.forward is None
