"""Cascades: keys that groups of queries share, level by level, read once for the whole group."""
