"""An engine in a process of its own, as the server has it: started, asked, and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from duoka.stages.workers import describe_end

from .errors import HttpError
from .messages import (
    LENGTH_BYTES,
    Ask,
    Begin,
    Broken,
    Cancel,
    Count,
    Counted,
    Ended,
    Event,
    Failed,
    Look,
    Ready,
    Spell,
    Status,
    length,
    packed,
)

_LOG = logging.getLogger(__name__)
State = Literal["starting", "ready", "restarting", "failed"]
_LOOK_SECONDS = 0.5
# Whoever answers does nothing else, needs what other threads have for a second at most, and is
# waited for much longer: a machine that swaps is slow, and not dead.
_SILENT_SECONDS = 60.0
_MOST_DEATHS = 3
_DEATHS_SECONDS = 600.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0
_GRACE_SECONDS = 5.0
_MOST_COUNTS = 64
_RETRY_SECONDS = 5


class EngineClient:
    """One engine; `run` keeps its process there, until it ends too often or can't begin.

    Parameters
    ----------
    begin : Begin
    replica : int
        Which one it is, of those that the server has.
    """

    _program = (sys.executable, "-m", "duoka.serve")

    def __init__(self, begin: Begin, replica: int = 0) -> None:
        self.begin = begin
        self.replica = replica
        self.state: State = "starting"
        self.reason: str | None = None
        self.exit_code = 1
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.num_deaths = 0
        self.busy_shares: dict[str, float] = {}
        self._told_at = 0.0
        # Whether a status was asked for that hasn't come, and why it was ended, where it was.
        self._is_looked_at = False
        self._hang: Broken | None = None
        self.changed = asyncio.Event()
        # What is asked and not ended, with how much it may take.
        self._open: dict[int, asyncio.Queue[Event]] = {}
        self._tokens: dict[int, int] = {}
        self._numbers = count()
        self._num_counts = 0
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def open_tokens(self) -> int:
        """How many tokens those may take."""
        return sum(self._tokens.values())

    async def run(self) -> None:
        """Keep a process there."""
        wait = _FIRST_WAIT_SECONDS
        try:
            while True:
                begun = time.monotonic()
                broken = await self._live()
                await self._lose(broken)
                if broken is not None and self.state == "starting":
                    return self._set("failed", broken.text)
                self._deaths.append(time.monotonic())
                self.num_deaths += 1
                _LOG.error("engine %d has ended: %s", self.replica, self.reason)
                is_full = len(self._deaths) == _MOST_DEATHS
                if is_full and self._deaths[-1] - self._deaths[0] < _DEATHS_SECONDS:
                    text = f"it has ended {_MOST_DEATHS} times within ten minutes"
                    return self._set("failed", f"{text}; the last time: {self.reason}")
                if time.monotonic() - begun > _DEATHS_SECONDS:
                    wait = _FIRST_WAIT_SECONDS
                self._set("restarting", self.reason)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        finally:
            if self._process is not None:
                await self._lose(Broken("the server was stopped"))

    async def ask(self, ask: Ask, tokens: int) -> AsyncGenerator[Event, None]:
        """What comes of a request that may take so many tokens.

        Raises
        ------
        HttpError
            If it can't be answered.
        """
        number = next(self._numbers)
        queue = self._submit(number, replace(ask, number=number), tokens)
        left = ask.n
        try:
            while left:
                event = await queue.get()
                if isinstance(event, Failed):
                    raise _error_of(event)
                left -= isinstance(event, Ended)
                yield event
        finally:
            del self._open[number], self._tokens[number]
            if left:
                self._send(Cancel(number))

    async def count(self, message: Count | Spell) -> Counted:
        """The tokens of a prompt, or the text of some."""
        if self._num_counts >= _MOST_COUNTS:
            text = f"{_MOST_COUNTS} texts are counted or spelled already"
            raise HttpError(429, text, code="queue_full", retry_after=1)
        self._num_counts += 1
        try:
            return await self._count(message)
        finally:
            self._num_counts -= 1

    async def _count(self, message: Count | Spell) -> Counted:
        number = next(self._numbers)
        queue = self._submit(number, replace(message, number=number), 0)
        try:
            event = await queue.get()
        finally:
            del self._open[number], self._tokens[number]
        if isinstance(event, Counted):
            return event
        assert isinstance(event, Failed), "nothing else comes of it"
        raise _error_of(event)

    def _submit(self, number: int, message: object, tokens: int) -> asyncio.Queue[Event]:
        if self.state != "ready":
            raise not_ready(self.reason)
        queue = self._open[number] = asyncio.Queue()
        self._tokens[number] = tokens
        self._send(message)
        return queue

    def _send(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed([message]))

    async def _live(self) -> Broken | None:
        """From the start of a process to its end; why it says that it ends, where it does."""
        try:
            ours, self._process = self._start()
        except OSError as error:  # no memory, or no descriptors, for one more
            return Broken(f"its process can't be started: {error}")
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        self._send(self.begin)
        self._is_looked_at, self._hang = False, None
        watch = asyncio.create_task(self._watch(self._process))
        try:
            while True:
                head = await reader.readexactly(LENGTH_BYTES)
                for message in pickle.loads(await reader.readexactly(length(head))):
                    if isinstance(message, Broken):
                        self.exit_code = message.code
                        return message
                    self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            return self._hang
        finally:
            watch.cancel()

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """A process, and the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [*self._program, str(theirs.fileno())],
                    stdin=subprocess.PIPE,  # it ends where this one is gone
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # a Ctrl-C of the terminal's is the server's alone
                )
            except OSError:
                ours.close()
                raise
        return ours, process

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Ask a process how it is, and end it where it hangs; one that still loads never does.

        Counted are looks, not seconds: this process may have been stopped as well.
        """
        left = looks = round(_SILENT_SECONDS / _LOOK_SECONDS)
        while left:
            await asyncio.sleep(_LOOK_SECONDS)
            left = left - 1 if self._is_looked_at else looks
            if self.state == "ready" and not self._is_looked_at:
                self._is_looked_at = True
                self._send(Look())
        self._hang = Broken(f"it hung: it said nothing for {_SILENT_SECONDS:g} seconds")
        _kill(process)

    def _take(self, message: Any) -> None:
        if isinstance(message, Ready):
            self.ready = message
            self._set("ready", None)
        elif isinstance(message, Status):
            self._is_looked_at = False
            self._compare(message)
        elif (queue := self._open.get(message.number)) is not None:
            queue.put_nowait(message)

    def _compare(self, status: Status) -> None:
        """How busy each device was since it was told last."""
        now, before = time.monotonic(), self.status
        if before is not None and now > self._told_at:
            passed, earlier = now - self._told_at, before.busy_seconds
            self.busy_shares = {
                device: min(1.0, (seconds - earlier.get(device, 0.0)) / passed)
                for device, seconds in status.busy_seconds.items()
            }
        self.status, self._told_at = status, now

    async def _lose(self, broken: Broken | None) -> None:
        """The process is gone, and what was asked of it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.status, self.busy_shares = None, {}
        if self.state == "ready":  # nothing new comes here while its process is being ended
            self.state = "restarting"
        ending = asyncio.create_task(asyncio.to_thread(self._end))
        self.reason = describe_end(await ending) if broken is None else broken.text
        for number, queue in self._open.items():
            text = f"the engine has ended, and this answer with it: {self.reason}"
            queue.put_nowait(Failed(number=number, status=503, text=text, code="engine_died"))
        await ending

    def _end(self) -> int | None:
        """Let nothing of the process be left; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):  # its socket is closed: it ends by itself
            process.wait(_GRACE_SECONDS if process.poll() is None else 0)
        _kill(process)
        with process:  # which closes what it was written to
            return process.wait()

    def _set(self, state: State, reason: str | None) -> None:
        self.state, self.reason = state, reason
        self.changed.set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def not_ready(reason: str | None) -> HttpError:
    """The error where no engine answers."""
    text = "the engine is being started" + (f": {reason}" if reason else "")
    return HttpError(503, text, code="engine_not_ready", retry_after=_RETRY_SECONDS)


def _error_of(event: Failed) -> HttpError:
    after = _RETRY_SECONDS if event.status == 503 else None
    return HttpError(
        event.status, event.text, code=event.code, param=event.param, retry_after=after
    )
