"""Messages between a worker process and its parent, and results of functions as messages."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .portable import make_portable

# `Connection` writes the length of a message in four bytes, then its content; only messages beyond
# 2 GiB have another head. So one end can be a `Connection`, which blocks, and the other one a
# stream of asyncio.
_LENGTH = struct.Struct("!i")


def pack_message(message: object) -> bytes:
    """Return the bytes of a message as `Connection.send` writes them, for a stream of asyncio."""
    content = pickle.dumps(message)
    return _LENGTH.pack(len(content)) + content


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read a message of the other end's `Connection.send`.

    Raises
    ------
    asyncio.IncompleteReadError
        If the other end is gone.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


def send_result(channel: Connection, function: Callable[[], object]) -> None:
    """Call a function and send its result or its error."""
    try:
        content = pickle.dumps((function(), None))
    except Exception as error:  # the receiver raises it
        content = pickle.dumps((None, make_portable(error)))
    channel.send_bytes(content)


def open_result(message: tuple[Any, Exception | None]) -> Any:
    """Return the result in a message of `send_result`, or raise its error."""
    result, error = message
    if error is not None:
        raise error
    return result
