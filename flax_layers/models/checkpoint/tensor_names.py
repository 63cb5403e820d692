"""Tensors in the files of a model, and the parameters of each."""

import dataclasses
from collections.abc import Container, Mapping, Sequence

Shape = tuple[int, ...]
Modules = Mapping[str, str]


def _named(module: str, files: str, **names: str) -> dict[str, str]:
    """Names in files of the parts of one of our modules."""
    return {f"{module}.{name}": f"{files}.{part}" for name, part in names.items()}


_GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

_ATTENTION_MODULES = {
    **_named("attention", "self_attn", query="q_proj", key="k_proj", value="v_proj", out="o_proj"),
    **_named("attention", "self_attn", query_norm="q_norm", key_norm="k_norm"),
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}

LLAMA_MODULES = {**_ATTENTION_MODULES, **_named("mlp", "mlp", **_GATED)}
"""Names of the modules of a `Block` in files. Modules with the same name form one tensor, in this order."""

GEMMA_MODULES = {
    **LLAMA_MODULES,
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}

PHI3_MODULES = {
    **LLAMA_MODULES,
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
}

EXPERT_MODULES = {**LLAMA_MODULES, "mlp.router": "mlp.gate", **_named("mlp.experts", "mlp.experts.{}", **_GATED)}
"""With `{}` in a name, the parameters of all experts are stacked, and each expert is a tensor: `{}` is its number."""

DEEPSEEK_MODULES = {
    **EXPERT_MODULES,
    **_named("attention", "self_attn", query_down="q_a_proj", query_norm="q_a_layernorm"),
    **_named("attention", "self_attn", latent="kv_a_proj_with_mqa", latent_norm="kv_a_layernorm", up="kv_b_proj"),
    **_named("mlp.shared", "mlp.shared_experts", **_GATED),
}

MIXTRAL_MODULES = {
    **_ATTENTION_MODULES,
    "mlp.router": "block_sparse_moe.gate",
    **_named("mlp.experts", "block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2"),
}

_JOINED = ("mlp.experts.gate", "mlp.experts.up")

GPT_OSS_MODULES = {
    **_ATTENTION_MODULES,
    "attention.sinks": "self_attn.sinks",
    "mlp.router": "mlp.router",
    **dict.fromkeys((f"{module}.kernel" for module in _JOINED), "mlp.experts.gate_up_proj"),
    **dict.fromkeys((f"{module}.bias" for module in _JOINED), "mlp.experts.gate_up_proj_bias"),
    "mlp.experts.down.kernel": "mlp.experts.down_proj",
    "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
}
"""A parameter, in place of a module, has the name of its tensor. Experts are stacked in files, too; their
kernels are `[in, out]` there, and the columns of `gate` and `up` alternate."""

JOINED_EXPERT_MODULES = {
    "mlp.router.kernel": "mlp.gate.weight",
    **dict.fromkeys((f"{module}.kernel" for module in _JOINED), "mlp.experts.gate_up_proj"),
    "mlp.experts.down.kernel": "mlp.experts.down_proj",
}
"""Other names, in files that Transformers 5 saved in a format of its own: experts are stacked, each `[out, in]`."""

LATENT_QUERY_MODULES = {"attention.query": "self_attn.q_b_proj"}
"""Other names, in layers with `attention.query_down`."""

