"""A server under abuse, in full numbers: what is left of it.

    python benchmarks/serve_abuse.py [--damaged 10000] [--vanishing 500]

A small Llama is served on a virtual GPU. Damaged requests, clients that go away, large bodies and
grammars that explode come at it, and it is told what it answered, and how many descriptors and how
much memory the server has before and after. While grammars are compiled, one answer is streamed:
the longest pause between its pieces says whether they hold the engine up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from abuse import (
    CHAT,
    VALID,
    connect,
    exchange,
    message,
    message_of,
    num_descriptors,
    resident_bytes,
    settled,
    vanish,
)
from fuzzing import damaged
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from served import Served, serving
from tuning import write_model


def damaged_requests(number: int) -> list[bytes]:
    """Valid requests with parts that are left out, replaced, moved."""
    requests: list[bytes] = []

    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(data=st.data())
    def make(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(VALID)))
        requests.append(message_of(path, data.draw(damaged(VALID[path]))))

    make()
    return requests


async def at_once(url: str, requests: list[bytes], number: int) -> Counter[int]:
    """The statuses of what is answered, with so many connections at a time."""
    counts: Counter[int] = Counter()
    left = iter(requests)

    async def work() -> None:
        for data in left:
            counts[(await exchange(url, data))[0]] += 1

    await asyncio.gather(*(work() for _ in range(number)))
    return counts


async def vanishing(url: str, number: int) -> Counter[str]:
    """What clients did that went away."""
    rng = random.Random(0)
    return Counter(await asyncio.gather(*(vanish(url, rng) for _ in range(number))))


def large_bodies() -> list[bytes]:
    """Bodies of many megabytes: too long, too deep, of too many parts."""
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    return [
        message(CHAT, b"x" * 31 * 2**20),
        message(CHAT, b"", "Transfer-Encoding: chunked") + 40 * chunk,
        message(CHAT, b'{"messages":' + b"[" * 10**6),
        message(CHAT, b'{"messages":[' + b"{}," * 8 * 10**6 + b"{}]}"),
        message(CHAT, b'{"messages":[{"role":"user","content":"' + b"ab " * 9 * 10**6 + b'"}]}'),
        message_of(CHAT, VALID[CHAT], "Content-Encoding: gzip"),
        message(CHAT, b"{}", *(f"X-{number}: a" for number in range(100_000))),
    ]


def grammars() -> list[bytes]:
    """Grammars that are long, deep or wide."""
    schemas: list[Any] = [
        {"enum": [f"{number:x}" * 3 for number in range(2000)]},
        {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(500)]},
        {"type": "array", "maxItems": 10**9, "items": {"type": "string", "maxLength": 10**9}},
        {
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(450)},
            "$ref": "#/$defs/d0",
        },
    ]
    forms = [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in schemas]
    patterns = ["((a{1,99}){1,99}){1,99}", "(a|b)*a(a|b){14}", "(x+x+)+y" * 900]
    forms += [{"type": "regex", "regex": pattern} for pattern in patterns]
    return [message_of(CHAT, {**VALID[CHAT], "response_format": form}) for form in forms]


async def longest_pause(url: str, beside: list[bytes]) -> tuple[float, float, Counter[int]]:
    """The longest pause between pieces of streams, alone and while other requests are made."""

    async def pause(is_over: asyncio.Event) -> float:
        worst = 0.0
        while not is_over.is_set():
            reader, writer = await connect(url)
            body = {"messages": VALID[CHAT]["messages"], "max_tokens": 100, "stream": True}
            writer.write(message_of(CHAT, body, "Connection: close"))
            await reader.readuntil(b'"content": ')
            last = time.monotonic()
            while await reader.read(2**16):
                now = time.monotonic()
                worst, last = max(worst, now - last), now
            writer.close()
        return worst

    async def during(work: Any) -> tuple[float, Any]:
        is_over = asyncio.Event()
        task = asyncio.create_task(pause(is_over))
        result = await work
        is_over.set()
        return await task, result

    alone, _ = await during(asyncio.sleep(3))
    beside_them, counts = await during(at_once(url, beside, 2))
    return alone, beside_them, counts


def state(served: Served) -> str:
    """What the server has open, and whether it is well."""
    status = settled(served.url, 90)
    pages, process = status["pages"], served.process.pid
    code = asyncio.run(exchange(served.url, message_of(CHAT, VALID[CHAT])))[0]
    log = served.log.read_text()
    return (
        f"answers {code}; {status['running']} running, {status['waiting']} waiting, "
        f"{pages['free']} of {pages['total']} pages free, {num_descriptors(process)} descriptors, "
        f"{resident_bytes(process) / 2**20:.0f} MiB, {log.count('Traceback')} tracebacks"
    )


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--damaged", type=int, default=10_000)
    parser.add_argument("--vanishing", type=int, default=500)
    arguments = parser.parse_args()
    requests = damaged_requests(arguments.damaged)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model("llama", Path(folder) / "llama")
        with serving(model, Path(folder) / "log") as served:
            print(f"before: {state(served)}")
            begin = time.monotonic()
            counts = asyncio.run(at_once(served.url, requests, 16))
            print(f"damaged: {dict(counts)} in {time.monotonic() - begin:.0f} s")
            print(f"after: {state(served)}")
            print(f"vanishing: {dict(asyncio.run(vanishing(served.url, arguments.vanishing)))}")
            print(f"after: {state(served)}")
            counts = asyncio.run(at_once(served.url, large_bodies(), 2))
            print(f"large bodies: {dict(counts)}")
            print(f"after: {state(served)}")
            alone, beside, counts = asyncio.run(longest_pause(served.url, grammars() * 3))
            pauses = f"{alone:.2f} s alone, {beside:.2f} s beside them"
            print(f"grammars: {dict(counts)}; longest pause {pauses}")
            print(f"after: {state(served)}")


if __name__ == "__main__":
    main()
