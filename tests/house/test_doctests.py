"""Every example in a docstring of the three packages runs and gives what it shows."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("jflex", "pallas_kernels", "flax_layers")


def module_names(package: str) -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / package).rglob("*.py"))]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", [name for package in PACKAGES for name in module_names(package)])
def test_examples(name: str):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.failed == 0
