"""A replica: the application of `duoka serve` around an engine, as Ray Serve runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from duoka.serve.app import make_app
from duoka.serve.messages import EngineSettings
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

from .nodes import sort_visible

_ANCHOR_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The settings of a replica: its engine by the id of the node, and the application.

    `is_local` says that the server's own machine alone reaches its address, and needs no key.
    """

    engines: Mapping[str, EngineSettings]
    model: str
    max_queue: int
    key: str | None
    is_local: bool
    fetches_images: bool


class Anchor:
    """An actor with the lifetime of the server's process."""

    def ping(self) -> None:
        """Return if the actor lives; Ray raises an error otherwise."""


class Replica:
    """Answers requests with an engine in a process of its own.

    Ray Serve begins another one where the engine has ended too often. Where the server's process is
    gone the replica takes its application off the cluster.
    """

    async def __init__(self, settings: ReplicaSettings, anchor: Any) -> None:  # type: ignore[misc]
        sort_visible()
        node_id = ray.get_runtime_context().get_node_id()
        # A node that has joined later gets the plan of another one, if that fits its GPUs.
        engine = settings.engines.get(node_id) or next(iter(settings.engines.values()))
        plan = await asyncio.to_thread(engine.plan.on_this_machine)
        self._settings = settings
        self._pool = EnginePool([replace(engine, plan=plan)], settings.max_queue)
        await self._pool.start()
        self._watch = asyncio.create_task(_end_with(anchor))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """For Ray Serve: return the application."""
        settings = self._settings
        service = Service(
            self._pool,
            settings.model,
            has_key=settings.key is not None,
            fetches_images=settings.fetches_images,
        )
        return make_app(service, key=settings.key, is_local=settings.is_local)

    def check_health(self) -> None:
        """For Ray Serve: raise where the engine is not to be started any more."""
        if self._pool.has_failed:
            raise RuntimeError(self._pool.engines[0].reason)

    async def __del__(self) -> None:
        """For Ray Serve: end the engine, when all requests are answered."""
        self._watch.cancel()
        await self._pool.close()


async def _end_with(anchor: Any) -> None:
    """Delete the application when the server's process is gone."""
    name = serve.get_replica_context().app_name
    while True:
        try:
            await anchor.ping.remote()
        except ray.exceptions.ActorUnavailableError:
            pass  # the network, perhaps: the next one may come through
        except ray.exceptions.RayActorError:
            await asyncio.to_thread(serve.delete, name, _blocking=False)
        await asyncio.sleep(_ANCHOR_SECONDS)
