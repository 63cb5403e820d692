"""The decoder of every family against `transformers`: whole sequences, dense and paged caches, gradients.

With fused projections: the same outputs, in one product where there were two or three.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jflex
from flax_layers.models import (
    Decoder,
    LayerConfig,
    ModelConfig,
    eight_bit_weights,
    fuse_projections,
    mods,
    parameter_shardings,
    quantize_weights,
    save_pretrained,
)
from flax_layers.models.eight_bit_weights import EightBitLinear
from flax_layers.models.fused import is_fused
from flax_layers.rotary_scaling import LinearScaling
from tests.support.golden_models import NAMES, decode, expected, load, logits_of, relative_error
from tests.support.rows import tiers

families = pytest.mark.parametrize("name", NAMES)
TOLERANCE = 1e-5

SMALL = ModelConfig(
    family="gemma3_text", vocabulary=64, width=32, mlp_width=48, num_heads=4, num_kv_heads=2, head_dim=8,
    layers=(LayerConfig(window=5), LayerConfig(rotary_scaling=LinearScaling(4.0))), max_positions=512,
    post_norms=True, qk_norm=True, attention_softcap=4.0, initializer_range=0.2,
)  # fmt: skip


def small(**options) -> Decoder:
    return Decoder(SMALL, **({"implementation": "xla", "rngs": nnx.Rngs(0)} | options))


def tokens_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, SMALL.vocabulary, shape).astype(np.int32)


@tiers(default={"name": "gemma3"})
@families
def test_logits_are_those_of_transformers(name):
    known = expected(name)
    assert relative_error(logits_of(load(name), known["tokens"]), known["logits"]) < TOLERANCE


@pytest.mark.full
def test_longrope_within_its_original_context():
    """Up to 16 positions, whole and from caches that hold no more. A cache that holds more has the other factors."""
    known, model = expected("phi3"), load("phi3")
    tokens = known["tokens"][:, : known["short_logits"].shape[1]]
    assert relative_error(logits_of(model, tokens), known["short_logits"]) < TOLERANCE
    for capacity, right in ((16, True), (17, False)):
        logits, _ = decode(model, tokens, model.init_caches(2, capacity))
        assert (relative_error(logits, known["short_logits"]) < TOLERANCE) == right
    whole = logits_of(model, known["tokens"][:, :16])
    assert relative_error(whole[:, : tokens.shape[1]], known["short_logits"]) < TOLERANCE
    longer = logits_of(model, known["tokens"][:, :17])
    assert relative_error(longer, known["logits"][:, :17]) < TOLERANCE


@pytest.mark.full
def test_longrope_by_the_largest_position():
    """As in `transformers`, where positions are passed: those of two documents that begin at 0, for example."""
    known, model = expected("phi3"), load("phi3")
    tokens = known["tokens"][:, : known["short_logits"].shape[1]]
    packed, positions = np.concatenate([tokens, tokens], axis=1), np.tile(np.arange(tokens.shape[1]), 2)[None]
    documents = np.repeat(np.arange(2), tokens.shape[1])[None].repeat(2, axis=0)
    hidden = nnx.jit(lambda model, *arrays: model.logits(model.hidden(*arrays)))
    logits = hidden(model, packed, documents, jnp.asarray(positions))
    for part in np.split(np.asarray(logits), 2, axis=1):
        assert relative_error(part, known["short_logits"]) < TOLERANCE


def decoded(model, tokens, caches, cuts=(13, 14)) -> jax.Array:
    """Logits of a prompt, a single token, and a few that are speculated."""
    found = []
    for part in np.split(tokens, cuts, axis=1):
        logits, caches = decode(model, part, caches)
        found.append(logits)
    return jnp.concatenate(found, axis=1)


@tiers(full={"name": "gemma3"}, rest="long")
@families
def test_decoding_is_the_whole_sequence(name):
    known, model = expected(name), load(name)
    logits = decoded(model, known["tokens"], model.init_caches(2, 40))
    assert relative_error(logits, known["logits"]) < TOLERANCE


@tiers(full={"name": "gpt_oss"}, rest="long")
@families
def test_gradients_are_those_of_dense_attention(name):
    """With documents, and with remat: of all parameters."""
    tokens = expected(name)["tokens"]
    documents = np.repeat(np.array([[0, 1], [0, 2]], np.int32), 12, axis=1)

    @nnx.jit(static_argnames="remat")
    def gradients(model, remat):
        return nnx.grad(lambda model: loss(model, tokens, documents, remat))(model)

    dense = gradients(load(name, implementation="reference"), remat=False)
    blockwise = gradients(load(name), remat=True)
    for (path, one), (_, other) in zip(nnx.to_flat_state(dense), nnx.to_flat_state(blockwise), strict=True):
        one, other = np.asarray(one[...]), np.asarray(other[...])
        assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max(), path
        # A bias of keys moves all scores of a query alike; the correction selects experts and weighs none.
        assert np.abs(one).max() > 0 or path[-1] in ("bias", "correction"), path


def loss(model, tokens, documents=None, remat=False):
    logits = model.logits(model.hidden(tokens, documents, remat=remat))[:, :-1]
    chosen = jnp.take_along_axis(logits, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


@pytest.mark.full
def test_documents_in_a_row_are_as_if_each_were_alone():
    """Rotary embedding counts along the row: it is relative."""
    model, tokens = small(), tokens_of(2, 24)
    documents = np.searchsorted([7, 16], np.arange(24), side="right")[None].repeat(2, axis=0)
    packed = logits_of(model, tokens, jnp.asarray(documents, jnp.int32))
    for part in (slice(0, 7), slice(7, 16), slice(16, 24)):
        np.testing.assert_allclose(packed[:, part], logits_of(model, tokens[:, part]), rtol=1e-4, atol=1e-4)


def test_layers_of_one_kind_share_a_mask():
    config = load("gemma3").config
    masks = mods.training_masks(config, 2, 300, None)
    assert set(masks) == {7, None}
    assert masks[7].sparsity() > masks[None].sparsity()


@pytest.mark.full
def test_a_window_reads_only_its_blocks_of_a_dense_cache():
    """By the lists, and by what jflex says that the call reads."""
    cache = small().init_caches(2, 512)[0].with_lengths([400, 90])
    masks = mods.cache_masks(SMALL, cache, 1)
    assert masks[None] is None
    dense = masks[5].to_dense()[:, 0, 0]
    assert dense.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]  # keys 396 to 400, and 86 to 90
    query = jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.float32)
    account = jflex.explain(query, cache.k, cache.v, block_mask=masks[5], kv_lengths=cache.lengths + 1)
    assert (account.visited, account.blocks) == (2 * SMALL.num_heads, 8 * SMALL.num_heads)


@pytest.mark.full
def test_a_window_beyond_the_cache_is_no_window():
    caches = load("mistral").init_caches(1, 8)
    assert mods.cache_masks(load("mistral").config, caches[0], 1) == {9: None}


@pytest.mark.full
def test_computation_in_bfloat16_with_master_weights():
    model = small(dtype=jnp.bfloat16)
    assert model.embed.embedding.dtype == jnp.float32
    assert model.hidden(tokens_of(1, 9)).dtype == jnp.bfloat16
    assert model.init_caches(1, 9)[0].k.dtype == jnp.bfloat16
    logits, exact = logits_of(model, tokens_of(1, 9)), logits_of(small(), tokens_of(1, 9))
    assert logits.dtype == jnp.float32
    assert relative_error(logits, np.asarray(exact)) < 0.1


@pytest.mark.full
def test_remat_keeps_what_attention_saved():
    """The gradient attends forward as often as without remat."""
    model, tokens = small(implementation="xla"), tokens_of(1, 9)

    def attends(remat):
        jaxpr = jax.make_jaxpr(lambda state: nnx.grad(lambda m: loss(m, tokens, remat=remat))(nnx.merge(graph, state)))
        return str(jaxpr(state)).count("name=jflex_out")

    graph, state = nnx.split(model)
    assert attends(False) == attends(True) == len(SMALL.layers)
    assert attends(jax.checkpoint_policies.nothing_saveable) == 2 * len(SMALL.layers)


@pytest.mark.full
def test_export_of_a_prompt_and_of_a_step():
    """Both are written to bytes, read back, and decode as before."""
    model, tokens = small(), tokens_of(1, 10)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten((state, model.init_caches(1, 16)))

    def step(tokens, *leaves):
        state, caches = jax.tree.unflatten(tree, leaves)
        logits, caches = nnx.merge(graph, state).decode(tokens, caches)
        return logits, *jax.tree.leaves((state, caches))

    prompt, one = (
        jax.export.deserialize(jax.export.export(jax.jit(step))(part, *leaves).serialize())
        for part in (tokens[:, :9], tokens[:, 9:])
    )
    first, *leaves = prompt.call(tokens[:, :9], *leaves)
    second, *leaves = one.call(tokens[:, 9:], *leaves)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), logits_of(model, tokens), rtol=1e-5, atol=1e-5)


# --- fused projections


@tiers(full={"name": ["qwen2", "deepseek_v3"]}, rest="long")
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "deepseek_v3", "gpt_oss"])
def test_logits_are_those_of_separate_projections(name):
    """Of families with biases (Qwen2), norms of heads, latent attention and experts."""
    model, tokens = load(name), expected(name)["tokens"]
    right = np.asarray(logits_of(model, tokens))
    fuse_projections(model)
    assert is_fused(model)
    np.testing.assert_allclose(logits_of(model, tokens), right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


def fused():
    model = small()
    fuse_projections(model)
    return model


@pytest.mark.full
def test_there_is_one_product_of_each_kind_and_no_second_copy():
    """XLA keeps one of the equal products of all parts, and the parameters hold the old number of elements."""
    model = small()
    count = lambda: sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    before, tokens = count(), np.zeros((1, 7), np.int32)
    fuse_projections(model)
    assert count() == before
    compiled = logits_of.lower(model, tokens).compile().as_text()
    columns = [int(x) for x in re.findall(r"= f32\[7,(\d+)\]\S* dot\(", compiled)]
    layers, heads = len(SMALL.layers), SMALL.num_heads + 2 * SMALL.num_kv_heads
    of_layer = [heads * SMALL.head_dim, SMALL.width, 2 * SMALL.mlp_width, SMALL.width]
    assert sorted(columns) == sorted([*of_layer * layers, SMALL.vocabulary])


def with_adapter():
    model, rngs = small(), nnx.Rngs(0)
    model.blocks[1].attention.value = nnx.LoRALinear(SMALL.width, 16, lora_rank=2, use_bias=False, rngs=rngs)
    fuse_projections(model)


def sharded():
    shapes = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(fused(), nnx.Param))}
    parameter_shardings(shapes, jax.make_mesh((2,), ("model",)))


@tiers(full={"name": "deepseek_v3"}, rest="long")
@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_tokens_sharded_over_the_mesh_of_make_mesh(name):
    model, mesh, tokens = load(name), jax.make_mesh((2,), ("data",)), expected(name)["tokens"][:2]
    loss_and_gradients = nnx.jit(nnx.value_and_grad(lambda model, tokens: model(tokens).std()))
    on_one_device = loss_and_gradients(model, tokens)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, PartitionSpec("data")))
        on_two = loss_and_gradients(model, tokens)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), on_two, on_one_device)


def test_a_model_on_a_mesh_stays_as_it_is():
    model = small()
    mesh = jax.make_mesh((2,), ("model",))
    kernel = model.blocks[1].mlp.gate.kernel
    kernel.set_value(jax.device_put(kernel[...], jax.sharding.NamedSharding(mesh, PartitionSpec(None, "model"))))
    with pytest.raises(
        ValueError, match="`model` must be on one device: a mesh divides each projection by heads or hidden features"
    ):
        fuse_projections(model)
    assert not is_fused(model)


# --- weights of eight bits


@tiers(full={"name": ["qwen2", "gpt_oss", "deepseek_v3"]}, rest="long")
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_rounded_weights(name):
    """Of families with biases (Qwen2), experts, norms of heads and latent attention; fused projections are the same."""
    tokens, wide, model, fused_one = expected(name)["tokens"], load(name), load(name), load(name)
    quantize_weights(model)
    rounded = {path: part for path, part in nnx.iter_modules(model.blocks) if isinstance(part, EightBitLinear)}
    assert len(rounded) >= 6 * len(model.blocks)
    parts = dict(nnx.iter_modules(wide.blocks))
    for path, part in rounded.items():
        kernel, scale = np.asarray(parts[path].kernel[...]), np.asarray(part.scale[...])[..., None, :]
        stored = np.asarray(part.kernel[...]).swapaxes(-1, -2)
        assert stored.dtype == jnp.float8_e4m3fn
        error = np.abs(kernel / scale - stored.astype(np.float32))  # half of a unit in the last of 3 bits
        assert np.all(error <= np.maximum(np.abs(kernel / scale) * 2**-4, 2**-10) * 1.001)
        parts[path].kernel.set_value(jnp.asarray(stored.astype(np.float32) * scale))
    right = np.asarray(logits_of(wide, tokens))
    np.testing.assert_allclose(logits_of(model, tokens), right, rtol=1e-4, atol=1e-5 * np.abs(right).max())
    fuse_projections(fused_one)
    quantize_weights(fused_one)
    np.testing.assert_allclose(logits_of(fused_one, tokens), right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2**-20), ("bfloat16", 2**-7), ("float16", 2**-10)])
def test_many_rows_are_rounded_too(dtype, unit):
    """Each with its scale: small rows beside large ones, zeros, and an infinity that stays in its row."""
    rows, eight = eight_bit_weights.ROUNDED_ROWS, jnp.float8_e4m3fn
    linear = nnx.Linear(32, 48, dtype=dtype, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    projection = EightBitLinear(linear, eight)
    projection.rounds_inputs = True
    inputs = np.random.default_rng(0).standard_normal((rows, 32)) * np.logspace(-3, 2, rows)[:, None]
    inputs[2], inputs[3], inputs[5, 7] = inputs[2] * 1e-34, 0, np.inf
    inputs = jnp.asarray(inputs, dtype)
    wide = np.asarray(inputs, np.float32)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    scale = np.maximum(largest / np.float32(448), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):  # a scale that is off by a unit decides ties
        rounded, other = ((wide / scale * x).astype(eight).astype(np.float64) * scale for x in (1, 1 - 2.0**-22))
        ties = np.abs(rounded - other)
    kernel = (np.asarray(projection.kernel[...], np.float64) * np.asarray(projection.scale[...])[:, None]).T
    right, bias = rounded @ kernel, np.asarray(linear.bias[...], np.float64)
    found = np.asarray(projection(inputs.reshape(2, -1, 32)).reshape(rows, 48), np.float64)
    assert np.isnan([found[5], right[5]]).all()
    limit = (unit * np.abs(rounded) + ties) @ np.abs(kernel) + unit * np.abs(bias)
    assert np.all(np.delete(np.abs(found - (right + bias)) <= limit, 5, axis=0))
    few = np.asarray(projection(inputs[6:]), np.float64)  # are not rounded
    exact = np.asarray(inputs[6:], np.float64) @ kernel + bias
    assert np.abs(few - exact).max() < np.abs(found[6:] - exact).max() / 2


@pytest.mark.parametrize(("kind", "capability", "rounds"), [
    ("cpu", "", False), ("NVIDIA A100-SXM4-40GB", "8.0", False), ("AMD Instinct MI300X", "gfx942", False),
    ("NVIDIA L4", "8.9", True), ("NVIDIA H200", "9.0", True), ("NVIDIA B200", "10.0", True),
])  # fmt: skip
def test_inputs_are_rounded_where_products_of_eight_bits_are_fast(kind, capability, rounds):
    assert eight_bit_weights._multiplies_float8(kind, capability) == rounds


def quantized():
    model = small()
    quantize_weights(model)
    return model


@pytest.mark.parametrize(
    ("provoke", "message"),
    [
        (lambda folder: fuse_projections(fused()), r"`query` must be an nnx\.Linear in each layer .* Got FusedPart"),
        (lambda folder: with_adapter(), r"`value` must be an nnx\.Linear in each layer of `model`\. Got LoRALinear"),
        (lambda folder: sharded(), "`shapes` must be of a model whose projections are not fused"),
        (lambda folder: save_pretrained(fused(), folder), "`model` must not have fused projections: files hold each"),
        (lambda folder: quantize_weights(quantized()), r"must be an nnx\.Linear in each layer .* Got EightBitLinear"),
        (lambda folder: quantize_weights(small(), "int4"), "`dtype` of weights must be one of float8_e4m3fn, or None"),
        (lambda folder: fuse_projections(quantized()), r"must be an nnx\.Linear in each layer .* Got EightBitLinear"),
        (lambda folder: save_pretrained(quantized(), folder), "`model` must not have weights of eight bits"),
    ],
)
def test_models_with_fused_or_eight_bit_weights_are_refused(provoke, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        provoke(tmp_path / "model")
    assert not (tmp_path / "model").exists()
