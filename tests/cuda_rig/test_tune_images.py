"""Fine-tuning with images over CUDA GPUs: PyTorch's allocator takes what was forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_checkpoints import write_family, write_glm4v
from PIL import Image

import duoka
from duoka import TuneSettings

pytestmark = [
    pytest.mark.cuda_rig(gpus="1GiB,1GiB,1GiB"),
    pytest.mark.usefixtures("processes_have_values"),
]
_PIXELS = 56


@pytest.mark.parametrize(
    ("family", "gpus", "trains_vision"),
    [
        ("glm-4v", "0", False),
        # Not GLM-4V's tower, which has a convolution behind trained layers: see README.md.
        ("llava", "0,1", True),
        pytest.param("glm-4v", "0,1", False, marks=pytest.mark.slow),
        pytest.param("glm-4v", "0,1,2", False, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", "0,1", False, marks=pytest.mark.slow),
    ],
)
def test_memory(family: str, gpus: str, trains_vision: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model = write_glm4v(model) if family == "glm-4v" else write_family(family, model)
    Image.new("RGB", (_PIXELS, _PIXELS), "red").save(tmp_path / "red.png")
    messages = [
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "red"},
    ]
    row = json.dumps({"messages": messages, "images": ["red.png"]})
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{row}\n" * 4)
    result = duoka.tune(
        model,
        str(data),
        gpus,
        save=tmp_path / "run",
        replicas=1,
        settings=TuneSettings(steps=3, batch=4, train_vision=trains_vision),
    )
    assert result.report is not None
    devices = {device.device: device for device in result.report.devices}
    assert devices.keys() == {f"cuda:{number}" for number in gpus.split(",")}
    for device in devices.values():
        # An image's pixels are on the GPU for a moment longer than in the forecast.
        assert device.allocated_bytes <= device.forecast_allocated_bytes * 1.005 + 2**14
        assert device.allocated_bytes >= device.forecast_allocated_bytes * 0.9
        assert device.reserved_bytes == pytest.approx(device.forecast_reserved_bytes, rel=0.05)
