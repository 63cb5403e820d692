"""Arrays of 2 ** 31 elements and more: reached by 64 bits, or refused by name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import Config
from jflex._call.dispatch import get_backend
from jflex.paged import PagedBatch, PagedCache, write
from pallas_kernels.plan import Refusal, all_gradients
from pallas_kernels.spec import Paging
from pallas_kernels.triton.compiler.emit.text import Value
from pallas_kernels.triton.compiler.rules import memory
from tests.calls.test_determinism import spec_with
from tests.support.specs import spec_of

HOPPER = {"platform": "gpu", "device_kind": "NVIDIA H200"}


# --- what is refused


def pages(count, held="int8", layers=1, dtype="float32", **fields):
    """Of 64 keys, 8 heads of 128: 2 ** 16 elements each. Those of 16-bit queries are loaded as words."""
    fields = HOPPER | {"dtype": dtype} | fields
    return spec_of(B=4, T=4, S=4096, Hq=8, paging=Paging(64, count, held, layers), D=128, **fields)


@pytest.mark.parametrize(
    ("spec", "is_refused"),
    [
        (pages(1 << 15), False), (pages((1 << 15) + 1), True), (pages(1 << 16), True), (pages((1 << 16) + 1), False),
        (pages(1 << 12, layers=16), True), (pages(1 << 12, layers=8), False), (pages(1 << 16, None), False),
        (pages(1 << 16, dtype="bfloat16"), False), (pages((1 << 15) + 1, "float8_e4m3fn", dtype="bfloat16"), False),
        (pages(1 << 16, dtype="bfloat16", value_mod=spec_with("columns").score_mod), True),
    ],
)  # fmt: skip
def test_pages_of_eight_bits_that_pallas_does_not_reach_are_refused(spec, is_refused):
    found = get_backend("triton").plan(spec, None)
    assert isinstance(found, Refusal) == is_refused
    assert not is_refused or "Pallas does not reach the last ones" in found.reason


def large(backend, **config):
    """A bias of 2 ** 31 elements, whose gradient is requested."""
    spec = spec_with("columns").replace(config=Config(**config))
    mod = dataclasses.replace(spec.score_mod, operands=(((1 << 16, 1 << 15), "float32"),))
    spec = spec.replace(score_mod=mod)
    return get_backend(backend).plan(spec, all_gradients(spec))


def test_xla_refuses_gradients_at_positions_beyond_32_bits():
    found = large("xla")
    assert isinstance(found, Refusal)
    assert "positions that 32 bits do not hold" in found.reason


def test_a_gradient_beyond_32_bits_is_not_sorted():
    found = large("triton", deterministic=True)
    assert isinstance(found, Refusal)
    assert "fewer than 2 ** 31 elements" in found.reason


# --- what reaches them


@pytest.mark.parametrize(("heads", "is_wide"), [(15, False), (16, True), (18, True)])
def test_official_triton_counts_elements_in_64_bits(heads, is_wide):
    shape = (1, 1 << 20, heads, 128)
    value = lambda name: Value(name, (), np.dtype("int32"))
    offset = memory._offset([value("b"), value("t"), value("h"), value("d")], 0, shape, lambda x: x)
    assert offset.count(".to(tl.int64)") == (4 if is_wide else 0)
    assert f"{heads * 128}" in offset


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64], ids=["decoding", "prefill"])
@pytest.mark.parametrize("held", ["int8", "float8_e4m3fn"])
def test_the_last_page_of_a_cache_between_two_and_four_gigabytes(held, tokens):
    """About 5 GB. Words of two columns are reached by 32 bits: as from a cache of few pages."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2, 64, 8, 128)), jnp.bfloat16)
    query = jnp.asarray(rng.normal(size=(tokens, 8, 128)), jnp.bfloat16)
    found = []
    for count in (4, (1 << 15) + 4):
        cache = PagedCache.create(count, 64, 8, 128, dtype=held)
        slots = jnp.arange(64, dtype=jnp.int32) + (count - 1) * 64
        cache = jax.jit(write, donate_argnames="cache")(cache, *rows, slots)
        batch = PagedBatch(jnp.array([0, tokens]), jnp.array([64]), jnp.array([[count - 1]]))
        found.append(np.asarray(jflex.paged_attention(query, cache, batch, implementation="triton"), np.float32))
    assert np.abs(found[0]).max() > 0.1
    if tokens == 1:
        np.testing.assert_array_equal(*found)
    else:  # words are loaded from the larger one alone
        np.testing.assert_allclose(*found, rtol=0, atol=0.02)


S, HEADS, D, WINDOW, TAIL = 1 << 20, 18, 128, 256, 4096  # 2.4e9 elements in an array


def window(b, h, q_idx, kv_idx):
    """Relative, so that the last tokens alone attend as they do in the whole sequence."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


@functools.cache
def attended(backend, length, *, gradients):
    """A compiled function of query, key, value and cotangent."""

    def attend(q, k, v):
        mask = jflex.create_block_mask(window, None, None, length, length, max_blocks=8)
        return jflex.flex_attention(q, k, v, block_mask=mask, implementation=backend)

    def both(q, k, v, d_out):
        if not gradients:
            return (attend(q, k, v),)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return jax.jit(both)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "gradients"), [("mosaic_gpu", True), ("triton", True), ("official_triton", True), ("xla", False)]
)
def test_the_end_of_a_million_tokens(backend, gradients):
    """About 60 GB. The last tokens are compared with the same computation on an array of these alone."""

    @jax.jit
    def draw(key):
        return jax.random.uniform(key, (1, S, HEADS, D), jnp.bfloat16, -1.0, 1.0)

    arrays = [draw(key) for key in jax.random.split(jax.random.key(0), 4 if gradients else 3)]
    arrays += [] if gradients else [jnp.zeros((), jnp.bfloat16)]
    last = [x[:, -TAIL:] if x.ndim else x for x in arrays]
    expected = attended(backend, TAIL, gradients=gradients)(*last)
    found = [x[:, -TAIL:] for x in attended(backend, S, gradients=gradients)(*arrays)]
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(z[:, WINDOW:], np.float32) for z in (x, y))
        assert np.isfinite(x).all()
        assert np.abs(y).max() > 1e-3
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()
