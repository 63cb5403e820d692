"""Mixtures of experts and latent attention in `config.json`."""

import dataclasses

from flax_layers.models.checkpoint.families import GROUP_LIMITED, Family, Fields, Raw
from flax_layers.models.config import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig

_LATENT_KEYS = {
    "latent_dim": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
    "query_latent_dim": "q_lora_rank",
    "rotary_interleaved": "rope_interleave",
}
"""Fields of `LatentConfig`, and their keys."""

_GROUPS = ("groups", "groups_per_token")


def read_fields(family: Family, raw: Raw, layers: tuple[LayerConfig, ...]) -> Fields:
    """Reads the fields of `ModelConfig` for experts and latent attention; none for a family without them."""
    fields: Fields = {}
    if family.reads("kv_lora_rank"):
        latent = LatentConfig(**{field: raw[key] for field, key in _LATENT_KEYS.items()})
        head_dim = latent.nope_head_dim + latent.rope_head_dim
        fields |= {"latent": latent, "head_dim": head_dim, "num_kv_heads": raw["num_attention_heads"]}
    sparse = _sparse_layers(family, raw)
    if any(sparse):
        experts = _read_experts(family, raw)
        pairs = zip(layers, sparse, strict=True)
        fields["layers"] = tuple(dataclasses.replace(x, experts=experts) if is_sparse else x for x, is_sparse in pairs)
    return fields


def _sparse_layers(family: Family, raw: Raw) -> list[bool]:
    keys = family.expert_keys
    has_experts = bool(keys) and (raw[keys["number"]] > 0 or not family.reads("mlp_only_layers"))
    first, step = raw.get("first_k_dense_replace", 0), raw.get("decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or ()
    return [
        has_experts and layer >= first and layer not in dense and (layer + 1) % step == 0
        for layer in range(raw["num_hidden_layers"])
    ]


def _read_experts(family: Family, raw: Raw) -> ExpertsConfig:
    keys = dict(family.expert_keys)
    if raw.get("topk_method", GROUP_LIMITED) != GROUP_LIMITED:
        keys = {field: key for field, key in keys.items() if field not in _GROUPS}
    fields = {field: raw[key] for field, key in keys.items()}
    if "shared" in fields:
        fields["shared"] = fields["shared"] or 0
    if missing := [keys[field] for field, value in fields.items() if value is None]:
        raise ValueError(f"`config.json` lacks {', '.join(missing)}.")
    return ExpertsConfig(**{**family.expert_traits, **fields})


def written_fields(family: Family, config: ModelConfig) -> Fields:
    """The keys that `read_fields` reads; none for latent attention or experts that the model does not have."""
    raw: Fields = {}
    if config.latent is not None:
        raw |= {key: getattr(config.latent, field) for field, key in _LATENT_KEYS.items()}
        raw["head_dim"] = config.latent.rope_head_dim  # whose rotary embedding Transformers makes of this size
    dense = [number for number, layer in enumerate(config.layers) if layer.experts is None]
    if family.reads("mlp_only_layers"):
        raw["mlp_only_layers"] = dense
    if family.reads("first_k_dense_replace"):
        sparse = sorted(set(range(len(config.layers))).difference(dense))
        raw["first_k_dense_replace"] = sparse[0] if sparse else len(config.layers)
    experts = next((layer.experts for layer in config.layers if layer.experts is not None), None)
    if experts is not None:
        raw |= {key: getattr(experts, field) for field, key in family.expert_keys.items()}
        if experts.scoring == "sigmoid":
            raw["topk_method"] = "noaux_tc"
        elif family.reads("topk_method"):
            raw["topk_method"] = GROUP_LIMITED if experts.groups > 1 else "greedy"
    return raw
