"""The configuration of a decoder: sizes, norms, and how each layer attends and feeds forward."""

import dataclasses
from collections.abc import Mapping

from flax_layers.models.mlp import ACTIVATIONS
from jflex.rotary import LongRopeScaling, RotaryScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention (MLA), by the names of the arguments of `flax_layers.nnx.MultiHeadLatentAttention`."""

    latent_dim: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    query_latent_dim: int | None = None
    rotary_interleaved: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: each token goes through a few of many small MLPs.

    Attributes:
        number: Number of routed experts.
        width: Size of the hidden layer of an expert.
        per_token: Experts that a token goes through.
        shared: Experts that every token goes through; they form one MLP of the sum of their sizes.
        groups: Groups of consecutive experts.
        groups_per_token: Groups with the highest scores, from which the experts of a token are selected.
        scoring: `sigmoid`, as in DeepSeek-V3: with a learned correction that selects experts and weighs none; the score
            of a group is the sum of its two best. `softmax`, as in V2 and others: a group has the score of its best
            expert.
        normalized: Whether the scores of the selected experts are divided by their sum. With `softmax`, they are then a
            softmax over the selected experts alone.
        scale: Factor of the scores that weigh the outputs.
        use_bias: Whether the scores and the projections of experts have biases, as in gpt-oss.
        swiglu_limit: Bound of both factors of the gated hidden layer, as in gpt-oss: `swiglu_alpha` then says more of
            it. None: the layer is as in other MLPs.
        swiglu_alpha: Factor of the gate within its sigmoid. The other factor of the hidden layer is `up + 1`.
        float32_router: Whether the parameters of the scores are float32, whatever the dtype of others. Scores are
            computed in float32 in any case.

    Raises:
        ValueError: A size is out of range, or the scoring is not supported.
    """

    number: int
    width: int
    per_token: int
    shared: int = 1
    groups: int = 1
    groups_per_token: int = 1
    scoring: str = "sigmoid"
    normalized: bool = True
    scale: float = 1.0
    use_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    float32_router: bool = True

    def __post_init__(self) -> None:
        if self.scoring not in ("sigmoid", "softmax"):
            raise ValueError(f"`scoring` must be sigmoid or softmax. Got {self.scoring!r}. Use one of them.")
        _check_least(self, {"number": 1, "width": 1, "shared": 0, "groups": 1})
        smallest = 2 if self.scoring == "sigmoid" else 1
        if self.number % self.groups or self.number // self.groups < smallest:
            raise ValueError(
                f"`groups` must divide the {self.number} experts into groups of at least {smallest}. Got "
                f"{self.groups}. Use a smaller divisor."
            )
        if not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(
                f"`groups_per_token` must be from 1 to the {self.groups} groups. Got {self.groups_per_token}. "
                "Change it."
            )
        candidates = self.groups_per_token * (self.number // self.groups)
        if not 1 <= self.per_token <= candidates:
            raise ValueError(
                f"`per_token` must be from 1 to the {candidates} experts of {self.groups_per_token} groups. Got "
                f"{self.per_token}. Change it."
            )


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention and the MLP of one layer.

    Attributes:
        window: Number of keys that a query attends to, including its own position. None: all keys up to it.
        rotary_base: Base of the rotary embedding. None: no rotary embedding.
        rotary_scaling: Scaling of its frequencies for long contexts.
        rotary_dim: Number of features of a head that rotate. None: all.
        experts: A mixture of experts in place of the MLP.
    """

    window: int | None = None
    rotary_base: float | None = 10000.0
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"`window` must be at least 1, the query's own key. Got {self.window}. Change it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder.

    Attributes:
        family: A name in `flax_layers.models.checkpoint.families`: the format of its checkpoints.
        vocabulary: Number of tokens, special ones included.
        width: Size of the residual stream.
        mlp_width: Size of the hidden layer of the MLP.
        num_heads: Number of query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head; with `latent`, of a query and key.
        layers: The attention and the MLP of each layer.
        max_positions: The longest context, in tokens.
        activation: Activation of the gate of the MLP: a name in `flax_layers.models.mlp.ACTIVATIONS`.
        norm_epsilon: Epsilon of all RMS norms.
        norm_offset: Added to the scales of all RMS norms: 1 in Gemma.
        post_norms: Whether the outputs of attention and MLP are normalized before they are added to the stream.
        qk_norm: Whether query and key heads are normalized.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the output projection of attention has a bias.
        mlp_bias: Whether the projections of the MLP have biases.
        use_sinks: Whether each head has a sink, as in `flax_layers.nnx.FlexAttention`.
        latent: Latent attention (MLA) in place of keys and values of heads.
        attention_scale: Factor of the scores. None: `head_dim ** -0.5`, and with `latent` the default of its layer.
        attention_softcap: Soft cap of the scores. None: no cap.
        logits_softcap: Soft cap of the logits. None: no cap.
        embedding_scale: Factor of the embeddings.
        tied_embeddings: Whether the embeddings are also the output projection.
        initializer_range: Standard deviation of new embeddings and projections.
        bos_token_id: The token that begins a sequence.
        eos_token_ids: The tokens that end a sequence.
        pad_token_id: The token for padding.

    Raises:
        ValueError: A size is out of range, the numbers of heads do not fit, the activation is not supported, or a field
            does not go with `latent`.

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
    use_sinks: bool = False
    latent: LatentConfig | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        _check_least(self, dict.fromkeys(sizes, 1))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide `num_heads`, {self.num_heads}. Got {self.num_kv_heads}. Change one."
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}. Got {self.activation!r}.")
        if self.latent is None:
            return
        head_dim = self.latent.nope_head_dim + self.latent.rope_head_dim
        needed = {"num_kv_heads": self.num_heads, "head_dim": head_dim}
        needed |= dict.fromkeys(("qk_norm", "qkv_bias", "out_bias", "use_sinks"), False)
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"`{name}` must be {value} with `latent`, as latent attention has it. Got {getattr(self, name)}. "
                    "Change it."
                )
        if any(layer.rotary_dim is not None for layer in self.layers):
            raise ValueError(
                "`rotary_dim` must be None with `latent`, whose `rope_head_dim` is the size that rotates. Got another "
                "one. Leave it out."
            )

    @property
    def value_head_dim(self) -> int:
        """Size of the value of a head."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim

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


def _check_least(config: object, least: Mapping[str, int]) -> None:
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise ValueError(f"`{name}` must be at least {smallest}. Got {getattr(config, name)}. Change it.")
