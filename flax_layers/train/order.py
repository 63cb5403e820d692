"""A random order that is computed, not stored: place by place, from a seed."""

import hashlib

_ROUNDS = 6


def permuted(place: int, size: int, seed: int) -> int:
    """Where a random permutation of `range(size)` sends a place.

    A Feistel network permutes the next power of four above `size`; a result beyond `size` is sent on until it falls
    below ("cycle walking", Black and Rogaway 2002). So nothing is held in memory, and any place can be asked for first.

    Args:
        place: From 0 to `size - 1`.
        size: What is permuted.
        seed: Each seed gives another permutation.

    Returns:
        The number at that place.

    Example:
        >>> [permuted(place, 7, seed=1) for place in range(7)]
        [3, 0, 2, 5, 1, 6, 4]
    """
    bits = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        place = _feistel(place, bits, seed)
        if place < size:
            return place


def _feistel(value: int, bits: int, seed: int) -> int:
    """A permutation of `range(4 ** bits)`."""
    left, right = value >> bits, value & ((1 << bits) - 1)
    for turn in range(_ROUNDS):
        digest = hashlib.blake2b(f"{seed} {turn} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & ((1 << bits) - 1))
    return left << bits | right
