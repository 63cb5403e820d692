"""Compiled decoding steps of both `FlexAttention`: one program for all lengths, which updates the cache in place."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.layers.test_layer_decoding import FEATURES, assert_close, batch_of, causal, inputs_of, layer_of, table_of
from tests.support.layer_flavours import FLAVOURS

pytestmark = [pytest.mark.parametrize("flavour", FLAVOURS)]


class CountedCalls:
    """A causal mask that counts how often it is traced."""

    def __init__(self):
        self.count = 0

    def __call__(self, b, h, q_idx, kv_idx):
        self.count += 1
        return q_idx >= kv_idx


def pointers(cache) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in (cache.k, cache.v)]


def buffer_bytes(cache) -> int:
    return cache.k.nbytes + cache.v.nbytes


@nnx.jit(donate_argnames="cache")
def dense_step(layer, inputs, cache):
    return layer.decode(inputs, cache)


@nnx.jit(donate_argnames="cache")
def paged_step(layer, inputs, cache, batch):
    return layer.decode_paged(inputs, cache, batch)


@pytest.mark.full
def test_dense_steps_compile_once_and_update_the_cache_in_place(flavour):
    mask = CountedCalls()
    layer, inputs = layer_of(flavour, mask_mod=mask, rotary_base=50.0, implementation="xla"), inputs_of(2, length=1)
    cache = layer.init_cache(2, 16384)
    place, traces = pointers(cache), set()
    for lengths in ([0, 0], [5, 4000], [4095, 17]):
        _, cache = dense_step(layer, inputs, cache.with_lengths(lengths))
        assert pointers(cache) == place
        traces.add(mask.count)
    assert len(traces) == 1

    merge, state = FLAVOURS[flavour].split(layer)
    step = jax.jit(lambda state, *rest: merge(state).decode(*rest), donate_argnums=2)
    memory = step.lower(state, inputs, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= buffer_bytes(cache)
    assert memory.temp_size_in_bytes < buffer_bytes(cache) / 20


def test_paged_steps_compile_once_and_update_the_cache_in_place(flavour):
    mask = CountedCalls()
    layer, inputs = layer_of(flavour, mask_mod=mask, rotary_base=50.0, implementation="xla"), inputs_of(length=2)
    cache, traces = layer.init_paged_cache(513, 16), set()
    place = pointers(cache)
    for seed, lengths in enumerate(([1, 1], [5, 4000], [4096, 17])):
        _, cache = paged_step(layer, inputs, cache, batch_of([1, 1], lengths, table_of(2, 256, seed)))
        assert pointers(cache) == place
        traces.add(mask.count)
    assert len(traces) == 1


@pytest.mark.full
def test_layers_that_share_a_paged_cache_scan_in_place(flavour):
    """The cache is part of the carry; what is scanned over are the layers and their numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    options = {"num_kv_heads": 2, "head_dim": 8, "mask_mod": causal, "rotary_base": 50.0}
    merge, state = FLAVOURS[flavour].split(FLAVOURS[flavour].stack(keys, FEATURES, lambda: options))
    table, lengths = table_of(2, 256), [11, 3000]
    batch = batch_of([1, 1], lengths, table)

    def through(state, stream, cache, batch):
        def body(carry, layer_and_number):
            layer, number = layer_and_number
            stream, cache = carry
            output, cache = merge(layer).decode_paged(stream, cache, batch, layer=number)
            return (stream + output, cache), None

        return jax.lax.scan(body, (stream, cache), (state, jnp.arange(3)))[0]

    cache = layer_of(flavour).init_paged_cache(513, 16, layers=3)
    stream = inputs_of(length=2)
    expected, seen = stream, cache
    one = jax.jit(lambda state, *args, layer: merge(state).decode_paged(*args, layer=layer))
    for number in range(3):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], state)
        output, seen = one(own, expected, seen, batch, layer=jnp.int32(number))
        expected = expected + output

    step = jax.jit(through, donate_argnums=2)
    memory = step.lower(state, stream, cache, batch).compile().memory_analysis()
    assert memory is not None
    place = pointers(cache)
    output, cache = step(state, stream, cache, batch)
    assert_close(output, expected)
    assert_close(cache.k, seen.k)
    assert pointers(cache) == place
    assert memory.temp_size_in_bytes < buffer_bytes(cache) / 20
