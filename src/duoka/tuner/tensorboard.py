"""Metrics of a run for TensorBoard, if installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OF_STEPS = ("loss", "eval_loss", "grad_norm", "learning_rate")


class TensorBoard:
    """Writes a run's metrics as TensorBoard's events; without tensorboard it does nothing.

    Earlier events of steps behind `step`, from where the run continues, are hidden.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._writer: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter
            self._writer = writer(str(directory), purge_step=step + 1, flush_secs=10)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write a line of the metrics."""
        if self._writer is not None:
            for name, value in _scalars(metrics).items():
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        """Flush all events to the disk."""
        if self._writer is not None:
            self._writer.close()


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    scalars = {name: metrics[name] for name in _OF_STEPS if name in metrics}
    if "seconds" in metrics:
        scalars["tokens_per_second"] = metrics["tokens"] / metrics["seconds"]
    for process in metrics.get("processes", ()):
        device = process["device"].replace(":", "_")
        scalars[f"busy_share/{device}"] = process["busy_share"]
        scalars[f"reserved_bytes/{device}"] = process["reserved_bytes"]
    return scalars
