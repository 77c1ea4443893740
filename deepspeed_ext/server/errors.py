"""What clients are told that asked for what cannot be done: one form for all of it."""

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong, and what would be right.
        param: the field that it is about, or None.
        code: a word for programs, or None.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def wrong(param: str, value: object, expected: str) -> ApiError:
    """Return the error for a field that has what it may not."""
    return ApiError(400, f"{param} is {_shown(value)}, expected {expected}", param)


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = {True: "true", False: "false"}.get(value) if type(value) is bool else None
    return text or ("null" if value is None else f"{value!r:.60}")
