"""Every example in a docstring of the three packages runs, gives what it shows, and passes what annotations say."""

import contextlib
import doctest
import importlib
import pathlib

import pytest

from tests.house.test_types import MODULES, all_checked
from tests.support.rows import tiers

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("jflex", "pallas_kernels", "flax_layers")


def modules_with_examples(package: str) -> list[str]:
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if ">>> " in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@tiers(rest="full")
@pytest.mark.parametrize("name", [name for package in PACKAGES for name in modules_with_examples(package)])
def test_examples(name: str):
    module = importlib.import_module(name)
    with all_checked() if name in MODULES else contextlib.nullcontext():
        results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.failed == 0
