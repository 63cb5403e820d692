"""Memory of a run, known before anything is allocated."""

import math
from typing import NamedTuple

import jax

from flax_layers.train.errors import InputError
from flax_layers.train.trainer import Trainer


class Memory(NamedTuple):
    """Bytes of one device during a step, the most that a run holds; `capacity` is what JAX may allocate, if known."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    """With all other arrays of the step."""
    capacity: int | None = None

    @property
    def total(self) -> int:
        """All of them at once."""
        return sum(self[:4])

    def __str__(self) -> str:
        total, *parts = (f"{x / 1e9:,.2f} GB" if x >= 1e9 else f"{x / 1e6:,.1f} MB" for x in (self.total, *self[:4]))
        capacity = "" if self.capacity is None else f" of {self.capacity / 1e9:,.2f} GB"
        return f"{total}{capacity} on each device: {', '.join(map(' '.join, zip(self._fields, parts, strict=False)))}"

    def check(self) -> None:
        """Raises InputError if the device has less, with what would change it."""
        if self.capacity is None or self.total <= self.capacity:
            return
        remedy = "Recompute more, `--remat blocks`, or compute fewer rows at a time, `--accumulate`."
        if self.total - self.activations > self.capacity:
            remedy = "Shard the parameters over more devices, `--mesh fsdp=...`, or train some of them, `--train`."
        raise InputError(f"The run would not fit into memory: {self}. {remedy}")


def step_memory(
    trainer: Trainer, rows: int, length: int, *, has_documents: bool = True, has_weights: bool = False
) -> Memory:
    """Compiles the step of a trainer for batches of `rows`, and reads its memory from the compiler."""
    stats = trainer.compile(rows, length, has_documents=has_documents, has_weights=has_weights).memory_analysis()
    assert stats is not None  # all platforms have it
    # The state is donated, so that most outputs take the place of arguments.
    arguments = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    shards = lambda arrays: sum(map(size, jax.tree.leaves(arrays)))
    parameters, optimizer = shards(trainer.state.parameters), shards(trainer.state.optimizer)
    others = arguments + stats.temp_size_in_bytes - parameters - optimizer
    gradients = min(shards([trainer.state.parameters[path] for path in trainer.trained]), others)
    statistics = trainer.mesh.local_devices[0].memory_stats() or {}
    return Memory(parameters, optimizer, gradients, others - gradients, statistics.get("bytes_limit"))
