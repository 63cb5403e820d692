"""Fused projections: the same outputs, in one product where there were two or three."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from flax_layers.models import fuse_projections, parameter_shardings, save_pretrained
from flax_layers.models.fused import is_fused
from tests.models.test_models import SMALL, small
from tests.support.golden_models import expected, greedy_from_pages, load, logits_of


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "deepseek_v3", "gpt_oss"])
def test_logits_are_those_of_separate_projections(name):
    """Of families with biases (Qwen2), norms of heads, latent attention and experts."""
    model, tokens = load(name), expected(name)["tokens"]
    right = np.asarray(logits_of(model, tokens))
    fuse_projections(model)
    assert is_fused(model)
    np.testing.assert_allclose(logits_of(model, tokens), right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.full
def test_greedy_tokens_are_those_of_transformers():
    model = load("qwen2")
    fuse_projections(model)
    steps = 4
    found = greedy_from_pages(model, expected("qwen2")["tokens"], steps)
    np.testing.assert_array_equal(found, expected("qwen2")["greedy"][:, :steps])


def fused():
    model = small()
    fuse_projections(model)
    return model


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


@pytest.mark.full
def test_a_shape_of_a_fused_model():
    """As a checkpoint of a fused model is restored."""
    shapes = nnx.state(nnx.eval_shape(fused))
    assert shapes.blocks[0].mlp.gate.fused.kernel.shape == (SMALL.width, 2 * SMALL.mlp_width)


def with_adapter():
    model, rngs = small(), nnx.Rngs(0)
    model.blocks[1].attention.value = nnx.LoRALinear(SMALL.width, 16, lora_rank=2, use_bias=False, rngs=rngs)
    fuse_projections(model)


def sharded():
    shapes = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(fused(), nnx.Param))}
    parameter_shardings(shapes, jax.make_mesh((2,), ("model",)))


@pytest.mark.parametrize(
    ("provoke", "message"),
    [
        (lambda folder: fuse_projections(fused()), r"`query` must be an nnx\.Linear in each layer .* Got FusedPart"),
        (lambda folder: with_adapter(), r"`value` must be an nnx\.Linear in each layer of `model`\. Got LoRALinear"),
        (lambda folder: sharded(), "`shapes` must be of a model whose projections are not fused"),
        (lambda folder: save_pretrained(fused(), folder), "`model` must not have fused projections: files hold each"),
    ],
)
def test_wrong_calls(provoke, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        provoke(tmp_path / "model")
    assert not (tmp_path / "model").exists()


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
