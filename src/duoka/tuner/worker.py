"""A worker process of a run: ``python -m duoka.tuner DIRECTORY``, started for each rank."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from duoka.errors import DuokaError, TrainingError, UsageError
from duoka.runtime import devices
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import describe, explain
from duoka.runtime.publisher import Publisher
from duoka.workers.signals import handle_signals
from duoka.workers.worker import run_to_exit

from .checkpoints import TrainingCheckpoints
from .data import Batches, Dataset, OptimizerStep
from .layout import Layout
from .part import ModelPart, chat_of
from .reporter import RunReporter
from .run import RunDirectory, TuneJob
from .trackers import open_trackers
from .trainer import LostError, Trainer

# Errors of a collective operation after another process has ended.
_LOST = re.compile("Connection|Broken pipe|(?i:gloo)")
# Unless the settings say otherwise, no more than this time of training can be lost.
_SAVE_SECONDS = 15 * 60


def work(directory: RunDirectory, prepare: Callable[[], None] | None = None) -> bool:
    """Train in this process as one rank of the run; rank 0 calls `prepare` first, if given.

    Returns
    -------
    bool
        True after the last step; False if the run was stopped earlier.

    Raises
    ------
    DuokaError
        The reason of the failure, in the process that failed first.
    LostError
        In the other processes after a failure.
    """
    rank = int(os.environ["RANK"])
    device = ""
    dist.init_process_group("gloo")
    try:
        if prepare is not None and rank == 0:
            prepare()
        dist.barrier()
        run = directory.read()
        layout = Layout(run.plans)
        if dist.get_world_size() != layout.world_size:
            raise UsageError(
                f"{dist.get_world_size()} processes were started, but the plan has "
                f"{layout.world_size} GPUs",
                hint=f"torchrun --nproc-per-node {layout.world_size}, or other --gpus",
            )
        _, device = layout.place(rank)
        is_complete = _Worker(directory, run, rank).train()
    except Exception as error:
        reason = _reason(error, device, directory.way_on)
        if reason is None or not directory.fail(reason):
            raise LostError from error  # another process has noted the failure
        raise reason from error
    # Not in a `finally`: after a failure it could wait forever for other processes.
    dist.destroy_process_group()
    return is_complete


def _reason(error: Exception, device: str, way_on: str) -> DuokaError | None:
    """Convert an error to a DuokaError for the user; None if another process caused the error.

    Errors of unknown kinds are raised again.
    """
    if isinstance(error, DuokaError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return TrainingError(
            f"{device}: {describe(error) or 'out of memory'}",
            hint=f"free the memory that other programs use; {way_on}",
        )
    if isinstance(error, torch.AcceleratorError) or find_lost_gpu(error) is not None:
        # Errors of the driver, not the allocator: no memory for a CUDA context, an index that is
        # out of bounds.
        return TrainingError(
            f"{device} failed: {str(error).splitlines()[0]}",
            hint=f"check the GPU with `nvidia-smi`; {way_on}",
        )
    is_lost = isinstance(error, RuntimeError | ConnectionError) and _LOST.search(str(error))
    if isinstance(error, LostError) or is_lost:
        return None
    raise error


class _Worker:
    """The training of one rank: loads its part of the model, resumes, and runs all steps."""

    def __init__(self, directory: RunDirectory, run: TuneJob, rank: int) -> None:
        settings, layout = run.settings, Layout(run.plans)
        self._directory = directory
        self._settings = settings
        self._is_first = rank == 0
        replica, device = layout.place(rank)
        plan = layout.plans[replica]
        dataset = Dataset.load(directory.samples)
        make_batches = partial(
            Batches,
            batch=settings.batch,
            micro_batch=plan.workload.batch // dataset.group_size,
            packing=settings.packing,
            seed=settings.seed,
        )
        self._batches = make_batches(dataset)
        self._eval_steps: list[OptimizerStep] = []
        if directory.eval_samples.is_file():
            measured = make_batches(Dataset.load(directory.eval_samples), shuffle=False)
            self._eval_steps = [measured[step] for step in range(measured.steps_per_epoch)]
        self._num_steps = settings.steps or settings.epochs * self._batches.steps_per_epoch
        part = self._part = ModelPart(
            run.checkpoint(), plan, device, settings.seed, directory.read_first_adapter()
        )
        self._trainer = Trainer(settings, layout, rank, part, self._num_steps)
        identity = {
            "model": plan.fingerprint,
            "data": dataset.fingerprint,
            "method": part.training.method,
        }
        self._checkpoints = TrainingCheckpoints(directory.checkpoints, identity, keep=settings.keep)
        self._save_every = settings.interval(settings.save_every, self._num_steps)
        self._eval_every = settings.interval(settings.eval_every, self._num_steps)
        self._saved_at = time.monotonic()
        self._reporter: RunReporter | None = None  # in the first process only
        self._busy_shares: dict[str, float] = {}

    def train(self) -> bool:
        """Train from the newest checkpoint on; return False if stopped before the last step."""
        part = self._part
        publisher = Publisher(
            part.plan,
            part.model,
            [str(part.device)],
            optimizer=self._trainer.optimizer,
            busy_shares=lambda: self._busy_shares,
        )
        signums = (signal.SIGTERM, signal.SIGINT)
        with handle_signals(self._stop, signums), closing(publisher.start()):
            try:
                return self._train()
            except Exception as error:
                explain(error, publisher)
                raise
            finally:
                if self._reporter is not None:
                    self._reporter.close()

    # A kill may come between any two writes of a step: metrics, then the checkpoint, then the
    # evaluation. Resuming drops metrics of steps after the checkpoint's, which are run again. If
    # the evaluation of the checkpoint's step is missing from the metrics, it runs first.
    def _train(self) -> bool:
        """Resume and run all steps; see `train`."""
        done = self._resume()
        if done and self._lacks_evaluation(done):
            self._evaluate(done)
        if self._stops_early():
            return True
        for step in range(done + 1, self._num_steps + 1):
            waited = time.monotonic() - self._saved_at
            self._trainer.is_save_due = self._settings.save_every is None and waited > _SAVE_SECONDS
            report = self._trainer.step(step - 1, self._batches[step - 1])
            share = report.processes[dist.get_rank()].busy_share
            self._busy_shares = {str(self._part.device): share}
            if self._reporter is not None:
                self._reporter.write(asdict(report))
            wants_save = report.stops or report.saves
            # The checkpoint of an evaluated step may turn out to be the best one.
            if wants_save or self._is_due(step, self._save_every) or self._is_evaluated(step):
                self._save(step)
            if report.stops:
                return False
            if self._lacks_evaluation(step):
                self._evaluate(step)
                if self._stops_early():
                    return True
        return True

    def _is_due(self, step: int, every: int) -> bool:
        """Return True at the last step, and at every multiple of `every` unless 0."""
        return step == self._num_steps or bool(every and step % every == 0)

    def _is_evaluated(self, step: int) -> bool:
        """Return True if an evaluation is due after a step."""
        return bool(self._eval_steps) and self._is_due(step, self._eval_every)

    def _lacks_evaluation(self, step: int) -> bool:
        """Return True in every process if an evaluation is due, and missing from the metrics."""
        return self._is_evaluated(step) and self._decide(
            lambda: step not in self._directory.read_evaluations()
        )

    def _stops_early(self) -> bool:
        """Return True in every process if the last evaluations didn't improve on an earlier one."""
        limit = self._settings.early_stopping

        def is_reached() -> bool:
            losses = [*self._directory.read_evaluations().values()]
            return bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= (limit or 0)

        is_over = limit is not None and self._decide(is_reached)
        if is_over and self._reporter is not None:
            self._reporter.say(f"no better evaluation loss in {limit} evaluations: training ends")
        return is_over

    def _decide(self, condition: Callable[[], bool]) -> bool:
        """Return the value of a condition in the first process, in every process."""
        value = torch.tensor(self._is_first and condition())
        dist.broadcast(value, 0)
        return bool(value)

    def _evaluate(self, step: int) -> None:
        """Compute loss and answers of an evaluation; the first process reports both."""
        entry: dict[str, Any] = {"step": step, **self._trainer.evaluate(self._eval_steps)}
        if (path := self._directory.eval_prompts).is_file():
            chat = chat_of(self._directory.read().checkpoint())
            entry["samples"] = self._trainer.answer(Dataset.load(path), chat)
        if self._reporter is not None:
            self._reporter.write(entry)
            self._checkpoints.keep_best(self._directory.best_step())

    def _stop(self, *_: Any) -> None:
        """Request a stop after the current step; handles SIGTERM and SIGINT."""
        self._trainer.is_asked_to_stop = True

    def _resume(self) -> int:
        """Load the newest checkpoint and create the reporter; return the number of steps done."""
        resumed = self._checkpoints.resume(self._part.trained, self._trainer.optimizer)
        if resumed is not None:
            self._trainer.scale = resumed.state["scale"]
            self._trainer.steps_since_scaled = resumed.state["steps_since_scaled"]
        if self._is_first:
            step = 0 if resumed is None else resumed.step
            trackers = open_trackers(self._directory, self._settings, step)
            self._reporter = RunReporter(
                self._directory, self._num_steps, resumed, trackers=trackers
            )
            self._checkpoints.keep_best(self._directory.best_step())
        devices.reset_peaks(self._part.device)
        return 0 if resumed is None else resumed.step

    def _save(self, step: int) -> None:
        """Save a training checkpoint after a step."""
        trainer = self._trainer
        state = {"scale": trainer.scale, "steps_since_scaled": trainer.steps_since_scaled}
        self._checkpoints.save(step, self._part.trained, trainer.optimizer, state)
        self._saved_at = time.monotonic()


def main() -> None:
    """Run the worker process."""
    directory = RunDirectory(Path(sys.argv[1]))

    def run() -> None:
        try:
            work(directory)
        except DuokaError as error:
            if directory.failure() is None:  # not written for the parent process to show
                sys.stderr.write(f"{error}\n")
            raise

    run_to_exit(run, losses=(LostError,))
