"""Packs the chunks of a step into one int32 array, for one transfer to the device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from jaxtyping import Int32

from flax_layers.nnx import SharedPrefix
from flax_layers.serving.device.inputs import COLUMNS, PENALTY_COLUMNS, SAMPLING_COLUMNS
from flax_layers.serving.device.options import Shape
from flax_layers.serving.engine.cascades import NO_PREFIX
from flax_layers.serving.engine.requests import Request
from flax_layers.serving.engine.scheduler import Chunk
from flax_layers.serving.engine.sequence import PageCopy

COPIES = 8
"""Pages that are copied at once; XLA holds so many twice."""


def pack_request(request: Request) -> Int32[np.ndarray, " words"]:
    """Packs the parameters of a request, once for all its steps: a word for each one of sampling and penalties."""
    values = [(getattr(request.sampling, name), dtype) for name, dtype in SAMPLING_COLUMNS]
    values += [(getattr(request.penalties, name), dtype) for name, dtype in PENALTY_COLUMNS]
    return np.concatenate([np.array([value], dtype).view(np.int32) for value, dtype in values])


def pack(
    chunks: Items[Chunk], shape: Shape, no_slot: int, shared: SharedPrefix = NO_PREFIX
) -> Int32[np.ndarray, " words"]:
    """Packs the chunks of a step, whose first rows share a prefix. Rows that sample no token get `no_slot`."""
    tokens = np.zeros(shape.tokens, np.int32)
    indptr = np.zeros(shape.rows + 1, np.int32)
    lengths = np.zeros(shape.rows, np.int32)
    table = np.zeros((shape.rows, shape.pages), np.int32)
    slots = np.full(shape.rows, no_slot, np.int32)
    ancestors = np.zeros((shape.rows, 1 + shape.drafts if shape.drafts else 0), np.int32)
    columns = np.zeros((shape.rows, len(COLUMNS)), np.int32)
    end = 0
    for row, (sequence, first, count, samples, draft, _) in enumerate(chunks):
        assert sequence.slot is not None
        known = sequence.tokens[first : first + count]
        tokens[end : end + len(known)] = known
        if len(known) < count:  # the last one is on the device alone
            assert count - len(known) == 1
            tokens[end + len(known)] = -1 - sequence.slot
        end += count
        if draft.tokens:
            tokens[end : end + len(draft.tokens)] = draft.tokens
            end += len(draft.tokens)
            ancestors[row, : 1 + len(draft.tokens)] = draft.bits
        indptr[row + 1 :] = end
        lengths[row] = first + count + len(draft.tokens) - sequence.dropped
        table[row, : len(sequence.pages)] = sequence.pages
        if samples:
            slots[row] = sequence.slot
    sequences = [chunk.sequence for chunk in chunks]
    if sequences:
        state = [(x.is_edited, x.dropped, x.is_limited) for x in sequences]
        columns[: len(chunks)] = np.concatenate([np.array([x.words for x in sequences]), np.array(state, np.int32)], 1)
    words = columns.T.ravel()
    arrays = [np.array(shared, np.int32), tokens, indptr, lengths, slots, words, table.ravel(), ancestors.ravel()]
    return np.concatenate(arrays)


def pack_following(chunks: Items[Chunk], tokens: int) -> Int32[np.ndarray, " tokens"]:
    """Packs the token after each token of the chunks, where it is known; 0 elsewhere."""
    following, end = np.zeros(tokens, np.int32), 0
    for chunk in chunks:
        known = chunk.sequence.tokens[chunk.first + 1 : chunk.first + 1 + chunk.count]
        following[end : end + len(known)] = known
        end += chunk.size
    return following


def pack_copies(copies: Items[PageCopy]) -> list[Int32[np.ndarray, " words"]]:
    """Packs the pages to read and to write, `COPIES` for each call of the executor, padded with copies to no page.

    Example:
        >>> [words.tolist() for words in pack_copies([(3, 5)])]
        [[3, 0, 0, 0, 0, 0, 0, 0, 5, -1, -1, -1, -1, -1, -1, -1]]
    """
    pairs = np.array([*copies, *[(0, -1)] * (-len(copies) % COPIES)], np.int32)
    return list(pairs.reshape(-1, COPIES, 2).swapaxes(1, 2).reshape(-1, 2 * COPIES))


def pack_allowed(chunks: Items[Chunk], slots: int, vocabulary: int) -> Int32[np.ndarray, " words"]:
    """Packs a bit for each token that is allowed next in a slot, the lowest of the first word first."""
    bits = np.zeros((slots, -(-vocabulary // 32)), np.int32)
    for chunk in chunks:
        if chunk.samples and chunk.sequence.is_limited:
            bits[chunk.sequence.slot] = chunk.sequence.allowed(vocabulary)
    return bits.ravel()
