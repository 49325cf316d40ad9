"""Progress display of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .checkpoints import Resumed
from .trainer import StepReport

# Number of steps that a speed is averaged over.
_WINDOW = 10
# Number of lines for a run without a terminal.
_LINES = 100
_BAR_WIDTH = 20


class TuneProgress:
    """Shows the steps of a run, by default on the standard error."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._recent: deque[StepReport] = deque(maxlen=_WINDOW)
        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                BarColumn(_BAR_WIDTH),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=num_steps)

    def resumed(self, resumed: Resumed) -> None:
        """Show the step that the run continues from, and refused checkpoints."""
        for reason in resumed.refused:
            self._print(f"passed over: {reason}")
        self._print(f"going on after step {resumed.step}, from {resumed.path}")
        if self._bar is not None:
            self._bar.update(self._task, completed=resumed.step)

    def show(self, report: StepReport) -> None:
        """Show a step."""
        self._recent.append(report)
        seconds = sum(recent.seconds for recent in self._recent)
        speed = sum(recent.tokens for recent in self._recent) / seconds
        text = f"loss {report.loss:.4f}  {speed:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=text)
        elif report.step % -(-self._num_steps // _LINES) == 0 or self._is_end(report.step):
            self._print(f"step {report.step}/{self._num_steps}  {text}")
        if report.is_skipped:
            self._print(f"step {report.step} was skipped: gradients overflowed float16")

    def _is_end(self, step: int) -> bool:
        return step in (1, self._num_steps)

    def evaluated(self, step: int, loss: float) -> None:
        """Show the evaluation loss."""
        self._print(f"step {step}: evaluation loss {loss:.4f}")

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
