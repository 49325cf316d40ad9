"""A checkpoint's own model code: built from where it lies, and where it stopped if it can't run."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from duoka import models
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import ModelError
from duoka.forecast.workload import Dtype
from duoka.report.check_report import Place, Stop


def build_own(checkpoint: Checkpoint, dtype: Dtype) -> PreTrainedModel:
    """Build a model from the code that came with it, even where its architecture is known.

    The code names the checkpoint's files, so that faults in it are told, and repaired, there.
    """
    files = {file.name: file.content for file in checkpoint.code}
    load = partial(models.import_class, directory=checkpoint.path, files=files)
    return models.build(checkpoint.config, dtype=getattr(torch, dtype), own_code=load)


def stop_of(checkpoint: Checkpoint, error: ModelError, phase: str) -> Stop | None:
    """Where a checkpoint's code stopped; None if what failed wasn't its code."""
    cause = error.__cause__
    if cause is None:
        return None
    return Stop(
        message=f"{type(cause).__name__}: {cause}",
        place=_last_line(checkpoint, cause),
        phase=phase,
        hint=native_hint(checkpoint),
    )


def native_hint(checkpoint: Checkpoint) -> str:
    """What to do where a checkpoint's own code can't run."""
    model_type = checkpoint.config.get("model_type")
    if models.is_served(model_type):
        return (
            f"duoka serves model_type {model_type!r} with code that it has: "
            "leave out --trust-remote-code"
        )
    return "the code was written for other versions of its libraries: look at that call"


def _last_line(checkpoint: Checkpoint, error: BaseException) -> Place | None:
    """The innermost line of the checkpoint's code that an error went through."""
    own = {str((checkpoint.path / file.name).absolute()) for file in checkpoint.code}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if str(Path(frame.filename).absolute()) in own:
            return Place(
                file=frame.filename,
                line=frame.lineno or 1,
                column=frame.colno or 0,
                end_line=frame.end_lineno or frame.lineno or 1,
                end_column=frame.end_colno or 0,
                text=frame.line or "",
                function=frame.name,
            )
    return None
