"""Verifies drafted tokens in the compiled step: accepts those that the model samples itself, and moves their keys.

At each node of a tree a token is sampled from the model's distribution, with the key of its request and position; the
walk goes on in the child that equals it. A draft is one token, not a distribution, so this is the rejection sampling of
speculative decoding (Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318) and of its trees
(Miao et al., 2023, arXiv:2305.09781): draft x is accepted with probability p(x), and otherwise the token comes from p
without x, normalized again. And since keys depend on seed and position alone, the tokens are those of the engine
without speculation, one by one, as far as logits do not differ in their last bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from flax_layers.models.block import Pages
from flax_layers.sampling import SamplingBatch, sample
from jflex.paged import PagedBatch, copy_slots, slots_of


class DraftRows(NamedTuple):
    """The nodes of R requests whose logits are needed: the last known token of each, and K - 1 drafts with padding."""

    rows: Int32[Array, "R K"]  # packed index of each node. A request without drafts has one node, its last token
    words: Int32[Array, "R K"]  # ancestors as bits; of a request without drafts 1 for that node; 0 for padding
    depths: Int32[Array, "R K"]  # depth of each node; -1 for padding
    starts: Int32[Array, " R"]  # row of the first node among the keys of the request

    @classmethod
    def from_batch(cls, batch: PagedBatch) -> DraftRows:
        """Selects the nodes of a batch with ancestors."""
        assert batch.ancestors is not None
        words, indptr, lengths = (jnp.asarray(x) for x in (batch.ancestors, batch.qo_indptr, batch.kv_lengths))
        has_tree = words[:, 0] != 0
        first = jnp.maximum(jnp.where(has_tree, indptr[:-1], indptr[1:] - 1), 0)
        starts = lengths - jnp.where(has_tree, indptr[1:] - indptr[:-1], 1)
        words = words.at[:, 0].set(1)
        node = jnp.arange(words.shape[1], dtype=jnp.int32)[None]
        rows = jnp.where(words != 0, first[:, None] + node, first[:, None])
        return cls(rows, words, jax.lax.population_count(words) - 1, starts)

    @property
    def positions(self) -> Int32[Array, "R K"]:
        """Position of the token after each node, from which its key is derived."""
        return self.starts[:, None] + self.depths + 1


class Accepted(NamedTuple):
    """Tokens sampled on the accepted path."""

    tokens: Int32[Array, "R K"]  # the sampled tokens, in order; 0 after the last
    counts: Int32[Array, " R"]  # number of tokens: one more than accepted drafts
    path: Int32[Array, "R K"]  # the node at each depth of the path; 0 after the last

    @property
    def last(self) -> Int32[Array, " R"]:
        """The last sampled token of each request."""
        return jnp.take_along_axis(self.tokens, self.counts[:, None] - 1, axis=1)[:, 0]


def accept(nodes: DraftRows, drafted: Int32[Array, "R K"], sampled: Int32[Array, "R K"]) -> Accepted:
    """Walks each tree along the tokens that the model samples.

    `drafted` is the token of each node, `sampled` the token sampled after it.

    Example:
        >>> words = jnp.array([[1, 3, 5, 13]])  # two children of the known token, and one of the second of these
        >>> nodes = DraftRows(words, words, jax.lax.population_count(words) - 1, jnp.array([4]))
        >>> accept(nodes, jnp.array([[6, 7, 8, 9]]), jnp.array([[8, 0, 9, 5]])).tokens.tolist()
        [[8, 9, 5, 0]]
    """
    node = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
    bit = jnp.left_shift(1, node)
    parent = jnp.maximum(31 - jax.lax.clz(nodes.words & ~bit), 0)  # the highest bit before that of the node
    agrees = (drafted == jnp.take_along_axis(sampled, parent, axis=1)) | (node == 0)
    rejected = jnp.sum(jnp.where(agrees, 0, bit), axis=1, dtype=jnp.int32)[:, None]  # as bits
    accepted = (nodes.words != 0) & (nodes.words & rejected == 0)  # with all ancestors
    # [R, depth, node]: children of one node differ, so at most one node of a depth is accepted.
    on_path: Bool[Array, "R K K"] = accepted[:, None] & (nodes.depths[:, None] == node[:, :, None])
    select = lambda x: jnp.sum(jnp.where(on_path, x[:, None], 0), axis=2, dtype=jnp.int32)
    path = select(jnp.broadcast_to(node, drafted.shape))
    return Accepted(select(sampled), jnp.sum(accepted, axis=1, dtype=jnp.int32), path)


def sample_drafts(
    logits: Float[Array, "R drafts V"], sampling: SamplingBatch, positions: Int32[Array, "R K"]
) -> Int32[Array, "R drafts"]:
    """Samples the token after each draft. `positions` are of the tokens after all nodes, the known token first."""
    drafts = logits.shape[1]
    of_each = jax.tree.map(lambda x: jnp.repeat(x, drafts), sampling)
    return sample(logits.reshape(-1, logits.shape[2]), of_each, positions[:, 1:].ravel()).reshape(-1, drafts)


def compact(cache: Pages, batch: PagedBatch, nodes: DraftRows, accepted: Accepted) -> Pages:
    """Moves keys and values of accepted drafts to the rows that follow the known tokens, in all layers.

    The accepted path of a chain is there already, and nothing is written.
    """
    depth = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)[None]
    moves = (depth < accepted.counts[:, None]) & (accepted.path != depth)
    slots = lambda node: slots_of(batch.page_table, nodes.starts[:, None] + node, cache.page_size)
    to = jnp.where(moves, slots(jnp.broadcast_to(depth, moves.shape)), -1)
    return copy_slots(cache, slots(accepted.path).ravel(), to.ravel())
