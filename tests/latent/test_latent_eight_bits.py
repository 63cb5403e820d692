"""Latent caches of eight bits: the row of FlashMLA bit for bit, attention on every backend, layers, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers.nnx import MultiHeadLatentAttention
from jflex.paged import LatentCache, PagedBatch, copy_pages, copy_slots, write_latent
from pallas_kernels.mosaic_gpu.plan.limits import limit_of_machine
from pallas_kernels.spec import Paging
from pallas_kernels.triton.plan.limits import limit_of_device
from tests.cases import mask_pairs, paged_cases, score_pairs
from tests.cases.paged_cases import MIXED, latent_case, slopes
from tests.support import eight_bits_model as model
from tests.support import paged_evaluation
from tests.support.paged_evaluation import options_of, run
from tests.support.rows import tiers
from tests.support.specs import spec_of

pytestmark = pytest.mark.usefixtures("settings_of_device")
E4M3 = "float8_e4m3fn"
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["reference", "xla", "triton-interpret", GPU]
PAGES, PAGE = 4, 4
SLOTS = [9, -1, 4, 12, 10, 5, 10**6]
KEPT = np.array([0 <= slot < PAGE * PAGES for slot in SLOTS])

held_case = functools.partial(latent_case, held=E4M3)
of_256 = functools.partial(held_case, D=272, Dv=256, rope=16)
CASES = [
    of_256("tiles_decode", Hq=16),
    of_256("tiles_mixed", **MIXED, Hq=3, mask=mask_pairs.causal, score=slopes),
    of_256("tiles_softcap", (1, 4), (48, 20), Hq=16, score=score_pairs.softcap, factor=8.0, page_size=1),
    of_256("tiles_divided", (1, 1, 2), (1500, 0, 700), Hq=8, page_size=64, mask=mask_pairs.causal),
    held_case("tiles_of_three_in_layers", (1, 2), (20, 33), 2, Hq=4, D=408, Dv=384, rope=24, layers=2),
    held_case("tiles_of_one", (1, 20), (20, 33), Hq=4, D=144, Dv=128, rope=16, mask=mask_pairs.causal),
    held_case("tiles_of_deepseek", (1, 2), (70, 33), Hq=16, D=576, Dv=512, rope=64, scale=192**-0.5),
]
IN_BFLOAT16 = [paged_cases.in_dtype(case, "bfloat16") for case in CASES]


@tiers(
    default={"backend": "xla", "case": "tiles_mixed"},
    full=[
        {"backend": "xla", "case": ["tiles_divided", "tiles_of_deepseek_bfloat16"]},
        {"backend": "reference", "case": "tiles_of_three_in_layers_bfloat16"},
        {"backend": "triton-interpret", "case": [
            "tiles_decode", "tiles_softcap_bfloat16", "tiles_divided_bfloat16", "tiles_of_three_in_layers",
            "tiles_of_one",
        ]},
    ],
    rest="gpu",
)  # fmt: skip
@pytest.mark.parametrize("case", [*CASES, *IN_BFLOAT16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(case, backend):
    """Of what the cache holds; NaN lies in all that no request may read, scales included."""
    paged_evaluation.check(case, run(case, backend))


# --- what is written


def drawn(dtype=np.float32, latent=256, rope=24, tokens=7):
    """Tiles of very different magnitude; of zeros, of little, and at the borders between two scales."""
    rng = np.random.default_rng(0)
    tiles = rng.normal(size=(tokens, latent // 128, 128)) * 10.0 ** rng.uniform(-3, 3, (tokens, latent // 128, 1))
    tiles[0, 0], tiles[2, 1], tiles[3, 0, 5], tiles[3, 1, 7] = 0, 1e-37, -60000, 7168
    tiles[4, 0] = np.clip(tiles[4, 0], -1, 1)
    tiles[4, 0, 3], tiles[4, 1] = 1.75, np.nextafter(np.float32(1.75), np.float32(2))
    return tiles.reshape(tokens, latent).astype(dtype), rng.normal(size=(tokens, rope)).astype(dtype)


def bits(x):
    return np.asarray(x).view(np.uint8)


def bytes_of(cache):
    """Each token as FlashMLA has it: latent columns, scales, rotated columns."""
    return np.concatenate(
        [bits(x).reshape(*cache.rows.shape[:-2], -1) for x in (cache.rows, cache.scale, cache.rope)], -1
    )


@tiers(full={"dtype": "float32", "layers": None}, in_turns=True, rest="full")
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16], ids=lambda x: jnp.dtype(x).name)
def test_written_bit_for_bit(dtype, layers):
    latent, rope_key = drawn(dtype)
    layer = None if layers is None else 1
    cache = LatentCache.create(PAGES, PAGE, 256, 24, dtype=E4M3, layers=layers)
    tiles = model.in_tiles(latent)
    scales = model.scales_of_tiles(tiles)
    assert (np.frexp(scales)[0] == 0.5).all()
    rows = model.quantized(tiles, scales, E4M3).reshape(latent.shape)
    right = np.concatenate([bits(rows), bits(scales), bits(rope_key.astype(jnp.bfloat16))], axis=1)
    for step in (write_latent, jax.jit(write_latent, donate_argnames="cache")):
        found = step(jax.tree.map(jnp.copy, cache), latent, rope_key, INT(SLOTS), layer=layer)
        before, after = (bytes_of(x).reshape(-1, PAGES * PAGE, right.shape[1]) for x in (cache, found))
        expected = before.copy()
        expected[layer or 0, np.array(SLOTS)[KEPT]] = right[KEPT]
        np.testing.assert_array_equal(after, expected)
        assert np.isfinite(np.asarray(found.rows, np.float32)).all()


@pytest.mark.full
def test_the_row_of_flash_mla_is_656_bytes():
    cache = LatentCache.create(PAGES, PAGE, 512, 64, dtype=E4M3)
    cache = write_latent(cache, *drawn(np.float32, 512, 64), INT(SLOTS))
    packed = bytes_of(cache)
    assert packed.shape == (PAGES, PAGE, 656)
    rows, scale, rope = np.split(packed, [512, 528], axis=-1)
    back = rows.view(cache.rows.dtype)[:, :, None], scale.view(np.float32), rope.view(jnp.bfloat16)[:, :, None]
    again = LatentCache(jnp.asarray(back[0]), 64, jnp.asarray(back[2]), jnp.asarray(back[1]))
    again.check()
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.full
def test_what_is_not_finite_stays_in_its_tile():
    latent, rope_key = np.ones((3, 256), np.float32), np.ones((3, 16), np.float32)
    latent[0, 3], latent[1, 200] = np.nan, np.inf
    cache = LatentCache.create(PAGES, PAGE, 256, 16, dtype=E4M3)
    cache = write_latent(cache, latent, rope_key, INT([4, 5, 6]))
    with np.errstate(invalid="ignore"):  # of 0 times infinity
        found = model.dequantized(model.in_tiles(np.asarray(cache.rows[1, :3, 0])), np.asarray(cache.scale[1, :3]))
    assert np.isnan(found).all(axis=-1).tolist() == [[True, False], [False, True], [False, False]]
    assert (found[~np.isnan(found)] == 1).all()


@pytest.mark.full
@pytest.mark.parametrize("layers", [None, 2])
def test_all_of_a_token_moves(layers):
    layer = None if layers is None else 1
    cache = LatentCache.create(PAGES, PAGE, 256, 24, dtype=E4M3, layers=layers)
    cache = write_latent(cache, *drawn(), INT(range(4, 4 + len(SLOTS))), layer=layer)
    own = lambda cache: bytes_of(cache) if layers is None else bytes_of(cache)[layer]
    np.testing.assert_array_equal(own(copy_pages(cache, INT([1, 2]), INT([3, -1])))[3], own(cache)[1])
    np.testing.assert_array_equal(own(copy_slots(cache, INT([6]), INT([13])))[3, 1], own(cache)[1, 2])


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA on a CPU")
def test_the_cache_is_not_widened():
    cache = jax.eval_shape(lambda: LatentCache.create(1025, 64, 256, 16, dtype=E4M3, layers=2))
    latent, rope_key = (jax.ShapeDtypeStruct((5, size), jnp.float32) for size in (256, 16))
    query, slots = jax.ShapeDtypeStruct((4, 4, 272), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    batch = jax.eval_shape(lambda: PagedBatch(INT(range(5)), INT([1] * 4), jnp.zeros((4, 64), jnp.int32)))
    step = jax.jit(functools.partial(write_latent, layer=1), donate_argnames="cache")
    attend = jax.jit(functools.partial(jflex.mla_attention, layer=1, qk_head_dim=96, implementation="xla"))
    for lowered in (step.lower(cache, latent, rope_key, slots), attend.lower(query, cache, batch)):
        assert lowered.compile().memory_analysis().temp_size_in_bytes < cache.rows.size / 4


# --- layers


def ratio(right, found):
    right, found = (np.asarray(x, np.float64) for x in (right, found))
    return 10 * np.log10(np.square(right).sum() / np.square(found - right).sum())


def layer(dtype=jnp.float32):
    sizes = {"latent_dim": 128, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 16}
    return MultiHeadLatentAttention(64, 4, **sizes, dtype=dtype, mask_mod=jflex.masks.causal(), rngs=nnx.Rngs(0))


@pytest.mark.full
def test_a_layer_reads_eight_bits():
    inputs, wide = jax.random.normal(jax.random.key(0), (40, 64)), layer()
    batch = PagedBatch(INT([0, 40]), INT([40]), INT([[1, 2, 3]]))
    step = nnx.jit(lambda layer, cache: layer.decode_paged(inputs, cache, batch)[0])
    right, found = (step(wide, wide.init_paged_cache(5, 16, dtype=name)) for name in (None, E4M3))
    assert 20 < ratio(right, found) < 40


@pytest.mark.full
@pytest.mark.parametrize("new_prompts", [True, False])
def test_a_layer_in_float16_is_refused_before_it_writes(new_prompts):
    half = layer(dtype=jnp.float16)
    batch = PagedBatch(INT([0, 2]), INT([2]), INT([[1]]))
    cache = half.init_paged_cache(5, 16, dtype=E4M3)
    with pytest.raises(TypeError, match=r"`dtype` of the layer must be one of bfloat16, float32: .* Got float16"):
        half.decode_paged(jnp.ones((2, 64), jnp.float16), cache, batch, new_prompts=new_prompts)


# --- where it runs


def test_devices_that_lack_it():
    sizes = {"B": 1, "T": 1, "S": 64, "Hq": 4, "Hkv": 1, "D": 576, "Dv": 512}
    spec = functools.partial(spec_of, **sizes, platform="gpu", paging=Paging(64, 8, E4M3, values_in_keys=True))
    reason = limit_of_device(spec(device_kind="NVIDIA A100-SXM4-80GB"))
    assert str(reason).endswith("this is NVIDIA A100-SXM4-80GB (take bfloat16)")
    assert limit_of_device(spec(device_kind="NVIDIA H200")) is None
    assert limit_of_machine(spec(device_kind="NVIDIA H200")) == "its kernel for latent pages takes no eight bits"


def test_explain_counts_the_bytes_of_a_row():
    case = CASES[-1]
    cache, table = paged_evaluation.placed(case)
    batch, q = paged_evaluation.batch_of(case, table), jax.ShapeDtypeStruct((case.N, case.Hq, case.D), jnp.bfloat16)
    account = jflex.explain(jflex.mla_attention, q, cache, batch, scale=0.1, **options_of("triton-interpret"))
    assert account.bytes == 2 * case.N * case.Hq * (case.D + case.Dv) + sum(case.lengths) * (656 - 16)
