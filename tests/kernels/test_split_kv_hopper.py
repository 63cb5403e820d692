"""The kernels for Hopper that split keys: compiled without a GPU, where they are selected, what they refuse."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jflex
from pallas_kernels.mosaic_gpu import smem, split_kv
from pallas_kernels.mosaic_gpu.decode import kernel as decode_kernel
from pallas_kernels.mosaic_gpu.latent import kernel as latent_kernel
from pallas_kernels.mosaic_gpu.latent.sizes import Heads
from pallas_kernels.spec import Paging
from tests.support import gpu_compile
from tests.support.rows import tiers
from tests.support.specs import spec_of

BACKEND = "mosaic_gpu"
NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
COMPILES = pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def requests(R, page):
    """A batch of requests of up to 4096 keys."""
    return jflex.paged.PagedBatch(shape(R + 1), shape(R), shape(R, 4096 // page))


def paged(T=1, B=32, Hq=32, Hkv=8, D=128, Dv=None, page=64, dtype=jnp.bfloat16, N=None, **options):
    """A call over pages, with N queries in all or T to a request, and the shapes of its arguments."""
    pages = lambda size: shape(8193, page, Hkv, size, dtype=dtype)
    cache = jflex.paged.PagedCache(pages(D), pages(Dv or D))
    call = functools.partial(jflex.paged_attention, **{"implementation": BACKEND, **options})
    return call, shape(N or B * T, Hq, D, dtype=dtype), cache, requests(B, page)


def dense(T=1, B=8, Hq=32, Hkv=8, S=16384, D=128, Dv=None, dtype=jnp.bfloat16, lengths=False, **options):
    """A call over contiguous keys, and the shapes of its arguments."""
    array = lambda length, heads, size: shape(B, length, heads, size, dtype=dtype)
    call = functools.partial(jflex.flex_attention, **{"implementation": BACKEND, **options})
    with_lengths = lambda q, k, v, n: call(q, k, v, kv_lengths=n)
    arrays = array(T, Hq, D), array(S, Hkv, D), array(S, Hkv, Dv or D)
    return (with_lengths, *arrays, shape(B)) if lengths else (call, *arrays)


def latent(T=1, Hq=128, page=64, latent=512, rope=64, dtype=jnp.bfloat16, sinks=False, **options):
    """A call over the latent vectors of 128 requests, and the shapes of its arguments."""
    cache = jflex.paged.LatentCache(shape(8193, page, 1, latent + rope, dtype=dtype), rope)
    options["sinks"] = jnp.zeros(Hq) if sinks else None
    call = functools.partial(jflex.mla_attention, qk_head_dim=192, **{"implementation": BACKEND, **options})
    return call, shape(128 * T, Hq, latent + rope, dtype=dtype), cache, requests(128, page)


def explained(program, **options):
    """The account of a call on the GPU that is not there."""
    call, *arrays = program(**options)
    with gpu_compile.absent_gpu():
        return jflex.explain(call.func, *arrays, **call.keywords)


# --- compiled for a GPU

SLOPES, CAUSAL = jnp.linspace(0.0, 1.0, 128), jflex.masks.causal()
WINDOW = lambda b, h, q, k: (q >= k) & (q - k < 256)
ALIBI = lambda s, b, h, q, k: s - SLOPES[h] * (q - k).astype(jnp.float32)
SOFTCAP = lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)
COUNTS_BITS = lambda s, b, h, q, k: s + jax.lax.population_count(q ^ k).astype(jnp.float32)
COMPILED = {
    "paged": (paged, {}),
    "paged_causal": (paged, {"T": 4, "mask_mod": CAUSAL, "return_lse": True}),
    "paged_alibi": (paged, {"score_mod": ALIBI}),
    "paged_window": (paged, {"T": 2, "mask_mod": WINDOW}),
    "paged_64": (paged, {"D": 64, "Hq": 16, "Hkv": 16, "dtype": jnp.float16}),
    "paged_192_128": (paged, {"D": 192, "Dv": 128}),
    "paged_256": (paged, {"D": 256}),
    "pages_of_8": (paged, {"page": 8}),
    "pages_of_16": (paged, {"page": 16}),
    "prompts": (paged, {"T": 1024, "B": 8, "mask_mod": CAUSAL}),
    "prompts_beside_tokens": (paged, {"N": 2048 + 63, "B": 64, "mask_mod": CAUSAL, "return_lse": True}),
    "prompts_alibi": (paged, {"T": 1024, "B": 8, "mask_mod": CAUSAL, "score_mod": ALIBI, "page": 16}),
    "prompts_softcap": (paged, {"T": 1024, "B": 8, "mask_mod": CAUSAL, "score_mod": SOFTCAP}),
    "prompts_64": (paged, {"T": 1024, "B": 8, "mask_mod": WINDOW, "D": 64, "page": 8, "dtype": jnp.float16}),
    "prompts_192": (paged, {"T": 1024, "B": 8, "D": 192, "page": 192}),
    "prompts_256": (paged, {"T": 1024, "B": 8, "D": 256, "mask_mod": CAUSAL}),
    "prompts_pages_of_1": (paged, {"T": 1024, "B": 8, "mask_mod": CAUSAL, "page": 1}),
    "prompts_pages_of_4": (paged, {"T": 1024, "B": 8, "mask_mod": CAUSAL, "page": 4, "D": 80, "Dv": 48}),
    "prompt_of_split_keys": (paged, {"T": 512, "B": 1, "mask_mod": CAUSAL, "page": 128}),
    "dense": (dense, {}),
    "dense_64": (dense, {"D": 64, "Hq": 16, "Hkv": 16, "B": 4}),
    "dense_softcap": (dense, {"score_mod": SOFTCAP}),
    "dense_lengths": (dense, {"lengths": True, "score_mod": ALIBI, "mask_mod": WINDOW, "T": 4}),
    "latent": (latent, {}),
    "latent_two_tokens": (latent, {"T": 2, "mask_mod": CAUSAL}),
    "latent_16_heads": (latent, {"Hq": 16, "return_lse": True}),
    "latent_9_heads": (latent, {"Hq": 9, "T": 3}),
    "latent_126_heads": (latent, {"Hq": 126}),
    "latent_softcap": (latent, {"score_mod": SOFTCAP}),
    "latent_alibi": (latent, {"score_mod": ALIBI}),
    "latent_window": (latent, {"T": 2, "mask_mod": WINDOW}),
    "latent_pages_of_16": (latent, {"page": 16}),
    "latent_pages_of_128": (latent, {"page": 128}),
    "latent_sinks": (latent, {"sinks": True}),
    "latent_float16": (latent, {"dtype": jnp.float16}),
    "latent_small": (latent, {"latent": 64, "rope": 16}),
}
# The producer warp group of the latent kernel has 24 registers: it spills addresses, those of queries once for each
# tile of them.
KNOWN_SPILLS = {"paged_256": 84, "prompts_256": 52, "prompts_pages_of_4": 24,
                "latent_16_heads": 48, "latent_9_heads": 48, "latent_pages_of_16": 80}  # fmt: skip


@tiers(full={"name": ["pages_of_16", "prompts", "dense", "latent_9_heads"]}, rest="long")
@NEEDS_011
@COMPILES
@pytest.mark.parametrize("name", COMPILED)
def test_spills_nothing(name):
    program, options = COMPILED[name]
    kernels = {kernel.name: kernel for kernel in gpu_compile.compile_kernels(*program(**options))}
    [found] = [kernels.pop(x) for x in [*kernels] if "sm90" in x]
    assert found.spill <= KNOWN_SPILLS.get(name, 0)
    assert found.tensor == "wgmma"
    assert found.shared <= smem.LIMIT
    assert "jflex_paged_merge" in kernels
    # Without lengths and a mask, the host plans.
    assert ("jflex_paged_plan" in kernels) == (program is not dense or "lengths" in options)


@pytest.mark.full
@NEEDS_011
@COMPILES
def test_shared_memory_is_known_from_what_is_declared(monkeypatch):
    known, launch = [], split_kv.launch

    def noted(*args, **more):
        known.append(smem.bytes_of(jax.tree.leaves(args[3])))
        return launch(*args, **more)

    monkeypatch.setattr(split_kv, "launch", noted)
    [found] = [x for x in gpu_compile.compile_kernels(*paged(Hkv=4)) if "decode_sm90" in x.name]
    assert known[-1] == found.shared
    registers = split_kv.CONSUMERS * decode_kernel.CONSUMER_REGISTERS + decode_kernel.PRODUCER_REGISTERS
    assert registers <= 65536 // smem.WARP_GROUP_THREADS


def latent_spec(**fields):
    spec = spec_of(T=1, S=4096, Hq=128)
    return spec.replace(D=576, Dv=512, paging=Paging(64, 8193), values_in_keys=True, **fields)


def test_shared_memory_of_the_latent_kernel():
    """The figure of the compiled kernel: two tiles of keys and the queries, 72 KiB each, and vectors."""
    declared = jax.tree.leaves(latent_kernel.declare(latent_spec(), Heads.from_count(128), jnp.bfloat16))
    assert smem.bytes_of(declared) == 224336
    assert smem.CONSUMER_REGISTERS * 2 + smem.PRODUCER_REGISTERS <= 65536 // 128


# --- what is selected


@NEEDS_011
@pytest.mark.parametrize(
    ("program", "options", "slower"),
    [
        (paged, {}, "up to 12 % longer"),
        (paged, {"N": 2047, "B": 64}, "below 2048 queries, and 128 to a request, many rows of its tiles for prompts"),
        (paged, {"N": 2048, "B": 64}, None),
        (paged, {"T": 127, "B": 4}, "below 2048 queries, and 128 to a request, many rows of its tiles for prompts"),
        (paged, {"T": 128, "B": 4}, None),
        (dense, {}, "up to 12 % longer"),
        (latent, {}, None),
        (latent, {"Hq": 8}, "below 16 query rows to a request (here 8) loading keys bounds the time"),
        (latent, {"Hq": 16, "T": 2}, None),
        (latent, {"T": 2, "mask_mod": CAUSAL}, None),
        (latent, {"mask_mod": WINDOW}, None),
        (latent, {"mask_mod": lambda b, h, q, k: SLOPES[k % 128] > 0.5}, None),
    ],
    ids=["paged", "short prompts", "chunk", "prompts of 127", "prompts of 128", "dense", "128 heads", "16 heads",
         "two tokens", "causal", "window", "captured"],
)  # fmt: skip
def test_is_preferred_where_products_take_longer_than_loading(program, options, slower):
    account = explained(program, implementation=None, **options)
    assert account.backend == (BACKEND if slower is None else "triton")
    assert slower is None or slower in account.reasons[BACKEND]
    assert explained(program, **options).backend == BACKEND


FOR_FEW = " for 17 queries of a request or more, paged 16 x "
PROMPT = "prompt 128 x {} (8 warps that compute, {} stages)"


@NEEDS_011
@pytest.mark.parametrize(
    ("program", "sizes", "tiles"),
    [
        (paged, {"T": 64, "B": 4}, PROMPT.format(128, 2) + FOR_FEW),
        (paged, {"T": 64, "B": 4, "D": 64}, PROMPT.format(128, 4) + FOR_FEW),
        (paged, {"T": 2048, "B": 1, "D": 256}, PROMPT.format(64, 2)),
        (paged, {}, "paged 64 x 64 (8 warps that compute, 4 stages, 4 heads)"),
        (dense, {"T": 4}, "decode 64 x 64 (8 warps that compute, 4 stages, 4 heads)"),
        (dense, {"D": 64}, "decode 64 x 64 (8 warps that compute, 8 stages, 4 heads)"),
        (latent, {}, "latent 64 x 64 (8 warps that compute, 2 stages, 64 heads)"),
    ],
)
def test_explain_names_the_tiles(program, sizes, tiles):
    account = explained(program, **sizes)
    assert account.backend == BACKEND
    assert account.tiles.startswith(tiles)
    # Gradients have kernels, too.
    assert ("dkv" in account.tiles, "forward" in account.tiles) == (program is dense, False)
    assert program is not latent or (account.query_tiles, account.splits) == (None, None)  # lengths are not known


# --- what is refused

TILES = {"config": jflex.Config(decode=jflex.Tiles(64, 32, 8))}
OTHER_TILES = "`config` sets tiles, .*: 64 rows by 64 keys"
PROMPTS = {"T": 1024, "B": 8}
NO_LOWERING = "`score_mod` .* primitive `population_count` has no lowering for Mosaic GPU"
NEITHER = "neither dropout, statistics of rows nor weights without a softmax"
REFUSALS = [
    ("rows of small pages", paged, {**PROMPTS, "page": 4, "Hq": 65536, "Hkv": 65536, "D": 16},
     "count rows of pages of 4 keys in 32 bits, and there are 2147745792"),
    ("prompts of float32", paged, {**PROMPTS, "dtype": jnp.float32}, "compute in bfloat16 or float16, not float32"),
    ("tiles for prompts", paged, {**PROMPTS, **TILES}, OTHER_TILES + ", or 128 by 128 or 64 for prompts"),
    ("prompts of rotated keys", paged, {**PROMPTS, "key_mod": jflex.rope()}, "and so apply no `key_mod`"),
    ("prompts with a primitive", paged, {**PROMPTS, "score_mod": COUNTS_BITS}, NO_LOWERING),
    ("dtype", paged, {"dtype": jnp.float32}, "compute in bfloat16 or float16, not float32"),
    ("head size", paged, {"D": 72}, "head sizes that are a multiple of 16 up to 256, not 72 and 72"),
    ("large head", paged, {"D": 272}, "up to 256, not 272 and 272"),
    ("page size", paged, {"page": 4}, "takes pages of 8, 16 or 32 keys or of a multiple of 64, not of 4"),
    ("odd page size", paged, {"page": 48}, "not of 48"),
    ("group", paged, {"Hq": 128, "Hkv": 1}, "tiles hold 64 query heads of a key head, not 128"),
    ("vector mod", paged, {"key_mod": jflex.rope()},
     "load keys and values by TMA, and so apply no `key_mod` or `value_mod`"),
    ("statistics", paged, {"return_stats": ("max",)}, NEITHER),
    ("sigmoid", paged, {"normalize": "none"}, "nor weights without a softmax"),
    ("tiles", paged, TILES, OTHER_TILES),
    ("invariant", paged, {"config": jflex.Config(batch_invariant=True)}, "divide keys by the number of SMs"),
    ("a primitive", paged, {"score_mod": COUNTS_BITS}, NO_LOWERING),
    ("latents of float32", latent, {"dtype": jnp.float32}, "compute in bfloat16 or float16, not float32"),
    ("latent size", latent, {"latent": 640},
     "a multiple of 32 up to 512 and rotated keys of a multiple of 16 .* not 640 and 64"),
    ("rope size", latent, {"rope": 24}, "not 512 and 24"),
    ("latent page size", latent, {"page": 4}, "takes pages of 8, 16 or 32 keys or of a multiple of 64, not of 4"),
    ("latent tiles", latent, TILES, OTHER_TILES),
    ("a primitive of latents", latent, {"score_mod": COUNTS_BITS}, NO_LOWERING),
    ("repairs", latent, {"latent": 480, "mask_mod": CAUSAL},
     "the kernels of Triton merge its partial results and repair them, and .* not 480"),
    ("shared memory", latent, {"rope": 128}, r"need \d+ bytes of shared memory, and a CTA has 232448"),
]  # fmt: skip


@NEEDS_011
@pytest.mark.parametrize(("program", "sizes", "message"), [x[1:] for x in REFUSALS], ids=[x[0] for x in REFUSALS])
def test_refuses(program, sizes, message):
    call, *arrays = program(**sizes)
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(*arrays)


@NEEDS_011
@pytest.mark.parametrize("sizes", [{}, PROMPTS], ids=["tokens", "prompts"])
def test_refuses_eight_bits(sizes):
    call, q, _, batch = paged(**sizes)
    cache = jax.eval_shape(lambda: jflex.paged.PagedCache.create(9, 64, 8, 128, dtype=jnp.float8_e4m3fn))
    message = "take no eight bits, and these have float8_e4m3fn"
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(q, cache, batch)


@NEEDS_011
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"S": 1000 + 4}, "TMA loads 8 keys at once, and S is 1004"),
        ({"block_mask": True}, "takes no lists of blocks"),
        ({"return_stats": ("max",)}, "neither dropout, statistics of rows"),
        ({"config": jflex.Config(batch_invariant=True)}, "are not batch invariant"),
    ],
    ids=["odd length", "block mask", "statistics", "invariant"],
)
def test_of_contiguous_keys_the_forward_kernel_runs_the_rest(options, reason):
    if "block_mask" in options:
        options = {"block_mask": jflex.create_block_mask(lambda b, h, q, k: k < 700, None, None, 1, 1024)}
    options = {"S": 1024, **options}
    assert explained(dense, **options).tiles.startswith("forward ")
    chosen = explained(dense, implementation=None, **options)
    assert (chosen.backend, reason in chosen.reasons[BACKEND]) == ("triton", True)
