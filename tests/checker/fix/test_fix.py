"""Whole repairs: several files, several rounds, training, and what can't be cured or proved."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from repairing import build, check, load, repaired, write
from torch import nn

import duoka
from duoka.checker.fix import Repairs, apply, repair
from duoka.errors import UsageError
from duoka.report.check_report import CheckReport

X = {"x": torch.linspace(-1, 1, 12).view(3, 4)}
HELPERS = """
def add_residual(h, residual, scale=1.0):
    # both modelling files use this
    return h * scale + residual


def gather_states(states):
    return torch.stack(list(states)).sum(0)


def positions(length):
    return torch.arange(length, dtype=torch.float32)
"""
TEXT_MODEL = """
from {package}.helpers import add_residual, gather_states, positions


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        states = [self.a(x)]
        h = self.b(states[0])
        h = add_residual(h, states[0])
        states.append(h)
        return gather_states(states) + positions(4)
"""
VISION_MODEL = """
from {package}.helpers import add_residual


class VisionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 2, 3, padding=1)
        self.b = nn.Conv2d(2, 2, 3, padding=1)
        self.mean = torch.tensor([0.5])

    def forward(self, x):
        x = x - self.mean
        h = self.a(x)
        return add_residual(self.b(h), h, scale=0.5)


class Both(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.text = text
        self.vision = VisionModel()

    def forward(self, x):
        seen = self.vision(x[None, None])
        return self.text(x) * seen.mean()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """A package with two modelling files and the helpers of both."""
    folder = tmp_path / "models_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    write(folder, HELPERS, "helpers.py")
    write(folder, TEXT_MODEL.format(package=folder.name), "modeling_text.py")
    write(folder, VISION_MODEL.format(package=folder.name), "modeling_vision.py")
    sys.path.insert(0, str(tmp_path))
    yield folder
    sys.path.remove(str(tmp_path))
    for name in [each for each in sys.modules if each.startswith(folder.name)]:
        del sys.modules[name]


@pytest.mark.parametrize("train", [False, True])
def test_a_folder_with_two_models_and_helpers_of_both(
    repository: Path, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    text = load(repository / "modeling_text.py")
    vision = load(repository / "modeling_vision.py")
    model = build(lambda: vision.Both(text.TextModel()))
    device_map = {"vision": 1, "vision.a": 0, "vision.b": 1, "text.a": 1, "text.b": 0}
    report, repairs = repaired(model, device_map, X, train=train)
    assert len(report.faults) >= 4
    assert repairs.proved, [patch.reason for patch in repairs]
    names = {Path(patch.file).name for patch in repairs}
    assert {"helpers.py", "modeling_vision.py"} <= names
    assert all(patch.faults for patch in repairs)
    copies = apply(repairs, repository.parent / "fixed")
    assert {copy.parent for copy in copies} == {repository.parent / "fixed" / repository.name}
    for patch, copy in zip(repairs, copies, strict=True):
        assert copy.read_bytes() == patch.after.encode()


MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        h = self.b(self.a(x))
        return h + x
"""


def fault_report(path: Path) -> CheckReport:
    """The report of a model's file, which nobody has read since its import."""
    report = check(build(load(path).Model), {"a": 0, "b": 1}, X)
    linecache.clearcache()
    return report


def test_a_report_without_its_subject_is_refused(tmp_path: Path) -> None:
    report = replace(fault_report(write(tmp_path, MODEL)), subject=None)
    with pytest.raises(
        UsageError,
        match="the report has no reference to the checked model, so the check can't be repeated",
    ):
        duoka.repair(report)


def test_a_report_without_faults_needs_no_patches() -> None:
    repairs = repair(CheckReport(model="Model", devices=("cuda:0",)))
    assert list(repairs) == []
    assert repairs.proved
    assert repairs.diff == ""


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL)
    report = fault_report(path)
    path.unlink()
    repairs = repair(report)
    assert not repairs
    [(fault, reason)] = repairs.uncured
    assert fault == report.faults[0]
    assert "can't be read" in reason
    assert not repairs.proved


def test_a_place_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL)
    report = fault_report(path)
    path.write_text(path.read_text().replace("h + x", "h - y"))
    repairs = repair(report)
    assert not repairs
    assert "doesn't contain 'h + x'" in repairs.uncured[0][1]


