"""`sparse_mla_attention` against float64, and against dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.latent import sparse as sparse_call
from tests.cases import mask_pairs, paged_cases
from tests.cases.paged_cases import latent_case, slopes
from tests.support import paged_evaluation
from tests.support.rows import in_turns, tiers

pytestmark = pytest.mark.usefixtures("settings_of_device")
GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["xla", "triton-interpret", GPU]
backends = pytest.mark.parametrize("backend", BACKENDS)
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
CASE = latent_case("sparse", (1, 3, 2), (40, 25, 33), 2, slopes, mask_pairs.causal, Hq=8)
INVALID = (-(2**31), -123456, -1, 2**31 - 1)


@pytest.fixture(params=["copied", "in_place"])
def where(request, monkeypatch):
    """Where the kernels read the selected rows."""
    monkeypatch.setattr(sparse_call, "COPIED_HEADS", 1 if request.param == "copied" else 1 << 30)


def owners(case):
    return np.repeat([*range(case.R), -1], [*case.queries, case.padding])


@functools.cache
def program(case, backend, copied_heads):
    """The compiled call; where rows are read is decided while it is traced."""
    del copied_heads

    def attend(query, cache, batch, indices, captured, sinks):
        names = "score_mod", "mask_mod", "scale", "layer", "implementation", "config"
        arguments = paged_evaluation.arguments_of(case, backend, captured, paged_evaluation.layer_of(case))
        arguments = {name: arguments[name] for name in names}
        return jflex.sparse_mla_attention(query, cache, batch, indices, sinks=sinks, return_lse=True, **arguments)

    return jax.jit(attend)


def sparse(case, indices, backend, filled=lambda table: table, sinks=None):
    """Out and lse of the queries of a case over selected keys, with pages at random and NaN in all that is unused."""
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    batch, captured = paged_evaluation.batch_of(case, filled(table)), jax.tree.map(jnp.asarray, x.captured)
    call = program(case, backend, sparse_call.COPIED_HEADS)
    return call(jnp.asarray(x.query), cache, batch, INT(indices), captured, sinks)


def right(case, indices):
    """The definition in float64, query by query: each selected, visible position counts as often as it is there."""
    x, owner = paged_evaluation.draw(case), owners(case)
    out, lse = np.zeros((case.N, case.Hq, case.Dv)), np.full((case.N, case.Hq), -np.inf)
    for n, r in enumerate(owner):
        length = case.lengths[r] if r >= 0 else 0
        chosen = np.array([i for i in indices[n] if 0 <= i < length], int)
        position = n - case.indptr[r + 1] + length
        if case.mask is not None:
            chosen = chosen[chosen <= position]
        if not chosen.size:
            continue
        keys = x.keys[r][chosen, 0].astype(np.float64)
        s = x.query[n].astype(np.float64) @ keys.T * case.scale
        if case.score is not None:
            s = s - x.score["slopes"].astype(np.float64)[:, None] * (position - chosen)
        top = s.max(axis=1, keepdims=True)
        weights = np.exp(s - top)
        out[n] = weights / weights.sum(axis=1, keepdims=True) @ keys[:, : case.Dv]
        lse[n] = top[:, 0] + np.log(weights.sum(axis=1))
    return out, lse


def drawn(case, k, seed=0):
    """Positions with repetitions, none in their place here and there."""
    rng, owner = np.random.default_rng(seed), owners(case)
    indices = np.stack([rng.integers(0, max(1, case.lengths[r]) if r >= 0 else 9, k) for r in owner])
    indices[rng.random(indices.shape) < 0.2] = -1
    return indices.astype(np.int32)


def check(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


def check_bfloat16(case, indices, backend):
    """Rows that are read where they are, as pages of one token, are not for the Hopper kernel."""
    if backend == "mosaic_gpu" and sparse_call.COPIED_HEADS > 1:
        with pytest.raises(jflex.UnsupportedError, match="mosaic_gpu"):
            sparse(case, indices, backend)
        return
    found, expected = sparse(case, indices, backend), right(case, indices)
    np.testing.assert_allclose(np.asarray(found[0], np.float64), expected[0], rtol=0.02, atol=0.02)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_against_float64(backend):
    indices = drawn(CASE, 21)
    check(sparse(CASE, indices, backend), right(CASE, indices))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_bfloat16_on_a_gpu(backend, where):
    case = paged_cases.in_dtype(latent_case("sparse_wide", (1, 2), (700, 300), Hq=16, D=576, Dv=512, rope=64,
                                            scale=192**-0.5, page_size=64), "bfloat16")  # fmt: skip
    indices = drawn(case, 300)
    check_bfloat16(case, indices, backend)


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "selected", "config", "pages"),
    [
        (32, 2048, None, "of 64 keys"),
        (16, 2048, None, "of 1 key"),
        (32, 64, jflex.Config(batch_invariant=True), "of 1 key"),
        (32, 240_000, None, "of 1 key"),
    ],
    ids=["copied", "few_heads", "batch_invariant", "too_many"],
)
def test_what_is_copied(heads, selected, config, pages):
    """Known from shapes: up to 256 MiB of rows, and not where bits must not depend on the batch."""
    bf16, batch = jnp.bfloat16, jflex.paged.PagedBatch(INT([0, 1]), INT([128]), INT([[1, 2]]))
    cache = jflex.paged.LatentCache.create(3, 64, 512, 64, dtype=bf16)
    arrays = jnp.ones((1, heads, 576), bf16), cache, batch, jnp.zeros((1, selected), jnp.int32)
    found = str(jflex.explain(jflex.sparse_mla_attention, *arrays, qk_head_dim=192, config=config))
    assert f" {pages}" in found


@pytest.mark.full
@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("backend", ["reference", *BACKENDS, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_eight_bits(backend):
    """Copied, they are dequantized, which rounds none: scales are powers of two."""
    case = latent_case("sparse_tiles", (1, 2), (70, 33), Hq=16, D=272, Dv=256, rope=16, held="float8_e4m3fn")
    case, indices = paged_cases.in_dtype(case, "bfloat16"), drawn(case, 50)
    check_bfloat16(case, indices, backend)


@pytest.mark.full
@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("selected", [0, 5])
def test_no_queries(heads, selected):
    cache = jflex.paged.LatentCache.create(3, 16, 64, 16, dtype=jnp.float32)
    batch = jflex.paged.PagedBatch(INT([0, 0]), INT([20]), INT([[1, 2]]))
    out, lse = jflex.sparse_mla_attention(
        jnp.zeros((0, heads, 80)), cache, batch, jnp.zeros((0, selected), jnp.int32), qk_head_dim=48, return_lse=True
    )
    assert (out.shape, lse.shape) == ((0, heads, 64), (0, heads))


@pytest.mark.full
@in_turns
@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("page_size", [2, 61, 64, 69])
@backends
def test_page_sizes(backend, page_size):
    case = latent_case("sparse_pages", (1, 2), (150, 70), Hq=4, page_size=page_size, layers=2)
    indices = drawn(case, 40)
    check(sparse(case, indices, backend), right(case, indices))


@tiers(default={"backend": "xla"})
@backends
def test_all_keys_equal_dense_attention(backend):
    """Also with room for more keys than there are, in any order."""
    longest = max(CASE.lengths)
    rng, owner = np.random.default_rng(1), owners(CASE)
    indices = np.full((CASE.N, longest + 7), -1, np.int32)
    for row, r in zip(indices, owner, strict=True):
        length = CASE.lengths[r] if r >= 0 else 0
        row[rng.permutation(len(row))[:length]] = rng.permutation(length)
    check(sparse(CASE, indices, backend), paged_evaluation.run(CASE, backend))


@tiers(rest="full")
@pytest.mark.usefixtures("where")
@backends
def test_positions_out_of_range_are_dropped_and_never_read(backend):
    """They lie on pages of other requests, in unused slots that hold NaN, or nowhere."""
    indices, owner = drawn(CASE, 21), owners(CASE)
    wrong = indices.copy()
    for n, (row, r) in enumerate(zip(wrong, owner, strict=True)):
        length = CASE.lengths[r] if r >= 0 else 0
        row[row < 0] = [*INVALID, length, length + 1, 47][n % 7]
    check(sparse(CASE, wrong, backend), right(CASE, indices))


@pytest.mark.full
@pytest.mark.usefixtures("where")
@backends
def test_keys_of_another_sequence_are_dropped(backend):
    """Tables that go on with pages of the next request, whose keys are finite: no position there is read."""
    needed = [CASE.pages_of(length) for length in CASE.lengths]

    def filled(table):
        table = table.copy()
        for r, own in enumerate(needed):
            table[r, own:] = np.resize(table[(r + 1) % CASE.R, : needed[(r + 1) % CASE.R]], table.shape[1] - own)
        return table

    indices, owner, columns = drawn(CASE, 21), owners(CASE), paged_evaluation.placed(CASE)[1].shape[1]
    foreign = indices.copy()
    for n, (row, r) in enumerate(zip(foreign, owner, strict=True)):
        if r >= 0:
            beyond = np.arange(needed[r] * CASE.page_size, columns * CASE.page_size)
            row[row < 0] = np.resize(np.roll(beyond, n), int((row < 0).sum()))
    assert (foreign >= 0).sum() > (indices >= 0).sum()
    found, known = sparse(CASE, foreign, backend, filled), sparse(CASE, indices, backend, filled)
    jax.tree.map(np.testing.assert_array_equal, found, known)
    check(found, right(CASE, indices))


@pytest.mark.full
@pytest.mark.usefixtures("where")
@backends
def test_no_keys(backend):
    for indices in (np.full((CASE.N, 21), -1), np.zeros((CASE.N, 0), np.int32)):
        out, lse = sparse(CASE, indices, backend)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)


@tiers(rest="full")
@backends
def test_a_position_counts_as_often_as_it_is_selected(backend):
    case = latent_case("sparse_twice", (1,), (20,), Hq=4)
    once, twice = (sparse(case, np.array([x]), backend) for x in ([3, 7], [3, 7, 3, 7]))
    np.testing.assert_allclose(twice[0], once[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(twice[1], once[1] + np.log(2.0), rtol=1e-6)


@pytest.mark.full
@backends
def test_sinks(backend):
    sinks, indices = jnp.linspace(-1.0, 1.0, CASE.Hq), drawn(CASE, 21)
    found = sparse(CASE, indices, backend, sinks=sinks)
    state = jflex.with_sinks(jflex.AttentionState(*map(jnp.float32, right(CASE, indices))), sinks)
    check(found, state[:2] if isinstance(state, tuple) else (state.out, state.lse))


@pytest.mark.full
def test_gradients_through_the_selected_keys():
    """On `reference`; the selection itself is constant."""
    case = latent_case("sparse_gradient", (2,), (20,), Hq=2)
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    cache = jflex.paged.LatentCache(jnp.nan_to_num(cache.rows), case.rope)
    batch, indices = paged_evaluation.batch_of(case, table), INT([[0, 5, -1], [7, 19, 2]])

    def loss(q, cache):
        out = jflex.sparse_mla_attention(q, cache, batch, indices, scale=0.2, implementation="reference")
        return (out**2).sum()

    d_q, d_cache = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(x.query), cache)
    assert (np.abs(d_q).max(axis=(1, 2)) > 0).all()
    slots = jflex.paged.slots_of(batch.page_table[0], INT([0, 2, 5, 7, 19]), case.page_size)
    touched = np.flatnonzero(np.abs(np.asarray(d_cache.rows)).sum(axis=(2, 3)).reshape(-1))
    assert sorted(touched) == sorted(np.asarray(slots).tolist())
