"""Limits that huggingface_hub doesn't set, on the answers to what it asks.

It reads answers of any length, and waits as long as a server asks it to. While `guarded` holds,
no more is read than was agreed on, and an answer that may be another one next time is an error at
once, so that the caller decides how often it is asked for, and how long is waited. Its warnings are
left out: they show addresses of large files, which are signed, and the caller tells what matters.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_LOGGERS = ("huggingface_hub.file_download", "huggingface_hub.utils._http")
# Error pages and the texts of redirects may be longer than the file that was asked for.
_LEAST_LIMIT_BYTES = 2**16
# httpx or its successor, whichever this version of huggingface_hub is built on.
http: Any = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
_limit: ContextVar[int | None] = ContextVar("_limit", default=None)


class Busy(Exception):
    """An answer that may be another one next time; `wait_seconds` is what the server asks for."""

    def __init__(self, status: int, wait_seconds: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.wait_seconds = wait_seconds


class TooLong(Exception):
    """An answer that is longer than agreed on."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes


@contextmanager
def guarded(most_bytes: int) -> Iterator[None]:
    """Set limits for what this thread asks through huggingface_hub's session."""
    hooks = get_session().event_hooks
    if _look_at not in hooks["response"]:  # they stay, and do nothing outside of this block
        hooks["response"].append(_look_at)
        hooks["request"].append(_hurry)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_heard)  # once: it is the same filter each time
    token = _limit.set(max(most_bytes, _LEAST_LIMIT_BYTES))
    try:
        yield
    finally:
        _limit.reset(token)


def _is_heard(record: logging.LogRecord) -> bool:
    return _limit.get() is None or record.levelno >= logging.ERROR


def _hurry(request: Any) -> None:
    """Wait no longer for a server than was agreed on."""
    timeout = request.extensions.get("timeout")
    if _limit.get() is not None and isinstance(timeout, dict):
        most = constants.HF_HUB_DOWNLOAD_TIMEOUT
        request.extensions["timeout"] = {
            name: most if seconds is None else min(seconds, most)
            for name, seconds in timeout.items()
        }


def _look_at(response: Any) -> None:
    """Judge an answer by its head, before its body is read."""
    limit = _limit.get()
    if limit is None:
        return
    if response.status_code in PASSING:
        raise Busy(response.status_code, _number(response.headers.get("retry-after")))
    length = _number(response.headers.get("content-length"))
    # The answer to HEAD tells the length of what it doesn't send.
    if response.request.method != "HEAD" and length is not None and length > limit:
        raise TooLong(limit)
    response.stream = _Counted(response.stream, limit)


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch("[0-9]{1,15}", text, re.ASCII) else None


class _Counted(http.SyncByteStream):  # type: ignore[misc]
    """A body, as far as it is no longer than agreed on."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        num_bytes = 0
        for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > self._limit:
                raise TooLong(self._limit)
            yield chunk

    def close(self) -> None:
        self._stream.close()
