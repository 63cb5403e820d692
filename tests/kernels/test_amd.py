"""Kernels of `triton` are lowered for an AMD GPU that is not there, without PTX; nothing runs them."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache

X = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
SLOPES = jax.ShapeDtypeStruct((4,), jnp.float32)


@contextlib.contextmanager
def absent_amd_gpu():
    device = jax.sharding.AbstractDevice(device_kind="gfx942", num_cores=None, platform="rocm")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def lowered(function, *shapes) -> str:
    with absent_amd_gpu():
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("rocm",)).as_text()


def training(q, k, v, slopes):
    mod = lambda s, b, h, i, j: jnp.tanh(s / 30) * 30 - slopes[h] * (i - j).astype(jnp.float32)
    mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 1024, 1024)
    return jflex.flex_attention(q, k, v, mod, mask).astype(jnp.float32).sum()


def sigmoid(q, k, v, _):
    return jflex.flex_attention(q, k, v, jflex.scores.sigmoid(0.0), normalize="none").astype(jnp.float32).sum()


def decoding(q, k, v, _):
    return jflex.flex_attention(q[:, :1], k, v).astype(jnp.float32).sum()


def pages(q, k, v, _, dtype=None):
    cache = PagedCache.create(65, 16, 4, 64, dtype=dtype or k.dtype)
    batch = PagedBatch(jnp.array([0, 1]), jnp.array([1024]), jnp.arange(1, 65, dtype=jnp.int32)[None])
    return jflex.paged_attention(q[0, :1], cache, batch, mask_mod=jflex.masks.causal()).astype(jnp.float32).sum()


@pytest.mark.full
@pytest.mark.parametrize("call", [jax.grad(training, (0, 1, 2, 3)), jax.grad(sigmoid), decoding, pages])
def test_kernels_are_lowered_without_ptx(call):
    text = lowered(call, X, X, X, SLOPES)
    assert "triton" in text  # and not `xla`, which would warn
    assert "asm" not in text


@pytest.mark.full
def test_eight_bits_are_refused():
    call = lambda *arrays: pages(*arrays, dtype=jnp.int8)
    with pytest.warns(UserWarning, match="triton: it loads eight bits by PTX, which gfx942 has not"):
        assert "triton" not in lowered(call, X, X, X, SLOPES)
