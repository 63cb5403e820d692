"""Runs the Hopper kernels on a CPU: each warp group is a Python thread, and refs are numpy arrays.

A kernel through Mosaic GPU is Python that JAX traces. Here it is called with concrete values instead, under
`jax.disable_jit`, so that loops and branches run as Python; what Pallas calls is replaced by its meaning: memory
barriers with phases, named barriers, TMA copies with zeros past the end, wgmma in float32. So the results, the order of
loads and waits, and deadlocks are those of the kernel. Registers, swizzles, asynchronous wgmma and speed are not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from jflex import entry
from jflex._jax import custom_vjp, forward_mode
from jflex.backends.gpu import mosaic_gpu as adapter
from pallas_kernels.mosaic_gpu import global_rows, inline_ptx, register_order, selections, split_kv, work_items
from pallas_kernels.mosaic_gpu.backward import captured, dkv, dq
from pallas_kernels.mosaic_gpu.forward import kernel as forward_kernel
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP
from pallas_kernels.mosaic_gpu.prompt import kernel as prompt_kernel
from pallas_kernels.mosaic_gpu.tangent import kernel as tangent_kernel

SECONDS = 120.0  # after which a warp group that waits is stuck
TMA_IS_LATE = False  # a copy into shared memory is there at once, or only when a warp group waits for it
_WARP_GROUP_THREADS = 128
here = threading.local()


class Memory:
    """A ref: a window of an array, which may reach past its end, in one or the other order of its axes."""

    def __init__(self, array: np.ndarray, window: tuple | None = None, *, transposed: bool = False):
        self.array, self.transposed = array, transposed
        self.window = tuple((0, size, True) for size in array.shape) if window is None else window

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(size for _, size, kept in self.window if kept)
        return shape[::-1] if self.transposed else shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def T(self) -> Memory:
        assert len(self.shape) == 2
        return Memory(self.array, self.window, transposed=not self.transposed)

    @property
    def at(self) -> Memory:
        """Indexed by the next brackets."""
        return _At(self)

    def narrowed(self, index: Any) -> Memory:
        index = list(index if isinstance(index, tuple) else (index,))
        if any(x is Ellipsis for x in index):
            where = next(i for i, x in enumerate(index) if x is Ellipsis)
            index[where : where + 1] = [slice(None)] * (len(self.shape) - len(index) + 1)
        index += [slice(None)] * (len(self.shape) - len(index))
        index, window = iter(index[::-1] if self.transposed else index), []
        for first, size, kept in self.window:
            window.append(_part(first, size, next(index)) if kept else (first, size, kept))
        return Memory(self.array, tuple(window), transposed=self.transposed)

    def read(self) -> np.ndarray:
        """The elements; zeros past the end, as TMA fills them."""
        found = np.zeros([size for _, size, _ in self.window], self.dtype)
        inside = tuple(slice(0, max(0, min(size, end - first))) for (first, size, _), end in self._ends())
        found[inside] = self.array[tuple(slice(first, first + size) for first, size, _ in self.window)]
        found = found.reshape([size for _, size, kept in self.window if kept])
        return found.T if self.transposed else found

    def write(self, x: Any, *, add: bool = False) -> None:
        """Stores what lies inside of the array."""
        x = np.broadcast_to(np.asarray(x), self.shape).astype(self.dtype)
        x = (x.T if self.transposed else x).reshape([size for _, size, _ in self.window])
        x = x[tuple(slice(0, max(0, min(size, end - first))) for (first, size, _), end in self._ends())]
        target = tuple(slice(first, first + size) for first, size, _ in self.window)
        self.array[target] = self.array[target] + x if add else x

    def _ends(self) -> Iterator[tuple[tuple[int, int, bool], int]]:
        assert all(first >= 0 for first, _, _ in self.window), self.window
        return zip(self.window, self.array.shape, strict=True)

    def __getitem__(self, index: Any) -> jax.Array:
        return jnp.asarray(self.narrowed(index).read())

    def __setitem__(self, index: Any, x: Any) -> None:
        self.narrowed(index).write(x)


class _At:
    def __init__(self, memory: Memory):
        self.memory = memory

    def __getitem__(self, index: Any) -> Memory:
        return self.memory.narrowed(index)


def _part(first: int, size: int, index: Any) -> tuple[int, int, bool]:
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        assert step == 1
        return first + start, stop - start, True
    if isinstance(index, pl.Slice):
        return first + int(index.start), int(index.size), True
    assert 0 <= int(index) < size, f"index {index} of {size}"
    return first + int(index), 1, False


class Barrier:
    """Memory barriers: a phase ends with the last arrival; each warp group waits for one phase after the other.

    Copies of a TMA that is late are made by the warp group that waits for them. So a wait that is left out leaves what
    memory held, however the threads are scheduled.
    """

    def __init__(self, count: int, arrivals: int, cta: Cta):
        self.arrivals, self.cta = arrivals, cta
        self.arrived, self.phases, self.waited = [0] * count, [0] * count, [{} for _ in range(count)]
        self.late: list[list[Callable[[], None]]] = [[] for _ in range(count)]

    def is_past(self, i: int, phase: int) -> bool:
        """Whether so many phases have ended, with the copies that are late made as far as they are needed."""
        while self.phases[i] < phase and self.late[i]:
            self.late[i].pop(0)()
        return self.phases[i] >= phase

    def check_room(self, i: int) -> None:
        """Copies arrive when they begin. An arrival of the next phase, before this one has ended, is illegal."""
        assert self.arrived[i] + len(self.late[i]) < self.arrivals, "a barrier got arrivals of two phases at once"

    @property
    def at(self) -> Barrier:
        return self

    def __getitem__(self, index: Any) -> tuple[Barrier, int]:
        return self, int(index)


def _which(barrier: Any) -> tuple[Barrier, int]:
    return barrier if isinstance(barrier, tuple) else (barrier, 0)


def arrive(barrier: Any) -> None:
    barriers, i = _which(barrier)
    with barriers.cta.changed:
        barriers.check_room(i)
        barriers.arrived[i] += 1
        if barriers.arrived[i] == barriers.arrivals:
            barriers.arrived[i], barriers.phases[i] = 0, barriers.phases[i] + 1
        barriers.cta.changed.notify_all()


def wait(barrier: Any) -> None:
    barriers, i = _which(barrier)
    waited = barriers.waited[i]
    group = here.group
    waited[group] = waited.get(group, 0) + 1
    phase = waited[group]
    barriers.cta.wait_for(lambda: barriers.is_past(i, phase))
    # Parity alone tells the phases apart, so that no warp group may be two phases behind.
    assert barriers.phases[i] <= phase + 1, "a barrier went on by two phases before a warp group waited"


class Cta:
    """What the warp groups of a CTA share."""

    def __init__(self):
        self.changed, self.failure = threading.Condition(), None
        self.named: dict[int, int] = {}  # arrivals at named barriers

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: is_done() or self.failure is not None, SECONDS):
                raise TimeoutError(f"warp group {here.group} waits at a barrier for ever")
            if self.failure is not None and not is_done():
                raise RuntimeError("another warp group has failed")

    def named_barrier(self, barrier: Any, threads: int, *, waits: bool) -> None:
        """A phase ends with the last of the threads that arrive or wait."""
        name, groups = int(barrier), threads // _WARP_GROUP_THREADS
        with self.changed:
            self.named[name] = number = self.named.get(name, 0) + 1
            self.changed.notify_all()
        if waits:
            self.wait_for(lambda: self.named[name] >= -(-number // groups) * groups)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()


def _launch(kernel, inputs, outputs, scratch, *, name, num_ctas, warp_groups):
    """As `pallas_kernels.mosaic_gpu.launch.launch`; CTAs run one after the other."""
    del name
    flat, tree = jax.tree.flatten(inputs)
    arrays = [np.array(x[...] if isinstance(x, jax.Ref) else x) for x in flat]
    results = jax.tree.map(_garbage, outputs)
    for number in range(num_ctas):
        cta = Cta()
        declared = jax.tree.map(functools.partial(_declared, cta), scratch)
        refs = jax.tree.unflatten(tree, [Memory(x) for x in arrays])
        body = functools.partial(kernel, jnp.int32(number), refs, jax.tree.map(Memory, results), declared)
        threads = [threading.Thread(target=_run, args=(cta, group, body)) for group in range(warp_groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if cta.failure is not None:
            raise cta.failure
    for x, array in zip(flat, arrays, strict=True):
        if isinstance(x, jax.Ref):
            x[...] = jnp.asarray(array)
    return jax.tree.map(jnp.asarray, results)


def _run(cta: Cta, group: int, body: Callable[[], None]) -> None:
    here.cta, here.group = cta, group
    try:
        with jax.disable_jit():
            body()
    except BaseException as error:
        cta.fail(error)


def _declared(cta: Cta, x: Any) -> Any:
    if isinstance(x, plg.Barrier):
        count = x.num_barriers if isinstance(x.num_barriers, int) else math.prod(x.num_barriers)
        return Barrier(count, x.num_arrivals, cta)
    if isinstance(x, plg.RefUnion):  # the same bytes
        shared, size = np.full(x.shape, -1, np.int8), lambda y: math.prod(y.shape) * np.dtype(y.dtype).itemsize
        return jax.tree.map(lambda y: Memory(shared[: size(y)].view(y.dtype).reshape(y.shape)), tuple(x.refs))
    return Memory(_garbage(x))


def _garbage(x: Any) -> np.ndarray:
    """What memory holds before it is written: NaN, or -1."""
    return np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else -1, x.dtype)


class Accumulator:
    """In the place of `plg.WGMMAAccumulatorRef`: a declaration, or with `init` a value for `pl.run_state`."""

    def __init__(self, shape, dtype=jnp.float32):
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def init(x: jax.Array) -> jax.Array:
        return x


def _run_scoped(function: Callable[..., Any], *declared: Any) -> Any:
    return function(*(Memory(np.zeros(x.shape, x.dtype)) for x in declared))


def _run_state(function: Callable[[Any], None]) -> Callable[[Any], Any]:
    def run(values: Any) -> Any:
        refs = jax.tree.map(lambda x: Memory(np.array(x)), values)
        function(refs)
        return jax.tree.map(lambda ref: ref[...], refs, is_leaf=lambda x: isinstance(x, Memory))

    return run


def _wgmma(accumulator: Memory, a: Any, b: Memory) -> None:
    wide = lambda x: np.asarray(x.read() if isinstance(x, Memory) else x).astype(np.float32)
    with np.errstate(invalid="ignore"):  # rows of padding may be infinite; they are not stored
        accumulator.write(wide(a) @ wide(b), add=True)


def copy_to_smem(source: Memory, target: Memory, barrier: Any) -> None:
    def copy() -> None:
        target.write(source.read())
        arrive(barrier)

    if not TMA_IS_LATE:
        return copy()
    barriers, i = _which(barrier)
    with barriers.cta.changed:
        barriers.check_room(i)
        barriers.late[i].append(copy)
        barriers.cta.changed.notify_all()


_adding = threading.Lock()


def _to_gmem(source: Memory, target: Memory, predicate: Any = None, *, reduction_op: str | None = None) -> None:
    if predicate is None or bool(predicate):
        # A bulk copy, without the bounds of TMA: JAX copies contiguous memory so, and a row has no swizzle.
        is_row = len(target.shape) == 1
        assert not is_row or all(first + size <= end for (first, size, _), end in target._ends()), "spills a row"
        with _adding:
            target.write(source.read(), add=reduction_op == "add")


def _load(source: Memory, index: Any = (), **_: Any) -> jax.Array:
    return source[index] if index != () else source[...]


def _axis_index(name: str) -> jax.Array:
    assert name == WARP_GROUP
    return jnp.int32(here.group)


def _increment(counter: Memory, into: Memory, at: Any) -> None:
    into[at] = counter[0]
    counter[0] = counter[0] + 1


def _gathered(ref: Memory, index: jax.Array) -> jax.Array:
    return jnp.asarray(ref.read()[np.asarray(index)])


def _store_rows(ref: Memory, line: jax.Array, first: int, x: jax.Array) -> None:
    lines, stored = ref.array.reshape(-1, ref.shape[-1]), np.asarray(line) >= 0
    lines[np.asarray(line)[stored], first : first + x.shape[1]] = np.asarray(x)[stored]


def _store_values(ref: Memory, at: jax.Array, x: jax.Array) -> None:
    stored = np.asarray(at) >= 0
    ref.array.reshape(-1)[np.asarray(at)[stored]] = np.asarray(x)[stored]


def _nothing(*_: Any, **__: Any) -> None: ...


_LIBRARY = {"powf": jnp.power, "acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan, "acosh": jnp.arccosh,
            "asinh": jnp.arcsinh, "atanh": jnp.arctanh}  # fmt: skip


def _logistic_of_pairs(exponent, of_rows):
    denominator = 1 + jnp.exp2(jnp.minimum(exponent, 63))
    number = np.arange(exponent.shape[1 - of_rows])
    partner = denominator[number ^ 8] if of_rows else denominator[:, number ^ 1]
    return partner / (denominator * partner)


def _between(s, first, end):
    column = jnp.arange(s.shape[1])[None]
    return (column >= first[:, None]) & (column < end[:, None])


_FUNCTIONS = {
    "exp2": lambda layout, x: jnp.exp2(x),
    "tanh": lambda layout, x: jnp.tanh(x),
    "logistic": lambda layout, exponent: 1 / (1 + jnp.exp2(exponent)),
    "logistic_of_pairs": lambda exponent, of_rows: _logistic_of_pairs(exponent, of_rows),
    "weights": lambda layout, s, log2_scale, row_max: jnp.exp2(s * jnp.float32(log2_scale) - row_max),
    "from_library": lambda name, layout, *x: _LIBRARY.get(name, getattr(jnp, name, None))(*x),
    "load_elements": lambda ref, index, layout, dtype: _gathered(ref, index),
    "load_strided": lambda ref, index, dtype, step: _gathered(ref, index),
    "hardware_barrier": lambda operation, at, threads: here.cta.named_barrier(at, threads, waits=operation == "sync"),
    "continue_columns": lambda layout, x, columns, sign: jnp.concatenate(
        [x + jnp.float32(sign * i) for i in range(0, columns, x.shape[1])], axis=1
    ),
    "hide_range": lambda layout, x: x,
    "columns": lambda layout, x, first, count: x[:, first : first + count],
    "join_columns": lambda layout, *parts: jnp.concatenate(parts, axis=1),
    "sum_columns": lambda layout, x: x.reshape(x.shape[0], -1, inline_ptx.TILE_COLUMNS).sum(axis=1),
    "atomic_increment": _increment,
    "differ_in_warp": lambda layout, x, y: jnp.any(x != y),
    "unknown": lambda layout, x: x,
    "unknown_zero": lambda: jnp.int32(0),
}

_SELECTIONS = {
    "keep_from": lambda layout, x, number, least: jnp.where(number >= jnp.uint32(least), x, 0),
    "mask_scores": lambda layout, s, shown: jnp.where(functools.reduce(jnp.logical_and, shown), s, -jnp.inf),
    "keep_between": lambda s, first, end: jnp.where(_between(s, first, end), s, -jnp.inf),
}


def _store_in_register_order(ref: Any, x: jax.Array) -> None:
    """The inverse of `register_order.to_rows`, for one tile."""
    parts = np.asarray(x).reshape(4, 2, 8, -1, 2, 4, 2)  # warp, 8 rows, row; 16 columns, 8 columns, thread, column
    ref[...] = parts.transpose(3, 1, 0, 2, 5, 4, 6).reshape(ref.shape)


def _add_in_register_order(ref: Any, x: jax.Array, adds: Any) -> None:
    if bool(adds):
        ordered = np.empty(ref.shape, np.float32)
        _store_in_register_order(ordered, x)
        with _adding:
            ref.write(ordered, add=True)


def _load_in_register_order(ref: Any) -> jax.Array:
    return register_order.to_rows(jnp.asarray(ref[...])[None, None])


def _copy_rows(ref: Memory, line: jax.Array, target: Memory) -> None:
    """Copies rows when this warp group waits for its copies, and no earlier."""
    rows = ref.array.reshape(-1, ref.shape[-1])[np.asarray(line)]
    here.copies = [*getattr(here, "copies", ()), (target, rows)]


def _wait_for_copies() -> None:
    for target, rows in here.__dict__.pop("copies"):
        target[...] = rows


_ROWS = {"load_rows": lambda ref, line: jnp.asarray(ref.array.reshape(-1, ref.shape[-1])[np.asarray(line)]),
         "copy_rows": _copy_rows, "wait_for_copies": _wait_for_copies, "store_rows": _store_rows,
         "store_values": _store_values}  # fmt: skip


def _after_barrier(barrier: Any, threads: int, layout: Any, x: jax.Array, operation: str = "sync") -> jax.Array:
    here.cta.named_barrier(barrier, threads, waits=operation == "sync")
    return x


def _before_barrier(barrier: Any, threads: int, layout: Any, x: jax.Array) -> jax.Array:
    assert not (np.asarray(x) < 0).any()  # NaN passes, as in the kernel
    here.cta.named_barrier(barrier, threads, waits=False)
    return x


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Makes ``implementation="mosaic_gpu"`` run on a CPU, for calls outside of `jax.jit`.

    What the Triton kernels compute beside it needs `jflex.Config(interpret=True)`. There are two persistent CTAs, so
    that each computes several tiles.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, functions in ((inline_ptx, _FUNCTIONS), (selections, _SELECTIONS), (global_rows, _ROWS)):
            for name, function in functions.items():
                patch.setattr(module, name, function)
        patch.setattr(register_order, "store", _store_in_register_order)
        patch.setattr(register_order, "add", _add_in_register_order)
        patch.setattr(register_order, "load", _load_in_register_order)
        patch.setattr(inline_ptx, "after_barrier", _after_barrier)
        patch.setattr(inline_ptx, "before_barrier", _before_barrier)
        for name, function in {
            "barrier_wait": wait, "barrier_arrive": arrive, "copy_gmem_to_smem": copy_to_smem,
            "copy_smem_to_gmem": _to_gmem, "commit_smem": _nothing, "wait_smem_to_gmem": _nothing,
            "set_max_registers": _nothing, "wgmma": _wgmma, "wgmma_wait": _nothing, "async_prefetch": _nothing,
            "wgmma_accumulator_load": lambda ref, **_: ref[...], "WGMMAAccumulatorRef": Accumulator, "ACC": Accumulator,
            "layout_cast": lambda x, layout: x, "load": _load,
            "broadcasted_iota": lambda dtype, shape, axis, **_: lax.broadcasted_iota(dtype, shape, axis),
        }.items():  # fmt: skip
            patch.setattr(plg, name, function)
        patch.setattr(pl, "run_scoped", _run_scoped)
        patch.setattr(pl, "run_state", _run_state)
        patch.setattr(lax, "axis_index", _axis_index)
        for module in (forward_kernel, captured, dkv, dq, split_kv, prompt_kernel, tangent_kernel):
            patch.setattr(module, "launch", _launch)
        patch.setattr("pallas_kernels.mosaic_gpu.schedule.NUM_CTAS", 2)
        patch.setattr(work_items, "NUM_SMS", 2)
        patch.setattr(adapter, "limit_of_machine", lambda spec: None)
        for module in (custom_vjp, entry):
            patch.setattr(module, "call_as_primitive", lambda op, arrays: op(arrays))
        tangent = functools.partialmethod(forward_mode._Linear._forward, run=lambda op, arrays: op(arrays))
        patch.setattr(forward_mode._Linear, "_forward", tangent)
        patch.setattr(forward_mode, "_bind", lambda linear, *arrays: linear(*arrays))
        yield
