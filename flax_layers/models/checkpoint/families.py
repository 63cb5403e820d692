"""Families of Hugging Face checkpoints: the keys of `config.json` and the names of tensors of each.

A family is data; `flax_layers.models.checkpoint.config_json` reads and writes `config.json` with it. Its keys are
those that the class of Transformers 5.24 reads: a soft cap in the `config.json` of a Llama, for example, changes
nothing there, and so it changes nothing here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax_layers.models.checkpoint.tensor_names import (
    DEEPSEEK_MODULES,
    EXPERT_MODULES,
    GEMMA_MODULES,
    GPT_OSS_MODULES,
    LLAMA_MODULES,
    MIXTRAL_MODULES,
    PHI3_MODULES,
)

Raw = Mapping[str, Any]
"""The contents of `config.json`, or values of some of its keys."""

Fields = dict[str, Any]
"""Values of fields of a configuration, or of keys to write, by their names."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints."""

    name: str  # the `model_type` of `config.json`
    architecture: str  # the class in `architectures`
    modules: Mapping[str, str]  # names of the modules of a block in files
    # the keys of `config.json` that it reads beside `config_json.DEFAULTS`, or with other defaults; and their values
    # where they are absent
    defaults: Raw
    # fields of `ModelConfig` that are the same for all models of the family
    traits: Raw = dataclasses.field(default_factory=dict)
    constants: Raw = dataclasses.field(default_factory=dict)  # values of keys that it does not read
    # the only values that keys may have, which the decoder supports
    values: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    # other names of keys. As in Transformers, they win over the names
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the keys of `config.json` of fields of `ExpertsConfig`
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # fields of `ExpertsConfig` that are the same for all models of the family
    expert_traits: Raw = dataclasses.field(default_factory=dict)

    def reads(self, key: str) -> bool:
        """Returns whether it reads a key of `config.json` that not all families read."""
        return key in self.defaults


# fmt: off
_MISTRAL_DEFAULTS = {
    "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "bos_token_id": 1, "eos_token_id": 2,
}

_QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768}
_DENSE_QWEN_DEFAULTS = {
    **_QWEN_DEFAULTS, "layer_types": None, "max_window_layers": 28, "num_key_value_heads": 32,
}

_GEMMA_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}
_GEMMA_VALUES = {"use_bidirectional_attention": (False, None)}
_GEMMA_TRAITS = {"norm_offset": 1.0, "post_norms": True}

_DEEPSEEK_DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True,
}
_DEEPSEEK_VALUES = {"attention_bias": (False, None), "mlp_bias": (False, None), "moe_layer_freq": (1, None)}
_DEEPSEEK_KEYS = {
    "number": "n_routed_experts", "width": "moe_intermediate_size", "per_token": "num_experts_per_tok",
    "shared": "n_shared_experts", "groups": "n_group", "groups_per_token": "topk_group",
    "normalized": "norm_topk_prob", "scale": "routed_scaling_factor",
}

_MIXTRAL_KEYS = {"number": "num_local_experts", "width": "intermediate_size", "per_token": "num_experts_per_tok"}
_SOFTMAX_TRAITS = {"scoring": "softmax", "shared": 0, "normalized": True, "float32_router": False}

GROUP_LIMITED = "group_limited_greedy"

_FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", LLAMA_MODULES,
        {"attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family("mistral", "MistralForCausalLM", LLAMA_MODULES, _MISTRAL_DEFAULTS),
    Family("ministral", "MinistralForCausalLM", LLAMA_MODULES, {**_MISTRAL_DEFAULTS, "layer_types": None}),
    Family("qwen2", "Qwen2ForCausalLM", LLAMA_MODULES, _DENSE_QWEN_DEFAULTS, {"qkv_bias": True}),
    Family(
        "qwen3", "Qwen3ForCausalLM", LLAMA_MODULES,
        {**_DENSE_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
        {"qk_norm": True},
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", GEMMA_MODULES,
        {
            **_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        _GEMMA_TRAITS,
        {"sliding_window_pattern": 2},
        _GEMMA_VALUES,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", GEMMA_MODULES,
        {
            **_GEMMA_DEFAULTS, "final_logit_softcapping": None, "max_position_embeddings": 131072,
            "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        },
        {**_GEMMA_TRAITS, "qk_norm": True},
        values=_GEMMA_VALUES,
    ),
    Family(
        "phi3", "Phi3ForCausalLM", PHI3_MODULES,
        {
            "rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
            "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000,
        },
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", DEEPSEEK_MODULES,
        {
            **_DEEPSEEK_DEFAULTS, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
            "moe_intermediate_size": 1407, "num_experts_per_tok": None, "n_group": None, "topk_group": None,
            "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        values={
            **_DEEPSEEK_VALUES, "topk_method": ("greedy", GROUP_LIMITED, None), "scoring_func": ("softmax", None),
            "norm_topk_prob": (False, None), "rope_interleave": (True, None),
        },
        aliases={"num_experts": "n_routed_experts"},
        expert_keys=_DEEPSEEK_KEYS,
        expert_traits={"scoring": "softmax"},
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", DEEPSEEK_MODULES,
        {
            **_DEEPSEEK_DEFAULTS, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
            "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
            "bos_token_id": 0, "eos_token_id": 1,
        },
        values={**_DEEPSEEK_VALUES, "topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None)},
        aliases={"num_local_experts": "n_routed_experts"},
        expert_keys=_DEEPSEEK_KEYS,
    ),
    Family(
        "mixtral", "MixtralForCausalLM", MIXTRAL_MODULES,
        {
            **_MISTRAL_DEFAULTS, "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        aliases={"num_experts": "num_local_experts"},
        expert_keys=_MIXTRAL_KEYS,
        expert_traits=_SOFTMAX_TRAITS,
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", EXPERT_MODULES,
        {
            **_QWEN_DEFAULTS, "num_key_value_heads": 4, "attention_bias": False, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
            "decoder_sparse_step": 1, "mlp_only_layers": None,
        },
        {"qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        expert_keys={
            "number": "num_experts", "width": "moe_intermediate_size", "per_token": "num_experts_per_tok",
            "normalized": "norm_topk_prob",
        },
        expert_traits=_SOFTMAX_TRAITS,
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", GPT_OSS_MODULES,
        {
            "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128,
            "layer_types": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
            },
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        },
        {"use_sinks": True},
        {"sliding_window_pattern": 2, "hidden_act": "silu"},
        aliases={"num_experts": "num_local_experts"},
        expert_keys={**_MIXTRAL_KEYS, "swiglu_limit": "swiglu_limit", "swiglu_alpha": "swiglu_alpha"},
        expert_traits={**_SOFTMAX_TRAITS, "use_bias": True},
    ),
)
# fmt: on

FAMILIES = {family.architecture: family for family in _FAMILIES}
"""The supported families, by architecture."""

REFUSED = {
    "Gemma3ForConditionalGeneration": "it has a vision tower. Use a text model, Gemma3ForCausalLM",
    "Ministral3ForCausalLM": "it scales queries by their positions",
    "Qwen2MoeForCausalLM": "it has shared experts with a gate",
}
"""Architectures similar to a supported one, and why they are not supported."""


def family_named(name: str) -> Family:
    """Looks up the family of a `ModelConfig`, or raises ValueError."""
    for family in FAMILIES.values():
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES.values())
    raise ValueError(f"`family` must be one of {known}. Got {name!r}.")
