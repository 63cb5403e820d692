"""The mesh of devices, and how rows are sharded over it."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layers.models import ModelConfig
from flax_layers.train.errors import InputError

AXES = ("data", "fsdp", "model")
"""Rows are sharded over `data` and `fsdp`, parameters over `fsdp` and `model`: see `flax_layers.models.sharding`."""

ROWS = PartitionSpec(("data", "fsdp"))
"""Of the rows of a batch."""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads sizes of axes, as `--mesh` takes them.

    Args:
        text: As `data=2,fsdp=1,model=4`; axes that are left out have size 1.

    Returns:
        The size of each axis.

    Raises:
        InputError: It does not have that form.

    Example:
        >>> parse_mesh("data=2,model=4")
        {'data': 2, 'fsdp': 1, 'model': 4}
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isascii() or not size.isdigit() or not int(size):
            raise InputError(
                f"`--mesh` must be sizes of {', '.join(AXES)}, as data=2,fsdp=1,model=4. Got {part!r} in {text!r}."
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """The mesh of the first devices.

    Args:
        sizes: Of each axis.

    Returns:
        The mesh.

    Raises:
        InputError: There are fewer devices.
    """
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        raise InputError(
            f"`--mesh` {_named(sizes)} needs {needed} devices. There are {len(devices)}. Make an axis smaller."
        )
    if needed < len(devices):
        grid = np.asarray(devices[:needed]).reshape(*sizes.values())
        return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_mesh(mesh: Mesh, config: ModelConfig, batch: int, accumulate: int) -> None:
    """Refuses a mesh that would cut a head or a row.

    Args:
        mesh: The devices.
        config: The model.
        batch: Rows of a step.
        accumulate: Micro-batches of a step.

    Raises:
        InputError: It would, or the parts of a step are not of one size.
    """
    if batch % accumulate:
        raise InputError(
            f"`--accumulate` must divide the rows of a step, `--batch` {batch}. Got {accumulate}. Change one of them."
        )
    parts, shards = mesh.shape["model"], row_shards(mesh)
    for name, heads in (("num_kv_heads", config.num_kv_heads), ("num_heads", config.num_heads)):
        if heads % parts:
            raise InputError(
                f"`--mesh` {_named(mesh.shape)} must divide the heads of the model among the devices of `model`. Got "
                f"{name}={heads} for {parts} devices. Make `model` a divisor of {heads}, and use the other devices for "
                "`data` or `fsdp`."
            )
    if batch // accumulate % shards:
        raise InputError(
            f"`--mesh` {_named(mesh.shape)} must divide the rows that are computed at a time among data * fsdp = "
            f"{shards} devices. Got {batch // accumulate} rows, `--batch` {batch} in {accumulate} parts. Change "
            "`--batch` or `--accumulate`, or make the axes smaller."
        )


def row_shards(mesh: Mesh) -> int:
    """The number of shards of the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def placed(mesh: Mesh, *spec: str | tuple[str, ...] | None) -> NamedSharding:
    """The sharding of an array on the mesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def _named(sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
