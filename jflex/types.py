"""Types of arguments: arrays, of JAX or of numpy, or their shapes; in both layouts."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Float32

AnyArray: TypeAlias = jax.Array | np.ndarray
"""An array; tracers are JAX arrays, too."""

ArrayOrShape: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""An array, or its shape and dtype, which suffice for `jflex.explain`."""

# Arrays of a dense call, in the layouts BTNH and BNTH. The batch size of key and value is B, or 1 if all share them.
Query: TypeAlias = Float[AnyArray, "B T Hq D"] | Float[AnyArray, "B Hq T D"]
Key: TypeAlias = Float[AnyArray, "#B S Hkv D"] | Float[AnyArray, "#B Hkv S D"]
Value: TypeAlias = Float[AnyArray, "#B S Hkv Dv"] | Float[AnyArray, "#B Hkv S Dv"]
Out: TypeAlias = Float[Array, "B T Hq Dv"] | Float[Array, "B Hq T Dv"]
Lse: TypeAlias = Float[Array, "B Hq T"] | Float[Array, "B T Hq"]  # [B, Hq, T] in both: "B T Hq" if BNTH named its axes
Weights: TypeAlias = Float32[Array, "B Hq R S"] | Float32[Array, "B T R Hkv"]  # [B, Hq, R, S] in both, likewise
