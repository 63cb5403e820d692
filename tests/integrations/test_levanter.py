"""The integration of Levanter on Haliax, against the signature of release 1.1."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex import scores
from tests.integrations.dense import HEADS, B, T, assert_close, dense, draw, load

pytestmark = pytest.mark.full


@dataclasses.dataclass
class AttentionMask:
    """The fields of `levanter.models.attention.AttentionMask` in release 1.1."""

    is_causal: bool
    explicit_mask: Any = None


LEVANTER = ("nothing", "causal", "causal and padding", "array", "bias", "one axis of heads", "no batch")


@pytest.mark.parametrize("handed", LEVANTER)
def test_levanter_1_1_signature(handed: str):
    module = load("levanter", "haliax")
    import haliax as hax

    parameters = [*inspect.signature(module.flex_attention).parameters]
    assert parameters[:8] == ["QPos", "KPos", "Key", "q", "k", "v", "mask", "bias"]
    assert {"dropout", "inference", "key", "dtype", "precision"} <= {*parameters}
    Batch, Heads, Group = hax.Axis("batch", B), hax.Axis("kv_heads", 2), hax.Axis("q_heads_per_group", 2)
    QPos, KPos, Key = hax.Axis("position", 9), hax.Axis("key_position", T), hax.Axis("head_size", 8)
    batch = () if handed == "no batch" else (Batch,)
    group = () if handed == "one axis of heads" else (Group,)
    name = lambda seed, *axes: hax.named(draw(*(axis.size for axis in axes), seed=seed), axes)
    q = name(0, *batch, Heads, *group, QPos, Key)
    k, v = name(1, *batch, Heads, KPos, Key), name(2, KPos, *batch, Heads, Key)
    causal, padding = np.tri(9, T, dtype=bool), np.arange(T) < np.array([[20], [T]])
    padded = hax.named(jnp.asarray(padding), (Batch, KPos))
    mask, visible = {
        "causal": (AttentionMask(True), causal),
        "causal and padding": (AttentionMask(True, padded), causal & padding[:, None, None]),
        "array": (padded, padding[:, None, None]),
    }.get(handed, (None, True))
    bias = name(3, QPos, Heads, KPos) if handed == "bias" else None

    def ours(q, k, v):
        options = {"inference": True, "dtype": jnp.float32}
        return module.flex_attention("position", "key_position", "head_size", q, k, v, mask, bias, **options)

    def theirs(q, k, v):
        fold = lambda x, *axes: x.rearrange((*batch, *axes)).array.reshape(B if batch else 1, axes[0].size, -1, 8)
        change = lambda scores: scores
        if bias is not None:
            change = lambda scores: scores + jnp.repeat(bias.array.transpose(1, 0, 2), 2, axis=0)
        out = dense(
            fold(q, QPos, Heads, *group, Key),
            fold(k, KPos, Heads, Key),
            fold(v, KPos, Heads, Key),
            visible,
            change=change,
        )
        axes = (*batch, QPos, Heads, *group, Key)
        return hax.named(out.reshape([axis.size for axis in axes]), axes).rearrange(q.axes)

    shown = ours(q, k, v)
    assert shown.axes == q.axes
    assert_close(shown.array, theirs(q, k, v).array)
    gradients = (jax.grad(lambda arrays, of=of: (of(*arrays).array ** 2).sum())((q, k, v)) for of in (ours, theirs))
    jax.tree.map(lambda x, y: assert_close(x, y, atol=2e-4), *gradients)


def test_levanter_1_1_dropout_and_mod():
    module = load("levanter", "haliax")
    import haliax as hax

    axes = hax.Axis("heads", HEADS), hax.Axis("position", T), hax.Axis("head_size", 8)
    q = hax.named(draw(HEADS, T, 8), axes)
    k = q.rename({"position": "keys"})
    attend = functools.partial(module.flex_attention, "position", "keys", "head_size", q, k, k)
    plain = attend(inference=True, dropout=0.5)
    assert jnp.abs(attend(inference=False, dropout=0.5, key=jax.random.key(0)).array - plain.array).max() > 1e-3
    slopes = scores.alibi_slopes(HEADS)
    heads = q.array.transpose(1, 0, 2)[None]
    distance = jnp.arange(T) - jnp.arange(T)[:, None]
    expected = dense(heads, heads, heads, change=lambda scores: scores + slopes[:, None, None] * distance)
    assert_close(attend(inference=True, score_mod=scores.alibi(slopes)).array, expected[0].transpose(1, 0, 2))
