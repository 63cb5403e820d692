"""What mods of users and ready ones go on accepting: arrays longer than a call, unknown lengths, what wraps mods."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from jflex.mods.trace import trace_mask_mod
from jflex.paged import PagedBatch, PagedCache
from tests.cases.errors.index_sizes import TWO, per_head, same_document
from tests.support.rows import tiers
from tests.support.sized_calls import DOCUMENT, IDS, block_mask, call, cascade, draw, ids_of, int32, paged, varlen

assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
LONG_IDS, WIDE_BIAS = ids_of(2, 40), draw(2, 4, 40, 48)
# What may be larger than a call, and the same of the sizes of the call.
LARGER = {
    "document": ("mask_mod", lambda T, S: masks.document(LONG_IDS[:, :T], LONG_IDS[:, :S])),
    "global_tokens": ("mask_mod", lambda T, S: masks.global_tokens(LONG_IDS[0, : max(T, S)] == 1)),
    "neighborhood": ("mask_mod", lambda T, S: masks.neighborhood((-(-max(T, S) // 8), 8), (1, 3))),
    "bias": ("score_mod", lambda T, S: scores.bias(WIDE_BIAS[:, :, :T, :S])),
    "shared bias": ("score_mod", lambda T, S: scores.bias(WIDE_BIAS[:1, :1, :T, :S])),
    "bias by head": ("score_mod", lambda T, S: scores.bias(WIDE_BIAS[:1, :, :T, :S])),
    "bias by batch": ("score_mod", lambda T, S: scores.bias(WIDE_BIAS[:, :1, :T, :S])),
}


@tiers(default={"name": "document"})
@pytest.mark.parametrize("name", LARGER)
def test_arrays_may_be_longer_than_the_call(name):
    kind, make = LARGER[name]
    q, k, v = draw(2, 24, 4, 8), draw(2, 32, 2, 8), draw(2, 32, 2, 8)
    attend = lambda mod: jflex.flex_attention(q, k, v, implementation="xla", **{kind: mod})
    assert_close(attend(make(40, 40)), attend(make(24, 32)))


@pytest.mark.full
def test_unknown_lengths_and_offsets_are_not_compared():
    """Of a cache with room for more positions than there are ids."""
    q, k = draw(2, 1, 4, 8), draw(2, 64, 2, 8)

    @jax.jit
    def step(lengths, ids):
        mod = jflex.with_offset(jflex.and_masks(masks.document(ids), masks.causal()), lengths - 1)
        return jflex.flex_attention(q, k, k, mask_mod=mod, kv_lengths=lengths, implementation="xla")

    lengths, longer = int32([20, 7]), jnp.pad(IDS, (0, 44), constant_values=9)
    assert_close(step(lengths, IDS), step(lengths, longer))
    mod = jflex.with_offset(jflex.and_masks(DOCUMENT, masks.causal()), lengths - 1)
    found = jflex.flex_attention(q, k, k, mask_mod=mod, kv_lengths=lengths, implementation="xla")
    assert_close(found, step(lengths, IDS))


def shape_of(run, *traced):
    """Checks a call, without running it; what is traced is not compared."""
    return jax.eval_shape(run, *traced).shape


@pytest.mark.full
def test_a_request_without_queries_is_not_compared():
    batch = PagedBatch(int32([0, 1, 1]), int32([20, 30]), int32([[1, 2], [3, 4]]))
    cache = PagedCache.create(5, 16, 2, 8, dtype=jnp.float32)
    run = lambda q: jflex.paged_attention(q, cache, batch, mask_mod=DOCUMENT, implementation="xla")
    assert shape_of(run, jnp.zeros((1, 4, 8))) == (1, 4, 8)


@pytest.mark.full
def test_selected_and_joined_masks_fit():
    ids = ids_of(3, 32)
    whole = block_mask(jflex.and_masks(masks.document(ids), masks.causal()), B=3)
    joined = (whole & block_mask(masks.padding(int32([9, 30, 32])), B=3)) | block_mask(masks.sliding_window(2))
    for mask in (whole, joined):
        part = mask[1:3, :, 2:]
        np.testing.assert_array_equal(part.to_elements(), mask.to_elements()[1:3, :, 16:])
        np.testing.assert_array_equal((~part[0]).to_elements(), ~mask.to_elements()[1:2, :, 16:])
        np.testing.assert_array_equal(mask[:, :, [3, 0]].with_lengths(16, 8).shape, (3, 1, 16, 8))
        assert shape_of(lambda part=part: call(T=16, S=32, block_mask=part)) == (2, 16, 4, 8)
        sent = jax.jit(lambda mask: mask[0])(mask)
        np.testing.assert_array_equal(sent.to_elements(), mask.to_elements()[:1])


@pytest.mark.full
def test_cascade_and_packed_sequences_fit():
    of = lambda *shape: {"mask_mod": masks.document(ids_of(*shape))}
    assert shape_of(lambda: cascade((40, 3), (0, 2), **of(4, 41))) == (2, 4, 8)
    assert shape_of(lambda: cascade((40, 3), None, **of(41))) == (2, 4, 8)
    assert shape_of(lambda at: cascade(at, (0, 2), **of(4, 32)), int32([40, 3])) == (2, 4, 8)
    assert shape_of(lambda: varlen(**of(2, 22), score_mod=scores.alibi(draw(4)))) == (32, 4, 8)
    assert shape_of(lambda ends: varlen(ends, mask_mod=DOCUMENT), int32([0, 20, 32])) == (32, 4, 8)


@pytest.mark.full
def test_requirements_are_no_part_of_the_program():
    """A ready mask and the same by hand are one program to every cache."""
    ready, by_hand = masks.document(IDS), lambda b, h, q, k: IDS[q] == IDS[k]
    assert trace_mask_mod(ready)[0] == trace_mask_mod(by_hand)[0]
    made = [block_mask(mod, T=20, S=20) for mod in (ready, by_hand)]
    assert jax.tree.structure(made[0]) == jax.tree.structure(made[1])
    traces = []
    step = jax.jit(lambda mask: traces.append(mask) or mask)
    for mask in (*made, block_mask(masks.document(ids_of(20)), T=20, S=20)):
        step(mask)
    assert len(traces) == 1


# --- arrays that users' mods index


ACCEPTED = {
    "longer": {"score_mod": per_head(draw(9)), "mask_mod": lambda b, h, q, k: ids_of(40)[q] == ids_of(50)[k]},
    "minimum": {"score_mod": lambda s, b, h, q, k: s * TWO[jnp.minimum(h, 1)]},
    "clip": {"score_mod": lambda s, b, h, q, k: s * TWO[jnp.clip(h, 0, 1)]},
    "filled": {"score_mod": lambda s, b, h, q, k: s * TWO.at[h].get(mode="fill", fill_value=1.0)},
    "take": {"score_mod": lambda s, b, h, q, k: s * jnp.take(TWO, h, mode="clip")},
    "halved": {"score_mod": lambda s, b, h, q, k: s * TWO[h // 2]},
    "shifted": {"score_mod": lambda s, b, h, q, k: s * draw(33)[q - k]},
    "broadcast": {"score_mod": lambda s, b, h, q, k: s + draw(1, 4, 1, 32)[0, h, 0, k]},
    "shared": {
        "mask_mod": lambda b, h, q, k: jnp.ones((2, 1, 1, 32), bool)[b, h, q, k],
        "score_mod": per_head(draw(1)),
    },
    "window": {"score_mod": lambda s, b, h, q, k: s + jax.lax.dynamic_slice_in_dim(draw(6), q, 4).sum()},
    "last": {"score_mod": lambda s, b, h, q, k: s * TWO[-1]},
    "branch": {"score_mod": lambda s, b, h, q, k: jax.lax.cond(h < 2, lambda: s * TWO[h], lambda: s)},
    "offset": {"mask_mod": jflex.with_offset(lambda b, h, q, k: IDS[q] == q, 30)},
    "lengths": {"T": 1, "S": 64, "mask_mod": lambda b, h, q, k: IDS[k] == 3, "kv_lengths": int32([3, 20])},
    "no_queries": {"T": 0, "S": 8, "score_mod": lambda s, b, h, q, k: s * TWO[q]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_long_enough_or_clamped_on_purpose_is_accepted(name):
    assert shape_of(lambda: call(**ACCEPTED[name]))[0] == 2


def test_lengths_that_are_not_known_are_not_compared():
    """A table for the positions in use, and a cache with room for more."""
    attend = lambda n: call(T=1, S=64, mask_mod=lambda b, h, q, k: IDS[k] == 3, kv_lengths=n)
    assert jax.eval_shape(attend, int32([64, 3])).shape == (2, 1, 4, 8)
    assert jax.eval_shape(lambda n: paged(n, mask_mod=same_document), int32([32, 5])).shape == (2, 4, 8)


def test_arrays_of_a_shard():
    """Inside of `jax.shard_map`, mods get the indices of the shard; arrays may be whole or divided alike."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.P(None, None, "model")
    x, slopes = jnp.zeros((1, 8, 4, 8)), draw(4)

    def attend(x, own, whole):
        mod = lambda s, b, h, q, k: s * own[h] * whole[h]
        return jflex.flex_attention(x, x, x, mod, implementation="xla")

    shards = jax.shard_map(attend, mesh=mesh, in_specs=(heads, jax.P("model"), jax.P()), out_specs=heads)
    assert jax.eval_shape(shards, x, slopes, slopes).shape == x.shape
    sharded = [jax.device_put(x, jax.NamedSharding(mesh, heads)), slopes]
    whole = jax.jit(lambda x, slopes: jflex.flex_attention(x, x, x, per_head(slopes), implementation="xla"))
    assert jax.eval_shape(whole, *sharded).shape == x.shape
