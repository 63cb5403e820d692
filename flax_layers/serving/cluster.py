"""The devices and processes of a server, from its options."""

from __future__ import annotations

import argparse
import signal
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from flax_layers.models import Decoder
from flax_layers.serving.processes import follow


def connect(options: argparse.Namespace) -> Mesh | None:
    """Meets the other processes, if there are any.

    Args:
        options: Of `parser`.

    Returns:
        The devices that share the model; None for one device.

    Raises:
        ValueError: An option is missing or out of its range.
    """
    given = [getattr(options, name) is not None for name in ("coordinator", "processes", "process")]
    if any(given) != all(given):
        raise ValueError("`--coordinator`, `--processes` and `--process` must be passed together, or none of them.")
    if all(given):
        if not 0 <= options.process < options.processes:
            raise ValueError(
                f"`--process` must be from 0 to {options.processes - 1}, one of `--processes`. Got {options.process}."
            )
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    if options.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compilation_cache.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return create_mesh(options)


def create_mesh(options: argparse.Namespace) -> Mesh | None:
    """The devices that share the model, as many of each process.

    Args:
        options: Of `parser`.

    Returns:
        The mesh; None for one device.

    Raises:
        ValueError: `--devices` is out of its range.
    """
    devices, processes = jax.devices(), jax.process_count()
    if not 1 <= options.devices <= len(devices):
        raise ValueError(
            f"`--devices` must be from 1 to {len(devices)}, the devices that JAX finds. Got {options.devices}."
        )
    if options.devices % processes:
        raise ValueError(
            f"`--devices` must be a multiple of the {processes} processes, so that each of them takes part. Got "
            f"{options.devices}."
        )
    if options.devices == 1:
        return None
    if options.model is None:
        raise ValueError("`--devices` must be 1 for the demo's model, which has one KV head. Pass `--model`.")
    each = options.devices // processes
    chosen = [x for n in range(processes) for x in [x for x in devices if x.process_index == n][:each]]
    return Mesh(np.array(chosen), ("model",))


def follow_first(model: Decoder) -> None:
    """Runs the calls of process 0 until it ends.

    Args:
        model: The model.
    """
    # Ctrl-C reaches all processes of a terminal. Process 0 ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        follow(model)
    except EOFError:
        sys.exit("error: the connection to process 0 is lost. Its output says why.")
