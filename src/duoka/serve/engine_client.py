"""The server's side of an engine in a process of its own: start, requests, supervision."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from duoka.forecast.serving import Capacity
from duoka.workers import supervision
from duoka.workers.channel import pack_message, read_message
from duoka.workers.process import WorkerProcess, describe_exit
from duoka.workers.supervision import RestartPolicy, SilenceCounter

from .errors import HttpError
from .messages import (
    Begun,
    Broken,
    Counted,
    Ended,
    EngineRequest,
    EngineSettings,
    Event,
    Failed,
    Status,
)

_LOG = logging.getLogger(__name__)
# starting → ready ⇄ restarting → failed: "starting" until the first time that the engine is ready
# (an engine that can't be opened fails at once), "failed" when the restart policy gives up.
State = Literal["starting", "ready", "restarting", "failed"]
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 5


# The server's process (asyncio, no torch) and the process of an engine, joined by a socket:
#
#     submit  ── EngineRequest n ──▶ EngineProcess.serve → a thread: tokens → Engine.submit
#     queue n ◀── _take ◀── Begun, Delta, Ended ◀── Outbox ◀── on_event, in the engine's thread
#
# `run` starts the process, which is ready when its `Capacity` has come. When the process is lost,
# the open requests fail with 503, and the restart policy says when the next one starts, if any.
class EngineClient:
    """An engine, whose process `run` keeps alive until the restart policy gives up.

    Parameters
    ----------
    settings : EngineSettings
    replica : int
        The number of the engine among those of the server.
    """

    _program = (sys.executable, "-m", "duoka.serve")

    def __init__(self, settings: EngineSettings, replica: int = 0) -> None:
        self.settings = settings
        self.replica = replica
        self.state: State = "starting"
        self.reason: str | None = None
        self.exit_code = 1
        self.capacity: Capacity | None = None
        self.status: Status | None = None
        self.num_deaths = 0
        self.changed = asyncio.Event()
        self._awaits_status = False
        self._hang: Broken | None = None
        # The events of each running request, and the tokens that it may take.
        self._open: dict[int, tuple[asyncio.Queue[Event], int]] = {}
        self._numbers = count()
        self._writer: asyncio.StreamWriter | None = None
        self._process: WorkerProcess | None = None

    @property
    def num_open(self) -> int:
        """The number of running and queued requests."""
        return len(self._open)

    @property
    def open_tokens(self) -> int:
        """The tokens of these requests, prompts and generations, estimated."""
        return sum(tokens for _, tokens in self._open.values())

    async def run(self) -> None:
        """Start the process, and again after each loss."""
        policy = RestartPolicy()
        try:
            while True:
                start = time.monotonic()
                broken = await self._live()
                await self._lose(broken)
                if broken is not None and self.state == "starting":
                    return self._set("failed", broken.text)
                self.num_deaths += 1
                _LOG.error("engine %d has ended: %s", self.replica, self.reason)
                delay = policy.delay_after_loss(time.monotonic() - start)
                if delay is None:
                    text = f"it has ended {supervision.MAX_LOSSES} times within ten minutes"
                    return self._set("failed", f"{text}; last reason: {self.reason}")
                self._set("restarting", self.reason)
                await asyncio.sleep(delay)
        finally:
            if self._process is not None:
                await self._lose(Broken("the server was stopped"))

    async def submit(self, request: EngineRequest, tokens: int = 0) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, which may take so many tokens.

        Raises
        ------
        HttpError
            If it can't be answered.
        """
        if self.state != "ready":
            raise not_ready(self.reason)
        number = next(self._numbers)
        queue = asyncio.Queue[Event]()
        self._open[number] = queue, tokens
        self._send(replace(request, number=number))
        # Tokens may come before the engine has accepted all generations, which `Begun` reports:
        # they wait for it, so that a refusal is an HTTP error and no stream that breaks off.
        #     Delta 0, Delta 1, Begun, Delta 2, Ended → Begun, Delta 0, Delta 1, Delta 2, Ended
        early: list[Event] | None = []
        remaining = request.n
        try:
            while remaining:
                event = await queue.get()
                if isinstance(event, Failed):
                    retry_after = _RETRY_SECONDS if event.status == 503 else None
                    named = {"code": event.code, "param": event.param}
                    raise HttpError(event.status, event.text, **named, retry_after=retry_after)
                if early is not None and not isinstance(event, Begun | Counted):
                    early.append(event)
                    continue
                events, early = [event, *(early or ())], None
                for event in events:
                    remaining -= isinstance(event, Ended | Counted)
                    yield event
        finally:
            del self._open[number]
            self._send(EngineRequest(task="end", number=number))

    def _send(self, message: EngineRequest | EngineSettings) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_message(message))

    async def _live(self) -> Broken | None:
        """Run a process from its start to its end; return the reason, if the process gives one."""
        try:
            reader = await self._start()
        except OSError as error:  # no memory, or no descriptors, for one more
            return Broken(f"its process can't be started: {error}")
        self._send(self.settings)
        self._awaits_status, self._hang = False, None
        assert self._process is not None
        watch = asyncio.create_task(self._watch(self._process))
        try:
            while True:
                for message in await read_message(reader):
                    if isinstance(message, Broken):
                        self.exit_code = message.code
                        return message
                    self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            return self._hang
        finally:
            watch.cancel()

    async def _start(self) -> asyncio.StreamReader:
        """Start a process, and open the stream of its messages."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = WorkerProcess(
                    [*self._program, str(theirs.fileno())], descriptors=[theirs.fileno()]
                )
            except OSError:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        return reader

    async def _watch(self, process: WorkerProcess) -> None:
        """Query the status regularly, and kill a silent process, unless it still loads."""
        silence = SilenceCounter(supervision.LOOK_SECONDS)
        while silence.seconds < supervision.SILENT_SECONDS:
            await asyncio.sleep(supervision.LOOK_SECONDS)
            silence.count(is_alive=not self._awaits_status)
            if self.state == "ready" and not self._awaits_status:
                self._awaits_status = True
                self._send(EngineRequest(task="status"))
        seconds = supervision.SILENT_SECONDS
        self._hang = Broken(f"no response for {seconds:g} seconds")
        process.kill()

    def _take(self, message: Any) -> None:
        if isinstance(message, Capacity):
            self.capacity = message
            self._set("ready", None)
        elif isinstance(message, Status):
            self._awaits_status, self.status = False, message
        elif message.number in self._open:
            self._open[message.number][0].put_nowait(message)

    async def _lose(self, broken: Broken | None) -> None:
        """End the process, and fail its running requests."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.status = None
        if self.state == "ready":  # nothing new comes here while its process is being ended
            self.state = "restarting"
        ending = asyncio.create_task(asyncio.to_thread(self._end))
        self.reason = describe_exit(await ending) if broken is None else broken.text
        for number, (queue, _) in self._open.items():
            text = f"the engine stopped during this generation: {self.reason}"
            queue.put_nowait(Failed(number=number, status=503, text=text, code="engine_died"))
        await ending

    def _end(self) -> int | None:
        """End the process, whose socket is closed; return its exit code."""
        process, self._process = self._process, None
        return None if process is None else process.end(_GRACE_SECONDS)

    def _set(self, state: State, reason: str | None) -> None:
        self.state, self.reason = state, reason
        self.changed.set()


def not_ready(reason: str | None) -> HttpError:
    """Return the error of a request while no engine is ready."""
    text = "the engine is being started" + (f": {reason}" if reason else "")
    return HttpError(503, text, code="engine_not_ready", retry_after=_RETRY_SECONDS)
