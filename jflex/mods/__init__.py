"""Mods: traced, fingerprinted, composed, moved to other positions, checked."""
