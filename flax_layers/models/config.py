"""The configuration of a decoder: sizes, norms, and how each layer attends."""

import dataclasses

from flax_layers.rotary_scaling import LongRopeScaling, RotaryScaling


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer.

    Attributes:
        window: Number of keys that a query attends to, including its own position. None: all keys up to it.
        rotary_base: Base of the rotary embedding. None: no rotary embedding.
        rotary_scaling: Scaling of its frequencies for long contexts.
        rotary_dim: Number of features of a head that rotate. None: all.
    """

    window: int | None = None
    rotary_base: float | None = 10000.0
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder.

    Attributes:
        family: A name in `flax_layers.models.families`: the format of its checkpoints.
        vocabulary: Number of tokens.
        width: Size of the residual stream.
        mlp_width: Size of the hidden layer of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
        layers: The attention of each layer.
        max_positions: The longest context.
        activation: Activation of the gate of the MLP: a name in `flax_layers.models.block.ACTIVATIONS`.
        norm_epsilon: Epsilon of all RMS norms.
        norm_offset: Added to the scales of all RMS norms: 1 in Gemma.
        post_norms: Whether the outputs of attention and MLP are normalised before they are added to the stream.
        qk_norm: Whether query and key heads are normalised.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the output projection of attention has a bias.
        mlp_bias: Whether the projections of the MLP have biases.
        attention_scale: Factor of the scores. None: `head_dim ** -0.5`.
        attention_softcap: Soft cap of the scores. None: no cap.
        logits_softcap: Soft cap of the logits. None: no cap.
        embedding_scale: Factor of the embeddings.
        tied_embeddings: Whether the embeddings are also the output projection.
        initializer_range: Standard deviation of new embeddings and projections.
        bos_token_id: The token that begins a sequence.
        eos_token_ids: The tokens that end a sequence.
        pad_token_id: The token for padding.

    Example:
        >>> config = ModelConfig(
        ...     vocabulary=256, width=64, mlp_width=128, num_heads=4, num_kv_heads=2, head_dim=16,
        ...     layers=(LayerConfig(window=128), LayerConfig()), max_positions=1024,
        ... )
        >>> config.windows
        (128, None)
    """

    family: str = "llama"
    vocabulary: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def context_limits(self) -> tuple[int, ...]:
        """The longest sequence for each set of rotary factors: two for LongRoPE, else `max_positions` alone."""
        scalings = [layer.rotary_scaling for layer in self.layers]
        originals = {x.original_max_positions for x in scalings if isinstance(x, LongRopeScaling)}
        return (*sorted(x for x in originals if x < self.max_positions), self.max_positions)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in the order of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))
