"""A small model and batches, which the tests of training share."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.nnx import AlibiBias
from flax_layers.train import Computation, Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh

ROWS, LENGTH, VOCABULARY = 8, 32, 64
CONFIG = ModelConfig(
    vocabulary=VOCABULARY, width=16, mlp_width=32, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=LENGTH,
    layers=(LayerConfig(window=12, rotary_base=None), LayerConfig(rotary_base=None)), logits_softcap=5.0,
)  # fmt: skip


def batch(seed: int = 0, rows: int = ROWS) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(rng.integers(0, VOCABULARY, (rows, LENGTH)), np.sort(rng.integers(0, 4, (rows, LENGTH)), axis=1))


def build(config: ModelConfig = CONFIG, dtype=jnp.float32) -> Decoder:
    slopes = functools.partial(AlibiBias, config.num_heads)
    return Decoder(config, dtype=dtype, score_mod=slopes, implementation="xla", rngs=nnx.Rngs(0))


def trainer(
    mesh: str = "data=1", computation: Computation | None = None, config=CONFIG, dtype=jnp.float32, trained=None
) -> Trainer:
    devices = make_mesh(parse_mesh(mesh))
    model = create_model(lambda: build(config, dtype), devices)
    recipe = Recipe(steps=20, learning_rate=1e-2)
    return Trainer(model, recipe, computation or Computation(), mesh=devices, trained=trained)


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Collects an entry for each program that XLA compiles inside of the block."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
