"""Attention for Flax linen whose scores and sparsity are ordinary functions."""

import dataclasses
import functools
from typing import Any, overload

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.attention import core as attention_core
from flax_layers.attention.constant_mask import constant_mask
from flax_layers.attention.core import Call, KeyValueInputs
from flax_layers.attention.layer_mods import Mods
from flax_layers.attention.methods import AttentionMethods
from flax_layers.attention.selection import BlockSelection
from flax_layers.attention.vector_mods import VectorMods
from flax_layers.context_parallel import ContextParallel
from flax_layers.linen.mods import check_no_nnx_state, mods_with_parameters, with_parameters
from flax_layers.linen.rms_norm import RMSNorm
from flax_layers.rotary_scaling import RotaryScaling


class FlexAttention(AttentionMethods, linen.Module):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    The layer of `flax_layers.nnx.FlexAttention` for linen: the same arguments, shapes, caches and errors, and the same
    parameters, which `flax_layers.linen.params_from_nnx` and `params_to_nnx` convert.

    Pass mods and the mask to the constructor, or to a call, where they replace those of the constructor. `mask_mod` and
    `block_mask` are two forms of one mask: either replaces both.

    A mod may hold parameters, and they get gradients. It may be a callable linen module, which becomes a child of
    this layer if passed to the constructor; a function that captures what `self.param` returned to the caller; or a
    method of the module that calls the layer.

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Query heads.
        in_kv_features: Size of the last axis of `inputs_kv` in cross-attention. Default: `in_features`.
        num_kv_heads: Key and value heads, a divisor of `num_heads`; each is shared by `num_heads // num_kv_heads`
            adjacent query heads. Default: `num_heads`.
        head_dim: Size of a head. Default: `in_features // num_heads`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, applied to every scaled score.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query attends to the key; it skips no blocks.
        block_mask: A `jflex.BlockMask`: a mask that lists which blocks are computed, for inputs of its length; or a
            `BlockSelection`, with which each call makes one of the blocks that its queries select.
        scale: Factor of the raw scores. Default: `head_dim ** -0.5`.
        rotary_base: Base of the rotary position embedding (`flax_layers.functional.rotate`); the usual value is 10000.
            Default: no rotary embedding.
        rotary_scaling: Scaling of the frequencies for longer contexts, such as those of `flax_layers.rotary_scaling`.
        rotary_dim: Number of features of a head that rotate, from the first on. Default: all.
        qk_norm: Whether each query and key head is normalised (RMS, with learned scales) before the rotary embedding.
        qk_norm_options: Arguments of `flax_layers.linen.RMSNorm` for both, such as `{"epsilon": 1e-5}`.
        use_sinks: Whether each head has a sink (`jflex.with_sinks`): a logit in the denominator of its softmax, learned
            from 0 on.
        use_bias: Whether the four projections have biases.
        out_bias: Whether the output projection has a bias. Default: `use_bias`.
        dtype: Dtype of the computation; the parameters are cast to it. Default: the promoted dtype of inputs and
            parameters.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the four projections.
        bias_init: Initializer of their biases.
        dropout_rate: Probability with which a call drops each attention weight; every weight has its own draw.
            `decode` and `decode_paged` never drop.
        deterministic: Whether dropout is off. With a rate, it must be set here or in the call.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        config: Tile sizes and promises of its attention, not of its projections. Default: jflex chooses.

    Raises:
        ValueError: The numbers or sizes of heads do not fit, a ready mod was made for another number of heads, a mod
            holds parameters of NNX, or the rate is outside of [0, 1).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax_layers.linen import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        ... )
        >>> inputs = jnp.sin(jnp.arange(2 * 10 * 32.0)).reshape(2, 10, 32)
        >>> variables = layer.init(jax.random.key(0), inputs)
        >>> outputs = layer.apply(variables, inputs)

        A prompt of nine tokens, then one token, with a dense cache:

        >>> cache = layer.init_cache(batch_size=2, max_length=64)
        >>> prompt, cache = layer.apply(variables, inputs[:, :9], cache, method="decode")
        >>> token, cache = layer.apply(variables, inputs[:, 9:], cache, method="decode")
        >>> print(jnp.allclose(token, outputs[:, 9:], atol=1e-5), cache.lengths)
        True [10 10]
    """

    in_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    in_kv_features: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | BlockSelection | None = None
    scale: float | None = None
    rotary_base: float | None = None
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    qk_norm: bool = False
    qk_norm_options: dict[str, Any] | None = None
    use_sinks: bool = False
    use_bias: bool = False
    out_bias: bool | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = linen.initializers.lecun_normal()
    bias_init: Initializer = linen.initializers.zeros_init()
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    implementation: str | tuple[str, ...] | None = None
    config: jflex.Config | None = None

    def __post_init__(self) -> None:
        """Checks the arguments and fills in the sizes that have defaults."""
        self.num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        attention_core.check_heads(self.in_features, self.num_heads, self.num_kv_heads, self.head_dim)
        self.head_dim = self.in_features // self.num_heads if self.head_dim is None else self.head_dim
        for name, mod in (("score_mod", self.score_mod), ("mask_mod", self.mask_mod)):
            check_no_nnx_state(name, mod)
            jflex.check_mod_sizes(mod, heads=self.num_heads, caller="a layer")
        attention_core.check_dropout_rate(self.dropout_rate)
        self.block_mask = constant_mask(self.block_mask)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the projections."""
        assert self.num_kv_heads is not None  # both are set by `__post_init__`
        assert self.head_dim is not None
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        inits = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}
        linear = functools.partial(linen.Dense, **inits, **dtypes)
        self.query = linear(self.num_heads * self.head_dim, use_bias=self.use_bias)
        self.key = linear(self.num_kv_heads * self.head_dim, use_bias=self.use_bias)
        self.value = linear(self.num_kv_heads * self.head_dim, use_bias=self.use_bias)
        self.out = linear(self.in_features, use_bias=self.use_bias if self.out_bias is None else self.out_bias)
        norm = functools.partial(RMSNorm, self.head_dim, **dtypes, **(self.qk_norm_options or {}))
        self.query_norm = norm() if self.qk_norm else None
        self.key_norm = norm() if self.qk_norm else None
        zeros = linen.initializers.zeros_init()
        self.sinks = self.param("sinks", zeros, (self.num_heads,), self.param_dtype) if self.use_sinks else None

    # Return types, by `return_stats`.
    # fmt: off
    @overload
    def __call__(
        self, inputs: Float[Array, "*batch T features"], *, score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None, block_mask: jflex.BlockMask | BlockSelection | None = None,
        positions: Int[Array, "*#batch T"] | None = None, deterministic: bool | None = None,
        dropout_rng: Array | None = None, query_mod: jflex.VectorMod | None = None,
        key_mod: jflex.VectorMod | None = None, value_mod: jflex.VectorMod | None = None,
        output_mod: jflex.OutputMod | None = None, return_stats: tuple[()] = (),
        context: ContextParallel | None = None, inputs_kv: KeyValueInputs = None,
    ) -> Float[Array, "*batch T features"]: ...
    @overload
    def __call__(
        self, inputs: Float[Array, "*batch T features"], *, score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None, block_mask: jflex.BlockMask | BlockSelection | None = None,
        positions: Int[Array, "*#batch T"] | None = None, deterministic: bool | None = None,
        dropout_rng: Array | None = None, query_mod: jflex.VectorMod | None = None,
        key_mod: jflex.VectorMod | None = None, value_mod: jflex.VectorMod | None = None,
        output_mod: jflex.OutputMod | None = None, return_stats: tuple[jflex.Stat, ...],
        context: ContextParallel | None = None, inputs_kv: KeyValueInputs = None,
    ) -> tuple[Float[Array, "*batch T features"], jflex.AttentionStats]: ...
    # fmt: on
    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
        positions: Int[Array, "*#batch T"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        query_mod: jflex.VectorMod | None = None,
        key_mod: jflex.VectorMod | None = None,
        value_mod: jflex.VectorMod | None = None,
        output_mod: jflex.OutputMod | None = None,
        return_stats: tuple[jflex.Stat, ...] = (),
        context: ContextParallel | None = None,
        inputs_kv: KeyValueInputs = None,
    ) -> Float[Array, "*batch T features"] | tuple[Float[Array, "*batch T features"], jflex.AttentionStats]:
        """Attends within each sequence, or from it to `inputs_kv`.

        Args:
            inputs: One vector for each position. The leading axes are folded into one batch axis, the last of them
                fastest; `b` in mods, and the batch of a BlockMask, count along that axis.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces the constructor's mask, of either form.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ... `q_idx` and `kv_idx` in mods are
                always indices within the sequence.
            deterministic: Whether dropout is off. Pass it here or to the constructor, not to both.
            dropout_rng: Key of this call's dropout. Default: one from `self.make_rng("dropout")`.
            query_mod: `(query[D], b, h, q_idx) -> [D]`, as in `jflex.flex_attention`, after the normalisation and the
                rotary embedding of the layer, and so are the next three.
            key_mod: `(key[D], b, h_kv, kv_idx) -> [D]`.
            value_mod: `(value[D], b, h_kv, kv_idx) -> [D]`.
            output_mod: `(out[D], lse, b, h, q_idx) -> [D]`, before the output projection.
            return_stats: Also return these statistics of each row, as in `jflex.flex_attention`: "max" for QK-clip,
                say.
            context: How tokens are divided among devices, and in which order they are; see `ContextParallel`.
            inputs_kv: Keys and values are projected from these in place of `inputs`: cross-attention. Or the result of
                `project_kv`. Batch axes of size 1 are shared by all sequences. Keys rotate at 0, 1, 2, ...

        Returns:
            One vector for each position, in the dtype of the computation; or a pair of it and the
            `jflex.AttentionStats`, [*batch, Hq, T].

        Raises:
            ValueError: Dropout without `deterministic` or without a key, a BlockMask for another length or batch, and
                what `jflex.flex_attention` raises.
        """
        dropout_key = _dropout_key(self, deterministic, dropout_rng)
        mods = self._mods(score_mod, mask_mod, block_mask)
        vectors = self._vectors(VectorMods(query_mod, key_mod, value_mod, output_mod))
        call = Call(inputs_kv, positions, dropout_key, vectors, return_stats, context)
        return attention_core.attend(self, inputs, mods, call)

    # linen wraps only methods of the class's own namespace, not inherited ones.
    decode = AttentionMethods.decode
    decode_paged = AttentionMethods.decode_paged
    project_kv = AttentionMethods.project_kv

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        return mods_with_parameters(super()._mods(score_mod, mask_mod, block_mask))

    def _vectors(self, vectors: VectorMods) -> VectorMods:
        assert self.head_dim is not None  # set by `__post_init__`
        return VectorMods(*(with_parameters(*example) for example in vectors.examples(self.head_dim)))

    @linen.nowrap
    def _compute_dtype(self) -> Dtype:
        return self.dtype or self.param_dtype


def _dropout_key(layer: FlexAttention, deterministic: bool | None, dropout_rng: Array | None) -> Array | None:
    """The key of a call, None if it drops nothing."""
    if layer.dropout_rate == 0 or linen.merge_param("deterministic", layer.deterministic, deterministic):
        return None
    if dropout_rng is not None:
        return dropout_rng
    if not (layer.has_rng("dropout") or layer.has_rng("params")):  # linen falls back to that one
        raise ValueError(
            f"There is no key for dropout, and `dropout_rate` is {layer.dropout_rate}. Pass "
            '`rngs={"dropout": key}` to `apply`, `dropout_rng` to this call, or deterministic=True.'
        )
    return layer.make_rng("dropout")
