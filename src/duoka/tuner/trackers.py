"""Trackers that show the metrics of a run: TensorBoard, Weights & Biases, SwanLab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from duoka.base.serialization import to_dict
from duoka.errors import UsageError

from .run import RunDirectory
from .settings import TuneSettings

_PROJECT = "duoka"


class Tracker(Protocol):
    """Shows the metrics of a run."""

    def log(self, scalars: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step: numbers, and texts in Markdown."""

    def close(self) -> None:
        """Send the remaining metrics."""


class _TensorBoard:
    """Writes TensorBoard's event files; metrics after `step` of an earlier start are hidden."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer = writer(str(path), purge_step=step + 1, flush_secs=10)

    def log(self, scalars: Mapping[str, Any], step: int) -> None:
        """See `Tracker`."""
        for name, value in scalars.items():
            add = "add_text" if isinstance(value, str) else "add_scalar"
            getattr(self._writer, add)(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class _Service:
    """Sends metrics to wandb or SwanLab, whose `init` takes the same arguments but for the path.

    Their own environment variables choose an account, and whether metrics are sent or only kept in
    the run's directory. Each start is a run of its own, in a group with the directory's name.
    """

    def __init__(self, name: str, directory: RunDirectory, settings: TuneSettings) -> None:
        places = {"wandb": {"dir": directory.path}, "swanlab": {"log_dir": directory.path / name}}
        run = directory.path.resolve().name
        self._library: Any = import_module(name)
        try:
            self._run = self._library.init(
                project=_PROJECT, name=run, group=run, config=to_dict(settings), **places[name]
            )
        except Exception as error:  # each library has its own errors
            raise UsageError(
                f"{name} can't start: {error}",
                hint=f"log in with `{name} login`, or set {name.upper()}_MODE=offline",
            ) from error

    def log(self, scalars: Mapping[str, Any], step: int) -> None:
        """See `Tracker`."""
        texts = {name: self._text(it) for name, it in scalars.items() if isinstance(it, str)}
        self._run.log({**scalars, **texts}, step=step)

    def _text(self, text: str) -> Any:
        """Return a text in the library's form; wandb has tables for texts."""
        if hasattr(self._library, "Text"):
            return self._library.Text(text)
        return self._library.Table(columns=["text"], data=[[text]])

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UsageError for a tracker whose library isn't installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(
                f"reporting to {name} needs {name}, which isn't installed",
                hint=f"pip install {name}",
            )


def open_trackers(directory: RunDirectory, settings: TuneSettings, step: int) -> list[Tracker]:
    """Open the trackers of a run that goes on after a step; by default TensorBoard if installed."""
    names = settings.report_to
    if not names and find_spec("tensorboard") is not None:
        names = ("tensorboard",)
    return [
        _TensorBoard(directory.tensorboard, step)
        if name == "tensorboard"
        else _Service(name, directory, settings)
        for name in names
    ]
