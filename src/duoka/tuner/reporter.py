"""Progress of a run: metrics as JSON lines, a progress bar or log lines, and trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from duoka.base.text import printable

from .checkpoints import Resumed
from .run import RunDirectory
from .trackers import Tracker

# The displayed speed is the mean of this number of steps.
_WINDOW = 10
# About this number of lines is printed if there is no terminal.
_LINES = 100
_BAR_WIDTH = 20
_SCALARS = ("loss", "eval_loss", "grad_norm", "learning_rate")


class RunReporter:
    """Reports the metrics of each step and evaluation, in the first process of a run.

    Metrics are appended to ``metrics.jsonl``, shown on standard error, and sent to `trackers`. With
    `resumed`, metrics of steps after the checkpoint's are removed from the file, because the run
    repeats these steps.
    """

    def __init__(
        self,
        directory: RunDirectory,
        num_steps: int,
        resumed: Resumed | None = None,
        console: Console | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        step = 0 if resumed is None else resumed.step
        directory.forget_after(step)
        self._directory = directory
        self._num_steps = num_steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._console = console or Console(stderr=True, highlight=False)
        self._trackers = trackers
        self._bar = Bar(
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=step)
        if self._console.is_terminal:
            self._bar.start()
        if resumed is not None:
            for reason in resumed.refused:
                self.say(f"skipped: {reason}")
            self.say(f"resuming after step {step}, from {resumed.path}")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Report the metrics of a step or of an evaluation."""
        self._directory.note(metrics)
        step = metrics["step"]
        scalars = _scalars(metrics)
        for tracker in self._trackers:
            tracker.log(scalars, step)
        if "eval_loss" in metrics:
            text = f"step {step}: evaluation loss {metrics['eval_loss']:.4f}"
            if "eval_rewards/accuracies" in metrics:
                text += f", accuracy {metrics['eval_rewards/accuracies']:.0%}"
            self.say("\n\n".join(filter(None, [text, scalars.get("samples")])))
            self._directory.write_answers()
            return
        self._recent.append((metrics["tokens"], metrics["seconds"]))
        tokens, seconds = map(sum, zip(*self._recent, strict=True))
        text = f"loss {metrics['loss']:.4f}  {tokens / seconds:,.0f} tokens/s"
        if rewards := metrics.get("rewards"):
            text += f"  accuracy {rewards['accuracies']:.0%}  margin {rewards['margins']:.4f}"
        self._bar.update(self._task, completed=step, description=text)
        is_shown = step in (1, self._num_steps) or step % -(-self._num_steps // _LINES) == 0
        if is_shown and not self._console.is_terminal:
            self.say(f"step {step}/{self._num_steps}  {text}")
        if metrics["is_skipped"]:
            self.say(f"step {step} was skipped: gradients overflowed float16")

    def close(self) -> None:
        """Restore the terminal, and flush all events to the disk."""
        if self._console.is_terminal:
            self._bar.stop()
        for tracker in self._trackers:
            tracker.close()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, soft_wrap=True)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for trackers, by name: numbers, and the text of samples."""
    names = [name for name in metrics if name in _SCALARS or name.startswith("eval_rewards/")]
    scalars = {name: metrics[name] for name in names}
    scalars |= {f"rewards/{name}": value for name, value in metrics.get("rewards", {}).items()}
    for sample in metrics.get("samples", ()):
        text = printable(f"> {sample['prompt']}\n\n{sample['answer']}")
        scalars["samples"] = f"{scalars['samples']}\n\n{text}" if "samples" in scalars else text
    if "seconds" in metrics:
        scalars["tokens_per_second"] = metrics["tokens"] / metrics["seconds"]
    for process in metrics.get("processes", ()):
        device = process["device"].replace(":", "_")
        for name in ("busy_share", "reserved_bytes"):
            scalars[f"{name}/{device}"] = process[name]
    return scalars
