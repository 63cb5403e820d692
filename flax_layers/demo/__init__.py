"""A small language model on real text: `python -m flax_layers.demo`."""
