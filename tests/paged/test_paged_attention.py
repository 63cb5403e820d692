"""`paged_attention` on every backend: against float64, request by request, and the properties that hold exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases import mask_pairs, paged_cases, vector_pairs
from tests.cases.paged_cases import CASES, MIXED, PagedCase, bias_by_key
from tests.support import evaluation, paged_evaluation
from tests.support.paged_evaluation import call, draw, placed, run
from tests.support.rows import in_turns, tiers

pytestmark = pytest.mark.usefixtures("settings_of_device")
GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["xla", "triton-interpret", GPU]
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
CASE = PagedCase("of_properties", **MIXED, score=bias_by_key, mask=mask_pairs.causal)
FIRST_USE = 1  # of Pallas' interpreter: on JAX 0.12 it adds a setting on which traces depend
BY_NAME = {case.name: case for case in CASES}
# The interpreter is slow: what differs from others in the mask or in sizes alone is left to xla, and to a GPU.
NOT_INTERPRETED = [
    "sinks", "random_elements", "prefix_by_request", "layers", "divided", "one_key_each", "speculative", "pages_of_64",
    "softcap_group_8", "values_of_another_size", "head_size_80", "chosen_by_row", "divided_with_empty_parts", "sigmoid",
    "sigmoid_dropout", "scores_as_weights", "rotated_pages_of_1", "rotated_pages_of_64", "e5m2_pages_of_1",
    "e5m2_sigmoid",
]  # fmt: skip
EIGHT_BITS = ["e4m3", "e4m3_of_heads", "divided_int8"]
# On the CPU; a GPU runs all.
BFLOAT16 = ["mixed", "rotated_pages_of_16", *EIGHT_BITS]
in_bfloat16 = functools.partial(paged_cases.in_dtype, dtype="bfloat16")


def both(case, found, right):
    for x, y in zip(found, right, strict=True):
        assert_close(x, y)


# --- against the oracle


@tiers(
    default={"backend": ["reference", "xla"], "case": ["decode", "mixed", "mixed_with_padding_and_empty_requests",
        "rotated_pages_of_16", "e4m3_of_heads", "e4m3_odd_values"]},
    full=[{"backend": "xla"}, {"backend": "reference", "case": ["layers", "divided_sigmoid", "divided_dropout",
        "values_by_position"]}],
    rest="gpu",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "xla", GPU, evaluation.OFFICIAL_TRITON])
def test_against_float64(case, backend):
    paged_evaluation.check(case, run(case, backend))


@tiers(
    default={"case": ["decode", "mixed_with_padding_and_empty_requests"]},
    full={"case": ["mixed", "rotated_pages_of_16"]},
    rest="full",
    share=2,
)
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in NOT_INTERPRETED], ids=str)
def test_interpreted_against_float64(case):
    paged_evaluation.check(case, run(case, "triton-interpret"))


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("case", [in_bfloat16(case) for case in CASES if case.name in BFLOAT16], ids=str)
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_bfloat16(case, backend):
    paged_evaluation.check(case, run(case, backend))


@pytest.mark.parametrize("backend", [GPU, evaluation.OFFICIAL_TRITON])
@pytest.mark.parametrize("case", [in_bfloat16(case) for case in CASES], ids=str)
def test_bfloat16_on_a_gpu(case, backend):
    paged_evaluation.check(case, run(case, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [in_bfloat16(case) for case in CASES], ids=str)
def test_bfloat16_on_hopper(case):
    """Its kernel takes pages, sizes and options of its own; what it refuses, `triton` runs."""
    has_pages = case.page_size % 8 == 0 and (64 % case.page_size == 0 or case.page_size % 64 == 0)
    has_sizes = case.D % 16 == (case.Dv or case.D) % 16 == 0
    is_plain = case.normalize == "softmax" and not (case.dropout or case.held or case.key or case.value)
    if has_pages and has_sizes and is_plain:
        paged_evaluation.check(case, run(case, "mosaic_gpu"))
        return
    with pytest.raises(jflex.UnsupportedError, match="mosaic_gpu"):
        run(case, "mosaic_gpu")


@tiers(default={"backend": "xla"})
@backends
def test_one_visible_key_gives_its_value_to_the_last_bit(backend):
    """However small its score is: what is hidden counts as minus infinity, not as some small number."""
    case = PagedCase("one_visible_key", (1, 1, 17), (1, 20, 40), mask=mask_pairs.same(lambda b, h, q, k, c: k == 0))
    x, (cache, table) = draw(case), placed(case)
    low = lambda s, b, h, q, k: jnp.where(b == 2, -46341.0, 0.0) + 0.0 * s
    out, lse = jflex.paged_attention(
        x.query, cache, paged_evaluation.batch_of(case, table), score_mod=low, mask_mod=case.mask.jax({}),
        return_lse=True, **paged_evaluation.options_of(backend),
    )  # fmt: skip
    first = np.stack([x.values[r][0] for r in (0, 1, *[2] * 17)])
    # On a GPU the exponent of the weight, unit * (score - top), is one fused multiply-add of the rounded unit * top:
    # the weight of the low score is not quite 1, and dividing by it rounds once more.
    last_bit = 2.0**-23 if backend == "triton" and jax.default_backend() == "gpu" else 0.0
    np.testing.assert_allclose(out, np.repeat(first, 2, axis=1), rtol=last_bit, atol=0)
    np.testing.assert_array_equal(lse, np.repeat(np.array([0, 0, *[-46341.0] * 17])[:, None], 4, axis=1))


# --- what holds exactly


@tiers(rest="full")
@backends
@pytest.mark.parametrize("case", [CASE, BY_NAME["e4m3"]], ids=str)
def test_where_pages_lie_changes_no_bit(case, backend):
    first, second = (run(case, backend, seed) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


# --- one program


@tiers(rest="full")
@backends
def test_one_program_serves_all_lengths_and_tables(backend):
    """Also where requests are as uneven as can be, or there are none."""
    traced = []
    cache = paged_evaluation.placed(CASE)[0]

    @jax.jit
    def attend(q, lengths, indptr, table):
        def causal(b, h, q_idx, kv_idx):
            traced.append(1)
            return q_idx >= kv_idx

        batch = jflex.paged.PagedBatch(indptr, lengths, table)
        return jflex.paged_attention(q, cache, batch, mask_mod=causal, **paged_evaluation.options_of(backend))

    q = jnp.ones((20, 4, 16))
    for lengths, indptr in (((20, 3), (0, 19, 20)), ((1, 18), (0, 1, 19)), ((0, 0), (0, 0, 0)), ((48, 48), (0, 0, 20))):
        table = INT(np.random.default_rng(0).permutation(np.arange(1, 7)).reshape(2, 3))
        assert attend(q, INT(lengths), INT(indptr), table).shape == (20, 4, 16)
    assert len(traced) <= 1 + FIRST_USE


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_traced_values_out_of_range_read_nothing_outside(backend):
    """They give some numbers, and those of other requests are right."""
    case = BY_NAME["speculative"]
    x, (cache, table) = draw(case), placed(case)
    table = table.copy()
    table[1] = [10**9, -5, -(10**9)][: table.shape[1]] + [10**9] * (table.shape[1] - 3)
    batch = paged_evaluation.batch_of(case, table)
    batch = dataclasses.replace(batch, kv_lengths=batch.kv_lengths.at[1].set(10**9))
    found = paged_evaluation.program(case, backend)(jnp.asarray(x.query), cache, batch, ({}, {}), None)
    both(case, (y[:2] for y in found), (y[:2] for y in run(case, backend)))
    both(case, (y[7:] for y in found), (y[7:] for y in run(case, backend)))


# --- transformations


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_vmap_over_queries(backend):
    case = PagedCase("vmap", (1, 2), (20, 5), mask=mask_pairs.causal)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_evaluation.batch_of(case, table)
    attend = lambda q: call(case, backend, q, cache, batch, ({}, {}))
    both(case, (y[1] for y in jax.vmap(attend)(jnp.stack([-x.query, x.query]))), attend(jnp.asarray(x.query)))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
class TestHeadsOverTwoDevices:
    CASE = PagedCase(
        "sharded", (1, 20), (20, 25), score=paged_cases.slopes, mask=mask_pairs.causal, key=vector_pairs.by_head
    )
    P = jax.sharding.PartitionSpec
    SPECS = (P(None, "heads"), P(None, None, "heads"), P())

    def arrays(self):
        x, (cache, table) = draw(self.CASE), placed(self.CASE)
        captured = jnp.asarray(x.score["slopes"]), jnp.asarray(x.key["gains"])
        return jnp.asarray(x.query), cache, paged_evaluation.batch_of(self.CASE, table), *captured

    def attend(self, backend, *args):
        return call(self.CASE, backend, *args[:3], ({"slopes": args[3]}, {}, {"gains": args[4]}))

    def mesh(self):
        return jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @pytest.mark.full
    @pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret"])
    def test_shard_map(self, backend):
        args, P = self.arrays(), self.P
        attend = functools.partial(self.attend, backend)
        specs = (*self.SPECS, P("heads"), P("heads"))
        local = jax.shard_map(attend, mesh=self.mesh(), in_specs=specs, out_specs=(P(None, "heads"),) * 2)
        both(self.CASE, jax.jit(local)(*args), run(self.CASE, backend))

    @pytest.mark.full
    @pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
    def test_jit_of_sharded_arrays_gathers_no_pages(self, backend):
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(self.mesh(), spec))
        args = [place(x, spec) for x, spec in zip(self.arrays(), (*self.SPECS, self.P(), self.P()), strict=True)]
        compiled = jax.jit(functools.partial(self.attend, backend)).lower(*args).compile()
        found = compiled(*args)
        both(self.CASE, found, run(self.CASE, backend))
        assert found[0].sharding.is_equivalent_to(args[0].sharding, 3)
        assert "all-gather" not in compiled.as_text()


# --- derivatives


@pytest.mark.full
def test_derivative_of_the_reference():
    """That of dense attention, scattered to the pages; what nobody reads gets 0."""
    case = PagedCase("derivative", (2, 2), (5, 18), mask=mask_pairs.causal)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_evaluation.batch_of(case, table)
    loss = lambda out, lse: jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))
    paged = lambda q, cache: loss(*call(case, "reference", q, cache, batch, ({}, {})))
    d_q, d_cache = jax.jit(jax.grad(paged, argnums=(0, 1)))(jnp.asarray(x.query), cache)
    expected = jax.tree.map(lambda a: np.zeros(a.shape), d_cache)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def dense(q, k, v, length):
        mask_mod = jflex.with_offset(CAUSAL, length - 2)
        options = {"mask_mod": mask_mod, "kv_lengths": length[None], "return_lse": True}
        return loss(*jflex.flex_attention(q[None], k[None], v[None], **options, implementation="reference"))

    for r, length in enumerate(case.lengths):
        rows, at = slice(case.indptr[r], case.indptr[r + 1]), np.arange(length)
        padded = (np.pad(a[r], ((0, 18 - length), (0, 0), (0, 0))) for a in (x.keys, x.values))
        right = dense(jnp.asarray(x.query[rows]), *map(jnp.asarray, padded), jnp.int32(length))
        assert_close(d_q[rows], right[0])
        for to, of in zip((expected.k, expected.v), right[1:], strict=True):
            to[table[r, at // 16], at % 16] = of[:length]
    jax.tree.map(assert_close, d_cache, expected)


@pytest.mark.full
def test_mods_that_are_nan_where_nothing_is_seen_leave_the_derivative_alone():
    case = PagedCase("hidden_nan", (2, 3), (5, 18), mask=mask_pairs.strictly_causal)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_evaluation.batch_of(case, table)

    def loss(factor, query, distance):
        score_mod = lambda s, b, h, q_idx, kv_idx: s * jnp.sqrt(factor * distance(q_idx - kv_idx).astype(jnp.float32))
        options = {"score_mod": score_mod, "mask_mod": case.mask.jax({}), "implementation": "reference"}
        return jnp.sum(jnp.sin(jflex.paged_attention(query, cache, batch, **options)))

    found, right = (
        jax.jit(jax.grad(functools.partial(loss, distance=distance), (0, 1)))(jnp.float32(1.3), jnp.asarray(x.query))
        for distance in (lambda d: d, lambda d: jnp.maximum(d, 1))
    )
    assert np.isfinite(right[0])
    jax.tree.map(assert_close, found, right)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_no_derivative_elsewhere(backend):
    case = PagedCase("derivative", (2, 3), (5, 18), score=bias_by_key)
    x, (cache, table) = draw(case), placed(case)
    batch = paged_evaluation.batch_of(case, table)
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
