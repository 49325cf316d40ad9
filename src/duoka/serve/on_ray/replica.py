"""A replica: an engine as Ray Serve runs it; and the board, where replicas tell how they are."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve

from duoka.serve.engine_client import EngineClient
from duoka.serve.errors import HttpError
from duoka.serve.messages import Ask, Begin, Count, Event, Failed, Ready, Spell, Status

from .nodes import sort_visible

_REPORT_SECONDS, _FRESH_SECONDS = 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """How a replica is: of which application, and on which of Ray's nodes."""

    application: str
    node_id: str
    ready: Ready
    status: Status | None


class Board:
    """An actor beside the server that keeps the last report of each replica for some seconds."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}

    def put(self, replica: str, report: ReplicaReport) -> None:
        """Take the report of a replica."""
        self._reports[replica] = time.monotonic(), report

    def read(self) -> dict[str, ReplicaReport]:
        """The reports of the replicas that are there."""
        oldest = time.monotonic() - _FRESH_SECONDS
        self._reports = {name: pair for name, pair in self._reports.items() if pair[0] > oldest}
        return {name: report for name, (_, report) in self._reports.items()}


class Replica:
    """Answers what the server asks with an engine in a process of its own.

    It ends where its engine does, and Ray Serve begins another one. Where the server is gone, and
    the `Board` with it, it takes its application away.
    """

    async def __init__(self, begin: Begin, board: Any) -> None:  # type: ignore[misc]
        sort_visible()
        plan = await asyncio.to_thread(begin.plan.on_this_machine)
        self._board = board
        self._client = client = EngineClient(replace(begin, plan=plan))
        self._run = asyncio.create_task(client.run())
        await client.changed.wait()
        if client.state != "ready":
            raise RuntimeError(f"no engine can be opened: {client.reason}")
        client.changed.clear()
        self._watch = asyncio.create_task(self._end_with_engine())
        self._tell = asyncio.create_task(self._report())

    async def answer(self, message: Ask | Count | Spell) -> AsyncIterator[list[Event]]:
        """What comes of a request: piece by piece where it is streamed, or else all at its end."""
        try:
            if not isinstance(message, Ask):
                yield [await self._client.count(message)]
                return
            async with aclosing(self._client.ask(message, 0)) as events:
                if not message.is_streamed:
                    yield [event async for event in events]
                    return
                async for event in events:
                    yield [event]
        except HttpError as error:
            names = ("status", "text", "code", "param")
            yield [Failed(number=-1, **{name: getattr(error, name) for name in names})]

    def check_health(self) -> None:
        """For Ray Serve: raise where the engine doesn't answer."""
        if self._client.state != "ready":
            raise RuntimeError(self._client.reason)

    async def __del__(self) -> None:
        """For Ray Serve: end the engine, when all is answered."""
        for task in (self._watch, self._tell, self._run):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _end_with_engine(self) -> None:
        await self._client.changed.wait()
        print(f"the engine has ended: {self._client.reason}", file=sys.stderr)  # noqa: T201
        await asyncio.sleep(_REPORT_SECONDS / 2)  # until its requests have been told so
        os._exit(1)

    async def _report(self) -> None:
        context = serve.get_replica_context()
        node_id = ray.get_runtime_context().get_node_id()
        while True:
            assert self._client.ready is not None, "it is ready"
            ready, status = self._client.ready, self._client.status
            report = ReplicaReport(
                application=context.app_name, node_id=node_id, ready=ready, status=status
            )
            try:
                await self._board.put.remote(context.replica_id.unique_id, report)
            except ray.exceptions.ActorUnavailableError:
                pass  # the network, perhaps: the next report may come through
            except ray.exceptions.RayActorError:  # the server is gone
                await asyncio.to_thread(serve.delete, context.app_name, _blocking=False)
            await asyncio.sleep(_REPORT_SECONDS)
