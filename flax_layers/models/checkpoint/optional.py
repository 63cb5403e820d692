"""Packages of the optional extras, such as `models`."""

import contextlib
import importlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str, extra: str = "models") -> Iterator[None]:
    """Raises ModuleNotFoundError with the extra of `pyproject.toml` to install, if an import inside lacks the package.

    Example:
        >>> with needs("absent"):
        ...     import absent
        Traceback (most recent call last):
        ModuleNotFoundError: `flax_layers.models` needs absent: in a checkout, pip install -e '.[models]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"`flax_layers.{extra}` needs {package}: in a checkout, pip install -e '.[{extra}]'", name=package
        ) from None


def check_installed(*packages: str, extra: str) -> None:
    """Imports packages that are used late, so that a missing one is known at the start, as an error of `needs`."""
    for package in packages:
        with needs(package, extra):
            importlib.import_module(package)
