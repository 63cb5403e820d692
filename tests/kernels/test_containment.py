"""What a mask hides reaches nothing, be it NaN: outputs, lse and gradients are those of finite arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.support.evaluation import compiled_in_haste
from tests.support.paged_evaluation import options_of
from tests.support.rows import in_turns, tiers

pytestmark = pytest.mark.full
GPU = pytest.mark.gpu
BACKENDS = ["xla", "reference", "triton-interpret", pytest.param("triton", marks=GPU),
            pytest.param("mosaic_gpu", marks=GPU)]  # fmt: skip
backends = pytest.mark.parametrize("backend", BACKENDS)
NAMES = ("query", "key", "value", "d_out")
OUTPUTS = ("out", "lse", "d_query", "d_key", "d_value", "d_weight", "d_bias", "d_columns")
B, H, HKV = 2, 4, 2


@pytest.fixture(autouse=True)
def in_haste_where_nobody_runs_it(request):
    """Interpreted kernels are compiled without most of XLA's optimizations, `xla` with them."""
    with compiled_in_haste(request.node.callspec.params["backend"] in ("triton-interpret", "reference")):
        yield


def sizes_of(backend):
    """Tokens of a document, head size, block size and dtype."""
    on_gpu = jax.default_backend() == "gpu"
    return (150, 64, 64, jnp.bfloat16) if on_gpu and backend in ("triton", "mosaic_gpu") else (25, 16, 32, jnp.float32)


def assert_close(found, wanted, backend, name=""):
    """Fails unless they are equal but for rounding: a repair has other tiles than the launch before it."""
    tolerance = 2e-2 if sizes_of(backend)[3] == jnp.bfloat16 else 2e-5
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def draw(backend):
    length, D, _, dtype = sizes_of(backend)
    rng, T = np.random.default_rng(0), 4 * length
    shapes = [(B, T, H, D), (B, T, HKV, D), (B, T, HKV, D), (B, T, H, D)]
    arrays = dict(zip(NAMES, (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes), strict=True))
    captured = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((H,), (T,), (B, T))]
    return arrays, captured


def biased(captured):
    """A score mod of three captured arrays: by head, by query, by key."""
    weight, bias, columns = captured
    return lambda s, b, h, q, k: s * (1.5 + 0.1 * weight[h]) + bias[q] + columns[b, k]


@functools.cache
def compiled(backend, mask_of, block, score, normalize="softmax"):
    """Output, lse, and the gradients of both together, as a function that compiles once for all tests of a worker."""
    length, *_ = sizes_of(backend)
    mask, T, has_lse = mask_of(length), 4 * length, normalize == "softmax"
    masks = {"mask_mod": mask}
    if block is not None:
        masks = {"block_mask": jflex.create_block_mask(mask, None, None, T, T, block_size=block)}

    def attend(query, key, value, captured):
        mod = None if score is None else score(captured)
        options = {**masks, "normalize": normalize, "return_lse": has_lse, **options_of(backend)}
        result = jflex.flex_attention(query, key, value, mod, **options)
        return result if has_lse else (result, jnp.zeros(()))

    @jax.jit
    def both(query, key, value, d_out, captured):
        found, pull = jax.vjp(attend, query, key, value, captured)
        *gradients, of_captured = pull((d_out, jnp.ones_like(found[1])))
        return *found, *gradients, *of_captured

    return both


def run(backend, arrays, captured, *how):
    """The results by name."""
    found = compiled(backend, *how)(*(arrays[name] for name in NAMES), captured)
    return dict(zip(OUTPUTS, (np.asarray(x, np.float32) for x in found), strict=True))


def documents(first, end):
    """A mask of causal attention within documents, for a length; one lies between two tokens."""

    def mask_of(length):
        ids = jnp.zeros(4 * length, jnp.int32).at[first(length) : end(length)].set(1)
        return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)

    return mask_of


own_document = documents(lambda length: 2 * length, lambda length: 3 * length)
odd_document = documents(lambda length: 2 * length + 1, lambda length: 3 * length)


def before_padding(length):
    """A mask that hides the end of queries and keys."""
    return lambda b, h, q, k: (k < 3 * length + 7) & (q < 3 * length + 7)


def tokens_of(name, x):
    """Results by token: the axis of tokens first."""
    return np.moveaxis(x, 2 if name == "lse" else 0 if name == "d_bias" else 1, 0)


