"""Errors of writing files, with the name of the file and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from duoka.base.files import why
from duoka.errors import MachineError


@contextmanager
def name_write_errors(what: object, hint: str) -> Iterator[None]:
    """Convert an error of writing `what` into a MachineError with the hint."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        reason = first_failure(error) if isinstance(error, CheckpointException) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise reason from error
        text = why(reason) if isinstance(reason, OSError) else reason
        raise MachineError(f"{what} can't be written: {text}", hint=hint) from error


def first_failure(error: CheckpointException) -> BaseException:
    """Return the failure of the first failed process in a distributed checkpoint operation."""
    return next(iter(error.failures.values()))[0]
