"""All replicas on nodes of one kind, as the server has them: one engine of its pool."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray

from duoka.serve.engine_client import EngineClient
from duoka.serve.messages import Ask, Begin, Cancel, Count, Event, Failed, Spell, Status

from .replica import Report

_COUNTS = ("running", "waiting", "pages", "free_pages", "preemptions", "shared_tokens")


class ReplicasClient(EngineClient):
    """Asks an application of Ray Serve, whose router chooses the replica."""

    def __init__(self, begin: Begin, number: int) -> None:
        super().__init__(begin, number)
        self.handle: Any = None
        self._replicas: frozenset[str] = frozenset()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def num_replicas(self) -> int:
        """How many answer now."""
        return len(self._replicas)

    @property
    def open_tokens(self) -> int:
        """How many tokens a replica has to do."""
        return super().open_tokens // max(1, self.num_replicas)

    def hear(self, reports: dict[str, Report]) -> None:
        """Take what the replicas that are there tell."""
        lost = self._replicas - reports.keys()
        if self._replicas != reports.keys():
            self.status = None  # what others have done isn't compared
        self.num_deaths += len(lost)
        self._replicas = frozenset(reports)
        if reports:
            n, ready = len(reports), next(iter(reports.values())).ready
            self.ready = replace(ready, sequences=n * ready.sequences, pages=n * ready.pages)
            self._set("ready", None)
            if known := [report.status for report in reports.values() if report.status]:
                self._compare(_together(known))
        elif self.state == "ready":
            self._set("restarting", "no replica is there")
            self.status, self.busy_shares = None, {}
            for queue in self._open.values():
                queue.put_nowait(_lost(self.reason))

    def fail(self, reason: str) -> None:
        """No replica can be opened."""
        self._set("failed", reason)

    def _send(self, message: object) -> None:
        if isinstance(message, Cancel):
            if message.number in self._tasks:
                self._tasks[message.number].cancel()
            return
        assert isinstance(message, Ask | Count | Spell), "nothing else is asked"
        number = message.number
        task = self._tasks[number] = asyncio.create_task(self._ask(message, self._open[number]))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _ask(self, message: Ask | Count | Spell, queue: asyncio.Queue[Event]) -> None:
        answer = self.handle.answer.remote(message)
        try:
            async for events in answer:
                for event in events:
                    queue.put_nowait(event)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except ray.exceptions.RayTaskError as error:
            text = f"a defect of a replica's: {type(error.cause).__name__}"
            queue.put_nowait(Failed(number=-1, status=500, text=text, code="internal_error"))
        except Exception as error:  # Ray's and Ray Serve's have no class in common
            queue.put_nowait(_lost(type(error).__name__))


def _lost(reason: str | None) -> Failed:
    text = f"a replica was lost, and this answer with it: {reason}"
    return Failed(number=-1, status=503, text=text, code="engine_died")


def _together(statuses: Collection[Status]) -> Status:
    """Of all replicas; of a device the most bytes and the mean of the work."""
    reserved: dict[str, int] = {}
    busy: dict[str, float] = {}
    for status in statuses:
        for device, size in status.reserved_bytes.items():
            reserved[device] = max(size, reserved.get(device, 0))
        for device, seconds in status.busy_seconds.items():
            busy[device] = busy.get(device, 0.0) + seconds / len(statuses)
    sums = {name: sum(getattr(status, name) for status in statuses) for name in _COUNTS}
    return Status(**sums, reserved_bytes=reserved, busy_seconds=busy)
