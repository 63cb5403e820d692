"""The exception of calls that no requested implementation supports."""


class UnsupportedError(NotImplementedError):
    """No requested backend supports a call, though the call itself is valid.

    The message gives the reason of every backend that was considered, and the backends that would run the call.

    >>> issubclass(UnsupportedError, NotImplementedError)
    True
    """
