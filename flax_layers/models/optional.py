"""Packages of the extra `models`."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Says what to install where a package is missing.

    Args:
        package: That is imported inside.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to install it.

    Example:
        >>> with needs("no_such_package"):
        ...     import no_such_package
        Traceback (most recent call last):
        ModuleNotFoundError: `flax_layers.models` needs no_such_package for this: pip install 'jflex[models]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"`flax_layers.models` needs {package} for this: pip install 'jflex[models]'", name=package
        ) from None
