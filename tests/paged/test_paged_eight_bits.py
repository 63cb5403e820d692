"""Paged caches of eight bits: what is written bit for bit, what is read, and messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache, clear_unused, copy_pages, copy_slots, write
from pallas_kernels.spec import Paging
from pallas_kernels.triton.plan.limits import limit_of_device
from tests.support import eight_bits_model as model
from tests.support import paged_evaluation
from tests.support.rows import in_turns, tiers
from tests.support.specs import spec_of

NAMES = list(model.LARGEST)
BACKENDS = ["reference", "xla", "triton-interpret", pytest.param("triton", marks=pytest.mark.gpu)]
TOKENS, HKV, D, DV, PAGE, PAGES = 12, 2, 16, 8, 4, 6
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
SLOTS = [9, -1, 4, 23, 10, 5, 6, 7, 8, 11, 10**6, 12]
KEPT = np.array([0 <= slot < PAGE * PAGES for slot in SLOTS])


def drawn(dtype=np.float32, size=D, seed=0):
    """Rows of very different magnitude, one of zeros, one tiny, one with a value that no scale of heads holds."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(TOKENS, HKV, size)) * 10.0 ** rng.uniform(-3, 3, (TOKENS, HKV, 1))
    rows[0], rows[2], rows[3, 0, 0] = 0, 1e-37, -60000
    return rows.astype(dtype)


def scales_of_heads(name):
    return np.float32([3.0, 0.5]) / model.LARGEST[name]


def bits(x):
    return np.asarray(x).view(np.uint8)


