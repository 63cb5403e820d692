"""The integration of Levanter on Haliax, against the signature of release 1.1."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex import scores
from tests.integrations.dense import B, T, dense, draw, load, same

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["causal and padding", "bias and mod", "one axis of heads"])
def test_levanter_1_1_signature(name: str):
    """A mask has the fields of `levanter.models.attention.AttentionMask`."""
    module = load("levanter", "haliax")
    import haliax as hax

    parameters = [*inspect.signature(module.flex_attention).parameters]
    assert parameters[:8] == ["QPos", "KPos", "Key", "q", "k", "v", "mask", "bias"]
    assert {"dropout", "inference", "key", "dtype", "precision"} <= {*parameters}
    Batch, Heads, Group = hax.Axis("batch", B), hax.Axis("kv_heads", 2), hax.Axis("q_heads_per_group", 2)
    QPos, KPos, Key = hax.Axis("position", 9), hax.Axis("key_position", T), hax.Axis("head_size", 8)
    group = () if name == "one axis of heads" else (Group,)
    named = lambda seed, *axes: hax.named(draw(*(axis.size for axis in axes), seed=seed), axes)
    q, k = named(0, Batch, Heads, *group, QPos, Key), named(1, Batch, Heads, KPos, Key)
    v, bias = named(2, KPos, Batch, Heads, Key), named(3, QPos, Heads, KPos)
    padding = np.arange(T) < np.array([[20], [T]])
    mask = types.SimpleNamespace(is_causal=True, explicit_mask=hax.named(jnp.asarray(padding), (Batch, KPos)))
    options, visible, change = {}, True, lambda scores: scores
    if name == "causal and padding":
        options, visible = {"mask": mask}, np.tri(9, T, dtype=bool) & padding[:, None, None]
    if name == "bias and mod":
        options = {"bias": bias, "score_mod": scores.alibi(scores.alibi_slopes(4))}
        distance = scores.alibi_slopes(4)[:, None, None] * (jnp.arange(T) - jnp.arange(9)[:, None])
        change = lambda raw: raw + jnp.repeat(bias.array.transpose(1, 0, 2), 2, axis=0) + distance

    def ours(q, k, v):
        options_of = options | {"inference": True, "dtype": jnp.float32}
        return module.flex_attention("position", "key_position", "head_size", q, k, v, **options_of)

    def theirs(q, k, v):
        fold = lambda x, *axes: x.rearrange((Batch, *axes, Key)).array.reshape(B, axes[0].size, -1, 8)
        arrays = fold(q, QPos, Heads, *group), fold(k, KPos, Heads), fold(v, KPos, Heads)
        axes = (Batch, QPos, Heads, *group, Key)
        out = dense(*arrays, visible, change=change).reshape([axis.size for axis in axes])
        return hax.named(out, axes).rearrange(q.axes)

    def run(attend):
        loss = lambda arrays: (attend(*arrays).array ** 2).sum()
        return attend(q, k, v), jax.grad(loss)((q, k, v))

    same(run(ours), run(theirs), atol=2e-4)
    dropped = module.flex_attention(
        "position", "key_position", "head_size", q, k, v, inference=False, dropout=0.5, key=jax.random.key(0)
    )
    assert jnp.abs(dropped.array - ours(q, k, v).array).max() > 1e-3
