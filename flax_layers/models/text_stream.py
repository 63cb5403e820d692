"""Text of tokens as they come, in whole characters."""

from collections.abc import Callable, Iterable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes become that are not, or not yet, a character."""


class TextStream:
    """Turns tokens into text, piece by piece: the pieces together are the text of all tokens.

    A piece ends where a character ends, though a character may have several tokens. What a token becomes may depend on
    the tokens before it, as whether it begins with a space; so it is decoded together with those of the piece before.

    Args:
        decode: The text of tokens, special ones left out or shown.

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
        """Takes the next tokens.

        Args:
            tokens: One or more.

        Returns:
            The text that they complete, which may be empty.
        """
        pieces = []
        for token in tokens:
            self._pending.append(token)
            piece = self._new_text()
            if piece and not piece.endswith(UNFINISHED):
                self._shown, self._pending = self._pending, []
                pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the text.

        Returns:
            What has been held back: bytes that were the beginning of a character.
        """
        piece, self._pending = self._new_text(), []
        return piece

    def _new_text(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]
