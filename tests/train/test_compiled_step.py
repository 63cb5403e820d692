"""Kernels that XLA makes of a training step, for a GPU that is not there."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.train import Computation, Recipe, Trainer
from tests.support import gpu_compile

pytestmark = [
    pytest.mark.full, pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
]  # fmt: skip
CONFIG = ModelConfig(
    vocabulary=1024, width=128, mlp_width=384, num_heads=2, num_kv_heads=1, head_dim=64, layers=(LayerConfig(),) * 2,
    max_positions=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def fusions() -> list[tuple[str, str]]:
    """Results and operands of the fusions of a step over one row of 512 tokens, with 256 in a chunk of the loss."""
    mesh = Mesh(np.reshape(gpu_compile.absent_gpus(1), (1, 1, 1)), ("data", "fsdp", "model"))
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.bfloat16, implementation="xla", rngs=nnx.Rngs(0)))
    trainer = Trainer(model, Recipe(10), Computation(loss_chunk=256), mesh=mesh)
    text = trainer.compile(1, 512).as_text()
    types = dict(re.findall(r"%(\S+) = (\w+\[[\d,]*\])", text))
    rows = re.findall(r" = (\(.*?\)|\S+) fusion\((.*?)\), kind=k(?:Loop|Input)", text)
    return [(results, " ".join(types.get(x, "") for x in re.findall(r"%([^ ,)]+)", names))) for results, names in rows]


def test_gradients_of_gate_and_up_are_one_kernel(fusions):
    pairs = [results for results, _ in fusions if len(re.findall(r"bf16\[[\d,]*,384\]", results)) == 2]
    assert len(pairs) == 2  # layers


def test_logits_are_read_twice(fusions):
    """For the logarithm of the sum of exponentials, and for gradients."""
    readers = [results for results, operands in fusions if "f32[256,1024]" in operands]
    assert len(readers) == 2
