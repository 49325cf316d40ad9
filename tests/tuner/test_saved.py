"""Results of a run at any time: checkpoints by default, the best one, and exports of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from peft import PeftModel
from safetensors.torch import load_file
from trainers import make_layout, write_run
from transformers import AutoModelForCausalLM

from duoka import TuneSettings
from duoka.cli.main import run
from duoka.errors import CheckpointError, UsageError
from duoka.runtime.load.adapter import read_adapter
from duoka.tuner import worker
from duoka.tuner.run import RunDirectory
from duoka.tuner.trainer import Trainer
from duoka.tuner.tune import TuneResult, export_result, resume

Train = Callable[..., TuneResult]


@pytest.fixture
def train(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train with settings, or go on; evaluations have the given losses."""

    def train(*losses: float, **more: Any) -> TuneResult:
        directory = RunDirectory(tmp_path / "run")
        settings = TuneSettings(**{"seq_length": 32, "batch": 1, "lr": 1e-2, **more})
        if not directory.is_written:
            write_run(directory, settings, make_layout(llama, settings))
            if losses:
                directory.eval_samples.write_bytes(directory.samples.read_bytes())
        measured = iter(losses)
        monkeypatch.setattr(Trainer, "evaluate", lambda self, steps: {"eval_loss": next(measured)})
        with tuning.one_process(monkeypatch):
            return resume(directory)

    return train


def saved(result: TuneResult) -> list[int]:
    steps = (result.directory / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in steps)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    (file,) = path.glob("*.safetensors")
    return load_file(file)


def are_equal(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


@pytest.mark.parametrize(
    ("num_steps", "steps"),
    [(25, [3, 6, 9, 12, 15, 18, 21, 24, 25]), (4, [1, 2, 3, 4]), (1, [1])],
)
def test_a_run_is_saved_every_tenth_of_it(num_steps: int, steps: list[int], train: Train) -> None:
    assert saved(train(steps=num_steps, keep=99)) == steps


def test_a_run_is_saved_after_some_time(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SAVE_SECONDS", -1)
    assert saved(train(steps=12, keep=99)) == [*range(1, 13)]


@pytest.mark.parametrize(("save_every", "steps"), [(7, [7, 14, 20]), (0, [20])])
def test_who_says_when_to_save_is_followed(
    save_every: int, steps: list[int], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SAVE_SECONDS", -1)
    assert saved(train(steps=20, save_every=save_every, keep=99)) == steps


def test_the_newest_and_the_best_are_kept(train: Train) -> None:
    losses = 3.0, 2.0, 1.0, 4.0, float("nan"), 2.0, 3.0, 3.0, 3.0, 3.0
    result = train(*losses, steps=20, eval_data=("e",), keep=2)
    assert saved(result) == [6, 18, 20]
    assert result.best == result.directory / "checkpoints" / "step-000006"
    assert (result.directory / "checkpoints" / "best").resolve() == result.best.resolve()
    assert result.result_step == 20
    best = export_result(result.directory / "checkpoints" / "best")
    assert best == result.directory / "adapter-step-000006"
    assert are_equal(best, export_result(result.best))
    assert not are_equal(best, result.directory / "adapter")


def test_a_run_without_progress_ends_early(train: Train) -> None:
    settings: dict[str, Any] = {"steps": 40, "eval_data": ("e",), "early_stopping": 2}
    result = train(3.0, 2.0, 2.5, 2.0, **settings)  # an equal loss is no progress
    assert (result.steps, result.result_step) == (16, 8)
    assert result.result is not None
    assert are_equal(result.result, export_result(result.directory / "checkpoints/step-000008"))
    again = train(**settings)  # evaluates nothing
    assert (again.steps, again.result_step) == (16, 8)


def test_progress_goes_on(train: Train) -> None:
    losses = 5.0, 6.0, 4.0, 5.0, 3.0, 4.0, 2.0, 3.0, 1.0, 1.5
    result = train(*losses, steps=20, eval_data=("e",), early_stopping=2)
    assert (result.steps, result.result_step) == (20, 18)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_any_checkpoint_is_exported(train: Train, llama: Path) -> None:
    result = train(steps=3, keep=9)
    assert result.result is not None
    assert are_equal(export_result(result.directory), result.result)
    first = export_result(result.directory / "checkpoints" / "step-000001")
    assert not are_equal(first, result.result)
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, first)(ids).logits
        merged = export_result(result.directory / "checkpoints" / "step-000001", merge=True)
        assert merged == result.directory / "model-step-000001"
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_commands_write_the_same_merged_model(
    train: Train, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(steps=2)
    exported = ["tune", "--export", str(result.directory), "--merge"]
    assert run(exported) == 0
    assert capfd.readouterr().out == f"the result is in {result.directory / 'model'}\n"
    out = tmp_path / "merged"
    assert run(["merge", str(llama), str(result.result), "--out", str(out)]) == 0
    assert capfd.readouterr().out == f"the merged model is in {out}\n"
    assert are_equal(out, result.directory / "model")
    assert not are_equal(out, llama)
    assert run(["merge", str(llama), str(result.result), "--out", str(out)]) == 2
    assert "already exists" in capfd.readouterr().err


def test_a_fully_trained_model_is_exported_whole(train: Train) -> None:
    result = train(steps=2, keep=9, method="full")
    first = export_result(result.directory / "checkpoints" / "step-000001")
    assert first == result.directory / "model-step-000001"
    assert result.result is not None
    assert not are_equal(first, result.result)


def test_a_result_of_nothing_is_refused(train: Train, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the directory of a run"):
        export_result(tmp_path)
    result = train(steps=2)
    checkpoints = result.directory / "checkpoints"
    with pytest.raises(UsageError, match="the checkpoint 'step-000009' is unknown") as raised:
        export_result(checkpoints / "step-000009")
    assert raised.value.hint == "supported: step-000001, step-000002"
    (file,) = (checkpoints / "step-000001").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        export_result(checkpoints / "step-000001")
    assert not (result.directory / "adapter-step-000001").exists()
    for path in checkpoints.glob("*"):
        path.rename(tmp_path / path.name)
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        export_result(result.directory)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
def test_adapters_have_the_scale_of_their_kind(rslora: bool, scale: float, train: Train) -> None:
    result = train(steps=1, lora_rank=4, lora_alpha=6, rslora=rslora)
    assert result.result is not None
    layers = read_adapter(result.result).layers.values()
    assert {(layer.rank, layer.scaling) for layer in layers} == {(4, scale)}
