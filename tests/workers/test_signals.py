from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from duoka.workers.signals import handle_signals

SIGNUMS = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    handlers = [
        signal.signal(SIGNUMS[0], signal.SIG_DFL),
        signal.signal(SIGNUMS[1], signal.SIG_IGN),
    ]
    yield
    for signum, handler in zip(SIGNUMS, handlers, strict=True):
        signal.signal(signum, handler)


def test_signals_are_handled_in_the_scope_but_for_ignored_ones() -> None:
    came: list[int] = []
    with handle_signals(lambda signum, frame: came.append(signum), SIGNUMS):
        for signum in SIGNUMS:
            os.kill(os.getpid(), signum)
    assert came == [signal.SIGUSR1]
    assert [signal.getsignal(signum) for signum in SIGNUMS] == [signal.SIG_DFL, signal.SIG_IGN]


def test_other_threads_leave_signals_alone() -> None:
    seen: list[object] = []

    def run() -> None:
        with handle_signals(lambda *_: None, SIGNUMS):
            seen.append(signal.getsignal(SIGNUMS[0]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
