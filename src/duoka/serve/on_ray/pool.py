"""The kinds of nodes behind one address, each an application of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from duoka.errors import UsageError
from duoka.serve.engine_client import EngineClient
from duoka.serve.errors import HttpError
from duoka.serve.messages import Ask, Begin, Begun, Cancel, Count, Event, Failed, Spell, Status
from duoka.serve.pool import EngineLost, EnginePool

from .nodes import NodeKind
from .replica import Board, Replica, ReplicaReport

_POLL_SECONDS = 0.5
_MOST_TRIES = 4
_LOST = ("engine_died", "engine_not_ready")
# Beside requests, a replica counts the tokens of texts.
_BESIDE = 8
_COUNTS = ("running", "waiting", "pages", "free_pages", "preemptions", "shared_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """A kind of nodes, how an engine is opened there, and the least and the most replicas."""

    kind: NodeKind
    begin: Begin
    low: int
    high: int


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

    def hear(self, reports: dict[str, ReplicaReport]) -> None:
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
        answer: Any = None
        try:
            answer = self.handle.answer.remote(message)
            async for events in answer:
                for event in events:
                    queue.put_nowait(event)
            queue.put_nowait(_lost("it ended early"))  # which nobody reads behind an answer's end
        except asyncio.CancelledError:
            if answer is not None:
                answer.cancel()
            raise
        except ray.exceptions.RayTaskError as error:
            text = f"a defect of a replica's: {type(error.cause).__name__}"
            queue.put_nowait(Failed(number=-1, status=500, text=text, code="internal_error"))
        except Exception as error:  # Ray's and Ray Serve's have no class in common
            queue.put_nowait(_lost(type(error).__name__))


class RayPool(EnginePool):
    """Replicas on a Ray cluster, and a bound on what waits for them.

    The applications are called after `model`.
    """

    def __init__(self, parts: Sequence[ReplicaSettings], model: str, max_queue: int) -> None:
        super().__init__((), max_queue)
        self._parts = parts
        name = re.sub(r"[^\w.-]", "-", model)
        self._clients = {
            f"duoka-{name}-{number + 1}": ReplicasClient(part.begin, number)
            for number, part in enumerate(parts)
        }
        self.engines = [*self._clients.values()]
        self._board: Any = None

    async def start(self) -> None:
        """Deploy an application for each kind, and wait until its least replicas answer."""
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        handles = await asyncio.to_thread(self._deploy)
        for client, handle in zip(self._clients.values(), handles, strict=True):
            client.handle = handle.options(stream=True)
        self._tasks = [asyncio.create_task(self._listen())]
        while any(
            client.state != "failed" and client.num_replicas < part.low
            for client, part in zip(self._clients.values(), self._parts, strict=True)
        ):
            await asyncio.sleep(_POLL_SECONDS)
            applications = (await asyncio.to_thread(serve.status)).applications
            for name, client in self._clients.items():
                state = applications.get(name)
                if state is not None and state.status == "DEPLOY_FAILED":
                    raise EngineLost(f"{name}: {state.message[-2000:]}", client.exit_code)
        if self.has_failed:
            raise EngineLost(self.engines[0].reason or "", self.engines[0].exit_code)

    async def close(self) -> None:
        """Take the applications away, and leave the cluster."""
        await super().close()
        await asyncio.to_thread(self._withdraw)

    async def ask(self, ask: Ask, tokens: int, key: str = "") -> AsyncGenerator[Event, None]:
        """What comes of a request; asked again elsewhere while nothing of the answer has come."""
        has_begun = is_answered = False
        for tries in count(1):
            try:
                async with aclosing(super().ask(ask, tokens, key)) as events:
                    async for event in events:
                        if not isinstance(event, Begun):
                            is_answered = True
                        elif has_begun:
                            continue
                        has_begun = True
                        yield event
                return
            except HttpError as error:
                if is_answered or error.code not in _LOST or tries == _MOST_TRIES:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    def _deploy(self) -> list[Any]:
        serve.start(proxy_location="Disabled")
        there = self._clients.keys() & serve.status().applications
        if there:
            self._clients = {}  # they aren't taken away
            raise UsageError(
                f"the cluster serves {min(there)} already", hint="give this one another --name"
            )
        server_id = ray.get_runtime_context().get_node_id()
        at_server = NodeAffinitySchedulingStrategy(server_id, soft=False)
        board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=at_server)
        self._board = board.remote()
        targets = [
            serve.RunTarget(
                _deployment(part).bind(part.begin, self._board), name=name, route_prefix=None
            )
            for name, part in zip(self._clients, self._parts, strict=True)
        ]
        handles: list[Any] = serve.run_many(targets, wait_for_applications_running=False)
        return handles

    async def _listen(self) -> None:
        """Hear the replicas on nodes that are there."""
        while True:
            try:
                reports, nodes = await asyncio.to_thread(self._read)
            except Exception as error:  # or nobody would hear of replicas any more
                for client in self._clients.values():
                    client.fail(f"the Ray cluster doesn't answer: {type(error).__name__}")
                return
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            for name, client in self._clients.items():
                client.hear(
                    {
                        replica: report
                        for replica, report in reports.items()
                        if report.application == name and report.node_id in alive
                    }
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _read(self) -> Any:
        return ray.get(self._board.read.remote()), ray.nodes()

    def _withdraw(self) -> None:
        with suppress(Exception):  # the cluster may be gone
            for name in self._clients:
                serve.delete(name)
        ray.shutdown()


def _deployment(part: ReplicaSettings) -> Any:
    sequences = part.begin.plan.workload.batch
    actor: dict[str, Any] = {"num_gpus": part.kind.gpus}
    if part.kind.foreign_ids:  # a node that joins later may be of this kind
        foreign = ",".join(part.kind.foreign_ids)
        actor["label_selector"] = {"ray.io/node-id": f"!in({foreign})"}
    return serve.deployment(Replica).options(
        name="engine",
        ray_actor_options=actor,
        max_ongoing_requests=sequences + _BESIDE,
        autoscaling_config={
            "min_replicas": part.low,
            "max_replicas": part.high,
            "target_ongoing_requests": sequences,
            "upscale_delay_s": 10,
            "look_back_period_s": 10,
            "metrics_interval_s": 2,
        },
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.5,
    )


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
