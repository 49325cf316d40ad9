"""Limits for what is hostile or slow, and who may ask: what every request goes through first."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import HttpError

MOST_BODY_BYTES = 32 * 2**20
_BODY_SECONDS = 30.0
_HEADER_SECONDS = 15.0
SEND_SECONDS = 60.0
"""After so long a client that takes nothing has gone."""
_OPEN = ("/health", "/ready", "/version", "/", "/favicon.ico")


class Gate:
    """Lets a request in that has the key, and a body that comes in time and isn't too large.

    Parameters
    ----------
    app : ASGI application
    key : str, optional
        What a client has to know.
    """

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self._app = app
        self._digest = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope["path"], headers)
            await self._app(scope, _Body(receive).receive, send)
        except HttpError as error:  # before anything was answered
            await respond(send, error, scope["path"])

    def _check(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            raise _too_large()
        if self._digest is None or path in _OPEN or path.startswith("/page/"):
            return
        kind, _, said = headers.get("authorization", "").partition(" ")
        key = said.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(_digest(key), self._digest):
            raise HttpError(401, "the API key is missing or wrong", code="invalid_api_key")


class _Body:
    """What a client sends, up to a limit and in time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:  # only its going away is waited for, as long as it takes
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), _BODY_SECONDS)
        except TimeoutError as error:
            raise HttpError(408, f"the body didn't come within {_BODY_SECONDS:.0f} s") from error
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > MOST_BODY_BYTES:
            raise _too_large()
        self._is_whole = not message.get("more_body", False)
        return message


async def respond(send: Send, error: HttpError, path: str) -> None:
    """Answer a request of this path with an error."""
    body = json.dumps(error.body_for(path)).encode()
    headers = {"Content-Type": "application/json", **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


class TimedProtocol(H11Protocol):
    """HTTP, on connections whose next request has to be there in time."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """See uvicorn."""
        super().handle_events()
        if self.cycle is not None:  # its headers are there; between requests uvicorn has a timer
            self._timer.cancel()

    def _close_idle(self) -> None:
        self.transport.close()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _too_large() -> HttpError:
    return HttpError(413, f"a body has at most {MOST_BODY_BYTES // 2**20} MiB", code="too_large")
