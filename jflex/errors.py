"""The exception of calls that no requested implementation supports."""


class UnsupportedError(NotImplementedError):
    """A backend cannot do what was asked, though the call itself is right.

    The message holds the reason of every backend that was considered, and what would run instead.

    >>> issubclass(UnsupportedError, NotImplementedError)
    True
    """
