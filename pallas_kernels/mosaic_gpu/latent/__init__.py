"""The kernel of multi-head latent attention over pages for Hopper."""
