"""Fine-tuning over CUDA GPUs, a process for each: PyTorch's allocator takes what was forecast."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tuning

import duoka
from duoka import TuneSettings

pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB")


@pytest.mark.parametrize(
    ("options", "replicas"),
    [({}, 1), ({"method": "full", "checkpointing": True}, 1), ({"micro_batch": 2}, 2)],
    ids=["lora", "full", "replicas"],
)
def test_memory(
    options: Any, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the processes too, code that looks at masks and positions sees them.
    (tmp_path / "sitecustomize.py").write_text("import values; values.values().__enter__()")
    paths = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    model = tuning.write_model("large", tmp_path / "model")
    data = tmp_path / "text.jsonl"
    data.write_text(f"{json.dumps({'text': 'duoka ' * 1500})}\n")
    result = duoka.tune(
        model,
        str(data),
        "0,1",
        save=tmp_path / "run",
        replicas=replicas,
        settings=TuneSettings(seq_length=256, steps=3, **options),
    )
    assert result.report is not None
    assert {device.device for device in result.report.devices} == {"cuda:0", "cuda:1"}
    for device in result.report.devices:
        assert device.allocated_bytes == pytest.approx(device.forecast_allocated_bytes, rel=0.005)
        assert device.reserved_bytes == pytest.approx(device.forecast_reserved_bytes, rel=0.05)
