"""Metrics of runs in TensorBoard, wandb and SwanLab; the latter two are stood in for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.tuner import trackers
from duoka.tuner.run import RunDirectory
from duoka.tuner.trackers import open_trackers, refuse_missing


class Service:
    """What a service gets."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.is_over = False

    def Table(self, columns: list[str], data: list[list[str]]) -> Any:  # noqa: N802
        assert columns == ["text"]
        return ("table", data)

    def init(self, **settings: Any) -> Service:
        self.settings = settings
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.is_over = True


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(trackers, "find_spec", lambda name: name in names or None)
    return names


@pytest.mark.parametrize(("name", "place"), [("wandb", "dir"), ("swanlab", "log_dir")])
def test_a_service_gets_the_settings_and_each_step(
    name: str, place: str, tmp_path: Path, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = Service()
    if name == "swanlab":
        service.Text = lambda text: ("text", text)
    monkeypatch.setitem(sys.modules, name, service)
    installed.update((name, "tensorboard"))
    settings = TuneSettings(report_to=(name,), lr=0.5)
    (tracker,) = open_trackers(RunDirectory(tmp_path / "mine"), settings, 0)
    assert (service.settings["project"], service.settings["name"]) == ("duoka", "mine")
    assert service.settings["config"]["lr"] == 0.5
    assert str(service.settings[place]).startswith(str(tmp_path / "mine"))
    tracker.log({"loss": 2.0}, 7)
    assert (service.logged, service.is_over) == ([({"loss": 2.0}, 7)], False)
    tracker.log({"eval_loss": 1.0, "samples": "> Hi\n\nHo"}, 8)
    text = ("table", [["> Hi\n\nHo"]]) if name == "wandb" else ("text", "> Hi\n\nHo")
    assert service.logged[1:] == [({"eval_loss": 1.0, "samples": text}, 8)]
    tracker.close()
    assert service.is_over


def test_a_service_that_refuses_is_told(
    tmp_path: Path, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: Any) -> None:
        raise RuntimeError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wandb can't start: no key") as raised:
        open_trackers(RunDirectory(tmp_path), TuneSettings(report_to=("wandb",)), 0)
    assert raised.value.hint == "log in with `wandb login`, or set WANDB_MODE=offline"


def test_what_is_not_installed_is_refused_before_a_run(installed: set[str]) -> None:
    refuse_missing(())
    with pytest.raises(UsageError, match="reporting to swanlab needs swanlab"):
        refuse_missing(("swanlab",))
    with pytest.raises(UsageError, match="report_to 'mlflow' is unknown"):
        TuneSettings(report_to=("mlflow",))


def test_tensorboard_is_the_default_where_it_is_installed(
    tmp_path: Path, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, written = RunDirectory(tmp_path), list[Any]()

    class SummaryWriter:
        def __init__(self, path: str, purge_step: int, flush_secs: int) -> None:
            written.append((path, purge_step))

        def add_scalar(self, *scalar: Any) -> None:
            written.append(scalar)

        def add_text(self, *text: Any) -> None:
            written.append(text)

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)  # type: ignore[arg-type]
    assert open_trackers(directory, TuneSettings(), 4) == []
    installed.add("tensorboard")
    (tracker,) = open_trackers(directory, TuneSettings(), 4)
    tracker.log({"loss": 2.0, "samples": "> Hi"}, 5)
    assert written == [
        (str(directory.tensorboard), 5), ("loss", 2.0, 5), ("samples", "> Hi", 5)
    ]  # fmt: skip
