"""One pass over the tokens before training: it checks their range and computes their fingerprint."""

import concurrent.futures
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from flax_layers.train.errors import InputError

Tokens = Int[np.ndarray, " tokens"]

_CHUNK = 1 << 22


def scan_tokens(names: Sequence[str], files: Sequence[Tokens], vocabulary: int, option: str) -> str:
    """Checks all tokens and computes their fingerprint, with one thread per core.

    Args:
        names: Of the files.
        files: Their tokens. Those that are memory-mapped are read in chunks.
        vocabulary: Tokens must lie below it.
        option: Of the command line that named the files, for messages.

    Returns:
        A hash of all tokens and of the lengths of the files. It does not depend on names and dtypes.

    Raises:
        InputError: A token is not in the vocabulary.

    Example:
        >>> wide, narrow = np.array([1, 2, 3]), np.array([1, 2, 3], np.uint16)
        >>> scan_tokens(["a"], [wide], 4, "--data") == scan_tokens(["b"], [narrow], 4, "--data")
        True
    """
    chunks = [(file, start) for file, tokens in enumerate(files) for start in range(0, len(tokens), _CHUNK)]
    lengths = ",".join(str(len(tokens)) for tokens in files)
    fingerprint = hashlib.blake2b(lengths.encode(), digest_size=16)

    def digest(chunk: tuple[int, int]) -> bytes:
        file, start = chunk
        tokens = files[file][start : start + _CHUNK]
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise _out_of_range(tokens, start, names[file], vocabulary, option)
        return hashlib.blake2b(tokens.astype("<u4").data, digest_size=16).digest()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        for part in threads.map(digest, chunks):
            fingerprint.update(part)
    return fingerprint.hexdigest()


def _out_of_range(tokens: Tokens, start: int, name: str, vocabulary: int, option: str) -> InputError:
    index = int(np.flatnonzero((tokens < 0) | (tokens >= vocabulary))[0])
    return InputError(
        f"`{option}` must hold tokens from 0 to {vocabulary - 1}, the model's vocabulary. Got {tokens[index]} at token "
        f"{start + index} of {name}. Use the tokenizer of the model, or the right `--token-dtype`."
    )
