"""Run a fine-tuning: plan, prove, train in one process per GPU, and write result and report."""

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
from duoka.base.text import choose
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, TrainingError, UsageError
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import adapter_of, fill_adapter
from duoka.planner.plan import Plan
from duoka.runtime.prepare_training import prepare_for_training
from duoka.stages.rendezvous import Rendezvous
from duoka.workers.group import WorkerGroup
from duoka.workers.signals import handle_signals

from .checkpoints import SavedParameters, checkpoint_path, checkpoint_steps
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
        The directory of the run.
    steps : int
        Number of optimizer steps in the newest checkpoint; 0 if none was saved.
    stopped_by : int, optional
        The signal that stopped the run before its last step; the run can be resumed. None if the
        run was completed, or not started.
    result : Path, optional
        The directory of the adapter or merged checkpoint, of the best evaluation if the settings
        have early stopping, else of the last step. None if nothing was saved, and for a stopped run
        without an adapter, whose model `export_result` writes.
    result_step : int, optional
        The step of `result`.
    best : Path, optional
        The checkpoint with the best evaluation loss; None without evaluations.
    report : RunReport, optional
        Measurements beside the forecast; None if the run was not completed.
    """

    directory: Path
    steps: int
    stopped_by: int | None = None
    result: Path | None = None
    result_step: int | None = None
    best: Path | None = None
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
    """Fine-tune a model on all given GPUs, with one process per GPU.

    The run is planned and proved before a weight is read. The stages of a model work on different
    micro-batches at the same time (pipeline parallelism); if several replicas fit, they share the
    micro-batches of each step (data parallelism). Under torchrun every process calls this
    function, and only rank 0 returns the outcome of the run.

    Parameters
    ----------
    model : path, str or Checkpoint
        A directory with a published checkpoint, or a model's name on the Hub.
    data : str, path, or sequence of these
        Files or directories with training data.
    gpus : Fleet or str
        As for `plan`; all of them are used.
    save : path
        A new directory for the run: checkpoints, metrics, and the result.
    settings : TuneSettings
        Method, hyperparameters, and options of the run.
    replicas : int or "auto"
        Number of model replicas that share each step; "auto" is as many as fit.
    plan : Plan, optional
        A plan for training to use instead of planning.
    adapter : path, optional
        Directory of a LoRA adapter to continue training; its rank, scale and modules replace those
        of `settings`.
    show : callable, optional
        Called with the prepared run before it starts; if it returns False, the run isn't started.

    Raises
    ------
    InfeasibleError
        If the run doesn't fit on the GPUs, with suggestions.
    UsageError
        If options contradict each other, or rows of the data are invalid.
    TrainingError
        If training can't continue; the last checkpoint is intact.
    """
    directory = RunDirectory(Path(save))

    def begin() -> bool:
        """Prepare and write the run; return False if `show` declines."""
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
            return _train_under_torchrun(directory, begin)
        if not begin():
            return TuneResult(directory=directory.path, steps=0)
        try:
            return _train(directory)
        except DuokaError:
            directory.remove_unbegun()
            raise


def _lock(directory: RunDirectory) -> AbstractContextManager[None]:
    """Lock a run; under torchrun rank 0 holds the lock for all processes."""
    is_other = torch.distributed.is_torchelastic_launched() and os.environ["RANK"] != "0"
    return nullcontext() if is_other else directory.locked()


def _train_under_torchrun(directory: RunDirectory, begin: Callable[[], bool]) -> TuneResult:
    """Train in this process of torchrun's; rank 0 calls `begin` first."""

    def begin_once() -> None:
        # If torchrun restarts the processes after a failure, the written run is resumed.
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or not directory.is_written:
            begin()
        directory.forget_failure()

    is_first = os.environ["RANK"] == "0"
    is_complete = work(directory, begin_once if is_first else None)
    if not is_first:
        return TuneResult(directory=directory.path, steps=0)
    # torchrun sends SIGTERM to its processes for any signal that it gets.
    return _finish_run(directory, None if is_complete else signal.SIGTERM)


def move(
    directory: RunDirectory, fleet: Fleet | str | None, replicas: NumReplicas = "auto"
) -> None:
    """Plan a run again, for the GPUs of `fleet` or, if None, for its own; don't train yet."""
    run = directory.read()
    with directory.locked():
        checkpoint = run.checkpoint()
        if fleet is None:
            fleet = run.fleet()
        # The settings of a begun run can't change, so suggestions of other settings wouldn't help.
        plans = plans_for(checkpoint, fleet, run.settings, replicas, suggest=False)
        prove_plans(checkpoint, plans)
        directory.write(run.settings, plans, trust_remote_code=run.trust_remote_code)


def resume(directory: RunDirectory) -> TuneResult:
    """Resume a run from its newest checkpoint.

    Raises
    ------
    TrainingError
        If a process failed; the last checkpoint is intact.
    UsageError
        If `directory` is not the directory of a run.
    """
    directory.read()  # refuses another directory before the lock is written to it
    with _lock(directory):
        if torch.distributed.is_torchelastic_launched():
            return _train_under_torchrun(directory, lambda: True)
        return _train(directory)


