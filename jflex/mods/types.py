"""Types of mods, as users write them: functions of scalars that JAX traces."""

from collections.abc import Callable
from typing import TypeAlias

from jax import Array
from jax.typing import ArrayLike

ScoreMod: TypeAlias = Callable[[Array, Array, Array, Array, Array], ArrayLike]
"""``(score, b, h, q_idx, kv_idx) -> score``: a float32 and four int32 scalars in, one floating-point scalar out."""

MaskMod: TypeAlias = Callable[[Array, Array, Array, Array], ArrayLike]
"""``(b, h, q_idx, kv_idx) -> bool``: four int32 scalars in, one boolean scalar out; True where the query attends."""
