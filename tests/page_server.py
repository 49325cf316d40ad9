"""A server that speaks as `duoka serve` does, and answers what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "src" / "duoka" / "serve" / "page"
POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'"
GIB = 2**30


def device(name: str, budget: float, forecast: float, reserved: float | None) -> dict[str, Any]:
    """A device of a status; sizes in GiB. Weights are 6 GiB, the KV cache is 3 GiB."""
    return {
        "name": name,
        "gpu": "NVIDIA GeForce RTX 3060",
        "budget_bytes": int(budget * GIB),
        "forecast_bytes": int(forecast * GIB),
        "reserved_bytes": None if reserved is None else int(reserved * GIB),
        "weights_bytes": 6 * GIB,
        "kv_cache_bytes": 3 * GIB,
        "busy_share": 0.93,
    }


def status(state: str = "ready", reason: str | None = None) -> dict[str, Any]:
    devices = [device("cuda:0", 12, 10.5, 10.2), device("cuda:1", 12, 10.1, 9.75)]
    return {
        "model": "glm-4v-9b",
        "version": "0.9.0",
        "context_tokens": 8192,
        "sequences": 24,
        "images": 4,
        "switches_thinking": False,
        "engines": [{"replica": 0, "state": state, "reason": reason, "devices": devices}],
        "running": 3,
        "waiting": 1,
        "pages": {"total": 1536, "free": 1190},
        "tokens_per_second": 143.2,
    }


def chunk(**delta: str) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }


def ending(reason: str = "stop", tokens: int = 42) -> list[Any]:
    """The last chunk, the usage, and the end of a stream."""
    last = {"index": 0, "delta": {}, "finish_reason": reason}
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return [{"choices": [last]}, {"choices": [], "usage": usage}, "[DONE]"]


def answer(text: str) -> Reply:
    return Reply(events=[chunk(role="assistant", content=""), chunk(content=text), *ending()])


def refusal(code: int, message: str, error_code: str | None = None, **headers: str) -> Reply:
    error = {"message": message, "type": "server_error", "param": None, "code": error_code}
    return Reply(code=code, error=error, headers=headers)


@dataclass
class Forever:
    """A chunk again and again, until nobody reads it any more."""

    chunk: dict[str, Any]
    left: threading.Event = field(default_factory=threading.Event)


@dataclass
class Reply:
    """An answer to one chat.

    `events` are sent as they are: a dict or str is one event, bytes go on the wire untouched, an
    `Event` is waited for. Without `[DONE]` the connection ends where they end.
    """

    events: list[Any] = field(default_factory=list)
    code: int = 200
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class FakeServer:
    url: str = ""
    status: dict[str, Any] | None = field(default_factory=status)
    models: list[str] = field(default_factory=lambda: ["glm-4v-9b"])
    key: str | None = None
    policy: str = POLICY
    replies: deque[Reply] = field(default_factory=deque)
    chats: list[dict[str, Any]] = field(default_factory=list)
    num_status: int = 0


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._send_file(PAGE / "index.html")
        elif self.path.startswith("/page/"):
            self._send_file(PAGE / Path(self.path).name)
        elif not self._is_known():
            self._refuse_key()
        elif self.path == "/v1/models":
            models = [{"id": name, "object": "model"} for name in self.fake.models]
            self._send_json(200, {"object": "list", "data": models})
        elif self.path == "/duoka/status" and self.fake.status is not None:
            self.fake.num_status += 1
            self._send_json(200, self.fake.status)
        else:
            self._send_json(500, {"error": {"message": "no status", "code": None}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_known():
            self._refuse_key()
            return
        self.fake.chats.append(body)
        reply = self.fake.replies.popleft()
        if reply.error is not None:
            self._send_json(reply.code, {"error": reply.error}, reply.headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in reply.events:
            self._send_event(event)

    def _send_event(self, event: Any) -> None:
        if isinstance(event, threading.Event):
            event.wait(60)
        elif isinstance(event, Forever):
            self._send_until_left(event)
        elif isinstance(event, bytes):
            self.wfile.write(event)
        else:
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())

    def _send_until_left(self, event: Forever) -> None:
        try:
            while True:
                self._send_event(event.chunk)
                time.sleep(0.01)
        except OSError:
            event.left.set()

    def _is_known(self) -> bool:
        expected = f"Bearer {self.fake.key}"
        return self.fake.key is None or self.headers["Authorization"] == expected

    def _refuse_key(self) -> None:
        error = {
            "message": "no such key",
            "type": "invalid_request_error",
            "code": "invalid_api_key",
        }
        self._send_json(401, {"error": error})

    def _send_json(self, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(code, json.dumps(value).encode(), "application/json", headers or {})

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", "text/plain", {})
            return
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self._send(200, path.read_bytes(), kind, {"Content-Security-Policy": self.fake.policy})

    def _send(self, code: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        own = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in {**own, "X-Content-Type-Options": "nosniff", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        # The reader may have gone.
        with contextlib.suppress(OSError):
            self.wfile.write(body)


@contextlib.contextmanager
def running_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    fake.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
