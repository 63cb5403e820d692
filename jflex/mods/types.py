"""Types of mods, as users write them: functions of scalars that JAX traces."""

from collections.abc import Callable
from typing import Any, TypeAlias

from jax import Array
from jax.typing import ArrayLike

ScoreMod: TypeAlias = Callable[[Array, Array, Array, Array, Array], ArrayLike]
"""``(score, b, h, q_idx, kv_idx) -> score``: a float32 and four int32 scalars in, one floating-point scalar out."""

MaskMod: TypeAlias = Callable[[Array, Array, Array, Array], ArrayLike]
"""``(b, h, q_idx, kv_idx) -> bool``: four int32 scalars in, one boolean scalar out; True where the query attends."""

VectorMod: TypeAlias = Callable[[Array, Array, Array, Array], ArrayLike]
"""``(vector, b, h, idx) -> vector``: one query, key or value in float32, and where it is: int32 scalars."""

OutputMod: TypeAlias = Callable[[Array, Any, Array, Array, Array], ArrayLike]
"""``(out, lse, b, h, q_idx) -> out``: one output vector and its lse in float32, and where it is: int32 scalars."""
