"""Limits of requests, and the check of the API key, before a route runs."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .errors import HttpError
from .request_log import log_request

MOST_BODY_BYTES, MOST_HEADER_BYTES = 32 * 2**20, 64 * 2**10
_MOST_MEMORY_BYTES = 512 * 2**20
# Time limit for the body of a request, plus a second for each 16 KiB received.
_BODY_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 16 * 2**10
# Limits of JSON, checked before parsing: nesting depth (the deepest schemas have a few dozen
# levels), number of objects and lists, number of commas.
_MOST_DEPTH, _MOST_NESTS, _MOST_COMMAS = 128, 20_000, 2_000_000
# Matches up to the next bracket outside of strings, skipping other characters and complete strings
# with their escapes. Possessive quantifiers (`++`, `*+`) never backtrack, so the time is linear in
# the body. An unterminated string (`"?`) extends to the end of the body; the parser refuses it.
_NEXT_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"?)*+([\[\]{}])', re.DOTALL)
_KEYLESS_PATHS = ("/health", "/ready", "/version", "/", "/favicon.ico")
_THIS_MACHINE = re.compile(r"(?ai)(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")


class RequestMemory:
    """Counts the bytes of requests in memory, and limits their sum."""

    def __init__(self) -> None:
        self._number = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes until the block ends.

        The function raises HttpError (503) if the bytes of all requests exceed the limit.
        """
        num_held_bytes = 0

        def add(number: int) -> None:
            nonlocal num_held_bytes
            if self._number + number > _MOST_MEMORY_BYTES:
                text = f"requests of {self._number // 2**20} MiB are in transfer"
                raise HttpError(503, text, code="overloaded", retry_after=5)
            self._number += number
            num_held_bytes += number

        try:
            yield add
        finally:
            self._number -= num_held_bytes


class Gate:
    """ASGI middleware: admits requests with the API key and a body within size and time limits.

    The gate reads the whole body before it calls the application; `JsonRoute` parses the body. It
    also gives each request an id and logs it; see `log_request`.

    Parameters
    ----------
    app : ASGI application
    memory : RequestMemory
    key : str, optional
        The API key that clients must send; None if no key is required.
    is_local : bool
        Accept only Host headers that name this machine. Otherwise a web page could use DNS
        rebinding: its host name resolves to this machine, so the browser lets it read responses.
    """

    def __init__(
        self, app: ASGIApp, memory: RequestMemory, *, key: str | None = None, is_local: bool = False
    ) -> None:
        self._app = app
        self._memory = memory
        self._is_local = is_local
        self._digest = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with log_request(scope, send) as (scope, send), self._memory.hold() as add:
            try:
                self._check(scope["path"], headers)
                body_message = await self._read_body(receive, add)
                if body_message is not None:
                    messages = iter((body_message,))

                    async def receive_whole() -> Message:  # then wait for the disconnect
                        return next(messages, None) or await receive()

                    await self._app(scope, receive_whole, send)
            except HttpError as error:  # raised before a response began
                body = error.body_for(scope["path"], headers)
                await JSONResponse(body, error.status, error.headers)(scope, receive, send)

    async def _read_body(self, receive: Receive, add: Callable[[int], None]) -> Message | None:
        """Read the whole body into one message; return None if the client has disconnected.

        `add` counts the bytes. Raises HttpError if the body exceeds the size or the time limit.
        """
        body = bytearray()
        begin = asyncio.get_running_loop().time()
        is_open = True
        while is_open:
            end = begin + _BODY_SECONDS + len(body) / _LEAST_BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                text = f"{len(body)} bytes of the body came within {end - begin:.0f} s"
                raise HttpError(408, text) from error
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            if len(body) + len(part) > MOST_BODY_BYTES:
                raise _too_large()
            add(len(part))
            body += part
            is_open = message.get("more_body", False)
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _check(self, path: str, headers: Headers) -> None:
        """Raise HttpError if the headers are too large or not acceptable, or the key is wrong."""
        if sum(len(name) + len(value) + 4 for name, value in headers.raw) > MOST_HEADER_BYTES:
            raise HttpError(431, f"headers have at most {MOST_HEADER_BYTES // 2**10} KiB")
        host = headers.get("host", "")
        if self._is_local and not _THIS_MACHINE.fullmatch(host):
            text = (
                f"{host[:80]!r} is rejected: without an API key only localhost, 127.0.0.1 and "
                "[::1] are allowed"
            )
            raise HttpError(403, text, code="unknown_host")
        if int(headers.get("content-length", "0")) > MOST_BODY_BYTES:  # h11 admits digits only
            raise _too_large()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HttpError(415, "a body with Content-Encoding is not supported")
        if self._digest is None or path in _KEYLESS_PATHS or path.startswith("/page/"):
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(_digest(key), self._digest):
            raise HttpError(401, "the API key is missing or wrong", code="invalid_api_key")


class JsonRoute(APIRoute):
    """A route with `parse_json` as the parser of request bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler: parse the body in a thread first."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            parsed = _JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                _check_content_type(request.headers.get("content-type", ""))
                parsed.value = await asyncio.to_thread(parse_json, await parsed.body())
            return await handle(parsed)

        return handle_json


class _JsonRequest(Request):
    """A request whose JSON body has been parsed already."""

    value: Any = None

    async def json(self) -> Any:
        """Return the parsed body; see Starlette."""
        return self.value


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, strictly: no duplicate keys, no NaN or infinity.

    Raises
    ------
    HttpError
        If the body is no such object, is nested too deeply, has too many values, or contains an
        unpaired surrogate.
    """
    if body.count(b",") > _MOST_COMMAS:
        text = f"the body has more than {_MOST_COMMAS:,} commas"
        raise HttpError(400, text, code="too_large", param="body")
    place = depth = number = 0
    # Count brackets outside of strings without parsing: 32 MiB of "[" would take gigabytes as
    # lists, and pydantic reports an error for each item of a list.
    while bracket := _NEXT_BRACKET.match(body, place):
        place, opens = bracket.end(), bracket[1] in b"[{"
        depth += 1 if opens else -1
        number += opens
        if depth > _MOST_DEPTH or number > _MOST_NESTS:
            text = f"{_MOST_DEPTH} levels of nesting, or {_MOST_NESTS:,} objects and lists in total"
            raise HttpError(400, f"the body has more than {text}", code="too_large", param="body")
    try:
        value = parse_json_object(body.decode("utf-8-sig"), "the body")
        if b"\\u" in body:  # an unpaired surrogate can't be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except (FormatError, UnicodeError) as error:
        text = str(error) if isinstance(error, FormatError) else f"the body is not UTF-8: {error}"
        raise HttpError(400, text, param="body") from None
    return value


def _check_content_type(content_type: str) -> None:
    """Refuse content types other than JSON, which other sites' pages may send unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        text = f"Content-Type is {content_type[:80]}" if content_type else "Content-Type is missing"
        raise HttpError(415, f"{text}; send JSON with Content-Type: application/json")


def _digest(key: str) -> bytes:
    """Hash a key: digests of equal length can be compared in constant time."""
    return hashlib.sha256(key.encode()).digest()


def _too_large() -> HttpError:
    """Return the error for a body above the size limit."""
    return HttpError(413, f"a body has at most {MOST_BODY_BYTES // 2**20} MiB", code="too_large")
