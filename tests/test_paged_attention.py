"""`paged_attention` on every backend: against float64, request by request, and the properties that hold exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests import mask_pairs, paged_cases
from tests.paged_cases import CASES, MIXED, PagedCase, bias_by_key, call, draw, placed, run

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["xla", "triton-interpret", GPU]
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
CASE = PagedCase("of_properties", **MIXED, score=bias_by_key, mask=mask_pairs.causal)
BFLOAT16 = ["mixed", "group_8_softcap", "bias_by_key"]  # on the CPU; a GPU runs all cases in both


def in_bfloat16(case):
    return dataclasses.replace(case, dtype="bfloat16")


def both(case, found, right):
    for x, y in zip(found, right, strict=True):
        assert_close(x, y)


# --- against the oracle


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_against_float64(case, backend):
    paged_cases.check(case, run(case, backend))


@pytest.mark.parametrize("case", [in_bfloat16(case) for case in CASES if case.name in BFLOAT16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret"])
def test_bfloat16(case, backend):
    paged_cases.check(case, run(case, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [in_bfloat16(case) for case in CASES], ids=str)
def test_bfloat16_on_a_gpu(case):
    paged_cases.check(case, run(case, "triton"))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_one_visible_key_gives_its_value_to_the_last_bit(backend):
    """However small its score is: what is hidden counts as minus infinity, not as some small number."""
    case = PagedCase("one_visible_key", (1, 1, 17), (1, 20, 40), mask=mask_pairs.same(lambda b, h, q, k, c: k == 0))
    x, (cache, table) = draw(case), placed(case)
    low = lambda s, b, h, q, k: jnp.where(b == 2, -46341.0, 0.0) + 0.0 * s
    out, lse = jflex.paged_attention(
        x.query, cache, paged_cases.batch_of(case, table), score_mod=low, mask_mod=case.mask.jax({}), return_lse=True,
        **paged_cases.options_of(backend),
    )  # fmt: skip
    first = np.stack([x.values[r][0] for r in (0, 1, *[2] * 17)])
    np.testing.assert_array_equal(out, np.repeat(first, 2, axis=1))
    np.testing.assert_array_equal(lse, np.repeat(np.array([0, 0, *[-46341.0] * 17])[:, None], 4, axis=1))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_rows_before_the_first_key_and_rows_of_no_request_see_nothing(backend):
    case = PagedCase("see_nothing", (34, 2), (1, 20), 3, mask=mask_pairs.causal)
    out, lse = run(case, backend)
    empty = np.r_[np.arange(33), np.arange(36, 39)]
    np.testing.assert_array_equal(out[empty], 0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    np.testing.assert_array_equal(out[33], np.repeat(draw(case).values[0][0], 2, axis=0))


# --- what holds exactly


@backends
def test_where_pages_lie_changes_no_bit(backend):
    first, second = (run(CASE, backend, seed) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


@backends
def test_a_request_alone_equals_it_in_the_batch(backend):
    x, (cache, table) = draw(CASE), placed(CASE)
    whole = run(CASE, backend)
    for r in (1, 2):
        rows = slice(CASE.indptr[r], CASE.indptr[r + 1])
        batch = jflex.paged.PagedBatch(INT([0, CASE.queries[r]]), INT(CASE.lengths[r : r + 1]), INT(table[r : r + 1]))
        bias = {"bias": jnp.asarray(x.score["bias"][r : r + 1])}
        with jax.default_matmul_precision(paged_cases.precision()):
            alone = call(CASE, backend, x.query[rows], cache, batch, (bias, {}))
        both(CASE, alone, (y[rows] for y in whole))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_the_size_of_pages_changes_nothing(backend):
    """The arrays are drawn from the name, and so are the same."""
    sizes = (1, 256) if backend == "triton-interpret" else (1, 16, 64, 128, 256)
    whole = run(CASE, backend)
    for size in sizes:
        both(CASE, run(dataclasses.replace(CASE, page_size=size), backend), whole)


# --- chunks, steps


class TestChunks:
    """One request of 40 tokens, beside another, in pieces; each piece is written to the cache before it attends."""

    LENGTH = 40
    TABLE = INT([[5, 2, 7], [1, 4, 0]])

    def arrays(self):
        rng = np.random.default_rng(0)
        draw = lambda n, h: jnp.asarray(rng.normal(size=(n, h, 16)), jnp.float32)
        return draw(self.LENGTH, 4), draw(self.LENGTH, 2), draw(self.LENGTH, 2)

    def whole(self, mask_mod=CAUSAL):
        q, k, v = (x[None] for x in self.arrays())
        return jflex.flex_attention(q, k, v, alibi, mask_mod=mask_mod, implementation="reference")[0]

    def in_pieces(self, backend, sizes):
        """Every piece in a batch with a second request, that decodes its 20th token over and over."""
        q, k, v = self.arrays()
        cache = jflex.paged.PagedCache.create(8, 16, 2, 16, dtype=jnp.float32)
        other = jflex.paged.slots_of(self.TABLE[1], jnp.arange(20, dtype=jnp.int32), page_size=16)
        cache = jflex.paged.write(cache, k[:20], v[:20], other)

        @functools.partial(jax.jit, donate_argnames="cache")
        def step(cache, q, k, v, batch):
            slots = jflex.paged.token_slots(batch, q.shape[0], page_size=16)
            cache = jflex.paged.write(cache, k, v, slots)
            attend = functools.partial(jflex.paged_attention, score_mod=alibi, mask_mod=CAUSAL)
            return attend(q, cache, batch, **paged_cases.options_of(backend)), cache

        found, done, most = [], 0, max(sizes)
        for size in sizes:
            rows = np.minimum(done + np.arange(most), self.LENGTH - 1)  # padded to one shape
            rows = np.r_[rows[:size], 19, rows[size:]]
            batch = jflex.paged.PagedBatch(INT([0, size, size + 1]), INT([done + size, 20]), self.TABLE)
            with jax.default_matmul_precision(paged_cases.precision()):
                out, cache = step(cache, q[rows], k[rows], v[rows], batch)
            found.append(out[:size])
            assert_close(out[size], self.whole()[19])
            done += size
        assert step._cache_size() == 1
        return jnp.concatenate(found)

    @pytest.mark.parametrize("sizes", [(40,), (1, 39), (17, 17, 6), (8,) * 5, (3,) * 13 + (1,), (1,) * 40])
    @pytest.mark.parametrize("backend", ["xla", GPU])
    def test_equal_one_shot(self, backend, sizes):
        assert_close(self.in_pieces(backend, sizes), self.whole())

    @pytest.mark.parametrize("sizes", [(20, 1, 17, 2), (1,) * 40])
    def test_interpreted(self, sizes):
        assert_close(self.in_pieces("triton-interpret", sizes), self.whole())


def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (h + 1).astype(jnp.float32) * (q_idx - kv_idx).astype(jnp.float32)


# --- one program


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_one_program_serves_all_lengths_and_tables(backend):
    """Also where requests are as uneven as can be, or there are none."""
    traced = []
    cache = paged_cases.placed(CASE)[0]

    @jax.jit
    def attend(q, lengths, indptr, table):
        def causal(b, h, q_idx, kv_idx):
            traced.append(1)
            return q_idx >= kv_idx

        batch = jflex.paged.PagedBatch(indptr, lengths, table)
        return jflex.paged_attention(q, cache, batch, mask_mod=causal, **paged_cases.options_of(backend))

    q = jnp.ones((20, 4, 16))
    for lengths, indptr in (((20, 3), (0, 19, 20)), ((1, 18), (0, 1, 19)), ((0, 0), (0, 0, 0)), ((48, 48), (0, 0, 20))):
        table = INT(np.random.default_rng(0).permutation(np.arange(1, 7)).reshape(2, 3))
        assert attend(q, INT(lengths), INT(indptr), table).shape == (20, 4, 16)
    assert attend._cache_size() == 1
    assert len(traced) <= 3


@pytest.mark.parametrize("backend", ["xla", "triton-interpret", GPU])
def test_eager_calls_check_the_batch_and_are_right(backend):
    case = next(case for case in CASES if case.name == "decode")
    x, (cache, table) = draw(case), placed(case)
    batch = paged_cases.batch_of(case, table)
    with jax.default_matmul_precision(paged_cases.precision()):
        both(case, call(case, backend, x.query, cache, batch, ({}, {})), run(case, backend))
    with pytest.raises(ValueError, match="`page_table` must hold pages within"):
        call(case, backend, x.query, cache, dataclasses.replace(batch, page_table=batch.page_table * 0), ({}, {}))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_traced_values_out_of_range_read_nothing_outside(backend):
    """They give some numbers, and those of other requests are right."""
    case = next(case for case in CASES if case.name == "speculative")
    x, (cache, table) = draw(case), placed(case)
    table = table.copy()
    table[1] = [10**9, -5, -(10**9)][: table.shape[1]] + [10**9] * (table.shape[1] - 3)
    batch = paged_cases.batch_of(case, table)
    batch = dataclasses.replace(batch, kv_lengths=batch.kv_lengths.at[1].set(10**9))
    with jax.default_matmul_precision(paged_cases.precision()):
        found = paged_cases.program(case, backend)(jnp.asarray(x.query), cache, batch, ({}, {}), None)
    both(case, (y[:2] for y in found), (y[:2] for y in run(case, backend)))
    both(case, (y[7:] for y in found), (y[7:] for y in run(case, backend)))


# --- transformations


@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_vmap_over_queries(backend):
    case = PagedCase("vmap", (1, 2), (20, 5), mask=mask_pairs.causal)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_cases.batch_of(case, table)
    attend = lambda q: call(case, backend, q, cache, batch, ({}, {}))
    both(case, (y[1] for y in jax.vmap(attend)(jnp.stack([-x.query, x.query]))), attend(jnp.asarray(x.query)))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
class TestHeadsOverTwoDevices:
    CASE = PagedCase("sharded", (1, 20), (20, 25), score=paged_cases.slopes, mask=mask_pairs.causal)
    P = jax.sharding.PartitionSpec
    SPECS = (P(None, "heads"), P(None, None, "heads"), P())

    def arrays(self):
        x, (cache, table) = draw(self.CASE), placed(self.CASE)
        return jnp.asarray(x.query), cache, paged_cases.batch_of(self.CASE, table), jnp.asarray(x.score["slopes"])

    def attend(self, backend, *args):
        return call(self.CASE, backend, *args[:3], ({"slopes": args[3]}, {}))

    def mesh(self):
        return jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret"])
    def test_shard_map(self, backend):
        args, P = self.arrays(), self.P
        attend = functools.partial(self.attend, backend)
        specs = (*self.SPECS, P("heads"))
        local = jax.shard_map(attend, mesh=self.mesh(), in_specs=specs, out_specs=(P(None, "heads"),) * 2)
        both(self.CASE, jax.jit(local)(*args), run(self.CASE, backend))

    @pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
    def test_jit_of_sharded_arrays_gathers_no_pages(self, backend):
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(self.mesh(), spec))
        args = [place(x, spec) for x, spec in zip(self.arrays(), (*self.SPECS, self.P()), strict=True)]
        compiled = jax.jit(functools.partial(self.attend, backend)).lower(*args).compile()
        found = compiled(*args)
        both(self.CASE, found, run(self.CASE, backend))
        assert found[0].sharding.is_equivalent_to(args[0].sharding, 3)
        assert "all-gather" not in compiled.as_text()


# --- derivatives


def test_derivative_of_the_reference():
    """That of dense attention, scattered to the pages; what nobody reads gets 0."""
    case = PagedCase("derivative", (2, 3), (5, 18), mask=mask_pairs.causal)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_cases.batch_of(case, table)
    loss = lambda out, lse: jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))
    d_q, d_cache = jax.grad(lambda q, cache: loss(*call(case, "reference", q, cache, batch, ({}, {}))), argnums=(0, 1))(
        jnp.asarray(x.query), cache
    )
    expected = jax.tree.map(lambda a: np.zeros(a.shape), d_cache)
    for r, (count, length) in enumerate(zip(case.queries, case.lengths, strict=True)):
        rows, at = slice(case.indptr[r], case.indptr[r + 1]), np.arange(length)
        mask_mod = jflex.with_offset(CAUSAL, length - count)
        dense = lambda *args, mask_mod=mask_mod: loss(*jflex.flex_attention(
            *(a[None] for a in args), mask_mod=mask_mod, return_lse=True, implementation="reference"))  # fmt: skip
        right = jax.grad(dense, argnums=(0, 1, 2))(*map(jnp.asarray, (x.query[rows], x.keys[r], x.values[r])))
        assert_close(d_q[rows], right[0])
        for to, of in zip((expected.k, expected.v), right[1:], strict=True):
            to[table[r, at // 16], at % 16] = of
    jax.tree.map(assert_close, d_cache, expected)


@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_no_derivative_elsewhere(backend):
    case = PagedCase("derivative", (2, 3), (5, 18), score=bias_by_key)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_cases.batch_of(case, table)
    message = rf"`paged_attention` has no derivative on '{backend[:3]}.*implementation='reference' has one"
    arrays = jax.tree.map(jnp.asarray, (x.query, cache, (x.score, {})))

    def loss(query, cache, captured):
        return jnp.sum(call(case, backend, 2.0 * query, cache, batch, captured)[0])

    for argnum in range(3):
        with pytest.raises(jflex.UnsupportedError, match=message):
            jax.grad(loss, argnums=argnum)(*arrays)
        with pytest.raises(jflex.UnsupportedError, match=message):
            jax.vjp(jax.jit(loss), *arrays)
    detached = jax.grad(lambda q: jnp.sum(q) + loss(*jax.lax.stop_gradient((q, *arrays[1:]))))(arrays[0])
    np.testing.assert_array_equal(detached, 1)
