"""Converts `config.json` of Hugging Face checkpoints to a `ModelConfig` and back.

Rotary parameters are read in both forms: `rope_theta` and `rope_scaling` of Transformers 4, `rope_parameters` of 5.
They are written in the first, which both versions read.
"""

import math
from collections.abc import Mapping
from typing import Any

from flax_layers.models import config_deepseek
from flax_layers.models.config import LayerConfig, ModelConfig
from flax_layers.models.families import FAMILIES, REFUSED, Family, family_named
from flax_layers.models.fp8_files import read_quantization
from flax_layers.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, RotaryScaling, YarnScaling

Raw = Mapping[str, Any]
"""The contents of `config.json`."""

FULL, SLIDING = "full_attention", "sliding_attention"

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "default_activation": "silu",
}
_ORIGINAL = "original_max_position_embeddings"
_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_config(raw: Raw, max_positions: int | None = None) -> ModelConfig:
    """Converts the contents of a `config.json`.

    Args:
        raw: The contents.
        max_positions: The longest context that will be used. Default: that of the file.

    Returns:
        The configuration.

    Raises:
        ValueError: A size is missing, or the decoder does not support the model.

    Example:
        >>> config = read_config({
        ...     "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500000.0,
        ... })
        >>> config.head_dim, config.layers[0]
        (16, LayerConfig(window=None, rotary_base=500000.0, rotary_scaling=None, rotary_dim=None, experts=None))
    """
    family = family_of(raw)
    _check_keys(raw)
    raw = {**_DEFAULTS, **family.defaults, **raw}
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    positions = max_positions or raw["max_position_embeddings"]
    bias, eos = bool(raw.get("attention_bias")), raw.get("eos_token_id")
    fields = {
        "vocabulary": raw["vocab_size"],
        "width": raw["hidden_size"],
        "mlp_width": raw["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "layers": tuple(_layer(raw, kind, head_dim, positions) for kind in layer_kinds(family, raw)),
        "max_positions": positions,
        "activation": raw.get("hidden_activation") or raw.get("hidden_act") or raw["default_activation"],
        "norm_epsilon": raw["rms_norm_eps"],
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias")),
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logits_softcap": raw.get("final_logit_softcapping"),
        "tied_embeddings": bool(raw["tie_word_embeddings"]),
        "initializer_range": raw["initializer_range"],
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "pad_token_id": raw.get("pad_token_id"),
    }
    if family.gemma:
        fields["attention_scale"] = raw["query_pre_attn_scalar"] ** -0.5
        fields["embedding_scale"] = math.sqrt(raw["hidden_size"])
    if family.deepseek:
        fields |= config_deepseek.read_fields(family.name, raw, fields["layers"])
    return ModelConfig(family=family.name, **{**fields, **family.traits})


def _check_keys(raw: Raw) -> None:
    missing = [key for key in _REQUIRED if raw.get(key) is None]
    if missing:
        raise ValueError(f"`config.json` lacks {', '.join(missing)}.")
    if raw.get("use_bidirectional_attention"):
        raise ValueError(
            "`config.json` sets `use_bidirectional_attention`, which the decoder does not support. Got "
            f"{raw['use_bidirectional_attention']!r}."
        )
    read_quantization(raw)  # refuses what is not read; what is, is no part of the model


def family_of(raw: Raw) -> Family:
    """Looks up the family of a checkpoint by `architectures`.

    Args:
        raw: The contents of `config.json`.

    Returns:
        The family.

    Raises:
        ValueError: No architecture is supported.

    Example:
        >>> family_of({"architectures": ["GptOssForCausalLM"]})
        Traceback (most recent call last):
        ValueError: GptOssForCausalLM is not supported: it has attention sinks, ...
    """
    names = raw.get("architectures") or ()
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    for name in names:
        if name in REFUSED:
            raise ValueError(f"{name} is not supported: {REFUSED[name]}.")
    raise ValueError(
        f"`architectures` of `config.json` must name one of {', '.join(FAMILIES)}. Got {list(names)}, with "
        f"`model_type` {raw.get('model_type')!r}."
    )


def layer_kinds(family: Family, raw: Raw) -> list[str]:
    """Whether each layer attends to all keys or to a window.

    Args:
        family: The family of the model.
        raw: The contents of `config.json`, with the defaults of the family.

    Returns:
        `full_attention` or `sliding_attention` for each layer.

    Raises:
        ValueError: A layer is of another kind, or the number of kinds is not the number of layers.
    """
    layers, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    if family.name == "llama" or family.deepseek:
        return [FULL] * layers
    if family.name in ("mistral", "phi3"):
        return [FULL if raw.get("sliding_window") is None else SLIDING] * layers
    if family.name in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        return [FULL] * layers
    if kinds is None and family.name in ("qwen2", "qwen3"):
        return [SLIDING if layer >= raw["max_window_layers"] else FULL for layer in range(layers)]
    if kinds is None:
        return [SLIDING if (layer + 1) % raw["sliding_window_pattern"] else FULL for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(
            f"`layer_types` of `config.json` must hold {FULL} or {SLIDING} for each of the {layers} layers. Got "
            f"{kinds}."
        )
    return list(kinds)


def _layer(raw: Raw, kind: str, head_dim: int, max_positions: int) -> LayerConfig:
    """The configuration of a layer of a kind."""
    rope = _rope(raw, kind)
    fraction = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    return LayerConfig(
        window=raw["sliding_window"] if kind == SLIDING else None,
        rotary_base=float(rope["rope_theta"]),
        rotary_scaling=_scaling(raw, rope, max_positions),
        rotary_dim=None if fraction == 1.0 else int(head_dim * fraction),
    )


def _rope(raw: Raw, kind: str) -> Raw:
    """The rotary parameters of a kind of layer, in the form of Transformers 5."""
    rope = raw.get("rope_parameters")
    if rope is not None:
        return {"rope_theta": raw["rope_theta"], **rope.get(kind, rope)}
    if kind == SLIDING and "rope_local_base_freq" in raw:
        return {"rope_theta": raw["rope_local_base_freq"]}
    return {"rope_theta": raw["rope_theta"], **(raw.get("rope_scaling") or {})}


def _scaling(raw: Raw, rope: Raw, max_positions: int) -> RotaryScaling | None:
    """The rotary scaling of a layer."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    rope = {**rope, _ORIGINAL: rope.get(_ORIGINAL) or raw.get(_ORIGINAL)}
    missing = [key for key in _SCALING_KEYS.get(kind, ()) if rope.get(key) is None]
    if missing:
        raise ValueError(f"The {kind} rotary scaling of `config.json` lacks {', '.join(missing)}.")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope[_ORIGINAL])
    if kind == "longrope":
        original = rope[_ORIGINAL]
        factor = rope.get("factor") or raw["max_position_embeddings"] / original
        magnitude = rope.get("attention_factor")
        if magnitude is None:
            magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = tuple(rope["short_factor"]), tuple(rope["long_factor"])
        return LongRopeScaling(short, long, original, max_positions, magnitude)
    if kind == "yarn":
        return _yarn(raw, rope)
    raise ValueError(
        f"The rotary scaling of `config.json` must be default, linear, llama3, longrope or yarn. Got {kind!r}. Remove "
        "it to use the model within its original context."
    )


def _yarn(raw: Raw, rope: Raw) -> YarnScaling:
    """As in Transformers, the original context is that of the file by default, and a null is a default."""
    original = rope[_ORIGINAL] or raw["max_position_embeddings"]
    factor = rope.get("factor")
    if factor is None and rope[_ORIGINAL] is None:
        raise ValueError(f"The yarn rotary scaling of `config.json` lacks factor, or {_ORIGINAL}.")
    return YarnScaling(
        raw["max_position_embeddings"] / original if factor is None else factor,
        original,
        rope.get("beta_fast") or YarnScaling.beta_fast,
        rope.get("beta_slow") or YarnScaling.beta_slow,
        rope.get("attention_factor"),
        rope.get("mscale"),
        rope.get("mscale_all_dim"),
        truncate=rope.get("truncate", True),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Converts a configuration to the contents of a `config.json`.

    Args:
        config: The configuration.

    Returns:
        The contents, as `transformers` and `read_config` read them.

    Raises:
        ValueError: The format of the family cannot describe the model.

    Example:
        >>> config = ModelConfig(
        ...     vocabulary=256, width=64, mlp_width=128, num_heads=4, num_kv_heads=2, head_dim=16,
        ...     layers=(LayerConfig(),) * 2, max_positions=1024,
        ... )
        >>> read_config(write_config(config)) == config
        True
    """
    family = family_named(config.family)
    if any(layer.rotary_base is None for layer in config.layers):
        raise ValueError(
            f"`config.json` of the family {family.name} cannot describe a layer without a rotary embedding, "
            "`rotary_base=None`. Save the model with orbax."
        )
    full = [layer for layer in config.layers if layer.window is None] or list(config.layers)
    eos = config.eos_token_ids
    raw = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_activation" if family.gemma else "hidden_act": config.activation,
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        **_written_rope(full[0], config.head_dim),
        **_written_windows(family, config),
    }
    if family.gemma:
        raw["query_pre_attn_scalar"] = _whole((config.attention_scale or config.head_dim**-0.5) ** -2)
        raw["attn_logit_softcapping"] = config.attention_softcap
        raw["final_logit_softcapping"] = config.logits_softcap
    if family.deepseek:
        raw |= config_deepseek.written_fields(config)
    if read_config(raw) != config:
        differ = [key for key, value in vars(read_config(raw)).items() if value != getattr(config, key)]
        raise ValueError(
            f"`config.json` of the family {family.name} cannot describe this model: {', '.join(differ)} would change. "
            "Choose another `family`, or values that this family supports."
        )
    return raw


def _written_windows(family: Family, config: ModelConfig) -> dict[str, Any]:
    windows = [layer.window for layer in config.layers]
    size = next((window for window in windows if window is not None), None)
    if family.name == "llama" or family.deepseek:
        return {}
    if family.name in ("mistral", "phi3"):
        return {"sliding_window": size}
    raw: dict[str, Any] = {"sliding_window": size, "layer_types": [FULL if x is None else SLIDING for x in windows]}
    if family.name.startswith("qwen"):
        raw |= {"use_sliding_window": size is not None, "max_window_layers": windows.count(None)}
    if family.name == "gemma3_text":
        local = next((layer.rotary_base for layer in config.layers if layer.window is not None), 10000.0)
        raw["rope_local_base_freq"] = local
    return raw


def _written_rope(layer: LayerConfig, head_dim: int) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_theta": layer.rotary_base, "rope_scaling": None}
    if layer.rotary_dim is not None:
        raw["partial_rotary_factor"] = layer.rotary_dim / head_dim
    scaling = layer.rotary_scaling
    if isinstance(scaling, LinearScaling):
        raw["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if isinstance(scaling, YarnScaling):
        given = {key: getattr(scaling, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        raw["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            **{key: value for key, value in given.items() if value is not None},
            "truncate": scaling.truncate,
        }
    if isinstance(scaling, LongRopeScaling):
        raw["original_max_position_embeddings"] = scaling.original_max_positions
        raw["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "attention_factor": scaling.magnitude,
        }
    return raw


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-6 else x
