"""One process's part of a run: micro-batches through its stages, and the optimizer's steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from duoka.errors import TrainingError
from duoka.runtime import devices
from duoka.runtime.optimizers import make_optimizer, update
from duoka.stages.channels import ProcessChannel
from duoka.stages.execute import Pipeline
from duoka.stages.schedule import Pass, order_passes

from .data import MicroBatch, Step
from .layout import GradientSum, Layout
from .learning_rate import LearningRate
from .part import Batch, ModelPart
from .settings import TuneSettings

# Loss scaling in 16 bit without an exponent's range: as torch.amp.GradScaler's defaults.
_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
_LATER = "it is in the last checkpoint; try a lower learning rate, or --max-grad-norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """What one process did in a step; times in seconds, peaks in bytes since the run began."""

    device: str
    replica: int
    busy_share: float
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step of the optimizer.

    `loss` is the mean over the step's trained tokens; `is_skipped` says that gradients in float16
    overflowed, and the weights stayed as they were.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    seconds: float
    is_skipped: bool
    stops: bool
    processes: tuple[ProcessReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        return asdict(self)


class Trainer:
    """The steps of a run in one process; all processes call the same methods at the same time."""

    def __init__(
        self, settings: TuneSettings, layout: Layout, rank: int, part: ModelPart, num_steps: int
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._replica, self._device_name = layout.place(rank)
        self._part = part
        self.optimizer = make_optimizer(
            part.model,
            part.training.optimizer,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self._rate = LearningRate(
            decay=settings.lr_schedule,
            num_steps=num_steps,
            warmup_steps=settings.warmup_steps(num_steps),
        )
        self._gradients = GradientSum(layout, part.all_trained)
        self.is_asked_to_stop = False
        in_half = part.plan.workload.dtype == "float16" and part.training.master_weights
        self.scale = _FIRST_SCALE if in_half else 1.0
        self.steps_since_scaled = 0

    def step(self, number: int, step: Step) -> StepReport:
        """Learn from a step's micro-batches."""
        begin = time.perf_counter()
        # By the step: a run that is resumed draws the same dropout.
        torch.manual_seed(self._settings.seed * 2**32 + number)
        replicas = len(self._layout.plans)
        micro_batches = step.of_replica(self._replica, replicas)
        rate = self._settings.learning_rate * self._rate(number)
        losses, waited = self._learn(micro_batches, step.trained_tokens)
        self._gradients.reduce(self._part.trained)
        self._refuse_untrained(number)
        gathered = _gather([sum(losses), self._squares(), waited, *self._peaks(), self._stop()])
        self._refuse_no_number(number, micro_batches, losses, gathered)
        norm = self._norm(gathered)
        is_skipped = self._advance(norm, rate)
        seconds = time.perf_counter() - begin
        return StepReport(
            step=number + 1,
            epoch=step.epoch,
            loss=float(gathered[:, 0].sum()),
            grad_norm=norm if math.isfinite(norm) else 0.0,
            learning_rate=rate,
            tokens=sum(micro_batch.tokens for micro_batch in step.micro_batches),
            trained_tokens=step.trained_tokens,
            seconds=seconds,
            is_skipped=is_skipped,
            stops=bool(gathered[:, 5].any()),
            processes=tuple(self._reports(gathered, seconds)),
        )

    def evaluate(self, steps: Sequence[Step]) -> float:
        """The mean loss over the trained tokens of some steps."""
        total = sum(step.trained_tokens for step in steps)
        self._part.model.eval()
        try:
            with torch.no_grad():
                losses = [
                    loss
                    for step in steps
                    for loss in self._run(
                        step.of_replica(self._replica, len(self._layout.plans)), total, learns=False
                    )[0]
                ]
        finally:
            self._part.model.train()
        return float(_gather([sum(losses)])[:, 0].sum())

    def _learn(self, micro_batches: Sequence[MicroBatch], total: int) -> tuple[list[float], float]:
        """Run forward and backward; weighted losses, and the seconds spent waiting for others."""
        return self._run(micro_batches, total, learns=True)

    def _run(
        self, micro_batches: Sequence[MicroBatch], total: int, *, learns: bool
    ) -> tuple[list[float], float]:
        part = self._part
        batches: list[Batch] = [micro_batch.tensors() for micro_batch in micro_batches]
        if not batches:
            return [], 0.0
        routes = [part.route(batch) for batch in batches]
        weights = [micro_batch.trained_tokens / total for micro_batch in micro_batches]
        scale = self.scale if learns else 1.0
        names = routes[0].devices
        ranks = [self._layout.rank(self._replica, name) for name in names]
        channel = ProcessChannel(ranks, part.device)

        def forward(number: int, device: torch.device) -> Tensor:
            return part.loss(batches[number], device) * (weights[number] * scale)

        pipeline = Pipeline(
            part.interceptor,
            channel,
            [part.device] * len(names),
            local=[stage for stage, name in enumerate(names) if name == self._device_name],
        )
        passes = self._passes(names, len(batches), learns=learns)
        losses = pipeline.run(routes, passes, forward, learns=learns)
        channel.flush()
        return [float(loss) / scale for loss in losses], channel.waited_seconds

    def _passes(self, names: Sequence[str], number: int, *, learns: bool) -> list[Pass]:
        if not learns:
            stages = range(len(names))
            return [Pass(stage, batch, False) for batch in range(number) for stage in stages]
        return [timed.step for timed in order_passes(names, self._part.training, number)]

    def _squares(self) -> float:
        """The square of the norm of this process's gradients."""
        gradients = [p.grad for p in self._part.trained.values() if p.grad is not None]
        if not gradients:
            return 0.0
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 / self.scale**2

    def _peaks(self) -> tuple[int, int]:
        peak = devices.peak_bytes(self._part.device)
        return (0, 0) if peak is None else (peak.allocated_bytes, peak.reserved_bytes)

    def _stop(self) -> int:
        return int(self.is_asked_to_stop)

    def _norm(self, gathered: Tensor) -> float:
        """The norm of all gradients, which are the same in every replica."""
        ranks = [self._layout.rank(0, name) for name in self._layout.plans[0].devices]
        return math.sqrt(float(gathered[ranks, 1].sum()))

    def _advance(self, norm: float, rate: float) -> bool:
        """Let the optimizer make its step; whether it was skipped."""
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            limit = self._settings.max_grad_norm
            factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
            if factor != 1.0 or self.scale != 1.0:
                for parameter in self._part.trained.values():  # none on some GPUs: an embedding's
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor / self.scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        if self.scale != 1.0:
            self.steps_since_scaled += 1
            if is_skipped:
                self.scale, self.steps_since_scaled = self.scale / 2, 0
            elif self.steps_since_scaled == _GROWTH_STEPS:
                self.scale, self.steps_since_scaled = self.scale * 2, 0
        return is_skipped

    def _reports(self, gathered: Tensor, seconds: float) -> list[ProcessReport]:
        reports = []
        for rank in range(self._layout.world_size):
            replica, device = self._layout.place(rank)
            waited, allocated, reserved = gathered[rank, 2:5].tolist()
            reports.append(
                ProcessReport(
                    device=device,
                    replica=replica,
                    busy_share=max(0.0, 1 - waited / seconds),
                    allocated_bytes=int(allocated),
                    reserved_bytes=int(reserved),
                )
            )
        return reports

    def _refuse_untrained(self, number: int) -> None:
        """Refuse parameters that should learn and didn't; an expert may not have been chosen."""
        if number:
            return
        silent = [name for name, p in self._part.trained.items() if p.grad is None]
        silent = [name for name in silent if "expert" not in name]
        if silent:
            raise TrainingError(
                f"{len(silent)} parameters were to be trained and got no gradient: "
                f"{', '.join(silent[:5])}" + (", …" if len(silent) > 5 else ""),
                hint="the model's code doesn't use them for these data; name other --lora-target",
            )

    def _refuse_no_number(
        self,
        number: int,
        micro_batches: Sequence[MicroBatch],
        losses: Sequence[float],
        gathered: Tensor,
    ) -> None:
        """Stop where the loss is no number, or gradients are none outside of float16."""
        for micro_batch, loss in zip(micro_batches, losses, strict=False):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} in step {number + 1}, for the samples of "
                    f"{', '.join(micro_batch.places[:5])}",
                    hint=f"what was learnt before {_LATER}",
                )
        if not math.isfinite(float(gathered[:, 0].sum())):
            raise PeerError
        if self.scale == 1.0 and not math.isfinite(self._norm(gathered)):
            raise TrainingError(
                f"the norm of the gradients is {self._norm(gathered)} in step {number + 1}",
                hint=f"what was learnt before {_LATER}",
            )


class PeerError(Exception):
    """Another process has failed, and says why."""


def _gather(values: Sequence[float]) -> Tensor:
    """The numbers of all processes, [processes, values], float64."""
    row = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)
