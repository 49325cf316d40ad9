from __future__ import annotations

import asyncio
import socket
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from duoka.workers.channel import open_result, pack_message, read_message, send_result
from duoka.workers.portable import make_portable


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("size", [0, 5, 100_000])  # one part, and a head of its own
def test_a_stream_of_asyncio_and_a_connection_understand_each_other(size: int) -> None:
    async def exchange() -> tuple[Any, Any]:
        ours, theirs = socket.socketpair()
        connection = Connection(theirs.detach())
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack_message(["a", "b" * size]))
        received = await asyncio.to_thread(connection.recv)
        await asyncio.to_thread(connection.send, received)
        echoed = await read_message(reader)
        connection.close()
        with pytest.raises(asyncio.IncompleteReadError):
            await read_message(reader)
        writer.close()
        return received, echoed

    assert asyncio.run(exchange()) == (["a", "b" * size],) * 2


def test_a_result_or_its_error_comes_back() -> None:
    receiver, sender = Pipe(duplex=False)
    send_result(sender, lambda: 7)
    assert open_result(receiver.recv()) == 7
    for result in (lambda: 1 / 0, lambda: lambda: 1):  # a function has no form for pickle
        send_result(sender, result)
    with pytest.raises(ZeroDivisionError):
        open_result(receiver.recv())
    with pytest.raises(Exception, match="pickle"):
        open_result(receiver.recv())


def test_an_error_that_pickle_cant_send_is_its_text() -> None:
    assert type(make_portable(ValueError("a"))) is ValueError
    error = make_portable(UnpicklableError(1, 2))
    assert (type(error), str(error)) == (RuntimeError, "UnpicklableError: 1 and 2")
