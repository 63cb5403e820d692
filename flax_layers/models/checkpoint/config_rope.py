"""Rotary parameters in `config.json`.

They are read in both forms: `rope_theta` and `rope_scaling` of Transformers 4, `rope_parameters` of 5. They are written
in the first, which both versions read. Of a value that a file has twice, the one counts that counts in Transformers
5.24.
"""

import math
from collections.abc import Mapping

from flax_layers.models.checkpoint.families import Family, Fields, Raw
from flax_layers.models.config import LayerConfig
from jflex.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, RotaryScaling, YarnScaling

FULL = "full_attention"

_ORIGINAL = "original_max_position_embeddings"
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}

_YARN = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_WRITTEN: Mapping[type, tuple[str, Mapping[str, str]]] = {
    LinearScaling: ("linear", {"factor": "factor"}),
    Llama3Scaling: (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            _ORIGINAL: "original_max_positions",
        },
    ),
    YarnScaling: ("yarn", {**{key: key for key in _YARN}, _ORIGINAL: "original_max_positions"}),
    LongRopeScaling: (
        "longrope",
        {"short_factor": "short_factors", "long_factor": "long_factors", "attention_factor": "magnitude"},
    ),
}
"""The name of each scaling, its keys, and their attributes. None is not written."""


def read_rotary(family: Family, raw: Raw, kind: str, head_dim: int, max_positions: int) -> Fields:
    """Reads the fields of `LayerConfig` for the rotary embedding of a kind of layer, as in `layer_types`."""
    rope = _nested(raw, kind) if family.reads("rope_local_base_freq") else _flat(family, raw)
    scaling = _scaling(family, raw, rope, max_positions)
    fraction, is_partial = rope.get("partial_rotary_factor", 1.0), family.reads("partial_rotary_factor")
    rotary_dim = int(head_dim * fraction) if is_partial else head_dim
    if fraction != 1.0 and scaling is not None and not is_partial:
        raise ValueError(
            f"`partial_rotary_factor` of `config.json` must be 1 for {family.name} with a rotary scaling. Got "
            f"{fraction}, which gives fewer frequencies than a head has. Remove one of them."
        )
    if isinstance(scaling, LongRopeScaling) and not family.reads("kv_lora_rank"):
        for factors in (scaling.short_factors, scaling.long_factors):
            if len(factors) != rotary_dim // 2 or not all(type(factor) in (int, float) for factor in factors):
                raise ValueError(
                    f"`short_factor` and `long_factor` of `config.json` must hold {rotary_dim // 2} numbers, one for "
                    f"each pair of features that rotate. Got {list(factors)}. Correct the file."
                )
    return {
        "rotary_base": float(rope["rope_theta"]),
        "rotary_scaling": scaling,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }


def _flat(family: Family, raw: Raw) -> Raw:
    """The rotary parameters of all layers, in the form of Transformers 5."""
    rope = raw["rope_scaling"] or raw["rope_parameters"] or {}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"`rope_parameters` of `config.json` must hold parameters for all layers of {family.name}. Got some for "
            f"{', '.join(nested)}, which Transformers does not read. Take them out of these objects."
        )
    original = raw[_ORIGINAL] or rope.get(_ORIGINAL)
    outer = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor")}
    return {**outer, **rope, _ORIGINAL: original}


def _nested(raw: Raw, kind: str) -> Raw:
    """The rotary parameters of a kind of layer of Gemma 3; `rope_scaling` is for layers without a window."""
    kinds = raw["rope_parameters"] or {}
    theta, scaling = ("rope_theta", raw["rope_scaling"] or {}) if kind == FULL else ("rope_local_base_freq", {})
    # Transformers looks for `truncate` beside the kinds.
    return {"rope_theta": raw[theta], **(kinds.get(kind) or {}), **scaling, "truncate": kinds.get("truncate", True)}


def _scaling(family: Family, raw: Raw, rope: Raw, max_positions: int) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "su" or (kind == "yarn" and family.name == "phi3"):  # its first names
        kind = "longrope"
    missing = [key for key in _REQUIRED.get(kind, ()) if rope.get(key) is None]
    if missing:
        raise ValueError(f"The {kind} rotary scaling of `config.json` lacks {', '.join(missing)}.")
    original = rope.get(_ORIGINAL) or raw["max_position_embeddings"]
    if kind == "default":
        return None
    if kind != "yarn" and rope.get("mscale_all_dim") and family.reads("kv_lora_rank"):
        raise ValueError(
            f"`mscale_all_dim` of `config.json` must be absent with a {kind} rotary scaling, where Transformers scales "
            f"scores by it. Got {rope['mscale_all_dim']}, which the decoder supports with yarn alone. Remove it."
        )
    if kind == "linear":
        return LinearScaling(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    if kind == "longrope":
        factor, magnitude = rope.get("factor"), rope.get("attention_factor")
        factor = raw["max_position_embeddings"] / original if factor is None else factor
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
    """Reads null as the default, as Transformers does."""
    original, factor = rope.get(_ORIGINAL), rope.get("factor")
    if factor is None and original is None:
        raise ValueError(f"The yarn rotary scaling of `config.json` lacks factor, or {_ORIGINAL}.")
    original = original or raw["max_position_embeddings"]
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


def written_rotary(layer: LayerConfig, head_dim: int) -> Fields:
    """The keys of `config.json` that `read_rotary` reads."""
    raw: Fields = {"rope_theta": layer.rotary_base, "rope_scaling": None}
    if layer.rotary_dim is not None:
        raw["partial_rotary_factor"] = layer.rotary_dim / head_dim
    scaling = layer.rotary_scaling
    if type(scaling) in _WRITTEN:
        name, attributes = _WRITTEN[type(scaling)]
        values = {key: getattr(scaling, attribute) for key, attribute in attributes.items()}
        lists = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x is not None}
        raw["rope_scaling"] = {"rope_type": name, **lists}
    if isinstance(scaling, LongRopeScaling):
        raw[_ORIGINAL] = scaling.original_max_positions
    return raw
