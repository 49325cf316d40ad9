"""The directory of a run: the job of its processes, their notes, and the files.

- ``run.json``: settings and plans; ``samples.safetensors``: what is learnt from;
  ``first-adapter/``: what it starts from, if that is an adapter
- ``metrics.jsonl``, ``tensorboard/``: each step; ``checkpoints/``: what the run can go on from
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
from pathlib import Path
from typing import Any

from duoka.base.files import read_text, why, write_whole
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, FormatError, UsageError
from duoka.hardware.fleet import Fleet
from duoka.models.lora import LoraAdapter
from duoka.planner.plan import Plan
from duoka.runtime.load.adapter import read_adapter

from .settings import TuneSettings
from .write_errors import name_write_errors

_FORMAT = "duoka.run"
_VERSION = 1
_MOST_BYTES = 2**28
_MOST_OWNER_CHARACTERS = 100
_ANEW = "start a new run in another directory"
_ROOM = "free disk space or get the permission; then continue with --resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The job of the processes of a run."""

    settings: TuneSettings
    plans: tuple[Plan, ...]
    trust_remote_code: bool = False

    def fleet(self) -> Fleet:
        """The GPUs of all replicas."""
        devices = {device.name: device for plan in self.plans for device in plan.fleet.devices}
        links = dict.fromkeys(link for plan in self.plans for link in plan.fleet.links)
        return Fleet(devices=tuple(devices.values()), links=tuple(links))

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint, and make sure that the plans were made for its model."""
        plan = self.plans[0]
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=self.trust_remote_code)
        plan.refuse_other(checkpoint.fingerprint, plan.source)
        return checkpoint


class RunDirectory:
    """The files of a run.

    `first_adapter` is the adapter at the start of the run, in native form, if any; `metrics` has a
    JSON object for each step and evaluation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = path / "samples.safetensors"
        self.eval_samples = path / "eval-samples.safetensors"
        self.first_adapter = path / "first-adapter"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self._run = path / "run.json"
        self._failure = path / ".failure.json"
        self._lock = path / ".lock"

    @property
    def is_written(self) -> bool:
        """True if the job is written."""
        return self._run.is_file()

    @property
    def way_on(self) -> str:
        """The hint after a failure."""
        if any(self.checkpoints.glob("step-*")):
            return "the last checkpoint is intact: continue from it with --resume"
        return (
            "nothing was saved: start again with --resume, or with the same command if no step "
            "was made"
        )

    def refuse_used(self) -> None:
        """Raise UsageError where there is something already."""
        if self.path.exists() and (not self.path.is_dir() or {*self.path.iterdir()} - {self._lock}):
            raise UsageError(
                f"{self.path} already exists",
                hint="give a new directory, or continue its run with --resume",
            )

    def write(
        self, settings: TuneSettings, plans: tuple[Plan, ...], *, trust_remote_code: bool
    ) -> None:
        """Write the job of the processes."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "settings": to_dict(settings),
            "trust_remote_code": trust_remote_code,
            "plans": [json.loads(plan.lasting().to_json()) for plan in plans],
        }
        _write(self._run, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def remove_unbegun(self) -> None:
        """Remove a run without a step, so that the same command can begin again."""
        if any(self.read_metrics()) or any(self.checkpoints.glob("*")):
            return
        files = (self._run, self.samples, self.eval_samples, self.metrics, self._failure)
        for path in files:
            path.unlink(missing_ok=True)
        for path in (self.tensorboard, self.first_adapter):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.checkpoints, self.path):
            with suppress(OSError):  # it isn't there, or something else lies in it
                path.rmdir()

    def read(self) -> TuneJob:
        """Read the job of the processes.

        Raises
        ------
        UsageError
            If this is no directory of a run.
        FormatError
            If it is damaged, or of another version.
        """
        if not self.is_written:
            raise UsageError(
                f"{self.path} is not the directory of a run",
                hint="give the directory of `duoka tune --save`",
            )
        try:
            text = read_text(self._run, most_bytes=_MOST_BYTES)
        except (OSError, ValueError) as error:
            raise FormatError(f"{self._run} can't be read: {why(error)}", hint=_ANEW) from error
        content = parse_json_object(text, str(self._run))
        try:
            if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
                raise FormatError("it is damaged, or was written by another version of duoka")
            plans = tuple(Plan.from_json(json.dumps(plan)) for plan in content.get("plans") or ())
            if not plans or any(plan.workload.training is None for plan in plans):
                raise FormatError("it has no plan, or one that isn't for training")
            settings = from_dict(TuneSettings, content.get("settings"))
        except (TypeError, FormatError) as error:
            raise FormatError(f"{self._run}: {error}", hint=_ANEW) from error
        trusts = content.get("trust_remote_code") is True
        return TuneJob(settings=settings, plans=plans, trust_remote_code=trusts)

    @contextmanager
    def new_result(self, name: str) -> Iterator[Path]:
        """Yield the path of a new result, which replaces an earlier one at the end."""
        path, place, old = (self.path / f"{prefix}{name}" for prefix in ("", ".new-", ".old-"))
        with name_write_errors(path, _ROOM):
            if old.exists() and not path.exists():  # killed between the two renames below
                old.rename(path)
        for leftover in (place, old):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        yield place
        with name_write_errors(path, _ROOM):
            if path.exists():
                path.rename(old)
            place.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training or moving the run; the system ends a lost lock.

        Raises
        ------
        UsageError
            If another process has it.
        """
        is_new = not self.path.is_dir()
        if is_new:
            self.refuse_used()
        with name_write_errors(self._lock, _ROOM):
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
                pass  # not every file system has locks
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            try:
                yield
            finally:
                if is_new and [*self.path.iterdir()] == [self._lock]:
                    shutil.rmtree(self.path, ignore_errors=True)  # nothing came of it

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Write the report of measured and forecast memory."""
        _write(self.path / "report.json", json.dumps(report, indent=1) + "\n")

    def read_first_adapter(self) -> LoraAdapter | None:
        """Read the adapter at the start of the run, if any."""
        return read_adapter(self.first_adapter) if self.first_adapter.is_dir() else None

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        with (
            name_write_errors(self.metrics, _ROOM),
            self.metrics.open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(metrics) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the metrics of later steps, which a resumed run repeats."""
        lines = [json.dumps(entry) for entry in self.read_metrics() if entry["step"] <= step]
        _write(self.metrics, "".join(f"{line}\n" for line in lines))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics so far; the incomplete line of a killed process is skipped."""
        if self.metrics.is_file():
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                        yield entry

    def fail(self, error: DuokaError) -> bool:
        """Note the failure of a process; return False if another process has failed before."""
        content = {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        try:
            descriptor = os.open(self._failure, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        except OSError:
            return True  # there is no directory yet, or none that can be written to
        with suppress(OSError), os.fdopen(descriptor, "w") as file:  # the disk may be full
            json.dump(content, file)
        return True

    def forget_failure(self) -> None:
        """Remove the noted failure."""
        self._failure.unlink(missing_ok=True)

    def failure(self) -> DuokaError | None:
        """Return the first noted failure, if any."""
        with suppress(OSError, ValueError, FormatError, KeyError):
            content = parse_json_object(read_text(self._failure, most_bytes=_MOST_BYTES), "it")
            error = DuokaError(content["message"], hint=content["hint"])
            error.exit_code = content["exit_code"]
            return error
        return None


def _write(path: Path, text: str) -> None:
    with name_write_errors(path, _ROOM):
        write_whole(path, text)
