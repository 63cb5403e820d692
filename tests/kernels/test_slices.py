"""Slices of larger arrays, compiled for an H200: no kernel gets an address inside of the whole array."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from tests.support import gpu_compile

T = 512
KEPT = jflex.Config(contain_nan=False)  # nothing stands between the kernel and its results


def captured(attend, words, query):
    # XLA asks for the size of a slice to be a multiple of 128 bytes, and nothing of where it begins.
    bias = words[3 : 3 + T]
    return attend(query, query, query, lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])


def stacked_keys(attend, words, query):
    return jax.lax.scan(lambda x, y: (x + attend(x, y, y), None), query, jnp.stack([query] * 3))


def stacked_results(attend, words, query):
    def layer(x, _):
        out, lse = attend(x, x, x, config=KEPT, return_lse=True)
        return x + out, (out, lse)

    return jax.lax.scan(layer, query, None, length=3)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("call", [captured, stacked_keys, stacked_results])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "official_triton"])
def test_no_kernel_gets_an_address_inside_of_an_array(implementation, call):
    if implementation == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic GPU is used from JAX 0.11 on")
    if implementation == "official_triton":
        pytest.importorskip("triton")
    attend = lambda *args, **options: jflex.flex_attention(*args, implementation=implementation, **options)
    words, query = jnp.zeros(3 + T), jnp.zeros((1, T, 1, 64), jnp.bfloat16)
    text = gpu_compile.compiled_of(lambda *arrays: call(attend, *arrays), words, query).as_text()
    assert "custom-call" in text
    assert "dynamic-slice-fusion" not in text
