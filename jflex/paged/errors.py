"""What a pool of pages raises."""


class OutOfPages(RuntimeError):
    """More pages are asked for than are free. Nothing was allocated: release pages, or wait, and ask again."""


class DoubleFree(ValueError):
    """A page is released more often than it has owners. Nothing was released."""


class ForeignPage(ValueError):
    """A page is not one that the pool hands out (1 up to P), or it is free where one with an owner is needed."""
