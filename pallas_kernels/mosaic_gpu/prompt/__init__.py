"""The kernel for prompts over pages, for Hopper."""
