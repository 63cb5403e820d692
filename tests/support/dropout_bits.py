"""The generator of dropout in numpy, from its description; it imports nothing of jflex or JAX."""

from __future__ import annotations

import numpy as np

KEY = (0, 7)  # the words of `jax.random.key(7)`
RATIO = 95872743  # of the numbers of two positions that share a hash


def kept(rate: float, words: tuple[int, int], b, h, q, k) -> np.ndarray:
    """Which weights are kept, at arrays of positions that broadcast."""
    with np.errstate(over="ignore"):
        first, second = _folded(_folded(words, b), h)
        q, k = np.asarray(q).astype(np.uint32), np.asarray(k).astype(np.uint32)
        sharer = (k // 8) % 4 + 4 * ((q // 8) % 2)
        powers = np.uint32([pow(RATIO, i, 2**32) for i in range(8)])
        k, q = k - (k // 8) % 4 * 8, q - (q // 8) % 2 * 8
        x = (first + q * np.uint32(0x9E3779B9)) ^ (k * np.uint32(0x85EBCA6B))
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15)) ^ (second + q * np.uint32(0xC2B2AE35))
        x = x * np.uint32(0x846CA68B) * powers[sharer]
    return x >= np.uint32(round(rate * 2**32))


def factors(rate: float, words: tuple[int, int], b, h, q, k) -> np.ndarray:
    """The factors of the weights: 0 where dropped, else ``1 / (1 - rate)``."""
    return kept(rate, words, b, h, q, k) / (1.0 - rate)


def _folded(words, number) -> tuple[np.ndarray, np.ndarray]:
    """`jax.random.fold_in`: Threefry-2x32 of the words (0, number)."""
    number = np.asarray(number).astype(np.uint32)
    return threefry(words, (np.zeros_like(number), number))


def threefry(key, counts) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 of 20 rounds, after Salmon et al. 2011, section 3.

    >>> [f"{x.item():08x}" for x in threefry((0, 0), (np.uint32([0]), np.uint32([0])))]  # of their test vectors
    ['6b200159', '99ba4efe']
    """
    with np.errstate(over="ignore"):
        keys = [np.asarray(x, np.uint32) for x in key]
        keys.append(keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA))
        x, y = counts[0] + keys[0], counts[1] + keys[1]
        for group in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                x = x + y
                y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
            x = x + keys[(group + 1) % 3]
            y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
