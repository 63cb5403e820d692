"""Ready masks of grids, videos and packed sequences, each beside a dense one in numpy, made by another rule."""

import itertools

import jax.numpy as jnp
import numpy as np

from jflex import masks
from tests.cases.mask_pairs import MaskPair


def cells(canvas):
    """The coordinates of all cells in row-major order."""
    return list(itertools.product(*map(range, canvas)))


def around(center, side, width):
    """The places of a window of odd width, moved inside."""
    first = min(max(center - width // 2, 0), side - width)
    return range(first, first + width)


def neighbors(canvas, kernel, order=None):
    """For each cell the set of those around it; both are then looked up in the list of cells, in another order."""
    listed = cells(canvas) if order is None else order
    dense = np.zeros((len(listed),) * 2, bool)
    for i, cell in enumerate(listed):
        for seen in itertools.product(*map(around, cell, canvas, kernel)):
            dense[i, listed.index(seen)] = True
    return dense


def by_tiles(canvas, tile):
    return sorted(cells(canvas), key=lambda cell: ([x // n for x, n in zip(cell, tile, strict=True)], cell))


def by_morton(canvas):
    """By the letters of binary numbers: those of all axes for the highest bit, then for the next."""
    letters = lambda cell: [format(x, "08b") for x in cell]
    return sorted(cells(canvas), key=lambda cell: "".join(map("".join, zip(*letters(cell), strict=True))))


def tile_windows(canvas, kernel, tile, text, keys=None):
    tiles = [side // n for side, n in zip(canvas, tile, strict=True)]
    widths = [side // n for side, n in zip(kernel, tile, strict=True)]
    tile_of = [tuple(x // n for x, n in zip(cell, tile, strict=True)) for cell in by_tiles(canvas, tile)]
    vision, total = len(tile_of), len(tile_of) + text
    dense = np.zeros((keys or total,) * 2, bool)
    dense[vision:, :total], dense[:, vision:total] = True, True
    for i, j in np.ndindex(vision, vision):
        seen = itertools.product(*map(around, tile_of[i], tiles, widths))
        dense[i, j] = tile_of[j] in seen
    return dense


def frames(length, frame, prompt, near, sink=0):
    """`near` compares two pairs (frame, place in the frame)."""
    dense = np.zeros((length, length), bool)
    for i, j in np.ndindex(dense.shape):
        dense[i, j] = i < prompt or j < prompt + sink or near(divmod(i - prompt, frame), divmod(j - prompt, frame))
    return dense


def packed(ids, prefixes=None):
    dense = np.zeros((len(ids),) * 2, bool)
    for i, j in np.ndindex(dense.shape):
        dense[i, j] = ids[i] == ids[j] and j <= i
        if prefixes is not None and ids[i] < len(prefixes):
            dense[i, j] |= ids[j] == prefixes[ids[i]] != ids[i]
    return dense


def drafts(prefix, block, blocks):
    own = np.kron(np.eye(blocks, dtype=int), np.tri(block, dtype=int))
    return np.concatenate([np.ones((block * blocks, prefix), int), own], axis=1) > 0


def images(intervals, image, queries):
    columns = [[first <= i < end for i in range(queries)] for first, end in intervals for _ in range(image)]
    return np.array(columns).T


def pair(mask_mod, dense):
    """A row of `cases.py`."""
    exact = lambda b, h, q, k, c: dense[b, q, k] if dense.ndim == 3 else dense[q, k]
    return MaskPair(lambda c: mask_mod, exact)


GRID, WIDE, HIGH, VIDEO = (5, 6), (3, 10), (10, 3), (2, 3, 4)
IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 5], [0, 1, 1, 1, 1, 2, 3, 3, 4, 4, 5, 5]])
PREFIXES = np.array([[0, 0, 0, 3, 3], [0, 0, 0, 0, 4]])  # the fifth document is padding
INTERVALS = np.array([[[0, 5], [2, 5], [5, 9]], [[0, 0], [1, 9], [3, 4]]])
GROUP_FLAGS = np.array([True, False, False, True, False, False])

READY = {
    "causal documents": (masks.causal_document(IDS[0]), packed(IDS[0])),
    "causal documents by batch": (masks.causal_document(IDS), np.stack([packed(row) for row in IDS])),
    "shared prefix": (masks.shared_prefix(IDS[0], PREFIXES[0]), packed(IDS[0], PREFIXES[0])),
    "shared prefix by batch": (
        masks.shared_prefix(IDS, PREFIXES),
        np.stack([packed(*pair) for pair in zip(IDS, PREFIXES, strict=True)]),
    ),
    "groups": (masks.batchify(masks.causal(), 5), np.kron(np.eye(4, dtype=int), np.tri(5, dtype=int)) > 0),
    "groups of flags": (
        masks.batchify(masks.global_tokens(GROUP_FLAGS), 6),
        np.kron(np.eye(3, dtype=int), np.add.outer(GROUP_FLAGS, GROUP_FLAGS).astype(int)) > 0,
    ),
    "groups by batch": (  # of which the second hides all but two keys of each group
        masks.batchify(masks.padding(np.array([4, 2])), 4),
        np.stack([np.kron(np.eye(3, dtype=int), np.tile(np.arange(4) < n, (4, 1)).astype(int)) > 0 for n in (4, 2)]),
    ),
    "draft blocks": (masks.draft_blocks(5, 3), drafts(5, 3, 4)),
    "draft blocks, traced prefix": (masks.draft_blocks(jnp.int32(2), 4), drafts(2, 4, 3)),
    "vision cross attention": (masks.vision_cross_attention(INTERVALS[0], 4), images(INTERVALS[0], 4, 9)),
    "vision cross attention by batch": (
        masks.vision_cross_attention(INTERVALS, 2),
        np.stack([images(rows, 2, 9) for rows in INTERVALS]),
    ),
    "neighborhood of a video": (masks.neighborhood(VIDEO, (1, 3, 3)), neighbors(VIDEO, (1, 3, 3))),
    "neighborhood in tiles": (
        masks.neighborhood((4, 6), (3, 5), order=masks.tile_order((4, 6), (2, 3))),
        neighbors((4, 6), (3, 5), by_tiles((4, 6), (2, 3))),
    ),
    "neighborhood in tiles, short ones at the border": (
        masks.neighborhood(GRID, (5, 3), order=masks.tile_order(GRID, (2, 4))),
        neighbors(GRID, (5, 3), by_tiles(GRID, (2, 4))),
    ),
    "neighborhood by Morton, wide": (
        masks.neighborhood(WIDE, (3, 5), order=masks.morton_order(WIDE)),
        neighbors(WIDE, (3, 5), by_morton(WIDE)),
    ),
    "neighborhood by Morton, high": (
        masks.neighborhood(HIGH, (5, 1), order=masks.morton_order(HIGH)),
        neighbors(HIGH, (5, 1), by_morton(HIGH)),
    ),
    "sliding tile": (
        masks.sliding_tile((6, 4), (2, 4), (2, 2), text_length=3),
        tile_windows((6, 4), (2, 4), (2, 2), 3),
    ),
    "sliding tile, even window": (masks.sliding_tile((3, 8), (3, 4), (1, 2)), tile_windows((3, 8), (3, 4), (1, 2), 0)),
    "sliding tile of a video": (
        masks.sliding_tile((2, 4, 6), (2, 2, 6), (1, 2, 2), text_length=2),
        tile_windows((2, 4, 6), (2, 2, 6), (1, 2, 2), 2),
    ),
    "sliding tile, traced text": (
        masks.sliding_tile((4, 6), (2, 6), (2, 2), text_length=jnp.int32(3)),
        tile_windows((4, 6), (2, 6), (2, 2), 3, keys=30),
    ),
    "spatial head": (
        masks.spatial_head(5, 7, prompt=3),
        frames(23, 5, 3, lambda q, kv: abs(q[0] * 5 + q[1] - kv[0] * 5 - kv[1]) < 7),
    ),
    "spatial head, first frame": (
        masks.spatial_head(4, 4, first_frame=True),
        frames(20, 4, 0, lambda q, kv: abs(q[0] * 4 + q[1] - kv[0] * 4 - kv[1]) < 4, sink=4),
    ),
    "temporal head": (masks.temporal_head(5, 2, prompt=3), frames(23, 5, 3, lambda q, kv: abs(q[1] - kv[1]) < 2)),
    "temporal head, first frame": (
        masks.temporal_head(4, 1, prompt=1, first_frame=True),
        frames(21, 4, 1, lambda q, kv: q[1] == kv[1], sink=4),
    ),
}

# Larger, for blocks of which some are empty.
_GRID, _LONG_IDS = (8, 16), np.repeat(np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]), 20, axis=1)
morton_neighborhood = pair(
    masks.neighborhood(_GRID, (3, 5), order=masks.morton_order(_GRID)), neighbors(_GRID, (3, 5), by_morton(_GRID))
)
sliding_tile = pair(
    masks.sliding_tile((8, 12), (4, 12), (4, 4), text_length=9), tile_windows((8, 12), (4, 12), (4, 4), 9)
)
shared_prefix = pair(
    masks.shared_prefix(_LONG_IDS, PREFIXES),
    np.stack([packed(*rows) for rows in zip(_LONG_IDS, PREFIXES, strict=True)]),
)
temporal_head = pair(masks.temporal_head(30, 2, prompt=10), frames(130, 30, 10, lambda q, kv: abs(q[1] - kv[1]) < 2))
