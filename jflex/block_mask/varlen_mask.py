"""The BlockMask of packed sequences: which blocks of packed queries and keys have a sequence in common.

The sequences of a batch are concatenated, without padding between them. Their boundaries alone decide which blocks have
a sequence in common; a mask_mod is evaluated in these blocks only.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int8, Int32

from jflex._check.arguments import checked_block_size, checked_size, describe_array, known_values
from jflex._mesh import match_manual_axes
from jflex.block_mask.limits import with_limits
from jflex.block_mask.lists import EMPTY, FULL, PARTIAL, block_count, block_lists, run_of
from jflex.block_mask.mask import BlockMask, BlockSize
from jflex.block_mask.states import UNDECIDED, settled
from jflex.mods.array_sizes import CallSizes
from jflex.mods.dependence import uses_index
from jflex.mods.reindex import Positions, ReindexedMod
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import TracedMod, check_call_sizes, trace_mask_mod
from jflex.mods.types import MaskMod
from jflex.types import AnyArray
from pallas_kernels.block_intervals import Grid

DEFAULT_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class VarlenBlockMask(BlockMask):
    """The BlockMask of packed sequences. Made by `varlen_block_mask`; its lengths are those of the packed arrays.

    Its mask_mod takes packed indices, masks other sequences, and maps to positions for the user's mask_mod.

    Attributes:
      cu_seqlens_q: The boundaries of the queries.
      cu_seqlens_k: The boundaries of the keys.
    """

    cu_seqlens_q: Int32[Array, " R_and_1"]
    cu_seqlens_k: Int32[Array, " R_and_1"]


@answers_keywords
def varlen_block_mask(
    cu_seqlens_q: Int32[AnyArray, " R_and_1"],
    cu_seqlens_k: Int32[AnyArray, " R_and_1"],
    num_queries: int,
    num_keys: int,
    *,
    mask_mod: MaskMod | None = None,
    H: int | None = None,
    block_size: BlockSize = DEFAULT_BLOCK,
) -> VarlenBlockMask:
    """Makes the BlockMask of packed sequences, for `flex_attention_varlen`: once for all layers of a model.

    Without a `mask_mod` no element is evaluated: the boundaries decide which blocks have a sequence in common and which
    lie within one. A `mask_mod` is evaluated in these blocks only, so the work grows with the squares of the sequence
    lengths, not with the square of their sum. While it is made, memory grows with the number of blocks of the whole
    matrix, about 20 bytes for each; `create_block_mask` says how wide its tables are.

    Args:
      cu_seqlens_q: As in `flex_attention_varlen`; may be traced.
      num_queries: N, the length of the packed queries.
      num_keys: M, the length of the packed keys.
      mask_mod: As in `flex_attention_varlen`.
      H: Query heads, or None for one mask that all heads share.
      block_size: Of queries and keys, one number or a pair.

    Returns:
      The mask. A block is full if all of it is visible and it lies wholly within the lengths.

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: Known boundaries do not ascend from 0 to at most `num_queries` and `num_keys`; they are for different
        numbers of sequences; or `mask_mod` uses ``h`` while `H` is None, or was made for other sizes.

    >>> boundaries = jnp.array([0, 200, 456], jnp.int32)  # two sequences, of 200 and 256 tokens
    >>> print(varlen_block_mask(boundaries, boundaries, 512, 512, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx))
    BlockMask(shape=(1, 1, 512, 512), block_size=(128, 128), sparsity=50.00%)
    batch 0, head 0
    ░░      |
    ░░░░    |
      ░░░░  |
      ░░░░░░|
    """
    lengths = checked_size(num_queries, "num_queries"), checked_size(num_keys, "num_keys")
    q_ends, kv_ends = checked_boundaries(cu_seqlens_q, cu_seqlens_k, lengths)
    check_callable(mask_mod, "mask_mod", "(b, h, q_idx, kv_idx) -> bool")
    check_call_sizes(None, mask_mod, packed_sizes(q_ends, kv_ends, H, "packed sequences"))
    tokens = PackedTokens.from_boundaries(q_ends, kv_ends, lengths)
    mask_mod = mask_mod if tokens.sequences else None
    traced, operands = trace_mask_mod(
        tokens.same_sequence if mask_mod is None else ReindexedMod(mask_mod, tokens.positions_in_sequence)
    )
    heads = 1 if H is None else checked_size(H, "H")
    if H is None and uses_index(traced, "h"):
        raise ValueError(
            f"`H` is None, which makes one mask for all, but the mask_mod {traced.source} uses `h`. Pass `H=` the "
            "number of query heads."
        )
    size = checked_block_size(block_size)
    states = _boundary_states(q_ends, kv_ends, lengths, size)
    states = states[None] if mask_mod is None else _evaluated_states(states, traced, operands, heads, lengths, size)
    lists = block_lists(states[None], follow_mod=True)
    # Of the key alone, positions are in no order. From the query, they count from where the keys of its sequence begin.
    by_query = None if mask_mod is None else trace_mask_mod(ReindexedMod(mask_mod, tokens.positions_by_query))
    traced, operands = with_limits((traced, operands), (1, heads, *lengths), lists, by_query)
    return VarlenBlockMask(*lists, operands, traced, lengths, size, True, cu_seqlens_q=q_ends, cu_seqlens_k=kv_ends)


class PackedTokens(NamedTuple):
    """Sequence and position of every packed token; padding has position 0, and different ids for queries and keys."""

    q_sequence: Int32[Array, " N"]
    q_position: Int32[Array, " N"]
    kv_sequence: Int32[Array, " M"]
    kv_position: Int32[Array, " M"]
    sequences: int
    kv_begin: Int32[Array, " R"]  # the first key of each sequence

    @classmethod
    def from_boundaries(cls, q_ends: jax.Array, kv_ends: jax.Array, lengths: tuple[int, int]) -> PackedTokens:
        """Computes both from boundaries; the padding of queries and that of keys get different sequence ids."""
        sequences = q_ends.size - 1
        queries, keys = _locate(q_ends, lengths[0], sequences), _locate(kv_ends, lengths[1], -1)
        return cls(*queries, *keys, sequences, kv_ends[:-1])

    def same_sequence(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Bool[Array, ""]:
        """The mask_mod of the boundaries: visible if query and key belong to one sequence."""
        return self.q_sequence[q_idx] == self.kv_sequence[kv_idx]

    def positions(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        """The positions for the user's score_mod; the mask excludes other sequences."""
        sequence = jnp.minimum(self.q_sequence[q_idx], self.sequences - 1)
        return Positions(sequence, h, self.q_position[q_idx], self.kv_position[kv_idx])

    def positions_in_sequence(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        """The positions for the user's mask_mod, and whether query and key belong to one sequence."""
        exists = self.same_sequence(b, h, q_idx, kv_idx)
        return self.positions(b, h, q_idx, kv_idx)._replace(exists=exists)

    def positions_by_query(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        """Positions as of `positions_in_sequence`, but for keys of other sequences, where they are of no sequence."""
        positions = self.positions_in_sequence(b, h, q_idx, kv_idx)
        begins = self.kv_begin[jnp.minimum(self.q_sequence, self.sequences - 1)]  # by query
        return positions._replace(kv_idx=kv_idx - begins[q_idx])


def _locate(ends: jax.Array, length: int, padding: int) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
    """The sequence of every token, and its position there."""
    token = jnp.arange(max(length, 1), dtype=jnp.int32)  # a mod is traced even where there are none
    if ends.size == 1:
        return jnp.full_like(token, padding), jnp.zeros_like(token)
    sequence = run_of(token, ends)
    inside = token < ends[-1]
    return jnp.where(inside, sequence, padding), jnp.where(inside, token - ends[:-1][sequence], 0)


@jax.jit(static_argnames=("lengths", "block_size"))
def _boundary_states(
    q_ends: Int32[Array, " R_and_1"],
    kv_ends: Int32[Array, " R_and_1"],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Int8[Array, "R C"]:
    """The states of blocks from boundaries alone: full within one sequence, empty without one in common."""
    both = (q_ends[1:] > q_ends[:-1]) & (kv_ends[1:] > kv_ends[:-1])
    # Ranks of the sequences that have both queries and keys: a block holds a range of them.
    rank = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(both, dtype=jnp.int32)])
    (q_first, q_last, q_one), (kv_first, kv_last, kv_one) = (
        _range_of_blocks(ends, rank, *sizes) for ends, sizes in
        ((q_ends, (lengths[0], block_size[0])), (kv_ends, (lengths[1], block_size[1])))
    )  # fmt: skip
    common = jnp.maximum(q_first[:, None], kv_first[None]) < jnp.minimum(q_last[:, None], kv_last[None])
    full = common & q_one[:, None] & kv_one[None]
    return jnp.where(full, jnp.int8(FULL), jnp.where(common, jnp.int8(PARTIAL), jnp.int8(EMPTY)))


def _range_of_blocks(ends: jax.Array, rank: jax.Array, length: int, block: int) -> tuple[jax.Array, ...]:
    """Ranks of the sequences of each block, begin and end, and whether all of it belongs to one sequence."""
    begin = jnp.arange(block_count(length, block), dtype=jnp.int32) * block
    filled = jnp.minimum(ends[-1], length)
    first = run_of(begin, ends)
    last = run_of(jnp.minimum(begin + block, filled) - 1, ends)
    after = jnp.minimum(last + 1, rank.size - 1)
    return rank[first], rank[after], (first == last) & (begin + block <= filled)


@jax.jit(static_argnames=("traced", "heads", "lengths", "block_size"))
def _evaluated_states(
    states: Int8[Array, "R C"],
    traced: TracedMod,
    operands: tuple[jax.Array, ...],
    heads: int,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Int8[Array, "H R C"]:
    """The states of the blocks that are not empty, from their elements."""
    if 0 in (*states.shape, heads):
        return jnp.zeros((heads, *states.shape), jnp.int8)
    states = jnp.where(states == EMPTY, states, jnp.int8(UNDECIDED))
    states, operands = match_manual_axes(
        (jnp.broadcast_to(states, (heads, *states.shape)), lax.stop_gradient(operands))
    )
    return settled(traced, operands, states, jnp.arange(heads, dtype=jnp.int32), heads, Grid(lengths, block_size))


def check_callable(mod: object, name: str, signature: str) -> None:
    """Raises TypeError for a mod that is neither None nor a function."""
    if mod is None or callable(mod):
        return
    hint = " Pass it as `block_mask`." if isinstance(mod, BlockMask) else ""
    raise TypeError(f"`{name}` must be a function {signature}. Got {type(mod).__name__}.{hint}")


def packed_sizes(q_ends: jax.Array, kv_ends: jax.Array, heads: int | None, caller: str) -> CallSizes:
    """The ranges of the indices of mods of packed sequences; of positions where the boundaries are known."""
    ends = known_values(q_ends), known_values(kv_ends)
    queries, keys = (None if known is None else int(np.diff(known).max(initial=0)) for known in ends)
    return CallSizes(q_ends.size - 1, heads, queries, keys, caller)


def checked_boundaries(q_ends: AnyArray, kv_ends: AnyArray, lengths: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The boundaries of queries and of keys, as JAX arrays."""
    named = (("cu_seqlens_q", q_ends, lengths[0], "queries"), ("cu_seqlens_k", kv_ends, lengths[1], "keys"))
    for name, ends, _, kind in named:
        rule = f"`{name}` must be an int32 array [R + 1], where the {kind} of each of R sequences begin, and their end"
        if not (hasattr(ends, "shape") and hasattr(ends, "dtype")):
            raise TypeError(f"{rule}. Got {type(ends).__name__}; pass `jnp.asarray({name}, jnp.int32)`.")
        if ends.dtype != jnp.int32:
            raise TypeError(f"{rule}. Got {describe_array(ends)}; cast it with `.astype(jnp.int32)`.")
        if len(ends.shape) != 1 or not ends.shape[0]:
            raise ValueError(f"{rule}. Got {describe_array(ends)}. For no sequences, pass [0].")
    if q_ends.shape != kv_ends.shape:
        raise ValueError(
            f"`cu_seqlens_q` and `cu_seqlens_k` must be for the same sequences. They are for {q_ends.shape[0] - 1} and "
            f"{kv_ends.shape[0] - 1}. For a sequence without queries or keys, repeat a boundary."
        )
    for name, ends, length, kind in named:
        known = known_values(ends)
        if known is not None:
            _check_values(name, known, length, kind)
    return jnp.asarray(q_ends), jnp.asarray(kv_ends)


def _check_values(name: str, ends: np.ndarray, length: int, kind: str) -> None:
    if ends[0] != 0:
        raise ValueError(
            f"`{name}` must begin with 0, where the {kind} of the first sequence begin. It begins with {ends[0]}. "
            "Prepend a 0 to the cumulative sums of the lengths."
        )
    falls = ends[1:] < ends[:-1]
    if falls.any():
        r = int(falls.argmax())
        raise ValueError(
            f"`{name}` must ascend. Sequence {r} has its {kind} from {ends[r]} to {ends[r + 1]}. Take the cumulative "
            "sum of the lengths."
        )
    if ends[-1] > length:
        raise ValueError(
            f"`{name}` must end at the number of packed {kind}, or before. It ends at {ends[-1]}, and there are "
            f"{length} {kind}. Pack those of all sequences."
        )
