"""What is fetched from the web for strangers, and above all what isn't."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from duoka.base import web
from duoka.base.web import fetch, is_public
from duoka.errors import UsageError

PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1",
    "192.168.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:a00:1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::",
    "2002:808:808::", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1",
    "ff0e::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", [*PRIVATE, *PUBLIC])
def test_which_addresses_are_public(address: str) -> None:
    assert is_public(address) == (address in PUBLIC)


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    length = f"Content-Length: {len(body)}"
    return "\r\n".join([f"HTTP/1.1 {status}", length, *headers, "", ""]).encode() + body


ANSWERS = {
    "/picture": answer(b"picture"),
    "/there": answer(b"", "Location: picture", status="302 Found"),
    "/1": answer(b"", "Location: /2", status="302 Found"),
    "/2": answer(b"", "Location: /3", status="307 Temporary Redirect"),
    "/3": answer(b"", "Location: /4", status="301 Moved Permanently"),
    "/4": answer(b"", "Location: /picture", status="302 Found"),
    "/inside": answer(b"", "Location: http://inside.test/", status="302 Found"),
    "/metadata": answer(b"", "Location: http://169.254.169.254/", status="302 Found"),
    "/file": answer(b"", "Location: file:///etc/passwd", status="302 Found"),
    "/absent": answer(b"", status="404 Not Found"),
    "/huge": answer(bytes(5000)),
    "/bomb": answer(gzip.compress(bytes(10**6)), "Content-Encoding: gzip"),
    "/no length": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000),
    "/no HTTP": b"+OK Dovecot ready.\r\n",
}


@contextlib.asynccontextmanager
async def internet(heads: list[bytes]) -> AsyncIterator[int]:
    """A server that answers by the table; other paths never, a byte at a time."""

    tasks = set[Any]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await send(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            path = heads[-1].split(b" ")[1].decode().replace("%20", " ")
            writer.write(ANSWERS.get(path, b"HTTP/1.1 200 OK\r\n"))
            while path not in ANSWERS:
                writer.write(b"X")
                await writer.drain()
                await asyncio.sleep(0.01)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Which address a name has, each time that it is looked up; for now 127.0.0.1 is public."""
    known = {"outside.test": ["127.0.0.1"], "inside.test": ["10.0.0.1"]}
    plain: Callable[..., Any] = socket.getaddrinfo

    def look_up(name: Any, *arguments: Any, **more: Any) -> Any:
        name = name.decode() if isinstance(name, bytes) else name
        for address in known.get(name, ()):
            known[name] = known[name][1:] or ["10.0.0.1"]  # another one the next time
            name = address
            break
        return plain(name, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(web, "is_public", lambda text: text == "127.0.0.1" or is_public(text))
    return known


def fetched(path: str, name: str = "outside.test", **limits: Any) -> tuple[bytes, list[bytes]]:
    heads: list[bytes] = []

    async def run() -> bytes:
        async with internet(heads) as port:
            url = f"http://{name}:{port}{path}"
            return await fetch(url, most_bytes=4000, public_only=True, **limits)

    return asyncio.run(run()), heads


def test_the_address_that_was_looked_at_is_connected_to(names: dict[str, list[str]]) -> None:
    content, (head,) = fetched("/picture")
    assert content == b"picture"
    assert b"Host: outside.test:" in head
    assert names["outside.test"] == ["10.0.0.1"]  # what it meant had it been looked up again
    with pytest.raises(UsageError, match="has an address outside the public internet"):
        fetched("/picture")


def test_redirects_are_followed_and_each_is_looked_at(names: dict[str, list[str]]) -> None:
    names["outside.test"] *= 9
    assert fetched("/there")[0] == b"picture"
    content, heads = fetched("/2")
    assert (content, len(heads)) == (b"picture", 4)


REFUSED = {
    "/1": "redirects more than 3 times",
    "/inside": "inside.test has an address outside the public internet",
    "/metadata": "169.254.169.254 has an address outside the public internet",
    "/file": "not an http or https",
    "/absent": "answers with status 404",
    "/huge": "more than 3.91 KiB",
    "/no length": "more than 3.91 KiB",
    "/no HTTP": "can't be fetched",
    "/a header without end": r"takes more than 0\.2 seconds",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_isnt_fetched(path: str, names: dict[str, list[str]]) -> None:
    names["outside.test"] *= 9
    with pytest.raises(UsageError, match=REFUSED[path]):
        fetched(path, most_seconds=0.2 if "end" in path else 9)


def test_nothing_is_unpacked(names: dict[str, list[str]]) -> None:
    assert len(fetched("/bomb")[0]) < 2000


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_this_machine_is_never_asked(name: str) -> None:
    heads: list[bytes] = []

    async def run() -> None:
        async with internet(heads) as port:
            await fetch(f"http://{name}:{port}/picture", most_bytes=9, public_only=True)

    with pytest.raises(UsageError, match="can't be fetched"):
        asyncio.run(run())
    assert heads == []


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, 1, 6, "", (ip, 0)) for ip in ("8.8.8.8", "192.168.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(UsageError, match="outside the public internet"):
        asyncio.run(fetch("http://two.test/", most_bytes=9, public_only=True, most_seconds=5))
