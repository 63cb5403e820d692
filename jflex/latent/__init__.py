"""Multi-head latent attention: over a whole cache, or over selected keys."""
