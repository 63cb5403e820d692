"""The mesh of devices, and how rows are sharded over it."""

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layers.context_parallel import ContextParallel
from flax_layers.models import ModelConfig
from flax_layers.train.errors import InputError
from jflex import context_parallel

P = ParamSpec("P")
R = TypeVar("R")

AXES = ("data", "fsdp", "model")
"""Rows are sharded over `data` and `fsdp`, parameters over `fsdp` and `model`: see `flax_layers.models.sharding`."""

CONTEXT = "context"
"""The tokens of a row are sharded over it; a mesh need not have it."""

ORDERS = ("zigzag", "natural")
"""Orders of the tokens of a row among the devices of `context`. Documents are data, so no order depends on them."""

ROWS = PartitionSpec(("data", "fsdp"))
"""Of the rows of a batch."""

LEAST_BLOCK = 16
"""Tokens of the smallest block of a mask that all kernels have tiles for."""


def outside_of_meshes(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function without the mesh of `jax.set_mesh`, whose axes may be explicit; shardings name their own."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return function(*args, **kwargs)

    return call


def parse_mesh(text: str) -> dict[str, int]:
    """Reads sizes of axes, as `--mesh` takes them. Raises InputError for a text of another form.

    Axes that are left out have size 1, except `context`, which is then left out of the sizes, too.

    Example:
        >>> parse_mesh("data=2,model=4")
        {'data': 2, 'fsdp': 1, 'model': 4}
        >>> parse_mesh("data=1,context=2")
        {'data': 1, 'fsdp': 1, 'context': 2, 'model': 1}
    """
    order = (*AXES[:2], CONTEXT, *AXES[2:])  # neighbors along the last axis have the fastest links
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in order or not size.isascii() or not size.isdigit() or not int(size):
            raise InputError(
                f"`--mesh` must be sizes of {', '.join(order)}, as data=2,fsdp=1,model=4. Got {part!r} in {text!r}."
            )
        sizes[name] = int(size)
    return {name: sizes[name] for name in order if name in sizes}


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """The mesh of the first devices. Raises InputError if there are fewer."""
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
    """Raises InputError for a mesh that would cut a head or a row, or for parts of a step of different sizes."""
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


def check_length(mesh: Mesh, length: int, order: str) -> None:
    """Raises InputError for rows that the devices of `context` do not divide into whole blocks of a mask."""
    shards = context_shards(mesh)
    chunks = shards * (2 if order == "zigzag" else 1)
    if shards > 1 and length % (LEAST_BLOCK * chunks):
        raise InputError(
            f"`--mesh` {_named(mesh.shape)} must divide the tokens of a row into {chunks} chunks of a multiple of "
            f"{LEAST_BLOCK}. Got {length} tokens. Make `--length` a multiple of {LEAST_BLOCK * chunks}."
        )


def check_strategy(mesh: Mesh, config: ModelConfig, strategy: str) -> None:
    """Raises InputError for a strategy that would cut a head, or that divides the tokens of latent attention."""
    shards, heads = context_shards(mesh), config.num_kv_heads // mesh.shape["model"]
    if shards > 1 and config.latent is not None:
        raise InputError(
            f"`--mesh` {_named(mesh.shape)} divides the tokens of a row, which latent attention does not. Got {shards} "
            "devices of `context`. Leave it out."
        )
    if strategy == "ulysses" and heads % shards:
        raise InputError(
            f"`--context-strategy ulysses` divides the key heads of a device among the {shards} devices of `context`. "
            f"Got {heads} key heads. Take all_gather or ring."
        )


def context_of(mesh: Mesh, strategy: str, order: str) -> ContextParallel | None:
    """Context parallelism of the layers, by a strategy of `jflex.context_parallel_attention`; None without it."""
    shards = context_shards(mesh)
    if shards == 1:
        return None
    chunks = tuple(context_parallel.zigzag_order(shards).tolist()) if order == "zigzag" else None
    return ContextParallel(mesh, CONTEXT, AXES[:2], AXES[2:], strategy, chunks)


def context_shards(mesh: Mesh) -> int:
    """The number of shards of the tokens of a row."""
    return mesh.shape.get(CONTEXT, 1)


def row_shards(mesh: Mesh) -> int:
    """The number of shards of the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def placed(mesh: Mesh, *spec: str | tuple[str, ...] | None) -> NamedSharding:
    """The sharding of an array on the mesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def _named(sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
