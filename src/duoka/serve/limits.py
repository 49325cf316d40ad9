"""Limits for hostile and slow clients, and the check of the API key, before a route runs."""

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
from uvicorn.protocols.http.h11_impl import H11Protocol

from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .errors import HttpError

MOST_BODY_BYTES, MOST_HEADER_BYTES = 32 * 2**20, 64 * 2**10
_MOST_MEMORY_BYTES = 512 * 2**20
# Time limits: for all headers of a request; for its body, plus a second for each 16 KiB received;
# and for a client to take the buffered part of a response.
_HEADER_SECONDS, _BODY_SECONDS, _TAKE_SECONDS = 15.0, 30.0, 30.0
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

    The gate reads the whole body before it calls the application; `JsonRoute` parses the body.

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
        try:
            self._check(scope["path"], Headers(scope=scope))
            with self._memory.hold() as add:
                body_message = await self._read_body(receive, add)
                if body_message is not None:
                    messages = iter((body_message,))

                    async def receive_whole() -> Message:  # then wait for the disconnect
                        return next(messages, None) or await receive()

                    await self._app(scope, receive_whole, send)
        except HttpError as error:  # raised before a response began
            response = JSONResponse(error.body_for(scope["path"]), error.status, error.headers)
            await response(scope, receive, send)

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


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits for receiving headers and for sending a response."""

    # uvicorn has no such limits. Two timers abort the connection:
    #   "headers" runs from the connection's start, or the first bytes after a response, until the
    #             headers of a request are complete;
    #   "answer"  runs while the transport's buffer is full, or holds the rest of a response.
    # `Gate._read_body` limits the time for the body.

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._start_timer("headers", _HEADER_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._is_answering:
            self._stop_timer("headers")
        elif "headers" not in self._timers:  # uvicorn's keep-alive timer ends with the first byte
            self._start_timer("headers", _HEADER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._start_timer("answer", _TAKE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer("answer")
        super().resume_writing()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size() and "answer" not in self._timers:
            self._start_timer("answer", _TAKE_SECONDS, self._abort_untaken)

    def _abort_untaken(self) -> None:
        """Abort the connection if the client hasn't taken the rest of a response."""
        self._stop_timer("answer")
        if self.transport.get_write_buffer_size() and not self._is_answering:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        """True while a response is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        """Start, or restart, the timer with this name."""
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, action)

    def _stop_timer(self, name: str) -> None:
        """Stop the timer with this name, if it runs."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


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
