"""Parallel: several requests at once, which nobody waits for after Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def at_once(action: Callable[[str], T], names: Sequence[str], *, most: int) -> dict[str, T]:
    """Do something for several names, in up to so many threads.

    Unlike those of `concurrent.futures`, these threads don't keep the process from ending: a
    request that isn't answered would hold it up for as long as it is tried again.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    results: dict[str, Future[T]] = {name: Future() for name in names}
    for name in results:
        waiting.put(name)

    def work() -> None:
        with suppress(Empty):
            while True:
                name = waiting.get_nowait()
                try:
                    results[name].set_result(action(name))
                except BaseException as error:
                    results[name].set_exception(error)
                    # Those before it have begun, and those after it are of no use.
                    _drain(waiting)

    for _ in range(min(most, len(results))):
        Thread(target=work, daemon=True).start()
    try:
        return {name: result.result() for name, result in results.items()}
    except BaseException:
        _drain(waiting)
        raise


def _drain(waiting: SimpleQueue[str]) -> None:
    with suppress(Empty):
        while True:
            waiting.get_nowait()
