"""Sparse selection: block-level attention scores, selected blocks, lists of rows."""
