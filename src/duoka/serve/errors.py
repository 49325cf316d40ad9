"""HTTP errors with bodies in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}
CLOSED = 499
"""The status, as in nginx, of a request whose client has disconnected; only for metrics and log."""
VERSION_HEADER = "anthropic-version"
"""The header by which the routes of models tell Anthropic's clients from others."""
NO_THREADS = "thread_unsupported_request"
"""Anthropic's code of a refused thread; its clients then send the whole conversation."""

# Limits of texts and field names in an error, which may quote the request.
_MOST_CHARACTERS, _MOST_PARAM_CHARACTERS = 1500, 200


@dataclass(eq=False)
class HttpError(Exception):
    """An error response: its HTTP status and the error in its body.

    Parameters
    ----------
    status : int
        The HTTP status.
    text : str
        The message.
    code, param : str, optional
        OpenAI's code of the error, and the name of the wrong field.
    retry_after : int, optional
        Seconds after which the client may retry; None if a retry is pointless.
    """

    status: int
    text: str
    code: str | None = field(default=None, kw_only=True)
    param: str | None = field(default=None, kw_only=True)
    retry_after: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Shorten text and field name, which may quote the request."""
        self.text = self.text[:_MOST_CHARACTERS]
        self.param = self.param and self.param[:_MOST_PARAM_CHARACTERS]
        self.args = (self.text,)

    @classmethod
    def of(cls, error: Exception) -> HttpError:
        """Return an HttpError unchanged; convert any other exception, a defect, to status 500."""
        text = f"a defect in duoka: {type(error).__name__}"
        return error if isinstance(error, cls) else cls(500, text, code="internal_error")

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error, by its status."""
        is_client = 400 <= self.status < 500
        return _TYPES.get(self.status, "invalid_request_error" if is_client else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        error = {"message": self.text, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.text}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}

    def body_for(self, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the body in the format of the API to which a request belongs."""
        is_models = VERSION_HEADER in headers and f"{path}/".startswith("/v1/models/")
        is_anthropic = is_models or f"{path}/".startswith("/v1/messages/")
        return self.anthropic_body if is_anthropic else self.body

    @property
    def headers(self) -> dict[str, str]:
        """The additional headers of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def describe_invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> HttpError:
    """Convert pydantic's validation errors of a body to one HttpError with status 400.

    For a value of a union type, pydantic reports an error for each type. The error at the deepest
    position is reported, and a wrong value rather than a missing one.
    """
    # `content` is a string or a list of parts. For [{"type": "text", "text": 3}] pydantic reports
    #     content          the list is not a string
    #     content.0.text   3 is not a string: the deepest error, which the client has to fix
    places = [_find_path(error, body) for error in errors]
    kinds = [error["type"] != "missing" for error in errors]
    deepest, _ = max(zip(places, kinds, strict=True), key=lambda pair: (len(pair[0]), pair[1]))
    deep_errors = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    param = ".".join(deepest) or "body"
    if deep_errors[0]["type"] == "extra_forbidden":
        text = f"{param} is not supported; remove it"
        return HttpError(400, text, code="unknown_parameter", param=param)
    texts = dict.fromkeys(_describe_error(error) for error in deep_errors)
    return HttpError(400, f"{param}: {'; or: '.join(texts)}", param=param)


def _describe_error(error: Mapping[str, Any]) -> str:
    """Describe a pydantic error without its terms for discriminated unions and validators."""
    if error["type"].startswith("union_tag_"):
        tag = error["ctx"].get("tag")
        field = "role" if error["ctx"]["discriminator"] == "'role'" else "type"
        kind = f"{field} is missing" if tag is None else f"the {field} {tag[:80]!r} is unknown"
        return f"{kind}; known: {error['ctx'].get('expected_tags', 'see the documentation')}"
    return str(error["msg"]).removeprefix("Value error, ")


def _find_path(error: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """Return the path of an error in the body, without the type names in pydantic's `loc`."""
    loc, names = error["loc"][1:], []
    if error["loc"][0] == "query":
        return (str(loc[0]),)
    for part in loc:
        is_key = isinstance(body, Mapping) and part in body
        if is_key or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            names.append(str(part))
            body = body[part]
    return (*names, str(loc[-1])) if error["type"] == "missing" and loc else tuple(names)
