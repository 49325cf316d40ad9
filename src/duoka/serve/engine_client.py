"""The server's side of an engine process: start, requests, supervision."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
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
    Events,
    Failed,
    Status,
)

_LOG = logging.getLogger(__name__)
# starting → ready ⇄ restarting → failed. "starting" lasts until the engine is ready for the first
# time; an engine that reports an error before that is "failed" at once. Later, "failed" means that
# the restart policy has given up.
State = Literal["starting", "ready", "restarting", "failed"]
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 5


# The server's process (asyncio, no torch) and the process of an engine, connected by a socket:
#
#     submit  ── EngineRequest n ──▶ EngineProcess.serve → a thread: tokens → Engine.submit
#     queue n ◀── _take ◀── Begun, Delta, Ended ◀── Outbox ◀── on_event, in the engine's thread
#
# `run` starts the process, which is ready once it has sent its `Capacity`. When the process is
# lost, its open requests fail with 503, and the restart policy decides when the next one starts, if
# at all.
class EngineClient:
    """An engine; `run` keeps its process alive until the restart policy gives up.

    Parameters
    ----------
    settings : EngineSettings
    replica : int
        The number of the engine among those of the server.

    `reason` is why the process last ended, `exit_code` the server's exit code if it can't be
    opened. `capacity` and `status` are None until the engine has sent them. `changed` is set at
    each change of `state`.
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
        self._silence_reason: Broken | None = None
        # For each open request, by number: the queue of its events, and its estimated tokens.
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
        """The estimated tokens, prompts and generations, of the running and queued requests."""
        return sum(tokens for _, tokens in self._open.values())

    async def run(self) -> None:
        """Start the process; restart it after each loss until the restart policy gives up."""
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

    async def submit(self, request: EngineRequest, tokens: int = 0) -> Events:
        """Send a request to the engine, and yield its events; `tokens` is its estimated size.

        Raises
        ------
        HttpError
            If the engine isn't ready, refuses the request, or ends during the request.
        """
        if self.state != "ready":
            raise not_ready(self.reason)
        number = next(self._numbers)
        queue = asyncio.Queue[Event]()
        self._open[number] = queue, tokens
        self._send(replace(request, number=number))
        # Tokens may arrive before `Begun`, with which the engine accepts all n generations. They
        # are held back until then, so that a refusal is an HTTP error and not a broken stream.
        #     Delta 0, Delta 1, Begun, Delta 2, Ended → Begun, Delta 0, Delta 1, Delta 2, Ended
        held_events: list[Event] | None = []
        remaining = request.n
        try:
            while remaining:
                event = await queue.get()
                if isinstance(event, Failed):
                    retry_after = _RETRY_SECONDS if event.status == 503 else None
                    details = {"code": event.code, "param": event.param}
                    raise HttpError(event.status, event.text, **details, retry_after=retry_after)
                if held_events is not None and not isinstance(event, Begun | Counted):
                    held_events.append(event)
                    continue
                events, held_events = [event, *(held_events or ())], None
                for event in events:
                    remaining -= isinstance(event, Ended | Counted)
                    yield event
        finally:
            del self._open[number]
            self._send(EngineRequest(task="end", number=number))

    def _send(self, message: EngineRequest | EngineSettings) -> None:
        """Send a message to the process; do nothing if the process is lost."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_message(message))

    async def _live(self) -> Broken | None:
        """Run a process from start to end; return the reason for the end, None if not reported."""
        try:
            reader = await self._start()
        except OSError as error:  # no memory or file descriptors left
            return Broken(f"its process can't be started: {error}")
        self._send(self.settings)
        self._awaits_status, self._silence_reason = False, None
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
            return self._silence_reason
        finally:
            watch.cancel()

    async def _start(self) -> asyncio.StreamReader:
        """Start a process; return the stream of its messages."""
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
        """Request the status regularly; kill a process that doesn't respond while ready."""
        silence = SilenceCounter(supervision.LOOK_SECONDS)
        while silence.seconds < supervision.SILENT_SECONDS:
            await asyncio.sleep(supervision.LOOK_SECONDS)
            silence.count(is_alive=not self._awaits_status)
            if self.state == "ready" and not self._awaits_status:
                self._awaits_status = True
                self._send(EngineRequest(task="status"))
        seconds = supervision.SILENT_SECONDS
        self._silence_reason = Broken(f"no response for {seconds:g} seconds")
        process.kill()

    def _take(self, message: Any) -> None:
        """Process a message: a log record, a capacity, a status, or an event of a request."""
        if isinstance(message, logging.LogRecord):
            _LOG.log(message.levelno, "engine %d: %s", self.replica, message.getMessage())
        elif isinstance(message, Capacity):
            self.capacity = message
            self._set("ready", None)
        elif isinstance(message, Status):
            self._awaits_status, self.status = False, message
        elif message.number in self._open:
            self._open[message.number][0].put_nowait(message)

    async def _lose(self, broken: Broken | None) -> None:
        """End the process, set the reason, and fail its open requests."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.status = None
        if self.state == "ready":  # so that no new request is accepted while the process ends
            self.state = "restarting"
        ending = asyncio.create_task(asyncio.to_thread(self._end))
        self.reason = describe_exit(await ending) if broken is None else broken.text
        for number, (queue, _) in self._open.items():
            text = f"the engine stopped during this generation: {self.reason}"
            queue.put_nowait(Failed(number=number, status=503, text=text, code="engine_died"))
        await ending

    def _end(self) -> int | None:
        """End the process, if one was started; return its exit code, otherwise None."""
        process, self._process = self._process, None
        return None if process is None else process.end(_GRACE_SECONDS)

    def _set(self, state: State, reason: str | None) -> None:
        """Set and log the state and its reason, and notify `EnginePool.start`."""
        self.state, self.reason = state, reason
        level = logging.WARNING if self.num_deaths else logging.INFO
        text = f"{state}: {reason}" if state == "failed" else state
        _LOG.log(level, "engine %d: %s", self.replica, text)
        self.changed.set()


def not_ready(reason: str | None) -> HttpError:
    """Return the 503 error for a request while no engine is ready."""
    text = "the engine is being started" + (f": {reason}" if reason else "")
    return HttpError(503, text, code="engine_not_ready", retry_after=_RETRY_SECONDS)
