"""`mla_attention` on every backend: against float64, and against attention over up-projected keys and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases import mask_pairs, paged_cases
from tests.cases.paged_cases import latent_case, slopes
from tests.support import paged_evaluation
from tests.support.paged_evaluation import options_of, run
from tests.support.rows import tiers

pytestmark = pytest.mark.usefixtures("settings_of_device")
GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["xla", "triton-interpret", GPU]
HOPPER = pytest.param("mosaic_gpu", marks=pytest.mark.gpu)  # of 16 bits alone
INT = functools.partial(jnp.asarray, dtype=jnp.int32)

CASES = paged_cases.LATENT
# The tests of FlashMLA: heads, queries of a request, keys. The table above has the smallest and the largest of each.
GRID = [
    latent_case(f"latent_grid_{heads}_{queries}_{keys}", (queries, queries), (keys, keys // 2), Hq=heads, page_size=64,
                mask=mask_pairs.causal)
    for heads in (1, 3, 9, 63, 64, 126, 128) for queries in (1, 2, 4) for keys in (20, 140, 4096)
]  # fmt: skip


@tiers(default={"case": "latent_decode"}, in_turns=True)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_against_float64(case, backend):
    paged_evaluation.check(case, run(case, backend))


@tiers(
    full=[
        {"backend": "triton-interpret", "case": "latent_128_heads_bfloat16"},
        {"backend": "xla", "case": ["latent_mixed_bfloat16", "latent_of_deepseek_bfloat16"]},
    ],
    rest="gpu",
)
@pytest.mark.parametrize("case", [paged_cases.in_dtype(case, "bfloat16") for case in CASES], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, HOPPER])
def test_bfloat16(case, backend):
    if backend == "mosaic_gpu" and case.name in paged_cases.NOT_ON_HOPPER:
        with pytest.raises(jflex.UnsupportedError, match="its kernel takes"):
            run(case, backend)
        return
    paged_evaluation.check(case, run(case, backend))


@tiers(full={"backend": "xla", "case": GRID[1::30]}, rest="gpu")
@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.parametrize("backend", ["xla", GPU])
def test_grid(case, backend):
    paged_evaluation.check(case, run(case, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [paged_cases.in_dtype(case, "bfloat16") for case in GRID], ids=str)
def test_grid_on_hopper(case):
    paged_evaluation.check(case, run(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("mask", [mask_pairs.causal, mask_pairs.window], ids=["causal", "window"])
def test_deepseek_on_hopper(heads, queries, mask):
    sizes = {"Hq": heads, "D": 576, "Dv": 512, "rope": 64, "scale": 192**-0.5, "page_size": 64, "dtype": "bfloat16"}
    lengths = (1500, 1, 63, 64, 65, 127, 128, 129, 0, 700)
    case = latent_case(f"deepseek_{heads}_{queries}", (queries,) * 10, lengths, mask=mask, **sizes)
    first = None
    for seed in range(3):  # of the pages' places: the same bits, or a race
        found = run(case, "mosaic_gpu", seed)
        paged_evaluation.check(case, found)
        first = first or found
        for x, y in zip(found, first, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


# --- the two forms

HEADS, NOPE, ROPE, LATENT, V = 6, 24, 16, 64, 20


def drawn(length=37, queries=5):
    """Queries of a request, the latent vectors and rotated keys of its tokens, and both up-projections."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float64)
    query = normal(queries, HEADS, NOPE), normal(queries, HEADS, ROPE)
    up = normal(HEADS, NOPE, LATENT) / NOPE**0.5, normal(HEADS, LATENT, V) / LATENT**0.5
    return query, (normal(length, LATENT), normal(length, ROPE)), up


