"""Digests of the kernels that tests lower for a GPU, to show that a change of the code leaves the kernels as they are.

    pytest -p tests.support.kernel_text --kernel-text before -m "" -k compile tests/kernels
    python -m tests.support.kernel_text before after

The first command, run before and after, writes a digest for each test into a folder: of the Triton and Mosaic GPU
modules that it lowers, without locations. It compiles nothing, so tests end as skipped. The second prints the tests
that differ.
"""

import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from tests.support import gpu_compile

MODULES = ("ir", "module")  # attributes of a custom call that hold a kernel: Triton, Mosaic GPU
IGNORED = (*MODULES, "kernel_hash")
RECORDS = pytest.StashKey[dict[str, list[str]]]()


def kernels_of(lowered: Any) -> Iterator[str]:
    """Yields the text of each kernel in a lowered function."""
    for call in re.finditer(r"custom_call @([\w$.]*(?:triton|mosaic_gpu)[\w$.]*)", lowered.as_text()):
        yield call[1]
    stack = [lowered.compiler_ir("stablehlo").operation]
    while stack:
        operation = stack.pop()
        stack += [x.operation for region in operation.regions for block in region.blocks for x in block.operations]
        if "mhlo.backend_config" in operation.attributes and "call_target_name" in operation.attributes:
            config = operation.attributes["mhlo.backend_config"]
            names = [x.name for x in config] if isinstance(config, ir.DictAttr) else []
            yield from (f"{name} = {config[name]}" for name in names if name not in IGNORED)
            yield from (module_text(ir.StringAttr(config[name]).value_bytes) for name in MODULES if name in names)


def module_text(serialized: bytes) -> str:
    with mlir.make_ir_context() as context:
        triton_dialect.register_dialect(context)
        mosaic_gpu_dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        return ir.Module.parse(serialized).operation.get_asm(enable_debug_info=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-text", help="write digests of kernels to this folder, and compile none")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kernel-text"):
        gpu_compile.missing = lambda: None  # the compilers are not asked


@pytest.fixture(autouse=True)
def _recorded_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--kernel-text"):
        return
    digests = request.config.stash.setdefault(RECORDS, {}).setdefault(
        f"{request.node.path.stem}::{request.node.name}", []
    )
    lower = gpu_compile.lower

    def record(function: Any, *arrays: Any) -> Any:
        lowered = lower(function, *arrays)
        text = "\n".join(kernels_of(lowered))
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
        return lowered

    def skip(function: Any, *arrays: Any, **_: Any) -> None:
        record(function, *arrays)
        pytest.skip("recorded")

    monkeypatch.setattr(gpu_compile, "lower", record)
    for name in ("compile_kernels", "ptx_of", "compiled_of"):
        monkeypatch.setattr(gpu_compile, name, skip)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--kernel-text")
    if path:
        records = {test: digests for test, digests in session.config.stash.get(RECORDS, {}).items() if digests}
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        pathlib.Path(path, f"{worker}.json").write_text(json.dumps(records, indent=0, sort_keys=True))


def records_in(folder: str) -> dict[str, list[str]]:
    records = {}
    for path in pathlib.Path(folder).glob("*.json"):
        records |= json.loads(path.read_text())
    return records


def main(before: str, after: str) -> int:
    old, new = records_in(before), records_in(after)
    different = sorted(test for test in old.keys() & new.keys() if old[test] != new[test])
    print(f"{len(old.keys() & new.keys())} tests, {sum(map(len, old.values()))} programs, {len(different)} differ")
    print("\n".join(different))
    print(f"only before: {sorted(old.keys() - new.keys())}\nonly after: {sorted(new.keys() - old.keys())}")
    return len(different)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
