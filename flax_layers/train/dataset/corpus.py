"""Training data: files of text and tokens, concatenated and cut into rows, with document ids."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int, Int32

from flax_layers.models.checkpoint.optional import needs
from flax_layers.train.dataset.lines import Document, Lines, ended
from flax_layers.train.dataset.texts import LINES, TOKEN_FILES, Encoder, files_of, read_text
from flax_layers.train.errors import InputError

if TYPE_CHECKING:
    import grain


class Rows(NamedTuple):
    """Packed tokens. A token whose successor belongs to another document is not scored."""

    tokens: Int[np.ndarray, "B T"]
    """Token ids."""
    documents: Int[np.ndarray, "B T"] | None = None
    """Document ids within each row, not decreasing along it; None: one document in each row."""
    weights: Float32[np.ndarray, "B T"] | None = None
    """The weight of the prediction of each token; None: 1. The loss is the weighted mean over all rows of a step."""

    @property
    def document_ids(self) -> Int[np.ndarray, "B T"]:
        """`documents`, or 0 for all tokens where it is None."""
        return np.zeros_like(self.tokens) if self.documents is None else self.documents


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens of all files, one after the other, read on demand.

    A document ends where its file ends, and after each end token; with weights, only at `starts`, since it may be a
    chat of many turns. `read_corpus` checks tokens; this class does not.

    Attributes:
        files: Their tokens; those of token files are memory-mapped.
        end_token: Ends a document; None: only the end of a file does.
        option: Of the command line that named the files, for messages.
        fingerprint: Of all tokens, and of where documents begin.
        starts: Where further documents begin, as lines of a .jsonl: indices of tokens, increasing.
        weights: The weight of each token of each file; empty if all count 1.

    Example:
        >>> corpus = Corpus((np.array([5, 9, 6]), np.array([7, 8])), end_token=9)
        >>> tokens, documents = corpus.row(0, 5)
        >>> tokens.tolist(), documents.tolist()
        ([5, 9, 6, 7, 8], [0, 0, 1, 2, 2])
    """

    files: tuple[Int[np.ndarray, " tokens"], ...]
    end_token: int | None = None
    option: str = "--data"
    fingerprint: str = ""
    starts: Int[np.ndarray, " documents"] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    weights: tuple[Float32[np.ndarray, " tokens"], ...] = ()

    @functools.cached_property
    def _starts(self) -> Int[np.ndarray, " files+1"]:
        """Begin of each file, and the end of the last."""
        return np.cumsum([0, *map(len, self.files)])

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._starts[-1])

    def row(self, begin: int, length: int) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
        """The tokens of a row from index `begin` on, and their document ids."""
        end = begin + length
        tokens = self._cut(self.files, begin, end).astype(np.int32)
        starts = np.zeros(length, bool)
        if self.end_token is not None and not self.weights:
            starts[1:] = tokens[:-1] == self.end_token
        for known in (self._starts, self.starts):
            starts[known[slice(*np.searchsorted(known, [begin, end]))] - begin] = True
        starts[0] = False
        return tokens, np.cumsum(starts, dtype=np.int32)

    def row_weights(self, begin: int, length: int) -> Float32[np.ndarray, " T"] | None:
        """The weights of a row of tokens; None if all tokens of the corpus count 1."""
        return self._cut(self.weights, begin, begin + length) if self.weights else None

    def _cut(self, arrays: Sequence[np.ndarray], begin: int, end: int) -> np.ndarray:
        """Joins what arrays, one for each file, hold of a range of tokens."""
        first, last = np.searchsorted(self._starts, [begin, end - 1], side="right") - 1
        starts = enumerate(self._starts[first : last + 1].tolist(), int(first))
        return np.concatenate([arrays[file][max(begin - start, 0) : end - start] for file, start in starts])


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of rows in random order, by grain. Each epoch has its own order, a function of the seed and the epoch.

    A batch is a function of its step, so a resumed run needs only the step.

    Attributes:
        corpus: The tokens; those after the last whole row are never read.
        batch: B, rows of a batch.
        length: T, tokens of a row.
        rows: Indices of the rows in use.

    Raises:
        InputError: There is no row.
    """

    corpus: Corpus
    batch: int
    length: int
    rows: range
    seed: int = 0

    def __post_init__(self):
        if not self.rows:
            raise InputError(
                f"`{self.corpus.option}` must hold at least one row of `--length` {self.length} tokens. Got "
                f"{self.corpus.size} tokens in {len(self.corpus.files)} files. Give more text, or lower `--length`."
            )

    def at(self, step: int) -> Rows:
        """The batch of a step, from 0 on."""
        rows = self._steps[step]
        assert rows is not None  # no row is filtered out
        return rows

    @functools.cached_property
    def _steps(self) -> "grain.MapDataset[Rows]":
        """Batches by step, read when they are indexed."""
        with needs("grain", "train"):
            import grain
        order = grain.MapDataset.source(self.rows).seed(self.seed % 2**64).shuffle().repeat()
        return order.batch(self.batch, batch_fn=self._stack)

    def in_order(self, most: int) -> list[Rows]:
        """At most `most` batches of the first rows, each once; the last is padded with rows that are not scored."""
        batches = []
        for start in range(0, min(len(self.rows), most * self.batch), self.batch):
            rows = self._stack(self.rows[start : start + self.batch])
            missing = self.batch - len(rows.tokens)
            alone = np.tile(np.arange(self.length, dtype=np.int32), (missing, 1))  # each token its own document
            empty = np.zeros((missing, self.length), np.int32)
            padding = Rows(empty, alone, None if rows.weights is None else empty.astype(np.float32))
            batches.append(jax.tree.map(lambda *parts: np.concatenate(parts), rows, padding))
        return batches

    def _stack(self, chosen: Sequence[int]) -> Rows:
        ranges = [(row * self.length, self.length) for row in chosen]
        rows = [Rows(*self.corpus.row(*x), self.corpus.row_weights(*x)) for x in ranges]
        return jax.tree.map(lambda *column: np.stack(column), *rows)


def read_corpus(
    paths: Sequence[pathlib.Path],
    tokenizer: Encoder | None,
    *,
    vocabulary: int,
    end_token: int | None = None,
    token_dtype: str = "uint16",
    field: str | None = None,
    weight_field: str | None = None,
    option: str = "--data",
) -> Corpus:
    """Reads files of text and tokens, and checks all tokens.

    `.npy` and `.bin` hold tokens and are memory-mapped. A `.jsonl` holds in each line a text, a prompt with its
    completion, or a chat: of these only completions and answers are trained. All other files are text in UTF-8, each
    file one document. Texts are tokenized now.

    Args:
        paths: Files; or folders, of which files with the endings of `flax_layers.train.dataset.texts.ENDINGS` are
            taken, sorted by name. A warning names the others.
        tokenizer: For text. Only token files need none.
        vocabulary: Tokens must lie below it.
        end_token: Ends a document. It is added to the end of each text that does not end with it.
        token_dtype: Of the tokens in `.bin` files.
        field: Of the objects in `.jsonl` files: their text or messages. None: `messages`, else `prompt` with
            `completion`, else `text`.
        weight_field: Of the objects in `.jsonl` files: a number that multiplies the loss of the line.
        option: Of the command line that named the files, for messages.

    Raises:
        InputError: A path does not exist, or a folder holds nothing that is taken; a token file does not hold one axis
            of integers; a file is no text in UTF-8; a line of a `.jsonl` has none of them; there is text and no
            tokenizer; a token is not in the vocabulary.
    """
    names, files, weights, starts, size = [], [], [], [], 0
    for path in files_of(paths, option):
        if path.suffix.lower() in TOKEN_FILES:
            documents = [Document(_mapped(path, token_dtype, option))]
        elif tokenizer is None:
            raise InputError(
                f"`--tokenizer` is required for text, as {path}: `bytes`, or a folder with a tokenizer.json."
            )
        elif path.suffix.lower() == LINES:
            documents = Lines(tokenizer, end_token, field, weight_field, option).read(path)
        else:
            text = read_text(path, option)
            documents = [Document(ended(tokenizer.encode(text), end_token))] if text else []
        documents = [document for document in documents if len(document.tokens)]
        if documents:
            ends = size + np.cumsum([len(document.tokens) for document in documents])
            names.append(str(path))
            parts = [document.tokens for document in documents]
            files.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
            counts = [np.broadcast_to(np.float32(1), len(x)) if w is None else w for x, w in documents]
            weights.append(None if all(x.weights is None for x in documents) else np.concatenate(counts))
            starts.append(ends[:-1])
            size = int(ends[-1])
    within = np.concatenate([np.zeros(0, np.int64), *starts])
    fingerprint = scan_tokens(names, files, vocabulary, option)
    hashed = within.astype("<u8").tobytes() + b"".join(x.tobytes() for x in weights if x is not None)
    if hashed:
        fingerprint = hashlib.blake2b(fingerprint.encode() + hashed, digest_size=16).hexdigest()
    if all(x is None for x in weights):
        return Corpus(tuple(files), end_token, option, fingerprint, within)
    begins = np.cumsum([0, *map(len, files)])
    for n in (n for n, known in enumerate(weights) if known is None):
        weights[n] = np.broadcast_to(np.float32(1), len(files[n]))
        starts.append(begins[n] + 1 + np.flatnonzero(files[n][:-1] == end_token))  # as without weights
    return Corpus(tuple(files), end_token, option, fingerprint, np.unique(np.concatenate(starts)), tuple(weights))


def _mapped(path: pathlib.Path, token_dtype: str, option: str) -> np.ndarray:
    if not path.stat().st_size:
        return np.zeros(0, np.uint16)
    if path.suffix.lower() == ".bin":
        if path.stat().st_size % np.dtype(token_dtype).itemsize:
            raise InputError(
                f"`{option}` must hold whole tokens. {path} has {path.stat().st_size} bytes, no multiple of the size "
                f"of {token_dtype}. Set `--token-dtype` to the dtype that it was written with."
            )
        return np.memmap(path, np.dtype(token_dtype), mode="r")
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(f"`{option}` must hold token files that numpy can map. Got {path}: {error}.") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise InputError(
            f"`{option}` must hold token files with one axis of integers. Got {tokens.dtype} of shape "
            f"{tokens.shape} in {path}."
        )
    return tokens


Tokens = Int[np.ndarray, " tokens"]

_CHUNK = 1 << 22


def scan_tokens(names: Sequence[str], files: Sequence[Tokens], vocabulary: int, option: str) -> str:
    """Checks all tokens and computes their fingerprint, with one thread per core.

    The fingerprint is a hash of all tokens and of the lengths of the files. It does not depend on names and dtypes.
    Raises InputError for a token outside of the vocabulary; `option` named the files.

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
            index = int(np.flatnonzero((tokens < 0) | (tokens >= vocabulary))[0])
            raise InputError(
                f"`{option}` must hold tokens from 0 to {vocabulary - 1}, the model's vocabulary. Got {tokens[index]} "
                f"at token {start + index} of {names[file]}. Use the tokenizer of the model, or the right "
                "`--token-dtype`."
            )
        return hashlib.blake2b(tokens.astype("<u4").data, digest_size=16).digest()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        for part in threads.map(digest, chunks):
            fingerprint.update(part)
    return fingerprint.hexdigest()
