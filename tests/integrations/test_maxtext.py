"""The integration of MaxText against the package, and against signature and masks copied from release 0.2.5."""

import enum
import importlib.util
import inspect
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.integrations.dense import HEADS, B, T, assert_close, dense, draw, load, segments

pytestmark = pytest.mark.full


class AttentionType(enum.Enum):
    """As in `maxtext.common.common_types` of release 0.2.5."""

    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    MLA = "mla"
    COMPRESSED = "compressed"
    FULL = "full"
    BLOCK_DIFFUSION = "block_diffusion"


class AttentionOp:
    """What of `maxtext.layers.attention_op.AttentionOp` in release 0.2.5 the integration reads."""

    def __init__(self, attention_type: str, attention_kernel: str = "flex", **options):
        self.attention_kernel = attention_kernel
        self.attention_type = AttentionType(attention_type)
        self.config = types.SimpleNamespace(moba=False)
        self.sliding_window_size = self.chunk_attn_window_size = self.causal_block_size = 7
        self.attn_logits_soft_cap = None
        self.__dict__.update(options)

    def _load_balanced_context_parallel(self):
        return False

    def apply_attention(
        self,
        query,
        key,
        value,
        decoder_segment_ids,
        segment_positions,
        lengths,
        model_mode,
        use_ragged_attention=False,
        previous_chunk=None,
        bidirectional_mask=None,
        sinks=None,
        indexer_mask=None,
        compressed_mask=None,
        record_max_logits=False,
        decoder_segment_ids_kv=None,
        pad_kv_total=0,
        compress_ratio=0,
        *,
        qk_product_einsum,
        wv_product_einsum,
    ):
        return self.attention_kernel

    def apply_attention_dot(
        self, query, key, value, decoder_segment_ids, model_mode="train", *, qk_product_einsum, wv_product_einsum
    ):
        return "dot_product", decoder_segment_ids, model_mode


def apply_attention(op: AttentionOp, *arrays, model_mode: str = "train", **options):
    apply = load("maxtext").with_flex(AttentionOp.apply_attention)
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    return apply(op, *arrays, options.pop("decoder_segment_ids", None), None, None, model_mode, **options, **einsums)


def maxtext_arrays(queries: int = T):
    return draw(B, queries, HEADS, 8), draw(B, T, 2, 8, seed=1), draw(B, T, 2, 8, seed=2)


