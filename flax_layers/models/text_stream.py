"""Decodes a stream of tokens to text, in whole characters."""

from collections.abc import Callable, Iterable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How tokenizers decode bytes that are not a complete character."""

_MOST_PENDING = 32
"""Tokens that may wait for the end of a character. More are no character, or have no text, as special tokens."""


class TextStream:
    """Decodes tokens as they arrive. The pieces, joined, are the text of all tokens.

    A piece never ends inside a character, though a character may have several tokens. The text of a token may depend on
    the tokens before it, such as whether it begins with a space. So tokens are decoded together with the last piece.

    Args:
        decode: Decodes tokens to text, with or without special tokens.

    Example:
        >>> stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> [stream.push([token]) for token in "né😀".encode()]
        ['n', '', 'é', '', '', '', '😀']
        >>> stream.push([0xF0]), stream.finish() == UNFINISHED
        ('', True)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._shown: list[int] = []  # the tokens of the last piece
        self._pending: list[int] = []

    def push(self, tokens: Iterable[int]) -> str:
        """Appends tokens, and returns the new text up to the last complete character; it may be empty."""
        pieces = []
        for token in tokens:
            self._pending.append(token)
            size = len(self._pending)
            piece = self._new_text(size)
            if not piece or piece.endswith(UNFINISHED):
                if size < _MOST_PENDING:
                    continue
                size //= 2
                piece = self._new_text(size)
            self._shown = self._pending[:size] if piece else self._shown
            self._pending = self._pending[size:]
            pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the stream, and returns the text that was held back: the bytes of an incomplete character."""
        piece, self._pending = self._new_text(len(self._pending)), []
        return piece

    def _new_text(self, size: int) -> str:
        return self._decode(self._shown + self._pending[:size])[len(self._decode(self._shown)) :]
