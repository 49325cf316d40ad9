"""What hostile clients do to a server: raw requests, and clients that are slow or go away."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VALID: dict[str, Any] = {
    CHAT: {
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 2,
        "stop": ["x"],
        "n": 1,
        "seed": 1,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1.0},
        "response_format": {"type": "text"},
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    COMPLETIONS: {"prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 1, "echo": False, "n": 2},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}],
        "instructions": "c",
        "max_output_tokens": 2,
        "top_logprobs": 1,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "stream": False,
    },
    "/v1/messages": {
        "model": "",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "stop_sequences": ["e"],
        "thinking": {"type": "disabled"},
        "top_k": 3,
        "stream": False,
    },
    "/tokenize": {"messages": [{"role": "user", "content": "ab"}]},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def message(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """A request as it goes over the wire; the length is the body's unless a header says it."""
    kind = "Content-Type: application/json"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", kind, *headers]
    if not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def message_of(path: str, value: Any, *headers: str) -> bytes:
    """A request with this as JSON."""
    return message(path, json.dumps(value).encode(errors="replace"), *headers)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a server."""
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port, limit=2**16)


async def exchange(url: str, data: bytes, seconds: float = 60.0) -> tuple[int, bytes]:
    """The status of what is answered, 0 for nothing, and all of it; the server closes, or we do."""
    reader, writer = await connect(url)
    data = data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    try:
        async with asyncio.timeout(seconds):
            writer.write(data)
            answer = await reader.read(-1)
    except ConnectionError:  # closed while we still sent
        answer = b""
    finally:
        writer.close()
    return status_code(answer), answer


def status_code(answer: bytes) -> int:
    """Of the first line."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


async def vanish(url: str, rng: random.Random) -> str:
    """Be one of the clients that nobody wants; what it did."""
    body = json.dumps({**VALID[CHAT], "max_tokens": 90, "stop": None, "stream": True}).encode()
    whole = message(CHAT, body)
    kinds = ("in headers", "in the body", "waiting", "in the stream", "silent", "half", "reset")
    kind = rng.choice(kinds)
    reader, writer = await connect(url)
    cut = {"in headers": rng.randrange(1, 40), "in the body": len(whole) - len(body) // 2}
    try:
        writer.write(whole[: cut.get(kind, 0 if kind == "silent" else len(whole))])
        if kind == "in the stream":
            await reader.read(100)
        elif kind == "half":
            writer.write_eof()
        await asyncio.sleep(rng.random())
    except ConnectionError:
        pass
    if kind == "reset":
        writer.transport.abort()
    writer.close()
    return kind


def look(url: str, path: str = "/duoka/status") -> Any:
    """What the server says of itself."""
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def settled(url: str, seconds: float = 60.0) -> dict[str, Any]:
    """The server's state when nothing is answered any more, or as it is after so long."""
    end = time.monotonic() + seconds
    while True:
        status: dict[str, Any] = look(url)
        pages = status["pages"] or {"total": 1, "free": 0}
        is_idle = status["running"] == status["waiting"] == 0 and pages["free"] == pages["total"]
        if is_idle or time.monotonic() > end:
            return status
        time.sleep(0.2)


def num_descriptors(process: int) -> int:
    """Files and sockets that a process has open."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def resident_bytes(process: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def children(process: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == process:
            found.append(int(path.parent.name))
    return found + [grandchild for child in found for grandchild in children(child)]
