"""The lightning indexer: scores against float64, and the selection bit by bit, by XLA and by kernels; its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jflex
from jflex._jax import primitive
from jflex.latent import indexer
from jflex.latent.indexer_kernels import site_of_kernel
from pallas_kernels.triton.indexer import select
from tests.support import evaluation
from tests.support.rows import in_turns, tiers

INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}
HOW = {"xla": {"implementation": "xla"}, "triton-interpret": INTERPRETED, "triton": {"implementation": "triton"}}
BACKENDS = ["xla", "triton-interpret", pytest.param("triton", marks=pytest.mark.gpu)]
backends = pytest.mark.parametrize("backend", BACKENDS)
KERNELS = pytest.mark.parametrize("backend", BACKENDS[1:])


# --- scores


def drawn(N, H, D, S, dtype="bfloat16", batch=()):
    """Queries, keys and weights, and the scores in float64."""
    rng = np.random.default_rng(N + H + D + S)
    shapes = (*batch, N, H, D), (*batch, S, D), (*batch, N, H)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    arrays[2] = arrays[2].astype(jnp.float32)
    return arrays, exact_scores(*arrays)


def exact_scores(*arrays):
    query, key, weights = (np.asarray(x, np.float64) for x in arrays)
    products = np.maximum(np.einsum("...nhd,...sd->...nhs", query, key), 0)
    return np.einsum("...nh,...nhs->...ns", weights, products)


def check(found, exact):
    """Products of 16 bits are exact: what is left are roundings of sums in float32."""
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * max(np.abs(exact).max(initial=0), 1))


def close(gradient, plain):
    """Gradients in 16 bits may be rounded before they are added."""
    assert gradient.dtype == plain.dtype
    gradient, plain = np.asarray(gradient, np.float64), np.asarray(plain, np.float64)
    np.testing.assert_allclose(gradient, plain, atol=0.02 * np.abs(plain).max())


SIZES = [
    (1, 64, 128, 256, "bfloat16"),
    (3, 3, 80, 200, "bfloat16"),
    (2, 1, 16, 1, "float16"),
    (5, 70, 24, 130, "float16"),  # two blocks of heads
    (1, 16, 256, 65, "bfloat16"),
    (600, 2, 16, 129, "float16"),  # several queries in a program
]


@backends
@pytest.mark.parametrize(("N", "H", "D", "S", "dtype"), SIZES)
def test_scores_against_float64(N, H, D, S, dtype, backend):
    arrays, exact = drawn(N, H, D, S, dtype)
    check(jflex.indexer_scores(*arrays, **HOW[backend]), exact)


@pytest.mark.full
@backends
def test_heads_that_do_not_exist_meet_no_infinite_key(backend):
    arrays, _ = drawn(2, 3, 16, 20)
    key = arrays[1].at[4].set(-jnp.inf)
    query = jnp.abs(arrays[0]) + 1  # products are -inf, and count 0
    found = jflex.indexer_scores(query, key, arrays[2], **HOW[backend])
    assert np.isfinite(found).all()
    assert not np.asarray(found[:, 4]).any()
    assert np.isnan(jflex.indexer_scores(query, key.at[7].set(jnp.nan), arrays[2], **HOW[backend])[:, 7]).all()


@pytest.mark.full
@KERNELS
@pytest.mark.parametrize("mapped", [(0, None, 0), (None, 0, None)])
def test_vmap_of_scores_and_gradients(backend, mapped):
    (query, key, weights), _ = drawn(2, 3, 16, 40, batch=(3,))
    arrays = [x if axis == 0 else x[0] for x, axis in zip((query, key, weights), mapped, strict=True)]
    scores = lambda how: jax.jit(jax.vmap(functools.partial(jflex.indexer_scores, **HOW[how]), in_axes=mapped))
    whole = [jnp.broadcast_to(x, (3, *x.shape[-n:])) for x, n in zip(arrays, (3, 2, 2), strict=True)]
    check(scores(backend)(*arrays), exact_scores(*whole))
    loss = lambda how: lambda *x: (jflex.indexer_scores(*x, **HOW[how]) ** 2).sum()
    gradients = [jax.vmap(jax.grad(loss(how), (0, 1, 2)), in_axes=mapped)(*arrays) for how in (backend, "xla")]
    for found, plain in zip(*gradients, strict=True):
        close(found, plain)
    gradients = [jax.grad(lambda *x, how=how: scores(how)(*x).sum(), (0, 1, 2))(*arrays) for how in (backend, "xla")]
    for found, plain in zip(*gradients, strict=True):
        close(found, plain)


@pytest.mark.full
@backends
@pytest.mark.parametrize(("N", "H", "D", "S"), [(0, 2, 16, 5), (2, 0, 16, 5), (2, 3, 16, 0), (2, 3, 0, 5)])
def test_scores_of_nothing(N, H, D, S, backend):
    arrays, exact = drawn(N, H, D, S)
    check(jflex.indexer_scores(*arrays, **HOW[backend]), exact)
    gradients = jax.grad(lambda *x: jflex.indexer_scores(*x, **HOW[backend]).sum(), (0, 1, 2))(*arrays)
    assert not any(np.asarray(x, np.float32).any() for x in gradients[:2])


@pytest.mark.full
@pytest.mark.parametrize("x64", [False, True])
def test_gradients_of_the_kernel_are_those_of_xla(x64):
    arrays, _ = drawn(3, 5, 16, 40)
    with jax.enable_x64(x64):
        loss = lambda how: lambda *x: jnp.sin(jflex.indexer_scores(*x, **HOW[how])).sum()
        arrays[2] = arrays[2].astype(jnp.float64 if x64 else jnp.bfloat16)
        found, plain = (jax.jit(jax.grad(loss(how), (0, 1, 2)))(*arrays) for how in ("triton-interpret", "xla"))
    for x, y in zip(found, plain, strict=True):
        close(x, y)


@pytest.mark.full
@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 6])
def test_indexer_scores(heads_at_once, monkeypatch):
    monkeypatch.setattr(indexer, "_PRODUCTS", 5 * 11 * heads_at_once)
    rng = np.random.default_rng(0)
    query, key, weights, cotangent = (rng.normal(size=x) for x in ((5, 6, 8), (11, 8), (5, 6), (5, 11)))
    products = np.einsum("nhd,sd->nhs", query, key)
    exact = np.einsum("nh,nhs->ns", weights, np.maximum(products, 0))
    back = np.einsum("ns,nh,nhs->nhs", cotangent, weights, products > 0)
    exact_back = (
        np.einsum("nhs,sd->nhd", back, key),
        np.einsum("nhs,nhd->sd", back, query),
        np.einsum("ns,nhs->nh", cotangent, np.maximum(products, 0)),
    )
    found, pull = jax.vjp(jflex.indexer_scores, *(jnp.asarray(x, jnp.float32) for x in (query, key, weights)))
    for x, y in zip((found, *pull(jnp.asarray(cotangent, jnp.float32))), (exact, *exact_back), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert jflex.indexer_scores(*(jnp.asarray(x, jnp.bfloat16) for x in (query, key, weights))).dtype == jnp.float32
    assert jflex.indexer_scores(jnp.ones((5, 0, 8)), jnp.ones((11, 8)), jnp.ones((5, 0))).tolist() == [[0.0] * 11] * 5


def test_memory_of_the_indexer_does_not_grow_with_heads():
    """Forward and backward; products of 256 heads are 512 MB."""
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((64, 256, 8), (8192, 8), (64, 256))]
    total = lambda *arrays: (jflex.indexer_scores(*arrays) ** 2).sum()
    with evaluation.compiled_in_haste(False):
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 << 20


# --- selection

SPECIAL = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, 2, -1, 1e-40, -1e-40], np.float32)


def ranked(row):
    """Positions by the total order of float32, the largest first, of equal ones the lowest."""
    bits = row.view(np.int32).astype(np.int64)
    return np.argsort(-np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits), kind="stable")


def selected(scores, k):
    """What `select_keys` returns, in numpy."""
    order = np.stack([ranked(row) for row in scores])[:, :k]
    order = np.where(np.take_along_axis(scores, order, axis=1) == -np.inf, -1, order)
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)


def rows_of(kind, S, N=3):
    rng = np.random.default_rng(S)
    if kind == "special":
        return rng.choice(SPECIAL, (N, S)).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 3, (N, S)).astype(np.float32)
    if kind == "few_visible":
        return np.where(rng.random((N, S)) < 0.1, rng.normal(size=(N, S)), -np.inf).astype(np.float32)
    if kind == "nan_of_all_bits":  # the least of the order, as what pads a row
        return rng.choice(np.array([0xFFFFFFFF, 0xFF800000], np.uint32).view(np.float32), (N, S))
    return rng.normal(size=(N, S)).astype(np.float32)


KINDS = ["normal", "special", "ties", "few_visible", "nan_of_all_bits"]
LENGTHS = [(1, 1), (5, 3), (16, 16), (31, 1), (32, 30), (32, 32), (33, 1), (100, 7), (100, 16), (400, 5), (129, 16)]


@pytest.fixture
def small_parts(monkeypatch):
    """Programs of the kernel hold up to 32 elements, so that rows have several parts."""
    for name, size in {"MIN_PART": 16, "MAX_PART": 32, "ELEMENTS_PER_WARP": 8, "RUN_PER_WARP": 4}.items():
        monkeypatch.setattr(select, name, size)
    monkeypatch.setattr("pallas_kernels.triton.indexer.limits.MAX_PART", 32)
    primitive._trace.cache_clear()  # traces are cached by shape
    yield
    primitive._trace.cache_clear()


@tiers(default={"k": 7})
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("S", "k"), LENGTHS)
def test_selection_in_parts(S, k):
    scores = np.concatenate([rows_of(kind, S) for kind in KINDS])
    np.testing.assert_array_equal(jflex.select_keys(scores, k, **INTERPRETED), selected(scores, k))


@backends
@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_in_the_total_order(kind, backend):
    scores = rows_of(kind, 300)
    for k in (0, 1, 40, 300, 310):
        np.testing.assert_array_equal(jflex.select_keys(scores, k, **HOW[backend]), selected(scores, k))


@pytest.mark.full
@KERNELS
@pytest.mark.parametrize(("S", "k"), [(70_000, 2048), (32_768, 32_768)])
def test_selection_of_long_rows(S, k, backend):
    scores = np.concatenate([rows_of(kind, S, N=1) for kind in ("normal", "ties")])
    np.testing.assert_array_equal(jflex.select_keys(scores, k, **HOW[backend]), selected(scores, k))


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "N", "S"), [(8, 1, 65536), (1, 64, 8192)])
def test_on_a_gpu_the_kernels_select_what_xla_selects(B, N, S):
    """Small integers: their sums are exact in any order, and many are equal."""
    drawn = lambda n, *shape: jax.random.randint(jax.random.key(n), shape, -2, 3)
    arrays = drawn(0, B, N, 64, 128), drawn(1, B, S, 128), drawn(2, B, N, 64)
    arrays = [x.astype(dtype) for x, dtype in zip(arrays, ("bfloat16", "bfloat16", "float32"), strict=True)]

    def found(how):
        best = lambda *x: jflex.select_keys(jflex.indexer_scores(*x, **how), 2048, **how)
        return [jax.jit(jax.vmap(f))(*arrays) for f in (functools.partial(jflex.indexer_scores, **how), best)]

    for kernel, xla in zip(found({}), found(HOW["xla"]), strict=True):
        np.testing.assert_array_equal(kernel, xla)
    scores = np.concatenate([rows_of(kind, S) for kind in KINDS])
    np.testing.assert_array_equal(jflex.select_keys(scores, 99), jflex.select_keys(scores, 99, implementation="xla"))


@pytest.mark.full
@KERNELS
def test_vmap_of_the_selection(backend):
    scores = np.stack([rows_of(kind, 50) for kind in KINDS])
    visible = np.tril(np.ones((3, 50), bool), 20)
    find = jax.jit(jax.vmap(functools.partial(jflex.select_keys, k=9, visible=visible, **HOW[backend])))
    exact = [selected(np.where(visible, x, np.float32(-np.inf)), 9) for x in scores]
    np.testing.assert_array_equal(find(scores), exact)
    through = lambda x: jnp.where(jflex.select_keys(x, 9, **HOW[backend]) > 3, x[:, :9], 0).sum()
    assert np.isfinite(jax.grad(through)(jnp.ones((2, 20)))).all()


@backends
@pytest.mark.parametrize(("N", "S"), [(0, 5), (2, 0), (0, 0)])
def test_selection_from_nothing(N, S, backend):
    found = jflex.select_keys(jnp.zeros((N, S)), 3, **HOW[backend])
    assert found.shape == (N, 3)
    assert (np.asarray(found[:, S:]) == -1).all()


# --- loss


@pytest.mark.full
def test_the_loss_is_a_kl_divergence_with_a_gradient_into_the_indexer_alone():
    rng = np.random.default_rng(0)
    scores, weights = rng.normal(size=(4, 6)), rng.random((4, 6))
    visible = np.tril(np.ones((4, 6), bool))
    p = np.where(visible, weights, 0)
    p /= p.sum(axis=1, keepdims=True)
    e = np.where(visible, np.exp(scores), 0)
    log_q = np.log(np.where(visible, e / e.sum(axis=1, keepdims=True), 1))
    exact = np.where(visible, p * (np.log(np.where(visible, p, 1)) - log_q), 0).sum(axis=1).mean()
    loss = functools.partial(jflex.indexer_loss, visible=visible)
    arrays = jnp.asarray(scores, jnp.float32), jnp.asarray(weights, jnp.float32)
    assert float(loss(*arrays)) == pytest.approx(exact, rel=1e-5)
    d_scores, d_weights = jax.grad(loss, argnums=(0, 1))(*arrays)
    q = np.where(visible, np.exp(log_q), 0)
    np.testing.assert_allclose(d_scores, (q - p) / 4, rtol=1e-4, atol=1e-6)
    assert not np.asarray(d_weights).any()
    empty = jflex.indexer_loss(*arrays, visible=jnp.zeros((4, 6), bool))
    assert float(empty) == 0
    nothing = jax.grad(lambda s: jflex.indexer_loss(s, arrays[1], visible=jnp.zeros((4, 6), bool)))(arrays[0])
    assert np.isfinite(nothing).all()


# --- where they run


def test_without_a_name_the_kernel_runs_where_it_can_and_nothing_may_be_divided():
    site = lambda x, config=None: site_of_kernel("f", None, config, (x,), lambda _, site: site.limit)
    assert site(jnp.ones(2)) is None  # a CPU
    interpreted = functools.partial(site, config=jflex.Config(interpret=True))
    assert interpreted(jnp.ones(2)) is not None
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    divided = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("x")))
    assert interpreted(divided) is None
    seen = []
    look = lambda x: seen.append(interpreted(x)) or x
    jax.jit(look)(jnp.ones(2))  # in a process with eight devices
    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec("x")}
    jax.jit(jax.shard_map(look, mesh=mesh, **specs))(divided)
    assert [x is None for x in seen] == [True, False]


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_queries_that_are_divided_among_devices(axis_type, backend):
    arrays, exact = drawn(4, 3, 16, 40)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    specs = PartitionSpec("x"), PartitionSpec(), PartitionSpec("x")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    scores = functools.partial(jflex.indexer_scores, **HOW[backend])
    best = functools.partial(jflex.select_keys, k=5, **HOW[backend])
    plain = jax.grad(lambda *x: scores(*x).sum(), (0, 1, 2))(*arrays)
    with jax.set_mesh(mesh):
        of_shards = jax.shard_map(scores, in_specs=specs, out_specs=specs[0])
        for compute in (scores, of_shards):
            found = jax.jit(compute)(*placed)
            check(np.asarray(found), exact)
            gradients = jax.jit(jax.grad(lambda *x, compute=compute: compute(*x).sum(), (0, 1, 2)))(*placed)
            for x, y in zip(gradients, plain, strict=True):
                close(x, y)
            np.testing.assert_array_equal(jax.jit(best)(found), selected(np.asarray(found), 5))
