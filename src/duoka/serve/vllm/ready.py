"""Ready: whether vLLM answers, and what it says of its cache.

Both are read without a key: vLLM asks for one under /v1 and the like alone.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

from duoka.errors import UsageError

_METRIC = "vllm:cache_config_info"
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_FLOAT = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?", re.ASCII)
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 16 * 2**20
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where vLLM listens."""

    host: str
    port: int

    @property
    def reached_at(self) -> str:
        """The host to ask from here."""
        return _ANY.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The same for a client on this machine."""
        host = self.reached_at
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBlocks:
    """What vLLM says of its cache; None for what it doesn't say.

    `number` of blocks, of so many `tokens` each, and how many `requests` of the longest context
    they hold. The last isn't a quotient of the others where layers look back differently far: a
    request then has blocks of its own for each kind of them.
    """

    number: int | None
    tokens: int | None
    requests: float | None = None


def free_address(host: str, port: int) -> Address:
    """The address, which nobody listens at yet; port 0 is a free one.

    Otherwise another server's answers would be taken for vLLM's.

    Raises
    ------
    UsageError
        If something listens there, or no program of this user may.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            return Address(host=host, port=listener.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"nothing can listen at {host[:80]}, port {port}: {error.strerror}",
            hint="is another server there? Name another --port or --host",
        ) from error


def is_healthy(address: Address) -> bool:
    """Whether vLLM says that it can answer."""
    return _get(address, "/health") is not None


def read_blocks(address: Address) -> CacheBlocks:
    """What the metrics say of the cache; the least of several engines'."""
    text = (_get(address, "/metrics") or b"").decode("utf-8", "replace")
    engines = [
        dict(_LABEL.findall(line)) for line in text.splitlines() if line.startswith(_METRIC + "{")
    ]
    return CacheBlocks(
        number=min(_numbers(engines, "num_gpu_blocks"), default=None),
        tokens=min(_numbers(engines, "block_size"), default=None),
        requests=min(
            (
                float(text)
                for labels in engines
                if _FLOAT.fullmatch(text := labels.get("kv_cache_max_concurrency", ""))
            ),
            default=None,
        ),
    )


def _numbers(engines: list[dict[str, str]], label: str) -> Iterator[int]:
    for labels in engines:
        text = labels.get(label, "")
        if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) > 0:
            yield int(text)


def _get(address: Address, path: str) -> bytes | None:
    """What is answered to a request; None for an answer that is none, or not well."""
    with (
        suppress(OSError, HTTPException),
        closing(
            HTTPConnection(address.reached_at, address.port, timeout=_ANSWER_SECONDS)
        ) as connection,
    ):
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        return body if response.status == 200 else None
    return None
