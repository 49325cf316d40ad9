"""Training steps of one process: passes of micro-batches through its stages, optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from duoka.errors import TrainingError
from duoka.models.text.prompts import ChatFormat
from duoka.report.measured import PeakBytes
from duoka.runtime import devices
from duoka.runtime.optimizers import make_optimizer, update
from duoka.stages.channels import ProcessChannel
from duoka.stages.execute import StagePipeline
from duoka.stages.schedule import order_passes

from .data import Dataset, OptimizerStep, TrainingMicroBatch
from .dropout import seed_dropout
from .gradient_sum import GradientSum
from .layout import Layout
from .part import Batch, ModelPart
from .preferences import REWARDS, as_reference, preference_loss
from .settings import TuneSettings

# Calls the model with a micro-batch, by its index, and returns the result of the last stage.
Compute = Callable[[int, Batch, torch.device], Tensor]

# Loss scaling for float16: the defaults of torch.amp.GradScaler.
_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
# The smallest normal number of float16. If gradients aren't finite at this loss scale, the cause
# isn't the scale, and the run stops.
_LEAST_SCALE = 2.0**-14


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport(PeakBytes):
    """Report of one process on a step.

    `busy_share` is the fraction of the step's time not spent waiting for other processes. Bytes are
    peaks since the process began to train, or resumed; 0 if the device doesn't count them.
    """

    replica: int
    busy_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of an optimizer step.

    `loss` is the mean over the trained tokens or, in DPO, over the pairs, whose mean rewards are
    `rewards`, by the names of `preferences.REWARDS`; `is_skipped` means that float16 gradients
    overflowed and the weights are unchanged; `saves` means that some process wants a checkpoint of
    this step, and `stops` that one was asked to stop after it, before the last step.
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
    saves: bool
    stops: bool
    processes: tuple[ProcessReport, ...]
    rewards: dict[str, float] = field(default_factory=dict)


# The loss of a step is the mean over all its trained tokens. A micro-batch's loss is the mean over
# the micro-batch's own trained tokens, so it is weighted by their share before the backward pass:
# micro-batches of 30 and 10 trained tokens have the weights 3/4 and 1/4. DPO counts pairs instead.
# Gradients are then plain sums, over micro-batches by autograd and over replicas by `GradientSum`,
# and don't depend on the replica that runs a micro-batch.
#
# DPO runs all forward passes of the step without adapters first, then the passes of the loss.
#
# After the passes each process all-gathers [loss, squared norm of its gradients, seconds waited,
# peak allocated, peak reserved, save, stop, rewards of DPO]. From the same numbers all processes
# take the same decisions: to stop, to skip the step, and by how much to clip. The norm is computed
# from the processes of replica 0, which together hold each parameter once.
class Trainer:
    """Runs the steps of a run in a process; all processes call the same methods together."""

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
        self._num_steps = num_steps
        self._gradients = GradientSum(layout, part.all_trained, part.trained)
        self.is_save_due = self.is_asked_to_stop = False
        self._is_in_half = part.plan.workload.dtype == "float16"
        self._is_scaled = self._is_in_half and part.training.master_weights
        self.scale = _FIRST_SCALE if self._is_scaled else 1.0
        self.steps_since_scaled = 0

    # A step of two stages with two micro-batches, 1F1B (F: forward, B: backward, drawn as long):
    #
    #   rank 0, stage 0   F0  F1  ·   B0  ·   B1 │ barrier │ sum over replicas │ gather │ update
    #   rank 1, stage 1   ·   F0  B0  F1  B1  ·  │         │                   │        │
    #
    # Hidden states go from F of stage 0 to F of stage 1, gradients back from B to B. Only the last
    # stage of a replica has losses, so the sum over all processes is the loss of the step. The time
    # that a process waits for others, in the passes and at the barrier, is measured; the rest is
    # its busy share.
    def step(self, number: int, step: OptimizerStep) -> StepReport:
        """Train on the micro-batches of step `number`, from 0, and update the weights."""
        begin = time.perf_counter()
        micro_batches = step.of_replica(self._replica, len(self._layout.plans))
        rate = self._settings.rate_at(number, self._num_steps)
        total = sum(micro_batch.num_losses for micro_batch in step.micro_batches)
        losses, rewards, waited = self._run(micro_batches, total, number=number)
        devices.synchronize(self._part.device)
        passed = time.perf_counter()
        dist.barrier()  # wait until all processes have finished their passes
        waited += time.perf_counter() - passed
        self._gradients.finish()
        values = sum(losses), self._squared_norm(), waited, *self._peaks_and_wishes(), *rewards
        gathered = _gather(values)
        self._refuse_nonfinite_loss(number, micro_batches, losses, gathered[:, 0])
        norm = self._total_norm(gathered)
        self._refuse_nonfinite_norm(number, norm)
        is_skipped = self._advance(norm, rate)
        saves, stops = gathered[:, 5:7].bool().any(dim=0).tolist()
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
            saves=saves,
            stops=stops and number + 1 < self._num_steps,
            processes=self._process_reports(gathered, seconds),
            rewards=dict(zip(REWARDS, gathered[:, 7:].sum(dim=0).tolist(), strict=False)),
        )

    def _process_reports(self, gathered: Tensor, seconds: float) -> tuple[ProcessReport, ...]:
        """Return the reports of all processes on a step that took so many seconds."""
        return tuple(
            ProcessReport(
                device=device,
                replica=replica,
                busy_share=max(0.0, 1 - waited / seconds),
                allocated_bytes=int(allocated),
                reserved_bytes=int(reserved),
            )
            for rank, (waited, allocated, reserved) in enumerate(gathered[:, 2:5].tolist())
            for replica, device in [self._layout.place(rank)]
        )

    @torch.no_grad()
    def evaluate(self, steps: Sequence[OptimizerStep]) -> dict[str, float]:
        """Return the mean loss of all steps' tokens or pairs, and rewards, without training."""
        total = sum(it.num_losses for step in steps for it in step.micro_batches)
        self._part.model.eval()
        shares = (step.of_replica(self._replica, len(self._layout.plans)) for step in steps)
        results = [self._run(share, total) for share in shares]
        self._part.model.train()
        rewards = zip(*(rewards for _, rewards, _ in results), strict=True)
        values = sum(sum(losses) for losses, _, _ in results), *map(sum, rewards)
        names = "eval_loss", *(f"eval_rewards/{name}" for name in REWARDS)
        return dict(zip(names, _gather(values).sum(dim=0).tolist(), strict=False))

    # There is no KV cache: each token takes an evaluation's pass over the whole row, whose memory
    # is in the plan. In a causal model the tokens after a position don't change its logits.
    @torch.no_grad()
    def answer(self, prompts: Dataset, chat: ChatFormat) -> list[dict[str, str]]:
        """Return prompts with greedy answers, of at most the tokens in their places."""
        ids, is_open = prompts.ids.copy(), prompts.is_trained.copy()
        part, prompts = self._part, replace(prompts, ids=ids, is_trained=is_open)
        answers: list[list[int]] = [[] for _ in range(len(prompts))]
        running = [*range(len(prompts))]
        self._part.model.eval()
        while running:
            share = running[self._replica :: len(self._layout.plans)]
            batches = [TrainingMicroBatch(prompts, ((sample,),), packing=False) for sample in share]
            results, _ = self._pass(batches, lambda _, *it: part.next_token(*it), learns=False)
            tokens = dict(zip(share, map(float, results), strict=False))  # of last stages
            gathered = _gather([tokens.get(sample, 0.0) for sample in running]).sum(dim=0)
            for sample, token in zip([*running], gathered.int().tolist(), strict=True):
                ids, is_open = prompts.tokens(sample)  # views: the next pass reads the token
                ids[is_open.argmax()], is_open[is_open.argmax()] = token, False
                answers[sample] += [] if token in chat.stop_ids else [token]
                if token in chat.stop_ids or not is_open.any():
                    running.remove(sample)
        self._part.model.train()
        texts = chat.tokenizer.batch_decode(answers, skip_special_tokens=True)
        pairs = zip(prompts.prompts, texts, strict=True)
        return [{"prompt": prompt, "answer": text.strip()} for prompt, text in pairs]

    def _run(
        self, micro_batches: Sequence[TrainingMicroBatch], total: int, *, number: int | None = None
    ) -> tuple[list[float], list[float], float]:
        """Run this process's passes for micro-batches of a step whose loss has `total` terms.

        With the `number` of a training step the backward passes run, too; None is an evaluation.
        Returns the weighted losses, the weighted rewards of DPO, and the seconds spent waiting for
        other stages.
        """
        part, settings = self._part, self._settings
        weights = [micro_batch.num_losses / total for micro_batch in micro_batches]
        scale = 1.0 if number is None else self.scale
        rewards = [torch.zeros(len(REWARDS))] if settings.dpo else []
        reference, reference_waited = list[Tensor](), 0.0

        def loss_of(index: int, batch: Batch, device: torch.device) -> Tensor:
            if number is not None:
                # Seeded by the index within the step, dropout doesn't depend on the replica or on a
                # resumption. The second of two replicas has micro-batches 1, 3, 5 (`of_replica`).
                step_index = self._replica + index * len(self._layout.plans)
                seed_dropout(settings.seed, number, step_index)
            if settings.dpo:
                log_probs = part.log_probs(batch, device)
                loss, means = preference_loss(log_probs, reference[index], settings.dpo_beta)
                rewards.append(means * weights[index])
            else:
                loss = part.loss(batch, device)
            return loss * (weights[index] * scale)

        if settings.dpo:
            with as_reference(part.model):
                reference, reference_waited = self._pass(
                    micro_batches, lambda _, *inputs: part.log_probs(*inputs), learns=False
                )
        losses, waited = self._pass(micro_batches, loss_of, learns=number is not None)
        sums = torch.stack([it.cpu() for it in rewards]).sum(dim=0).tolist() if rewards else []
        return [float(loss) / scale for loss in losses], sums, waited + reference_waited

    def _pass(
        self, micro_batches: Sequence[TrainingMicroBatch], compute: Compute, *, learns: bool
    ) -> tuple[list[Tensor], float]:
        """Run this process's passes for micro-batches, with backward passes if `learns`.

        Returns the results of `compute` in the process of the last stage, and the seconds spent
        waiting for other stages.
        """
        part = self._part
        batches: list[Batch] = [part.inputs(micro_batch) for micro_batch in micro_batches]
        if not batches:
            return [], 0.0
        routes = [part.route(batch) for batch in batches]
        names = max((route.devices for route in routes), key=len)
        routes = [route if route.devices == names else route.over(names) for route in routes]
        ranks = [self._layout.rank(self._replica, name) for name in names]
        channel = ProcessChannel(ranks, part.device)

        def forward(index: int, device: torch.device) -> Tensor:
            return compute(index, part.send(batches[index], device), device)

        pipeline = StagePipeline(
            part.interceptor,
            channel,
            [part.device] * len(names),
            local=[stage for stage, name in enumerate(names) if name == self._device_name],
            before_last_backward=self._gradients.begin_last_backward,
        )
        passes = [timed.step for timed in order_passes(names, part.training, len(batches))]
        if not learns:
            passes = [step for step in passes if not step.is_backward]
        results = pipeline.run(routes, passes, forward, learns=learns)
        channel.flush()
        return results, channel.waited_seconds

    def _gradients_here(self) -> list[Tensor]:
        """Return the existing gradients of this process's trained parameters."""
        return [p.grad for p in self._part.trained.values() if p.grad is not None]

    def _squared_norm(self) -> float:
        """Return the squared norm of this process's gradients, without the loss scale."""
        return float(torch.nn.utils.get_total_norm(self._gradients_here())) ** 2 / self.scale**2

    def _peaks_and_wishes(self) -> tuple[int, int, bool, bool]:
        """Return the peaks of allocated and reserved bytes, and whether to save and to stop.

        Peaks are zeros if the device has no counts.
        """
        peak = devices.peak_bytes(self._part.device)
        peaks = (0, 0) if peak is None else (peak.allocated_bytes, peak.reserved_bytes)
        return *peaks, self.is_save_due, self.is_asked_to_stop

    def _total_norm(self, gathered: Tensor) -> float:
        """Return the norm of the whole model's gradients, equal in every replica."""
        ranks = [self._layout.rank(0, name) for name in self._layout.plans[0].devices]
        return math.sqrt(float(gathered[ranks, 1].sum()))

    # Loss scaling (Micikevicius et al., "Mixed Precision Training", 2018): gradients smaller than
    # 6e-8 are zero in float16, so the loss is multiplied by a scale, and gradients divided by it.
    #
    #   step   scale    norm    what happens
    #   0      65536    inf     a gradient overflowed: skipped, the scale is halved
    #   1      32768    inf     skipped, halved
    #   2      16384    2.0     clipped to 1.0: gradients times 0.5 / 16384; 1 good step
    #   …
    #   2001   16384    0.7     not clipped: gradients times 1 / 16384; 2,000 good steps: doubled
    #
    # `norm` is the norm of the whole model's unscaled gradients and equal in all processes, so all
    # processes skip the step or none does. torch.amp.GradScaler would decide by the gradients of
    # its own process alone.
    def _advance(self, norm: float, rate: float) -> bool:
        """Clip and unscale the gradients, and update the weights; return True if skipped."""
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            limit = self._settings.max_grad_norm
            factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
            gradients = self._gradients_here()  # empty on a GPU without trained parameters
            if gradients and factor / self.scale != 1.0:
                torch._foreach_mul_(gradients, factor / self.scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        if self._is_scaled:
            self.steps_since_scaled += 1
            if is_skipped:
                self.scale, self.steps_since_scaled = self.scale / 2, 0
            elif self.steps_since_scaled == _GROWTH_STEPS:
                self.scale, self.steps_since_scaled = self.scale * 2, 0
        return is_skipped

    def _refuse_nonfinite_loss(
        self,
        number: int,
        micro_batches: Sequence[TrainingMicroBatch],
        losses: Sequence[float],
        all_losses: Tensor,
    ) -> None:
        """Raise TrainingError for a loss that is not finite, naming the samples.

        Only the process with this loss raises it; the others raise LostError.
        """
        for micro_batch, loss in zip(micro_batches, losses, strict=False):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} in step {number + 1}, for the samples of "
                    f"{', '.join([*dict.fromkeys(micro_batch.places)][:5])}",
                    hint=self._remedy(number),
                )
        if not math.isfinite(float(all_losses.sum())):
            raise LostError

    def _refuse_nonfinite_norm(self, number: int, norm: float) -> None:
        """Raise TrainingError if the norm isn't finite, unless a smaller loss scale may help."""
        if math.isfinite(norm) or (self._is_scaled and self.scale > _LEAST_SCALE):
            return
        scaled = f", with the loss scaled down to {self.scale:g}" if self._is_scaled else ""
        raise TrainingError(
            f"the norm of the gradients is {norm} in step {number + 1}{scaled}",
            hint=self._remedy(number),
        )

    def _remedy(self, number: int) -> str:
        """Return the hint for a loss or gradients that are not finite in a step, from 0."""
        if self._is_in_half:
            remedy = "float16 overflows above 65504: start a run with --dtype bfloat16 or float32"
        elif number == 0:
            remedy = "the first steps already failed: check the weights and these samples"
        else:
            remedy = "start a run with a lower --lr, a longer --warmup or a lower --max-grad-norm"
        every = self._settings.interval(self._settings.save_every, self._num_steps)
        is_saved = bool(every) and number >= every
        return f"{remedy}; the last checkpoint is intact" if is_saved else remedy


class LostError(Exception):
    """Ends a process because another process has failed, and notes the failure."""


def _gather(values: Sequence[float]) -> Tensor:
    """All-gather the numbers of each process: float64 [processes, values]."""
    row = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)
