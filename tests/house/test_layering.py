"""Imports go one way, `flax_layers -> jflex -> pallas_kernels -> jax`, and never in a circle; read from the source."""

import ast
import functools
import graphlib
import pathlib
from collections.abc import Collection, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ABOVE = {"pallas_kernels": {"jflex", "flax_layers"}, "jflex": {"flax_layers"}, "flax_layers": {"pallas_kernels"}}
"""What a package may not import: the rooms above it, and for the layers the kernels too, two rooms below."""

Import = tuple[str, bool]  # full module name, inside a function


def imports(tree: ast.AST, package: str, in_function: bool = False, for_types: bool = False) -> Iterator[Import]:
    """Every import under `tree` with its full name (`package` resolves relative ones), and whether it is lazy.

    Those under `TYPE_CHECKING` are left out unless `for_types`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", in_function) for alias in node.names)
        elif for_types or not is_type_checking(node):
            lazy = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, lazy, for_types)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def imports_of(path: pathlib.Path, for_types: bool = False) -> list[Import]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports(ast.parse(path.read_text()), package, for_types=for_types))


def sources(package: str) -> list[pathlib.Path]:
    return sorted((ROOT / package).rglob("*.py"))


def starts_with(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("package", ABOVE)
def test_imports_go_one_way(package: str):
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name, _ in imports_of(path)
        if starts_with(name, *ABOVE[package])
    ]
    assert sources(package)
    assert not found


def module_of(name: str, modules: Collection[str]) -> str:
    """The module that an import names, or that holds what it names; "" for one of another library."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle(names: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, the first one again at the end; none without a circle.

    The packages around an imported module, whose `__init__` Python runs first, do not count: those of `jflex` and
    `jflex.paged` name again what their modules hold. A package counts where it is imported by its own name.
    """
    graph = {module: {module_of(name, names) for name in found} - {""} for module, found in names.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_circle():
    paths = {path: path.relative_to(ROOT).with_suffix("") for package in ABOVE for path in sources(package)}
    names = {
        ".".join(short.parts).removesuffix(".__init__"): {name for name, _ in imports_of(path, for_types=True)}
        for path, short in paths.items()
    }
    assert not circle(names)


# What both packages speak of, plain dataclasses, and bounds of blocks and rows; all without Pallas.
SHARED = (
    "pallas_kernels.block_intervals",
    "pallas_kernels.config",
    "pallas_kernels.plan",
    "pallas_kernels.program.ir",
    "pallas_kernels.row_limits",
    "pallas_kernels.spec",
    "pallas_kernels.types",
)


def test_only_backends_import_kernels_and_only_inside_functions():
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("jflex")
        for name, lazy in imports_of(path)
        if starts_with(name, "pallas_kernels", "jax.experimental.pallas")
        and not starts_with(name, *SHARED)
        and not (path.is_relative_to(ROOT / "jflex" / "backends") and ".limits." in name)
        and not (lazy and path.is_relative_to(ROOT / "jflex" / "backends"))
    ]
    assert not found


def test_only_adapters_and_the_split_kv_room_know_triton():
    kernels, adapters = ROOT / "pallas_kernels", ROOT / "jflex" / "backends" / "gpu"
    rooms = {
        "jax.experimental.pallas.triton": (kernels / "triton",),
        "pallas_kernels.triton": (kernels / "triton", kernels / "split_kv", adapters),
        "pallas_kernels.split_kv": (kernels / "split_kv", kernels / "mosaic_gpu", adapters),
    }
    forbidden = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ABOVE
        for path in sources(package)
        for name, _ in imports_of(path)
        for module, allowed in rooms.items()
        if starts_with(name, module) and not any(path.is_relative_to(room) for room in allowed)
    ]
    assert not forbidden


def test_only_flax_layers_import_flax():
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("jflex", "pallas_kernels")
        for path in sources(package)
        for name, _ in imports_of(path)
        if starts_with(name, "flax", "optax")
    ]
    assert not found