@tiers(
    full=[
        {"backend": "xla", "where": ["key-nan", "all-inf"], "blocks": "block_mask"},
        {"backend": "reference", "where": "query-inf", "blocks": "mask_mod"},
        {"backend": "triton-interpret", "where": ["value-nan", "d_out-inf"], "blocks": "mask_mod"},
    ],
    rest="gpu",
)
@pytest.mark.parametrize("blocks", [False, True], ids=["mask_mod", "block_mask"])
@pytest.mark.parametrize(
    ("where", "bad"), [(where, bad) for bad in (np.nan, np.inf) for where in ("key", "value", "query", "d_out", "all")]
)
@backends
def test_documents_stay_apart(backend, where, bad, blocks):
    """But for `d_out` on `reference`, the one thing that it does not contain, as its docstring says."""
    length, _, block, _ = sizes_of(backend)
    arrays, captured = draw(backend)
    hidden = slice(2 * length, 3 * length)
    others = np.r_[: 2 * length, 3 * length : 4 * length]
    poisoned = {name: x.at[:, hidden].set(bad) if where in (name, "all") else x for name, x in arrays.items()}
    for score in (None, biased):
        clean, found = (
            run(backend, x, captured, own_document, block if blocks else None, score) for x in (arrays, poisoned)
        )
        for name in OUTPUTS:
            if name == "d_weight":  # summed over all tokens
                continue
            a, b = (tokens_of(name, x[name])[others] for x in (found, clean))
            assert_close(a, b, backend, name)
        # What may be attended to keeps its NaN: nothing is swallowed.
        own = {name: tokens_of(name, found[name])[2 * length : 3 * length] for name in ("out", "d_query")}
        assert np.isfinite(own["out"]).all() == (where == "d_out")
        assert not np.isfinite(own["d_query"]).any(axis=-1).all()


@backends
def test_padding_gets_zero_gradients(backend):
    """Keys that nobody attends to, all of them NaN, of a length that divides no block."""
    length, _, block, _ = sizes_of(backend)
    arrays, captured = draw(backend)
    first = 3 * length + 7
    found, clean = (
        run(backend, {name: x.at[:, first:].set(fill) for name, x in arrays.items()}, captured, before_padding, block,
            None)
        for fill in (jnp.nan, 0)
    )  # fmt: skip
    for name in OUTPUTS[:5]:
        assert_close(found[name], clean[name], backend, name)
        if name.startswith("d_"):
            assert not tokens_of(name, found[name])[first:].any()


@backends
def test_sigmoid_attention(backend):
    """Weights that share a reciprocal share a NaN, but none that a mask hides: documents begin at odd tokens."""
    length, _, block, _ = sizes_of(backend)
    arrays, captured = draw(backend)
    hidden, others = slice(2 * length + 1, 3 * length), np.r_[: 2 * length + 1, 3 * length : 4 * length]
    poisoned = {name: arrays[name].at[:, hidden].set(jnp.nan) for name in NAMES}
    score = lambda captured: jflex.scores.sigmoid(-2.0)
    clean, found = (run(backend, x, captured, odd_document, block, score, "none") for x in (arrays, poisoned))
    for name in ("out", *OUTPUTS[2:5]):
        x, y = (tokens_of(name, results[name]) for results in (found, clean))
        assert_close(x[others], y[others], backend, name)
        assert not np.isfinite(x[hidden]).any()


@in_turns
@pytest.mark.parametrize("lengths", [None, (150, 90)], ids=["even", "kv_lengths"])
@pytest.mark.parametrize("queries", [1, 3])
@backends
def test_decoding_from_a_dense_cache(backend, queries, lengths):
    S, D, dtype = 176 if backend == "mosaic_gpu" else 170, 64, sizes_of(backend)[3]  # TMA loads 8 keys at once
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(B, n, heads, D)), dtype) for n, heads in ((queries, H), (S, HKV), (S, HKV)))
    ends = jnp.asarray((S, S) if lengths is None else lengths, jnp.int32)
    mask = lambda b, h, i, j: (j <= i + ends[b] - queries) & (i + ends[b] - queries - j < 20)

    @jax.jit
    def attend(k, v):
        options = {} if lengths is None else {"kv_lengths": ends}
        return jflex.flex_attention(q, k, v, mask_mod=mask, return_lse=True, **options, **options_of(backend))

    hidden = lambda x: x.at[:, :60].set(jnp.nan).at[:, 155:].set(jnp.nan if lengths else 0)
    zeroed = lambda x: x.at[:, :60].set(0).at[:, 155:].set(0)
    for found, clean in zip(attend(hidden(k), hidden(v)), attend(zeroed(k), zeroed(v)), strict=True):
        assert_close(found, clean, backend)


