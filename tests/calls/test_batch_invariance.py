"""`Config(batch_invariant=True)`: the bits of a request, alone and in batches of any kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import Config, Tiles
from jflex._call.dispatch import get_backend
from pallas_kernels.plan import Refusal
from pallas_kernels.spec import Paging
from pallas_kernels.triton.plan import limits
from tests.cases import paged_cases
from tests.support import evaluation, haste, invariance, paged_evaluation
from tests.support.invariance import HKV, HQ, MODS, D, Row, cascade, dense, requests, same_bits, serve
from tests.support.rows import in_turns, tiers
from tests.support.specs import spec_of

GPU = pytest.param("triton", marks=pytest.mark.gpu)
ON_GPU = [GPU, evaluation.OFFICIAL_TRITON]
everywhere = pytest.mark.parametrize("backend", ["xla", "triton-interpret", *ON_GPU])
SPLIT = 64  # keys of a split, on the CPU


@pytest.fixture(autouse=True)
def short_splits(request, monkeypatch):
    """Short ones on the CPU, so that requests of few keys have several."""
    if request.node.get_closest_marker("gpu") is not None:
        with jax.default_matmul_precision("highest"):
            yield
        return
    monkeypatch.setattr(limits, "KEYS_OF_SPLIT", SPLIT)
    interpreted = "interpret" in request.node.name
    if interpreted:  # forget what was traced with long ones, and with these after it
        jax.clear_caches()
    with haste.compiled_in_haste(interpreted):  # in haste, XLA's GEMMs depend on the batch; users compile without it
        yield
    if interpreted:
        jax.clear_caches()


def how_of(backend, mods="causal", **settings):
    """Options of a call; on the CPU with small tiles, several to a split."""
    tiles = Tiles(16, 16)
    if backend == "triton-interpret":
        settings |= {"interpret": True, "forward": tiles, "decode": tiles}
    config = Config(**({"batch_invariant": True} | settings))
    return MODS[mods] | {"implementation": backend.removesuffix("-interpret"), "config": config}


def dense_how(backend, mods="causal", *, decodes):
    """The same; a tile of the forward kernel would keep the decoding kernel from running."""
    how = how_of(backend, mods)
    return how | {"config": dataclasses.replace(how["config"], forward=None)} if decodes else how


def lengths_of(backend):
    """Of the requests: one, some and many splits."""
    return (1200, 40, 5000) if backend in ("triton", "official_triton") else (150, 40, 290)


def check_in_batches(run, one, *batches):
    """Compares the bits of a row alone with those in each batch that has it; `run` gets rows and a number."""
    [alone] = run([one], 0)
    for number, rows in enumerate(batches):
        for row, found in zip(rows, run(rows, number + 1), strict=True):
            if row is one:
                same_bits(found, alone)


# --- pages


@tiers(rest="full", in_turns=True, share=2)
@everywhere
@pytest.mark.parametrize("mods", MODS)
def test_a_request_has_the_same_bits_in_every_batch_of_pages(backend, mods):
    drawn, how = requests(lengths := lengths_of(backend)), how_of(backend, mods)
    [short, one, long] = (Row(r, lengths[r]) for r in (1, 0, 2))
    run = lambda rows, number: serve(drawn, rows, how, seed=number, spare=7 * number)
    check_in_batches(run, one, [one, short], [long, one], [short, long, long, one, one, short, short])


@tiers(full={"mods": "alibi", "backend": "xla"}, in_turns=True, rest="full")
@everywhere
@pytest.mark.parametrize("mods", ["alibi", "window"])
def test_a_token_has_the_same_bits_however_it_is_prefilled(backend, mods):
    """In one chunk beside others, in several, or decoded."""
    drawn, how = requests(lengths := lengths_of(backend)), how_of(backend, mods)
    last, other = lengths[2], Row(0, lengths[0], 33)
    whole, _ = serve(drawn, [Row(2, last, 60), other], how)
    [chunk] = serve(drawn, [Row(2, last, 17)], how, seed=1)
    _, before, decoded = serve(drawn, [Row(1, 40), Row(2, last - 17, 43), Row(2, last)], how, seed=2, spare=3)
    same_bits(whole, chunk)
    same_bits(whole, decoded)
    same_bits(tuple(x[:43] for x in whole), before)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", ["triton-interpret", *ON_GPU])
@pytest.mark.parametrize("queries", [1, 20])
def test_who_adds_the_splits_changes_no_bit(backend, queries, monkeypatch):
    """One program all of them, or a kernel those that programs of their own left."""
    drawn, how = requests(lengths_of(backend)), how_of(backend, "alibi")
    row = Row(2, lengths_of(backend)[2], queries)
    [apart] = serve(drawn, [row], how)
    monkeypatch.setattr("pallas_kernels.split_kv.fixed_splits.MAX_PARTIALS", 1)
    jax.clear_caches()
    [together] = serve(drawn, [row], how)
    same_bits(apart, together)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["triton-interpret"])
def test_without_it_the_batch_changes_bits(backend):
    """Else the tests above would show nothing."""
    drawn, how = requests(lengths_of(backend)), how_of(backend, "alibi", batch_invariant=False)
    how["config"] = dataclasses.replace(how["config"], forward=None, decode=None)
    row = Row(2, lengths_of(backend)[2])
    [alone] = serve(drawn, [row], how)
    [*_, in_batch] = serve(drawn, [row] * 40, how)
    assert not np.array_equal(alone[0], in_batch[0])


# --- cascade


@tiers(rest="full", in_turns=True, share=2)
@everywhere
@pytest.mark.parametrize("mods", ["causal", "alibi"])
def test_a_request_has_the_same_bits_in_every_cascade(backend, mods):
    """However many share the prefix."""
    drawn, how = requests(lengths := lengths_of(backend)), how_of(backend, mods)
    prefix, one = lengths[0] - 40, Row(2, lengths[2])
    many = [one, Row(0, lengths[0], 30), *[Row(2, lengths[2] - 9)] * 9, one]
    check_in_batches(lambda rows, _: cascade(drawn, prefix, rows, how), one, [Row(0, lengths[0]), one], many)


@pytest.mark.full
@everywhere
def test_nan_of_another_request_changes_no_bit(backend):
    """It lies where a mask hides it, in a tile of keys that both read."""
    (first, _, second), how = requests(lengths := lengths_of(backend)), how_of(backend)
    drawn = [first, first, second]
    prefix, row = lengths[0], Row(2, lengths[2])
    rows = [Row(2, prefix + 5, 40), row]
    before = cascade(drawn, prefix, rows, how)
    values = first.v.copy()
    values[prefix - 10] = np.nan  # 25 queries of the first row lie before it, the second row after
    drawn[0] = first._replace(v=values)
    found = cascade(drawn, prefix, rows, how)
    same_bits(tuple(x[:20] for x in found[0]), tuple(x[:20] for x in before[0]))


@pytest.mark.full
@everywhere
def test_latent_attention_has_the_same_bits_in_every_batch(backend):
    """Decoded alone, and prefilled beside another request."""
    latent, rope, heads, tokens, page = 32, 16, 4, lengths_of(backend)[0], 16
    rng, pages = np.random.default_rng(0), -(-tokens // page)
    rows = jnp.asarray(rng.normal(size=(1 + 2 * pages, page, 1, latent + rope)), jnp.float32)
    cache, q = jflex.paged.LatentCache(rows, rope), rng.normal(size=(tokens, heads, latent + rope))
    table = 1 + np.arange(2 * pages).reshape(2, pages)

    def attend(numbers, queries):
        batch = jflex.paged.PagedBatch(
            *map(invariance.INT, (np.cumsum([0, *queries]), [tokens] * len(numbers), table[list(numbers)]))
        )
        query = jnp.asarray(np.concatenate([q[-n:] for n in queries]), jnp.float32)
        return np.asarray(jflex.mla_attention(query, cache, batch, qk_head_dim=latent + rope, **how_of(backend)))

    alone, beside = attend([1], [1]), attend([0, 1], [3, 20])
    np.testing.assert_array_equal(alone[-1], beside[-1])


# --- dense calls


@tiers(rest="full", in_turns=True, share=2)
@everywhere
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_has_the_same_bits_in_every_batch(backend, queries):
    drawn, how = requests(lengths := lengths_of(backend)), dense_how(backend, "alibi", decodes=True)
    one, others = Row(0, lengths[0], queries), [Row(1, 40, queries), Row(2, lengths[2], queries)]
    run = lambda rows, number: dense(drawn, rows, how, capacity=lengths[2] + 70 if number else 0)
    check_in_batches(run, one, [one, *others], [others[1], *[others[0]] * 7, one])


@pytest.mark.full
@pytest.mark.parametrize("backend", ["triton-interpret", *ON_GPU])
def test_decoding_with_lists_has_the_same_bits_in_every_batch(backend):
    """Lists of each batch entry: partial blocks first, then full ones."""
    lengths, long = lengths_of(backend), requests(lengths_of(backend))[2]
    hidden = jnp.asarray(np.random.default_rng(1).integers(0, lengths[2], (9, 3)), jnp.int32).at[:, 0].set(0)

    def call(entries):
        arrays = [jnp.asarray(x)[None].repeat(len(entries), 0) for x in (long.q[-1:], long.k, long.v)]
        own = hidden[np.array(entries)]
        mod = lambda b, h, q, k: (k != own[b, 1]) & (k // 100 != own[b, 2] // 100)
        mask = jflex.create_block_mask(mod, len(entries), None, 1, lengths[2], block_size=32)
        options = dense_how(backend, decodes=True) | {"mask_mod": None}
        return np.asarray(jflex.flex_attention(*arrays, block_mask=mask, **options))

    alone = call([4])
    np.testing.assert_array_equal(call([0, 1, 4, 7])[2], alone[0])


@tiers(rest="full", in_turns=True, share=2)
@everywhere
@pytest.mark.parametrize("mods", ["causal", "window"])
def test_prefill_has_the_same_bits_in_every_batch(backend, mods):
    drawn, how = requests(lengths := lengths_of(backend)), dense_how(backend, mods, decodes=False)
    one, others = Row(0, lengths[0], 37), [Row(1, 40, 37), Row(2, lengths[2], 37)]
    check_in_batches(lambda rows, _: dense(drawn, rows, how), one, [one, *others], [*others, *others, one])


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [5000, 9000])
def test_prefill_on_hopper_has_the_same_bits_in_every_batch(capacity):
    """One request leaves most SMs without work; 40 are divided among persistent CTAs."""
    rng, how = np.random.default_rng(0), how_of("mosaic_gpu")
    q, k, v = (jnp.asarray(rng.normal(size=(1, 3000, heads, 64)), jnp.bfloat16) for heads in (HQ, HKV, HKV))
    call = jax.jit(lambda *xs: jflex.flex_attention(*xs[:3], kv_lengths=xs[3], **how))
    alone = call(q, k, v, invariance.INT([3000]))
    fill = lambda x: jnp.full((40, capacity, *x.shape[2:]), jnp.nan, x.dtype).at[:, :3000].set(x)
    for row in call(q.repeat(40, 0), fill(k), fill(v), invariance.INT([3000] * 40)):
        np.testing.assert_array_equal(np.asarray(row, np.float32), np.asarray(alone[0], np.float32))


# --- that the bits are right


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("name", ["mixed_with_padding_and_empty_requests", "random_by_key", "divided_int8", "group_5"])
@everywhere
def test_pages_against_float64(backend, name, monkeypatch):
    case, options_of = next(case for case in paged_cases.CASES if case.name == name), paged_evaluation.options_of

    def options(backend):
        own = options_of(backend)
        config = dataclasses.replace(own.get("config") or Config(), batch_invariant=True)
        return own | {"config": config}

    monkeypatch.setattr(paged_evaluation, "options_of", options)
    paged_evaluation.check(case, paged_evaluation.run(case, backend))


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("queries", [1, 3])
@everywhere
def test_decoding_equals_that_in_any_order(backend, queries):
    drawn, how = requests(lengths := lengths_of(backend)), dense_how(backend, "alibi", decodes=True)
    rows = [Row(0, lengths[0], queries), Row(2, lengths[2], queries), Row(1, 40, queries)]
    plain = how | {"config": dataclasses.replace(how["config"], batch_invariant=False)}
    for found, expected in zip(dense(drawn, rows, how), dense(drawn, rows, plain), strict=True):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# --- what is refused, and said


def paged_spec(**fields):
    latent = {"values_in_keys": True, "D": 576, "Dv": 512, "Hkv": 1, "Hq": 16} if fields.pop("latent", False) else {}
    return spec_of(**{"B": 4, "T": 4, "S": 4096, "Hq": 8, "Hkv": 2, "paging": Paging(64, 256)} | latent | fields)


HOPPER = {"platform": "gpu", "device_kind": "NVIDIA H200"}
REFUSED = [
    ("mosaic_gpu", paged_spec(latent=True, **HOPPER), "number of SMs"),
    ("xla", paged_spec(**HOPPER), "chooses its GEMMs by the sizes of the batch"),
    ("reference", paged_spec(), "as many keys as the longest request has"),
    ("reference", spec_of(T=1, S=4096), "as many keys as the longest request has"),
    ("triton", paged_spec(stats=("entropy",), **HOPPER), "have no entropy"),
    ("triton", spec_of(T=1, S=4096, stats=("entropy",), **HOPPER), "have no entropy"),
]


@pytest.mark.parametrize(("backend", "spec", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refuses_what_it_cannot_promise(backend, spec, message):
    invariant = spec.replace(config=Config(batch_invariant=True))
    found = get_backend(backend).plan(invariant, None)
    assert isinstance(found, Refusal)
    assert message in found.reason
    before = get_backend(backend).plan(spec, None)
    assert not isinstance(before, Refusal) or message not in before.reason


@pytest.mark.parametrize("tokens", [4, 64, 700])
def test_tiles_and_backend_do_not_depend_on_the_batch(tokens):
    """Those of a paged call, and of a dense one by `mosaic_gpu`'s rule and by Triton's."""
    config = Config(batch_invariant=True)
    plans = [
        get_backend("triton").plan(paged_spec(B=B, T=tokens, S=S, config=config, **HOPPER), None).kernels.launches[0]
        for B in (1, 4, 300)
        for S in (64, 4096, 1 << 20)
    ]
    assert len({(plan.tiles.shape, plan.tiles.num_warps) for plan in plans}) == 1
    dense_plans = [
        get_backend("triton").plan(spec_of(B=B, T=tokens, S=S, config=config, **HOPPER), None).kernels.forward
        for B in (1, 300)
        for S in (16, 700, 1 << 17)
    ]
    assert len(set(dense_plans)) == 1


def test_explain_shows_it():
    q = jax.ShapeDtypeStruct((2, HQ, D), jnp.float32)
    cache = jax.eval_shape(lambda: jflex.paged.PagedCache.create(300, 16, HKV, D, dtype=jnp.float32))
    table = invariance.INT(1 + np.arange(160).reshape(2, 80))
    batch = jflex.paged.PagedBatch(invariance.INT([0, 1, 2]), invariance.INT([1200, 30]), table)
    config = Config(interpret=True, batch_invariant=True)
    account = jflex.explain(jflex.paged_attention, q, cache, batch, implementation="triton", config=config)
    assert f"in splits of {limits.KEYS_OF_SPLIT} keys" in str(account)
    assert "batch_invariant=True" in str(account)
    assert account.splits == 1200 // SPLIT + 1 + 1
