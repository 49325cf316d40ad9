"""Fine-tuning from the plan to the result: planned, proved, run by processes, and reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from duoka.base.progress import say
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, TrainingError
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import adapter_of, fill_adapter
from duoka.planner.plan import Plan
from duoka.runtime.prepare_training import prepare_for_training
from duoka.stages.rendezvous import Rendezvous
from duoka.workers.group import WorkerGroup
from duoka.workers.signals import handle_signals

from .checkpoints import SavedParameters, TrainingCheckpoints
from .layout import Layout
from .prepare import NumReplicas, TuneRun, plans_for, prepare, prove_plans
from .report import RunReport, make_report
from .result import write_adapter, write_merged
from .run import RunDirectory, TuneJob
from .settings import TuneSettings
from .worker import work

_DEFAULTS = TuneSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The outcome of a run.

    Parameters
    ----------
    directory : Path
        Of the run.
    steps : int
        The optimizer's steps that it has behind it.
    stopped_by : int, optional
        The signal that ended it before its last step; it can go on.
    result : Path, optional
        The adapter or checkpoint that it has made.
    report : RunReport, optional
        What was measured beside what was forecast.
    """

    directory: Path
    steps: int
    stopped_by: int | None = None
    result: Path | None = None
    report: RunReport | None = None


def tune(
    model: str | os.PathLike[str] | Checkpoint,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    gpus: Fleet | str = "all",
    *,
    save: str | os.PathLike[str],
    settings: TuneSettings = _DEFAULTS,
    replicas: NumReplicas = "auto",
    plan: Plan | None = None,
    adapter: str | os.PathLike[str] | None = None,
    show: Callable[[TuneRun], bool] | None = None,
) -> TuneResult:
    """Fine-tune a model on every GPU, in a process for each.

    It is planned and proved before a weight is read. Stages of the model work at the same time on
    different micro-batches; where several copies of it fit, they share each step. In processes
    that torchrun has started all of them call this, and the first one's result counts.

    Parameters
    ----------
    model : path, str or Checkpoint
        A directory with a published checkpoint, or a model's name on the Hub.
    data : str, path, or sequence of these
        Files or directories to learn from.
    gpus : Fleet or str
        As for `plan`; all are used.
    save : path
        A new directory for the run: checkpoints, metrics, and the result.
    settings : TuneSettings
        How it is learnt.
    replicas : int or "auto"
        Copies of the model that share each step; "auto" is as many as fit.
    plan : Plan, optional
        Take this one, for training, instead of making one.
    adapter : path, optional
        Directory of a LoRA adapter that is trained on; its rank, scale and modules count, instead
        of those of `settings`.
    show : callable, optional
        Called with the run before it starts; it doesn't where this returns False.

    Raises
    ------
    InfeasibleError
        If it doesn't fit, with the ways out.
    UsageError
        If options contradict each other, or rows of the data can't be used.
    TrainingError
        If training can't go on; the last checkpoint is whole.
    """
    directory = RunDirectory(Path(save))

    def begin() -> bool:
        directory.refuse_used()
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
        paths = [os.fspath(p) for p in ([data] if isinstance(data, str | os.PathLike) else data)]
        adapter_path = None if adapter is None else Path(adapter)
        run = prepare(
            checkpoint, paths, gpus, settings, replicas=replicas, plan=plan, adapter=adapter_path
        )
        goes_on = show is None or show(run)
        if goes_on:
            run.write(directory)
        return goes_on

    with _lock(directory):
        if torch.distributed.is_torchelastic_launched():
            return _in_ranks(directory, begin)
        if not begin():
            return TuneResult(directory=directory.path, steps=0)
        try:
            return _train(directory)
        except DuokaError:
            directory.remove_unbegun()
            raise


def _lock(directory: RunDirectory) -> AbstractContextManager[None]:
    """Lock a run; of the processes of torchrun rank 0 holds the lock for all."""
    is_other = torch.distributed.is_torchelastic_launched() and os.environ["RANK"] != "0"
    return nullcontext() if is_other else directory.locked()


def _in_ranks(directory: RunDirectory, begin: Callable[[], bool]) -> TuneResult:
    """Train in this process of torchrun's; rank 0 begins the run."""

    def begin_once() -> None:
        # Where torchrun starts the processes again after a failure, the run goes on.
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or not directory.is_written:
            begin()
        directory.forget_failure()

    is_first = os.environ["RANK"] == "0"
    is_complete = work(directory, begin_once if is_first else None)
    if not is_first:
        return TuneResult(directory=directory.path, steps=0)
    # torchrun hands on SIGTERM, whatever it was sent itself.
    return _finished(directory, None if is_complete else signal.SIGTERM)


