"""What several processes do with training checkpoints, for the tests of those."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from duoka.errors import CheckpointError, MachineError
from duoka.tuner.checkpoints import TrainingCheckpoints

IDENTITY = {"model": "3f2a", "data": "91c0", "method": "lora of rank 2"}
NUM_LAYERS = 6
QUARTERS = (range(2), range(2, 4), range(4, 5), range(5, 6))


class Part:
    """Those layers of a model that a process has, after steps with gradients that layers fix."""

    def __init__(self, layers: range, steps: int = 0) -> None:
        self.parameters = {
            f"layers.{layer}.weight": nn.Parameter(torch.full((4, 4), float(layer)))
            for layer in layers
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for name, parameter in self.parameters.items():
                parameter.grad = torch.full((4, 4), 1.0 + int(name.split(".")[1]))
            self.optimizer.step()

    def values(self) -> dict[str, list[float]]:
        """A number of each tensor that is saved."""
        return {
            name: [
                parameter[0, 0].item(),
                *(
                    value.reshape(-1)[0].item()
                    for value in self.optimizer.state[parameter].values()
                ),
            ]
            for name, parameter in self.parameters.items()
        }


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A limit on the length of files: a disk that is full, to a program."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_resume(directory: Path) -> dict[str, Any]:
    """Two stages with two replicas save, one fails to, four stages resume; what came of it."""
    rank = dist.get_rank()
    stage = Part(range(3) if rank % 2 == 0 else range(3, NUM_LAYERS), steps=1)
    checkpoints = TrainingCheckpoints(directory, IDENTITY)
    checkpoints.save(1, stage.parameters, stage.optimizer, {"rank": rank})
    stage.train(1)
    checkpoints.save(2, stage.parameters, stage.optimizer, {"rank": rank})
    results: dict[str, Any] = {"values": stage.values()}
    quarter = Part(QUARTERS[rank])
    resumed = TrainingCheckpoints(directory, IDENTITY).resume(quarter.parameters, quarter.optimizer)
    results["quarter"] = (resumed, quarter.values())
    results["failure"] = _fail_in_one(checkpoints, stage, rank)
    if rank == 0:
        file = next((directory / "step-000002").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    anew = Part(range(3) if rank < 2 else range(3, NUM_LAYERS))
    results["before"] = TrainingCheckpoints(directory, IDENTITY).resume(
        anew.parameters, anew.optimizer
    )
    results["other"] = _resume_other(directory, rank)
    return results


def _fail_in_one(checkpoints: TrainingCheckpoints, stage: Part, rank: int) -> str:
    with files_of_at_most(100 if rank == 1 else 2**40):
        try:
            checkpoints.save(3, stage.parameters, stage.optimizer, {})
        except MachineError as error:
            return str(error)
    return "nothing failed"


def _resume_other(directory: Path, rank: int) -> str:
    """Resume with one process that has a parameter too many."""
    part = Part(range(NUM_LAYERS + (rank == 3)))
    try:
        TrainingCheckpoints(directory, IDENTITY).resume(part.parameters, part.optimizer)
    except CheckpointError as error:
        return str(error)
    return "nothing failed"


def die_at_every_moment(directory: Path) -> int:
    """Save step 2 in processes, each of which is killed at a later moment; how many were."""
    part = Part(range(2), steps=2)
    for moment in itertools.count():
        child = os.fork()
        if child == 0:
            _kill_at(directory, moment)
            TrainingCheckpoints(directory, IDENTITY, keep=1).save(
                2, part.parameters, part.optimizer, {}
            )
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return moment
        before = Part(range(2))
        resumed = TrainingCheckpoints(directory, IDENTITY).resume(
            before.parameters, before.optimizer
        )
        assert resumed is not None, moment
        assert not resumed.refused, moment
        assert before.values() == Part(range(2), steps=resumed.step).values(), moment
        if resumed.step == 2:  # killed after that: as it was for the next one
            shutil.rmtree(directory / "step-000002")
            TrainingCheckpoints(directory, IDENTITY).save(
                1, *vars(Part(range(2), steps=1)).values(), {}
            )
    raise AssertionError


def _kill_at(directory: Path, moment: int) -> None:
    """Kill this process when it changes something in a directory for the nth time."""
    count = itertools.count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        # A directory's entries are removed by names that are relative to it.
        changes = event in ("os.remove", "os.rmdir") or (
            event in ("os.mkdir", "os.rename", "open") and str(directory) in str(arguments[0])
        )
        if changes and next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
