"""Imports of the packages in the extra `models`."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Says how to install a package if it is missing.

    Args:
        package: The package that is imported in the context.

    Raises:
        ModuleNotFoundError: It is not installed.

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
