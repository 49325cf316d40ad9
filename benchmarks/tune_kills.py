"""`duoka tune` killed at random moments: what is left is usable, and the run goes on as if whole.

    python benchmarks/tune_kills.py [--kills 36] [--seed 0] [--steps 12] [--forks]

A tiny model is trained in two stages, one process each, with checkpoints and evaluations every few
steps. Each run gets SIGKILL, SIGTERM or SIGINT, in the parent process or a stage's, at a random
time of the run or shortly after a random step. Then, each time:

- no process is left;
- every checkpoint under a final name is verified by its hashes, and an adapter is whole;
- either nothing was saved yet, or ``--export`` makes the adapter of the newest checkpoint;
- the exit code is 0 only if all steps were made;
- the run goes on, with ``--resume`` or the same command if none was written, to the losses,
  evaluation losses, answers and adapter of a run that nobody killed.

It ends with 1 if anything of this fails, and prints it. With ``--forks`` processes are forks that
have imported torch already (``tests/fork_server.py``), behind proxies that get the signals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning
from fork_server import forking_python

from duoka.errors import DuokaError, TrainingError
from duoka.tuner.checkpoints import SavedParameters, checkpoint_path, checkpoint_steps
from duoka.tuner.run import RunDirectory
from duoka.tuner.tune import export_result

_MARK = "DUOKA_TUNE_KILLS"
_MAIN = "from duoka.cli import main; main()"
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Complete; SIGKILL; a process failed; SIGINT; SIGTERM.
_CODES = (0, -signal.SIGKILL, TrainingError.exit_code, 130, 143)
_GRACE_SECONDS = 5.0  # for processes to notice that their parent is gone
_RUN_SECONDS = 600.0  # more than any run takes
_POLL_SECONDS = 0.002
_TOLERANCE = 1e-5  # of losses: sums in float32 may have another order in another process


@dataclass
class Rig:
    """Model, data, and the faults so far."""

    directory: Path
    steps: int
    rng: random.Random
    python: str
    faults: list[str] = field(default_factory=list)

    def start(self, run: Path, *, resumes: bool = False) -> subprocess.Popen[bytes]:
        """Start or resume a run; its processes are marked in their environment."""
        new = [str(self.directory / "model"), str(self.directory / "chats.jsonl")]
        new += ["--gpus", "virtual:2x64MiB", "--replicas", "1", "--steps", str(self.steps)]
        new += ["--batch", "4", "--lr", "1e-2", "--save-every", "2", "--eval-every", "4"]
        new += ["--eval", str(self.directory / "chats.jsonl"), "--context", "48"]
        new += ["--eval-prompts", str(self.directory / "prompts.txt")]
        options = ["--resume"] if resumes else new
        return subprocess.Popen(
            [self.python, "-c", _MAIN, "tune", *options, "--save", str(run)],
            env={**os.environ, _MARK: str(run)},
            stdout=subprocess.DEVNULL,
            stderr=run.with_suffix(".stderr").open("wb"),
            start_new_session=True,
        )

    def processes(self, run: Path, argument: bytes = b"") -> Iterator[int]:
        """Yield the processes of a run whose command line has the argument."""
        mark = f"{_MARK}={run}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # ended, or another user's
                is_process = entry.name.isdigit()
                is_meant = is_process and argument in (entry / "cmdline").read_bytes()
                if is_meant and mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)

    def refuse_processes(self, run: Path) -> None:
        """Note and end processes that are left after some seconds."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (left := [*self.processes(run)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            self.faults.append(f"{run.name}: process {pid} is left")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def write(directory: Path) -> None:
    """Write the model, its data, and prompts."""
    tuning.write_model("llama", directory / "model")
    tuning.write_chats(directory / "chats.jsonl", 8)
    (directory / "prompts.txt").write_text("1+1?\n")


def results(run: Path) -> dict[str, Any]:
    """Return all that a run has come to: losses by step, answers, and the adapter."""
    metrics = [*RunDirectory(run).read_metrics()]
    return {
        "losses": {it["step"]: it["loss"] for it in metrics if "loss" in it},
        "evaluations": {it["step"]: it["eval_loss"] for it in metrics if "eval_loss" in it},
        "answers": [*map(json.loads, (run / "samples.jsonl").read_text().splitlines())],
        "adapter": load_file(run / "adapter" / "adapter_model.safetensors"),
        "entries": len(metrics),
    }


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> Iterator[str]:
    """Yield the names of results that differ by more than rounding."""
    for name in ("losses", "evaluations"):
        one, other = expected[name], actual[name]
        if one.keys() != other.keys() or any(abs(one[k] - other[k]) > _TOLERANCE for k in one):
            yield name
    yield from (name for name in ("answers", "entries") if expected[name] != actual[name])
    adapter = actual["adapter"]
    if adapter.keys() != expected["adapter"].keys() or any(
        not torch.allclose(value, adapter[key], rtol=0, atol=_TOLERANCE)
        for key, value in expected["adapter"].items()
    ):
        yield "adapter"


