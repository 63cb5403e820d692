"""Paged attention and the indexer for an H200, compiled without a GPU: what spills, which instructions run."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jflex
from flax_layers.attention.streaming import Streaming
from pallas_kernels.triton.plan.limits import MAX_DECODED
from tests.support import gpu_compile
from tests.support.rows import tiers

KERNELS = ["jflex_paged", "jflex_paged_merge"]
# Bytes of registers that each thread stores away: more is a step back, less is welcome. Elsewhere 16 pass.
KNOWN_SPILLS = {"trees": 32, "trees_in_windows": 32, "trees_beside_prompts": 36, "trees_with_alibi": 384,
                "latent_e4m3_128_heads": 2048, "latent_e4m3_64_heads": 1424,
                "latent_128_heads": 124, "latent_16_heads": 24, "latent_mixed": 132,
                "alibi_batch_invariant": 20}  # fmt: skip
CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
SHOWN = jnp.arange(4096) % 3 == 0
GAINS = jnp.linspace(0.5, 1.5, 8 * 128).reshape(8, 128)
STATS = {"return_lse": False, "return_stats": ("lse", "max", "entropy")}
DROPOUT = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
WINDOW = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def alibi(score, b, h, q_idx, kv_idx):
    return score - jnp.exp2(-(h + 1).astype(jnp.float32)) * (q_idx - kv_idx).astype(jnp.float32)


def norm(vector):
    return vector * jax.lax.rsqrt(jnp.mean(vector * vector) + 1e-6)


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * jnp.tanh(score / 20.0)


def part_of_streaming(number, score_mod=None, N=32, R=32):
    batch = jflex.paged.PagedBatch(jnp.arange(R + 1), jnp.full(R, 2000), jnp.zeros((R, 64), jnp.int32))
    part = Streaming(4, 1020).parts(batch, N, jflex.rope(), score_mod, WINDOW if score_mod else None)[number]
    return {"N": N, "R": R, **dict(zip(part._fields[1:], part[1:], strict=True))}


def program(
    R=32, N=32, D=128, Hq=32, page_size=64, dtype=jnp.bfloat16, nodes=None, rope=None, held=None, of="token", **options
):
    """`paged_attention` of up to 4096 keys, and the shapes of its arguments; with trees if there are nodes.

    Keys and values are held in eight bits, if their dtype is given, with scales of tokens or of heads.
    With a size of rotated keys, `mla_attention` over latent vectors of 512 columns.
    """
    max_pages = 4096 // page_size
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype)
    integers = functools.partial(shape, dtype=jnp.int32)
    cache = jflex.paged.PagedCache(*[shape(1 + R * max_pages, page_size, 8, D)] * 2)
    if held is not None:
        pages = shape(*cache.k.shape, dtype=jnp.dtype(held))
        scale = shape(*(cache.k.shape[:3] if of == "token" else (8,)), dtype=jnp.float32)
        cache = jflex.paged.PagedCache(pages, pages, scale, scale)
    if rope is not None:
        D, pages = 512 + rope, functools.partial(shape, 1 + R * max_pages, page_size)
        cache = jflex.paged.LatentCache(pages(1, D), rope)
        if held is not None:
            rows, scale = pages(1, 512, dtype=jnp.dtype(held)), pages(4, dtype=jnp.float32)
            cache = jflex.paged.LatentCache(rows, rope, pages(1, rope, dtype=jnp.bfloat16), scale)
        options["qk_head_dim"] = 192
    words = None if nodes is None else integers(R, nodes)
    batch = jflex.paged.PagedBatch(integers(R + 1), integers(R), integers(R, max_pages), words)
    call = jflex.paged_attention if rope is None else jflex.mla_attention
    attend = functools.partial(call, implementation="triton", **{"return_lse": True, **options})
    return attend, shape(N, Hq, D), cache, batch


CASES = {
    "decode_pages_of_64": {},
    "decode_pages_of_16": {"page_size": 16},
    "decode_batch_invariant": {"config": jflex.Config(batch_invariant=True)},
    "alibi_batch_invariant": {"config": jflex.Config(batch_invariant=True), "score_mod": alibi, "mask_mod": CAUSAL},
    "decode_pages_of_1": {"page_size": 1},
    "decode_head_size_64": {"D": 64, "Hq": 8},
    "decode_alibi": {"score_mod": alibi, "mask_mod": CAUSAL},
    "decode_softcap": {"score_mod": softcap, "mask_mod": WINDOW},
    # Masks of which nothing is loaded by request or query: no tile of theirs is left to a condition of the program.
    "decode_mask_by_key": {"mask_mod": lambda b, h, q_idx, kv_idx: SHOWN[kv_idx]},
    "decode_one_key": {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx == 17},
    "decode_float32": {"dtype": jnp.float32},
    "decode_streaming": part_of_streaming(0),
    "decode_streaming_alibi": part_of_streaming(0, alibi),
    "mixed_window_alibi": part_of_streaming(0, alibi, 2048 + 63, 64),
    "mixed_sinks_alibi": part_of_streaming(1, alibi, 2048 + 63, 64),
    "speculative": {"N": 128, "mask_mod": CAUSAL},
    "trees": {"N": 256, "nodes": 8, "mask_mod": CAUSAL},
    "trees_decoded": {"N": 16, "R": 2, "nodes": 8, "mask_mod": CAUSAL, "D": 64, "Hq": 8},
    "trees_in_windows": {"N": 256, "nodes": 8, "mask_mod": WINDOW, "score_mod": softcap},
    "trees_with_alibi": {"N": 512, "nodes": 32, "mask_mod": CAUSAL, "score_mod": alibi},
    "trees_beside_prompts": {"N": 2048 + 64 * 8, "R": 64, "nodes": 8, "mask_mod": CAUSAL},
    "decode_rope": {"key_mod": jflex.rope()},
    "decode_rope_pages_of_16": {"key_mod": jflex.rope(), "page_size": 16},
    "decode_rope_of_neighbors": {"key_mod": jflex.rope(interleaved=True)},
    "decode_rope_head_size_64": {"key_mod": jflex.rope(), "D": 64, "Hq": 8},
    "decode_norm_and_rope": {"key_mod": lambda x, b, h, i: jflex.rope()(norm(x), b, h, i)},
    "decode_gains_and_values": {"key_mod": lambda x, b, h, i: x * GAINS[h], "value_mod": lambda x, b, h, i: norm(x)},
    "mixed_rope": {"N": 2048 + 63, "R": 64, "mask_mod": CAUSAL, "key_mod": jflex.rope()},
    "decode_e4m3": {"held": "float8_e4m3fn"},
    "decode_e4m3_of_heads_pages_of_16": {"held": "float8_e4m3fn", "of": "head", "page_size": 16},
    "decode_e5m2_pages_of_1": {"held": "float8_e5m2", "page_size": 1},
    "decode_int8": {"held": "int8", "mask_mod": WINDOW},
    "decode_e4m3_float16": {"held": "float8_e4m3fn", "dtype": jnp.float16},
    "decode_int8_rope": {"held": "int8", "key_mod": jflex.rope(), "value_mod": lambda x, b, h, i: norm(x)},
    "mixed_e4m3": {"N": 2048 + 63, "R": 64, "mask_mod": CAUSAL, "held": "float8_e4m3fn"},
    "latent_128_heads": {"Hq": 128, "rope": 64, "mask_mod": CAUSAL},
    "latent_16_heads": {"Hq": 16, "rope": 64},
    # Spills are descriptors of wgmma, stored before the mainloop, and read again by each.
    "latent_e4m3_128_heads": {"Hq": 128, "rope": 64, "held": "float8_e4m3fn", "mask_mod": CAUSAL},
    "latent_e4m3_64_heads": {"Hq": 64, "rope": 64, "held": "float8_e4m3fn"},
    "latent_e4m3_16_heads": {"Hq": 16, "rope": 64, "held": "float8_e4m3fn"},
    "latent_mixed": {"N": 2048 + 63, "R": 64, "Hq": 16, "rope": 64, "mask_mod": CAUSAL},
    "mixed": {"N": 2048 + 63, "R": 64, "mask_mod": CAUSAL},
    "decode_stats": STATS,
    "mixed_stats": {"N": 2048 + 63, "R": 64, "mask_mod": CAUSAL, **STATS},
    "decode_dropout": DROPOUT,
    "mixed_dropout": {"N": 2048 + 63, "R": 64, "mask_mod": CAUSAL, **DROPOUT},
    "mixed_head_size_64": {"N": 2048 + 63, "R": 64, "D": 64, "mask_mod": CAUSAL},
    "mixed_float32": {"N": 2048 + 63, "R": 64, "dtype": jnp.float32, "mask_mod": CAUSAL},
}


# One of each kind of kernel; others take up to 30 s to compile.
SOME = ["decode_alibi", "decode_stats", "decode_e4m3", "latent_16_heads"]


@tiers(full={"name": SOME}, rest="long")
@pytest.mark.parametrize("name", CASES)
def test_compiles(name):
    attend, *shapes = program(**CASES[name])
    kernels = gpu_compile.compile_or_skip(attend, *shapes)
    N, R = (CASES[name].get(x, 32) for x in "NR")
    launches = 2 if max(R, MAX_DECODED) < N else 1  # for requests with few queries, and with many
    names = [kernel.name.rstrip("_0123456789") for kernel in kernels]
    repairs = ["jflex_paged_repair"] if CASES[name].get("mask_mod") is not None else []
    assert sorted(names) == sorted((KERNELS + repairs) * launches)
    kernels = [kernel for kernel in kernels if "repair" not in kernel.name]  # which hardly ever compute
    spilled = {kernel.name: kernel.spill for kernel in kernels if kernel.spill}
    assert max(spilled.values(), default=0) <= KNOWN_SPILLS.get(name, 16), (
        f"bytes of registers that each thread stores away: {spilled}"
    )
    if "float32" not in name:
        assert all(kernel.tensor for kernel in kernels if "merge" not in kernel.name)


# --- the indexer


SCORES, SELECT = "jflex_indexer_scores", "jflex_indexer_select"


def indexer(N, H, D, S, k, dtype=jnp.bfloat16):
    """Scores and selection of sequences of N queries; the shapes of their arguments."""

    def best(query, key, weights):
        scores = jflex.indexer_scores(query, key, weights, implementation="triton")
        return jflex.select_keys(scores, k, visible=jnp.arange(S)[None] < S - 1, implementation="triton")

    shape = jax.ShapeDtypeStruct
    return best, shape((N, H, D), dtype), shape((S, D), dtype), shape((N, H), jnp.float32)


INDEXER = {  # sequences, or None without `jax.vmap`; whether each has its keys; launches of the selection
    "decode": (32, True, (1, 64, 128, 65536, 2048), 2),
    "shared_keys": (32, False, (1, 64, 128, 65536, 2048), 2),
    "prefill": (None, True, (512, 64, 128, 8192, 2048), 1),
    "odd_sizes": (None, True, (7, 3, 80, 1000, 30), 1),
    "many_heads": (2, True, (3, 128, 256, 4096, 64), 1),
    "most_selected": (None, True, (2, 16, 64, 100_000, 16384), 3),
}


@pytest.mark.full
@pytest.mark.parametrize("name", INDEXER)
def test_the_indexer_compiles(name):
    sequences, has_keys, sizes, launches = INDEXER[name]
    best, *shapes = indexer(*sizes)
    if sequences is not None:
        best = jax.vmap(best, in_axes=(0, 0 if has_keys else None, 0))
        several = lambda x: jax.ShapeDtypeStruct((sequences, *x.shape), x.dtype)
        shapes = [x if n == 1 and not has_keys else several(x) for n, x in enumerate(shapes)]
    kernels = gpu_compile.compile_or_skip(best, *shapes)
    names = [kernel.name.rstrip("_0123456789") for kernel in kernels]
    assert sorted(names) == [SCORES, *[SELECT] * launches]
    assert not {kernel.name: kernel.spill for kernel in kernels if kernel.spill}
    assert all(kernel.tensor == "wgmma" for kernel in kernels if SCORES in kernel.name)
