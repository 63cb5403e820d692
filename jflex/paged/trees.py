"""Trees of drafted tokens in a paged batch: rows of keys, positions of nodes, and mods at these positions.

Row and position differ in a tree: its nodes are written to consecutive rows, and nodes of one depth have one position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32

from jflex._check.arguments import check_int32, describe_array
from jflex.masks.drafts import MAX_NODES
from jflex.mods.reindex import Positions
from jflex.mods.types import MaskMod
from jflex.paged.checks import Rule
from jflex.types import AnyArray


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """The trees of a batch that has requests.

    Attributes:
      starts: The row of the first node of each request; for one without a tree its length, after all rows.
      words: The ancestors of each node, itself included, as bits.
      depths: The depth of each node; -1 for padding.
    """

    starts: Int32[Array, " R"]
    words: Int32[Array, "R nodes"]
    depths: Int32[Array, "R nodes"]

    @classmethod
    def from_ancestors(cls, ancestors: AnyArray, kv_lengths: AnyArray, qo_indptr: AnyArray) -> Trees:
        """Trees of the fields of a batch."""
        words, lengths, indptr = (jnp.asarray(x) for x in (ancestors, kv_lengths, qo_indptr))
        counts = jnp.where(words[:, 0] != 0, indptr[1:] - indptr[:-1], 0)
        return cls(lengths - counts, words, lax.population_count(words) - 1)

    def position(self, b: jax.Array, row: jax.Array) -> jax.Array:
        """The position of a token that is in a row of a request."""
        node = row - self.starts[b]
        return jnp.where(node < 0, row, self.starts[b] + self.depths[b, self._clip(node)])

    def positions(self, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> Positions:
        """The positions of rows, for a score_mod, or the mod of dropout."""
        return Positions(b, h, self.position(b, q), self.position(b, kv))

    def key_positions(self, b: jax.Array, h: jax.Array, row: jax.Array, kv: jax.Array) -> Positions:
        """The position of a row of keys, the last index of a key_mod or a value_mod."""
        return Positions(b, h, self.position(b, row), kv)

    def of_mask(self, mod: MaskMod | None) -> MaskMod:
        """A mask_mod on rows: within the tree, nodes attend to their ancestors and themselves alone.

        Keys before the tree are where they were, so that comparisons of positions still decide tiles of them.
        """

        def mask(b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> ArrayLike:
            position = self.position(b, q)
            before = kv < self.starts[b]
            word = self.words[b, self._clip(q - self.starts[b])]
            above = (word & jnp.left_shift(1, self._clip(kv - self.starts[b]))) != 0
            if mod is None:
                return before | above
            # Not `&` with the value, which may be of a type that tracing refuses, in the words of the user's function.
            shown, shown_above = mod(b, h, position, kv), mod(b, h, position, self.position(b, kv))
            if any(getattr(x, "dtype", type(x)) not in (bool, jnp.bool_) for x in (shown, shown_above)):
                return shown
            return (before & shown) | (~before & above & shown_above)

        if mod is not None:
            mask.__wrapped__ = mod  # pyright: ignore[reportFunctionMemberAccess]
        return mask

    def _clip(self, node: jax.Array) -> jax.Array:
        return jnp.clip(node, 0, self.words.shape[1] - 1)


def check_ancestors(ancestors: AnyArray, requests: int) -> None:
    """Raises unless the words of a batch have the right type and shape.

    >>> check_ancestors(jnp.zeros((2, 40), jnp.int32), requests=2)
    Traceback (most recent call last):
    ValueError: `batch.ancestors` must be [R, nodes], the words of at most 32 nodes for each of 2 requests. Got
    int32[2,40]. Pad the words of `jflex.masks.tree_bits` with 0.
    """
    check_int32("batch.ancestors", ancestors, "words")
    if ancestors.ndim != 2 or ancestors.shape[0] != requests or not 1 <= ancestors.shape[1] <= MAX_NODES:
        raise ValueError(
            f"`batch.ancestors` must be [R, nodes], the words of at most {MAX_NODES} nodes for each of {requests} "
            f"requests. Got {describe_array(ancestors)}. Pad the words of `jflex.masks.tree_bits` with 0."
        )


def tree_rules(qo_indptr: AnyArray, ancestors: AnyArray) -> Iterator[Rule]:
    """The rules on trees: a word for each query, and none for others; a node is its own ancestor, and no later one is.

    >>> words = np.array([[1, 3, 0], [1, 5, 0]], np.int32)
    >>> [rule.fault.tolist() for rule in tree_rules(np.array([0, 2, 4]), words)]
    [[False, False], [[False, False, False], [False, True, False]]]
    """
    numpy = np if isinstance(ancestors, np.ndarray) else jnp
    begins, ends = qo_indptr[:-1], qo_indptr[1:]
    request = numpy.broadcast_to(numpy.arange(ancestors.shape[0], dtype=np.int32)[:, None], ancestors.shape)
    node = numpy.broadcast_to(numpy.arange(ancestors.shape[1], dtype=np.int32)[None], ancestors.shape)
    words, queries = (ancestors != 0).sum(axis=1).astype(np.int32), ends - begins
    yield Rule(
        (words > 0) & (words != queries),
        "`ancestors` must hold one word for each query of a request, or none. Request {request} has {queries} queries "
        "and {words} words that are not 0. Make them with `jflex.masks.tree_bits`.",
        {"request": request[:, 0], "queries": queries, "words": words},
    )
    exists = (node < queries[:, None]) & (words > 0)[:, None]
    last = numpy.where(node == MAX_NODES - 1, -1, 1)  # bit 31 is the sign, which a shift repeats
    fault = exists & ((ancestors >> node) != last)
    yield Rule(
        fault,
        "`ancestors` must have the bit of the node itself, and no bits of nodes after it. Node {node} of request "
        "{request} has the word {word}. Make them with `jflex.masks.tree_bits`.",
        {"request": request, "node": node, "word": ancestors},
    )
