"""Each batch entry with its own number of keys: `kv_lengths`, against the oracle; beyond the lengths stands NaN."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex._call.dispatch import get_backend
from tests.calls.test_transforms import shapes_made
from tests.cases.table import LENGTHS
from tests.support import evaluation
from tests.support.rows import in_turns, tiers

B, T, S, HQ, HKV, D = 2, 2, 96, 4, 2, 16
BACKENDS = {
    "xla": {"implementation": "xla"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
}
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def drawn(seed=0, batch=B, queries=T):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return draw(batch, queries, HQ, D), draw(batch, S, HKV, D), draw(batch, S, HKV, D)


def within(*lengths):
    return jnp.array(lengths, jnp.int32)


def as_mask(lengths):
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def sum_of(out, lse):
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0.0, lse)))


# --- against the oracle


@tiers(
    full=[
        {"backend": ["xla", "triton-interpret"]},
        {"backend": "reference", "case": ["length_sigmoid", "length_dropout"]},
    ],
    rest="gpu",
)
@pytest.mark.parametrize("case", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", [*evaluation.BACKENDS, "reference"])
def test_lengths(case, backend):
    evaluation.check_forward(case, backend)
    evaluation.check_gradients(case, backend, ("query", "key", "value", *evaluation.draw(case).floats()))


@pytest.mark.full
@pytest.mark.parametrize("by_head", [False, True])
def test_rows_that_share_few_programs(by_head):
    """With 32 key heads a GPU has 9 programs for each: some rows of several tiles stay whole, some are divided."""
    rng = np.random.default_rng(0)
    lengths = within(512, 40, 0, 300, 33, 64)
    q, k, v = (jnp.asarray(rng.normal(size=(6, n, 32, 16)), jnp.float32) for n in (2, 512, 512))
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx // 64 + h) % 3 != 1
    block_mask = jflex.create_block_mask(mask_mod, None, 32, 2, 512, block_size=64) if by_head else None
    attend = functools.partial(jflex.flex_attention, q, k, v, None, block_mask, kv_lengths=lengths, return_lse=True)
    jax.tree.map(assert_close, attend(**BACKENDS["triton-interpret"]), attend(implementation="reference"))


@pytest.mark.full
@backends
def test_a_step_of_decoding_equals_the_last_rows_of_training(backend):
    """Queries that continue each sequence see what they saw when all of it was computed at once."""
    steps, lengths = 3, (96, 40)
    q, k, v = drawn(queries=S)
    slopes = jnp.array([0.1, 0.2, 0.3, 0.4])
    alibi = lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx).astype(jnp.float32)
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    whole = jflex.flex_attention(q, k, v, alibi, mask_mod=causal, implementation="reference")
    last = lambda x: jnp.stack([x[b, n - steps : n] for b, n in enumerate(lengths)])
    offset = within(*lengths) - steps
    found = jflex.flex_attention(
        last(q), k, v, jflex.with_offset(alibi, offset), mask_mod=jflex.with_offset(causal, offset),
        kv_lengths=within(*lengths), **BACKENDS[backend],
    )  # fmt: skip
    assert_close(found, last(whole))


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize("queries", [T, 40])
def test_a_length_of_0_gives_nothing_and_of_s_changes_nothing(backend, queries):
    q, k, v = drawn(queries=queries)
    attend = functools.partial(jflex.flex_attention, return_lse=True, **BACKENDS[backend])
    loss = lambda q, k, v, lengths: sum_of(*attend(q, k, v, kv_lengths=lengths))
    out, lse = attend(q, k, v, kv_lengths=within(0, S))
    np.testing.assert_array_equal(out[0], jnp.zeros_like(out[0]))
    np.testing.assert_array_equal(lse[0], jnp.full_like(lse[0], -jnp.inf))
    assert_close(out[1], attend(q, k, v)[0][1])
    for gradient in jax.grad(loss, (0, 1, 2))(q, k, v, within(0, S)):
        np.testing.assert_array_equal(gradient[0], jnp.zeros_like(gradient[0]))
        assert np.abs(gradient[1]).max() > 0


@backends
def test_traced_lengths_out_of_range_count_as_the_nearest_in_range(backend):
    q, k, v = drawn()
    attend = jax.jit(lambda lengths: jflex.flex_attention(q, k, v, kv_lengths=lengths, **BACKENDS[backend]))
    np.testing.assert_array_equal(attend(within(-5, S + 1000)), attend(within(0, S)))


# --- one program for all lengths


@pytest.mark.full
@backends
def test_eager_calls_are_traced_once_for_all_lengths(backend, monkeypatch):
    owner, traced = type(get_backend(BACKENDS[backend]["implementation"])), []
    method = owner.forward
    monkeypatch.setattr(owner, "forward", lambda self, *args: traced.append(self) or method(self, *args))
    for length in (3, 40, S):
        jflex.flex_attention(*drawn(), kv_lengths=within(length, length), scale=0.371, **BACKENDS[backend])
    assert len(traced) == 1


@pytest.mark.full
@backends
def test_decoding_copies_no_keys(backend):
    """So that its time follows the visited keys, not the capacity of a cache."""
    q, k, v = drawn()
    attend = lambda *args: jflex.flex_attention(*args[:3], kv_lengths=args[3], **BACKENDS[backend])
    made = list(shapes_made(jax.make_jaxpr(attend)(q, k, v, within(3, S))))
    interpreted = 2 if backend == "triton-interpret" else 0  # copies key and value, as the memory of a kernel
    assert made
    assert sum(np.prod(shape) >= k.size for shape in made if shape[-1:] == (D,)) <= interpreted


@pytest.mark.full
def test_captures_of_the_mask_that_are_traced():
    q, k, v = drawn()

    def run(options, limit, lengths):
        mask_mod = lambda b, h, q_idx, kv_idx: kv_idx >= limit[b]
        return jflex.flex_attention(q, k, v, mask_mod=mask_mod, kv_lengths=lengths, **options)

    args = within(4, 30), within(40, 20)
    assert_close(*(jax.jit(functools.partial(run, options))(*args) for options in
                   (BACKENDS["triton-interpret"], {"implementation": "reference"})))  # fmt: skip


# --- tiles of the user, explain, wrong input


@pytest.mark.full
@pytest.mark.parametrize("tiles", [jflex.Tiles(16, 16), jflex.Tiles(32, 64), jflex.Tiles(256, 256)])
def test_tiles_of_the_user(tiles):
    q, k, v = drawn(queries=40)
    right = jflex.flex_attention(q, k, v, kv_lengths=within(70, 3), implementation="reference")
    config = jflex.Config(forward=tiles, interpret=True)
    found = jflex.flex_attention(q, k, v, kv_lengths=within(70, 3), implementation="triton", config=config)
    assert_close(found, right)


def test_explain_counts_what_lies_within_the_lengths():
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn())
    whole, half = (jflex.explain(q, k, v, kv_lengths=within(*n), implementation="xla") for n in ((S, S), (S, 0)))
    assert half.flops * 2 == whole.flops
    assert half.bytes < whole.bytes
    mask = jflex.create_block_mask(lambda b, h, q, k: k >= 0, None, None, T, S, block_size=32)
    account = jflex.explain(q, k, v, block_mask=mask, kv_lengths=within(33, 64))
    assert (account.visited, account.full, account.blocks) == (4 * HQ, 0, 6 * HQ)
    shape = jax.ShapeDtypeStruct((B,), jnp.int32)
    assert jflex.explain(q, k, v, block_mask=mask, kv_lengths=shape, implementation="xla").visited is None
    said = str(jflex.explain(q, k, v, kv_lengths=shape, implementation=("triton", "xla")))
    assert "it needs an NVIDIA GPU" in said


@pytest.mark.full
def test_a_mask_that_no_kernel_can_evaluate_is_named():
    q, k, v = drawn(queries=40)
    order = lambda b, h, q_idx, kv_idx: jnp.sort(jnp.stack([q_idx, kv_idx]))[0] > 3
    with pytest.raises(jflex.UnsupportedError, match=r"`mask_mod` .*order|`mask_mod` .*<lambda>.*sort"):
        jflex.flex_attention(q, k, v, mask_mod=order, kv_lengths=within(1, 2), **BACKENDS["triton-interpret"])


@pytest.mark.full
def test_numpy_lengths_and_empty_calls_are_no_errors():
    q, k, v = drawn()
    found = jflex.flex_attention(q, k, v, kv_lengths=np.array([3, 5], np.int32))
    assert_close(found, jflex.flex_attention(q, k, v, kv_lengths=within(3, 5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = jflex.flex_attention(q, k[:, :0], v[:, :0], kv_lengths=within(0, 0), return_lse=True)
        nothing = jflex.flex_attention(q[:0], k[:0], v[:0], kv_lengths=jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(out, jnp.zeros_like(out))
    np.testing.assert_array_equal(lse, jnp.full_like(lse, -jnp.inf))
    assert nothing.shape == (0, T, HQ, D)
