"""Caches of the layers: dense, in eight bits, latent, on pages."""
