"""`flex_attention_varlen`: sequences of different lengths, packed in one axis without padding, with any mod.

Packed sequences are one long one whose mask lets tokens see their own sequence only. So this is `flex_attention` with
batch size 1 and a BlockMask, and its kernels, gradients and transformations are those of `flex_attention`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from jflex.attention import flex_attention
from jflex.block_lists import EMPTY, FULL, PARTIAL, block_count, demote_tails, lists_from_kinds
from jflex.block_mask import BlockMask, BlockSize, create_block_mask
from jflex.choice import Implementation
from jflex.config import Config
from jflex.mask_fit import uses_index
from jflex.mask_sizes import checked_block_size, checked_size
from jflex.mods import MaskMod
from jflex.paged.batch import is_known
from jflex.paged.batch_rules import Rule, check_rules
from jflex.paged.cache import check_int32
from jflex.problem import DTYPES, check_block_mask, describe_array
from jflex.trace import trace_mask_mod

Mod = Callable[..., Any] | None


# What is returned, by `return_lse`.
# fmt: off
@overload
def flex_attention_varlen(
    q: Array, k: Array, v: Array, *, cu_seqlens_q: Array, cu_seqlens_k: Array, score_mod: Mod = None,
    mask_mod: Mod = None, block_mask: BlockMask | None = None, scale: float | None = None,
    return_lse: Literal[False] = False, implementation: Implementation = None, config: Config | None = None,
) -> Array: ...
@overload
def flex_attention_varlen(
    q: Array, k: Array, v: Array, *, cu_seqlens_q: Array, cu_seqlens_k: Array, score_mod: Mod = None,
    mask_mod: Mod = None, block_mask: BlockMask | None = None, scale: float | None = None,
    return_lse: Literal[True], implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def flex_attention_varlen(
    q: Float[Array, "N Hq D"],
    k: Float[Array, "M Hkv D"],
    v: Float[Array, "M Hkv Dv"],
    *,
    cu_seqlens_q: Int32[Array, " R_and_1"],
    cu_seqlens_k: Int32[Array, " R_and_1"],
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
    config: Config | None = None,
) -> Float[Array, "N Hq Dv"] | tuple[Float[Array, "N Hq Dv"], Float[Array, "N Hq"]]:
    """Attention within each of R packed sequences, forward and backward, with any mod.

    The queries of sequence ``r`` are the rows ``cu_seqlens_q[r]`` up to ``cu_seqlens_q[r + 1]`` of `q`, its keys the
    rows ``cu_seqlens_k[r]`` up to ``cu_seqlens_k[r + 1]`` of `k` and `v`. Mods see the sequence as ``b``, and as
    ``q_idx`` and ``kv_idx`` positions within it, each counted from its own first token: what a mod says of a padded
    batch it says here. Where a sequence has fewer queries than keys and its queries are the last tokens, the mod must
    say so, as ``q_idx + kv_len[b] - q_len[b] >= kv_idx`` does.

    Tokens of different sequences never see each other. Sequences may be empty, of queries, of keys or of both. Rows
    from the last boundary on are padding: they see nothing and nobody sees them, their output is 0, their lse ``-inf``
    and their gradients 0, and what stands there, be it NaN, reaches neither an output nor a gradient. A NaN among the
    tokens of a sequence, however, may reach its neighbours in the same block.

    Boundaries are data: one program serves all of them, and there is no greatest length to state. Outside of ``jit``
    they are checked, which waits for them; traced ones are not, and if they are wrong so is the result.

    Args:
      q: Packed queries. Query head ``h`` attends to key head ``h // (Hq // Hkv)``.
      k: Packed keys.
      v: Packed values.
      cu_seqlens_q: Where the queries of each sequence begin, ascending from 0, and where the last ones end: int32.
      cu_seqlens_k: Likewise of keys, for as many sequences. For self-attention, the same array.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars, as in `flex_attention`.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, likewise. It is evaluated in every call, to skip what it hides: a
        training step of several layers had better make the BlockMask once.
      block_mask: In place of `mask_mod`, from `varlen_block_mask` with the same boundaries. It alone says who sees
        whom, so one that was made otherwise must keep the sequences apart itself.
      scale: Multiplies the raw scores; ``D ** -0.5`` for None.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      implementation: As in `flex_attention`.
      config: Likewise.

    Returns:
      The output in the dtype of `q`, or a pair of it and the lse, of which `AttentionState` makes a state.

    Raises:
      TypeError: An argument is of a wrong kind, or a mod takes or returns something else than it must.
      ValueError: Shapes disagree, or a boundary that is known is wrong.
      UnsupportedError: The named backends cannot run this call.

    References:
      Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels,
      arXiv:2412.05496, section 4 (BlockMask; document masking).

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 12, 4, 16))  # sequences of 3, 0 and 7 tokens, and padding
    >>> boundaries = jnp.array([0, 3, 3, 10])
    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> out = flex_attention_varlen(q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, mask_mod=causal)
    >>> bool(jnp.allclose(out[3], v[3])), out[10:].any().item()  # the first token of the last sequence, and padding
    (True, False)
    """
    q, k, v = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    _check_arrays(q, k, v)
    sizes = (q.shape[0], k.shape[0])
    packing = _Packing.of(cu_seqlens_q, cu_seqlens_k, *sizes)
    _check_block_mask(block_mask, mask_mod, q.shape[1], sizes)
    if block_mask is None:
        block_mask = _block_mask(packing, mask_mod, (128, 128), q.shape[1])
    score_mod = None if score_mod is None else _PackedScore(score_mod, packing)
    inside_q, inside_k = (
        jnp.arange(size, dtype=jnp.int32)[:, None, None] < boundaries[-1]
        for size, boundaries in zip(sizes, packing.boundaries, strict=True)
    )
    clear = lambda x, inside: jnp.where(jnp.broadcast_to(inside, x.shape), x, jnp.zeros_like(x))[None]
    out, lse = flex_attention(
        clear(q, inside_q), clear(k, inside_k), clear(v, inside_k), score_mod, block_mask, scale=scale,
        return_lse=True, implementation=implementation, config=config,
    )  # fmt: skip
    # Padding has these values already; but a cotangent that is NaN there must not meet a weight of 0.
    out = clear(out[0], inside_q)[0]
    if not return_lse:
        return out
    lse = lse[0].T
    return out, jnp.where(jnp.broadcast_to(inside_q[..., 0], lse.shape), lse, -jnp.inf)


def varlen_block_mask(
    cu_seqlens_q: Int32[Array, " R_and_1"],
    cu_seqlens_k: Int32[Array, " R_and_1"],
    num_queries: int,
    num_keys: int,
    *,
    mask_mod: MaskMod | None = None,
    H: int | None = None,
    block_size: BlockSize = 128,
) -> BlockMask:
    """Makes the BlockMask of packed sequences: for `flex_attention_varlen`, once for all layers of a training step.

    Without a `mask_mod` it follows from the boundaries alone, and no element is evaluated.

    Args:
      cu_seqlens_q: Boundaries of the queries, as in `flex_attention_varlen`; traced ones are welcome.
      cu_seqlens_k: Boundaries of the keys.
      num_queries: N, the number of packed rows of queries, padding included.
      num_keys: M, likewise of keys.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, of a sequence and positions within it.
      H: Query heads, where `mask_mod` uses ``h``; None for one mask that all share.
      block_size: Of queries and keys, one number or a pair.

    Returns:
      A mask of shape ``(1, H or 1, num_queries, num_keys)``, whose mask_mod takes packed indices.

    Raises:
      TypeError: An argument is of a wrong kind.
      ValueError: A size is negative, a boundary that is known is wrong, or `mask_mod` uses ``h`` while `H` is None.

    >>> boundaries = jnp.array([0, 100, 256, 512])
    >>> print(varlen_block_mask(boundaries, boundaries, 512, 512, block_size=64))
    BlockMask(shape=(1, 1, 512, 512), block_size=(64, 64), sparsity=56.25%)
    batch 0, head 0
    ██░░            |
    ░░░░░░░░        |
      ░░████        |
      ░░████        |
            ████████|
            ████████|
            ████████|
            ████████|
    """
    sizes = checked_size(num_queries, "num_queries"), checked_size(num_keys, "num_keys")
    packing = _Packing.of(cu_seqlens_q, cu_seqlens_k, *sizes)
    block_size = checked_block_size(block_size)
    if mask_mod is None:
        return _block_mask(packing, None, block_size, None)
    return create_block_mask(_PackedMask(mask_mod, packing), None, H, *sizes, block_size=block_size)


@dataclasses.dataclass(frozen=True, eq=False)
class _Packing:
    """Sequence and position of every packed row, of queries and of keys, and the boundaries that they are from.

    The sequence of padding is R for queries and -1 for keys: so nobody is in one with it. The arrays hold at least one
    row, since a mod is traced also where there are none.
    """

    boundaries: tuple[jax.Array, jax.Array]
    sizes: tuple[int, int]
    q_sequence: jax.Array
    q_position: jax.Array
    kv_sequence: jax.Array
    kv_position: jax.Array

    @classmethod
    def of(cls, cu_seqlens_q: Any, cu_seqlens_k: Any, num_queries: int, num_keys: int) -> _Packing:
        _check_boundaries(cu_seqlens_q, cu_seqlens_k, num_queries, num_keys)
        boundaries = (jnp.asarray(cu_seqlens_q), jnp.asarray(cu_seqlens_k))
        queries = _rows(boundaries[0], num_queries, padding=boundaries[0].shape[0] - 1)
        return cls(boundaries, (num_queries, num_keys), *queries, *_rows(boundaries[1], num_keys, padding=-1))

    def places(self, h: Any, n: Any, m: Any) -> tuple[Any, ...]:
        """b, h, q_idx, kv_idx of a packed query and key; where those are of different sequences, b is the query's."""
        last = max(self.boundaries[0].shape[0] - 2, 0)
        return jnp.minimum(self.q_sequence[n], last), h, self.q_position[n], self.kv_position[m]


