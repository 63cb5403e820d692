"""Text generation: continues prompts with a dense or a paged cache, and streams the tokens."""

from flax_layers.generate.generation import FinishReason, Generation, Piece, Result, Speed, generate
from flax_layers.sampling import Sampling

__all__ = ["FinishReason", "Generation", "Piece", "Result", "Sampling", "Speed", "generate"]
