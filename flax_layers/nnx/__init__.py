"""Layers for Flax NNX."""

from flax_layers.nnx.attention import FlexAttention

__all__ = ["FlexAttention"]