def absorbed(query, tokens, up):
    """Decoding over a latent cache, with pages in reverse order."""
    length, page_size = tokens[0].shape[0], 8
    pages = -(-length // page_size)
    cache = jflex.paged.LatentCache.create(pages + 1, page_size, LATENT, ROPE, dtype=tokens[0].dtype)
    table = np.arange(pages, 0, -1, dtype=np.int32)[None]
    slots = jflex.paged.slots_of(jnp.asarray(table[0]), jnp.arange(length, dtype=jnp.int32), page_size)
    cache = jflex.paged.write_latent(cache, *tokens, slots)
    queries = query[0].shape[0]
    batch = jflex.paged.PagedBatch(INT([0, queries]), INT([length]), jnp.asarray(table))
    q = jnp.concatenate([jnp.einsum("nhd,hdc->nhc", query[0], up[0]), query[1]], axis=-1)
    options = {"mask_mod": jflex.masks.causal(), "implementation": "xla"}
    out = jflex.mla_attention(q, cache, batch, qk_head_dim=NOPE + ROPE, **options)
    return jnp.einsum("nhc,hcv->nhv", out, up[1])


def up_projected(query, tokens, up):
    """`flex_attention` over the keys and values of each head."""
    latent, rope_key = tokens
    key = jnp.einsum("sc,hdc->shd", latent, up[0])
    key = jnp.concatenate([key, jnp.broadcast_to(rope_key[:, None], (*key.shape[:2], ROPE))], axis=-1)
    value = jnp.einsum("sc,hcv->shv", latent, up[1])
    q, offset = jnp.concatenate(query, axis=-1), latent.shape[0] - query[0].shape[0]
    mask = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
    return jflex.flex_attention(q[None], key[None], value[None], mask_mod=mask, implementation="xla")[0]


@pytest.mark.full
def test_absorbed_and_up_projected_agree_in_float64():
    with jax.enable_x64(True):
        arrays = drawn()
        np.testing.assert_allclose(absorbed(*arrays), up_projected(*arrays), rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_sinks(backend):
    case = CASES[0]
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    sinks = jnp.linspace(-1.0, 2.0, case.Hq)
    attend = functools.partial(
        jflex.mla_attention, jnp.asarray(x.query), cache, paged_evaluation.batch_of(case, table), scale=case.scale,
        mask_mod=jflex.masks.causal(), return_lse=True, **options_of(backend),
    )  # fmt: skip
    right = jflex.with_sinks(jflex.AttentionState(*attend()), sinks)
    out, lse = attend(sinks=sinks)
    np.testing.assert_allclose(out, right.out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, right.lse, rtol=1e-6, atol=1e-6)


def test_explain_counts_the_rows_of_the_cache_once():
    case = CASES[0]
    cache, table = paged_evaluation.placed(case)
    q = jax.ShapeDtypeStruct((case.N, case.Hq, case.D), jnp.float32)
    batch = paged_evaluation.batch_of(case, table)
    account = jflex.explain(jflex.mla_attention, q, cache, batch, scale=0.1, **options_of("triton-interpret"))
    keys = sum(case.lengths)
    assert account.bytes == 4 * (case.N * case.Hq * (case.D + case.Dv) + keys * case.D)
    assert account.flops == 2 * keys * case.Hq * (case.D + case.Dv)
    assert account.backend == "triton"
    assert "paged 16 x" in account.tiles


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((640, 64), "latent sizes up to 512 and rotated keys up to 64, not 640 and 64"),
        ((512, 80), "latent sizes up to 512 and rotated keys up to 64, not 512 and 80"),
        ((112, 16), "a latent size that is a power of two of at least 16, or the sum of two of them, not 112"),
    ],
)
def test_what_triton_refuses_runs_on_xla(sizes, reason):
    cache = jflex.paged.LatentCache.create(3, 4, *sizes, dtype=jnp.float32)
    batch = jflex.paged.PagedBatch(INT([0, 1]), INT([7]), INT([[1, 2]]))
    attend = functools.partial(jflex.mla_attention, jnp.ones((1, 2, sum(sizes))), cache, batch, qk_head_dim=20)
    with pytest.raises(jflex.UnsupportedError, match=reason):
        attend(**options_of("triton-interpret"))
    assert attend(implementation="xla").shape == (1, 2, sizes[0])


def test_writing_drops_what_lies_outside():
    cache = jflex.paged.LatentCache.create(4, 2, 2, 1, dtype=jnp.float32, layers=2)
    rows = jnp.arange(6.0).reshape(3, 2), jnp.array([[7.0], [8.0], [9.0]])
    step = jax.jit(jflex.paged.write_latent, donate_argnames="cache")
    cache = step(cache, *rows, INT([6, -1, 3]), layer=1)
    assert not np.asarray(cache.rows[0]).any()
    np.testing.assert_array_equal(cache.rows[1, 3, 0, 0], [0, 1, 7])
    np.testing.assert_array_equal(cache.rows[1, 1, 1, 0], [4, 5, 9])
    assert np.count_nonzero(cache.rows) == 5
    copied = jflex.paged.copy_pages(cache, INT([3]), INT([2]))
    np.testing.assert_array_equal(copied.rows[1, 2], copied.rows[1, 3])
    assert copied.rope_size == 1


@tiers(rest="full")
@pytest.mark.skipif(jax.device_count() < 2, reason="shards over two devices")
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_query_heads_are_sharded_and_the_cache_is_not(backend):
    case = CASES[2]
    case = latent_case(case.name, case.queries, case.lengths, Hq=6, mask=case.mask, score=slopes)
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2])
    put = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, jax.P(*spec)))
    q, everywhere = put(jnp.asarray(x.query), None, "heads"), functools.partial(jax.tree.map, put)
    arrays = everywhere((cache, paged_evaluation.batch_of(case, table), jax.tree.map(jnp.asarray, x.captured)))
    attend = jax.jit(functools.partial(paged_evaluation.call, case, backend)).lower(q, *arrays).compile()
    found = attend(q, *arrays)
    assert [y.sharding.spec[:2] for y in found] == [(None, "heads")] * 2
    assert "all-gather" not in attend.as_text()
    paged_evaluation.check(case, found)