ROW, COLUMN = np.arange(T)[:, None], np.arange(T)
MAXTEXT = {
    "global": ROW >= COLUMN,
    "mla": ROW >= COLUMN,
    "local_sliding": (ROW >= COLUMN) & (COLUMN > ROW - 7),
    "chunk": (ROW >= COLUMN) & (ROW // 7 == COLUMN // 7),
    "full": np.ones((T, T), bool),
    "block_diffusion": ROW // 7 >= COLUMN // 7,
}


@pytest.mark.parametrize("kind", MAXTEXT)
def test_maxtext_0_2_5_signature(kind: str):
    packed = kind != "mla"
    ids = segments().at[0, -3:].set(-1) if packed else None
    visible = jnp.broadcast_to(MAXTEXT[kind], (B, T, T))
    if packed:
        visible = visible & (ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0)

    def of(attend):
        return jax.value_and_grad(lambda arrays: (attend(*arrays) ** 2).sum())(maxtext_arrays())

    op = AttentionOp(kind)
    shown = of(lambda *arrays: apply_attention(op, *arrays, decoder_segment_ids=ids)[0])
    expected = of(lambda *arrays: dense(*arrays, visible[:, None], scale=1.0))
    jax.tree.map(lambda x, y: assert_close(x, y, atol=2e-4), shown, expected)


def test_maxtext_0_2_5_cap_sinks_and_images():
    images = jnp.zeros((B, T), bool).at[0, 4:9].set(True).at[0, 11:14].set(True).at[1, :5].set(True)
    number = jnp.zeros((B, T), int).at[0, 4:9].set(1).at[0, 11:14].set(2).at[1, :5].set(1)
    same = (number[:, :, None] == number[:, None]) & (number[:, None] > 0)
    arrays, sinks = maxtext_arrays(), draw(HEADS, seed=5)
    op = AttentionOp("global", attn_logits_soft_cap=2.0)
    options = {"bidirectional_mask": images, "sinks": sinks, "decoder_segment_ids": segments()}
    shown, largest, total = apply_attention(op, *arrays, **options)
    assert largest is None
    assert total is None
    visible = (MAXTEXT["global"] & (segments()[:, :, None] == segments()[:, None])) | same
    cap = lambda scores: jnp.tanh(scores / 2.0) * 2.0
    assert_close(shown, dense(*arrays, visible[:, None], scale=1.0, change=cap, sinks=sinks))


def test_maxtext_0_2_5_chunked_prefill_and_quantized_cache():
    first = 25
    query, key, value = maxtext_arrays()
    quantized = [types.SimpleNamespace(dequant=lambda x=x: x) for x in (key, value)]
    op = AttentionOp("local_sliding")
    options = {"previous_chunk": key[:, :first], "decoder_segment_ids": segments(), "model_mode": "prefill"}
    shown, _, _ = apply_attention(op, query[:, first:], *quantized, **options)
    visible = MAXTEXT["local_sliding"] & (segments()[:, :, None] == segments()[:, None])
    assert_close(shown, dense(query, key, value, visible[:, None], scale=1.0)[:, first:])


def test_maxtext_0_2_5_leaves_other_kernels_and_decoding_alone():
    arrays = maxtext_arrays()
    assert apply_attention(AttentionOp("global", "cudnn_flash_te"), *arrays) == "cudnn_flash_te"
    decoded = apply_attention(AttentionOp("global"), *arrays, model_mode="autoregressive", decoder_segment_ids="ids")
    assert decoded == ("dot_product", "ids", "autoregressive")
    with pytest.raises(NotImplementedError, match="does not know record_max_logits"):
        apply_attention(AttentionOp("global"), *arrays, record_max_logits=True)
    with pytest.raises(NotImplementedError, match="attention type 'compressed'"):
        apply_attention(AttentionOp("compressed"), *arrays)


def test_maxtext_0_2_5_skips_blocks_between_documents():
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 128)[None]
    query = key = value = draw(1, 512, 2, 8)
    made = []
    create = jflex.create_block_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jflex, "create_block_mask", lambda *args, **options: made.append(create(*args, **options)) or made[-1]
        )
        apply_attention(AttentionOp("global"), query, key, value, decoder_segment_ids=ids)
    assert made[0].sparsity() == 75.0


class Config:
    """The defaults of MaxText's `base.yml`, and None for what it does not name."""

    def __init__(self, **options):
        import yaml

        path = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0]) / "configs/base.yml"
        self.__dict__.update(yaml.safe_load(path.read_text()), **options)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture
def attention_ops(monkeypatch: pytest.MonkeyPatch):
    """Makes the operators of the package with `dot_product` and with `flex`."""
    module = load("maxtext", "maxtext", "tokamax", "qwix", "pathwaysutils")
    from flax import nnx
    from maxtext.common import common_types
    from maxtext.layers import attention_op

    theirs = attention_op.AttentionOp
    assert [*inspect.signature(theirs.apply_attention).parameters] == [
        *inspect.signature(AttentionOp.apply_attention).parameters
    ]
    monkeypatch.setattr(theirs, "apply_attention", module.with_flex(theirs.apply_attention))
    sizes = {"max_target_length": T, "num_query_heads": HEADS, "num_kv_heads": 2}
    sizes |= {"sliding_window_size": 7, "chunk_attn_window_size": 7, "mesh": jax.make_mesh((1,), ("data",))}

    def make(kind: str, **options):
        options |= sizes | {"attention_type": common_types.AttentionType(kind), "rngs": nnx.Rngs(0)}
        return [theirs(config=Config(), attention_kernel=kernel, **options) for kernel in ("dot_product", "flex")]

    return make


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk"])
def test_maxtext_0_2_5_package(attention_ops, kind: str):
    options = {
        "bidirectional_mask": jnp.zeros((B, T), bool).at[0, 4:9].set(True).at[1, :5].set(True),
        "sinks": draw(HEADS, seed=5),
    }

    def loss(op):
        attend = lambda arrays: (op(*arrays, segments(), None, "train", **options) ** 2).sum()
        return jax.value_and_grad(attend)(maxtext_arrays())

    dot, flex = attention_ops(kind, attn_logits_soft_cap=2.0)
    jax.tree.map(lambda x, y: assert_close(x, y, atol=2e-4), loss(flex), loss(dot))


def test_maxtext_0_2_5_package_prefills_and_decodes(attention_ops):
    query, key, value = maxtext_arrays()
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
