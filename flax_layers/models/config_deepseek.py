"""What `config.json` of DeepSeek-V2 and V3 says beside what other families have: latent attention, and experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax_layers.models.config import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig

Raw = Mapping[str, Any]

V2, V3 = "deepseek_v2", "deepseek_v3"

_SCORING = {V2: "softmax", V3: "sigmoid"}
_GREEDY, _GROUP_LIMITED = "greedy", "group_limited_greedy"
_SUPPORTED = {
    V2: {
        "topk_method": (_GREEDY, _GROUP_LIMITED),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
        "rope_interleave": (True,),
    },
    V3: {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}
"""Values of keys that files may have, by family; an absent key or null is as good as any."""

_OF_BOTH = {"attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)}


def read_fields(family: str, raw: Raw, layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Fields of `ModelConfig` that other families do not have, or have otherwise.

    Args:
        family: `V2` or `V3`.
        raw: The contents of `config.json`, with the defaults of the family.
        layers: The attention of each layer.

    Returns:
        The fields.

    Raises:
        ValueError: A key is missing, or has a value that the decoder does not support.
    """
    for key, values in {**_SUPPORTED[family], **_OF_BOTH}.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise ValueError(
                f"`{key}` of `config.json` must be {' or '.join(map(repr, values))} for {family}. Got {raw[key]!r}, "
                "which the decoder does not support."
            )
    latent = LatentConfig(
        latent_dim=raw["kv_lora_rank"],
        nope_head_dim=raw["qk_nope_head_dim"],
        rope_head_dim=raw["qk_rope_head_dim"],
        value_head_dim=raw["v_head_dim"],
        query_latent_dim=raw["q_lora_rank"],
        rotary_interleaved=bool(raw["rope_interleave"]),
    )
    dense = raw["first_k_dense_replace"]
    if dense < len(layers):
        experts = _read_experts(family, raw)
        layers = (*layers[:dense], *(dataclasses.replace(layer, experts=experts) for layer in layers[dense:]))
    head_dim = latent.nope_head_dim + latent.rope_head_dim
    return {"latent": latent, "head_dim": head_dim, "num_kv_heads": raw["num_attention_heads"], "layers": layers}


def _read_experts(family: str, raw: Raw) -> ExpertsConfig:
    has_groups = family == V3 or raw["topk_method"] == _GROUP_LIMITED
    missing = [key for key in ("num_experts_per_tok", *("n_group", "topk_group") * has_groups) if raw[key] is None]
    if missing:
        raise ValueError(f"`config.json` lacks {', '.join(missing)}.")
    return ExpertsConfig(
        number=raw["n_routed_experts"],
        width=raw["moe_intermediate_size"],
        per_token=raw["num_experts_per_tok"],
        shared=raw["n_shared_experts"] or 0,
        groups=raw["n_group"] if has_groups else 1,
        groups_per_token=raw["topk_group"] if has_groups else 1,
        scoring=_SCORING[family],
        normalised=bool(raw["norm_topk_prob"]),
        scale=raw["routed_scaling_factor"],
    )


def written_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that `read_fields` reads.

    Args:
        config: The configuration.

    Returns:
        The keys; none for latent attention or experts that the model does not have.
    """
    raw: dict[str, Any] = {}
    if config.latent is not None:
        raw |= {
            "kv_lora_rank": config.latent.latent_dim,
            "q_lora_rank": config.latent.query_latent_dim,
            "qk_nope_head_dim": config.latent.nope_head_dim,
            "qk_rope_head_dim": config.latent.rope_head_dim,
            "v_head_dim": config.latent.value_head_dim,
            "head_dim": config.latent.rope_head_dim,  # whose rotary embedding Transformers makes of this size
            "rope_interleave": config.latent.rotary_interleaved,
        }
    sparse = [number for number, layer in enumerate(config.layers) if layer.experts is not None]
    raw["first_k_dense_replace"] = sparse[0] if sparse else len(config.layers)
    experts = config.layers[-1].experts
    if experts is not None:
        raw |= {
            "n_routed_experts": experts.number,
            "moe_intermediate_size": experts.width,
            "num_experts_per_tok": experts.per_token,
            "n_shared_experts": experts.shared,
            "n_group": experts.groups,
            "topk_group": experts.groups_per_token,
            "topk_method": _written_method(experts),
            "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.scale,
        }
    return raw


def _written_method(experts: ExpertsConfig) -> str:
    if experts.scoring == _SCORING[V3]:
        return "noaux_tc"
    return _GROUP_LIMITED if experts.groups > 1 else _GREEDY
