"""Several processes, one engine: the first decides, all run the same steps on their part of a mesh.

`jax.distributed` makes one mesh of the devices of all processes, and a program on it runs only when every process
dispatches it. So the first process, which holds the queue and the pages, tells each call of its executor to the others
before it makes the call itself: a few kilobytes over a connection of its own. `multihost_utils.broadcast_one_to_all`
would send them over the mesh, whose devices are busy with the step before: beside a program of 3.2 s it returned after
3.1 s (two processes on a CPU, JAX 0.10.2), so the host could not run ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import sys
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from flax_layers.attention.streaming import Streaming
from flax_layers.models import Decoder
from flax_layers.serving.device.executor import Executor
from flax_layers.serving.device.options import EngineOptions, Program, Shape
from flax_layers.serving.device.step import CHANGES
from jflex.types import AnyArray

_CALLS = ("run", *CHANGES, "reset", "close")
_HEADER = len(Shape._fields) + len(Program._fields)  # with the number of the call
_SECRET = 32
_ANSWER = 512


class LeadingExecutor(Executor):
    """The executor of the first process: tells each call, and first the options, to the others.

    They connect to `host`, the address of this process.
    """

    def __init__(self, model: Decoder, options: EngineOptions, host: str):
        self._followers = _meet(host)
        for follower in self._followers:
            follower.send_bytes(json.dumps(dataclasses.asdict(options)).encode())
        super().__init__(model, options)

    def lower(self, packed: Int32[AnyArray, " words"], program: Program) -> None:
        """None: all processes compile in the same order, as they run."""

    def run(self, packed: Int32[AnyArray, " words"], program: Program) -> Int32[Array, "R fields"]:
        """See `Executor.run`."""
        self._tell("run", packed, *program.shape, *program[1:])
        return super().run(packed, program)

    def change(self, change: str, words: Int32[AnyArray, " words"]) -> None:
        """See `Executor.change`."""
        self._tell(change, words)
        super().change(change, words)

    def is_intact(self) -> bool:
        """False: other processes may have run the call."""
        return False

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._tell("reset")
        super().reset()

    def close(self) -> None:
        """Ends the other processes, too, and leaves them."""
        with contextlib.suppress(OSError):  # one has died
            self._tell("close")
        while self._followers:
            self._followers.pop().close()
        jax.distributed.shutdown()  # now: a signal may end this process before Python's own end, and the others with it

    def _tell(self, call: str, words: Int32[AnyArray, " words"] | None = None, *numbers: int) -> None:
        header = np.zeros(_HEADER, np.int32)
        header[: 1 + len(numbers)] = (_CALLS.index(call), *numbers)
        message = header if words is None else np.concatenate([header, np.asarray(words, np.int32)])
        for follower in self._followers:
            follower.send_bytes(message.tobytes())


def follow(model: Decoder) -> None:
    """Runs the calls of process 0 until it ends; for all other processes, with the model sharded alike."""
    # Ctrl-C reaches all processes of a terminal. Process 0 ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _join() as leader:
            _run_calls(leader, model)
    except EOFError:
        sys.exit("error: the connection to process 0 is lost. Its output says why.")
    jax.distributed.shutdown()


def _run_calls(leader: Connection, model: Decoder) -> None:
    options = json.loads(leader.recv_bytes())
    streaming = options.pop("streaming")
    options["streaming"] = None if streaming is None else Streaming(**streaming)
    executor = Executor(model, EngineOptions(**options))
    while True:
        message = np.frombuffer(leader.recv_bytes(), np.int32)
        (number, *numbers), words = message[:_HEADER].tolist(), message[_HEADER:]
        call = _CALLS[number]
        if call == "run":
            shape, kind = numbers[: len(Shape._fields)], numbers[len(Shape._fields) :]
            executor.run(words, Program(Shape(*shape), *map(bool, kind)))
        elif call in CHANGES:
            executor.change(call, words)
        elif call == "reset":
            executor.reset()
        else:
            return


def _meet(host: str) -> list[Connection]:
    """Waits for all other processes. They get address and key over the mesh, so no other process can connect."""
    key, followers = secrets.token_bytes(_SECRET), []
    with Listener((host, 0), authkey=key) as listener:
        _broadcast(key + json.dumps(listener.address).encode())
        while len(followers) < jax.process_count() - 1:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # a stranger
                followers.append(_without_delay(listener.accept()))
    return followers


def _join() -> Connection:
    text = _broadcast(b"")
    host, port = json.loads(text[_SECRET:])
    return _without_delay(Client((host, port), authkey=text[:_SECRET]))


def _without_delay(connection: Connection) -> Connection:
    """Sends small messages at once; by default TCP keeps them until the last one is acknowledged, for up to 40 ms."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _broadcast(text: bytes) -> bytes:
    """The text of the first process."""
    padded = np.frombuffer(text.ljust(_ANSWER), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip()


def connect(options: argparse.Namespace) -> Mesh | None:
    """Initializes JAX's processes, if there are several; returns the devices that share the model, if several."""
    passed = [getattr(options, name) is not None for name in ("coordinator", "processes", "process")]
    if any(passed) != all(passed):
        raise ValueError("`--coordinator`, `--processes` and `--process` must be passed together, or none of them.")
    if all(passed):
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
    """The devices that share the model, as many of each process; None for one device."""
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
