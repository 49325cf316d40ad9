"""Processes that compute together over gloo, from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch.distributed.checkpoint", "duoka.tuner.checkpoints", "duoka.tuner.trainer"]
_SECONDS = 120


def run_together(number: int, work: Callable[..., Any], store: Path, *arguments: Any) -> list[Any]:
    """What a function of an importable module returns in each process; `store` is a new file.

    One process alone has no process group. Results lie beside the store, in files: a pipe that
    nobody reads before the end holds few bytes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    started = [
        context.Process(target=_enter, args=(rank, number, store, work, arguments))
        for rank in range(number)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(_SECONDS)
    hanging = [process for process in started if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {number} processes hang"
    values = [pickle.loads(_result(store, rank).read_bytes()) for rank in range(number)]
    errors = [value for value in values if isinstance(value, _Failure)]
    assert not errors, errors[0].text
    return values


def _result(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.name}.{rank}")


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _enter(rank: int, number: int, store: Path, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    value: Any
    try:
        if number > 1:
            place = f"file://{store}"
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=number)
        value = work(*arguments)
    except BaseException:
        value = _Failure(traceback.format_exc())
    _result(store, rank).write_bytes(pickle.dumps(value))
    if dist.is_initialized() and not isinstance(value, _Failure):
        dist.barrier()
        dist.destroy_process_group()
