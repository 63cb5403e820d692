"""Real text that comes with Python: the sources of its standard library, packed into rows of documents."""

import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from flax_layers.train.dataset.corpus import Rows

HELD_OUT_SHARE = 1 / 16
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
SHORTEST_DOCUMENT = 64

Text = UInt8[np.ndarray, " bytes"]
"""The bytes of a file."""


class Corpus(NamedTuple):
    """Texts for training and, of other files, for the held-out loss."""

    training: list[Text]
    held_out: list[Text]


def read_corpus() -> Corpus:
    """Reads the `.py` files of the standard library, tests left out.

    Which files are held out depends on their paths alone: one in sixteen, chosen by a hash.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_OURS.isdisjoint(name.parts) and path.stat().st_size >= SHORTEST_DOCUMENT:
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            part = corpus.held_out if digest[0] < 256 * HELD_OUT_SHARE else corpus.training
            part.append(np.frombuffer(path.read_bytes(), np.uint8))
    return corpus


def packed_rows(texts: list[Text], rows: int, length: int, seed: int) -> Iterator[Rows]:
    """Endless batches of rows of documents: pieces of random files, from 64 bytes to a row long, cut at its end.

    Files are drawn in proportion to their size, and lengths so that their logarithm is uniform. The same seed gives the
    same rows.
    """
    generator = np.random.default_rng(seed)
    sizes = np.array([len(text) for text in texts], np.float64)
    while True:
        batch = [_pack_row(texts, sizes / sizes.sum(), length, generator) for _ in range(rows)]
        tokens, documents = (np.stack(column) for column in zip(*batch, strict=True))
        yield Rows(tokens, documents)


def _pack_row(
    texts: list[Text], shares: np.ndarray, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    tokens, documents = np.zeros(length, np.int32), np.zeros(length, np.int32)
    used = number = 0
    while used < length:
        text = texts[generator.choice(len(texts), p=shares)]
        drawn = int(np.exp(generator.uniform(np.log(SHORTEST_DOCUMENT), np.log(max(length, SHORTEST_DOCUMENT)))))
        size = min(drawn, len(text), length - used)
        start = generator.integers(len(text) - size + 1)
        tokens[used : used + size] = text[start : start + size]
        documents[used : used + size] = number
        used, number = used + size, number + 1
    return tokens, documents


def unigram_loss(texts: list[Text], rows: list[Rows]) -> float:
    """Loss of the model that knows only how often each byte occurs in `texts`, on the scored bytes of `rows`.

    In the frequencies, each byte counts once more than it occurs.
    """
    counts = 1 + np.sum([np.bincount(text, minlength=256) for text in texts], axis=0)
    losses = -np.log(counts / counts.sum())
    targets = [batch.tokens[:, 1:][np.diff(batch.document_ids) == 0] for batch in rows]
    return float(losses[np.concatenate(targets)].mean())
