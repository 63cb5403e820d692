"""`rope`: the rotary position embedding as a vector mod."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflex._check.arguments import describe_array
from jflex.mods.array_sizes import Requirement, SizedMod, for_positions
from jflex.rotary.rotation import angles, checked_rotary_dim, rotated
from jflex.rotary.scaling import Length, LongRopeScaling, RotaryScaling
from jflex.types import AnyArray


@dataclasses.dataclass(frozen=True, eq=False)
class Rope(SizedMod):
    """A `query_mod` and `key_mod` that rotates each vector by its position; `jflex.rope` makes it.

    Attributes:
      base: As in `rope`.
    """

    base: float
    scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    positions: Array | None = None
    length: Length | None = None
    is_far: bool = False

    def requirements(self) -> tuple[Requirement, ...]:
        """`positions` hold one for each index of the call, and those of a batch one row for each entry."""
        if self.positions is None:
            return ()
        rows = self.positions.shape[:-1]
        rule = "`positions` of `rope` must hold one position for each {}"
        each = for_positions(self.positions.shape[-1], rule, "Pass {} positions, or use a rope without them.")
        batch = "`positions` of `rope` must be [T], or have a row for each batch entry"
        return (*each, *(Requirement("b", size, batch, "Pass positions [{}, T].") for size in rows if size > 1))

    def __call__(self, vector: Float[Array, " D"], b: jax.Array, h: jax.Array, idx: jax.Array) -> Float[Array, " D"]:
        """Rotates one vector, in its dtype."""
        position = jnp.asarray(idx)
        if self.positions is not None:
            rows = self.positions.reshape(-1, self.positions.shape[-1])
            position = rows[b if rows.shape[0] > 1 else 0, idx]
        rotary_dim = checked_rotary_dim(self.rotary_dim, vector.shape[-1])
        length = 0 if self.length is None else self.length
        by = angles(position, rotary_dim, self.base, self.scaling, length, dtype=vector.dtype, is_far=self.is_far)
        turned = rotated(vector[:rotary_dim], by, interleaved=self.interleaved)
        return jnp.concatenate([turned, vector[rotary_dim:]])


def rope(
    base: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    positions: Int[AnyArray, " T"] | Int[AnyArray, "B T"] | None = None,
    length: Length | None = None,
    is_far: bool = False,
) -> Rope:
    """Makes a `query_mod` and `key_mod` that rotates pairs of features by angles that grow with the position.

    Pass it as both. The score of a rotated query and a rotated key depends only on the difference of their positions.
    These are the indices of the call: within its sequence for a packed token, absolute in a paged cache. `positions`
    replaces them.

    Args:
      base: Pair ``i`` rotates by ``base ** (-2 * i / D)`` radians per position.
      scaling: Scaling of these frequencies for longer contexts: `jflex.rotary.LinearScaling`, `Llama3Scaling`,
        `YarnScaling`, `LongRopeScaling`.
      rotary_dim: Features that rotate, from the first on; replaces ``D`` above. None for all.
      interleaved: Whether features ``2 * i`` and ``2 * i + 1`` are a pair (GPT-J, and Llama's own code), and not ``i``
        of the first half and ``i`` of the second half (GPT-NeoX, and Transformers).
      positions: The position of each index, integers [T] or, different in each batch entry, [B, T]; a call may have
        fewer indices. Queries and keys that have different ones need a mod each. None: the index is the position.
      length: Length of the sequences, which LongRoPE needs.
      is_far: Whether to compensate what float32 angles lose by rounding; see `jflex.rotary.rotate`.

    Returns:
      The mod: ``(vector[D], b, h, idx) -> [D]``.

    Raises:
      TypeError: `positions` are not an array of integers.
      ValueError: `positions` have other axes, or LongRoPE has no `length`.

    References:
      Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

    >>> import jax, jax.numpy as jnp, jflex
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 32))
    >>> mod, far = jflex.rope(10000.0), jflex.rope(10000.0, positions=1000 + jnp.arange(64))
    >>> near, moved = (jflex.flex_attention(q, k, v, query_mod=x, key_mod=x) for x in (mod, far))
    >>> bool(jnp.allclose(near, moved, atol=1e-3))
    True
    """
    if isinstance(scaling, LongRopeScaling) and length is None:
        raise ValueError(
            "`length` must be passed with a `LongRopeScaling`, whose factors depend on the length of the sequences. "
            "Got None. With a cache, pass its capacity."
        )
    return Rope(base, scaling, rotary_dim, interleaved, _checked_positions(positions), length, is_far)


def _checked_positions(positions: AnyArray | None) -> jax.Array | None:
    rule = "`positions` must be integers [T], or [B, T]"
    if positions is None:
        return None
    if not (hasattr(positions, "shape") and hasattr(positions, "dtype")):
        raise TypeError(f"{rule}. Got {type(positions).__name__}. Make an array of it, with `jnp.asarray`.")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{rule}. Got {describe_array(positions)}. Cast it with `.astype(jnp.int32)`.")
    if len(positions.shape) not in (1, 2):
        raise ValueError(f"{rule}. Got {describe_array(positions)}. Reshape it.")
    return jnp.asarray(positions)
