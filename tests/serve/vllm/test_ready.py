"""What vLLM's server says, read from one that says it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from duoka.serve.vllm.ready import is_healthy, read_cache, url_of

LINE = 'vllm:cache_config_info{{block_size="{}",engine="{}",num_gpu_blocks="{}"}} 1.0\n'


@contextmanager
def server(text: bytes, status: int = 200) -> Iterator[tuple[str, int]]:
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
            yield "0.0.0.0", listener.server_port
        finally:
            listener.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINE.format(16, 0, 661), {"block_size": 16, "engine": 0, "num_gpu_blocks": 661}),
        (LINE.format(16, 0, None), {"block_size": 16, "engine": 0}),
        (
            'vllm:cache_config_info{kv_cache_max_concurrency="2.58203125",block_size="x"} 1.0\n',
            {"kv_cache_max_concurrency": 2.58203125},
        ),
        ('# vllm:cache_config_info{num_gpu_blocks="1"}\n', {}),
        (
            'vllm:cache_config_info{note="\\"num_gpu_blocks=\\"9\\"",num_gpu_blocks="7"} 1\n',
            {"num_gpu_blocks": 7},
        ),
        ("\xff\x00", {}),
    ],
)
def test_the_cache_is_what_the_metrics_say(text: str, expected: dict[str, float]) -> None:
    with server(text.encode("latin-1")) as address:
        assert read_cache(*address) == expected


def test_only_a_good_answer_is_one() -> None:
    with server(b"") as address:
        assert is_healthy(*address)
    with server(b"", 503) as address:
        assert not is_healthy(*address)
        assert read_cache(*address) == {}
    assert not is_healthy(*address)  # nobody is there


def test_what_isnt_http_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail is here\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not is_healthy("127.0.0.1", listener.getsockname()[1])
        thread.join()


def test_a_proxy_isnt_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(b"") as address:
        assert is_healthy(*address)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_an_address_for_clients_can_be_reached(host: str, url: str) -> None:
    assert url_of(host, 80) == url
