"""vLLM from a plan to an exit code, with a stand-in that holds what it is told to vLLM's rules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from staged import WORKLOAD, staged
from vllm_python import write_python

from duoka.errors import MachineError, UsageError
from duoka.planner.plan import Plan
from duoka.serve.vllm import VllmOptions, launch, serve_with_vllm

pytestmark = pytest.mark.process

PAGES = 512
LAYER_BYTES = 4096
_GONE_SECONDS = 20
ANSWERS = "vLLM is ready at"
DRIVER = """
import sys
from pathlib import Path
from duoka.planner.plan import Plan
from duoka.serve.vllm import VllmOptions, serve_with_vllm
options = VllmOptions(python=Path(sys.argv[2]), port=0)
sys.exit(serve_with_vllm(Plan.load(sys.argv[1]), options, lambda line: print(line, flush=True)))
"""


def served(counts: list[int], gpus: str = "24GiB,12GiB,8GiB,8GiB") -> Plan:
    """A plan for requests, with so many layers on each GPU and the pages of these."""
    workload = replace(
        WORKLOAD, cache="paged", pages=PAGES, batch=4, prefill_chunk_tokens=512,
        prompt_tokens=1792, new_tokens=256,
    )  # fmt: skip
    plan = staged(counts, gpus=gpus)
    devices = []
    for stage, count in zip(plan.forecast.devices, counts, strict=True):
        cache = (PAGES + 1) * 16 * LAYER_BYTES * count
        devices.append(
            replace(
                stage,
                kv_cache_bytes=cache,
                allocated_bytes=stage.allocated_bytes + cache,
                requested_bytes=stage.requested_bytes + cache,
                reserved_bytes=stage.reserved_bytes + cache,
            )
        )
    forecast = replace(plan.forecast, devices=tuple(devices))
    return replace(plan, workload=workload, forecast=forecast)


@dataclass
class Launch:
    """A launch in this process: what it told, and what is done at certain lines."""

    directory: Path
    lines: list[str] = field(default_factory=list)
    reactions: dict[str, Callable[[], object]] = field(default_factory=dict)

    def run(
        self, plan: Plan | None = None, behaviour: dict[str, Any] | None = None, **options: Any
    ) -> int:
        plan = plan or served([20, 12, 8])
        layers = sum("layers." in name for name, _ in plan.placement.entries)
        python = options.get("python") or write_python(
            self.directory,
            **{"layers": layers, "record": str(self.record), **(behaviour or {})},
        )
        options = {"python": python, "port": 0, **options}
        return serve_with_vllm(plan, VllmOptions(**options), self.tell)

    def tell(self, line: str) -> None:
        self.lines.append(line)
        for beginning, reaction in self.reactions.items():
            if line.startswith(beginning):
                reaction()

    @property
    def record(self) -> Path:
        return self.directory / "record.json"

    def when_there(self, name: str, action: Callable[[], object]) -> None:
        """Do something as soon as the stand-in has written a file."""

        def watch() -> None:
            while not (self.directory / name).exists():
                time.sleep(0.02)
            action()

        threading.Thread(target=watch, daemon=True).start()

    def recorded(self) -> Any:
        return json.loads(self.record.read_text(encoding="utf-8"))

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        line = next(line for line in self.lines if line.startswith(ANSWERS))
        port = int(line.removesuffix("/v1").rpartition(":")[2])
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()

    def assert_nothing_is_left(self) -> None:
        for process_id in self.recorded()["processes"]:
            assert_gone(process_id)


def is_running(process_id: int) -> bool:
    """Whether a process is there, and not only the record of one that nobody has waited for."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(process_id: int) -> None:
    deadline = time.monotonic() + _GONE_SECONDS
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process_id)


