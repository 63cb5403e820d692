"""Text from a model: prompts are read and continued from a dense or a paged cache, and streamed as they come."""

from flax_layers.generate.generation import FinishReason, Generation, Piece, Result, Speed, generate
from flax_layers.sampling import Sampling

__all__ = ["FinishReason", "Generation", "Piece", "Result", "Sampling", "Speed", "generate"]
