"""`duoka serve --on ray` on a cluster of several nodes of this machine, of which one is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import APIError, OpenAI
from ray_cluster import running_cluster
from served import Served, serving

_SECONDS = 120.0
_NEW = 100
_OPTIONS = ("--context", "128", "--sequences", "2")


def _until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def _status(server: Served) -> dict[str, Any]:
    status: dict[str, Any] = httpx2.get(f"{server.url}/duoka/status", timeout=30).json()
    return status


def _ask(client: OpenAI, number: int, begun: threading.Semaphore, *, stream: bool) -> str:
    """What a client sees of one request; it tells when its stream has begun."""
    parameters: dict[str, Any] = {
        "model": "llama",
        "prompt": f"{number}",
        "max_tokens": _NEW,
        "temperature": 1.0,
        "seed": number,
        "extra_body": {"min_tokens": _NEW},
    }
    try:
        if not stream:
            answer = client.completions.create(**parameters)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == _NEW
            return "answered"
        for piece in client.completions.create(**parameters, stream=True):
            begun.release()
            if piece.choices[0].finish_reason:
                return "streamed"
    except APIError as error:
        assert error.body is not None
        return f"{error.code}"
    return "cut off"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_lost_node_loses_no_request_but_begun_streams(llama: Path, tmp_path: Path) -> None:
    with running_cluster(one="virtual:1x256MiB", two="virtual:2x160MiB") as cluster:
        with (
            serving(
                llama,
                tmp_path / "log",
                *("--on", "ray", "--replicas", "2-3"),
                gpus=_OPTIONS,
                environment={"RAY_ADDRESS": cluster.address},
            ) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        ):
            log = server.log.read_text()
            assert "replicas on vgpu:0: 1, on the nodes one" in log
            assert "replicas on vgpu:0: 1 to 2, on the nodes two" in log
            _grow(server, client)
            seen = _lose(server, client, lambda: cluster.lose("one"))
            assert seen["answered"] == 8, seen  # also those that the lost node had
            assert seen["engine_died"] >= 1, seen
            assert seen["streamed"] + seen["engine_died"] == 8, seen
            _until(lambda: len(_ready(server)) == 1, "the lost node counts")
            assert _ask(client, 99, threading.Semaphore(), stream=True) == "streamed"
        _until(lambda: not _of_duoka(cluster.processes()), "an engine goes on")
    assert cluster.processes() == []


def _grow(server: Served, client: OpenAI) -> None:
    """Ask so much that a further replica begins."""
    begun, is_enough = threading.Semaphore(), threading.Event()

    def ask(number: int) -> None:
        while not is_enough.is_set():
            assert _ask(client, number, begun, stream=False) == "answered"

    assert _status(server)["sequences"] == 4
    with ThreadPoolExecutor(12) as threads:
        work = [threads.submit(ask, number) for number in range(12)]
        try:
            _until(lambda: _status(server)["sequences"] == 6, "no further replica begins")
        finally:
            is_enough.set()
    for task in work:
        task.result()


def _lose(server: Served, client: OpenAI, lose: Callable[[], None]) -> Counter[str]:
    """Lose a node where streams have begun and other requests wait; what all clients see."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(16) as threads:
        work = [
            threads.submit(_ask, client, number, begun, stream=number % 2 == 0)
            for number in range(16)
        ]
        for _ in range(20):
            assert begun.acquire(timeout=_SECONDS)
        lose()
    return Counter(task.result() for task in work)


def _ready(server: Served) -> list[Any]:
    return [engine for engine in _status(server)["engines"] if engine["state"] == "ready"]


def _of_duoka(lines: list[str]) -> list[str]:
    return [line for line in lines if "duoka" in line]
