"""A server's life: engines that die or can't be opened, signals, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from abuse import CHAT, children, connect, exchange, look, message_of, settled
from served import Served, serving

from duoka.serve.server import _Server

# Token 256 would end it.
LONG = {
    "messages": [{"role": "user", "content": "ab"}],
    "max_tokens": 100,
    "logit_bias": {"256": -100},
}
STREAM = {**LONG, "stream": True}
GPUS = ["--gpus", "virtual:1x256MiB", "--context", "128", "--sequences", "4"]
_PATIENCE_SECONDS = 120
_ENGINE_LOST = 12


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Also where the tests themselves run under `nohup`, whose processes ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something; fail where it doesn't come."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it doesn't come"
        time.sleep(0.02)


def is_there(process: int) -> bool:
    """Whether a process runs; one that has ended and isn't collected doesn't."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def engine_of(served: Served) -> int:
    """Its process, as soon as it is there."""
    until(lambda: bool(children(served.process.pid)))
    return children(served.process.pid)[0]


async def asked(url: str, engine: int, number: int) -> list[tuple[int, bytes]]:
    """What clients see whose engine is killed when all are on their way."""

    def ask(at: int) -> asyncio.Task[tuple[int, bytes]]:
        # None begins like another: where there are two engines, both have some.
        said = [{"role": "user", "content": f"{at}, {at}"}]
        body = {**(STREAM if at % 2 else LONG), "messages": said}
        return asyncio.create_task(exchange(url, message_of(CHAT, body)))

    tasks = [ask(at) for at in range(number)]
    while (await asyncio.to_thread(look, url))["running"] < 2:
        assert not all(task.done() for task in tasks), "the answers have ended too early"
        tasks.append(ask(len(tasks)))
        await asyncio.sleep(0.05)
    os.kill(engine, signal.SIGKILL)
    return await asyncio.gather(*tasks)


