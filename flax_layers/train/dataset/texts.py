"""Texts to train on: which files are taken, and what is refused."""

import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from flax_layers.models import Tokenizer
from flax_layers.train.errors import InputError

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

    `end_token` is the `eos_token` of its configuration, if any. Raises FileNotFoundError if there is no
    `tokenizer.json`.
    """

    def __init__(self, folder: pathlib.Path):
        self.tokenizer = Tokenizer(folder)
        self.folder = folder
        name = self.tokenizer.special_tokens.get("eos_token")
        self.end_token = None if name is None else self.tokenizer.token_id(name)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocabulary

    def encode(self, text: bytes) -> Tokens:
        """Returns the tokens of a text in UTF-8."""
        return self.tokenizer.encode(text.decode()).astype(np.uint32)

    def text(self, token: int) -> str:
        """Returns the text of a token, also of a special one."""
        return self.tokenizer.decode([token], special_tokens=True)


LINES = ".jsonl"
ENDINGS = (".txt", ".md", LINES, *TOKEN_FILES)
"""Endings of the files that are taken from folders. Other files are taken if they are named themselves."""

_RECORDS = (".json", ".csv", ".tsv")
"""Files whose texts are fields of records."""

_SHOWN = 5


def files_of(paths: Sequence[pathlib.Path], option: str) -> Iterator[pathlib.Path]:
    """Yields the files to read, those of folders sorted by name and without hidden ones; `option` named the paths.

    Raises InputError if a path does not exist, or a folder holds nothing that is taken.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"`{option}` must name files or folders. There is no {path}.")
        yield from _files_in(path, option) if path.is_dir() else [path]


def _files_in(folder: pathlib.Path, option: str) -> list[pathlib.Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = {file: file.relative_to(folder) for file in files}
    is_hidden = lambda file: any(part.startswith(".") for part in names[file].parts)
    taken = [file for file in files if file.suffix.lower() in ENDINGS and not is_hidden(file)]
    others = [str(names[file]) for file in files if file not in set(taken)]
    shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    if not taken:
        raise InputError(
            f"`{option}` must name folders of files that end in {', '.join(ENDINGS)}. {folder} holds "
            f"{shown or 'no files'}. Name files of other endings themselves, if they are text."
        )
    if others:
        warnings.warn(
            f"`{option}` takes {len(taken)} of {len(files)} files in {folder}, by their endings {', '.join(ENDINGS)}. "
            f"Left out: {shown}. Name them themselves, if they are text.",
            stacklevel=2,
        )
    return taken


def read_text(path: pathlib.Path, option: str) -> bytes:
    """Returns the text of a file, in UTF-8. Raises InputError if it is none; `option` named the file."""
    if path.suffix.lower() in _RECORDS:
        raise InputError(
            f"`{option}` must hold text, {LINES} or token files. Got {path}, all of whose syntax would be learned. "
            f'Write its texts to a {LINES}, one object such as {{"text": "..."}} in each line; or rename it to .txt.'
        )
    text = path.read_bytes()
    try:
        text.decode()
        wrong = "a null byte" if b"\0" in text else None
    except UnicodeDecodeError as error:
        wrong = str(error)
    if wrong is not None:
        raise InputError(
            f"`{option}` must hold text in UTF-8, {LINES} or token files ({', '.join(TOKEN_FILES)}). Got {path}: "
            f"{wrong}. Unpack it, or write its texts to a {LINES}."
        )
    return text
