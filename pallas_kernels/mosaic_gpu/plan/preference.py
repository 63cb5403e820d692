"""Calls that the Hopper kernels can run, but the Triton kernels run faster."""

from __future__ import annotations

import math

from pallas_kernels.mosaic_gpu.launch import NUM_SMS
from pallas_kernels.mosaic_gpu.plan.plan import HopperPlan
from pallas_kernels.mosaic_gpu.score.tile import is_periodic
from pallas_kernels.spec import AttentionSpec

WARPS_PER_GROUP = 4
MIN_LENGTH = 128  # queries and keys from which on these kernels may be preferred
NARROW = 64  # head size up to which few tiles, and gradients of short sequences, are faster in 'triton'
LATENT_ROWS = 16  # of a request: query tokens times heads, from which on the kernel for latent caches was timed
PROMPT_QUERIES = 128  # of a tile of the kernel for prompts, all of one head
CHUNK = 2048  # queries from which on they may be one chunk of a prompt beside requests that decode
VERY_NARROW = 32  # head size up to which that goes for longer ones


def slower_forward(plan: HopperPlan) -> str | None:
    """Cases that underfill a CTA or the GPU, or are not MMA-bound, as a sentence; None where these kernels lead.

    H200, jax 0.11.2, bf16, 16 heads, TFLOP/s and of `triton`: causal, 64 texts of 256 tokens, 220 and 202
    at head size 64, 328 and 235 at 128, and one such text at 128, 49 and 33. No mask, head size 32, 222 and 232 at
    384 tokens, 267 and 271 at 768; with a pair bias 188 and 171, 222 and 199. Head size 64, 32 texts of 128 tokens,
    143 and 136; of 512, 298 and 270. A sine of each score, causal, 4 x 4096 tokens, head size 64: 6031 us and 2475.
    """
    spec = plan.spec
    length, tiles = min(spec.T, spec.S), spec.B * spec.Hq * math.ceil(spec.T / 128)
    widest = max(spec.D, spec.Dv)
    if length < MIN_LENGTH:
        return f"below {MIN_LENGTH} queries or keys only the kernels of 'triton' were tuned"
    if length < 8 * MIN_LENGTH and widest <= VERY_NARROW and spec.score_mod is None:
        return f"below {8 * MIN_LENGTH} queries or keys, at head sizes up to {VERY_NARROW}, 'triton' is faster"
    if length < (4 if widest <= NARROW else 2) * MIN_LENGTH and tiles < NUM_SMS:
        return f"{tiles} tiles of 128 queries leave some of the {NUM_SMS} SMs without work"
    if plan.forward.tiles.num_warps == WARPS_PER_GROUP:
        return "blocks of 64 queries keep one of its two consumer warp groups idle (a `block_size` of 128 does not)"
    if is_periodic(spec.programs.score):
        return "sin, cos or tan of each score takes longer beside wgmma (H200, head size 64: 2.4 times)"
    return None


def slower_latent(spec: AttentionSpec) -> str | None:
    """Why `triton` is preferred for a latent cache: loading it bounds the time; None otherwise.

    Jax 0.11.2, bf16, 128 sequences of 4096 keys, latent and rope size 512 and 64, pages of 64, us and of `triton`.
    H100, 16 heads, one query token: 222 and, in an earlier run, 235. H200, 128 heads, with one and with two: 251 and
    834, 454 and 1695; under a causal window of 1024 keys 114 and 277, 212 and 574.
    """
    rows = spec.Hq * spec.T // spec.B
    if rows >= LATENT_ROWS:
        return None
    return f"below {LATENT_ROWS} query rows to a request (here {rows}) loading keys bounds the time"


def slower_prompts(spec: AttentionSpec) -> str | None:
    """Why `triton` is preferred for short prompts over pages, as a sentence, by the mean of their queries; or None.

    Tiles of `triton` hold queries of all heads of a group; tiles of the kernel for prompts hold queries of one head.

    H100, jax 0.11.2, bf16, causal, 32 query and 8 key heads of 128, pages of 64, requests x queries of so many keys, us
    and of `triton`: 16 x 64 of 2048, 156 and 129; 1 x 128 of 8192, 47 and 64; 8 x 256 of 256, 43 and 55; 1 x 2048 of
    8192, 382 and 563, and beside 63 that decode, 781 and 937.
    """
    if min(CHUNK, PROMPT_QUERIES * spec.B) <= spec.T:
        return None
    return f"below {CHUNK} queries, and {PROMPT_QUERIES} to a request, many rows of its tiles for prompts are empty"


def slower_decode() -> str:
    """Why `triton` is preferred for few queries against keys and values, contiguous or in pages.

    H200, jax 0.11.2, bf16, 32 query and 8 key heads of 128, us and of `triton`: 8 sequences of 16384 keys, 137
    and 132; 32 of 4096 from pages of 64, 140 and 139; lengths up to 16384, uniform, 147 and 146, skewed, 166 and 149.
    """
    return "its kernel for few queries takes up to 12 % longer than those of 'triton'"


def slower_backward(plan: HopperPlan) -> str | None:
    """Gradients for which few MMAs of narrow heads do not outweigh the other work, as a sentence, or None.

    H200, jax 0.11.2, bf16, us and of `triton`, causal and without a mask: head size 64, 212 and 193, 231 and 237 for
    384 tokens, 231 and 224, 268 and 293 for 512, 256 and 273, 332 and 394 for 768; head size 128, 310 and 357, 351 and
    377 for 256. Head size 32, no mask: 689 and 654 for 1024, 1178 and 1221 for 2048.

    Not where their own kernel sums the gradient of a pair bias that batch or heads share: `triton` computes nine GEMMs
    and each weight three times, these seven and twice. Head size 32, TFLOP/s: B 384, H 4, 384 tokens, 135 and 109.
    """
    spec = plan.spec
    config, length, widest = spec.config, min(spec.T, spec.S), max(spec.D, spec.Dv)
    if config.dkv is not None or config.dq is not None or config.deterministic or widest > NARROW:
        return None
    if plan.backward is not None and plan.backward.tiles.captured is not None:
        return None
    least, size = (2048, VERY_NARROW) if widest <= VERY_NARROW else (512, NARROW)
    return None if length >= least else f"below {least} queries or keys, at head sizes up to {size}, it is faster"
