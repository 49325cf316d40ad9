"""Fine-tuning over CUDA GPUs, a process for each: PyTorch's allocator takes what was forecast."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning

import duoka
from duoka import TuneSettings
from duoka.errors import DuokaError, TrainingError
from duoka.tuner import worker
from duoka.tuner.run import RunDirectory
from duoka.tuner.tune import TuneResult, resume

pytestmark = [
    pytest.mark.cuda_rig(gpus="1GiB,1GiB"),
    pytest.mark.usefixtures("processes_have_values"),
]


def run(path: Path, family: str, replicas: int = 1, **settings: Any) -> TuneResult:
    model = tuning.write_model(family, path / "model")
    data = path / "text.jsonl"
    data.write_text(f"{json.dumps({'text': 'duoka ' * 1500})}\n")
    return duoka.tune(
        model,
        str(data),
        "0,1",
        save=path / "run",
        replicas=replicas,
        settings=TuneSettings(**{"steps": 3, **settings}),
    )


FULL = {"method": "full", "checkpointing": True}


@pytest.mark.parametrize(
    ("family", "options", "replicas"),
    [
        ("large", {}, 1),
        ("large", FULL, 1),
        ("large in bfloat16", {**FULL, "optimizer": "sgd", "seq_length": 64}, 1),
        ("large", {"micro_batch": 2}, 2),
        ("biases", {"seq_length": 64}, 1),
    ],
    ids=["lora", "full", "autocast", "replicas", "biases"],
)
def test_memory(family: str, options: Any, replicas: int, tmp_path: Path) -> None:
    result = run(tmp_path, family, replicas, **{"seq_length": 256, **options})
    assert result.report is not None
    assert {device.device for device in result.report.devices} == {"cuda:0", "cuda:1"}
    for device in result.report.devices:
        assert device.allocated_bytes == pytest.approx(device.forecast_allocated_bytes, rel=0.005)
        assert device.reserved_bytes == pytest.approx(device.forecast_reserved_bytes, rel=0.05)


LOG = Path(tempfile.gettempdir()) / f"duoka-tune-{os.getpid()}"


@pytest.mark.cuda_rig(gpus="1GiB,1GiB", log=LOG)
@pytest.mark.parametrize(
    ("micro_batch", "replicas", "num_waits"),
    [
        # Of two replicas, with two micro-batches each: a mask in the model's code, and a loss, for
        # each micro-batch; all passes, the norm; a bucket's gradients, their copy, the copy back.
        (2, 2, 2 * (2 * 2 + 1 + 1 + 3)),
        # Of two stages with eight micro-batches: a mask in each; the losses in one of them; all
        # passes, the norm; copies of three tensors forward, and of the gradient of one back.
        (1, 1, 8 * (2 + 1) + 2 * (1 + 1) + 8 * (3 + 1)),
    ],
    ids=["replicas", "stages"],
)
def test_steps_copy_through_pinned_memory(
    micro_batch: int, replicas: int, num_waits: int, tmp_path: Path
) -> None:
    """What a run of three steps has more than one of two is a step."""
    pageable, waits = [], []
    for steps in (2, 3):
        path = tmp_path / str(steps)
        path.mkdir()
        LOG.write_text("")
        options = {"seq_length": 256, "batch": 8, "micro_batch": micro_batch, "steps": steps}
        options["save_every"] = 0  # checkpoints are copied as they are
        run(path, "large", replicas, **options)
        text = LOG.read_text()
        pageable.append(text.count(", pageable"))
        waits.append(text.count("wait for "))
    assert pageable[0] == pageable[1]
    assert waits[1] - waits[0] == num_waits
    LOG.unlink()


def test_memory_that_others_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, "large", seq_length=256, save_every=1)
    shutil.rmtree(result.directory / "checkpoints" / "step-000003")
    capfd.readouterr()
    monkeypatch.setenv("RIG_GPUS", "1GiB,40MiB")
    with pytest.raises(
        DuokaError, match=r"^cuda:1: CUDA out of memory\. .* is free\nrequested by "
    ) as refused:
        resume(RunDirectory(result.directory))
    assert refused.value.exit_code == TrainingError.exit_code
    assert "--resume" in str(refused.value.hint)
    assert "CUDACachingAllocator" not in capfd.readouterr().err


def test_an_error_of_the_driver_names_the_gpu() -> None:
    with pytest.raises(torch.AcceleratorError) as failed:
        torch.cuda.set_device(7)
    reason = worker._reason(failed.value, "cuda:1", "--resume")
    assert str(reason) == "cuda:1 failed: CUDA error: invalid device ordinal"
