"""Both `FlexAttention` with dense and paged caches: their outputs are those of the layer on whole sequences.

The methods are shared, so most tests take one flavour.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers.nnx import DenseCache
from jflex.paged import PagedBatch
from tests.support.dense_masks import causal
from tests.support.layer_flavours import FLAVOURS, SLOPES
from tests.support.rows import in_turns

pytestmark = pytest.mark.full
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
FEATURES, LENGTH, ROOM = 24, 21, 32
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 6)


def layer_of(flavour: str = "nnx", **options):
    plain = {"num_kv_heads": 2, "head_dim": 8, "mask_mod": jflex.masks.causal()}
    return FLAVOURS[flavour].make(FEATURES, **(plain | options))


def inputs_of(*batch: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(*batch, length, FEATURES)).astype(np.float32)


# Compiled once for all tests: most of them take three sequences, and nine tokens or one of each at a time.
PART = 9


@nnx.jit
def whole(layer, inputs):
    return layer(inputs)


@nnx.jit
def decode(layer, inputs, cache, block_mask=None):
    return layer.decode(inputs, cache, block_mask=block_mask)


@nnx.jit
def decode_paged(layer, inputs, cache, batch):
    return layer.decode_paged(inputs, cache, batch)


OPTIONS = {
    "plain": lambda flavour: {},
    "rotary": lambda flavour: {"rotary_base": 50.0, "qk_norm": True, "use_bias": True, "use_sinks": True, "scale": 0.7},
    "alibi": lambda flavour: {"score_mod": FLAVOURS[flavour].alibi(), "mask_mod": window},
    "block mask": lambda flavour: {
        "mask_mod": None,
        "block_mask": jflex.create_block_mask(window, None, None, LENGTH, LENGTH, block_size=8),
    },
}


def layer_like(flavour: str, kind: str, **options):
    return layer_of(flavour, **(OPTIONS[kind](flavour) | options))


@functools.cache
def expected_of(flavour: str, kind: str) -> np.ndarray:
    """Of three whole sequences."""
    return np.asarray(whole(layer_like(flavour, kind), inputs_of(3)))


@in_turns
@flavours
@pytest.mark.parametrize(("kind", "implementation"), [*((kind, "xla") for kind in OPTIONS), ("alibi", "reference")])
def test_dense_calls_of_any_length_are_the_whole_sequence(flavour, kind, implementation):
    layer, inputs = layer_like(flavour, kind, implementation=implementation), inputs_of(3)
    cache, outputs = layer.init_cache(3, ROOM), []
    for part in np.split(inputs, [PART, 10, 11, 12], axis=1):  # a prompt, three tokens, then nine that are speculated
        output, cache = decode(layer, part, cache)
        outputs.append(np.asarray(output))
    assert_close(np.concatenate(outputs, axis=1), expected_of(flavour, kind))
    assert cache.lengths.tolist() == [LENGTH] * 3


@in_turns
@flavours
@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_dense_sequences_of_different_lengths(flavour, kind):
    """Prompts padded at their ends: the padding is taken back, and never seen."""
    layer, inputs = layer_like(flavour, kind, implementation="xla"), inputs_of(3)
    counts = np.array([PART, 1, 5])
    padded = np.where(np.arange(PART)[None, :, None] < counts[:, None, None], inputs[:, :PART], np.float32(1e3))
    prompt, cache = decode(layer, padded, layer.init_cache(3, ROOM))
    cache = cache.with_lengths(counts)
    more = np.stack([row[count : count + PART] for row, count in zip(inputs, counts, strict=True)])
    token, cache = decode(layer, more, cache)
    expected = expected_of(flavour, kind)
    for row, count in enumerate(counts):
        assert_close(prompt[row, :count], expected[row, :count])
        assert_close(token[row], expected[row, count : count + PART])
    assert cache.lengths.tolist() == (counts + PART).tolist()


def table_of(requests: int, pages: int, seed: int = 0) -> jax.Array:
    """Pages from 1 on, in no order."""
    ids = 1 + np.random.default_rng(seed).permutation(requests * pages)
    return jnp.asarray(ids.reshape(requests, pages).astype(np.int32))


def batch_of(counts, lengths, table) -> PagedBatch:
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    return PagedBatch(jnp.asarray(indptr), jnp.asarray(lengths, jnp.int32), table)


@in_turns
@flavours
@pytest.mark.parametrize(
    ("kind", "page_size", "implementation"),
    [*((kind, 4, "xla") for kind in OPTIONS), ("rotary", 1, "xla"), ("alibi", 4, "reference")],
)
def test_paged_calls_with_prompts_and_tokens_together_are_the_whole_sequences(flavour, kind, page_size, implementation):
    layer, inputs = layer_like(flavour, kind, implementation=implementation), inputs_of(3)
    table = table_of(3, -(-LENGTH // page_size))
    cache = layer.init_paged_cache(3 * table.shape[1] + 1, page_size)
    cache = jax.tree.map(lambda pages: jnp.full_like(pages, np.nan), cache)  # what no request wrote is not seen
    lengths, found = np.zeros(3, int), [[], [], []]
    for counts in ([7, 0, 1], [1, 4, 1], [0, 16, 12], [13, 1, 7]):
        packed = [inputs[row, lengths[row] : lengths[row] + count] for row, count in enumerate(counts)]
        lengths = lengths + counts
        padded = np.concatenate([*packed, np.zeros((30 - sum(counts), FEATURES), np.float32)])
        outputs, cache = decode_paged(layer, padded, cache, batch_of(counts, lengths, table))
        for row, part in enumerate(np.split(np.asarray(outputs[: sum(counts)]), np.cumsum(counts)[:-1])):
            found[row].append(part)
    assert lengths.tolist() == [LENGTH] * 3
    assert_close(np.stack([np.concatenate(parts) for parts in found]), expected_of(flavour, kind))


@flavours
def test_mods_of_the_call_replace_those_of_the_constructor(flavour):
    """`layer` has the parameters of the layer that has these mods by its constructor."""
    of_function = lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * (q_idx - kv_idx).astype(score.dtype)
    # In linen a module is bound to its owner.
    score_mod = FLAVOURS[flavour].alibi() if flavour == "nnx" else of_function
    mods = {"score_mod": score_mod, "mask_mod": window}
    layer, inputs, expected = layer_of(flavour), inputs_of(3)[:1], expected_of(flavour, "alibi")[:1]
    dense = nnx.jit(lambda layer, *rest: layer.decode(*rest, **mods))
    paged = nnx.jit(lambda layer, *rest: layer.decode_paged(*rest, **mods))
    output, _ = dense(layer, inputs, layer.init_cache(1, ROOM))
    assert_close(output, expected)
    batch = batch_of([LENGTH], [LENGTH], table_of(1, 6))
    assert_close(paged(layer, inputs[0], layer.init_paged_cache(7, 4), batch)[0], expected[0])


def test_a_block_mask_of_the_call_is_one_of_its_queries_and_the_cache():
    layer, inputs = layer_like("linen", "alibi", mask_mod=None), inputs_of(3)
    cache, outputs = layer.init_cache(3, ROOM), []
    for part in np.split(inputs, [PART], axis=1):
        block_mask = cache.block_mask(window, part.shape[1], block_size=4)
        output, cache = decode(layer, part, cache, block_mask)
        outputs.append(np.asarray(output))
    assert_close(np.concatenate(outputs, axis=1), expected_of("linen", "alibi"))


def test_leading_axes_are_folded():
    layer, inputs = layer_like("nnx", "rotary"), inputs_of(2, 3)
    output, _ = decode(layer, inputs[..., :PART, :], layer.init_cache(6, ROOM))
    assert_close(output, np.stack([whole(layer, row) for row in inputs])[..., :PART, :])
    alone, _ = decode(layer, inputs[0, 1, :PART], layer.init_cache(1, ROOM))
    assert_close(alone, output[0, 1])


@in_turns
@flavours
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_unused_places_of_a_dense_cache_never_reach_an_output(flavour, implementation):
    layer, inputs = layer_like(flavour, "alibi", implementation=implementation), inputs_of(3)
    cache = layer.init_cache(3, ROOM)
    cache = DenseCache(jnp.full_like(cache.k, np.nan), jnp.full_like(cache.v, np.nan), cache.lengths)
    first, cache = decode(layer, inputs[:, :PART], cache)
    last, cache = decode(layer, inputs[:, PART : 2 * PART], cache)
    assert_close(np.concatenate([first, last], axis=1), expected_of(flavour, "alibi")[:, : 2 * PART])


@in_turns
@flavours
@pytest.mark.parametrize("dtype", [None, jnp.int8])
def test_tokens_without_room_are_dropped_where_lengths_are_traced(flavour, dtype):
    layer, inputs = layer_of(flavour), inputs_of(2, length=3)
    cache = layer.init_cache(2, 8, dtype=dtype).with_lengths([7, 2])
    outputs, after = jax.jit(layer.decode)(inputs, cache)
    written = np.any(np.asarray(after.k if dtype is None else after.pages.k[1:]), axis=(2, 3))
    assert written.tolist() == [[False] * 7 + [True], [False, False, True, True, True, False, False, False]]
    is_nan = [[False, True, True], [False] * 3]  # in all features
    assert np.isnan(outputs).all(axis=2).tolist() == np.isnan(outputs).any(axis=2).tolist() == is_nan


def test_a_cache_of_its_own_dtype():
    layer, inputs = layer_of(), inputs_of(3)
    cache = layer.init_cache(3, ROOM, dtype=jnp.bfloat16)
    output, cache = decode(layer, inputs, cache)
    assert (output.dtype, cache.k.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(output, expected_of("nnx", "plain"), rtol=0.1, atol=0.05)
    assert layer_of(dtype=jnp.bfloat16).init_cache(1, 2).v.dtype == jnp.bfloat16
    assert layer_of(param_dtype=jnp.bfloat16).init_paged_cache(2, 2, layers=3).k.shape == (3, 2, 2, 2, 8)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (layer, inputs))
    assert cast[0].init_cache(1, 2).k.dtype == cast[0](cast[1]).dtype == jnp.bfloat16


@in_turns
@flavours
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_a_paged_cache_of_eight_bits(flavour, dtype):
    layer, inputs = layer_of(flavour), inputs_of(3)[0]
    cache = layer.init_paged_cache(8, 4, dtype=dtype)
    batch = PagedBatch(*(jnp.array(x, jnp.int32) for x in ([0, LENGTH], [LENGTH], [[5, 2, 7, 1, 3, 6]])))
    output, cache = decode_paged(layer, inputs, cache, batch)
    assert (output.dtype, cache.k.dtype, cache.k_scale.shape) == (jnp.float32, dtype, (8, 4, 2))
    np.testing.assert_allclose(output, expected_of(flavour, "plain")[0], rtol=0.1, atol=0.05)


@in_turns
@flavours
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e5m2])
def test_a_dense_cache_of_eight_bits(flavour, dtype):
    """In parts of one prompt, one token and several; what is held is what pages of the same tokens hold."""
    layer, inputs = layer_like(flavour, "rotary"), inputs_of(3)
    cache, outputs = layer.init_cache(3, 100, dtype=dtype), []
    for part in np.split(inputs, [PART, PART + 1], axis=1):
        output, cache = decode(layer, part, cache)
        outputs.append(np.asarray(output))
    assert (output.dtype, cache.pages.k.dtype, cache.pages.k_scale.shape) == (jnp.float32, dtype, (7, 64, 2))
    assert cache.lengths.tolist() == [LENGTH] * 3
    found, expected = np.concatenate(outputs, axis=1), expected_of(flavour, "rotary")
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < (0.12 if dtype == jnp.float8_e5m2 else 0.06)
    pages = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32)
    starts, lengths = LENGTH * jnp.arange(4, dtype=jnp.int32), jnp.full(3, LENGTH, jnp.int32)
    paged = layer.init_paged_cache(7, 64, dtype=dtype)
    _, paged = decode_paged(layer, inputs.reshape(-1, FEATURES), paged, PagedBatch(starts, lengths, pages))
    np.testing.assert_array_equal(cache.pages.k[jnp.array([1, 3, 5]), :LENGTH], paged.k[jnp.array([1, 3, 5]), :LENGTH])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_one_token_of_each_sequence_needs_no_causal_mask(dtype):
    def program(mask_mod, tokens):
        layer = layer_of(mask_mod=mask_mod)
        cache = layer.init_cache(2, 64, dtype=dtype)
        return str(jax.make_jaxpr(lambda x, cache: layer.decode(x, cache)[0])(inputs_of(2, length=tokens), cache))

    assert program(jflex.masks.causal(), 1) == program(None, 1) != program(causal, 1)
    assert program(jflex.masks.causal(), 2) != program(None, 2)


def test_no_sequences():
    layer = layer_of()
    output, cache = layer.decode(inputs_of(0), layer.init_cache(0, ROOM).with_lengths([]))
    assert (output.shape, cache.k.shape[0]) == ((0, LENGTH, FEATURES), 0)
    empty = PagedBatch(jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros((0, 3), jnp.int32))
    output, _ = layer.decode_paged(jnp.zeros((0, FEATURES)), layer.init_paged_cache(4, 4), empty)
    assert output.shape == (0, FEATURES)
    output, cache = layer.decode(inputs_of(0), layer.init_cache(0, ROOM, dtype=jnp.int8))
    assert (output.shape, cache.lengths.shape) == ((0, LENGTH, FEATURES), (0,))


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


def test_dense_steps_compile_once_and_update_the_cache_in_place():
    mask = CountedCalls()
    layer, inputs = layer_of("linen", mask_mod=mask, rotary_base=50.0, implementation="xla"), inputs_of(2, length=1)
    cache = layer.init_cache(2, 16384)
    place, traces = pointers(cache), set()
    for lengths in ([0, 0], [5, 4000], [4095, 17]):
        _, cache = dense_step(layer, inputs, cache.with_lengths(lengths))
        assert pointers(cache) == place
        traces.add(mask.count)
    assert len(traces) == 1

    merge, state = FLAVOURS["linen"].split(layer)
    step = jax.jit(lambda state, *rest: merge(state).decode(*rest), donate_argnums=2)
    memory = step.lower(state, inputs, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= buffer_bytes(cache)
    assert memory.temp_size_in_bytes < buffer_bytes(cache) / 20


def test_layers_that_share_a_paged_cache_scan_in_place():
    """The cache is part of the carry; what is scanned over are the layers and their numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    options = {"num_kv_heads": 2, "head_dim": 8, "mask_mod": causal, "rotary_base": 50.0}
    merge, state = FLAVOURS["nnx"].split(FLAVOURS["nnx"].stack(keys, FEATURES, lambda: options))
    table, lengths = table_of(2, 256), [11, 3000]
    batch = batch_of([1, 1], lengths, table)

    def through(state, stream, cache, batch):
        def body(carry, layer_and_number):
            layer, number = layer_and_number
            stream, cache = carry
            output, cache = merge(layer).decode_paged(stream, cache, batch, layer=number)
            return (stream + output, cache), None

        return jax.lax.scan(body, (stream, cache), (state, jnp.arange(3)))[0]

    cache = layer_of().init_paged_cache(513, 16, layers=3)
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
