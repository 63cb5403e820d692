"""From a training mod to its inference form: queries that begin at some position, not at 0.

After FlexAttention (Dong et al., 2024, https://arxiv.org/abs/2412.05496, section 5.2 and figure 6).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex._check.arguments import known_values
from jflex.mods.array_sizes import Requirement, requirements_of, shifted
from jflex.mods.arrays import compile_time
from jflex.mods.compose import AndMasks, NotMask, OrMasks
from jflex.mods.reindex import Positions, ReindexedMod
from jflex.mods.trace import describe

Offset = Int32[Array, ""] | Int32[Array, " B"]
_INT32 = np.iinfo(np.int32)
_RULE = "`mod` must be a score_mod (score, b, h, q_idx, kv_idx) or a mask_mod (b, h, q_idx, kv_idx)"


def with_offset(
    mod: Callable[..., ArrayLike], offset: Int[ArrayLike, ""] | Int[ArrayLike, " B"]
) -> Callable[..., ArrayLike]:
    """Turns a mod for training into its form for inference, where the queries of a call continue a sequence.

    Query ``i`` of the call has the position ``offset + i``, and that is the ``q_idx`` that `mod` sees; ``kv_idx``
    is unchanged. To decode one token after ``n`` others, the offset is ``n``, and so is the position of its own key.

    The offset is an operand, even if it is a Python number: a new value compiles nothing. Composites of `and_masks`,
    `or_masks` and `not_mask` stay composites, of parts with an offset. Offsets of nested calls add up.

    Args:
      mod: A score_mod, ``(score, b, h, q_idx, kv_idx) -> score``, or a mask_mod, ``(b, h, q_idx, kv_idx) -> bool``;
        the number of its required arguments decides which. Or a query_mod or an output_mod, which have as many; not a
        key_mod or a value_mod, whose positions would move.
      offset: A position for the whole batch, or one for each sequence, indexed by ``b``: integers, also traced. Their
        number must be the batch size. Negative ones are allowed; a mod that indexes arrays with ``q_idx`` must then
        expect negative positions.

    Returns:
      A mod of the same role, for `flex_attention`, `create_block_mask` and everything else that takes mods. A
      `create_block_mask` with an offset for each sequence needs ``B``.

    Raises:
      TypeError: `mod` is not a function of five or four arguments, or `offset` is not an integer.
      ValueError: `offset` has more than one axis, or does not fit into int32.

    References:
      Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels,
      arXiv:2412.05496, figure 6.

    >>> import jflex
    >>> causal = with_offset(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, jnp.array([3, 1]))  # two sequences
    >>> jflex.create_mask(causal, 2, None, 1, 5)[:, 0, 0].astype(int).tolist()
    [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    """
    _check_mod(mod)
    return _continued(mod, *_checked_offset(offset))


@dataclasses.dataclass(frozen=True, eq=False)
class _Continued:
    """The positions of queries that begin at an offset."""

    offset: Offset

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        return Positions(b, h, q_idx + (self.offset[b] if self.offset.ndim else self.offset), kv_idx)


def _continued(mod: Callable[..., ArrayLike], offset: Offset, known: np.ndarray | None) -> Callable[..., ArrayLike]:
    if isinstance(mod, AndMasks | OrMasks):
        return type(mod)(tuple(_continued(part, offset, known) for part in mod.parts))
    if isinstance(mod, NotMask):
        return NotMask(_continued(mod.part, offset, known))

    return ReindexedMod(mod, _Continued(offset), _requirements(mod, offset, known))


def _requirements(mod: Callable[..., ArrayLike], offset: Offset, known: np.ndarray | None) -> tuple[Requirement, ...]:
    kept = requirements_of(mod)
    if any(needed.axis == "q_idx" for needed in kept):  # else do not wait for the value of the offset
        known = known_values(offset) if known is None else known
        kept = shifted(kept, "q_idx", None if known is None else int(known.max()))
    if not offset.ndim:
        return kept
    rule = "`offset` of `with_offset` must be one position, or hold one for each batch entry"
    return (Requirement("b", offset.shape[0], rule, "Pass offsets [{}]."), *kept)


def _check_mod(mod: object) -> None:
    """Raises TypeError unless the signature of a mod determines its role."""
    if not callable(mod):
        hint = ""
        if hasattr(mod, "kv_num_blocks"):
            hint = " Make the BlockMask anew: `create_block_mask(with_offset(mask_mod, offset), ...)`."
        raise TypeError(f"{_RULE}. Got {type(mod).__name__}.{hint}")
    try:
        signature = inspect.signature(mod)
    except ValueError:  # some builtins have none
        raise TypeError(f"{_RULE}. {describe(mod)} has no signature: wrap it in a `lambda`.") from None
    fitting = [arguments for arguments in (5, 4) if _binds(signature, arguments)]
    if len(fitting) == 1:
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in positional and p.default is p.empty for p in signature.parameters.values())
    if not fitting or required not in (4, 5):
        remedy = " Both would fit: name the arguments, in a `lambda`." if fitting else ""
        raise TypeError(f"{_RULE}. {describe(mod)} takes {signature}.{remedy}")


def _binds(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*range(arguments))
    except TypeError:
        return False
    return True


def _checked_offset(offset: object) -> tuple[Offset, np.ndarray | None]:
    """The offset as a JAX array, and its value if known."""
    rule = "`offset` must be an integer, or an integer array [B] with one for each sequence"
    if isinstance(offset, bool) or not isinstance(offset, int | np.integer | np.ndarray | jax.Array):
        raise TypeError(f"{rule}. Got {type(offset).__name__}. Wrap a list in `jnp.asarray`.")
    if isinstance(offset, np.ndarray | np.integer | int):
        offset = np.asarray(offset)
    got = f"Got {offset.dtype}[{','.join(map(str, offset.shape))}]."
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"{rule}. {got} Cast it with `.astype(jnp.int32)`.")
    if offset.ndim > 1:
        raise ValueError(f"{rule}. {got} Index or `jax.vmap` over the other axes.")
    if isinstance(offset, np.ndarray) and offset.size and not _INT32.min <= offset.min() <= offset.max() <= _INT32.max:
        raise ValueError(f"{rule}, within int32, like all positions. Got {offset.tolist()}.")
    if not offset.size:  # no sequences: the mod is traced, but there is no element to read
        return jnp.zeros((), jnp.int32), np.zeros((), np.int32)
    with compile_time(offset):
        return jnp.asarray(offset, jnp.int32), offset if isinstance(offset, np.ndarray) else None
