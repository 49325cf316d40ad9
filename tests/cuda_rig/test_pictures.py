"""Questions about pictures on CUDA: answers are those of virtual GPUs, in the forecast memory."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from cuda_rig.values import values
from image_checkpoints import write_family, write_glm4v
from PIL import Image

from duoka.cli.main import run
from duoka.errors import GpuLostError, UsageError

pytestmark = [
    pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB"),
    pytest.mark.usefixtures("engine_computes"),
]
SIZES = ("--context", "128", "--new-tokens", "8", "--use-all")
QUESTION = "What is this?"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "noise.png"
    Image.effect_noise((60, 56), 99).save(path)
    return path


@pytest.mark.parametrize(("family", "gpus"), [("glm4v-9b", "0,1"), ("qwen2_vl", "0")])
def test_generate_and_chat(
    family: str,
    gpus: str,
    tmp_path: Path,
    picture: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model"
    write_glm4v(model) if family == "glm4v-9b" else write_family(family, model)

    def told(command: str, *options: str, said: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        assert run([command, str(model), *SIZES, *options]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    asked = ("--image", str(picture), "-p", QUESTION)
    count = len(gpus.split(","))
    expected = told("generate", *asked, "--gpus", f"virtual:{count}x64MiB")
    assert expected.strip()
    with values(most=None):
        generated = json.loads(told("generate", *asked, "--gpus", gpus, "--json"))
        chatted = told("chat", *asked[:2], "--gpus", gpus, said=QUESTION)
    (answer,) = generated["answers"]
    assert (answer["text"], answer["new_tokens"]) == (expected.strip(), 8)
    assert chatted == expected
    measured = generated["measured"]
    assert len(measured["devices"]) == count
    for peak, stage in zip(measured["devices"], measured["forecast"], strict=True):
        assert peak["reserved_bytes"] == stage["reserved_bytes"]


def test_a_question_that_is_too_long(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--image", str(picture), "-p", QUESTION * 20, "--gpus", "0")
    code = run(["generate", str(write_glm4v(tmp_path / "model")), *SIZES, *asked])
    said = capsys.readouterr()
    assert (code, said.out) == (UsageError.exit_code, "")
    assert "error: the prompt has 271 tokens; the plan has memory for 120\nhint: " in said.err


@pytest.mark.cuda_rig(lost="0@600")
def test_a_lost_gpu(tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--image", str(picture), "-p", QUESTION, "--gpus", "0")
    with values(most=None):
        code = run(["generate", str(write_glm4v(tmp_path / "model")), *SIZES, *asked])
    assert code == GpuLostError.exit_code
    said = capsys.readouterr().err
    assert "error: a GPU has failed: CUDA error: " in said
    assert "Traceback" not in said
