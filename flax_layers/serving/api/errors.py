"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`, with an HTTP status."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    """The `type` and `code` of an HTTP status."""

    type: str
    code: str | None


_KINDS = {
    400: _Kind("invalid_request_error", None),
    401: _Kind("authentication_error", "invalid_api_key"),
    403: _Kind("permission_error", "forbidden"),
    404: _Kind("not_found_error", "not_found"),
    405: _Kind("invalid_request_error", "method_not_allowed"),
    408: _Kind("timeout_error", "timeout"),
    413: _Kind("invalid_request_error", "request_too_large"),
    429: _Kind("rate_limit_error", "rate_limit_exceeded"),
    500: _Kind("server_error", "server_error"),
    503: _Kind("service_unavailable_error", "service_unavailable"),
}

RETRY_SECONDS = 1
"""`Retry-After` of refused requests, in seconds."""


class ApiError(Exception):
    """The error that answers a failed request.

    Args:
        status: Of HTTP.
        message: What is wrong, the rule, the values, the remedy.
        param: The parameter that is wrong; default: the first that the message names in backquotes, if it is a 400.
        code: A code for programs. Default: follows from the status.

    Example:
        >>> ApiError(400, "`n` must be at least 1. Got 0.").body()["error"]["param"]
        'n'
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message = status, message
        named = re.match(r"`([\w.]+)`", message) if status == 400 else None
        self.param = named[1] if param is None and named else param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in (408, 413):  # what is left of the body is not read
            return {"Connection": "close"}
        return {}

    def body(self) -> dict[str, Any]:
        """The error object of the answer, as JSON."""
        kind = _KINDS.get(self.status, _KINDS[400 if self.status < 500 else 500])
        error = {"message": self.message, "type": kind.type, "param": self.param, "code": self.code or kind.code}
        return {"error": error}
