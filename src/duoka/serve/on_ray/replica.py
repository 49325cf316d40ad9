"""A replica on Ray Serve: an engine and the web application of `duoka serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from duoka.serve.address import Address
from duoka.serve.app import make_app
from duoka.serve.messages import EngineSettings
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

from .nodes import sort_visible

_ANCHOR_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The settings of all replicas: the engine for each node, and options of the application.

    `engines` are by node id.
    """

    engines: Mapping[str, EngineSettings]
    names: Sequence[str]
    max_queue: int
    address: Address
    fetches_images: bool


class Anchor:
    """An actor that lives as long as the server's process, for replicas to detect its end."""

    def ping(self) -> None:
        """Do nothing; a remote call raises an error if the actor is gone."""


class Replica:
    """A replica: runs requests on an engine in a process of its own.

    Ray Serve replaces the replica when its engine has failed permanently. When the server's process
    is gone, the replica deletes the application from the cluster.
    """

    async def __init__(self, settings: ReplicaSettings, anchor: Any) -> None:  # type: ignore[misc]
        sort_visible()
        node_id = ray.get_runtime_context().get_node_id()
        # A node that joined later uses the plan of another node; `on_this_machine` checks that it
        # fits.
        engine = settings.engines.get(node_id) or next(iter(settings.engines.values()))
        plan = await asyncio.to_thread(engine.plan.on_this_machine)
        self._settings = settings
        self._pool = EnginePool([replace(engine, plan=plan)], settings.max_queue)
        await self._pool.start()
        self._watch = asyncio.create_task(_delete_without(anchor))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the web application; called by Ray Serve."""
        settings = self._settings
        service = Service(self._pool, settings.names, fetches_images=settings.fetches_images)
        return make_app(service, **settings.address.access)

    def check_health(self) -> None:
        """Raise an error if the engine has failed permanently; called by Ray Serve."""
        if self._pool.has_failed:
            raise RuntimeError(self._pool.engines[0].reason)

    async def __del__(self) -> None:
        """End the engine; called by Ray Serve when all requests are answered."""
        self._watch.cancel()
        await self._pool.close()


async def _delete_without(anchor: Any) -> None:
    """Delete the application when `anchor`, and so the server's process, is gone."""
    name = serve.get_replica_context().app_name
    while True:
        try:
            await anchor.ping.remote()
        except ray.exceptions.ActorUnavailableError:
            pass  # perhaps a network problem: try again
        except ray.exceptions.RayActorError:
            await asyncio.to_thread(serve.delete, name, _blocking=False)
        await asyncio.sleep(_ANCHOR_SECONDS)
