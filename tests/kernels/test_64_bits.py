"""With `jax_enable_x64` on, kernels compute what they compute without."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache
from tests.support import gpu_compile
from tests.support.rows import tiers

KERNEL = {"implementation": "triton", "config": jflex.Config(interpret=True)}
INT = functools.partial(jnp.asarray, dtype=jnp.int32)


def alibi(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).astype(jnp.float32) / 8


def seen(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx % 5 != 4)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def training(q, **how):
    """With dropout."""
    blocks = jflex.create_block_mask(seen, None, None, 80, 80, block_size=32)
    how = how | {"dropout_rate": 0.3, "dropout_key": jax.random.key(7)}
    return jax.value_and_grad(lambda q: jnp.sum(jnp.sin(jflex.flex_attention(q, q, q, alibi, blocks, **how))))(q)


def packed(q, **how):
    ends = INT([0, 30, 30, 70])
    attend = lambda q: jflex.flex_attention_varlen(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=seen, **how)
    return jax.value_and_grad(lambda q: jnp.sum(jnp.sin(attend(q[0]))))(q)


def decoding(q, **how):
    return jflex.flex_attention(
        q[:, :1].repeat(3, 0), q.repeat(3, 0), q.repeat(3, 0), kv_lengths=INT([80, 0, 7]), **how
    )


def decoding_evenly(q, **how):
    return jflex.flex_attention(q[:, :2], q, q, alibi, **how)


def paged(q, **how):
    cache = PagedCache(*(q.reshape(5, 16, 2, 16) for _ in range(2)))
    batch = PagedBatch(INT([0, 1, 21]), INT([40, 30]), INT([[1, 3, 2], [4, 1, 0]]))
    return jflex.paged_attention(q[0, :21], cache, batch, score_mod=alibi, mask_mod=seen, return_lse=True, **how)


CALLS = [training, packed, decoding, decoding_evenly, paged]


@tiers(full={"call": "training"}, rest="long")
@pytest.mark.parametrize("call", CALLS)
def test_interpreted(call):
    right = jax.jit(functools.partial(call, **KERNEL))(drawn(1, 80, 2, 16))
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(call, **KERNEL))(drawn(1, 80, 2, 16))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, right)
    chex.assert_trees_all_close(found, right, rtol=1e-6, atol=1e-6)


@tiers(full={"call": "decoding"}, rest="long")
@pytest.mark.parametrize("call", [training, decoding, paged])
def test_compiles_for_a_gpu(call):
    with jax.enable_x64(True):
        program, q = functools.partial(call, implementation="triton"), jax.ShapeDtypeStruct((1, 80, 2, 16), jnp.float32)
        assert gpu_compile.compile_or_skip(program, q)


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its kernels need JAX 0.11")
@pytest.mark.parametrize("batch", [(), (2,)], ids=["alone", "batched"])
def test_lowers_for_hopper(batch):
    """Over batches its kernels are called in a loop, whose counter must not have 64 bits."""
    attend = lambda q: jnp.sum(jflex.flex_attention(q, q, q, alibi, mask_mod=seen, implementation="mosaic_gpu"))
    function = jax.vmap(jax.grad(attend)) if batch else jax.grad(attend)
    with jax.enable_x64(True):
        gpu_compile.lower(function, jax.ShapeDtypeStruct((*batch, 1, 256, 2, 64), jnp.bfloat16))


def test_batches_of_64_bits_stay_so():
    wide = lambda score, b, h, q_idx, kv_idx: score * jnp.asarray(q_idx + 1, jnp.float64).astype(jnp.float32)
    q = drawn(2, 1, 20, 2, 16)
    with jax.enable_x64(True):
        attend = lambda q: jflex.flex_attention(q, q, q, wide, implementation="xla")
        found, right = jax.vmap(attend)(q), jnp.stack([attend(x) for x in q])
    np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


def test_mods_that_compute_in_64_bits_are_refused():
    """A number of Python times an integer is float64 there."""
    far = lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = drawn(1, 20, 2, 16)
        with pytest.raises(jflex.UnsupportedError, match=r"it computes in float64, where kernels take up to 32"):
            jflex.flex_attention(q, q, q, far, **KERNEL)
        assert jflex.flex_attention(q, q, q, far, implementation="xla").dtype == jnp.float32
