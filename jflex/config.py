"""Tile sizes that a user may set instead of the tuned ones."""

from pallas_kernels.config import Config as Config
from pallas_kernels.config import Tiles as Tiles
