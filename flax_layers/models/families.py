"""Families of Hugging Face checkpoints: names of tensors, and defaults of `config.json`.

A family is data; `flax_layers.models.config_json` reads and writes `config.json` with it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]

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

TOP_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


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
    )
}
"""The supported families, by architecture."""

REFUSED = {
    "GptOssForCausalLM": "it has attention sinks, a learned term in the denominator of each softmax, and a mixture of "
    "experts",
    "Gemma3ForConditionalGeneration": "it has a vision tower. Use a text model, Gemma3ForCausalLM",
    "MixtralForCausalLM": "it has a mixture of experts",
    "Qwen2MoeForCausalLM": "it has a mixture of experts",
    "Qwen3MoeForCausalLM": "it has a mixture of experts",
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


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: one parameter, or several that are concatenated along the first axis.

    Attributes:
        parts: Paths of the parameters.
        sizes: Size of each along the first axis of the tensor.
        shape: Shape of the tensor.
        transposed: Whether the tensor is `[out, in]` and the parameters are `[in, out]`.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: Shape
    transposed: bool


def tensors_of(family: Family, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors in the files of a model.

    Args:
        family: The family of the model.
        shapes: Shape of each parameter, by path, such as `blocks.0.attention.query.kernel`.

    Returns:
        The tensors, by their names in files.

    Example:
        >>> phi3 = family_named("phi3")
        >>> shapes = {f"blocks.0.attention.{name}.kernel": (64, size) for name, size in (("query", 64), ("key", 16))}
        >>> for name, tensor in tensors_of(phi3, shapes).items():
        ...     print(name, tensor.shape, tensor.sizes)
        model.layers.0.self_attn.qkv_proj.weight (80, 64) (64, 16)
    """
    order = {module: number for number, module in enumerate((*TOP_MODULES, *family.modules))}
    parts: dict[str, list[str]] = {}
    for path in sorted(shapes, key=lambda path: order[_module(path)]):
        parts.setdefault(_file_name(family, path), []).append(path)
    tensors = {}
    for name, paths in parts.items():
        transposed = paths[0].endswith(".kernel")
        rows = [shapes[path][::-1] if transposed else shapes[path] for path in paths]
        sizes = tuple(row[0] for row in rows)
        tensors[name] = Tensor(tuple(paths), sizes, (sum(sizes), *rows[0][1:]), transposed)
    return tensors


def _module(path: str) -> str:
    """The module of a parameter: `attention.query` for `blocks.0.attention.query.kernel`."""
    names = path.split(".")[:-1]
    return ".".join(names[2:] if names[0] == "blocks" else names)


def _file_name(family: Family, path: str) -> str:
    leaf = LEAVES[path.rpartition(".")[2]]
    if not path.startswith("blocks."):
        return f"{TOP_MODULES[_module(path)]}.{leaf}"
    return f"model.layers.{path.split('.')[1]}.{family.modules[_module(path)]}.{leaf}"
