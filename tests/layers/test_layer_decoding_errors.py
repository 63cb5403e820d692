"""What both `FlexAttention` say of wrong caches and wrong calls."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from flax_layers.nnx import DenseCache, EightBitCache
from jflex.paged import PagedCache
from tests.layers.test_layer_decoding import ROOM, batch_of, causal, inputs_of, layer_of, table_of
from tests.support.layer_flavours import LinenLayer

pytestmark = [pytest.mark.parametrize("flavour", ["nnx", pytest.param("linen", marks=pytest.mark.full)])]


def like(layer, **options):
    """Another layer of the same flavour."""
    return layer_of("linen" if isinstance(layer, LinenLayer) else "nnx", **options)


def listed_mask() -> jflex.BlockMask:
    """A mask of lists that hide more than its mask_mod."""
    counts, numbers = jnp.ones((1, 1, 2), jnp.int32), jnp.arange(2).reshape(1, 1, 2, 1)
    return jflex.BlockMask.from_kv_blocks(counts, numbers, block_size=16, mask_mod=causal, seq_lengths=(32, 32))


DENSE_ERRORS = {
    "no dense cache": (lambda layer: layer.decode(inputs_of(2), layer.init_paged_cache(4, 4)), TypeError,
     "`cache` must be a DenseCache. Got PagedCache.*`layer.init_cache`.*`layer.decode_paged`"),
    "batch": (lambda layer: layer.decode(inputs_of(3), layer.init_cache(2, ROOM)), ValueError,
     r"`inputs` must have as many sequences as the cache, 2. Got 3, the product of .* of \(3, 21, 24\)"),
    "more tokens than the cache holds": (lambda layer: jax.jit(layer.decode)(inputs_of(2), layer.init_cache(2, 20)),
     ValueError, "room for 20 tokens per sequence. Its longest has 0, and 21 more do not fit. .*larger `max_length`"),
    "more tokens than are left": (
     lambda layer: layer.decode(inputs_of(2), layer.init_cache(2, ROOM).with_lengths([3, 12])), ValueError,
     "room for 32 tokens per sequence. Its longest has 12, and 21 more do not fit"),
    "heads of another layer": (
     lambda layer: layer.decode(inputs_of(2), like(layer, num_kv_heads=4).init_cache(2, ROOM)), ValueError,
     r"`k` must be \[2, T, 4, 8\], with batch, heads and head size of the cache. Got \[2, 21, 2, 8\]"),
    "lists that hide more": (
     lambda layer: like(layer, mask_mod=None, block_mask=listed_mask()).decode(inputs_of(2), layer.init_cache(2, ROOM)),
     ValueError, "`block_mask` of this layer's constructor masks more than its mask_mod.*Pass `mask_mod` to this call"),
    "size of no integer": (lambda layer: layer.init_cache(2, 4.0), TypeError, "`max_length` must be an integer. Got f"),
    "size of nothing": (lambda layer: layer.init_cache(2, 0), ValueError, "`max_length` must be at least 1. Got 0"),
    "negative batch": (lambda layer: layer.init_cache(-1, 4), ValueError, "`batch_size` must be at least 0. Got -1"),
    "dtype": (lambda layer: layer.init_cache(2, 4, dtype=jnp.int32), TypeError,
     "`dtype` must be floating-point, of 16 bits or more. Got int32. An `EightBitCache` holds"),
    "eight bits without scales": (lambda layer: DenseCache.create(2, 4, 2, 8, dtype=jnp.float8_e5m2), TypeError,
     "`dtype` must be floating-point, of 16 bits or more. Got float8_e5m2"),
    "other eight bits": (lambda layer: layer.init_cache(2, 4, dtype=jnp.uint8), TypeError,
     r"`dtype` must be floating-point .*or of eight bits with scales .*float8_e4m3fn.*Got uint8"),
    "sixteen bits with scales": (lambda layer: EightBitCache.create(2, 4, 2, 8, dtype=jnp.bfloat16), TypeError,
     "`dtype` must be `float8_e4m3fn`, `float8_e5m2` or `int8`. Got bfloat16. Make a `DenseCache`"),
    "scale of eight bits": (lambda layer: EightBitCache.create(2, 4, 2, 8, dtype=jnp.int8, k_scale=0.0), ValueError,
     "`k_scale` must be positive, finite"),
    "batch over eight bits": (lambda layer: layer.decode(inputs_of(3), layer.init_cache(2, ROOM, dtype=jnp.int8)),
     ValueError, r"`inputs` must have as many sequences as the cache, 2. Got 3"),
    "more tokens than are left over eight bits": (
     lambda layer: layer.decode(inputs_of(2), layer.init_cache(2, ROOM, dtype=jnp.int8).with_lengths([3, 12])),
     ValueError, "room for 32 tokens per sequence. Its longest has 12, and 21 more do not fit"),
    "BlockMask over eight bits": (
     lambda layer: layer.decode(inputs_of(2), layer.init_cache(2, ROOM, dtype=jnp.int8), block_mask=listed_mask()),
     ValueError, "`block_mask` must be None with an EightBitCache. Got a BlockMask. Pass its `mask_mod`"),
    "keys of another batch": (
     lambda layer: layer.init_cache(2, 4, dtype=jnp.int8).append(*[jnp.ones((3, 1, 2, 8))] * 2), ValueError,
     r"`k` and `v` must be \[2, T, Hkv, D\], with the batch of the cache. Got \[3, 1, 2, 8\] and .*init_cache"),
    "lengths of another batch": (lambda layer: layer.init_cache(2, 4).with_lengths([1, 2, 3]), ValueError,
     r"`lengths` must be 2 integers, one for each sequence of the cache. Got int64\[3\]"),
    "lengths beyond": (lambda layer: layer.init_cache(2, 4).with_lengths(jnp.array([1, 5])), ValueError,
     r"`lengths` must lie within 0 and `max_length`, 4. Got \[1, 5\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE_ERRORS)
def test_wrong_dense_calls(flavour, name):
    call, error, message = DENSE_ERRORS[name]
    with pytest.raises(error, match=message):
        call(layer_of(flavour))


def paged_call(layer, inputs=None, cache=None, batch=None, **options):
    cache = layer.init_paged_cache(8, 4) if cache is None else cache
    batch = batch_of([2], [2], table_of(1, 2)) if batch is None else batch
    return layer.decode_paged(inputs_of(length=2) if inputs is None else inputs, cache, batch, **options)


PAGED_ERRORS = {
    "axes": (lambda layer: paged_call(layer, inputs_of(1)), ValueError,
     r"`inputs` must be \[N, features\].*`qo_indptr`"),
    "no paged cache": (lambda layer: paged_call(layer, cache=layer.init_cache(1, 4)), TypeError,
     "`cache` must be a `PagedCache`. Got DenseCache"),
    "more queries than inputs": (lambda layer: paged_call(layer, batch=batch_of([3], [3], table_of(1, 2))), ValueError,
     "`qo_indptr` must end at N"),
    "heads of another layer": (lambda layer: paged_call(layer, cache=PagedCache.create(8, 4, 4, 8, dtype=jnp.float32)),
     ValueError, "`k` must be .* with the heads of the cache"),
    "layer": (lambda layer: paged_call(layer, cache=layer.init_paged_cache(8, 4, layers=2)), ValueError,
     "`layer` is missing: the cache stacks 2 layers"),
    "lists that hide more": (lambda layer: paged_call(like(layer, mask_mod=None, block_mask=listed_mask())), ValueError,
     "Pass `mask_mod` to this call"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGED_ERRORS)
def test_wrong_paged_calls(flavour, name):
    call, error, message = PAGED_ERRORS[name]
    with pytest.raises(error, match=message):
        call(layer_of(flavour))
