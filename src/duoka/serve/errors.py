"""Errors as clients of OpenAI's interface know them."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class HttpError(Exception):
    """A request that isn't answered: its status, and what its body says.

    Parameters
    ----------
    status : int
        Of HTTP.
    text : str
    code, param : str, optional
        OpenAI's name of the error, and the field that is wrong.
    retry_after : int, optional
        Seconds after which it is worth asking again.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        return _TYPES.get(self.status, "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """What is answered."""
        error = {"message": self.text, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """What is said in headers."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})
