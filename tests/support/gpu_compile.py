"""Lowers programs for an NVIDIA H200 and compiles their kernels to machine code, on a machine without a GPU.

Interpret mode accepts what the GPU refuses (a primitive without a lowering, too much shared memory) and says nothing of
registers that spill. Compiling needs what the extra `gpu-compile` installs; lowering needs JAX alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies

from tests.support.haste import compiled_in_haste

DEVICE = "NVIDIA H200"
# Of the device that is not there: limits that steer XLA's and Triton's code, and what its cost models want to know.
_CONFIG = """
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 threads_per_warp: 32 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: 52428800 memory_bandwidth: 4800000000000 device_memory_size: 141000000000
}
"""


class Kernel(NamedTuple):
    """What the compilers made of a kernel.

    Attributes:
      name: Its entry point.
      registers: Of a thread.
      spill: Bytes of registers that a thread stores away.
      tensor: Instructions of the tensor cores: ``"wgmma"``, ``"mma"`` or ``""``.
      shared: Bytes of shared memory of a block.
    """

    name: str
    registers: int
    spill: int
    tensor: str
    shared: int


@functools.cache
def missing() -> str | None:
    """What is not there that compiling needs, as a sentence, or None."""
    try:
        plugin = importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        plugin = None
    if plugin != jax.__version__:
        return f"jax-cuda13-plugin {jax.__version__} is not installed (found: {plugin}); the extra gpu-compile has it"
    if _ptxas() is None:
        return "ptxas was not found; the extra gpu-compile has it"
    return None


def _ptxas() -> pathlib.Path | None:
    found = (pathlib.Path(folder) / "nvidia/cu13/bin/ptxas" for folder in sys.path)
    return next((path for path in found if path.is_file()), None)


@contextlib.contextmanager
def absent_gpu() -> Iterator[None]:
    """Makes JAX lower for the GPU that is not there."""
    device = jax.sharding.AbstractDevice(device_kind=DEVICE, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def lower(function: Any, *arrays: Any) -> Any:
    """Lowers a function for the GPU, with arrays or `jax.ShapeDtypeStruct` for arguments."""
    with absent_gpu():
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


@functools.cache
def absent_gpus(count: int) -> Sequence[Any]:
    """Devices of one host that is not there."""
    return topologies.get_topology_desc(platform="cuda", target_config=_CONFIG, topology=f"1x1x{count}").devices


def _sharding() -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(absent_gpus(1)[0])


def compiled_of(function: Any, *arrays: Any, donate_argnums: tuple[int, ...] = (), **static: Any) -> Any:
    """Compiles a function, to a `jax.stages.Compiled`; a jitted one with its own options, and `static` arguments.

    Raises what XLA raises when it refuses the function. Needs `missing()` to be None.
    """
    jitted = function if static else jax.jit(function, donate_argnums=donate_argnums)
    with absent_gpu(), compiled_in_haste(False):
        traced = jitted.trace(*jax.tree.map(_on_gpu, arrays), **static)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def _on_gpu(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding())


def compile_kernels(function: Any, *arrays: Any) -> list[Kernel]:
    """Compiles a function and reports its kernels through Pallas, sorted by name.

    A kernel through Mosaic GPU is compiled once in a process: of a second function that has it, it is not reported.

    Raises whatever Pallas, Triton, XLA or ptxas raise when they refuse it. Needs `missing()` to be None.
    """
    lowered = lower(function, *jax.tree.map(_on_gpu, arrays))
    with tempfile.TemporaryDirectory() as folder, compiled_in_haste(False):
        with _mosaic_dump(pathlib.Path(folder, "mosaic")) as mosaic:
            compiled = lowered.compile(compiler_options=_ptx_in(folder))
        calls = (line for line in compiled.as_text().splitlines() if "__gpu$xla.gpu.triton" in line)
        names = {re.sub(r"\W", "_", re.findall(r'\bname = "([^"]+)"', line)[-1]) for line in calls}
        texts = (path.read_text() for path in pathlib.Path(folder).glob("*.ptx"))
        shared = _shared(folder)
        kernels = (_assembled(text, folder, shared) for text in texts if re.sub(r"__\d+$", "", _entry(text)) in names)
        return sorted([*kernels, *_mosaic_kernels(mosaic.read_text(errors="replace"), folder)])


def compile_or_skip(function: Any, *arrays: Any) -> list[Kernel]:
    """Compiles kernels; without the compilers it lowers the function and skips the rest of the test."""
    if missing():
        lower(function, *arrays)
        pytest.skip(f"lowered, but not compiled: {missing()}")
    return compile_kernels(function, *arrays)


def ptx_of(function: Any, *arrays: Any) -> list[str]:
    """The PTX of all kernels of a function, those of XLA included. Needs `missing()` to be None."""
    lowered = lower(function, *jax.tree.map(_on_gpu, arrays))
    with tempfile.TemporaryDirectory() as folder, compiled_in_haste(False):
        lowered.compile(compiler_options=_ptx_in(folder))
        return [path.read_text() for path in pathlib.Path(folder).glob("*.ptx")]


def _ptx_in(folder: str) -> dict[str, str]:
    """Compiler options that dump the PTX of every kernel, those of XLA's own fusions included."""
    return {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}


@contextlib.contextmanager
def _mosaic_dump(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Has Mosaic GPU print PTX and the code that launches it; it prints from C++, so all of the output is turned."""
    wanted = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
    sys.stdout.flush()
    output = os.dup(1)
    os.environ.update(wanted)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            yield path
    finally:
        os.dup2(output, 1)
        os.close(output)
        for name in wanted:
            del os.environ[name]


def _mosaic_kernels(dump: str, folder: str) -> list[Kernel]:
    """Kernels of a dump: of each the PTX, then the host's code, which names grid, cluster, block and shared memory."""
    found = []
    for text in re.split(r"(?m)^(?=\.version )", dump)[1:]:
        ptx, host = re.split(r"(?m)^; ModuleID", text)[:2]
        launched = re.search(r"@mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr %\w+((?:, i32 \d+){10})", host)
        shared = 0 if launched is None else int(re.findall(r"i32 (\d+)", launched[1])[-1])
        found.append(_assembled(ptx, folder, {_entry(ptx): shared}))
    return found


def _entry(ptx: str) -> str:
    found = re.search(r"\.entry (\w+)", ptx)
    return "" if found is None else found[1]


def _shared(folder: str) -> dict[str, int]:
    """Bytes of shared memory with which XLA launches each kernel."""
    texts = (path.read_text() for path in pathlib.Path(folder).glob("*thunk_sequence.txt"))
    found = (re.findall(r"(\w+) grid: .*?shared_memory: (\d+)", text) for text in texts)
    return {name: int(size) for pairs in found for name, size in pairs}


def _assembled(ptx: str, folder: str, shared: dict[str, int]) -> Kernel:
    """Runs ptxas again, for what it says."""
    source = pathlib.Path(folder, "kernel.ptx")
    source.write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [str(_ptxas()), "-v", f"-arch={target}", str(source), "-o", f"{folder}/kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spill = (
        int(re.search(pattern, said)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    tensor = next((name for name, word in (("wgmma", "wgmma.mma_async"), ("mma", "mma.sync")) if word in ptx), "")
    return Kernel(_entry(ptx), registers, spill, tensor, shared[_entry(ptx)])
