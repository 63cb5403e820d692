"""Sharding of the parameters of a decoder over a mesh."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Rules = Sequence[tuple[str, PartitionSpec]]
"""Patterns of paths, as `mlp.up.kernel`, and the sharding of parameters that match. The first match counts."""

RULES: Rules = (
    (r"embed\.embedding$", PartitionSpec("model", "fsdp")),
    (r"head\.kernel$", PartitionSpec("fsdp", "model")),
    (r"(attention\.(query|key|value)|mlp\.(gate|up))\.kernel$", PartitionSpec("fsdp", "model")),
    (r"(attention\.(query|key|value)|mlp\.(gate|up))\.bias$", PartitionSpec("model")),
    (r"(attention\.out|mlp\.down)\.kernel$", PartitionSpec("model", "fsdp")),
)
"""Tensor parallel over `model`, by heads and hidden features; fully sharded over `fsdp`; the rest replicated."""

_HEADS = r"attention\.(query|key|value)\.kernel$"


def parameter_shardings(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, rules: Rules = RULES, *, num_kv_heads: int | None = None
) -> dict[str, NamedSharding]:
    """The sharding of each parameter.

    Args:
        shapes: Shape of each parameter, by its path.
        mesh: The devices. Axes that a rule names and the mesh lacks count as absent. Shardings are of its automatic
            form, whatever its axis types: XLA places what the model computes.
        rules: Shardings by path; parameters that match none are replicated.
        num_kv_heads: If set, checks that each device holds whole heads.

    Returns:
        Shardings by path.

    Raises:
        ValueError: The mesh does not divide heads, or the axis of a parameter; the message lists all of them.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> parameter_shardings({"blocks.0.mlp.up.kernel": (64, 128)}, mesh)["blocks.0.mlp.up.kernel"].spec
        P(None, 'model')
    """
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    shardings, wrong = {}, []
    for path, shape in shapes.items():
        spec = _present(next((spec for pattern, spec in rules if re.search(pattern, path)), PartitionSpec()), mesh)
        for axis, names in enumerate(spec):
            parts = math.prod(mesh.shape[name] for name in _names(names))
            units = shape[axis]
            if num_kv_heads is not None and axis == 1 and re.search(_HEADS, path):
                units = math.gcd(units, num_kv_heads) if "query" in path else num_kv_heads
            if units % parts:
                what = "the heads" if units != shape[axis] else f"axis {axis}"
                wrong.append(f"{path} {list(shape)}: {what}, {units}, by {parts}")
        shardings[path] = NamedSharding(mesh, spec)
    if wrong:
        raise ValueError(
            f"`mesh` {dict(mesh.shape)} does not divide {len(wrong)} parameters:\n  " + "\n  ".join(wrong)
            + "\nMake the axis smaller, or pass `rules` that leave them whole."
        )  # fmt: skip
    return shardings


def _present(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Without axes that the mesh lacks."""
    kept = []
    for names in spec:
        names = tuple(name for name in _names(names) if name in mesh.shape)
        kept.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*kept)


def _names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
