"""One decoder for several families of language models, and their Hugging Face checkpoints."""

from flax_layers.models.block import Block
from flax_layers.models.checkpoint.checkpoint import from_pretrained, save_pretrained
from flax_layers.models.checkpoint.folders import CheckpointError
from flax_layers.models.checkpoint.tokenizer import Tokenizer
from flax_layers.models.config import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig
from flax_layers.models.decoder import Decoder
from flax_layers.models.eight_bit_weights import quantize_weights
from flax_layers.models.fused import fuse_projections
from flax_layers.models.sharding import RULES, parameter_shardings
from flax_layers.models.text_stream import TextStream

__all__ = [
    "RULES",
    "Block",
    "CheckpointError",
    "Decoder",
    "ExpertsConfig",
    "LatentConfig",
    "LayerConfig",
    "ModelConfig",
    "TextStream",
    "Tokenizer",
    "from_pretrained",
    "fuse_projections",
    "parameter_shardings",
    "quantize_weights",
    "save_pretrained",
]
