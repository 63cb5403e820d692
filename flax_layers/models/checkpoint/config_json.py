"""Converts `config.json` of Hugging Face checkpoints to a `ModelConfig` and back."""

import math
from collections.abc import Mapping
from typing import Any

from flax_layers.models.checkpoint import config_experts, config_rope
from flax_layers.models.checkpoint.config_rope import FULL
from flax_layers.models.checkpoint.families import FAMILIES, REFUSED, Family, Fields, Raw, family_named
from flax_layers.models.checkpoint.fp8_files import read_quantization
from flax_layers.models.config import LayerConfig, ModelConfig

SLIDING = "sliding_attention"

_FIELDS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
}
"""Fields of `ModelConfig`, and the keys that all families read for them."""

_OPTIONAL_FIELDS = {
    "mlp_bias": "mlp_bias",
    "attention_softcap": "attn_logit_softcapping",
    "logits_softcap": "final_logit_softcapping",
}
"""The same for keys that not all families read."""

DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": 1.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""The keys that all families read, and their values where they are absent."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_POSITIVE = (*_REQUIRED, "head_dim", "sliding_window_pattern", "decoder_sparse_step", "query_pre_attn_scalar")

_NULLABLE = frozenset((
    "num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    "q_lora_rank", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "bos_token_id", "eos_token_id",
    "pad_token_id",
))  # fmt: skip
"""Keys for which null is a value. Null of a boolean is false, and of any other key the default, as in Transformers."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_REQUIRED, (int,)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "bos_token_id", "pad_token_id"), (int,)),
    **dict.fromkeys(("n_group", "topk_group", "num_experts_per_tok"), (int,)),
    "eos_token_id": (int, list),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (float,)),
    **dict.fromkeys(("layer_types", "mlp_only_layers", "short_factor", "long_factor"), (list,)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict,)),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"), (float,)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), (float,)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), (float,)),
    "truncate": (bool,),
}
"""The types of keys whose default is null, or that lie in rotary parameters."""

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}

_VALUES = {"is_causal": (True,), "per_layer_config": (None,), "transformers_weights": (None,)}
"""The only values that keys of all families may have."""


def read_config(raw: Raw, max_positions: int | None = None) -> ModelConfig:
    """Converts the contents of a `config.json`, for contexts of `max_positions`, by default as in the file.

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
    raw = _read_keys(family, raw)
    heads = raw["num_attention_heads"]
    head_dim = raw["head_dim"] or raw["hidden_size"] // heads
    positions = max_positions or raw["max_position_embeddings"]
    bias, eos = raw.get("attention_bias", False), raw["eos_token_id"]
    window = lambda kind: raw["sliding_window"] if kind == SLIDING else None
    rotary = lambda kind: config_rope.read_rotary(family, raw, kind, head_dim, positions)
    fields = {field: raw[key] for field, key in (_FIELDS | _OPTIONAL_FIELDS).items() if key in raw}
    fields |= {
        "num_kv_heads": raw["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "layers": tuple(LayerConfig(window(kind), **rotary(kind)) for kind in layer_kinds(raw)),
        "max_positions": positions,
        "activation": raw.get("hidden_activation", raw["hidden_act"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    if family.reads("query_pre_attn_scalar"):
        fields["attention_scale"] = raw["query_pre_attn_scalar"] ** -0.5
        fields["embedding_scale"] = math.sqrt(raw["hidden_size"])
    fields |= config_experts.read_fields(family, raw, fields["layers"])
    return ModelConfig(family=family.name, **{**fields, **family.traits})


def _read_keys(family: Family, raw: Raw) -> Raw:
    """The keys that the family reads, with its defaults. Raises ValueError for one that is missing or unsupported."""
    for key, values in {**_VALUES, **family.values}.items():
        if key in raw and raw[key] not in values:
            supported = " or ".join(repr(value) for value in values if value is not None) or "absent"
            raise ValueError(
                f"`{key}` of `config.json` must be {supported} for {family.name}. Got {raw[key]!r}, which the decoder "
                "does not support."
            )
    read_quantization(raw)  # refuses unsupported quantization; the supported one is no part of the model
    raw = {**raw, **{key: raw[other] for other, key in family.aliases.items() if raw.get(other) is not None}}
    if missing := [key for key in _REQUIRED if raw.get(key) is None]:
        raise ValueError(f"`config.json` lacks {', '.join(missing)}.")
    keys: Fields = {}
    for key, default in {**dict.fromkeys(_REQUIRED), **DEFAULTS, **family.defaults}.items():
        null = None if key in _NULLABLE else False if isinstance(default, bool) else default
        keys[key] = default if key not in raw else null if raw[key] is None else raw[key]
        _check_type(key, keys[key], _TYPES.get(key, (type(default),)))
    return {**keys, **family.constants}


def _check_type(key: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raises ValueError for a value of a wrong type, also within rotary parameters."""
    if value is None:
        return
    accepted = (*kinds, int) if float in kinds else kinds
    if type(value) not in accepted:
        names = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise ValueError(f"`{key}` of `config.json` must be {names}. Got {value!r}. Correct the file.")
    if key in _POSITIVE and value <= 0:
        raise ValueError(f"`{key}` of `config.json` must be positive. Got {value!r}. Correct the file.")
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _TYPES or isinstance(inner, dict):
                _check_type(name, inner, _TYPES.get(name, (dict,)))


def family_of(raw: Raw) -> Family:
    """Looks up the family of a checkpoint by `model_type`, with which `architectures` must agree, or raises ValueError.

    Example:
        >>> family_of({"architectures": ["Qwen2MoeForCausalLM"]})
        Traceback (most recent call last):
        ValueError: Qwen2MoeForCausalLM is not supported: it has shared experts with a gate.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"`architectures` of `config.json` must be a list. Got {names!r}. Correct the file.")
    for name in map(str, names):
        if name in REFUSED:
            raise ValueError(f"{name} is not supported: {REFUSED[name]}.")
    known = {family.name: family for family in FAMILIES.values()}
    supported = [FAMILIES[name].name for name in map(str, names) if name in FAMILIES]
    kind = str(raw.get("model_type") or next(iter(supported), None))
    if not supported and (names or kind not in known):
        raise ValueError(
            f"`architectures` of `config.json` must name one of {', '.join(FAMILIES)}. Got {names}, with `model_type` "
            f"{raw.get('model_type')!r}."
        )
    if kind == "mistral" and "layer_types" in raw:  # as in Transformers
        kind = "ministral"
    if kind not in known or (names and not {kind, kind.replace("ministral", "mistral")} & set(supported)):
        raise ValueError(
            f"`architectures` and `model_type` of `config.json` must be of one family. Got {names} and {kind!r}: "
            "Transformers goes by the second. Correct the file."
        )
    return known[kind]


def layer_kinds(raw: Raw) -> list[str]:
    """Returns `full_attention` or `sliding_attention` for each layer. Raises ValueError if they are contradictory."""
    layers, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if kinds is None:
        first, pattern = raw.get("max_window_layers", 0), raw.get("sliding_window_pattern", layers + 1)
        is_sliding = lambda layer: window is not None and layer >= first and (layer + 1) % pattern
        return [SLIDING if is_sliding(layer) else FULL for layer in range(layers)]
    if len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ValueError(
            f"`layer_types` of `config.json` must hold {FULL} or {SLIDING} for each of the {layers} layers. Got "
            f"{kinds}."
        )
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"`sliding_window` of `config.json` must be a number where `layer_types` has {SLIDING}. Got none, or "
            "`use_sliding_window` is false. Correct the file."
        )
    return kinds


def write_config(config: ModelConfig) -> Fields:
    """Converts a configuration to the contents of a `config.json`, as `transformers` and `read_config` read them.

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
        **{key: getattr(config, field) for field, key in _FIELDS.items()},
        "num_hidden_layers": len(config.layers),
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        **config_rope.written_rotary(full[0], config.head_dim),
        **_written_windows(family, config),
        **config_experts.written_fields(family, config),
    }
    optional = {key: getattr(config, field) for field, key in _OPTIONAL_FIELDS.items()} | {
        "hidden_activation": config.activation,
        "attention_bias": config.out_bias,
        "query_pre_attn_scalar": _whole((config.attention_scale or config.head_dim**-0.5) ** -2),
    }
    raw |= {key: value for key, value in optional.items() if family.reads(key)}
    if not family.reads("hidden_activation"):
        raw["hidden_act"] = config.activation
    if family.reads("rope_parameters") and raw["rope_scaling"] is None:
        raw["rope_scaling"] = {"rope_type": "default"}  # a null is the scaling of the family
    if read_config(raw) != config:
        differ = [key for key, value in vars(read_config(raw)).items() if value != getattr(config, key)]
        raise ValueError(
            f"`config.json` of the family {family.name} cannot describe this model: {', '.join(differ)} would change. "
            "Choose another `family`, or values that this family supports."
        )
    return raw


def _written_windows(family: Family, config: ModelConfig) -> Fields:
    windows = [layer.window for layer in config.layers]
    size = next((window for window in windows if window is not None), None)
    raw: Fields = {"sliding_window": size}
    if family.reads("use_sliding_window"):
        raw |= {"use_sliding_window": size is not None, "max_window_layers": windows.count(None)}
    elif family.reads("layer_types"):
        raw["sliding_window"] = size or family.defaults["sliding_window"]  # Transformers makes the mask in any case
    raw["layer_types"] = [FULL if x is None else SLIDING for x in windows]
    local = (layer.rotary_base for layer in config.layers if layer.window is not None)
    raw["rope_local_base_freq"] = next(local, 10000.0)
    return {key: value for key, value in raw.items() if family.reads(key)}


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-6 else x
