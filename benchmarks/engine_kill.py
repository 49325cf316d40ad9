"""`duoka generate --file` killed at random moments, and gone on with: every answer once, the same.

    python benchmarks/engine_kill.py [--kills 10] [--prompts 150]

For one GPU and for two the program's process group gets SIGKILL, some of the times anywhere in its
run, and else once some more answers have come; the same command goes on. Then, for two GPUs,
processes of stages are killed beneath it. It ends with 1 where an answer is missing, is there
twice, or is another than without all that, where a line is torn, or a process or a file is left.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning

_MARK = "DUOKA_KILL_RUN"
_MAIN = "from duoka.cli import main; main()"
# So long processes may take to notice that the one that started them is gone.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.005


@dataclass
class Rig:
    """A file of prompts, the command that answers it, and what has gone wrong so far."""

    directory: Path
    num_gpus: int
    rng: random.Random
    faults: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        """Where the answers go."""
        return self.directory / "answers.jsonl"

    @property
    def mark(self) -> str:
        """What tells its processes from all others of the machine, in their environment."""
        return f"{_MARK}={self.directory}"

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Start the program, in a process group of its own."""
        sizes = ["--context", "128", "--new-tokens", "24", "--batch", "4"]
        command = [sys.executable, "-c", _MAIN, "generate", str(self.directory / "model"), *sizes]
        command += ["--gpus", f"virtual:{self.num_gpus}x64MiB"]
        command += ["--use-all"] if self.num_gpus > 1 else []
        command += ["--file", str(self.directory / "prompts.jsonl"), "--out", str(out)]
        name, _, value = self.mark.partition("=")
        return subprocess.Popen(
            command,
            env={**os.environ, name: value},
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "stderr").open("wb"),
            start_new_session=True,
        )

    def run(self, out: Path) -> int:
        """Run it to its end; its exit code."""
        code = self.start(out).wait()
        self.expect_nobody()
        return code

    def expect_nobody(self) -> None:
        """Note processes that are there after some seconds, and end them."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (left := list(self.processes())) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.faults += [f"process {pid} is left" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    def processes(self, argument: str = "") -> Iterator[int]:
        """Its processes, as far as they have an argument."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                mine = self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is another user's
                continue
            if mine and (not argument or argument.encode() in arguments):
                yield int(entry.name)

    def lines(self) -> int:
        """Whole lines of the answers."""
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def stderr(self) -> str:
        """What the last run told."""
        return (self.directory / "stderr").read_text(errors="replace")


def write(directory: Path, number: int) -> None:
    """A model, and prompts of which each second one is drawn, by a seed of its own."""
    tuning.write_model("llama", directory / "model")
    rows: list[dict[str, Any]] = []
    for at in range(number):
        rows.append({"prompt": f"{at} and {'+' * (at % 40)}?", "id": f"prompt {at}"})
        if at % 2:
            rows[-1] |= {"temperature": 1.0, "seed": at}
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (directory / "prompts.jsonl").write_text(text)


def read(path: Path) -> list[dict[str, Any]]:
    """Answers in the order of their prompts; ValueError where a line is torn."""
    content = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in content.splitlines()]
    if not content.endswith("\n"):
        raise ValueError("the last line is torn")
    return sorted(rows, key=lambda row: int(row["number"]))


def kill_anywhere(rig: Rig, whole_seconds: float) -> str:
    """Kill a run at any time that it may take; when that was, and nothing where it had ended."""
    seconds = rig.rng.uniform(0, whole_seconds)
    process = rig.start(rig.out)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return f"{seconds:.2f} s" if was_killed(process) else ""


