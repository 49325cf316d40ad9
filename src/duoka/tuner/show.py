"""What a person sees while a run goes on: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from duoka.base.units import format_bytes

from .checkpoints import Resumed
from .layout import Layout
from .trainer import StepReport

# Speeds are shown over so many steps.
_WINDOW = 10
# Where there is no terminal, so many lines stand for a run.
_LINES = 100


class Progress:
    """Shows the steps of a run."""

    def __init__(self, layout: Layout, num_steps: int) -> None:
        self._layout = layout
        self._num_steps = num_steps
        self._recent: deque[StepReport] = deque(maxlen=_WINDOW)
        self._console = Console(stderr=True, highlight=False)
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=num_steps)

    def resumed(self, resumed: Resumed) -> None:
        """Say where the run goes on, and which checkpoints it couldn't go on from."""
        for reason in resumed.refused:
            self._print(f"passed over: {reason}")
        self._print(f"going on after step {resumed.step}, from {resumed.path}")

    def show(self, report: StepReport) -> None:
        """Show a step."""
        self._recent.append(report)
        seconds = sum(recent.seconds for recent in self._recent)
        speed = sum(recent.tokens for recent in self._recent) / seconds
        text = f"loss {report.loss:.4f}  {speed:,.0f} tokens/s"
        if self._bar is not None:
            busy = "  ".join(self._device(number) for number in range(self._layout.world_size))
            self._bar.update(self._task, completed=report.step, description=f"{text}  {busy}")
        elif report.step % max(1, self._num_steps // _LINES) == 0 or report.step == 1:
            self._print(f"step {report.step}/{self._num_steps}  {text}")
        if report.is_skipped:
            self._print(f"step {report.step} was skipped: gradients overflowed float16")

    def evaluated(self, step: int, loss: float) -> None:
        """Show the loss of what isn't learnt."""
        self._print(f"step {step}: evaluation loss {loss:.4f}")

    def _device(self, number: int) -> str:
        """How busy a device was, and what it has reserved of what was forecast."""
        reports = [recent.processes[number] for recent in self._recent]
        latest = reports[-1]
        share = sum(report.busy_share for report in reports) / len(reports)
        forecast = next(
            stage
            for stage in self._layout.plans[latest.replica].forecast.devices
            if stage.device == latest.device
        )
        memory = f"{format_bytes(latest.reserved_bytes)} of {format_bytes(forecast.reserved_bytes)}"
        return f"{latest.device} {share:.0%} busy, {memory}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