def test_a_file_that_was_changed_after_its_import_is_not_proved(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL)
    model = build(load(path).Model)
    path.write_text(path.read_text().replace("h = self.b(self.a(x))", "h = self.b(self.a(x + 0))"))
    report = check(model, {"a": 0, "b": 1}, X)
    repairs = repair(report)
    assert not repairs
    [(fault, reason)] = repairs.uncured
    assert fault == report.faults[0]
    assert "has changed since it was imported" in reason


def test_a_repair_that_computes_something_else_is_not_proved(tmp_path: Path) -> None:
    # What is returned depends on where it is: no repair can keep that.
    text = MODEL.replace(
        "return h + x", "h = h + x\n        return h * (1 + (h.device.index or 0))"
    )
    report, repairs = repaired(build(load(write(tmp_path, text)).Model), {"a": 0, "b": 1}, X)
    assert len(report.faults) == 1
    [patch] = repairs
    assert not patch.proved
    assert "differs from the original" in patch.reason


def test_code_made_at_run_time_is_told() -> None:
    namespace: dict[str, type[nn.Module]] = {}
    exec("import torch\nfrom torch import nn\n" + MODEL, namespace)
    repairs: Repairs = repaired(build(namespace["Model"]), {"a": 0, "b": 1}, X)[1]
    assert not repairs
    assert "generated" in repairs.uncured[0][1]


def test_a_model_too_big_for_real_numbers_is_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.checker.fix.verify.REAL_BYTES", 100)
    repairs: Repairs = repaired(build(load(write(tmp_path, MODEL)).Model), {"a": 0, "b": 1}, X)[1]
    [patch] = repairs
    assert not patch.proved
    assert "160 B of weights are too large" in patch.reason


def test_what_comes_up_when_others_are_cured_is_cured_too(tmp_path: Path) -> None:
    text = MODEL.replace(
        "return h + x",
        "states = {'h': h, 'x': x}\n"
        "        both = torch.stack([states[key] for key in sorted(states)])\n"
        "        part = both.sum(0) + self.a(x)\n"
        "        return part @ x.T",
    )
    report, repairs = repaired(build(load(write(tmp_path, text)).Model), {"a": 0, "b": 1}, X)
    assert report.faults
    assert repairs.proved, [patch.reason for patch in repairs]
    again = repair(replace(report, faults=report.faults[:1]))
    assert again.proved


def test_when_nothing_more_may_be_tried_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first way isn't enough: made on one device, the table is read on both.
    text = MODEL.replace(
        "h = self.b(self.a(x))",
        "h = self.a(x)\n        t = torch.ones(4)\n        h = h + t\n        h = self.b(h)",
    ).replace("h + x", "h + t")
    model = build(load(write(tmp_path, text)).Model)
    assert repaired(model, {"a": 0, "b": 1}, X)[1].proved
    monkeypatch.setattr("duoka.checker.fix.search.MAX_CHECKS", 1)
    repairs: Repairs = repaired(model, {"a": 0, "b": 1}, X)[1]
    assert not repairs.proved
    assert all(not patch.proved and patch.reason for patch in repairs)


def test_a_models_random_numbers_are_the_same_before_and_after(tmp_path: Path) -> None:
    text = MODEL.replace("return h + x", "return F.dropout(h, 0.5, training=True) + x")
    state = torch.get_rng_state()
    repairs: Repairs = repaired(
        build(load(write(tmp_path, text)).Model), {"a": 0, "b": 1}, X, train=True
    )[1]
    assert repairs.proved, [patch.reason for patch in repairs]
    assert torch.equal(torch.get_rng_state(), state)


def test_pytorchs_own_code_is_nobodys_to_change() -> None:
    model = nn.MultiheadAttention(4, 1)
    device_map = {"in_proj_weight": 0, "in_proj_bias": 0, "out_proj": 1}
    report = duoka.check(model, device_map, inputs=(torch.ones(3, 1, 4),) * 3)
    repairs = duoka.repair(report)
    assert not repairs
    assert "code: keep that module on one device" in repairs.uncured[0][1]


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20_000, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return F.linear(self.norm(self.embed(x)), self.embed.weight)
"""


def test_a_large_weight_stays_and_what_it_meets_is_moved(tmp_path: Path) -> None:
    model = build(load(write(tmp_path, TIED)).Tied)
    _, repairs = repaired(model, {"embed": 0, "norm": 1}, {"x": torch.zeros(2, 3).long()})
    assert repairs.proved
    assert "self.norm(self.embed(x)).to(self.embed.weight.device)" in repairs.diff
    (cure,) = repairs[0].cures
    assert cure.step_bytes == 2 * 3 * 32 * 4
