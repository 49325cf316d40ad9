"""`duoka serve --on ray` on a cluster of several nodes of this machine, of which one is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from openai import APIError, OpenAI
from ray_cluster import running_cluster
from served import serving

_SECONDS = 400.0
# Small steps are warmed up soon.
_OPTIONS = ("--context", "128", "--sequences", "2", "--prefill-chunk", "32")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1500)
def test_replicas_answer_behind_one_address_until_the_server_ends(
    llama: Path, tmp_path: Path
) -> None:
    with running_cluster(one="virtual:1x256MiB", two="virtual:2x160MiB") as cluster:
        with (
            serving(
                llama,
                tmp_path / "log",
                *("--on", "ray", "--replicas", "2-3", "--api-key-file", _key(tmp_path)),
                gpus=_OPTIONS,
                environment={"RAY_ADDRESS": cluster.address},
            ) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key="a key of ours") as client,
        ):
            log = server.log.read_text()
            assert "replicas: 2 to 3, each on 1 GPU of one" in log
            assert httpx2.get(f"{server.url}/v1/models").status_code == 401
            with ThreadPoolExecutor(8) as threads:
                assert all(threads.map(lambda number: _answer(client, number), range(8)))
            assert _stream(client) == 40
            cluster.lose("one")
            _until(lambda: _is_answered(client), "nothing is answered after the loss")
        _until(lambda: not any("duoka" in line for line in cluster.processes()), "engines go on")
    assert cluster.processes() == []


def _key(directory: Path) -> str:
    file = directory / "key"
    file.write_text("a key of ours")
    return str(file)


def _answer(client: OpenAI, number: int) -> bool:
    answer = client.completions.create(
        model="llama", prompt=f"number {number}", max_tokens=40, extra_body={"min_tokens": 40}
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens == 40


def _stream(client: OpenAI) -> int:
    pieces = client.completions.create(
        model="llama",
        prompt="a stream",
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_tokens": 40},
    )
    *_, last = pieces
    assert last.usage is not None
    return last.usage.completion_tokens


def _is_answered(client: OpenAI) -> bool:
    try:
        return _answer(client, 0)
    except APIError:
        return False


def _until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.1)
