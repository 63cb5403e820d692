"""Scores of a tile on Hopper: mods, bias tiles and their gradients, in registers."""
