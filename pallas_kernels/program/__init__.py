"""The compiler of mods: from a jaxpr of scalars to a program that kernels evaluate on tiles."""
