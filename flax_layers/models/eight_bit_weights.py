"""Weights of eight bits, for inference: half the bytes that a decoding step reads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.core import Tracer
from jaxtyping import Array, Float

from flax_layers.models.decoder import Decoder
from flax_layers.models.fused import checked_linear
from flax_layers.nnx import MultiHeadLatentAttention

WEIGHT_DTYPES = ("float8_e4m3fn",)

ROUNDED_ROWS = 128
"""Number of rows from which inputs are rounded too, where GEMMs of eight bits on both sides are fast.

Of 4096 x 28672 weights, us of all kernels with one side of eight bits, with both, and in bfloat16 (H200, JAX 0.11.2):
64 rows 44, 45, 64; 128 rows 60, 49, 64; 256 rows 124, 66, 96; 1024 rows 422, 207, 306.
"""


class EightBitLinear(nnx.Module):
    """A projection whose kernel has eight bits, with a scale for each output.

    For a few rows, the product takes the kernel as it is widened, and its accumulated result times the scales: XLA does
    all three in one GEMM, so that memory gives eight bits a weight. From `ROUNDED_ROWS` on, and on a GPU from Ada on,
    each row of the inputs is rounded like an output of the kernel.

    The kernel is transposed, `[outputs, inputs]`: one row and 4096 x 28672 weights take 46 us so, 64 as `[inputs,
    outputs]`, and 63 in bfloat16 (H200, JAX 0.11.2).

    Args:
        linear: The projection whose kernel is rounded. Experts are stacked along leading axes.
        dtype: A dtype of eight bits, for the kernel.
    """

    def __init__(self, linear: nnx.Linear, dtype: Dtype):
        wide = linear.kernel[...]
        devices = () if isinstance(wide, Tracer) else wide.devices()
        kinds = [(x.device_kind, getattr(x, "compute_capability", "")) for x in devices]
        self.rounds_inputs = any(_multiplies_float8(*kind) for kind in kinds)
        kernel, scale = _rounded(jnp.swapaxes(wide, -1, -2), jnp.dtype(dtype))
        self.kernel, self.scale, self.bias = nnx.Param(kernel), nnx.Param(scale), linear.bias
        self.dtype: Dtype = linear.dtype or linear.param_dtype
        self.param_dtype, self.out_features = linear.param_dtype, linear.out_features

    def __call__(self, inputs: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Returns the projection."""
        inputs, kernel = inputs.astype(self.dtype), self.kernel[...]
        contraction, along_outputs = (((inputs.ndim - 1,), (1,)), ((), ())), (*[1] * (inputs.ndim - 1), -1)
        scale = self.scale[...].reshape(along_outputs)
        product_dtype: Dtype = jnp.float32
        if self.rounds_inputs and inputs.size >= ROUNDED_ROWS * inputs.shape[-1]:
            inputs, row_scale = _rounded(inputs, kernel.dtype)
            scale *= row_scale[..., None]
            product_dtype = jnp.bfloat16 if self.dtype == jnp.bfloat16 else jnp.float32
        else:
            kernel = kernel.astype(self.dtype)
        products = jax.lax.dot_general(inputs, kernel, contraction, preferred_element_type=product_dtype)
        products = products.astype(jnp.float32) * scale
        if self.bias is not None:
            products += self.bias[...].astype(jnp.float32).reshape(along_outputs)
        return products.astype(self.dtype)


def _multiplies_float8(device_kind: str, compute_capability: str) -> bool:
    """True for an NVIDIA GPU from Ada on; for others XLA widens both sides."""
    return device_kind.startswith("NVIDIA") and float(compute_capability) >= 8.9


@functools.partial(jax.jit, static_argnames="dtype")
def _rounded(rows: Float[Array, "*batch size"], dtype: Dtype) -> tuple[Array, Array]:
    """Rows in a dtype of eight bits, and the scale of each, by its largest element."""
    wide = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / jnp.finfo(dtype).max.astype(jnp.float32)
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # for zeros too; a smaller one may count as 0
    return (wide / scale[..., None]).astype(dtype), scale


def check_weight_dtype(name: str | None) -> None:
    """Raises ValueError for a name that is neither None nor one of `WEIGHT_DTYPES`."""
    if name is not None and name not in WEIGHT_DTYPES:
        raise ValueError(
            f"`dtype` of weights must be one of {', '.join(WEIGHT_DTYPES)}, or None for the dtype of the model. Got "
            f"{name!r}."
        )


def quantize_weights(model: Decoder, dtype: str = "float8_e4m3fn") -> None:
    """Rounds the projections of all layers to eight bits, with a scale for each output.

    In place, for inference on one device, one projection after the other: the old kernels are dropped. Embeddings, the
    output projection of the model, routers, norms and biases stay as they are, as in checkpoints of eight bits; so
    does the up-projection of latent attention, which decoding absorbs into queries.

    On GPUs from Ada on, a call with 128 tokens or more, padding included, rounds the inputs of the projections too,
    each token with a scale of its own: GEMMs then run in FP8. So logits depend on the number of tokens in a call.

    Args:
        model: Its projections may be fused; see `fuse_projections`.
        dtype: Dtype of the kernels, one of `WEIGHT_DTYPES`.

    Raises:
        ValueError: There is no such dtype, the model is on several devices, or one of the projections is no
            `nnx.Linear`, because it has eight bits already, or an adapter.

    Example:
        >>> from flax_layers.models import LayerConfig, ModelConfig
        >>> config = ModelConfig(
        ...     vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8,
        ...     layers=(LayerConfig(),), max_positions=64,
        ... )
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> quantize_weights(model)
        >>> up = model.blocks[0].mlp.up
        >>> print(up.kernel[...].dtype, up.scale.shape)
        float8_e4m3fn (32,)
    """
    check_weight_dtype(dtype)
    places: dict[nnx.Linear, list[tuple[nnx.Module, str]]] = {}  # fused projections have several
    for _, owner in nnx.iter_modules(model.blocks):
        for name, part in vars(owner).items():
            if not isinstance(part, (nnx.Linear, nnx.LoRALinear, EightBitLinear)):
                continue
            if not (name == "up" and isinstance(owner, MultiHeadLatentAttention)):
                linear = checked_linear(name, part, "quantize_weights")
                places.setdefault(linear, []).append((owner, name))
    while places:  # a kernel is dropped before the next one is rounded
        linear, owners = places.popitem()
        projection = EightBitLinear(linear, dtype)
        for owner, name in owners:
            setattr(owner, name, projection)


def is_quantized(model: nnx.Module) -> bool:
    """Tests whether `quantize_weights` was called."""
    return any(isinstance(module, EightBitLinear) for _, module in nnx.iter_modules(model))
