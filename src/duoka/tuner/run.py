"""The directory of a run: the job of its processes, metrics, checkpoints and the result.

- ``run.json``: settings and plans; ``samples.safetensors``: the training samples;
  ``first-adapter/``: the adapter that training starts from, if any
- ``metrics.jsonl``, ``tensorboard/``: metrics of each step; ``samples.jsonl``: answers to the
  evaluation prompts; ``checkpoints/``: to resume the run
- ``adapter/`` or ``model/``: the result; ``report.json``: forecast and measurement
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

from duoka.base.files import read_text, reading, write_whole
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, FormatError, UsageError
from duoka.hardware.fleet import Fleet
from duoka.models.lora import LoraAdapter
from duoka.planner.plan import Plan
from duoka.runtime.load.adapter import read_adapter

from .checkpoints import checkpoint_steps
from .settings import TuneSettings
from .write_errors import name_write_errors

_FORMAT = "duoka.run"
_VERSION = 1
_MOST_BYTES = 2**28
_MOST_OWNER_CHARACTERS = 100
_NEW_RUN = "start a new run in another directory"
_WRITE_HINT = "free disk space or get the permission; then continue with --resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The job of the processes of a run: settings, and the plan of each replica."""

    settings: TuneSettings
    plans: tuple[Plan, ...]
    trust_remote_code: bool = False

    def fleet(self) -> Fleet:
        """Return the GPUs of all replicas as a fleet."""
        devices = {device.name: device for plan in self.plans for device in plan.fleet.devices}
        links = dict.fromkeys(link for plan in self.plans for link in plan.fleet.links)
        return Fleet(devices=tuple(devices.values()), links=tuple(links))

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint; refuse a checkpoint other than the plans were made for."""
        plan = self.plans[0]
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=self.trust_remote_code)
        plan.refuse_other(checkpoint.fingerprint, plan.source)
        return checkpoint


class RunDirectory:
    """The files of a run.

    `first_adapter` has the adapter, in native form, that training starts from, if any; `metrics`
    has a line with a JSON object for each step and evaluation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = path / "samples.safetensors"
        self.eval_samples = path / "eval-samples.safetensors"
        self.eval_prompts = path / "eval-prompts.safetensors"
        self.first_adapter = path / "first-adapter"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.answers = path / "samples.jsonl"
        self.tensorboard = path / "tensorboard"
        self._run = path / "run.json"
        self._failure = path / ".failure.json"
        self._lock = path / ".lock"

    @property
    def is_written(self) -> bool:
        """True if ``run.json`` exists."""
        return self._run.is_file()

    @property
    def way_on(self) -> str:
        """The hint for continuing the run after a failure."""
        if any(self.checkpoints.glob("step-*")):
            return (
                "the last checkpoint is intact: continue from it with --resume, or get its result "
                f"with `duoka tune --export {self.path}`"
            )
        return (
            "nothing was saved: start again with --resume, or with the same command if no step "
            "was made"
        )

    def refuse_used(self) -> None:
        """Raise UsageError if the directory exists and contains anything but the lock."""
        if self.path.exists() and (not self.path.is_dir() or {*self.path.iterdir()} - {self._lock}):
            raise UsageError(
                f"{self.path} already exists",
                hint="give a new directory, or continue its run with --resume",
            )

    def write(
        self, settings: TuneSettings, plans: tuple[Plan, ...], *, trust_remote_code: bool
    ) -> None:
        """Write settings and plans to ``run.json``."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "settings": to_dict(settings),
            "trust_remote_code": trust_remote_code,
            "plans": [json.loads(plan.lasting().to_json()) for plan in plans],
        }
        _write(self._run, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def remove_unbegun(self) -> None:
        """Remove the files of a run without a step, to let the same command start the run again."""
        if any(self.read_metrics()) or any(self.checkpoints.glob("*")):
            return
        data = self.samples, self.eval_samples, self.eval_prompts
        for path in (self._run, *data, self.metrics, self.answers, self._failure):
            path.unlink(missing_ok=True)
        for name in (self.tensorboard.name, self.first_adapter.name, "wandb", "swanlab"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in (self.checkpoints, self.path):
            with suppress(OSError):  # the directory is missing, or contains other files
                path.rmdir()

    def read(self) -> TuneJob:
        """Read settings and plans from ``run.json``.

        Raises
        ------
        UsageError
            If the directory is not the directory of a run.
        FormatError
            If ``run.json`` is damaged, or of another version.
        """
        if not self.is_written:
            raise UsageError(
                f"{self.path} is not the directory of a run",
                hint="give the directory of `duoka tune --save`",
            )
        with reading(self._run, _NEW_RUN, FormatError):
            text = read_text(self._run, most_bytes=_MOST_BYTES)
        content = parse_json_object(text, str(self._run))
        try:
            if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
                raise FormatError("it is damaged, or was written by another version of duoka")
            plans = tuple(Plan.from_json(json.dumps(plan)) for plan in content.get("plans") or ())
            if not plans or any(plan.workload.training is None for plan in plans):
                raise FormatError("it has no plan, or one that isn't for training")
            settings = from_dict(TuneSettings, content.get("settings"))
        except (TypeError, FormatError) as error:
            raise FormatError(f"{self._run}: {error}", hint=_NEW_RUN) from error
        trusts = content.get("trust_remote_code") is True
        return TuneJob(settings=settings, plans=plans, trust_remote_code=trusts)

    @contextmanager
    def new_result(self, name: str) -> Iterator[Path]:
        """Yield a temporary path for a result; on success the result replaces an earlier result."""
        path, place, old = (self.path / f"{prefix}{name}" for prefix in ("", ".new-", ".old-"))
        with name_write_errors(path, _WRITE_HINT):
            if old.exists() and not path.exists():  # killed between the two renames below
                old.rename(path)
        for leftover in (place, old):  # left by a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        yield place
        with name_write_errors(path, _WRITE_HINT):
            if path.exists():
                path.rename(old)
            place.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against training or moving by other processes.

        The system releases the lock of a process that ends.

        Raises
        ------
        UsageError
            If another process has the lock.
        """
        is_new = not self.path.is_dir()
        if is_new:
            self.refuse_used()
        with name_write_errors(self._lock, _WRITE_HINT):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a+", encoding="utf-8")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read(_MOST_OWNER_CHARACTERS)
                raise UsageError(
                    f"{self.path} is in use by {owner}",
                    hint="wait until its run has ended, end it, or use another directory",
                ) from None
            except OSError:
                pass  # the file system doesn't support locks
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            try:
                yield
            finally:
                if is_new and [*self.path.iterdir()] == [self._lock]:
                    shutil.rmtree(self.path, ignore_errors=True)  # no run was written

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Write the report of measured and forecast memory."""
        _write(self.path / "report.json", json.dumps(report, indent=1) + "\n")

    def read_first_adapter(self) -> LoraAdapter | None:
        """Read the adapter to start training from; None for new adapters."""
        return read_adapter(self.first_adapter) if self.first_adapter.is_dir() else None

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step or an evaluation to ``metrics.jsonl``."""
        with (
            name_write_errors(self.metrics, _WRITE_HINT),
            self.metrics.open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(metrics) + "\n")

    def forget_after(self, step: int) -> None:
        """Remove the metrics of steps after `step`: a resumed run repeats these steps."""
        lines = [json.dumps(entry) for entry in self.read_metrics() if entry["step"] <= step]
        _write(self.metrics, "".join(f"{line}\n" for line in lines))
        self.write_answers()

    def write_answers(self) -> None:
        """Write the answers of all evaluations, which the metrics have, to ``samples.jsonl``."""
        answers = [(e["step"], it) for e in self.read_metrics() for it in e.get("samples", ())]
        lines = (json.dumps({"step": at, **it}, ensure_ascii=False) for at, it in answers)
        if answers or self.answers.exists():
            _write(self.answers, "".join(f"{line}\n" for line in lines))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics so far; skip an incomplete line of a killed process."""
        if self.metrics.is_file():
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                        yield entry

    def read_evaluations(self) -> dict[int, float]:
        """Read the evaluation losses, by step in order; infinite if not a number."""
        losses = {e["step"]: e["eval_loss"] for e in self.read_metrics() if "eval_loss" in e}
        return {step: inf if isnan(loss) else loss for step, loss in losses.items()}

    def best_step(self) -> int | None:
        """Return the step with the lowest evaluation loss of those that have a checkpoint."""
        losses, saved = self.read_evaluations(), checkpoint_steps(self.checkpoints)
        return min((step for step in saved if step in losses), key=losses.__getitem__, default=None)

    def fail(self, error: DuokaError) -> bool:
        """Write the failure of a process to a file; return False if another process did before."""
        content = {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        try:
            descriptor = os.open(self._failure, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        except OSError:
            return True  # the directory doesn't exist yet, or is not writable
        with suppress(OSError), os.fdopen(descriptor, "w") as file:  # the disk may be full
            json.dump(content, file)
        return True

    def forget_failure(self) -> None:
        """Remove the failure written by `fail`."""
        self._failure.unlink(missing_ok=True)

    def failure(self) -> DuokaError | None:
        """Return the failure written by the first failed process; None if there is no failure."""
        with suppress(OSError, ValueError, FormatError, KeyError):
            content = parse_json_object(read_text(self._failure, most_bytes=_MOST_BYTES), "it")
            error = DuokaError(content["message"], hint=content["hint"])
            error.exit_code = content["exit_code"]
            return error
        return None


def _write(path: Path, text: str) -> None:
    """Write a whole file; raise MachineError with a hint on failure."""
    with name_write_errors(path, _WRITE_HINT):
        write_whole(path, text)
