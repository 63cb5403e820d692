"""How text becomes tokens: bytes as they are, or the tokenizer of a checkpoint."""

import pathlib
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from flax_layers.models import Tokenizer

Tokens = UInt32[np.ndarray, " tokens"]

TOKEN_FILES = (".npy", ".bin")
"""Endings of files of tokens."""


@runtime_checkable
class Encoder(Protocol):
    """Turns text into tokens."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        ...

    def encode(self, text: bytes) -> Tokens:
        """Returns the tokens of a text in UTF-8."""
        ...


class ByteEncoder:
    """Each byte is a token.

    Example:
        >>> ByteEncoder().encode(b"abc").tolist()
        [97, 98, 99]
    """

    vocabulary = 256

    def encode(self, text: bytes) -> Tokens:
        """Returns the bytes."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)


class FolderEncoder:
    """The tokenizer of a checkpoint, with the special tokens that it begins or ends a text with.

    Args:
        folder: It holds `tokenizer.json`.

    Attributes:
        folder: The same.
        end_token: The `eos_token` of its configuration; None: it has none.

    Raises:
        FileNotFoundError: There is no `tokenizer.json`.
    """

    def __init__(self, folder: pathlib.Path):
        self._tokenizer = Tokenizer(folder)
        self.folder = folder
        name = self._tokenizer.special_tokens.get("eos_token")
        self.end_token = None if name is None else self._tokenizer.token_id(name)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self._tokenizer.vocabulary

    def encode(self, text: bytes) -> Tokens:
        """Returns the tokens of a text in UTF-8."""
        return self._tokenizer.encode(text.decode()).astype(np.uint32)

    def text(self, token: int) -> str:
        """Returns the text of a token, also of a special one."""
        return self._tokenizer.decode([token], special_tokens=True)
