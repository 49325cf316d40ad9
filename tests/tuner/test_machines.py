"""Several machines: torchrun's processes, whole copies on each, a failure in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tuning

import duoka
from duoka import TuneSettings
from duoka.tuner.run import RunDirectory

SIZES = ["--context", "48", "--batch", "8", "--lr", "1e-2", "--epochs", "2"]


pytestmark = pytest.mark.dist


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tuning.write_chats(tmp_path / "chats.jsonl")
    return tuning.write_model("llama", tmp_path / "model")


def torchrun(
    path: Path,
    *options: str,
    nodes: int = 1,
    processes: int = 1,
    restarts: int = 0,
    python: str | None = None,
) -> list[subprocess.Popen[str]]:
    """Start `duoka tune` under torchrun, which `python` runs; its machines are all this one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = path / "tune.py"
    script.write_text("from duoka.cli import main\nmain()\n")
    agent = [
        *(python or sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)),
        *("--nproc-per-node", str(processes), "--max-restarts", str(restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
    ]
    tune = [str(script), "tune", str(path / "model"), str(path / "chats.jsonl"), *SIZES, *options]
    return [
        subprocess.Popen(
            [*agent, *tune, "--save", str(path / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHON_EXEC": sys.executable,
                # A store of its own for each start: in torchrun's the last one's addresses stay.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
        for _ in range(nodes)
    ]


def finish(agents: list[subprocess.Popen[str]]) -> None:
    try:
        said = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(said)


def assert_as_one_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TuneSettings(seq_length=48, batch=8, lr=1e-2, epochs=2)
    with tuning.one_process(monkeypatch):
        one = duoka.tune(
            path / "model",
            str(path / "chats.jsonl"),
            "virtual:256MiB",
            save=path / "one",
            settings=settings,
        )
    assert tuning.losses(path / "run") == pytest.approx(tuning.losses(one.directory), rel=1e-4)
    assert (path / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_two_machines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model.parent
    finish(torchrun(path, "--gpus", "virtual:64MiB", nodes=2))
    plans = RunDirectory(path / "run").read().plans
    assert [len(plan.devices) for plan in plans] == [1, 1]
    assert_as_one_process(path, monkeypatch)


def wait_for_a_checkpoint(agent: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 300
    while not (path / "run" / "checkpoints" / "step-000001").exists():
        if agent.poll() is not None or time.monotonic() > deadline:
            agent.kill()
            raise AssertionError(agent.communicate()[0])
        time.sleep(0.01)


ON_ONE = ["--gpus", "virtual:2x64MiB", "--replicas", "1", "--save-every", "1"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_a_run_goes_on_where_torchrun_starts_it_again(
    python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.parent
    # The agent is no fork: its children are what it has started.
    (agent,) = torchrun(path, *ON_ONE, processes=2, restarts=1, python=python)
    with agent:
        wait_for_a_checkpoint(agent, path)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        finish([agent])
    assert_as_one_process(path, monkeypatch)


@pytest.mark.slow
def test_a_run_that_torchrun_stops_has_no_result_yet(model: Path) -> None:
    # All processes start as they do for people: none is a fork.
    path = model.parent
    (agent,) = torchrun(path, *ON_ONE, "--epochs", "400", processes=2)
    with agent:
        wait_for_a_checkpoint(agent, path)
        agent.send_signal(signal.SIGTERM)
        said, _ = agent.communicate(timeout=120)
    steps = len(tuning.losses(path / "run"))
    assert f"stopped after step {steps}; to go on" in said
    assert (path / "run" / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert not (path / "run" / "adapter").exists()
