"""Which tensors the files of a model hold, and which parameters each of them is."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from flax_layers.models.families import LATENT_QUERY_MODULES, LEAVES, TOP_MODULES, Family

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: one parameter, several that are concatenated along the first axis, or one expert of one.

    Attributes:
        parts: Paths of the parameters.
        sizes: Size of each along the first axis of the tensor.
        shape: Shape of the tensor.
        transposed: Whether the tensor is `[out, in]` and the parameters are `[in, out]`.
        expert: Index along the first axis of the parameter, whose experts are stacked. None: it is the whole parameter.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: Shape
    transposed: bool
    expert: int | None = None


class Piece(NamedTuple):
    """Rows of a tensor: a parameter, or one expert of it.

    Attributes:
        name: Name of the tensor.
        rows: Rows along its first axis.
    """

    name: str
    rows: slice


def tensors_of(family: Family, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors in the files of a model.

    Args:
        family: The family of the model.
        shapes: Shape of each parameter, by path, such as `blocks.0.attention.query.kernel`.

    Returns:
        The tensors, by their names in files.

    Example:
        >>> from flax_layers.models.families import family_named
        >>> phi3 = family_named("phi3")
        >>> shapes = {f"blocks.0.attention.{name}.kernel": (64, size) for name, size in (("query", 64), ("key", 16))}
        >>> for name, tensor in tensors_of(phi3, shapes).items():
        ...     print(name, tensor.shape, tensor.sizes)
        model.layers.0.self_attn.qkv_proj.weight (80, 64) (64, 16)
        >>> shapes = {"blocks.1.mlp.experts.up.kernel": (2, 64, 16)}
        >>> for name, tensor in tensors_of(family_named("deepseek_v3"), shapes).items():
        ...     print(name, tensor.shape, tensor.expert)
        model.layers.1.mlp.experts.0.up_proj.weight (16, 64) 0
        model.layers.1.mlp.experts.1.up_proj.weight (16, 64) 1
    """
    order = {module: number for number, module in enumerate((*TOP_MODULES, *family.modules))}
    parts: dict[str, list[str]] = {}
    for path in sorted(shapes, key=lambda path: order[_module(path)]):
        parts.setdefault(_file_name(family, path, shapes), []).append(path)
    tensors = {}
    for name, paths in parts.items():
        if "{}" in name:
            [path] = paths
            experts, *shape = shapes[path]
            tensors |= {name.format(i): _tensor([path], [tuple(shape)], i) for i in range(experts)}
        else:
            tensors[name] = _tensor(paths, [shapes[path] for path in paths])
    return tensors


def _tensor(paths: list[str], shapes: list[Shape], expert: int | None = None) -> Tensor:
    transposed = paths[0].endswith(".kernel")
    rows = [shape[::-1] if transposed else shape for shape in shapes]
    sizes = tuple(row[0] for row in rows)
    return Tensor(tuple(paths), sizes, (sum(sizes), *rows[0][1:]), transposed, expert)


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Where each parameter lies: in one piece, or with stacked experts in one for each.

    Args:
        tensors: Of `tensors_of`.

    Returns:
        The pieces of each parameter, by path; of experts in their order.

    Example:
        >>> tensor = Tensor(("a", "b"), (2, 3), (5, 4), transposed=False)
        >>> pieces_of({"both": tensor})["b"]
        [Piece(name='both', rows=slice(2, 5, None))]
    """
    pieces: dict[str, list[Piece]] = {}
    for name, tensor in tensors.items():
        start = 0
        for path, size in zip(tensor.parts, tensor.sizes, strict=True):
            pieces.setdefault(path, []).append(Piece(name, slice(start, start + size)))
            start += size
    return pieces


def _module(path: str) -> str:
    """The module of a parameter: `attention.query` for `blocks.0.attention.query.kernel`."""
    names = path.split(".")[:-1]
    return ".".join(names[2:] if names[0] == "blocks" else names)


def _file_name(family: Family, path: str, shapes: Mapping[str, Shape]) -> str:
    leaf, module = LEAVES[path.rpartition(".")[2]], _module(path)
    if not path.startswith("blocks."):
        return f"{TOP_MODULES[module]}.{leaf}"
    layer = path.split(".")[1]
    has_latent_queries = f"blocks.{layer}.attention.query_down.kernel" in shapes
    names = {**family.modules, **(LATENT_QUERY_MODULES if has_latent_queries else {})}
    return f"model.layers.{layer}.{names[module]}.{leaf}"
