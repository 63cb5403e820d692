"""Models from scratch: named shapes, changed size by size."""

import dataclasses
import functools

from flax_layers.models import LayerConfig, ModelConfig
from flax_layers.models.block import MakeScoreMod
from flax_layers.nnx import AlibiBias, RelativeBias
from flax_layers.train.errors import InputError

_LLAMA3 = {"vocabulary": 128256, "num_heads": 32, "num_kv_heads": 8, "max_positions": 131072, "norm_epsilon": 1e-5}

SHAPES = {
    "tiny": ModelConfig(
        family="qwen3", vocabulary=256, width=128, mlp_width=256, num_heads=4, num_kv_heads=2, head_dim=32,
        layers=(LayerConfig(),) * 4, max_positions=4096, qk_norm=True, initializer_range=0.06,
    ),
    "small": ModelConfig(
        family="qwen3", vocabulary=32768, width=768, mlp_width=2048, num_heads=12, num_kv_heads=4, head_dim=64,
        layers=(LayerConfig(),) * 12, max_positions=8192, qk_norm=True,
    ),
    "llama3-1b": ModelConfig(
        width=2048, mlp_width=8192, head_dim=64, layers=(LayerConfig(rotary_base=500000.0),) * 16, tied_embeddings=True,
        **_LLAMA3,
    ),
    "llama3-8b": ModelConfig(
        width=4096, mlp_width=14336, head_dim=128, layers=(LayerConfig(rotary_base=500000.0),) * 32, **_LLAMA3
    ),
}  # fmt: skip
"""By name."""

SIZES = ("vocabulary", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "layers", "max_positions")
"""What can be changed."""

BIASES = {"alibi": AlibiBias, "relative": RelativeBias}
"""Learned score mods, by name. They take the place of the rotary embedding."""


def parse_sizes(text: str) -> dict[str, int]:
    """Reads sizes, as `--sizes` takes them.

    Args:
        text: As `width=256,layers=8`.

    Returns:
        Sizes by name.

    Raises:
        InputError: It does not have that form.

    Example:
        >>> parse_sizes("width=256,layers=8")
        {'width': 256, 'layers': 8}
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in SIZES or not size.isascii() or not size.isdigit() or not int(size):
            raise InputError(f"`--sizes` must be sizes of {', '.join(SIZES)}, as width=256,layers=8. Got {part!r}.")
        sizes[name] = int(size)
    return sizes


def resized(config: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """A shape with other sizes.

    Args:
        config: The shape.
        sizes: Replace its own. More layers than it has repeat them in turn.

    Returns:
        The model.
    """
    changes: dict = dict(sizes)
    if "layers" in changes:
        changes["layers"] = tuple(config.layers[i % len(config.layers)] for i in range(sizes["layers"]))
    return dataclasses.replace(config, **changes)


def with_bias(config: ModelConfig, name: str | None) -> tuple[ModelConfig, MakeScoreMod | None]:
    """A shape with a learned score mod in place of the rotary embedding.

    Args:
        config: The shape.
        name: In `BIASES`; None: the shape stays what it is.

    Returns:
        The shape, and the `score_mod` of `Decoder`.
    """
    if name is None:
        return config, None
    layers = tuple(dataclasses.replace(layer, rotary_base=None) for layer in config.layers)
    return dataclasses.replace(config, layers=layers), functools.partial(BIASES[name], config.num_heads)
