"""What vLLM's server says, read from one that says it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from duoka.errors import UsageError
from duoka.serve.vllm.ready import Address, CacheBlocks, free_address, is_healthy, read_blocks

LINE = 'vllm:cache_config_info{{block_size="{}",engine="{}",num_gpu_blocks="{}"}} 1.0\n'


@contextmanager
def server(text: bytes, status: int = 200) -> Iterator[Address]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield Address(host="0.0.0.0", port=listener.server_port)
        finally:
            listener.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINE.format(16, 0, 661), CacheBlocks(number=661, tokens=16)),
        (LINE.format(16, 0, 661) + LINE.format(16, 1, 600), CacheBlocks(number=600, tokens=16)),
        (LINE.format(16, 0, None), CacheBlocks(number=None, tokens=16)),
        (
            'vllm:cache_config_info{kv_cache_max_concurrency="2.58203125",block_size="16"} 1.0\n'
            'vllm:cache_config_info{kv_cache_max_concurrency="nan",block_size="8"} 1.0\n',
            CacheBlocks(number=None, tokens=8, requests=2.58203125),
        ),
        (LINE.format("x", 0, -5), CacheBlocks(number=None, tokens=None)),
        ('# vllm:cache_config_info{num_gpu_blocks="1"}\n', CacheBlocks(number=None, tokens=None)),
        (
            'vllm:cache_config_info{note="\\"num_gpu_blocks=\\"9\\"",num_gpu_blocks="7"} 1\n',
            CacheBlocks(number=7, tokens=None),
        ),
        ("\xff\x00", CacheBlocks(number=None, tokens=None)),
    ],
)
def test_blocks_are_those_of_the_poorest_engine(text: str, expected: CacheBlocks) -> None:
    with server(text.encode("latin-1")) as address:
        assert read_blocks(address) == expected


def test_only_a_good_answer_is_one() -> None:
    with server(b"") as address:
        assert is_healthy(address)
    with server(b"", 503) as address:
        assert not is_healthy(address)
        assert read_blocks(address) == CacheBlocks(number=None, tokens=None)
    assert not is_healthy(address)  # nobody is there


def test_what_isnt_http_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail is here\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not is_healthy(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        thread.join()


def test_a_proxy_isnt_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(b"") as address:
        assert is_healthy(address)


def test_a_free_address_is_free() -> None:
    address = free_address("127.0.0.1", 0)
    assert address.port > 0
    with socket.create_server((address.host, address.port)):
        with pytest.raises(UsageError, match=f"port {address.port}"):
            free_address("127.0.0.1", address.port)
        with pytest.raises(UsageError, match=f"port {address.port}"):
            free_address("0.0.0.0", address.port)


def test_a_host_that_isnt_here_is_told() -> None:
    with pytest.raises(UsageError, match=r"nothing can listen at 203\.0\.113\.1"):
        free_address("203.0.113.1", 8000)
    with pytest.raises(UsageError, match="nothing can listen at no such host"):
        free_address("no such host", 8000)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_an_address_for_clients_can_be_reached(host: str, url: str) -> None:
    assert Address(host=host, port=80).url == url
