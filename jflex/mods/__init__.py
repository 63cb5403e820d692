"""Mods: tracing, fingerprints, composition, re-indexing, checks."""
