"""Giving back what a load took on the devices: all of it when it fails, what it made on the way."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from duoka.errors import LoadError


@contextmanager
def nothing_left(
    devices: Collection[torch.device], undo: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold no memory on the devices when what is done in here fails or is interrupted."""
    try:
        yield
    except BaseException as error:  # an interrupt must not leave half a model on the devices
        if undo is not None:
            undo()
        _forget_locals(error)
        _empty_caches(devices)
        if isinstance(error, torch.OutOfMemoryError):
            raise LoadError(
                f"the weights don't fit: {error}",
                hint="something else uses the memory that the plan counted on",
            ) from error
        raise
    _empty_caches(devices)


def _forget_locals(error: BaseException | None) -> None:
    """Free the tensors that the frames of an error refer to: who handles it may keep it long."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _empty_caches(devices: Collection[torch.device]) -> None:
    """Give back what conversions took on the way."""
    for kind in sorted({device.type for device in devices} - {"cpu", "meta"}):
        backend: Any = torch.get_device_module(kind)
        backend.empty_cache()