@dataclasses.dataclass(frozen=True, eq=False)
class SameSequence:
    """The mask_mod of packed sequences alone: a query sees the keys of its own. Made by `varlen_block_mask`."""

    packing: _Packing

    def __call__(self, b: Any, h: Any, n: Any, m: Any) -> Any:
        """Evaluates the mask at one place."""
        return self.packing.q_sequence[n] == self.packing.kv_sequence[m]


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
    """A mod of a sequence and positions, made to take packed indices."""

    mod: Callable[..., Any]
    packing: _Packing

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.mod)  # so that messages name the user's function


class _PackedScore(_Packed):
    def __call__(self, score: Any, b: Any, h: Any, n: Any, m: Any) -> Any:
        return self.mod(score, *self.packing.places(h, n, m))


class _PackedMask(_Packed):
    def __call__(self, b: Any, h: Any, n: Any, m: Any) -> Any:
        return SameSequence(self.packing)(b, h, n, m) & self.mod(*self.packing.places(h, n, m))


def _rows(boundaries: jax.Array, size: int, padding: int) -> tuple[jax.Array, jax.Array]:
    """Sequence and position of each row."""
    row = jnp.arange(max(size, 1), dtype=jnp.int32)
    sequence = jnp.searchsorted(boundaries[1:], row, side="right").astype(jnp.int32)
    inside = sequence < boundaries.shape[0] - 1
    return jnp.where(inside, sequence, padding), jnp.where(inside, row - boundaries[sequence], 0)


