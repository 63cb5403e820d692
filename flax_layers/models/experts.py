"""A mixture of experts, as in DeepSeek, Mixtral, Qwen3-MoE and gpt-oss, in plain JAX.

Every expert computes all tokens, one expert after the other, and those that did not select it as zeros. So the result
of a token does not depend on other tokens of the batch, tokens may be sharded in any way, and none is dropped. The
price is `number / per_token` times the work of the selected experts. `jax.lax.ragged_dot` would not be cheaper on a
GPU: XLA makes of it one GEMM over all experts for each pair of a token and a selected expert, `per_token` times the
work here, of an array `number` times as large (seen in programs that JAX 0.10.2 and 0.12.0 compile for an H200).

There is no expert parallelism, no loss that balances the experts, and nothing that updates the correction.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float, Float32

from flax_layers.models.config import ExpertsConfig
from flax_layers.models.mlp import MLP


class Router(nnx.Module):
    """Weighs the experts of each token, in float32, whatever the dtype of the model.

    Its parameters have the `param_dtype`, unless they are float32 in any case.
    """

    def __init__(
        self, width: int, config: ExpertsConfig, kernel_init: nnx.Initializer, param_dtype: Dtype, *, rngs: nnx.Rngs
    ):
        dtype = jnp.float32 if config.float32_router else param_dtype
        self.kernel = nnx.Param(kernel_init(rngs.params(), (width, config.number), dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros(config.number, dtype)) if config.use_bias else None)
        has_correction = config.scoring == "sigmoid"
        self.correction = nnx.data(nnx.Param(jnp.zeros(config.number, jnp.float32)) if has_correction else None)
        self.config = config

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float32[Array, "*batch number"]:
        """The weight of each expert; 0 for those that are not selected."""
        config = self.config
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(inputs.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits += jnp.broadcast_to(self.bias[...].astype(jnp.float32), logits.shape)
        if self.correction is None:
            scores = choice = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
            choice = scores + jnp.broadcast_to(self.correction[...], scores.shape)
        weights = jnp.where(selected(choice, config), scores, 0.0)
        if config.normalized:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return config.scale * weights


def selected(choice: Float[Array, "*batch number"], config: ExpertsConfig) -> Bool[Array, "*batch number"]:
    """The experts of each token: the best ones of its best groups, by the values of `choice`.

    Example:
        >>> config = ExpertsConfig(number=4, width=8, per_token=1, groups=2)
        >>> selected(jnp.array([0.1, 0.9, 0.6, 0.6]), config).astype(int).tolist()
        [0, 0, 1, 0]
    """
    grouped = choice.reshape(*choice.shape[:-1], config.groups, config.number // config.groups)
    group_scores = jnp.sum(jax.lax.top_k(grouped, 2 if config.scoring == "sigmoid" else 1)[0], axis=-1)
    in_best_groups = _best(group_scores, config.groups_per_token)[..., None]
    return _best(jnp.where(in_best_groups, grouped, -jnp.inf).reshape(choice.shape), config.per_token)


def _best(values: Float[Array, "*batch n"], count: int) -> Bool[Array, "*batch n"]:
    """True at the largest values; of equal ones at the first."""
    which = jax.lax.top_k(values, count)[1]
    return jnp.any(jax.nn.one_hot(which, values.shape[-1], dtype=bool), axis=-2)


class MixtureOfExperts(nnx.Module):
    """Routed experts, and one MLP of the shared ones.

    `linear` makes a projection with given input and output sizes, `use_bias` and `rngs`; the other initializer and
    dtype are for the router.

    Example:
        >>> config = ExpertsConfig(number=4, width=8, per_token=2)
        >>> init = nnx.initializers.normal(0.1)
        >>> experts = MixtureOfExperts(16, config, "silu", nnx.Linear, kernel_init=init, rngs=nnx.Rngs(0))
        >>> experts.experts.up.kernel.shape, experts(jnp.ones((2, 3, 16))).shape
        ((4, 16, 8), (2, 3, 16))
    """

    def __init__(
        self,
        width: int,
        config: ExpertsConfig,
        activation: str,
        linear: Callable[..., nnx.Module],
        *,
        kernel_init: nnx.Initializer,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        clamp = None if config.swiglu_limit is None else (config.swiglu_limit, config.swiglu_alpha)

        def mlp(hidden: int, rngs: nnx.Rngs) -> MLP:
            project = lambda *sizes: linear(*sizes, use_bias=config.use_bias, rngs=rngs)
            return MLP(width, hidden, activation, project, clamp)

        self.router = Router(width, config, kernel_init, param_dtype, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.number)
        self.experts = nnx.vmap(lambda key: mlp(config.width, nnx.Rngs(key)))(keys)
        self.shared = nnx.data(mlp(config.shared * config.width, rngs) if config.shared else None)

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Returns the output, which is added to the residual stream."""
        form, kernels = nnx.split(self.experts)

        def add(total: Array, expert: tuple[nnx.State, Array]) -> tuple[Array, None]:
            state, weight = expert[0], expert[1][..., None]
            out = nnx.merge(form, state)(jnp.where(weight == 0, 0, inputs))
            return total + weight * out.astype(jnp.float32), None

        # Of each expert, the backward pass keeps its weights alone: activations of all would take their number as much.
        body = jax.checkpoint(add, prevent_cse=False)
        weights = jnp.moveaxis(self.router(inputs), -1, 0)
        routed, _ = jax.lax.scan(body, jnp.zeros_like(inputs, jnp.float32), (kernels, weights))
        routed = routed.astype(inputs.dtype)
        return routed if self.shared is None else routed + self.shared(inputs)
