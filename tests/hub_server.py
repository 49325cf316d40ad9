"""A Hub on this machine, for tests: what is asked of one, and every misbehaviour.

Written from the Hub's documented HTTP interface. Files in large-file storage are redirected to a
second server on another port, as the Hub redirects to its storage. A misbehaviour is a function
that answers in place of the server, put in line with `HubServer.next`.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".model")
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(kw_only=True)
class Repo:
    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    private: bool = False
    # What the server tells instead of the truth, by file: "sha256", "size".
    lies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def sibling(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": sha1}
        if name.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            told["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            if "sha256" in self.lies.get(name, {}):
                told["lfs"]["sha256"] = self.lies[name]["sha256"]
        return told | {k: v for k, v in self.lies.get(name, {}).items() if k != "sha256"}

    def etag(self, name: str) -> str:
        told = self.sibling(name)
        return str(told["lfs"]["sha256"] if "lfs" in told else told["blobId"])


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def has_token(self) -> bool:
        return "authorization" in self.headers


Misbehaviour = Callable[["Handler", Callable[[], None]], None]
"""Answers a request itself, or with the second argument as the server would."""


class HubServer:
    """The Hub and its storage, each on a port of its own."""

    def __init__(self, site: type[Handler] | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.storage_requests: list[Request] = []
        self._line: list[tuple[str, Misbehaviour]] = []
        self._lock = threading.Lock()
        self._servers = [_Server(self, handler) for handler in (site or _Hub, _Storage)]
        # Two hosts, as the Hub's and its storage's are.
        self.url, self.storage_url = (
            f"http://{host}:{server.server_port}"
            for host, server in zip(("127.0.0.1", "localhost"), self._servers, strict=True)
        )

    def next(self, place: str, *misbehaviours: Misbehaviour) -> None:
        """Answer the next requests so: at "api", "head", "resolve", "storage", or to one file."""
        with self._lock:
            self._line += [(place, misbehaviour) for misbehaviour in misbehaviours]

    def take(self, *places: str) -> Misbehaviour | None:
        with self._lock:
            for number, (place, misbehaviour) in enumerate(self._line):
                if place in places:
                    del self._line[number]
                    return misbehaviour
        return None

    def content_of(self, digest: str) -> bytes | None:
        for repo in self.repos.values():
            for name in repo.files:
                if name.endswith(LARGE) and repo.etag(name) == digest:
                    return repo.files[name]
        return None

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@contextmanager
def serve(site: type[Handler] | None = None) -> Iterator[HubServer]:
    hub = HubServer(site)
    try:
        yield hub
    finally:
        hub.close()


def use(server: HubServer, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub, which read its environment on import, ask this server."""
    constants = huggingface_hub.constants
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(scratch / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(scratch / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("DUOKA_CACHE", str(scratch / "duoka"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubServer, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def request_now(self) -> Request:
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(method=self.command, path=self.path, headers=headers)

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Answer; names of headers with _ for -."""
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | given).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, content: bytes, **headers: str) -> None:
        """Answer with a file, or the range that was asked for."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            self.send(200, content, **headers)
            return
        start = int(match[1])
        stop = min(int(match[2]) + 1 if match[2] else len(content), len(content))
        if start >= stop:
            self.send(416, Content_Range=f"bytes */{len(content)}")
            return
        told = f"bytes {start}-{stop - 1}/{len(content)}"
        self.send(206, content[start:stop], Content_Range=told, **headers)

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


class _Hub(Handler):
    def answer(self) -> None:
        self.hub.requests.append(self.request_now())
        path = unquote(urlsplit(self.path).path)
        api, resolve = _API.fullmatch(path), _RESOLVE.fullmatch(path)
        if api is not None:
            self._do(("api",), lambda: self._api(api[1], api[2] or "main"))
        elif resolve is not None:
            self._do(("resolve", resolve[3]), lambda: self._resolve(*resolve.groups()))
        else:
            self.send(404)

    def _do(self, places: tuple[str, ...], normal: Callable[[], None]) -> None:
        # huggingface_hub asks for a file's hash (HEAD) before it asks for the file.
        places = ("head",) if self.command == "HEAD" else places
        misbehaviour = self.hub.take(*places)
        if misbehaviour is None:
            normal()
        else:
            misbehaviour(self, normal)

    def _repo(self, name: str, *, content: bool) -> Repo | None:
        """The repository, or None after an answer that refuses it, as the Hub does."""
        repo = self.hub.repos.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != "hf_goodtoken0000":
            message = "Invalid credentials in Authorization header"
            self.send(401, X_Error_Message=message)
        elif repo is None or (repo.private and not token):
            # Without a token the Hub doesn't tell what is private and what isn't there.
            self.send(404 if token else 401, X_Error_Code="RepoNotFound")
        elif repo.gated and content:
            self.send(403 if token else 401, X_Error_Code="GatedRepo")
        else:
            return repo
        return None

    def _api(self, name: str, revision: str) -> None:
        repo = self._repo(name, content=False)
        if repo is None:
            return
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.revisions.values():
            self.send(404, X_Error_Code="RevisionNotFound")
            return
        told = {"id": name, "sha": commit, "siblings": [repo.sibling(file) for file in repo.files]}
        self.send(200, json.dumps(told).encode(), Content_Type="application/json")

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, content=True)
        if repo is None:
            return
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.revisions.values():
            self.send(404, X_Error_Code="RevisionNotFound")
        elif file not in repo.files:
            self.send(404, X_Error_Code="EntryNotFound")
        elif file.endswith(LARGE):
            self.send(
                302,
                X_Repo_Commit=commit,
                X_Linked_Etag=f'"{repo.etag(file)}"',
                X_Linked_Size=str(len(repo.files[file])),
                Location=f"{self.hub.storage_url}/{repo.etag(file)}?X-Amz-Signature=verysecret",
            )
        else:
            etag = f'"{repo.etag(file)}"'
            self.send_file(repo.files[file], X_Repo_Commit=commit, ETag=etag)


class _Storage(Handler):
    def answer(self) -> None:
        self.hub.storage_requests.append(self.request_now())
        content = self.hub.content_of(urlsplit(self.path).path.strip("/"))
        if content is None:
            self.send(404)
            return
        misbehaviour = self.hub.take("storage")
        if misbehaviour is None:
            self.send_file(content)
        else:
            misbehaviour(self, lambda: self.send_file(content))


# ── misbehaviours ──


def status(code: int, body: bytes = b"", **headers: str) -> Misbehaviour:
    """Answer with a status."""
    return lambda handler, normal: handler.send(code, body, **headers)


def html(handler: Handler, normal: Callable[[], None]) -> None:
    """Answer with a web page, as the log-in page of a hotel does."""
    handler.send(200, b"<!DOCTYPE html><html>Welcome to our WiFi</html>", Content_Type="text/html")


def redirect(url: str) -> Misbehaviour:
    """Send the client elsewhere."""
    return lambda handler, normal: handler.send(302, Location=url)


def redirect_to_itself(handler: Handler, normal: Callable[[], None]) -> None:
    handler.send(302, Location=handler.path)


def hang_up(handler: Handler, normal: Callable[[], None]) -> None:
    """Answer nothing."""
    handler.hang_up()


def break_off(after: int) -> Misbehaviour:
    """Send so many bytes of the body, then hang up."""

    def misbehave(handler: Handler, normal: Callable[[], None]) -> None:
        write, left = handler.wfile.write, [after]

        def write_some(data: bytes) -> int:
            if not data.startswith(b"HTTP/"):
                data, left[0] = data[: left[0]], left[0] - len(data)
            return write(data)

        handler.wfile.write = write_some  # type: ignore[method-assign]
        normal()
        handler.hang_up()

    return misbehave


def ignore_ranges(handler: Handler, normal: Callable[[], None]) -> None:
    """Send the whole file always."""
    del handler.headers["Range"]
    normal()


def spoil(handler: Handler, normal: Callable[[], None]) -> None:
    """Send the right number of wrong bytes."""
    send = handler.send

    def send_spoilt(code: int, body: bytes = b"", **headers: str) -> None:
        send(code, bytes(byte ^ 1 for byte in body), **headers)

    handler.send = send_spoilt  # type: ignore[method-assign]
    try:
        normal()
    finally:
        del handler.send  # the connection, and with it the handler, goes on


def replace(content: bytes) -> Misbehaviour:
    """Send another file, of another length."""
    return lambda handler, normal: handler.send_file(content)


def wait_for(event: threading.Event) -> Misbehaviour:
    """Answer nothing until something has happened."""

    def misbehave(handler: Handler, normal: Callable[[], None]) -> None:
        event.wait(30)
        handler.hang_up()

    return misbehave


def stall(after: int, event: threading.Event) -> Misbehaviour:
    """Send so many bytes of the body, then nothing until something has happened."""

    def misbehave(handler: Handler, normal: Callable[[], None]) -> None:
        send = handler.send

        def send_some(code: int, body: bytes = b"", **headers: str) -> None:
            send(code, body[:after], **({"Content_Length": str(len(body))} | headers))
            handler.wfile.flush()
            event.wait(60)
            handler.hang_up()

        handler.send = send_some  # type: ignore[method-assign]
        normal()

    return misbehave


def gibberish(handler: Handler, normal: Callable[[], None]) -> None:
    """Answer with what isn't HTTP."""
    handler.wfile.write(b"\0\1\2 this is no answer\r\n\r\n")
    handler.hang_up()