@pytest.mark.slow
def test_an_engine_that_dies_is_told_and_started_again(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log") as served:
        first = engine_of(served)
        answers = asyncio.run(asked(served.url, first, 12))
        cut = [answer for code, answer in answers if code == 200 and b"[DONE]" not in answer]
        lost = [answer for code, answer in answers if code == 503]
        assert lost
        streams = [answer for answer in cut if b"event-stream" in answer]
        assert streams
        for answer in (*streams, *lost):
            assert b'"engine_died"' in answer
            assert b"signal 9" in answer
        assert all(b"retry-after: 5" in answer.lower() for answer in lost)
        until(lambda: look(served.url)["engines"][0]["state"] == "ready")
        status = settled(served.url)
        assert status["pages"]["free"] == status["pages"]["total"]
        assert asyncio.run(exchange(served.url, message_of(CHAT, LONG)))[0] == 200
        assert not is_there(first)
        for _ in range(2):  # the third death is the last
            os.kill(engine_of(served), signal.SIGKILL)
            until(lambda: served.process.poll() is not None or not children(served.process.pid))
        assert served.process.wait(_PATIENCE_SECONDS) == _ENGINE_LOST
    log = served.log.read_text()
    assert "3 times within ten minutes" in log
    assert "signal 9" in log
    assert "Traceback" not in log


async def drained(served: Served, signum: signal.Signals) -> tuple[bytes, bool]:
    """What an open stream gets when the server is told to stop; whether a new client gets in."""
    reader, writer = await connect(served.url)
    head = message_of(CHAT, {**STREAM, "n": 4})
    writer.write(head)
    begin = await reader.readuntil(b'"content": ')
    served.process.send_signal(signum)
    is_refused = False
    for _ in range(100):
        try:
            (await connect(served.url))[1].close()
        except ConnectionError:
            is_refused = True
            break
        await asyncio.sleep(0.05)
    rest = await reader.read(-1)
    writer.close()
    return begin + rest, is_refused


@pytest.mark.slow
def test_a_stage_that_dies_ends_its_engine(llama: Path, tmp_path: Path) -> None:
    """It is told and started again as an engine is, whether anybody asks or not."""
    gpus = ["--gpus", "virtual:2x256MiB", "--use-all", *GPUS[2:]]
    with serving(llama, tmp_path / "log", gpus=gpus) as served:

        def ended(kill: Callable[[int], object]) -> None:
            first = engine_of(served)
            kill(children(first)[1])
            until(lambda: not is_there(first))
            with pytest.raises(urllib.error.HTTPError, match="503"):
                look(served.url, "/ready")
            until(lambda: look(served.url)["engines"][0]["state"] == "ready")
            assert asyncio.run(exchange(served.url, message_of(CHAT, LONG)))[0] == 200

        ended(lambda stage: os.kill(stage, signal.SIGKILL))
        answers: list[tuple[int, bytes]] = []
        ended(lambda stage: answers.extend(asyncio.run(asked(served.url, stage, 12))))
        died = [answer for code, answer in answers if b"[DONE]" not in answer and code != 200]
        assert died
        assert all(b'"engine_died"' in answer or b"not_ready" in answer for answer in died)
        metrics = urllib.request.urlopen(f"{served.url}/metrics").read()
        assert b'duoka:engine_deaths_total{engine="0",model_name="llama"} 2.0' in metrics
    log = served.log.read_text()
    assert log.count("engine 0 has ended: the process of vgpu:1 has ended: signal 9") == 2
    assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_open_answers_end(
    llama: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    with serving(llama, tmp_path / "log") as served:
        engine = engine_of(served)
        answer, is_refused = asyncio.run(drained(served, signum))
        assert is_refused
        assert answer.count(b'"finish_reason": "length"') == 4
        assert b"[DONE]" in answer
        assert served.process.wait(_PATIENCE_SECONDS) == 128 + signum
        assert not is_there(engine)
    assert "Traceback" not in served.log.read_text()


# Long answers in each API's form, and what each says where an answer begins and where it is cut.
STREAMS: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    CHAT: (STREAM, b'"content": ', b'"engine_died"'),
    "/v1/completions": ({"prompt": "ab", "max_tokens": 100, "logit_bias": {"256": -100},
                         "stream": True}, b'"text": ', b'"engine_died"'),
    "/v1/responses": ({"input": "ab", "max_output_tokens": 100, "temperature": 0, "stream": True},
                      b"response.output_text.delta", b"event: response.failed"),
    "/v1/messages": ({"model": "llama", "messages": LONG["messages"], "max_tokens": 100,
                      "temperature": 0, "stream": True}, b"content_block_delta", b"event: error"),
}  # fmt: skip


async def cut(served: Served) -> list[bytes]:
    """What open streams of each form get when the server is told twice to stop."""

    streams = []
    for path, (body, begin, _) in STREAMS.items():
        reader, writer = await connect(served.url)
        writer.write(message_of(path, body))
        streams.append((reader, writer, await reader.readuntil(begin)))
    served.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.2)
    served.process.send_signal(signal.SIGINT)
    answers = [begin + await reader.read(-1) for reader, _, begin in streams]
    for _, writer, _ in streams:
        writer.close()
    return answers


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_nobody(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log") as served:
        engine = engine_of(served)
        for answer, (_, _, end) in zip(asyncio.run(cut(served)), STREAMS.values(), strict=True):
            assert b"[DONE]" not in answer
            assert b"the server was stopped" in answer
            assert end in answer
        assert served.process.wait(_PATIENCE_SECONDS) == 128 + signal.SIGINT
        until(lambda: not is_there(engine))
    assert "Traceback" not in served.log.read_text()


def test_a_hang_up_that_was_ignored_stays_ignored() -> None:
    """As `nohup` leaves it."""
    server = _Server(uvicorn.Config(app=""))
    for handler, during in (
        (signal.SIG_IGN, signal.SIG_IGN),
        (signal.SIG_DFL, server.handle_exit),
    ):
        signal.signal(signal.SIGHUP, handler)
        with server.capture_signals():
            assert signal.getsignal(signal.SIGHUP) == during
        assert signal.getsignal(signal.SIGHUP) == handler


@pytest.mark.slow
def test_an_engine_that_cant_be_opened_ends_the_server(llama: Path, tmp_path: Path) -> None:
    program = "from duoka.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", str(llama), *GPUS, "--port", "0"]
    done = subprocess.run(
        [*command, "--adapter", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "has no adapter" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.slow
def test_a_copy_that_dies_loses_its_own_requests_alone(llama: Path, tmp_path: Path) -> None:
    gpus = ["--gpus", "virtual:2x256MiB", "--replicas", "2", *GPUS[2:]]
    with serving(llama, tmp_path / "log", gpus=gpus) as served:
        engine = engine_of(served)
        answers = asyncio.run(asked(served.url, engine, 12))
        died = [answer for _, answer in answers if b"engine_died" in answer]
        ends = (b'"length"', b'"stop"')
        ended = [answer for _, answer in answers if any(end in answer for end in ends)]
        assert died
        assert ended
        neither = {answer for _, answer in answers}.difference(died, ended)
        assert not neither
        assert look(served.url, "/ready") is None  # the other answers meanwhile
        assert asyncio.run(exchange(served.url, message_of(CHAT, LONG)))[0] == 200
        until(lambda: all(e["state"] == "ready" for e in look(served.url)["engines"]))
        settled(served.url)
        engines = children(served.process.pid)
        served.process.kill()
        served.process.wait()
        until(lambda: not any(map(is_there, engines)))  # no engine outlives its server
