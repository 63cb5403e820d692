"""Language models of several families, all of them one decoder."""

from flax_layers.models.config import LayerConfig, ModelConfig
from flax_layers.models.decoder import Block, Decoder

__all__ = ["Block", "Decoder", "LayerConfig", "ModelConfig"]