TOP_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LEAVES = {
    **dict.fromkeys(("kernel", "embedding", "scale"), "weight"),
    "bias": "bias",
    "correction": "e_score_correction_bias",
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: one parameter, several that are concatenated along the outputs, or experts of these."""

    parts: tuple[str, ...]  # paths of the parameters
    sizes: tuple[int, ...]  # number of outputs of each
    shape: Shape  # shape of the tensor
    transposed: bool  # whether the tensor is `[..., out, in]` and the parameters are `[..., in, out]`
    # index along the first axis of the parameters, whose experts are stacked. None: it is all of them
    expert: int | None = None
    stacked: bool = False  # whether the first axis of the tensor counts experts, as in the parameters
    alternating: bool = False  # whether the columns of the parts alternate, in place of one part after the other

    @property
    def per_expert(self) -> bool:
        """Tests whether the first axis of the parameters counts experts."""
        return self.stacked or self.expert is not None


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
    """A parameter, or one expert of it, within a tensor of a file."""

    tensor: str  # name of the tensor
    shape: Shape  # shape of the slice, before a transposition
    start: int = 0  # the row at which it begins
    expert: int | None = None  # index along the first axis of the tensor, if that is the axis of experts
    column: tuple[int, int] = (0, 1)  # its first column, and the distance to the next


def tensors_of(modules: Modules, shapes: Mapping[str, Shape], names: Container[str] = ()) -> dict[str, Tensor]:
    """The tensors in the files of a model, by their names there.

    `shapes` of parameters are by path, such as `blocks.0.attention.query.kernel`. If names of `JOINED_EXPERT_MODULES`
    are among the `names` of tensors that are read, experts have these names.

    Example:
        >>> shapes = {f"blocks.0.attention.{name}.kernel": (64, size) for name, size in (("query", 64), ("key", 16))}
        >>> for name, tensor in tensors_of(PHI3_MODULES, shapes).items():
        ...     print(name, tensor.shape, tensor.sizes)
        model.layers.0.self_attn.qkv_proj.weight (80, 64) (64, 16)
        >>> shapes = {"blocks.1.mlp.experts.up.kernel": (2, 64, 16)}
        >>> for name, tensor in tensors_of(DEEPSEEK_MODULES, shapes).items():
        ...     print(name, tensor.shape, tensor.expert)
        model.layers.1.mlp.experts.0.up_proj.weight (16, 64) 0
        model.layers.1.mlp.experts.1.up_proj.weight (16, 64) 1
        >>> shapes |= {"blocks.1.mlp.experts.gate.kernel": (2, 64, 16)}
        >>> for name, tensor in tensors_of(GPT_OSS_MODULES, shapes).items():
        ...     print(name, tensor.shape, tensor.sizes)
        model.layers.1.mlp.experts.gate_up_proj (2, 64, 32) (16, 16)
    """
    order = {module: number for number, module in enumerate((*TOP_MODULES, *modules))}
    parts: dict[str, list[str]] = {}
    for path in sorted(shapes, key=lambda path: order[_entry(modules, path)]):
        parts.setdefault(_file_name(modules, path, shapes, names), []).append(path)
    tensors = {}
    for name, paths in parts.items():
        if "{}" in name:
            [path] = paths
            experts, *shape = shapes[path]
            tensors |= {name.format(i): _tensor([path], [tuple(shape)], i) for i in range(experts)}
        elif ".mlp.experts." in paths[0]:
            alternating = _local(paths[0]) in modules
            one = _tensor(paths, [shapes[path][1:] for path in paths], alternating=alternating)
            tensors[name] = dataclasses.replace(one, shape=(shapes[paths[0]][0], *one.shape), stacked=True)
        else:
            tensors[name] = _tensor(paths, [shapes[path] for path in paths])
    return tensors


def _tensor(
    paths: Sequence[str], shapes: Sequence[Shape], expert: int | None = None, *, alternating: bool = False
) -> Tensor:
    transposed = paths[0].endswith(".kernel") and not alternating
    parts = [shape[::-1] if transposed else shape for shape in shapes]
    sizes = tuple(part[-1 if alternating else 0] for part in parts)
    shape = (*parts[0][:-1], sum(sizes)) if alternating else (sum(sizes), *parts[0][1:])
    return Tensor(tuple(paths), sizes, shape, transposed, expert, alternating=alternating)


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[str, list[ParameterSlice]]:
    """The pieces of each parameter, by path: one, or with stacked experts one for each, in their order.

    Example:
        >>> tensor = Tensor(("a", "b"), (2, 3), (5, 4), transposed=False)
        >>> pieces_of({"both": tensor})["b"]
        [ParameterSlice(tensor='both', shape=(3, 4), start=2, expert=None, column=(0, 1))]
    """
    pieces: dict[str, list[ParameterSlice]] = {}
    for name, tensor in tensors.items():
        experts, shape = (range(tensor.shape[0]), tensor.shape[1:]) if tensor.stacked else ([None], tensor.shape)
        start = 0
        for number, (path, size) in enumerate(zip(tensor.parts, tensor.sizes, strict=True)):
            if tensor.alternating:
                part, row, column = (*shape[:-1], size), 0, (number, len(tensor.parts))
            else:
                part, row, column = (size, *shape[1:]), start, (0, 1)
            pieces.setdefault(path, []).extend(ParameterSlice(name, part, row, expert, column) for expert in experts)
            start += size
    return pieces


def _local(path: str) -> str:
    """A path within its block: `attention.query.kernel` for `blocks.0.attention.query.kernel`."""
    return path.split(".", 2)[2] if path.startswith("blocks.") else path


def _entry(modules: Modules, path: str) -> str:
    """The entry of a parameter in the names of a family: itself, or its module."""
    local = _local(path)
    return local if local in modules else local.rpartition(".")[0]


def _file_name(modules: Modules, path: str, shapes: Mapping[str, Shape], names: Container[str]) -> str:
    leaf, entry = path.rpartition(".")[2], _entry(modules, path)
    if not path.startswith("blocks."):
        return f"{TOP_MODULES[entry]}.{LEAVES[leaf]}"
    layer = f"model.layers.{path.split('.')[1]}"
    joined = JOINED_EXPERT_MODULES.get(_local(path))
    if joined is not None and f"{layer}.{joined}" in names:
        return f"{layer}.{joined}"
    has_latent_queries = f"blocks.{path.split('.')[1]}.attention.query_down.kernel" in shapes
    name = {**modules, **(LATENT_QUERY_MODULES if has_latent_queries else {})}[entry]
    return f"{layer}.{name}" if entry == _local(path) else f"{layer}.{name}.{LEAVES[leaf]}"
