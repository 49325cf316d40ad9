"""What runs on virtual GPUs by itself: results and errors come back."""

from __future__ import annotations

import _ctypes
import ctypes
import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from duoka import virtual
from duoka.errors import VirtualDeviceError
from duoka.virtual import UnknownValueError
from duoka.virtual.apart import in_fork
from duoka.virtual.known_values import unknown_value


def test_backward_works_there_after_it_has_here() -> None:
    def run() -> list[float]:
        with virtual.unnamed_gpus([None]):
            x = torch.ones(3, device=virtual.virtual_device(0), requires_grad=True)
            (2 * x).sum().backward()
            assert x.grad is not None
            return list(x.grad.tolist())

    torch.ones(2, requires_grad=True).sum().backward()
    assert virtual.apart(run) == [2.0] * 3
    assert virtual.apart(run) == [2.0] * 3


def test_an_unknown_value_is_one_on_this_side_too() -> None:
    def fail() -> None:
        raise unknown_value("a read")

    with pytest.raises(UnknownValueError, match=r"a read depends on .*\.py:\d+\)") as caught:
        virtual.apart(fail)
    assert f"({__file__}:" in str(caught.value)
    assert "real numbers" in str(caught.value.hint)


class Attempts:
    """Counts, over processes, how often something was tried."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self) -> int:
        with self.path.open("a") as file:
            file.write("x")
        return len(self.path.read_text())


@pytest.fixture
def lock() -> Iterator[Any]:
    """A lock that another thread holds."""
    held, is_taken, is_over = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            is_taken.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_taken.wait()
    yield held
    is_over.set()
    thread.join()


def test_a_fork_that_waits_for_a_lost_lock_is_made_again(lock: Any, tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts")

    def run() -> str:
        if attempts.count() == 1:
            lock.acquire()  # of a thread that isn't in the fork
        return "done"

    assert in_fork(run, patience_seconds=2) == "done"
    assert attempts.count() == 3


def test_one_that_always_waits_is_an_error(lock: Any, tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts")

    def run() -> None:
        attempts.count()
        lock.acquire()

    with pytest.raises(VirtualDeviceError, match="made no progress for 2 seconds, twice"):
        in_fork(run, patience_seconds=2)
    assert attempts.count() == 3


def test_work_and_processes_of_its_own_are_waited_for(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts")

    def run() -> int:
        attempts.count()
        subprocess.run(["sleep", "3"], check=True)
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            math.factorial(1000)
        return 7

    assert in_fork(run, patience_seconds=2) == 7
    assert attempts.count() == 2


@pytest.mark.slow
def test_forks_while_other_threads_work() -> None:
    """OpenMP's threads, malloc, autograd, logging and libraries that are loaded meanwhile."""
    is_over = threading.Event()
    ones, log = torch.ones(300, 300), logging.getLogger("forks")
    weight = torch.ones(1000, requires_grad=True)
    log.addHandler(logging.NullHandler())
    log.propagate = False  # pytest writes to a file, whose buffer's lock would be lost

    def load() -> None:
        _ctypes.dlclose(ctypes.CDLL("libutil.so.1")._handle)

    def repeat(work: Callable[[], object]) -> None:
        while not is_over.is_set():
            work()

    works: list[Callable[[], object]] = [
        lambda: (ones @ ones).sum(),
        lambda: [bytearray(1000 * size) for size in range(60)],
        lambda: log.warning("working"),
        load,
        lambda: (weight * weight).sum().backward(),
    ]
    workers = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for worker in workers:
        worker.start()

    def run() -> float:
        for work in works[:-1]:  # no backward in forks of a process that has done it on a GPU
            work()
        return float((ones @ ones).sum())

    try:
        assert [in_fork(run) for _ in range(20)] == [300.0**3] * 20
    finally:
        is_over.set()
        for worker in workers:
            worker.join()