def move(
    directory: RunDirectory, fleet: Fleet | str | None, replicas: NumReplicas = "auto"
) -> None:
    """Plan a run for other GPUs, or anew for its own; training resumes from the checkpoint."""
    run = directory.read()
    with directory.locked():
        checkpoint = run.checkpoint()
        if fleet is None:
            fleet = run.fleet()
        # What is learnt and how can't change: other settings would be no way out.
        plans = plans_for(checkpoint, fleet, run.settings, replicas, suggest=False)
        prove_plans(checkpoint, plans)
        directory.write(run.settings, plans, trust_remote_code=run.trust_remote_code)


def resume(directory: RunDirectory) -> TuneResult:
    """Resume a run from its newest checkpoint.

    Raises
    ------
    TrainingError
        If a process failed; the last checkpoint is whole.
    UsageError
        If it is no directory of a run.
    """
    directory.read()  # before anything is written to what may be no directory of a run
    with _lock(directory):
        if torch.distributed.is_torchelastic_launched():
            return _in_ranks(directory, lambda: True)
        return _train(directory)


def _train(directory: RunDirectory) -> TuneResult:
    layout = Layout(directory.read().plans)
    directory.forget_failure()
    rendezvous, signals = Rendezvous(), list[int]()
    with WorkerGroup(
        "duoka.tuner",
        layout.world_size,
        [str(directory.path)],
        environment=rendezvous.environment,
    ) as workers:

        def stop(signum: int, frame: FrameType | None) -> None:
            """Ask the processes to save and leave; end them at the second signal."""
            if signals:
                workers.end()
            signals.append(signum)
            workers.terminate()

        with handle_signals(stop, (signal.SIGINT, signal.SIGTERM)):
            codes = workers.wait()
    # One that is asked to stop before it can hear of it just ends.
    if codes and not (signals and set(codes.values()) <= {-signal.SIGTERM, -signal.SIGKILL}):
        raise _failure(directory, layout, codes)
    return _finished(directory, signals[0] if signals else None)


def _finished(directory: RunDirectory, stopped_by: int | None = None) -> TuneResult:
    """Return the outcome of a run, and write its result unless it was stopped."""
    # What was noted may be of more steps than were saved, where a run was ended at once, or of
    # fewer, after a crash of the machine.
    steps = max(TrainingCheckpoints(directory.checkpoints, {}).steps, default=0)
    if stopped_by is not None:
        return TuneResult(directory=directory.path, steps=steps, stopped_by=stopped_by)
    run = directory.read()
    metrics = list(directory.read_metrics())
    has_steps = any("loss" in entry for entry in metrics)
    report = make_report(Layout(run.plans), metrics) if has_steps else None
    if report is not None:
        directory.write_report(asdict(report))
    result = _write_result(directory, run, steps)
    return TuneResult(directory=directory.path, steps=steps, result=result, report=report)


def _write_result(directory: RunDirectory, run: TuneJob, steps: int) -> Path:
    """Write the adapter or the model of the last checkpoint."""
    say("writing the result")
    checkpoint, workload, names = run.checkpoint(), run.plans[0].workload, run.settings.names
    trained = SavedParameters(TrainingCheckpoints(directory.checkpoints, {}).path(steps))
    training = workload.training
    assert training is not None, "the plan is for training"
    adapter = None
    if training.method == "lora":
        model = build_model(checkpoint, workload)
        prepare_for_training(model, workload)
        if (former_adapter := directory.read_first_adapter()) is not None:
            # For its scales, which needn't be whole numbers over ranks.
            fill_adapter(model, former_adapter)
        adapter = adapter_of(model, trained, base=checkpoint.name)
    is_merged = adapter is None or run.settings.merge
    name = "model" if is_merged else "adapter"
    with directory.new_result(name) as path:
        if adapter is None or is_merged:
            parameters = trained if adapter is None else None
            write_merged(path, checkpoint, adapter=adapter, parameters=parameters, names=names)
        else:
            write_adapter(path, adapter, checkpoint, names=names)
    return directory.path / name


def _failure(directory: RunDirectory, layout: Layout, codes: Mapping[int, int]) -> DuokaError:
    """Return the failure of a run: the noted error, or the exit code of a process."""
    stated = directory.failure()
    if stated is not None:
        return stated
    rank, code = min(codes.items(), key=lambda entry: entry[1])
    replica, device = layout.place(rank)
    name = f"the process of {device}" + (f" in replica {replica}" if len(layout.plans) > 1 else "")
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return TrainingError(
        f"{name} {ending}",
        hint=directory.way_on
        + (". SIGKILL often means that the machine ran out of memory" if code == -9 else ""),
    )
