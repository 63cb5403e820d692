"""Exceptions of `PagePool` and `PrefixCache`."""


class OutOfPages(RuntimeError):
    """Not enough free pages. Nothing was allocated: release pages, or wait, and try again."""


class DoubleFree(ValueError):
    """A page is released more often than it has owners. Nothing was released."""


class ForeignPage(ValueError):
    """A page is not one of the pool (from 1 to below P), is free and must have an owner, or is of a prefix cache."""


class StaleHit(ValueError):
    """A `PrefixHit` is not locked: it was unlocked or replaced, or another cache gave it. Nothing was changed."""


class PrefixLocked(RuntimeError):
    """Pages that hits lock cannot be cleared. Nothing was cleared: unlock the hits, or wait, and try again."""
