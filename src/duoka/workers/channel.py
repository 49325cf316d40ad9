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
# 2 GiB have another header. So one end can be a blocking `Connection`, and the other one an asyncio
# stream.
_LENGTH = struct.Struct("!i")


def pack_message(message: object) -> bytes:
    """Return the bytes of `Connection.send` for a message, for an asyncio stream."""
    content = pickle.dumps(message)
    return _LENGTH.pack(len(content)) + content


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read a message from the other end's `Connection.send`.

    Raises
    ------
    asyncio.IncompleteReadError
        If the other end is closed.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


def send_result(channel: Connection, function: Callable[[], object]) -> None:
    """Call a function; send (result, None), or (None, error) if the call raises."""
    try:
        content = pickle.dumps((function(), None))
    except Exception as error:  # `open_result` raises it
        content = pickle.dumps((None, make_portable(error)))
    channel.send_bytes(content)


def open_result(message: tuple[Any, Exception | None]) -> Any:
    """Return the result in a message of `send_result`, or raise its error."""
    result, error = message
    if error is not None:
        raise error
    return result
