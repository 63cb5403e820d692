"""Self-attention for Flax NNX whose scores and sparsity are ordinary functions."""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int

import jflex
from flax_layers import functional

Mod = Callable[..., Any]
"""A `score_mod` or a `mask_mod`, as `jflex.flex_attention` takes them."""


class FlexAttention(nnx.Module):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    Mods and the mask may be given here, once for all calls, or to the call, which then replaces what was given here
    (`mask_mod` and `block_mask` are two forms of one thing: either replaces both).

    A mod may hold parameters, and they get gradients. Given to the constructor, such a mod is a callable `nnx.Module`,
    which becomes a child of this layer. Given to the call, it may also be a method of the module that owns this layer,
    or any function that captures what the caller holds. (Flax builds new modules inside `nnx.jit` and `nnx.grad`; a
    function kept from the constructor would go on reading the old parameters, so the constructor refuses it.)

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of `num_heads`; each is shared by `num_heads // num_kv_heads`
            neighbouring query heads. Default: `num_heads`.
        head_dim: Size of a head. Default: `in_features // num_heads`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, applied to every scaled score.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query sees the key; no block is skipped for it.
        block_mask: A `jflex.BlockMask`: a mask that says which blocks can be skipped, for inputs of its own length.
        scale: Factor of the raw scores. Default: `head_dim ** -0.5`.
        rotary_base: Base of the rotary position embedding (`flax_layers.functional.rotate`); the field's usual value is
            10000. Default: no rotary embedding.
        qk_norm: Whether each query and key head is normalised (RMS, with learned scales) before the rotary embedding,
            as in Henry et al. 2020, arXiv:2010.04245, with RMS in place of L2.
        use_bias: Whether the four projections have biases.
        dtype: Dtype of the computation; the parameters are cast to it. Default: what inputs and parameters promote to.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the four projections.
        bias_init: Initializer of their biases.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        rngs: Source of the keys of the initializers.

    Raises:
        ValueError: The head counts or sizes do not fit, or a mod given here holds parameters in a way that would cut
            them off from their gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_layers.nnx import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rngs=nnx.Rngs(0),
        ... )
        >>> layer(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        score_mod: Mod | None = None,
        mask_mod: Mod | None = None,
        block_mask: jflex.BlockMask | None = None,
        scale: float | None = None,
        rotary_base: float | None = None,
        qk_norm: bool = False,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008  a pure function, Flax's own habit
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(in_features, num_heads, num_kv_heads, head_dim)
        for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            _check_no_hidden_state(name, mod)
        head_dim = in_features // num_heads if head_dim is None else head_dim

        linear = functools.partial(
            nnx.Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        norm = functools.partial(nnx.RMSNorm, head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = linear(in_features, num_heads * head_dim)
        self.key = linear(in_features, num_kv_heads * head_dim)
        self.value = linear(in_features, num_kv_heads * head_dim)
        self.out = linear(num_heads * head_dim, in_features)
        self.query_norm = nnx.data(norm() if qk_norm else None)
        self.key_norm = nnx.data(norm() if qk_norm else None)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.block_mask = nnx.data(block_mask)
        self.scale = scale
        self.rotary_base = rotary_base
        self.implementation = implementation

    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        score_mod: Mod | None = None,
        mask_mod: Mod | None = None,
        block_mask: jflex.BlockMask | None = None,
        positions: Int[Array, "*#batch T"] | None = None,
    ) -> Float[Array, "*batch T features"]:
        """Attends within each sequence.

        Args:
            inputs: One vector for each position. The leading axes are folded into one batch axis, the last of them
                fastest; `b` in mods, and the batch of a BlockMask, count along that axis.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces the constructor's mask, of either form.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ... `q_idx` and `kv_idx` in mods count
                places in the sequence, whatever is given here.

        Returns:
            One vector for each position, in the dtype of the computation.

        Raises:
            ValueError: A BlockMask for another length or batch, and what else `jflex.flex_attention` raises.
        """
        if score_mod is None:
            score_mod = self.score_mod
        if mask_mod is None and block_mask is None:
            mask_mod, block_mask = self.mask_mod, self.block_mask

        batch, length = inputs.shape[:-2], inputs.shape[-2]
        positions = jnp.arange(length) if positions is None else positions
        query, key, value = map(_fold_batch, self._project(inputs, positions))
        attended = jflex.flex_attention(
            query,
            key,
            value,
            score_mod,
            block_mask,
            mask_mod=mask_mod,
            scale=self.scale,
            implementation=self.implementation,
        )
        attended = functional.merge_heads(attended)
        return self.out(attended.reshape(*batch, length, self.out.in_features))

    def _project(self, inputs: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, split into heads, normalised and rotated."""
        query = functional.split_heads(self.query(inputs), self.num_heads)
        key = functional.split_heads(self.key(inputs), self.num_kv_heads)
        value = functional.split_heads(self.value(inputs), self.num_kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary_base is not None:
            query = functional.rotate(query, positions, self.rotary_base)
            key = functional.rotate(key, positions, self.rotary_base)
        return query, key, value


def _fold_batch(heads: Float[Array, "*batch T H D"]) -> Float[Array, "B T H D"]:
    return heads.reshape(math.prod(heads.shape[:-3]), *heads.shape[-3:])


def _check_heads(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"`num_kv_heads` must divide `num_heads`, so that every key head serves as many query heads; got num_heads="
            f"{num_heads}, num_kv_heads={num_kv_heads}."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"Without `head_dim`, `num_heads` must divide `in_features`; got in_features={in_features}, num_heads="
            f"{num_heads}. Pass `head_dim`, or change one of the two."
        )


def _check_no_hidden_state(name: str, mod: Mod | None) -> None:
    """Refuses a mod that would read its parameters behind the back of Flax's transformations."""
    if mod is None or isinstance(mod, nnx.Module):
        return
    for value in _captures(mod):
        if isinstance(value, nnx.Module | nnx.Variable):
            raise ValueError(
                f"`{name}` holds a {type(value).__name__}, which a layer cannot keep from its constructor: inside "
                "nnx.jit and nnx.grad the function would read the parameters of the old module, and they would get no "
                f"gradients. Pass it to the call, `layer(inputs, {name}=...)`, or make it a callable nnx.Module."
            )


def _captures(mod: Mod) -> Iterator[Any]:
    """What a function, a method or a `functools.partial` of one reaches: owner, arguments, closure, and so on down."""
    empty_cell = types.CellType()
    pending: list[Any] = [mod]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, tuple | list):
            pending += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # what `jflex.and_masks` returns is one
            pending += vars(value).values()
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            pending += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            # A variable that is assigned after the function was made has an empty cell so far.
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != empty_cell]
            pending += value.__defaults__ or ()