def _block_mask(
    packing: _Packing, mask_mod: MaskMod | None, block_size: tuple[int, int], heads: int | None
) -> BlockMask:
    """The BlockMask; `heads` of its own only where the mask tells them apart."""
    if mask_mod is not None:
        packed = _PackedMask(mask_mod, packing)
        by_head = uses_index(trace_mask_mod(packed)[0], "h")
        return create_block_mask(packed, None, heads if by_head else None, *packing.sizes, block_size=block_size)
    traced, operands = trace_mask_mod(SameSequence(packing))
    kinds = demote_tails(_sequence_kinds(packing, block_size)[None, None], packing.sizes, block_size)
    return BlockMask(
        **lists_from_kinds(kinds)._asdict(), mask_operands=operands, traced=traced, seq_lengths=packing.sizes,
        block_size=block_size, lists_follow_mod=True,
    )  # fmt: skip


def _sequence_kinds(packing: _Packing, block_size: tuple[int, int]) -> Int8[Array, "R C"]:
    """Blocks by the boundaries alone: empty without a common sequence, full within a single one."""
    both = [boundaries[1:] > boundaries[:-1] for boundaries in packing.boundaries]
    # Sequences that have both queries and keys are numbered without gaps: those of a block are then an interval.
    number = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(both[0] & both[1], dtype=jnp.int32)])
    firsts, ends, begins, lasts = [], [], [], []
    sequences = (packing.q_sequence, packing.kv_sequence)
    for boundaries, size, block, sequence in zip(packing.boundaries, packing.sizes, block_size, sequences, strict=True):
        begin = jnp.arange(block_count(size, block), dtype=jnp.int32) * block
        end = jnp.minimum(begin + block, size)
        firsts.append(number[jnp.searchsorted(boundaries[1:], begin, side="right")])
        ends.append(number[jnp.searchsorted(boundaries[:-1], end, side="left")])
        begins.append(sequence[begin])
        lasts.append(sequence[end - 1])
    common = jnp.maximum(firsts[0][:, None], firsts[1][None]) < jnp.minimum(ends[0][:, None], ends[1][None])
    single = (begins[0] == lasts[0])[:, None] & (begins[1] == lasts[1])[None] & (begins[0][:, None] == begins[1][None])
    return jnp.where(single, FULL, jnp.where(common, PARTIAL, EMPTY)).astype(jnp.int8)


