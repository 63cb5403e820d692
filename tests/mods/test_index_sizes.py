"""Users' mods that index an array that is long enough, or clamped on purpose, are accepted."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from tests.cases.errors.index_sizes import IDS, TWO, per_head, same_document
from tests.support.sized_calls import call, draw, ids_of, int32, paged


def shape_of(**options):
    """Traced: nothing is compiled."""
    return jax.eval_shape(lambda: call(**options)).shape


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
    assert shape_of(**ACCEPTED[name])[0] == 2


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
