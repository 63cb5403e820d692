"""Compiles Triton source with official Triton, for any target and on any machine, and keeps the result on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import linecache
import os
import pathlib
import re
import uuid
from typing import Any, NamedTuple

from pallas_kernels.triton.compiler.emit.emit import Source
from pallas_kernels.triton.compiler.launch.installed import triton_version
from pallas_kernels.triton.compiler.launch.target import Target

_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "i1",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
_LAST = {"cuda": "ptx", "hip": "hsaco"}  # stage of the compiler: XLA assembles PTX itself
# Pointers that Triton 3.6 to 3.9 appends to the parameters of a kernel, and the custom call of jaxlib to its arguments.
_HIDDEN_POINTERS = 2


class Compiled(NamedTuple):
    """Machine code, or PTX."""

    name: str
    code: str  # PTX as text; "" for AMD
    shared_memory: int  # bytes of a CTA
    num_warps: int


class CompileError(RuntimeError):
    """A kernel that was compiled cannot be launched."""


@functools.lru_cache(maxsize=1024)
def compiled(source: Source, target: Target, num_warps: int, num_stages: int) -> Compiled:
    """Compiles a kernel.

    Raises:
      CompileError: It takes more shared memory than a CTA may have, or parameters that the launch does not give.
    """
    kernel = _kept(source, target, {"num_warps": num_warps, "num_stages": num_stages})
    if kernel.shared_memory > target.shared_memory:
        raise CompileError(
            f"The kernel `{source.name}` takes {kernel.shared_memory} bytes of shared memory, and a CTA may have "
            f"{target.shared_memory} (of {target.arch}): pass `config=jflex.Config(...)` with smaller `Tiles` or fewer "
            "`num_stages`."
        )
    if target.backend == "cuda":
        _check_parameters(kernel, len(source.dtypes))
    return kernel


def _check_parameters(kernel: Compiled, pointers: int) -> None:
    """With another calling convention, a kernel would read memory that is not its own."""
    entry = re.search(rf"\.entry {re.escape(kernel.name)}\((.*?)\)", kernel.code, re.DOTALL)
    parameters = 0 if entry is None else entry[1].count(".param")
    if parameters != pointers + _HIDDEN_POINTERS:
        raise CompileError(
            f"The kernel `{kernel.name}` of {pointers} arrays has {parameters} parameters, not "
            f"{pointers + _HIDDEN_POINTERS}: this version of Triton has another calling convention than those that "
            "were tested. Install the extra `jax-triton`, or pass implementation='triton' or 'xla'."
        )


def _kept(source: Source, target: Target, sizes: dict[str, int]) -> Compiled:
    """From the cache on disk, or compiled and put there.

    Its folder is Triton's, but it is read without Triton, whose import takes more than half of the time to read the
    twelve kernels of a forward and backward pass (a CPU, 120 ms with it and 50 without).
    """
    key = json.dumps([triton_version(), *source, *target, sizes])
    path = _cache_folder() / hashlib.sha256(key.encode()).hexdigest() / f"{source.name}.jflex.json"
    with contextlib.suppress(OSError):
        return Compiled(**json.loads(path.read_text()))
    kernel = _compile(source, target, sizes)
    with contextlib.suppress(OSError):  # the disk is full, or nothing may be written there: compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(uuid.uuid4().hex)
        partial.write_text(json.dumps(kernel._asdict()))
        partial.replace(path)  # others see a whole file or none
    return kernel


def _cache_folder() -> pathlib.Path:
    """The folder that Triton chooses."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("TRITON_HOME") or pathlib.Path.home()) / ".triton" / "cache"


def _compile(source: Source, target: Target, sizes: dict[str, int]) -> Compiled:
    """Runs the stages of the compiler, as `triton.compile` does, up to what XLA takes."""
    from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]

    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    backend = make_backend(gpu)
    # A product and a sum are one FMA, as in all of JAX on a GPU. Triton asks for the choice to be said.
    version = {"ptx_version": target.ptx} if target.backend == "cuda" else {}
    options = backend.parse_options({**sizes, "enable_fp_fusion": True, **version})
    function = jit_function(source)
    signature = {p.name: f"*{_TYPES[dtype]}" for p, dtype in zip(function.params, source.dtypes, strict=True)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    ast = ASTSource(function, signature, {}, aligned)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": gpu, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, ast.language)
    module = ast.make_ir(gpu, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == _LAST[target.backend]:
            break
    code = str(module) if target.backend == "cuda" else ""
    return Compiled(metadata["name"], code, metadata["shared"], sizes["num_warps"])


@functools.lru_cache(maxsize=1024)
def jit_function(source: Source) -> Any:
    """The kernel as Triton's own function. Triton reads the source of functions, so `linecache` gets it."""
    file = f"<{source.name} {hashlib.sha256(source.text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    module: dict[str, object] = {"__name__": f"jflex.{source.name}"}
    exec(compile(source.text, file, "exec"), module)
    return module[source.name]
