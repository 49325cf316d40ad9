"""The assertion for tests of others, and the plugin that pytest loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from duoka import Placement
from duoka.checker.stage_splits import iter_splits
from duoka.errors import UsageError
from duoka.testing import assert_device_safe

ROOT = Path(__file__).resolve().parents[1]
X = torch.zeros(2, 8)

TEST_FILE = """
import torch
from torch import nn

class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        made = []
        for part in self.parts:
            x = part(x)
            made.append(x)
        return torch.stack(made)

def test_safe(assert_device_safe):
    layers = (nn.Linear(8, 8) for _ in range(4))
    assert_device_safe(nn.Sequential(*layers), inputs=(torch.zeros(2, 8),))

def test_faulty(assert_device_safe):
    assert_device_safe(Faulty(), inputs=(torch.zeros(2, 8),))
"""


class Residual(nn.Module):
    """Its parts can be split, and it adds what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return first + self.second(first)


class Careful(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second: torch.Tensor = self.second(first)
        return first.to(second.device) + second


def test_a_safe_model_passes() -> None:
    model = Careful()
    before = [each.clone() for each in model.parameters()]
    assert_device_safe(model, inputs=(X,))
    assert_device_safe(model, inputs=(X,), train=True)
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True))


def test_a_fault_is_told_with_the_report() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_device_safe(Residual(), inputs=(X,))
    text = str(caught.value)
    assert text.startswith(
        "the model fails on 2 devices, split as 'first' … on cuda:0, 'second' … on cuda:1\n"
    )
    assert "return first + self.second(first)" in text
    assert "test_testing.py:" in text
    assert "\x1b" not in text


def test_a_placement_is_taken_as_it_is() -> None:
    assert_device_safe(Residual(), {"": 0}, inputs=(X,))
    entries = (("first", "cuda:0"), ("second", "cuda:1"))
    for placement in (Placement(entries=entries), dict(entries), {"first": 0, "second": 1}):
        with pytest.raises(AssertionError, match="on this placement"):
            assert_device_safe(Residual(), placement, inputs=(X,))


def test_a_model_of_one_part_is_refused() -> None:
    with pytest.raises(UsageError, match="too few modules for 2 or 3 stages"):
        assert_device_safe(nn.Linear(8, 8), inputs=(X,))


# ── splits ──


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Module()
        self.body.embed = nn.Embedding(8, 8)
        self.body.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.body.embed.weight


def test_parts_are_elements_of_lists_and_ties_stay_together() -> None:
    [by_bytes, *_] = iter_splits(Tied(), 2)
    assert by_bytes["head"] == by_bytes["body.embed"] == 0
    assert by_bytes["scale"] == 0
    layers = [by_bytes[f"body.layers.{index}"] for index in range(4)]
    assert layers == sorted(layers)
    assert set(by_bytes.values()) == {0, 1}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_stage_has_a_part_and_every_tensor_a_stage(num_stages: int) -> None:
    model = Tied()
    for split in iter_splits(model, num_stages):
        assert set(split.values()) == set(range(num_stages))
        for name, _ in model.named_parameters():
            assert any(name == part or name.startswith(f"{part}.") for part in split)


def test_large_parts_are_opened() -> None:
    model = Careful()
    model.second = Residual()
    model.first = nn.Linear(2, 2)
    by_bytes, *_ = iter_splits(model, 2)
    assert by_bytes == {"first": 0, "second.first": 0, "second.second": 1}


def test_a_model_with_too_few_parts_has_no_split() -> None:
    assert iter_splits(nn.Linear(2, 2), 2) == []
    assert iter_splits(Careful(), 3) == []


# ── the plugin ──


def test_the_plugin_is_named_in_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["pytest11"]
    assert points == {"duoka": "duoka.pytest_plugin"}


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, duoka.pytest_plugin; "
        "print([name for name in ('torch', 'transformers', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_models.py").write_text(TEST_FILE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # whatever lies above
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "duoka.pytest_plugin", "-q", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "torch.stack of tensors on cuda:0 and cuda:1" in done.stdout
    # The test's own line, and no line of duoka.
    assert "assert_device_safe(Faulty()" in done.stdout
    assert "testing.py:" not in done.stdout.replace("test_models.py", "")
