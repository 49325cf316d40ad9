"""Processes that compute together over gloo, from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch.distributed.checkpoint", "duoka.tuner.checkpoints"]
_SECONDS = 120


def run_together(number: int, work: Callable[..., Any], store: Path, *arguments: Any) -> list[Any]:
    """What a function of an importable module returns in each process; `store` is a new file.

    One process alone has no process group.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results = context.SimpleQueue()
    started = [
        context.Process(target=_enter, args=(rank, number, store, results, work, arguments))
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
    by_rank = dict(results.get() for _ in range(number))
    errors = [value for value in by_rank.values() if isinstance(value, _Failure)]
    assert not errors, errors[0].text
    return [by_rank[rank] for rank in range(number)]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _enter(
    rank: int, number: int, store: Path, results: Any, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if number > 1:
            place = f"file://{store}"
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=number)
        results.put((rank, work(*arguments)))
        if number > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, _Failure(traceback.format_exc())))