def _train(directory: RunDirectory) -> TuneResult:
    """Start a process for each GPU, wait until all have ended, and write the result."""
    layout = Layout(directory.read().plans)
    directory.forget_failure()
    rendezvous, signals = Rendezvous(), list[int]()
    with WorkerGroup(
        "duoka.tuner", layout.world_size, [str(directory.path)], environment=rendezvous.environment
    ) as workers:

        def stop(signum: int, frame: FrameType | None) -> None:
            """Ask the processes to save a checkpoint and exit; kill them at a second signal."""
            if signals:
                workers.end()
            signals.append(signum)
            workers.terminate()

        with handle_signals(stop, (signal.SIGINT, signal.SIGTERM)):
            codes = workers.wait()
    # A process that gets SIGTERM before it handles the signal is ended by the signal: no failure.
    if codes and not (signals and set(codes.values()) <= {-signal.SIGTERM, -signal.SIGKILL}):
        raise _find_failure(directory, layout, codes)
    # A signal to one of the processes, rather than to this one, stops all of them after a step.
    signals += [signal.SIGTERM for it in [*directory.read_metrics()][-1:] if it.get("stops")]
    return _finish_run(directory, signals[0] if signals else None)


def _finish_run(directory: RunDirectory, stopped_by: int | None = None) -> TuneResult:
    """Return the outcome of a run; write report and result of a completed run."""
    # Steps are counted by checkpoints, not by metrics: a killed run may have metrics of unsaved
    # steps, and after a crash of the machine the last metrics may be lost.
    steps = max(checkpoint_steps(directory.checkpoints), default=0)
    run, best = directory.read(), directory.best_step()
    report = result = step = None
    if stopped_by is None:
        metrics = list(directory.read_metrics())
        has_steps = any("loss" in entry for entry in metrics)
        report = make_report(Layout(run.plans), metrics) if has_steps else None
        if report is not None:
            directory.write_report(asdict(report))
    # Merging takes too long for a process that is asked to stop.
    if stopped_by is None or (steps and run.settings.method != "full"):
        step = steps if best is None or run.settings.early_stopping is None else best
        result = _write_result(directory, run, step, merge=run.settings.merge and not stopped_by)
    return TuneResult(
        directory=directory.path,
        steps=steps,
        stopped_by=stopped_by,
        result=result,
        result_step=step,
        best=None if best is None else checkpoint_path(directory.checkpoints, best),
        report=report,
    )


def export_result(path: str | os.PathLike[str], *, merge: bool = False) -> Path:
    """Write the adapter or merged model of a run's checkpoint, also while the run goes on.

    Parameters
    ----------
    path : path
        The directory of a run, for its newest checkpoint, or one of its checkpoints.
    merge : bool
        Merge the adapter into a copy of the model's checkpoint.

    Returns
    -------
    Path
        ``adapter`` or ``model`` in the run's directory, for a given checkpoint with its name, as in
        ``adapter-step-000100``.

    Raises
    ------
    UsageError
        If the path is neither a run nor a checkpoint of one, or nothing was saved yet.
    CheckpointError
        If the checkpoint is damaged.
    """
    absolute = Path(path).resolve()  # also of the link "best"
    directory, name = RunDirectory(Path(path)), ""
    if not directory.is_written and absolute.parent.name == directory.checkpoints.name:
        directory, name = RunDirectory(absolute.parent.parent), absolute.name
    run = directory.read()
    steps = checkpoint_steps(directory.checkpoints)
    if not steps:
        raise UsageError(f"{directory.path} has no checkpoint yet", hint="wait for its first one")
    names = [checkpoint_path(directory.checkpoints, step).name for step in steps]
    step = steps[names.index(choose("the checkpoint", name or names[-1], names))]
    return _write_result(directory, run, step, merge=merge, suffix=f"-{name}" if name else "")


def _write_result(
    directory: RunDirectory, run: TuneJob, step: int, *, merge: bool, suffix: str = ""
) -> Path:
    """Write the adapter or the merged model of a checkpoint; return its directory."""
    say("writing the result")
    checkpoint, workload = run.checkpoint(), run.plans[0].workload
    trained = SavedParameters(checkpoint_path(directory.checkpoints, step))
    training = workload.training
    assert training is not None, "the plan is for training"
    adapter = None
    if training.method == "lora":
        model = build_model(checkpoint, workload)
        prepare_for_training(model, workload)
        if (former_adapter := directory.read_first_adapter()) is not None:
            # Take over the adapter's scaling: lora_alpha of the plan is rounded to an integer.
            fill_adapter(model, former_adapter)
        adapter = adapter_of(model, trained, base=checkpoint.name)
    is_merged = adapter is None or merge
    name = ("model" if is_merged else "adapter") + suffix
    with directory.new_result(name) as path:
        if adapter is None or is_merged:
            parameters = trained if adapter is None else None
            write_merged(path, checkpoint, adapter=adapter, parameters=parameters)
        else:
            write_adapter(path, adapter, checkpoint, names="original")
    return directory.path / name


def _find_failure(directory: RunDirectory, layout: Layout, codes: Mapping[int, int]) -> DuokaError:
    """Return the error of a run: the error written by a process, or else an exit code."""
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
