"""Dropout of the weights: which are dropped, and that it is at random. (Results are in the table of cases.)"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jflex
from jflex._call.dropout import kept_mod
from tests.support import dropout_bits, gpu_compile
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.dense_masks import causal
from tests.support.rows import in_turns, tiers

B, T, S, HQ, HKV = 2, 40, 70, 4, 2
RATE, KEY = 0.3, jax.random.key(dropout_bits.KEY[1])
INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}
BACKENDS = {"reference": {"implementation": "reference"}, "xla": {"implementation": "xla"}, "triton": INTERPRETED}
backends = pytest.mark.parametrize("how", BACKENDS.values(), ids=BACKENDS)
fused = pytest.mark.parametrize("how", [BACKENDS["xla"], INTERPRETED], ids=["xla", "triton"])


def shown(batch=B, queries=T, keys=S, key_batch=None, layout="BTNH"):
    """Arrays of which the output is the weights themselves: all scores are 0, and the values a unit matrix."""
    turn = (lambda x: x) if layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    key_batch = batch if key_batch is None else key_batch
    q, k = jnp.zeros((batch, queries, HQ, 16)), jnp.zeros((key_batch, keys, HKV, 16))
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (key_batch, keys, HKV, keys))
    return turn(q), turn(k), turn(v)


def kept_of(out, layout="BTNH"):
    """Which weights an output holds, [B, Hq, T, S]."""
    return np.asarray(out if layout == "BNTH" else out.swapaxes(1, 2)) > 0


def drawn_kept(batch=B, queries=T, keys=S, rate=RATE, words=dropout_bits.KEY):
    return dropout_bits.kept(rate, words, *np.ogrid[:batch, :HQ, :queries, :keys])


def attend(*arrays, key=KEY, rate=RATE, **more):
    return jflex.flex_attention(*arrays, dropout_rate=rate, dropout_key=key, **more)


# --- which weights


@tiers(rest="full")
@backends
def test_weights_are_kept_by_the_generator(how):
    np.testing.assert_array_equal(kept_of(attend(*shown(), **how)), drawn_kept())


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize("axes", [(1, 1), (B, 1), (1, HQ)], ids=str)
def test_batch_entries_and_heads_share_keys(how, axes):
    """Each key drops as it does for the first batch entry and head."""
    numbers = np.arange(np.prod(axes)).reshape(axes)
    keys = jax.vmap(jax.vmap(lambda n: jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), n]))))(jnp.uint32(numbers))
    words = np.broadcast_to(numbers, (B, HQ))[:, :, None, None]
    expected = dropout_bits.kept(RATE, (np.zeros_like(words), words), 0, 0, *np.ogrid[:T, :S])
    np.testing.assert_array_equal(kept_of(attend(*shown(), key=keys, **how)), expected)
    np.testing.assert_array_equal(kept_of(attend(*shown(), key=jax.random.key_data(keys), **how)), expected)


@pytest.mark.full
def test_rows_of_a_packed_call_share_keys():
    keys, rows = jax.random.split(jax.random.key(0), (3, 1)), jnp.array([0, 2, 2, 1], jnp.int32)
    of_entries, of_rows = kept_mod(RATE, keys, 3, HQ), kept_mod(RATE, keys, rows, HQ)
    positions = jnp.arange(9)[:, None], jnp.arange(50)[None]
    for row, entry in enumerate(rows.tolist()):
        np.testing.assert_array_equal(of_rows(row, 3, *positions), of_entries(entry, 0, *positions))


@pytest.mark.full
@pytest.mark.parametrize("tiles", [(16, 16), (16, 64), (64, 32)], ids=str)
def test_tiles_make_no_difference(tiles):
    config = jflex.Config(interpret=True, forward=jflex.Tiles(*tiles))
    out = attend(*shown(), implementation="triton", config=config)
    np.testing.assert_array_equal(kept_of(out), drawn_kept())


@pytest.mark.full
@fused
def test_blocks_of_a_mask_make_no_difference(how):
    mask = jflex.create_block_mask(causal, None, None, T, S, block_size=32)
    seen = np.arange(T)[:, None] >= np.arange(S)
    np.testing.assert_array_equal(kept_of(attend(*shown(), None, mask, **how)), drawn_kept() & seen)


@pytest.mark.full
@fused
def test_few_queries_of_given_lengths(how):
    """The decoding kernel, which has several heads in the rows of a tile."""
    arrays, lengths = shown(3, 2, 200, key_batch=1, layout="BNTH"), jnp.array([200, 0, 77], jnp.int32)
    out = attend(*arrays, kv_lengths=lengths, layout="BNTH", **how)
    inside = np.arange(200) < np.array([200, 0, 77])[:, None, None, None]
    np.testing.assert_array_equal(kept_of(out, "BNTH"), drawn_kept(3, 2, 200) & inside)


@pytest.mark.full
@fused
def test_the_backward_pass_drops_the_same(how):
    """The gradient of the values is the transpose of the weights, for cotangents that are a unit matrix."""
    q, k, v = shown(keys=T)
    _, pull = jax.vjp(lambda v: attend(q, k, v, **how), v)
    d_v = np.asarray(pull(jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, HQ, T)))[0])  # [B, S, Hkv, T]
    kept = drawn_kept(keys=T).reshape(B, HKV, 2, T, T).sum(2)  # over the query heads of a key head
    np.testing.assert_allclose(d_v, kept.transpose(0, 3, 1, 2) / T / (1 - RATE), rtol=1e-5)


@pytest.mark.full
@fused
def test_packed_sequences_count_from_their_own_first_token(how):
    ends, (q, k, v) = jnp.array([0, 17, 17, 40, 60], jnp.int32), shown(1, 70, 70)
    out = jflex.flex_attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, dropout_rate=RATE, dropout_key=KEY, **how
    )
    wanted, found, drawn = np.zeros((HQ, 70, 70), bool), kept_of(out[None])[0], drawn_kept(4, 23, 23)
    for number, (first, last) in enumerate(itertools.pairwise(ends.tolist())):
        size = last - first
        wanted[:, first:last, first:last] = drawn[number, :, :size, :size]
    np.testing.assert_array_equal(found, wanted)


# --- keys


@pytest.mark.full
@fused
def test_vmap_over_keys(how):
    keys = jax.random.split(KEY, 3)
    words = np.asarray(jax.random.key_data(keys))
    outs = jax.jit(jax.vmap(lambda key: attend(*shown(1), key=key, **how)))(keys)
    for out, own in zip(outs, words, strict=True):
        np.testing.assert_array_equal(kept_of(out), drawn_kept(1, words=tuple(own)))


@pytest.mark.parametrize("key", [jax.random.PRNGKey(7), np.array(dropout_bits.KEY, np.uint32)], ids=["jax", "numpy"])
def test_old_keys(key):
    np.testing.assert_array_equal(kept_of(attend(*shown(), key=key)), drawn_kept())


@pytest.mark.full
def test_keys_of_four_words():
    of_words = lambda *words: jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="rbg")
    first, same, other = (
        kept_of(attend(*shown(), key=of_words(*w))) for w in ((0, 7, 1, 2), (0, 7, 1, 2), (0, 7, 1, 3))
    )
    np.testing.assert_array_equal(first, same)
    assert 0.3 < np.mean(first != other) < 0.55  # 2 x 0.3 x 0.7, of independent ones
    assert 0.3 < np.mean(first != drawn_kept()) < 0.55


def test_a_new_key_compiles_nothing():
    run = jax.jit(chex.assert_max_traces(lambda key: attend(*shown(1), key=key, implementation="xla"), n=1))
    first, second = (kept_of(run(jax.random.key(n))) for n in range(2))
    assert (first != second).any()


# --- devices


@pytest.mark.full
@fused
@NEEDS_EIGHT_DEVICES
def test_shard_map_has_the_indices_of_a_shard(how):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def local(q, k, v, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return attend(q, k, v, key=key, **how)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("data"),) * 3 + (P(),), out_specs=P("data"))
    found = kept_of(jax.jit(run)(*shown(), KEY))
    for shard in range(2):
        words = tuple(np.asarray(jax.random.key_data(jax.random.fold_in(KEY, shard))))
        np.testing.assert_array_equal(found[shard], drawn_kept(1, words=words)[0])


# --- no dropout


@tiers(default={"how": "xla"})
@fused
def test_a_rate_of_0_is_the_program_without_dropout(how):
    arrays = shown()

    def run(given, *arrays):
        out, pull = jax.vjp(lambda *xs: jflex.flex_attention(*xs, return_lse=True, **given, **how), *arrays)
        return out, pull(out)

    rate_0, plain = {"dropout_rate": 0.0, "dropout_key": KEY}, {}
    texts = [jax.jit(functools.partial(run, given)).lower(*arrays).as_text() for given in (rate_0, plain)]
    assert texts[0] == texts[1]


# --- at random

POSITIONS = (2, 2, 384, 512)


@functools.cache
def drawn(rate, key=3):
    """Which weights are kept at all `POSITIONS`, standardised: of mean 0 and variance 1 if they are independent."""
    mod = kept_mod(rate, jax.random.key(key), *POSITIONS[:2])
    for axis in reversed(range(4)):
        mod = jax.vmap(mod, in_axes=tuple(0 if i == axis else None for i in range(4)))
    kept = np.asarray(jax.jit(mod)(*(jnp.arange(n, dtype=jnp.int32) for n in POSITIONS)))
    return (kept - (1 - rate)) / np.sqrt(rate * (1 - rate))


def deviations(x):
    """The mean of independent numbers of mean 0 and variance 1, in its own standard deviations."""
    return abs(x.mean()) * np.sqrt(x.size)


RATES = [0.01, 0.1, 0.5, 0.9]


@tiers(default={"rate": 0.1})
@pytest.mark.parametrize("rate", RATES)
def test_the_rate_is_within_binomial_bounds(rate):
    z = drawn(rate)
    assert deviations(z) < 4
    for axis in range(4):  # of each batch entry, head, query and key
        others = tuple(a for a in range(4) if a != axis)
        sums = z.mean(axis=others) * np.sqrt(z.size / z.shape[axis])
        assert np.abs(sums).max() < 4.5
        assert abs(np.mean(sums**2) - 1) < 5 * np.sqrt(2 / sums.size)


@pytest.mark.full
@pytest.mark.parametrize("rate", RATES)
def test_rectangles_and_diagonals_are_independent(rate):
    """What a sum or XOR of a word for the query and a word for the key would fail: four corners decide one another."""
    z = drawn(rate)
    for i, j in itertools.product((1, 2, 16, 64), (1, 3, 16, 128)):
        corners = z[:, :, i:, j:], z[:, :, :-i, :-j], z[:, :, i:, :-j], z[:, :, :-i, j:]
        assert deviations(corners[0] * corners[1]) < 4.5
        assert deviations(corners[2] * corners[3]) < 4.5
        assert deviations(functools.reduce(np.multiply, corners)) < 4.5


# --- what is not supported, NaN


def test_explain_takes_the_shape_of_a_key():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    with gpu_compile.absent_gpu():
        by_key = [jflex.explain(x, x, x, dropout_rate=RATE, dropout_key=k) for k in (KEY, jax.eval_shape(lambda: KEY))]
    assert by_key[0] == by_key[1]
    assert by_key[0].backend == by_key[0].gradients == ("triton" if jax.__version_info__ < (0, 11) else "mosaic_gpu")


@pytest.mark.full
@backends
def test_masked_nan_reaches_nothing(how):
    mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx != 5)
    finite = [jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(shown(1, 20, 20))]
    with_nan = [finite[0], *(x.at[:, 5].set(jnp.nan) for x in finite[1:])]

    @jax.jit
    def run(*arrays):
        out, pull = jax.vjp(lambda *xs: attend(*xs, mask_mod=mask, **how), *arrays)
        return out, pull(jnp.ones_like(out))

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), run(*with_nan), run(*finite))