def _check_arrays(q: Any, k: Any, v: Any) -> None:
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
    got = "Got " + ", ".join(f"{name}: {describe_array(x)}" for name, x in named.items()) + "."
    for name, x in named.items():
        if len(x.shape) != 3:
            axes = {"q": "[N, Hq, D]", "k": "[M, Hkv, D]", "v": "[M, Hkv, Dv]"}[name]
            raise ValueError(
                f"`{name}` must have three axes, {axes}: the rows of all sequences, packed. {got} Reshape [B, T, H, D] "
                "to [B * T, H, D], with boundaries in steps of T."
            )
        if str(x.dtype) not in DTYPES:
            raise TypeError(f"`{name}` must be floating-point ({', '.join(DTYPES)}); it is {x.dtype}. Cast it. {got}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"`q`, `k` and `v` must have one dtype. Cast them to the one that you want. {got}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"`k` and `v` must have as many rows and heads, [M, Hkv]. {got}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"`q` and `k` must have one head size. {got}")
    if 0 in (q.shape[1], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"`q` must have a multiple of the {k.shape[1]} heads of `k`: grouped-query attention gives each key head "
            f"an equal share of the query heads. {got}"
        )
    if 0 in (q.shape[2], v.shape[2]):
        raise ValueError(f"Head sizes must be at least 1. {got}")


def _check_boundaries(cu_seqlens_q: Any, cu_seqlens_k: Any, num_queries: int, num_keys: int) -> None:
    named = (("cu_seqlens_q", cu_seqlens_q, num_queries, "q"), ("cu_seqlens_k", cu_seqlens_k, num_keys, "k"))
    for name, boundaries, _, _ in named:
        check_int32(name, boundaries, "boundaries")
        if boundaries.ndim != 1 or not boundaries.shape[0]:
            raise ValueError(
                f"`{name}` must be [R + 1]: where each of the R sequences begins, and where the last one ends. Got "
                f"{describe_array(boundaries)}. Without sequences, pass `jnp.zeros(1, jnp.int32)`."
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "`cu_seqlens_q` and `cu_seqlens_k` must be of the same sequences. Got "
            f"{cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1}. Give a sequence without queries or keys its "
            "place in both, by repeating a boundary."
        )
    for name, boundaries, size, rows in named:
        if is_known(boundaries):
            check_rules(_boundary_rules(name, np.asarray(boundaries), size, rows))


def _boundary_rules(name: str, boundaries: np.ndarray, size: int, rows: str) -> Iterator[Rule]:
    first, last, begins, ends = boundaries[:1], boundaries[-1:], boundaries[:-1], boundaries[1:]
    yield Rule(
        first != 0,
        f"`{name}` must begin with 0, where the first sequence begins. It begins with {{first}}. Put the sums of the "
        "lengths behind a 0.",
        {"first": first},
    )
    yield Rule(
        ends < begins,
        f"`{name}` must ascend. Sequence {{sequence}} goes from {{begin}} to {{end}}. Take the cumulative sum of the "
        "lengths.",
        {"sequence": np.arange(begins.shape[0]), "begin": begins, "end": ends},
    )
    yield Rule(
        last > size,
        f"`{name}` must end within the {size} rows of `{rows}`. It ends at {{last}}. Pack all sequences into `{rows}`.",
        {"last": last},
    )


def _check_block_mask(block_mask: Any, mask_mod: Any, heads: int, sizes: tuple[int, int]) -> None:
    if not isinstance(block_mask, BlockMask):
        hint = " A mask function goes to `mask_mod`, or through `varlen_block_mask`." if callable(block_mask) else ""
        if block_mask is not None:
            raise TypeError(f"`block_mask` must be a `BlockMask`. Got {type(block_mask).__name__}.{hint}")
        return
    if mask_mod is not None:
        raise ValueError(
            "`block_mask` and `mask_mod` cannot both be given: a BlockMask holds its own mask_mod. Give it to "
            "`varlen_block_mask(..., mask_mod=mask_mod)`."
        )
    if block_mask.seq_lengths != sizes:
        raise ValueError(
            f"`block_mask` is for {block_mask.seq_lengths[0]} queries and {block_mask.seq_lengths[1]} keys, `q` and "
            f"`k` have {sizes[0]} and {sizes[1]} packed rows. Make it with `varlen_block_mask(cu_seqlens_q, "
            f"cu_seqlens_k, {sizes[0]}, {sizes[1]})`."
        )
    check_block_mask(block_mask, None, 1, heads, *sizes)
