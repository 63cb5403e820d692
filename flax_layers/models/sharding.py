"""Sharding of the parameters of a decoder over a mesh."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Rules = Sequence[tuple[str, PartitionSpec]]
"""Patterns of parameter paths, such as `mlp.up.kernel`, and shardings. The first match counts."""

RULES: Rules = (
    (r"embed\.embedding$", PartitionSpec("model", "fsdp")),
    (r"head\.kernel$", PartitionSpec("fsdp", "model")),
    (r"(attention\.(query|key|value|up)|mlp\.(shared\.)?(gate|up))\.kernel$", PartitionSpec("fsdp", "model")),
    (r"(attention\.(query|key|value)|mlp\.(gate|up))\.bias$", PartitionSpec("model")),
    (r"(attention\.out|mlp\.(shared\.)?down)\.kernel$", PartitionSpec("model", "fsdp")),
    (r"attention\.(query_down|latent)\.kernel$", PartitionSpec("fsdp", None)),
    (r"mlp\.experts\.(gate|up)\.kernel$", PartitionSpec(None, "fsdp", "model")),
    (r"mlp\.experts\.down\.kernel$", PartitionSpec(None, "model", "fsdp")),
    (r"mlp\.experts\.(gate|up)\.bias$", PartitionSpec(None, "model")),
)
"""Tensor parallel over `model`, by heads and hidden features; fully sharded over `fsdp`; all others replicated.

Every device has a part of each expert; no rule divides experts among devices.
"""

_HEADS = r"attention\.(query|key|value|up)\.kernel$"


def parameter_shardings(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, rules: Rules = RULES, *, num_kv_heads: int | None = None
) -> dict[str, NamedSharding]:
    """The sharding of each parameter.

    Args:
        shapes: Shape of each parameter, by path.
        mesh: The devices. Axes in `rules` that the mesh does not have are ignored. Whatever the axis types of the
            mesh, the axes of the shardings are automatic: XLA decides how activations are sharded.
        rules: Shardings by path. Parameters that match none are replicated.
        num_kv_heads: If set, each device must hold whole heads.

    Raises:
        ValueError: The mesh does not divide the heads, or an axis of a parameter. The message lists all parameters. Or
            there are fused projections, which no rule knows.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> parameter_shardings({"blocks.0.mlp.up.kernel": (64, 128)}, mesh)["blocks.0.mlp.up.kernel"].spec
        P(None, 'model')
    """
    if fused := [path for path in shapes if ".fused." in path]:
        raise ValueError(
            f"`shapes` must be of a model whose projections are not fused: a mesh divides each of them. Got "
            f"{fused[0]}. Leave `fuse_projections` out."
        )
    mesh = automatic_mesh(mesh)
    shardings, wrong = {}, []
    for path, shape in shapes.items():
        spec = _present(next((spec for pattern, spec in rules if re.search(pattern, path)), PartitionSpec()), mesh)
        for axis, names in enumerate(spec):
            parts = math.prod(mesh.shape[name] for name in _names(names))
            units = shape[axis]
            if num_kv_heads is not None and axis == 1 and re.search(_HEADS, path):
                units = math.gcd(units, num_kv_heads) if "query" in path else num_kv_heads
            if units % parts:
                units_text = f"{units} heads" if units != shape[axis] else f"axis {axis} of size {units}"
                wrong.append(f"{path} {list(shape)}: {units_text}, over {parts} devices")
        shardings[path] = NamedSharding(mesh, spec)
    if wrong:
        raise ValueError(
            f"`mesh` {dict(mesh.shape)} does not divide {len(wrong)} parameters:\n  " + "\n  ".join(wrong)
            + "\nMake an axis of the mesh smaller, or pass `rules` that replicate these parameters."
        )  # fmt: skip
    return shardings


def automatic_mesh(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes; `jax.make_mesh` makes explicit ones, where every operation would need shardings."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _present(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The spec without axes that the mesh does not have."""
    axes = []
    for names in spec:
        names = tuple(name for name in _names(names) if name in mesh.shape)
        axes.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*axes)


def _names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
