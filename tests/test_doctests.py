"""Every example in a docstring of the three packages runs and gives what it shows."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("jflex", "pallas_kernels", "flax_layers")


def module_names(package: str) -> list[str]:
    """The package and all modules under it, found without importing any but packages."""
    root = importlib.import_module(package)
    return [package, *(module.name for module in pkgutil.walk_packages(root.__path__, f"{package}."))]


@pytest.mark.parametrize("name", [name for package in PACKAGES for name in module_names(package)])
def test_examples(name: str):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.failed == 0
