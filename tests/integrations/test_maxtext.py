"""The integration of MaxText against `AttentionOp` of release 0.2.5 with `dot_product`, on a CPU."""

import importlib.util
import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jflex
from tests.integrations.dense import HEADS, B, T, assert_close, draw, load, same, segments

pytestmark = pytest.mark.full

SIGNATURE = (  # noqa: SIM905
    "self query key value decoder_segment_ids segment_positions lengths model_mode use_ragged_attention previous_chunk "
    "bidirectional_mask sinks indexer_mask compressed_mask record_max_logits decoder_segment_ids_kv pad_kv_total "
    "compress_ratio qk_product_einsum wv_product_einsum"
).split(" ")
IMAGES = jnp.zeros((B, T), bool).at[0, 4:9].set(True).at[0, 11:14].set(True).at[1, :5].set(True)


class Config:
    """The defaults of MaxText's `base.yml`, and None for what it does not name."""

    def __init__(self):
        import yaml

        path = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0]) / "configs/base.yml"
        self.__dict__.update(yaml.safe_load(path.read_text()))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture
def attention_ops(monkeypatch: pytest.MonkeyPatch):
    """Makes the operators with `dot_product` and with `flex`."""
    module = load("maxtext", "maxtext", "tokamax", "qwix", "pathwaysutils")
    from flax import nnx
    from maxtext.common import common_types
    from maxtext.layers import attention_op

    theirs = attention_op.AttentionOp
    assert [*inspect.signature(theirs.apply_attention).parameters] == SIGNATURE
    monkeypatch.setattr(theirs, "apply_attention", module.with_flex(theirs.apply_attention))
    sizes = {"max_target_length": T, "num_query_heads": HEADS, "num_kv_heads": 2}
    sizes |= {"sliding_window_size": 7, "chunk_attn_window_size": 7, "mesh": jax.make_mesh((1,), ("data",))}

    def make(kind: str, **options):
        options |= sizes | {"attention_type": common_types.AttentionType(kind), "rngs": nnx.Rngs(0)}
        return [theirs(config=Config(), attention_kernel=kernel, **options) for kernel in ("dot_product", "flex")]

    return make


def arrays():
    return draw(B, T, HEADS, 8), draw(B, T, 2, 8, seed=1), draw(B, T, 2, 8, seed=2)


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "full", "mla"])
def test_maxtext_packed_segments(attention_ops, kind: str):
    """With images, sinks and a soft cap."""
    options = {"bidirectional_mask": IMAGES, "sinks": draw(HEADS, seed=5)}
    ids = segments().at[0, -3:].set(-1)

    def loss(op):
        shown = jnp.arange(T) < jnp.array([[T - 3], [T]])  # what padding attends to is nobody's
        attend = lambda arrays: jnp.where(shown[..., None, None], op(*arrays, ids, None, "train", **options) ** 2, 0)
        return jax.value_and_grad(lambda arrays: attend(arrays).sum())(arrays())

    dot, flex = attention_ops(kind, attn_logits_soft_cap=2.0)
    same(loss(flex), loss(dot), atol=2e-4)


def test_maxtext_prefills_and_decodes(attention_ops):
    query, key, value = arrays()
    prefilled = (key, value, segments())
    decoded = (key[:, :8], value[:, :8], jnp.ones((B, 8), jnp.int32), jnp.full(B, 8))
    calls = (
        lambda op: op(query, key, value, None, None, "prefill", (prefilled, None)),
        lambda op: op(query[:, 25:], key, value, None, None, "prefill", (prefilled, None), key[:, :25]),
        lambda op: op(query[:, :1], key, value, None, None, "autoregressive", (prefilled, decoded)),
    )
    dot, flex = attention_ops("global")
    for call in calls:
        assert_close(call(flex), call(dot))


def test_maxtext_skips_blocks_and_refuses_what_it_does_not_know(attention_ops, monkeypatch: pytest.MonkeyPatch):
    masks, create = [], jflex.create_block_mask
    monkeypatch.setattr(jflex, "create_block_mask", lambda *x, **y: masks.append(create(*x, **y)) or masks[-1])
    _, flex = attention_ops("global")
    x, ids = draw(1, 512, 2, 8), jnp.repeat(jnp.arange(4, dtype=jnp.int32), 128)[None]
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    flex.apply_attention(x, x, x, ids, None, None, "train", **einsums)
    assert masks[0].sparsity() == 75.0
    with pytest.raises(NotImplementedError, match="does not know record_max_logits"):
        flex.apply_attention(x, x, x, ids, None, None, "train", record_max_logits=True, **einsums)