@tiers(full={"dtype": "float32", "layers": None}, in_turns=True, rest="full")
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("of", ["token", "head"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16], ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("name", NAMES)
def test_written_bit_for_bit(name, dtype, of, layers):
    k, v = drawn(dtype), drawn(dtype, DV, 1)
    own = {"k_scale": scales_of_heads(name), "v_scale": 2 * scales_of_heads(name)} if of == "head" else {}
    cache = PagedCache.create(PAGES, PAGE, HKV, D, v_head_dim=DV, dtype=name, layers=layers, **own)
    layer = None if layers is None else 1
    for step in (write, jax.jit(write, donate_argnames="cache")):
        found = step(jax.tree.map(jnp.copy, cache), k, v, INT(SLOTS), layer=layer)
        sides = (found.k, found.k_scale, k, "k_scale"), (found.v, found.v_scale, v, "v_scale")
        for pages, scale, rows, side in sides:
            flat = bits(pages if layer is None else pages[layer]).reshape(PAGES * PAGE, HKV, -1)
            right = own[side][None] if own else model.scales_of_rows(rows, name)
            expected = np.zeros_like(flat)
            expected[np.array(SLOTS)[KEPT]] = bits(model.quantized(rows, right, name))[KEPT]
            np.testing.assert_array_equal(flat, expected)
            assert not own or (np.asarray(scale) == right[0]).all()
            if not own:
                of_slots = np.asarray(scale if layer is None else scale[layer]).reshape(PAGES * PAGE, HKV)
                np.testing.assert_array_equal(of_slots[np.array(SLOTS)[KEPT]], right[KEPT])
                assert (np.delete(of_slots, np.array(SLOTS)[KEPT], axis=0) == 1).all()
            assert np.isfinite(np.asarray(pages, np.float32)).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_in_its_row(name):
    rows = np.ones((3, HKV, D), np.float32)
    rows[0, 0, 3], rows[1, 1, 5] = np.nan, np.inf
    cache = write(PagedCache.create(PAGES, PAGE, HKV, D, dtype=name), rows, rows, INT([4, 5, 6]))
    with np.errstate(invalid="ignore"):  # of 0 times infinity
        found = model.dequantized(np.asarray(cache.k[1]), np.asarray(cache.k_scale[1]))
    is_nan = np.isnan(found).all(axis=-1)
    assert is_nan[:3].tolist() == [[True, False], [False, True], [False, False]]
    np.testing.assert_allclose(found[:3][~is_nan[:3]], 1, rtol=1e-6)
    of_heads = PagedCache.create(PAGES, PAGE, HKV, D, dtype=name, k_scale=0.5, v_scale=0.5)
    held = np.asarray(write(of_heads, rows, rows, INT([4, 5, 6])).k[1], np.float32)
    assert held[1, 1, 5] == model.LARGEST[name]
    assert np.isnan(held[0, 0, 3]) if name != "int8" else held[0, 0, 3] == 0
    assert (np.delete(held[:3].reshape(-1), [3, HKV * D + D + 5]) == 2).all()


@pytest.mark.full
@pytest.mark.parametrize("layers", [None, 2])
def test_scales_move_with_their_tokens(layers):
    layer, rows = None if layers is None else 1, drawn()
    cache = PagedCache.create(PAGES, PAGE, HKV, D, dtype="float8_e4m3fn", layers=layers, v_scale=2.0)
    cache = write(cache, rows, rows, INT(range(4, 16)), layer=layer)
    own = (lambda x: x) if layers is None else lambda x: x[layer]
    copied = copy_pages(cache, INT([1, 2]), INT([5, -1]))
    for x in (copied.k, copied.v, copied.k_scale):
        np.testing.assert_array_equal(bits(own(x)[5]), bits(own(x)[1]))
    np.testing.assert_array_equal(copied.v_scale, cache.v_scale)
    moved = copy_slots(cache, INT([6, 9]), INT([20, -1]))
    for x in (moved.k, moved.v, moved.k_scale):
        np.testing.assert_array_equal(bits(own(x)[5, 0]), bits(own(x)[1, 2]))
    cleared = clear_unused(cache, INT([[2, 1]]), INT([5]))
    for x, before in ((cleared.k, cache.k), (cleared.k_scale, cache.k_scale)):
        np.testing.assert_array_equal(bits(own(x)[2]), bits(own(before)[2]))
        np.testing.assert_array_equal(bits(own(x)[1, :1]), bits(own(before)[1, :1]))
        assert not np.asarray(own(x)[1, 1:], np.float32).any()
    np.testing.assert_array_equal(cleared.v_scale, cache.v_scale)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_scales_in_the_dtype_of_the_query(dtype, backend):
    """Products of weights and scales below the normal numbers of float16 are not rounded to it."""
    rows, batch = drawn()[:, :, :] * 0 + 1e-4, PagedBatch(INT([0, 1]), INT([TOKENS]), INT([[1, 2, 3]]))
    rows = (rows * np.random.default_rng(3).normal(size=rows.shape)).astype(np.float32)
    cache = PagedCache.create(PAGES, PAGE, HKV, D, dtype="float8_e5m2", k_scale=1.0)
    cache = write(cache, rows, rows, INT(range(4, 16)))
    query = jnp.zeros((1, 2 * HKV, D), dtype)
    out = jflex.paged_attention(query, cache, batch, **paged_evaluation.options_of(backend))
    values = model.dequantized(np.asarray(cache.v[1:4]), np.asarray(cache.v_scale[1:4])).reshape(TOKENS, HKV, D)
    right = np.repeat(values.mean(axis=0), 2, axis=0)
    tolerance = {"float16": 2**-10, "bfloat16": 2**-7}[dtype] * np.abs(values).max()
    np.testing.assert_allclose(np.asarray(out[0], np.float32), right, rtol=0, atol=tolerance)


def attended(backend, v, *, of="token", v_scale=None, q=1.0, dtype="bfloat16", **options):
    """One query of ones, times `q`, over values [TOKENS, HKV, D] in e5m2 and random keys; and these in float64."""
    k = np.random.default_rng(5).normal(size=v.shape).astype(np.float32)
    scales = {"k_scale": 0.01, "v_scale": v_scale} if of == "head" else {}
    cache = PagedCache.create(PAGES, PAGE, HKV, D, dtype="float8_e5m2", **scales)
    cache, batch = write(cache, k, v, INT(range(4, 16))), PagedBatch(INT([0, 1]), INT([TOKENS]), INT([[1, 2, 3]]))
    held = lambda x, scale: model.dequantized(
        np.asarray(x[1:4]), np.broadcast_to(np.asarray(scale), (PAGES, PAGE, HKV))[1:4]
    )
    rows = lambda x, scale: held(x, scale).reshape(TOKENS, HKV, D).astype(np.float64)
    options |= paged_evaluation.options_of(backend)
    out = jflex.paged_attention(jnp.full((1, HKV, D), q, dtype), cache, batch, **options)
    return np.asarray(out[0], np.float64), rows(cache.k, cache.k_scale), rows(cache.v, cache.v_scale)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("log2_q", [-110, -12, 14, 110])
def test_queries_of_any_magnitude(log2_q, dtype, backend):
    """float16 holds their products with keys, whatever the range of bfloat16."""
    if dtype == "float16" and abs(log2_q) > 14:
        pytest.skip("float16 does not hold such queries")
    v, scale = np.random.default_rng(6).normal(size=(TOKENS, HKV, D)).astype(np.float32), 2.0**-log2_q / 4
    out, k, v = attended(backend, v, q=2.0**log2_q, dtype=dtype, scale=scale)
    s = k.sum(axis=-1) / 4
    p = np.exp(s - s.max(axis=0))
    np.testing.assert_allclose(out, np.einsum("th,thd->hd", p / p.sum(axis=0), v), rtol=0, atol=2**-7)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("of", ["token", "head"])
def test_weights_beyond_float16(of, backend):
    v = np.random.default_rng(7).normal(size=(TOKENS, HKV, D)).astype(np.float32)
    large = lambda score, b, h, q, k: 1e7 * (1.0 + k.astype(jnp.float32)) + 0.0 * score
    out, _, v = attended(backend, v, of=of, v_scale=0.001, score_mod=large, normalize="none")
    right = np.einsum("t,thd->hd", 1e7 * (1.0 + np.arange(TOKENS)), v)
    np.testing.assert_allclose(out, right, rtol=0, atol=2**-7 * np.abs(right).max())


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("of", ["token", "head"])
def test_small_weights_beside_a_sink(of, backend):
    """Weights of 2 ** -29, which float16 does not hold, of all values but that of the sink, which is 0."""
    v = np.ones((TOKENS, HKV, D), np.float32)
    v[3] = 0.0
    sink = lambda score, b, h, q, k: jnp.where(k == 3, 20.0, 0.0) + 0.0 * score
    out, _, v = attended(backend, v, of=of, v_scale=0.01, score_mod=sink)
    p = np.exp(np.where(np.arange(TOKENS) == 3, 20.0, 0.0))
    np.testing.assert_allclose(out, np.einsum("t,thd->hd", p / p.sum(), v), rtol=2**-7)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_large_value_of_no_weight_costs_no_precision(backend):
    """The weights times the scales of values are rounded to float16 relative to the largest of a row, not of a tile."""
    v = np.random.default_rng(8).normal(size=(TOKENS, HKV, D)).astype(np.float32) * np.float32(1e-4)
    v[3] *= 1e8
    without = lambda score, b, h, q, k: jnp.where(k == 3, -100.0, 0.0) + 0.0 * score
    out, _, v = attended(backend, v, score_mod=without)
    p = np.exp(np.where(np.arange(TOKENS) == 3, -100.0, 0.0))
    np.testing.assert_allclose(out, np.einsum("t,thd->hd", p / p.sum(), v), rtol=0, atol=2**-7 * 1e-4)


@pytest.mark.full
def test_a_cascade_reads_eight_bits():
    rng, cache = np.random.default_rng(5), PagedCache.create(9, PAGE, HKV, D, dtype="int8")
    k, v = (rng.normal(size=(32, HKV, D)).astype(np.float32) for _ in range(2))
    cache, query = write(cache, k, v, INT(range(4, 36))), jnp.asarray(rng.normal(size=(2, 4, D)), jnp.float32)
    shared = PagedBatch(INT([0, 2]), INT([8]), INT([[1, 2]]))
    own = PagedBatch(INT([0, 1, 2]), INT([12, 7]), INT([[3, 4, 5], [6, 7, 0]]))
    levels = [jflex.CascadeLevel.paged(cache, shared), jflex.CascadeLevel.paged(cache, own, start=8)]
    whole = PagedBatch(INT([0, 1, 2]), INT([20, 15]), INT([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]]))
    for backend in ("xla", "triton-interpret"):
        options = paged_evaluation.options_of(backend)
        found, right = jflex.cascade_attention(query, levels, **options), jflex.paged_attention(query, cache, whole)
        np.testing.assert_allclose(found, right, rtol=3e-5, atol=3e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA on a CPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_not_widened(name):
    cache = jax.eval_shape(lambda: PagedCache.create(1025, 64, 2, 64, dtype=name, layers=2))
    rows = jax.ShapeDtypeStruct((5, 2, 64), jnp.float32)
    query, slots = jax.ShapeDtypeStruct((4, 4, 64), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    batch = jax.eval_shape(lambda: PagedBatch(INT(range(5)), INT([1] * 4), jnp.zeros((4, 64), jnp.int32)))
    step = jax.jit(functools.partial(write, layer=1), donate_argnames="cache")
    attend = jax.jit(lambda q, cache, batch: jflex.paged_attention(q, cache, batch, layer=1, implementation="xla"))
    for lowered in (step.lower(cache, rows, rows, slots), attend.lower(query, cache, batch)):
        memory = lowered.compile().memory_analysis()
        assert memory.temp_size_in_bytes < cache.k.size / 4


# --- messages


@pytest.mark.full
@in_turns
@pytest.mark.parametrize(
    ("device", "lacks"),
    [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA RTX A6000", True), ("NVIDIA GeForce RTX 3090", True),
     ("NVIDIA RTX 6000 Ada Generation", False), ("NVIDIA L4", False), ("NVIDIA H200", False)],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_devices_without_e4m3(name, device, lacks):
    sizes = {"B": 1, "T": 1, "S": 64, "Hq": 4, "Hkv": 2}
    spec = spec_of(**sizes, platform="gpu", device_kind=device, paging=Paging(64, 8, dtype=name))
    reason = limit_of_device(spec)
    if lacks and name == "float8_e4m3fn":
        assert reason == f"its compiler converts float8_e4m3fn from Ada and Hopper on, and this is {device} (take int8)"
    else:
        assert reason is None


CACHE = PagedCache.create(PAGES, PAGE, HKV, D, dtype="int8")
STATIC = PagedCache.create(PAGES, PAGE, HKV, D, dtype="int8", k_scale=1.0, v_scale=1.0)
BATCH = PagedBatch(INT([0, 1]), INT([3]), INT([[1]]))
QUERY, ROWS = np.zeros((1, 4, D), np.float32), np.zeros((3, HKV, D), np.float32)
make = functools.partial(PagedCache.create, PAGES, PAGE, HKV, D)
attend = functools.partial(jflex.paged_attention, batch=BATCH)
WRONG = [
    ("other dtype", lambda: make(dtype="int16"), TypeError, r"`dtype` must be floating-point .* eight bits.*Got int16"),
    ("superfluous", lambda: make(dtype="float32", k_scale=1.0), TypeError, r"`k_scale` must be None.*have no.*Leave"),
    ("shape", lambda: make(dtype="int8", v_scale=np.ones(3)), ValueError,
     r"`v_scale` must be one number, or one for each key head, \[2\]. Got float64\[3\]. Leave it out"),
    ("zero", lambda: make(dtype="int8", k_scale=np.array([1.0, 0.0])), ValueError,
     r"`k_scale` must be positive, finite and at least 1.18e-38. Got 0.0. A scale is"),
    ("missing", lambda: attend(QUERY, PagedCache(CACHE.k, CACHE.v)), TypeError,
     r"`cache.k_scale` must be float32: keys and values of int8 have scales. Got NoneType. Make the cache with"),
    ("of others", lambda: attend(QUERY, PagedCache(CACHE.k, CACHE.v, CACHE.k_scale, CACHE.v_scale[1:])), ValueError,
     r"`cache.v_scale` must have one scale for each head, \[2\], or for each token and head, \[6, 4, 2\]. Got .*5,4,2"),
    ("of blocks of columns", lambda: attend(QUERY, PagedCache(CACHE.k, CACHE.v, CACHE.k_scale[..., None])), ValueError,
     r"`cache.k_scale` must have one scale.*Got float32\[6,4,2,1\]. Blocks of 128 columns have scales in a `Latent"),
    ("not positive", lambda: attend(QUERY, PagedCache(CACHE.k, CACHE.v, -STATIC.k_scale, STATIC.v_scale)), ValueError,
     r"`cache.k_scale` must be positive, finite.*Got -1.0"),
    ("scales of floats", lambda: attend(QUERY, PagedCache(*[jnp.zeros((PAGES, PAGE, HKV, D))] * 2, STATIC.k_scale)),
     TypeError, r"`cache.k_scale` must be None: keys and values of float32 have no scales"),
    ("eight-bit queries", lambda: attend(jnp.asarray(QUERY, jnp.int8), CACHE), TypeError,
     r"`q` must be one of bfloat16, float16, float32: the cache holds int8 with scales. Got q: int8.*Cast `q`"),
    ("quantized rows", lambda: write(CACHE, ROWS.astype(np.int8), ROWS, INT([4, 5, 6])), TypeError,
     r"`k` must be one of bfloat16.*the cache holds int8 with scales.*Got int8\[3,2,16\]. Pass what is not yet"),
    ("latents", lambda: jflex.paged.LatentCache.create(PAGES, PAGE, 8, 4, dtype="int8"), TypeError,
     r"`dtype` must be floating-point.*or float8_e4m3fn, with scales. Got int8"),
    ("held latents", lambda: jflex.paged.LatentCache(jnp.zeros((4, 2, 1, 12), jnp.int8), 4).check(), TypeError,
     r"`cache` must hold rows of a floating-point dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()
