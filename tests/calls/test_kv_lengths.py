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
from tests.cases.errors.calls import within
from tests.cases.features import BACKENDS
from tests.cases.table import LENGTHS
from tests.support import evaluation
from tests.support.rows import tiers

B, T, S, HQ, HKV, D = 2, 2, 96, 4, 2, 16
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def drawn(seed=0, batch=B, queries=T):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return draw(batch, queries, HQ, D), draw(batch, S, HKV, D), draw(batch, S, HKV, D)


# --- against the oracle


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize("case", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_lengths(case, backend):
    evaluation.check_forward(case, backend)
    evaluation.check_gradients(case, backend, ("query", "key", "value", *evaluation.draw(case).floats()))


@tiers(full={"by_head": True}, rest="long")
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


# --- tiles of the user, explain, wrong input


@pytest.mark.full
@pytest.mark.parametrize("tiles", [jflex.Tiles(16, 16), jflex.Tiles(256, 256)])
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