def kill(rig: Rig, run: Path, signum: int, whole_seconds: float) -> tuple[str, int]:
    """Start a run and send a signal at a random moment; return a description and the exit code."""
    rng = rig.rng
    process = rig.start(run)
    if rng.random() < 0.4:
        moment = f"after {(seconds := rng.uniform(0, whole_seconds)):.2f} s"
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    else:
        step, delay = rng.randrange(rig.steps), rng.uniform(0, 0.3)
        moment = f"{1000 * delay:.0f} ms after step {step}"
        metrics = RunDirectory(run).metrics
        while process.poll() is None and not (
            metrics.exists() and metrics.read_bytes().count(b'"loss"') >= step
        ):
            time.sleep(_POLL_SECONDS)
        time.sleep(delay)
    workers = [*rig.processes(run, b"duoka.tuner")]
    target, name = process.pid, "the parent"
    if workers and rng.random() < 0.4:
        target, name = rng.choice(workers), "a stage"
    with suppress(ProcessLookupError):
        os.kill(target, signum)
    code = process.wait(_RUN_SECONDS)
    return f"{signal.Signals(signum).name} to {name} {moment}: exit code {code}", code


def inspect(rig: Rig, run: Path) -> str:
    """Check what a killed run has left; return it in words."""
    directory = RunDirectory(run)
    steps = checkpoint_steps(directory.checkpoints)
    adapter = "an adapter, " if (run / "adapter").exists() else ""
    try:
        for step in steps:
            assert len(SavedParameters(checkpoint_path(directory.checkpoints, step)))
        if adapter:
            assert load_file(run / "adapter" / "adapter_model.safetensors")
            assert json.loads((run / "adapter" / "adapter_config.json").read_text())["r"] == 8
        if steps:
            assert load_file(export_result(run) / "adapter_model.safetensors")
    except (DuokaError, AssertionError, OSError, ValueError) as error:
        rig.faults.append(f"{run.name}: {type(error).__name__}: {error}")
    if not directory.is_written:
        return "no run"
    return f"{adapter}{len(steps)} checkpoints, the newest of step {max(steps, default=0)}"


def go_on(rig: Rig, run: Path, expected: dict[str, Any]) -> None:
    """Resume a killed run to its end, and compare its results."""
    process = rig.start(run, resumes=RunDirectory(run).is_written)
    if code := process.wait(_RUN_SECONDS):
        told = run.with_suffix(".stderr").read_text(errors="replace")[-600:]
        rig.faults.append(f"{run.name}: going on ended with {code}: {told}")
        return
    rig.refuse_processes(run)
    for name in differences(expected, results(run)):
        rig.faults.append(f"{run.name}: other {name} than without a kill")
    leftovers = [*run.rglob("*.partial"), *run.rglob(".new-*"), *run.rglob(".old-*")]
    rig.faults += [f"{run.name}: {path} is left" for path in leftovers]


def main() -> int:
    """Kill, inspect, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=36)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forks", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        python = sys.executable
        if options.forks:
            python = str(forking_python(Path(directory) / "forks", os.getpid()))
        rig = Rig(Path(directory), options.steps, random.Random(options.seed), python)
        write(rig.directory)
        begin = time.monotonic()
        code = rig.start(rig.directory / "whole").wait(_RUN_SECONDS)
        seconds = time.monotonic() - begin
        print(f"{options.steps} steps in {seconds:.1f} s, exit code {code}", flush=True)
        expected = results(rig.directory / "whole")
        for number in range(options.kills):
            run = rig.directory / f"run-{number}"
            moment, code = kill(rig, run, _SIGNALS[number % len(_SIGNALS)], seconds)
            rig.refuse_processes(run)
            left = inspect(rig, run)
            if code == 0 and not left.endswith(f"step {options.steps}"):
                rig.faults.append(f"{run.name}: exit code 0, and not all steps were made")
            if code not in _CODES:
                rig.faults.append(f"{run.name}: exit code {code}")
            counts[left.split(",")[0] if "run" in left or "adapter" in left else "checkpoints"] += 1
            go_on(rig, run, expected)
            print(f"{number + 1:3} {moment}; {left}; {len(rig.faults)} faults so far", flush=True)
    print(", ".join(f"{number} × {name}" for name, number in counts.most_common()))
    print("\n".join(rig.faults) or "nothing went wrong")
    return bool(rig.faults)


if __name__ == "__main__":
    sys.exit(main())
