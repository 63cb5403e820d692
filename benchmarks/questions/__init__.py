"""Measurements other than the speed of attention: memory, compilation, accuracy."""
