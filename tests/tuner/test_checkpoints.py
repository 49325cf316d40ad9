"""Training checkpoints: saved whole or not at all, found, believed, read into other processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_together
from safetensors.torch import load_file
from saving import (
    IDENTITY,
    NUM_LAYERS,
    QUARTERS,
    Part,
    die_at_every_moment,
    files_of_at_most,
    save_and_resume,
)
from torch import nn

from duoka.errors import CheckpointError, MachineError
from duoka.forecast.workload import OPTIMIZERS, Optimizer
from duoka.runtime.optimizers import make_optimizer
from duoka.tuner.checkpoints import Resumed, TrainingCheckpoints, checkpoint_steps


class Run:
    """Four layers that are trained, or some of them; random data that depends on the step alone."""

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        keep: int = 2,
        width: int = 8,
        optimizer: Optimizer = "adamw",
    ) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.model, optimizer, lr=0.01)
        self.checkpoints = TrainingCheckpoints(directory, IDENTITY, keep=keep)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.step += 1
            inputs = torch.randn(4, self.width, generator=torch.Generator().manual_seed(self.step))
            loss = self.model(inputs).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self) -> Path:
        state = {"step": self.step, "order": [3, 1, 2], "rate": 0.1}
        return self.checkpoints.save(self.step, self.parameters, self.optimizer, state)

    def resume(self) -> Resumed | None:
        resumed = self.checkpoints.resume(self.parameters, self.optimizer)
        self.step = 0 if resumed is None else resumed.step
        return resumed


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_has_the_losses_of_one_without_a_stop(
    tmp_path: Path, optimizer: Optimizer
) -> None:
    whole = Run(tmp_path / "whole", width=64, optimizer=optimizer).train(6)
    first = Run(tmp_path / "run", width=64, optimizer=optimizer)
    assert first.train(3) == whole[:3]
    first.save()
    second = Run(tmp_path / "run", seed=7, width=64, optimizer=optimizer)
    second.model[0].weight.data.fill_(3)
    resumed = second.resume()
    assert resumed is not None
    assert (resumed.step, resumed.refused) == (3, ())
    assert resumed.state == {"step": 3, "order": [3, 1, 2], "rate": 0.1}
    assert second.optimizer.param_groups[0]["lr"] == 0.01
    assert second.train(3) == whole[3:]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [(), ("3.weight",)])
def test_a_parameter_may_have_made_no_step(
    tmp_path: Path, optimizer: Optimizer, stepped: tuple[str, ...]
) -> None:
    """In float16 the first steps may all be skipped, and an expert may not have been chosen."""
    first = Run(tmp_path / "run", width=64, optimizer=optimizer)
    for name in stepped:
        first.parameters[name].grad = torch.ones(64, 64)
    first.optimizer.step()
    first.optimizer.zero_grad()
    first.save()
    second = Run(tmp_path / "run", seed=7, width=64, optimizer=optimizer)
    assert second.resume() is not None
    assert second.train(3) == first.train(3)


def test_there_may_be_none_to_resume_from(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.resume() is None
    assert not run.optimizer.state
    assert not (tmp_path / "run").exists()


def test_what_lies_there_is_safetensors_and_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    path = run.save()
    assert path == tmp_path / "step-000002"
    assert names(path) == ["checkpoint.json", "shard-00001-model-00001-of-00001.safetensors"]
    stored = load_file(path / names(path)[1])
    assert set(run.parameters) < set(stored)
    assert torch.equal(stored["2.weight"], run.parameters["2.weight"])
    assert stored["2.weight/step"].item() == 2
    assert json.loads((path / "checkpoint.json").read_text())["identity"] == IDENTITY


def test_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    leftover = tmp_path / ".step-000001.0123abcd.partial"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    (tmp_path / "metrics.jsonl").write_text("")
    for _ in range(4):
        run.train(1)
        run.save()
    assert names(tmp_path) == ["metrics.jsonl", "step-000003", "step-000004"]


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    before = (run.save() / "checkpoint.json").stat()
    assert (run.save() / "checkpoint.json").stat() == before


def cut_off(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def half_the_manifest(path: Path) -> None:
    file = path / "checkpoint.json"
    file.write_text(file.read_text()[:60])


def changing(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "checkpoint.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def be_another_step(path: Path) -> None:
    shutil.copytree(path.with_name("step-000001"), path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_off, "has changed since"),
        (flip_a_bit, "has changed since"),
        (lambda path: next(path.glob("*.safetensors")).unlink(), "can't be read: No such file"),
        (lambda path: (path / "checkpoint.json").unlink(), "can't be read: No such file"),
        (half_the_manifest, "not valid JSON"),
        (
            changing(files={"../step-000001/a.safetensors": ""}),
            "damaged, or was written by another version",
        ),
        (be_another_step, "declares step 1"),
        (changing(identity={**IDENTITY, "data": "77aa"}), "its data is 77aa, not 91c0"),
        (changing(version=9), "damaged, or was written by another version"),
        (changing(state=None), "damaged, or was written by another version"),
    ],
)
def test_a_damaged_one_is_told_of_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save()
    expected = {name: value.detach().clone() for name, value in run.parameters.items()}
    run.train(1)
    damage(run.save())
    again = Run(tmp_path, seed=5)
    resumed = again.resume()
    assert resumed is not None
    assert resumed.step == 1
    (refused,) = resumed.refused
    assert "step-000002" in refused
    assert reason in refused
    assert all(torch.equal(value, expected[name]) for name, value in again.parameters.items())
    again.train(1)
    again.save()  # in the place of the damaged one
    assert checkpoint_steps(tmp_path) == [1, 2]
    last = Run(tmp_path, seed=6).resume()
    assert last is not None
    assert (last.step, last.refused) == (2, ())


def test_one_that_was_refused_is_never_kept_instead_of_a_newer(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    for _ in range(3):
        run.train(1)
        run.save()
    run.train(2)
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000005")
    again = Run(tmp_path, keep=1)
    assert again.resume() is not None
    again.train(1)
    again.save()
    assert names(tmp_path) == ["step-000004"]


def test_with_nothing_to_resume_from_every_reason_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for damage in (cut_off, flip_a_bit):
        run.train(1)
        damage(run.save())
    again = Run(tmp_path, seed=5)
    before = {name: value.clone() for name, value in again.parameters.items()}
    with pytest.raises(
        CheckpointError, match=r"no training checkpoint .*has changed.*has changed"
    ) as raised:
        again.resume()
    assert "another directory" in str(raised.value.hint)
    assert all(torch.equal(value, before[name]) for name, value in again.parameters.items())


def test_a_run_with_other_parameters_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save()
    other = Run(tmp_path)
    other.parameters = {"9.weight": nn.Parameter(torch.zeros(8)), **other.parameters}
    other.parameters["0.weight"] = nn.Parameter(torch.zeros(8, 2))
    other.parameters["1.weight"] = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    del other.parameters["3.bias"]
    with pytest.raises(CheckpointError) as raised:
        other.resume()
    for told in (
        "0.weight is float32 [8, 8], not float32 [8, 2]",
        "1.weight is float32 [8, 8], not bfloat16 [8, 8]",
        "9.weight is missing, not float32 [8]",
        "3.bias is float32 [8], not in the run",
    ):
        assert told in str(raised.value)


@pytest.mark.parametrize("num_bytes", [100, 4000])
def test_a_full_disk_is_told_of_and_the_one_before_stays(tmp_path: Path, num_bytes: int) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save()
    run.train(1)
    with (
        files_of_at_most(num_bytes),
        pytest.raises(MachineError, match="step-000002 can't be written: File too large") as raised,
    ):
        run.save()
    assert "free disk space" in str(raised.value.hint)
    assert names(tmp_path) == ["step-000001"]
    run.save()
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_a_place_that_is_no_directory_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file")
    assert run.resume() is None
    with pytest.raises(MachineError, match=r"can't be written: (Not a directory|File exists)"):
        run.save()


def test_files_stay_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.tuner.checkpoints._FILE_BYTES", 1000)
    whole = Run(tmp_path / "whole").train(3)
    run = Run(tmp_path / "run")
    run.train(2)
    sizes = [file.stat().st_size for file in run.save().glob("*.safetensors")]
    assert len(sizes) == 4
    again = Run(tmp_path / "run", seed=2)
    again.resume()
    assert again.train(1) == whole[2:]


def test_a_process_may_have_nothing_that_learns(tmp_path: Path) -> None:
    TrainingCheckpoints(tmp_path, IDENTITY).save(1, {}, None, {})


@pytest.mark.slow
@pytest.mark.dist
def test_several_processes_save_and_others_resume(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    results = run_together(4, save_and_resume, tmp_path / "store", directory)
    expected = Part(range(NUM_LAYERS), steps=2).values()
    assert results[0]["values"] | results[1]["values"] == expected
    # Replicas share the writing, and nothing is written twice.
    stored = [
        load_file(file).keys() for file in sorted((directory / "step-000001").glob("*.safetensors"))
    ]
    assert len(stored) == 4
    assert sum(map(len, stored)) == len(set().union(*stored)) == 4 * NUM_LAYERS

    for layers, result in zip(QUARTERS, results, strict=True):
        resumed, values = result["quarter"]
        assert (resumed.step, resumed.state, resumed.refused) == (2, {"rank": 0}, ())
        assert values == {f"layers.{n}.weight": expected[f"layers.{n}.weight"] for n in layers}

    # The disk was full for one process, and all of them know it.
    failures = {result["failure"] for result in results}
    assert len(failures) == 1
    assert "step-000003 can't be written: File too large" in failures.pop()

    # One file was damaged, and all take the checkpoint before.
    assert [result["before"].step for result in results] == [1] * 4
    assert len({result["before"].refused for result in results}) == 1
    assert "has changed since" in results[0]["before"].refused[0]
    assert {result["other"] for result in results} == {results[0]["other"]}
    assert "layers.6.weight is missing" in results[0]["other"]

    assert names(directory) == ["step-000001", "step-000002"]
    alone = Part(range(NUM_LAYERS))
    resumed = TrainingCheckpoints(directory, IDENTITY).resume(alone.parameters, alone.optimizer)
    assert resumed is not None
    assert alone.values() == Part(range(NUM_LAYERS), steps=1).values()


@pytest.mark.slow
@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    part = Part(range(2), steps=1)
    TrainingCheckpoints(directory, IDENTITY).save(1, part.parameters, part.optimizer, {})
    (moments,) = run_together(1, die_at_every_moment, tmp_path / "store", directory)
    assert moments > 10
    assert names(directory) == ["step-000002"]