def send(signum: int) -> Callable[[], None]:
    """What sends this process a signal, which its main thread then takes."""
    return lambda: os.kill(os.getpid(), signum)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launch]:
    # Whoever runs the tests in the background has them ignore Ctrl-C.
    former = {
        signum: signal.signal(signum, signal.default_int_handler)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield Launch(tmp_path)
        for signum in former:  # they are put back
            assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("signum", "expected"),
    [
        (signal.SIGINT, "ends after SIGINT"),
        (signal.SIGTERM, "ends after SIGTERM"),
        (signal.SIGHUP, "ends after SIGTERM"),
    ],
    ids=["INT", "TERM", "HUP"],
)
def test_the_plan_is_served_until_a_signal_comes(
    launched: Launch, capfd: pytest.CaptureFixture[str], signum: int, expected: str
) -> None:
    launched.reactions[ANSWERS] = lambda: (launched.get("/v1/models"), send(signum)())
    assert launched.run() == 0
    assert expected in capfd.readouterr().out  # vLLM's output goes where duoka's goes
    launched.assert_nothing_is_left()
    told = launched.recorded()
    assert told["environment"]["VLLM_PP_LAYER_PARTITION"] == "20,12,8"
    assert told["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    options = told["options"]
    assert options["model_tag"] == "my model"
    assert options["pipeline_parallel_size"] == 3
    assert options["kv_cache_memory_bytes"] == (PAGES + 1) * 16 * LAYER_BYTES * 20
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == (4, 512)
    assert (options["max_model_len"], options["shutdown_timeout"]) == (2048, 30)


def test_what_is_in_flight_is_answered_before_it_ends(launched: Launch) -> None:
    answers: list[tuple[int, bytes]] = []
    asker = threading.Thread(target=lambda: answers.append(launched.get("/slow")))
    launched.reactions[ANSWERS] = asker.start
    launched.when_there("slow", send(signal.SIGTERM))
    assert launched.run() == 0
    asker.join()
    assert answers == [(200, b"whole")]


def test_its_exit_code_is_handed_on(launched: Launch) -> None:
    def end() -> None:
        with pytest.raises(ConnectionError):
            launched.get("/exit")

    launched.reactions[ANSWERS] = end
    assert launched.run() == 7
    launched.assert_nothing_is_left()


def test_one_that_ignores_sigterm_is_killed(
    launched: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "DRAIN_SECONDS", 0)
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.5)
    launched.reactions[ANSWERS] = send(signal.SIGTERM)
    assert launched.run(behaviour={"ignores_term": True}) == 128 + signal.SIGKILL
    assert "ignores SIGTERM" in capfd.readouterr().out
    launched.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ({"dies": 3}, 3, "torch.OutOfMemoryError: CUDA out of memory."),
        ({"gpus": 2}, 2, "no such GPU: 0,1,2"),
    ],
    ids=["out of memory", "GPUs that the machine hasn't"],
)
def test_one_that_ends_at_the_start_is_told(
    launched: Launch, capfd: pytest.CaptureFixture[str], behaviour: Any, code: int, text: str
) -> None:
    with pytest.raises(MachineError, match="before it was ready"):
        launched.run(behaviour=behaviour)
    assert text in capfd.readouterr().err


def test_one_that_never_answers_is_ended(launched: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_START_SECONDS", 2.0)
    with pytest.raises(MachineError, match=r"doesn't respond at http://127.0.0.1:.*after 2 s"):
        launched.run(behaviour={"is_healthy": False})
    launched.assert_nothing_is_left()


def test_it_can_be_stopped_while_it_starts(launched: Launch) -> None:
    launched.when_there("record.json", send(signal.SIGTERM))
    code = launched.run(behaviour={"is_healthy": False})
    assert code in (0, 128 + signal.SIGTERM)  # as it comes before or after its handlers
    launched.assert_nothing_is_left()


def test_the_key_is_in_no_argument_and_no_line_of_duokas(launched: Launch) -> None:
    answers: list[int] = []

    def ask() -> None:
        answers.append(launched.get("/v1/models", Authorization="Bearer sk-very-secret")[0])
        answers.append(launched.get("/v1/models", Authorization="Bearer wrong")[0])
        send(signal.SIGTERM)()

    launched.reactions["curl"] = ask
    launched.reactions[ANSWERS] = lambda: None
    assert launched.run(api_key="sk-very-secret") == 0
    assert answers == [200, 401]
    told = launched.recorded()
    assert told["environment"]["VLLM_API_KEY"] == "sk-very-secret"
    assert not any("sk-very-secret" in word for word in told["argv"])
    assert not any("sk-very-secret" in line for line in launched.lines)


def test_its_environment_is_not_that_of_duokas_python(
    launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    launched.reactions[ANSWERS] = send(signal.SIGTERM)
    assert launched.run(served([40])) == 0
    environment = launched.recorded()["environment"]
    assert "/somewhere" not in environment["PYTHONPATH"]
    assert "VLLM_PP_LAYER_PARTITION" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_python_that_isnt_there_or_has_no_vllm_is_told(
    launched: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="not an executable program"):
            launched.run(python=path)
    # Python looks for modules where it is called, unless it is told not to.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('of the working directory')")
    with contextlib.chdir(tmp_path), pytest.raises(MachineError, match="exit code 1 before") as e:
        launched.run(python=Path(sys.executable))
    assert f"{sys.executable} -m pip install" in str(e.value.hint)
    assert "No module named 'vllm'" in capfd.readouterr().err


def test_an_address_that_is_taken_is_told_before_anything_starts(launched: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} is not available"):
            launched.run(port=port)
    assert not launched.record.exists()
    assert launched.lines == []


def test_nothing_is_left_when_duoka_is_killed(tmp_path: Path) -> None:
    served([20, 20]).save(tmp_path / "model.plan")
    record = tmp_path / "record.json"
    python = write_python(tmp_path, layers=40, record=str(record))
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path / "model.plan", python],
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert any(line.startswith(ANSWERS) for line in driver.stdout)
        driver.kill()
        for process_id in json.loads(record.read_text(encoding="utf-8"))["processes"]:
            assert_gone(process_id)
