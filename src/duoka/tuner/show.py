"""What a person sees while a run goes on: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from duoka.base.units import format_bytes

from .checkpoints import Resumed
from .layout import Layout
from .trainer import StepReport

# Speeds are shown over so many steps.
_WINDOW = 10
# Where there is no terminal, so many lines stand for a run.
_LINES = 100
_BAR_WIDTH = 20


class Progress:
    """Shows the steps of a run, by default on the standard error."""

    def __init__(self, layout: Layout, num_steps: int, console: Console | None = None) -> None:
        self._layout = layout
        self._num_steps = num_steps
        self._recent: deque[StepReport] = deque(maxlen=_WINDOW)
        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._bar: _BarOverDevices | None = None
        if self._console.is_terminal:
            self._bar = _BarOverDevices(
                BarColumn(_BAR_WIDTH),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=num_steps)

    def resumed(self, resumed: Resumed) -> None:
        """Say where the run goes on, and which checkpoints it couldn't go on from."""
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
            self._bar.devices = [self._device(rank) for rank in range(self._layout.world_size)]
            self._bar.update(self._task, completed=report.step, description=text)
        elif report.step % -(-self._num_steps // _LINES) == 0 or self._is_end(report.step):
            self._print(f"step {report.step}/{self._num_steps}  {text}")
        if report.is_skipped:
            self._print(f"step {report.step} was skipped: gradients overflowed float16")

    def _is_end(self, step: int) -> bool:
        return step in (1, self._num_steps)

    def evaluated(self, step: int, loss: float) -> None:
        """Show the loss of what isn't learnt."""
        self._print(f"step {step}: evaluation loss {loss:.4f}")

    def _device(self, rank: int) -> str:
        """How busy a device was, and what it has reserved of what was forecast."""
        reports = [recent.processes[rank] for recent in self._recent]
        share = sum(report.busy_share for report in reports) / len(reports)
        forecast = self._layout.forecast(rank).reserved_bytes
        memory = f"{format_bytes(reports[-1].reserved_bytes)} of {format_bytes(forecast)}"
        return f"{self._layout.label(rank)} {share:.0%} busy, {memory}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class _BarOverDevices(Bar):
    """A bar, and a text for each device below it, as many beside each other as there is room."""

    devices: Iterable[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn."""
        yield from super().get_renderables()
        yield Columns(map(Text, self.devices), padding=(0, 2), equal=True)
