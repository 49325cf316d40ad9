"""Ready: whether vLLM answers, and what it says of its cache.

Both are read without a key: vLLM asks for one under /v1 and the like alone.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException

_METRIC = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 16 * 2**20
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens there."""
    host = _ANY.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_healthy(host: str, port: int) -> bool:
    """Whether vLLM says that it can answer."""
    return _get(host, port, "/health") is not None


def read_cache(host: str, port: int) -> dict[str, float]:
    """Read the cache's configuration from the metrics: its labels that are numbers."""
    text = (_get(host, port, "/metrics") or b"").decode("utf-8", "replace")
    match = _METRIC.search(text)
    numbers = {}
    for name, value in _LABEL.findall(match[1]) if match else ():
        with suppress(ValueError):
            numbers[name] = float(value)
    return numbers


def _get(host: str, port: int, path: str) -> bytes | None:
    """What is answered to a request; None for an answer that is none, or not well."""
    with (
        suppress(OSError, HTTPException),
        closing(HTTPConnection(_ANY.get(host, host), port, timeout=_ANSWER_SECONDS)) as connection,
    ):
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        return body if response.status == 200 else None
    return None
