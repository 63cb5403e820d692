"""A random order that is computed from a seed, index by index, and never stored."""

import hashlib

_ROUNDS = 6


def permuted(index: int, size: int, seed: int) -> int:
    """An element of a random permutation of `range(size)`.

    A Feistel network permutes the next power of four above `size`; a result of at least `size` is permuted again until
    it falls below ("cycle walking", Black and Rogaway 2002). Nothing is held in memory, and access is random.

    Args:
        index: From 0 to `size - 1`.
        size: Number of elements.
        seed: Each seed gives another permutation.

    Returns:
        The element at that index.

    Example:
        >>> [permuted(index, 7, seed=1) for index in range(7)]
        [3, 0, 2, 5, 1, 6, 4]
    """
    bits = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        index = _feistel(index, bits, seed)
        if index < size:
            return index


def _feistel(value: int, bits: int, seed: int) -> int:
    """A permutation of `range(4 ** bits)`."""
    left, right = value >> bits, value & ((1 << bits) - 1)
    for turn in range(_ROUNDS):
        digest = hashlib.blake2b(f"{seed} {turn} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & ((1 << bits) - 1))
    return left << bits | right
