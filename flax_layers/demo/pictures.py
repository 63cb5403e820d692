"""The demo's own picture: the block mask of a batch."""

import pathlib

import jflex

ZOOM = slice(0, 1024)


def draw_mask(path: pathlib.Path, block_mask: jflex.BlockMask) -> None:
    """Draws the blocks of the first row, and the elements of its beginning.

    Args:
        path: The PNG to write.
        block_mask: The mask of a batch.
    """
    figure = block_mask.to_image(batch=0, head=0, zoom=(ZOOM, ZOOM))
    figure.savefig(path, dpi=150)
