"""Several machines: torchrun's processes, GPUs numbered over all of them, a failure in between."""

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
from duoka import Fleet, TuneSettings
from duoka.errors import UsageError
from duoka.tuner.layout import Layout
from duoka.tuner.machines import machine_of, of_first_machine, over_machines, seen_from
from duoka.tuner.prepare import plans_for
from duoka.tuner.run import RunDirectory

SIZES = ["--seq-length", "48", "--batch", "8", "--lr", "1e-2", "--epochs", "2"]


def test_gpus_are_numbered_over_machines() -> None:
    one = Fleet.parse("virtual:2x24GiB")
    both = over_machines(one, 2)
    assert both.names == ("vgpu:0", "vgpu:1", "vgpu:2", "vgpu:3")
    assert [machine_of(name, both, 2) for name in both.names] == [0, 0, 1, 1]
    assert of_first_machine(both, 2) == one


def test_each_machine_has_its_own_gpus_first(tmp_path: Path) -> None:
    model = duoka.Checkpoint.open(tuning.write_model("llama", tmp_path / "model"))
    fleet = over_machines(Fleet.parse("virtual:2x1GiB"), 2)
    work = duoka.Workload(prompt_tokens=64, new_tokens=8)
    plan = duoka.plan(model, fleet, work, use_all=True)
    ranks = []
    for here in range(2):
        layout = Layout((seen_from(plan, here, 2),), 2, here)
        places = [layout.place(rank)[1] for rank in range(4)]
        # torchrun gives the first processes to the first machine: what it sees as its own.
        assert {*places[2 * here : 2 * here + 2]} == {"vgpu:0", "vgpu:1"}
        assert [layout.rank(0, device) for device in places] == [0, 1, 2, 3]
        ranks.append({name: layout.owners(name) for name, _ in layout.plans[0].placement.entries})
    assert ranks[0] == ranks[1]


def test_one_machine_is_none_to_span(tmp_path: Path) -> None:
    model = duoka.Checkpoint.open(tuning.write_model("llama", tmp_path / "model"))
    with pytest.raises(UsageError, match="there is one machine"):
        plans_for(model, "virtual:64MiB", TuneSettings(span_machines=True), "auto")


# ── torchrun ──

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
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, ["--gpus", "virtual:64MiB"], id="copies"),
        pytest.param(
            2, ["--gpus", "virtual:2x64MiB", "--span-machines", "--replicas", "1"], id="span"
        ),
    ],
)
def test_two_machines(
    processes: int, options: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.parent
    finish(torchrun(path, *options, nodes=2, processes=processes))
    plans = RunDirectory(path / "run").read().plans
    spans = "--span-machines" in options
    assert [len(plan.devices) for plan in plans] == ([4] if spans else [processes] * 2)
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
