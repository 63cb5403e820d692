"""Imports go one way, `flax_layers -> jflex -> pallas_kernels -> jax`, read from the source of every module."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ABOVE = {"pallas_kernels": {"jflex", "flax_layers"}, "jflex": {"flax_layers"}, "flax_layers": {"pallas_kernels"}}
"""What a package may not import: the rooms above it, and for the layers the kernels too, two rooms below."""

Import = tuple[str, bool]  # full module name, inside a function


def imports(tree: ast.AST, package: str, in_function: bool = False) -> Iterator[Import]:
    """Every import under `tree` with its full name (`package` resolves relative ones), and whether it is lazy."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", in_function) for alias in node.names)
        elif not is_type_checking(node):
            lazy = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, lazy)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(path: pathlib.Path) -> list[Import]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports(ast.parse(path.read_text()), package))


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


# What both packages speak of: plain dataclasses, without Pallas.
SHARED = ("pallas_kernels.config", "pallas_kernels.plan", "pallas_kernels.spec")


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


def test_only_the_triton_room_and_its_adapters_know_triton():
    rooms = (ROOT / "pallas_kernels" / "triton", ROOT / "jflex" / "backends" / "gpu" / "triton.py")
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ABOVE
        for path in sources(package)
        for name, _ in imports_of(path)
        if starts_with(name, "jax.experimental.pallas.triton", "pallas_kernels.triton")
        and not any(path.is_relative_to(room) for room in rooms)
    ]
    assert not found


def test_only_flax_layers_import_flax():
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("jflex", "pallas_kernels")
        for path in sources(package)
        for name, _ in imports_of(path)
        if starts_with(name, "flax", "optax")
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jflex.attention", [("jflex.attention", False)]),
        ("from . import base", [("room.inner.base", False)]),
        ("from ..other import name", [("room.other.name", False)]),
        ("def f():\n    from pallas_kernels import mods", [("pallas_kernels.mods", True)]),
        ("class A:\n    def f(self):\n        if True:\n            import flax", [("flax", True)]),
        ("if TYPE_CHECKING:\n    import flax", []),
    ],
)
def test_the_reader_sees(source: str, expected: list[Import]):
    assert list(imports(ast.parse(source), "room.inner")) == expected