def kill_after_answers(rig: Rig) -> str:
    """Kill a run shortly after some more answers have come; when that was, or nothing."""
    number, seconds = rig.rng.randint(1, 8), rig.rng.uniform(0, 0.03)
    process, before = rig.start(rig.out), rig.lines()
    while process.poll() is None and rig.lines() < before + number:
        time.sleep(_POLL_SECONDS)
    time.sleep(seconds)
    return f"{number} answers and {1000 * seconds:.0f} ms" if was_killed(process) else ""


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process with its group, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def kill_programs(rig: Rig, number: int, whole_seconds: float) -> None:
    """Kill runs, and look after each at what is left of it."""
    for at in range(number):
        moment = ""
        while not moment:
            before = rig.lines()
            moment = kill_anywhere(rig, whole_seconds) if at % 3 == 0 else kill_after_answers(rig)
            rig.expect_nobody()
            if not moment:  # all was answered before
                compare(rig, "the program killed")
        content = rig.out.read_bytes() if rig.out.exists() else b""
        is_torn = bool(content) and not content.endswith(b"\n")
        more = f"{rig.lines() - before} answers more{', and a torn line' * is_torn}"
        print(f"  killed after {moment}: {more}", flush=True)


def kill_workers(rig: Rig, number: int) -> None:
    """Kill processes of stages in one run; it goes on, and tells which prompts have no answer."""
    process, killed = rig.start(rig.out), 0
    while process.poll() is None and killed < number:
        before = rig.lines()
        while process.poll() is None and rig.lines() < before + rig.rng.randint(2, 6):
            time.sleep(_POLL_SECONDS)
        workers = list(rig.processes("duoka.engine"))
        if workers:
            os.kill(rig.rng.choice(workers), signal.SIGKILL)
            killed += 1
    code = process.wait()
    rig.expect_nobody()
    told = rig.stderr().count("has no answer:")
    print(f"  {killed} processes of stages killed: exit code {code}, {told} prompts unanswered")
    missing = len(read(rig.directory / "whole.jsonl")) - rig.lines()
    if (code, told) != (1, missing) or "Traceback" in rig.stderr():
        rig.faults.append(f"{missing} answers are missing; told was {rig.stderr()[-500:]}")


def compare(rig: Rig, what: str) -> None:
    """Go on to the end, and hold all answers against those of a run that nobody killed."""
    code = rig.run(rig.out)
    if code:
        rig.faults.append(f"{what}: the last run ended with {code}: {rig.stderr()[-500:]}")
        return
    expected, answers = read(rig.directory / "whole.jsonl"), read(rig.out)
    times = Counter(row["number"] for row in answers)
    rig.faults += [f"{what}: prompt {at} has {n} answers" for at, n in times.items() if n > 1]
    pairs = list(zip(expected, answers, strict=False))
    differing = [(one, other) for one, other in pairs if one != other]
    if len(answers) != len(expected) or differing:
        rig.faults.append(f"{what}: {len(answers)} answers of {len(expected)}")
        rig.faults += [f"{what}: {one}\n  is now {other}" for one, other in differing]
    names = {"model", "prompts.jsonl", "whole.jsonl", "answers.jsonl", "stderr"}
    left = {entry.name for entry in rig.directory.iterdir()} - names
    rig.faults += [f"{what}: {name} is left" for name in left]
    print(
        f"  gone on to the end: {len(answers)} answers, {len(differing)} of them others", flush=True
    )
    rig.out.unlink()


def main() -> int:
    """Kill, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faults = []
    for num_gpus in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            rig = Rig(Path(directory), num_gpus, random.Random(options.seed))
            write(rig.directory, options.prompts)
            begin = time.monotonic()
            code = rig.run(rig.directory / "whole.jsonl")
            seconds = time.monotonic() - begin
            print(f"{num_gpus} GPUs: {options.prompts} answers in {seconds:.1f} s, code {code}")
            kill_programs(rig, options.kills, seconds)
            compare(rig, "the program killed")
            if num_gpus > 1:
                kill_workers(rig, 2)
                compare(rig, "processes of stages killed")
            faults += rig.faults
    print("\n".join(faults) or "nothing went wrong")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
