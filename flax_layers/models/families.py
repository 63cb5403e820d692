"""Families of Hugging Face checkpoints: names of tensors, and defaults of `config.json`.

A family is data; `flax_layers.models.config_json` reads and writes `config.json` with it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

LLAMA_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Names of the modules of a `Block` in files. Modules with the same name form one tensor, in this order."""

GEMMA_MODULES = {
    **LLAMA_MODULES,
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}

PHI3_MODULES = {
    **LLAMA_MODULES,
    "attention.query": "self_attn.qkv_proj",
    "attention.key": "self_attn.qkv_proj",
    "attention.value": "self_attn.qkv_proj",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}

DEEPSEEK_MODULES = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.latent": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.up": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""With `{}` in a name, the parameters of all experts are stacked, and each expert is a tensor: `{}` is its number."""

LATENT_QUERY_MODULES = {"attention.query": "self_attn.q_b_proj"}
"""Other names, in layers with `attention.query_down`."""

TOP_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LEAVES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "bias": "bias",
    "correction": "e_score_correction_bias",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes:
        name: `model_type` in `config.json`.
        architecture: The class in `architectures`.
        modules: Names of the modules of a block in files.
        defaults: Values of keys that are missing in `config.json`, where they differ from Llama.
        traits: Fields of `ModelConfig` that are the same for all models of the family.
    """

    name: str
    architecture: str
    modules: Mapping[str, str]
    defaults: Mapping[str, Any]
    traits: Mapping[str, Any]

    @property
    def gemma(self) -> bool:
        """Whether scores and embeddings are scaled as in Gemma."""
        return "query_pre_attn_scalar" in self.defaults

    @property
    def deepseek(self) -> bool:
        """Whether it has latent attention and mixtures of experts."""
        return "kv_lora_rank" in self.defaults


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "default_activation": "gelu_pytorch_tanh",
}
_GEMMA_TRAITS = {"norm_offset": 1.0, "post_norms": True}

_DEEPSEEK_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}

FAMILIES = {
    family.architecture: family
    for family in (
        Family("llama", "LlamaForCausalLM", LLAMA_MODULES, {"bos_token_id": 1, "eos_token_id": 2}, {}),
        Family(
            "mistral",
            "MistralForCausalLM",
            LLAMA_MODULES,
            {"sliding_window": 4096, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2},
            {},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            LLAMA_MODULES,
            {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
            {"qkv_bias": True},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            LLAMA_MODULES,
            {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
            {"qk_norm": True},
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            GEMMA_MODULES,
            {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            _GEMMA_TRAITS,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            GEMMA_MODULES,
            {**_GEMMA_DEFAULTS, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
            {**_GEMMA_TRAITS, "qk_norm": True},
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            PHI3_MODULES,
            {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
            {},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            DEEPSEEK_MODULES,
            {
                **_DEEPSEEK_DEFAULTS,
                "first_k_dense_replace": 0,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "moe_intermediate_size": 1407,
                "num_experts_per_tok": None,
                "n_group": None,
                "topk_group": None,
                "topk_method": "greedy",
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            {},
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            DEEPSEEK_MODULES,
            {
                **_DEEPSEEK_DEFAULTS,
                "first_k_dense_replace": 3,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "moe_intermediate_size": 2048,
                "num_experts_per_tok": 8,
                "n_group": 8,
                "topk_group": 4,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "max_position_embeddings": 4096,
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            {},
        ),
    )
}
"""The supported families, by architecture."""

_OTHER_EXPERTS = "it has a mixture of experts of another kind than DeepSeek"

REFUSED = {
    "GptOssForCausalLM": "it has attention sinks, a learned term in the denominator of each softmax, and a mixture of "
    "experts",
    "Gemma3ForConditionalGeneration": "it has a vision tower. Use a text model, Gemma3ForCausalLM",
    "MixtralForCausalLM": _OTHER_EXPERTS,
    "Qwen2MoeForCausalLM": _OTHER_EXPERTS,
    "Qwen3MoeForCausalLM": _OTHER_EXPERTS,
}
"""Architectures similar to a supported one, and why they are not supported."""


def family_named(name: str) -> Family:
    """Looks up the family of a `ModelConfig`.

    Args:
        name: The `family` of the configuration.

    Returns:
        The family.

    Raises:
        ValueError: There is no such family.

    Example:
        >>> family_named("llama").architecture
        'LlamaForCausalLM'
    """
    for family in FAMILIES.values():
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES.values())
    raise ValueError(f"`family` must be one of {known}. Got {name!r}.")
