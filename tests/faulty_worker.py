"""A process of an engine in which some tokens do harm."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from duoka.engine import stage_worker
from duoka.runtime.call.paged_model import PagedModel

# By the process in which they do.
RAISE = (11, 12)
MEMORY = (13, 14)
HANG = 16
LOSE = (17, 18)
HARMFUL = (*RAISE, *MEMORY, HANG, *LOSE)
_MOST_TOKENS = 3

call = PagedModel.call


def harm(self: PagedModel, step: Any, device: torch.device) -> Any:
    """Call the model, unless such a token is there."""
    rank = int(os.environ["RANK"])
    tokens = [token for chunk in step.chunks for token in chunk.tokens]
    if MEMORY[rank] in tokens and len(tokens) > _MOST_TOKENS:
        raise torch.OutOfMemoryError("CUDA out of memory")
    if HANG in tokens and rank == 1:
        time.sleep(600)
    if LOSE[rank] in tokens:
        return _lose
    return _raise if RAISE[rank] in tokens else call(self, step, device)


def _raise() -> Any:
    raise RuntimeError("a kernel failed")


def _lose() -> Any:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand advice")


def _load_stopped(driver: Any) -> None:
    """Be stopped by somebody while weights are loaded."""
    load = stage_worker.load_weights

    def load_weights(*arguments: Any, **options: Any) -> None:
        time.sleep(1.0)  # signs of life have been shown
        os.kill(os.getpid(), signal.SIGSTOP)
        load(*arguments, **options)

    stage_worker.load_weights = load_weights  # type: ignore[assignment]
    serve(driver)


serve = stage_worker._serve

if __name__ == "__main__":
    if os.environ.get("STOPPED_IN_LOAD") == os.environ["RANK"]:
        stage_worker._serve = _load_stopped
    PagedModel.call = harm  # type: ignore[method-assign]
    stage_worker.main()
