"""Score mods with learned parameters: biases that depend on the distance of query and key."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

import jflex
from jflex.scores import alibi, alibi_slopes, relative_bias


class _Bias(nnx.Module):
    def _score_mod(self) -> jflex.ScoreMod:
        raise NotImplementedError

    def __call__(
        self,
        score: Float[ArrayLike, ""],
        b: Int[ArrayLike, ""],
        h: Int[ArrayLike, ""],
        q_idx: Int[ArrayLike, ""],
        kv_idx: Int[ArrayLike, ""],
    ) -> Float[Array, ""]:
        """Returns the score with its bias."""
        return jnp.asarray(self._score_mod()(*map(jnp.asarray, (score, b, h, q_idx, kv_idx))))


class AlibiBias(_Bias):
    """ALiBi with learned slopes: a penalty linear in distance, with a slope for each head.

    Args:
        num_heads: Number of query heads.
        param_dtype: Dtype of the slopes.
        rngs: Not used: the initial slopes are as in the paper.

    References:
        Press et al. 2021, arXiv:2108.12409.

    Example:
        >>> bias = AlibiBias(4, rngs=nnx.Rngs(0))
        >>> float(bias(1.0, 0, 0, 4, 2))  # the first slope is 1/4, the key 2 behind
        0.5
    """

    def __init__(self, num_heads: int, *, param_dtype: Dtype = jnp.float32, rngs: nnx.Rngs):
        self.slopes = nnx.Param(alibi_slopes(num_heads).astype(param_dtype))

    def _score_mod(self) -> jflex.ScoreMod:
        return alibi(self.slopes[...])


class RelativeBias(_Bias):
    """A learned bias for each head and distance.

    Args:
        num_heads: Number of query heads.
        max_distance: Greater distances share the bias of this one.
        param_dtype: Dtype of the biases.
        rngs: Not used: the initial biases are 0.

    References:
        Shaw et al. 2018, arXiv:1803.02155.

    Example:
        >>> bias = RelativeBias(4, max_distance=128, rngs=nnx.Rngs(0))
        >>> bias.table.shape, float(bias(1.0, 0, 0, 4, 2))
        ((4, 257), 1.0)
    """

    def __init__(self, num_heads: int, max_distance: int = 128, *, param_dtype: Dtype = jnp.float32, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.zeros((num_heads, 2 * max_distance + 1), param_dtype))

    def _score_mod(self) -> jflex.ScoreMod:
        return relative_bias(self.table[...])
