"""A server under an open load: requests come when they come, whatever is still open.

    python benchmarks/serve.py [--seconds 20] [--shares 0.5 0.9 1.5]

A small Llama is served on a virtual GPU. Its capacity is measured first, by as many clients as it
answers at once; then requests come at these shares of it, at random (Poisson). For each: requests
that were answered, refused with 429, and lost; tokens a second; time to the first token and between
tokens; the longest queue that was seen; and the server's memory. The clients use a core of their
own, where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from abuse import CHAT, children, connect, look, message_of, resident_bytes, settled, status_code
from served import Served, serving
from tuning import write_model

NEW_TOKENS, SEQUENCES, QUEUE = 32, 4, 16
_GPUS = ("--gpus", "virtual:1x256MiB", "--context", "128", "--sequences", str(SEQUENCES))


@dataclass
class Answers:
    """What clients saw."""

    statuses: list[int] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cut: int = 0
    num_silent_refusals: int = 0


NO_END: dict[str, Any] = {"logit_bias": {"256": -100}}  # no answer ends before it is that long


async def ask(url: str, number: int, answers: Answers, more: Mapping[str, Any] = NO_END) -> None:
    """One request, streamed."""
    content = f"{number} {'ab' * (number % 20)}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS}
    body |= {"stream": True, **more}
    begin = last = time.monotonic()
    reader, writer = await connect(url)
    writer.write(message_of(CHAT, body, "Connection: close"))
    head = await reader.readuntil(b"\r\n\r\n")
    answers.statuses.append(status_code(head))
    if answers.statuses[-1] == 429:
        answers.num_silent_refusals += b"retry-after" not in head.lower()
    num_pieces, is_whole = 0, False
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        is_whole = is_whole or choice.get("finish_reason") is not None
        if not choice["delta"].get("content"):
            continue
        now = time.monotonic()
        (answers.between_seconds if num_pieces else answers.first_seconds).append(now - last)
        last, num_pieces = now, num_pieces + 1
    if answers.statuses[-1] == 200:
        answers.num_tokens += NEW_TOKENS if is_whole else 0
        answers.num_cut += not is_whole
        answers.whole_seconds.append(time.monotonic() - begin)
    writer.close()


async def closed_load(url: str, seconds: float) -> float:
    """Requests a second with as many clients as are answered at once."""
    answers, end = Answers(), time.monotonic() + seconds

    async def work(client: int) -> None:
        number = client
        while time.monotonic() < end:
            await ask(url, number, answers)
            number += SEQUENCES

    begin = time.monotonic()
    await asyncio.gather(*(work(client) for client in range(SEQUENCES)))
    return len(answers.statuses) / (time.monotonic() - begin)


async def open_load(
    url: str, rate: float, seconds: float, more: Mapping[str, Any] | None = None
) -> tuple[Answers, int, float]:
    """Requests at a rate; what clients saw, the longest queue, and how long it took.

    Another server than duoka's is one that needs more in its requests; it tells no queue.
    """
    rng, answers, tasks = random.Random(0), Answers(), []
    longest, begin = 0, time.monotonic()
    due = next_look = begin
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(url, len(tasks), answers, more or NO_END)))
        due += rng.expovariate(rate)
        if more is None and time.monotonic() >= next_look:
            status = await asyncio.to_thread(look, url)
            longest = max(longest, status["waiting"])
            next_look = time.monotonic() + 0.5
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answers.num_cut += sum(isinstance(result, BaseException) for result in results)
    return answers, longest, time.monotonic() - begin


def shown(values: Sequence[float]) -> str:
    """The median and the 99th of a hundred, in milliseconds."""
    if len(values) < 2:
        return "—"
    last = statistics.quantiles(values, n=100)[-1]
    return f"{1e3 * statistics.median(values):.0f} / {1e3 * last:.0f}"


def row(served: Served, share: float, rate: float, seconds: float) -> str:
    """A row of the table."""
    answers, longest, passed = asyncio.run(open_load(served.url, rate, seconds))
    counts = {code: answers.statuses.count(code) for code in sorted(set(answers.statuses))}
    refused = counts.pop(429, 0)
    status = settled(served.url)
    assert status["pages"]["free"] == status["pages"]["total"], "pages are lost"
    assert not answers.num_silent_refusals, "a refusal doesn't say when to come again"
    memory = [served.process.pid, *children(served.process.pid)]
    sizes = " + ".join(f"{resident_bytes(process) / 2**20:.0f}" for process in memory)
    return (
        f"| {share} | {rate:.1f} | {sum(counts.values())} | {refused} | {answers.num_cut} | "
        f"{answers.num_tokens / passed:.0f} | {shown(answers.first_seconds)} | "
        f"{shown(answers.between_seconds)} | {longest} | {sizes} |"
    )


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9, 1.5])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model("llama", Path(folder) / "llama")
        options = ("--max-queue", str(QUEUE))
        with serving(model, Path(folder) / "log", *options, gpus=_GPUS) as served:
            asyncio.run(closed_load(served.url, 3))
            capacity = asyncio.run(closed_load(served.url, arguments.seconds))
            print(f"{capacity:.1f} requests of {NEW_TOKENS} tokens a second by {SEQUENCES} clients")
            print(
                "| share | requests/s | answered | 429 | lost | tokens/s | first token, ms |",
                end="",
            )
            print(" between, ms | longest queue | MiB: server + engine |")
            print(f"|{'---|' * 10}")
            for share in arguments.shares:
                print(row(served, share, share * capacity, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
