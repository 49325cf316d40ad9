"""Models that see, fine-tuned on text: their towers stay as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from image_checkpoints import write_family, write_glm4v
from safetensors.torch import load_file

import duoka
from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.tuner.tune import TuneResult

SETTINGS: dict[str, Any] = {"seq_length": 48, "batch": 4, "lr": 1e-2, "epochs": 2}
WRITE: dict[str, Callable[[Path], Path]] = {
    "glm-4v": write_glm4v,
    "llava": lambda path: write_family("llava", path),
}
TOWERS = ("vision", "multi_modal_projector")
Run = Callable[..., TuneResult]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITE.items()}


@pytest.fixture
def run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_start: None
) -> Run:
    def tune(family: str, gpus: str = "virtual:256MiB", **more: Any) -> TuneResult:
        data = tmp_path / "text.jsonl"
        data.write_text(f"{json.dumps({'text': 'duoka sees '})}\n" * 8)
        settings = TuneSettings(**{**SETTINGS, **more})
        with tuning.one_process(monkeypatch) if "x" not in gpus else monkeypatch.context():
            return duoka.tune(
                models[family], str(data), gpus, save=tmp_path / "run", settings=settings
            )

    return tune


def is_in_tower(name: str) -> bool:
    return any(part.startswith(TOWERS) for part in name.split("."))


@pytest.mark.parametrize(
    ("family", "targets", "gpus"),
    [
        ("glm-4v", (), "virtual:256MiB"),
        ("glm-4v", ("query_key_value",), "virtual:2x64MiB"),
        ("llava", (), "virtual:2x64MiB"),
        ("llava", ("q_proj",), "virtual:256MiB"),
    ],
)
def test_adapters_are_on_what_text_reaches(
    family: str, targets: tuple[str, ...], gpus: str, run: Run
) -> None:
    result = run(family, gpus, lora_target=targets)
    losses = tuning.losses(result.directory)
    assert losses[-1] < losses[0]
    assert result.result is not None
    names = load_file(result.result / "adapter_model.safetensors").keys()
    assert names
    assert not any(map(is_in_tower, names))


@pytest.mark.parametrize(
    ("family", "gpus"), [("glm-4v", "virtual:2x64MiB"), ("llava", "virtual:256MiB")]
)
def test_a_tower_is_left_as_it_was(
    family: str, gpus: str, run: Run, models: dict[str, Path]
) -> None:
    result = run(family, gpus, method="full", dtype="bfloat16")
    assert result.result is not None
    before = load_file(models[family] / "model.safetensors")
    after = load_file(result.result / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(map(is_in_tower, before))
    for name, value in before.items():
        assert torch.equal(value, after[name]) == is_in_tower(name), name
    assert result.report is not None
    for device in result.report.devices:
        assert device.allocated_bytes <= device.forecast_allocated_bytes * 1.001


def test_what_text_does_not_reach_is_no_target(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"text input reaches no module called fc1: .*vision"
    ) as refused:
        run("llava", lora_target=("fc1",))
    assert "q_proj" in (refused.value.hint or "")
    assert "fc1" not in (refused.value.hint or "")
    assert not (tmp_path / "run").exists()
