"""`duoka serve --on ray` on a cluster of several nodes of this machine, of which one is lost."""

from __future__ import annotations

import json
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
from tuning import write_model

_SECONDS = 400.0
_CONTEXT, _LONG, _SHORT = 4096, 4000, 40
# Small steps are warmed up soon.
_OPTIONS = ("--context", str(_CONTEXT), "--sequences", "2", "--prefill-chunk", "32")


@pytest.fixture
def long_llama(tmp_path: Path) -> Path:
    """A small model whose answers may be long."""
    directory = write_model("llama", tmp_path / "llama")
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": _CONTEXT}
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1500)
def test_a_lost_node_loses_no_request_but_begun_streams(long_llama: Path, tmp_path: Path) -> None:
    with running_cluster(one="virtual:1x256MiB", two="virtual:2x160MiB") as cluster:
        with (
            serving(
                long_llama,
                tmp_path / "log",
                *("--on", "ray", "--replicas", "2-3"),
                gpus=_OPTIONS,
                environment={"RAY_ADDRESS": cluster.address},
            ) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        ):
            log = server.log.read_text()
            assert "replicas: 1, each on 1 GPU of one" in log
            assert "replicas: 1 to 2, each on 1 GPU of two" in log
            _grow(server, client)
            answers, streams = _lose(server, client, lambda: cluster.lose("one"))
            assert answers == {"answered": 6}
            assert streams == {"engine_died": 2, "goes on": 4}
            assert [engine["state"] for engine in _status(server)["engines"]] == [
                "ready",
                "restarting",
            ]
        _until(lambda: not any("duoka" in line for line in cluster.processes()), "engines go on")
    assert cluster.processes() == []


def _grow(server: Served, client: OpenAI) -> None:
    """Ask so much that a further replica begins."""
    is_enough = threading.Event()

    def ask(number: int) -> None:
        while not is_enough.is_set():
            assert _answer(client, number) == "answered"

    assert _status(server)["sequences"] == 4
    with ThreadPoolExecutor(8) as threads:
        work = [threads.submit(ask, number) for number in range(8)]
        try:
            _until(lambda: _status(server)["sequences"] == 6, "no further replica begins")
        finally:
            is_enough.set()
    for task in work:
        task.result()


def _lose(
    server: Served, client: OpenAI, lose: Callable[[], None]
) -> tuple[Counter[str], Counter[str]]:
    """Lose a node that answers two streams, while others wait there; what all clients see."""
    begun: list[int] = []
    is_lost = threading.Event()
    with ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(_stream, client, n, begun, is_lost) for n in range(6)]
        _until(lambda: _requests(server, "running", 1) == 2, "two streams aren't answered there")
        _until(lambda: len(begun) == _status(server)["running"], "they don't begin")
        answers = [threads.submit(_answer, client, number) for number in range(6)]
        _until(lambda: _requests(server, "waiting", 1) > 0, "nothing waits there")
        lose()
        _until(lambda: sum(task.done() for task in streams) == 2, "no stream has failed")
        is_lost.set()
        return Counter(t.result() for t in answers), Counter(t.result() for t in streams)


def _answer(client: OpenAI, number: int) -> str:
    answer = client.completions.create(**_parameters(number, _SHORT))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == _SHORT
    return "answered"


def _stream(client: OpenAI, number: int, begun: list[int], is_lost: threading.Event) -> str:
    """Read a stream until something is lost, and a little beyond."""
    try:
        with client.completions.create(**_parameters(number, _LONG), stream=True) as stream:
            for piece in stream:
                assert piece.choices[0].finish_reason is None, "it is as long as the test"
                if is_lost.is_set():
                    return "goes on"
                if number not in begun:
                    begun.append(number)
    except APIError as error:
        return str(error.code)
    return "cut off"


def _parameters(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "llama",
        "prompt": f"{number} and {tokens}",
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": number,
        "extra_body": {"min_tokens": tokens},
    }


def _until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def _status(server: Served) -> dict[str, Any]:
    status: dict[str, Any] = httpx2.get(f"{server.url}/duoka/status", timeout=30).json()
    return status


def _requests(server: Served, state: str, engine: int) -> float:
    name = f'vllm:num_requests_{state}{{engine="{engine}",model_name="llama"}} '
    lines = httpx2.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).removeprefix(name))
