"""Exceptions of `PagePool`."""


class OutOfPages(RuntimeError):
    """Not enough free pages. Nothing was allocated: release pages, or wait, and try again."""


class DoubleFree(ValueError):
    """A page is released more often than it has owners. Nothing was released."""


class ForeignPage(ValueError):
    """A page is not one of the pool (from 1 to below P), or it is free and must have an owner."""