@in_turns
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("queries", [(1, 1), (3, 40), (1, 160)], ids=["decode", "mixed", "long"])
@backends
def test_pages_that_a_window_no_longer_shows(backend, queries, page_size):
    """Pages go from one sequence to another, and NaN with them."""
    if backend == "mosaic_gpu" and page_size == 1:
        pytest.skip("its pages have 8 keys at least")
    lengths, D, dtype = (170, 300), 64, sizes_of(backend)[3]
    rng = np.random.default_rng(2)
    per = [-(-n // page_size) for n in lengths]
    shape = (sum(per) + 1, page_size, HKV, D)
    k, v = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    table = np.zeros((2, max(per)), np.int32)
    table[0, : per[0]], table[1, : per[1]] = np.arange(1, per[0] + 1), np.arange(per[0] + 1, sum(per) + 1)
    indptr = np.cumsum([0, *queries]).astype(np.int32)
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (indptr, np.asarray(lengths, np.int32), table)))
    q = jnp.asarray(rng.normal(size=(sum(queries), H, D)), dtype)
    mask = lambda b, h, i, j: (i >= j) & (i - j < 20)

    def with_hidden(x, value):
        for row, (length, count) in zip(table, zip(lengths, queries, strict=True), strict=True):
            at = np.arange(64, 128)
            at = at[at < length - count - 20]
            x = x.at[row[at // page_size], at % page_size].set(value)
        return x

    @jax.jit
    def attend(k, v):
        return jflex.paged_attention(
            q, jflex.paged.PagedCache(k, v), batch, mask_mod=mask, return_lse=True, **options_of(backend)
        )

    found, clean = (attend(with_hidden(k, value), with_hidden(v, value)) for value in (jnp.nan, 0))
    for a, b in zip(found, clean, strict=True):
        assert_close(a, b, backend)


@pytest.mark.parametrize("backend", [BACKENDS[2], *BACKENDS[3:]])
def test_containment_can_be_left_out(backend):
    """Where all arrays are finite: then nothing is launched for it, and decoding contains NaN all the same."""
    arrays, _ = draw(backend)
    mask = lambda b, h, q, k: q >= k
    implementation, config = options_of(backend).values()
    without = dataclasses.replace(config or jflex.Config(), contain_nan=False)
    attend = lambda q, k, v, config: jflex.flex_attention(
        q, k, v, mask_mod=mask, implementation=implementation, config=config
    )
    q, k, v = (arrays[name] for name in NAMES[:3])
    assert_close(attend(q, k, v, without), attend(q, k, v, config), backend)
    text = lambda config: str(jax.make_jaxpr(lambda *x: attend(*x, config))(q, k, v))
    assert "repair" not in text(without)
    assert "repair" in text(config)
    assert "repair" in str(jax.make_jaxpr(lambda *x: attend(*x, without))(q[:, :1], k, v)) or backend == "mosaic_gpu"


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_batch_entry_without_keys_where_the_mod_is_nan(backend):
    """0 times the derivative of the mod is NaN at every position of the first batch entry."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 8))
    lengths, undefined = jnp.array([0, 6], jnp.int32), jnp.array([jnp.nan, 1.0])

    def total(weight, query, key, value):
        mod = lambda s, b, h, q, k: s + weight * jnp.log((q - k).astype(jnp.float32) * undefined[b])
        mask = lambda b, h, q, k: q > k
        out = jflex.flex_attention(query, key, value, mod, mask_mod=mask, kv_lengths=lengths, **options_of(backend))
        return out.sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(jnp.float32(1), query, key, value)
    assert all(np.isfinite(x).all() for x in gradients)
    assert float(jnp.abs(gradients[0])) > 0
    assert all((np.asarray(x)[0] == 0).all() for x in gradients[1:])


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_finite_values_whose_sum_overflows(backend):
    """The test whether NaN must be kept out sums the values."""
    zeros, value = jnp.zeros((1, 40, 1, 16)), jnp.zeros((1, 40, 1, 16)).at[:, 0].set(3e38)
    out = jflex.flex_attention(zeros, zeros, value, mask_mod=jflex.masks.causal(), implementation=backend)
    wanted = np.broadcast_to(3e38 / np.arange(1.0, 41)[:, None], (40, 16))
    np.testing.assert_allclose(out[0, :, 0], wanted, rtol=1e-5)
