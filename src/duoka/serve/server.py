"""The server: opens engines, then answers at an address until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from duoka.base.garbage import freeze_objects
from duoka.workers.signals import handle_signals

from .address import Address, format_url
from .app import make_app
from .limits import MOST_HEADER_BYTES, TimedProtocol
from .pool import EngineFailure, EnginePool
from .service import Service

# For open answers to end, and for those that are cut to be told so.
_DRAIN_SECONDS, _CUT_SECONDS = 120, 5
_POLL_SECONDS = 0.1


class _Server(uvicorn.Server):
    """A server of uvicorn's; the end of the terminal (SIGHUP) stops it like SIGTERM."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn sends at its end the signals that it caught: the former handlers hear them.
        with super().capture_signals(), handle_signals(self.handle_exit, (signal.SIGHUP,)):
            yield


def serve(service: Service, address: Address, *, on_ready: Callable[[Service, str], None]) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP; open answers are ended first.

    Parameters
    ----------
    service : Service
        Its engines are opened and closed here.
    address : Address
    on_ready : callable
        Told when requests are answered, and at which URL.

    Raises
    ------
    UsageError
        If the address can't be had; no engine is opened then.
    EngineFailure
        If an engine can't be opened, or all have ended for good.
    """
    with address.bind() as bound:
        asyncio.run(_serve(service, address, bound, on_ready))


async def _serve(
    service: Service,
    address: Address,
    bound: socket.socket,
    on_ready: Callable[[Service, str], None],
) -> None:
    pool = service.pool
    server = _Server(config(service, address))
    ending = asyncio.create_task(_close(pool, server))
    try:
        await pool.start()
        freeze_objects()
        bound.listen()  # who reads the address asks at once
        on_ready(service, format_url(*bound.getsockname()[:2]))
        await server.serve(sockets=[bound])
        if pool.has_failed:
            raise EngineFailure(f"the engine has ended: {pool.engines[0].reason}", 12)
    finally:
        # Who asked a second time waits for nobody; an answer that is cut off is no error then.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        server.should_exit = server.force_exit = True
        await ending


def config(service: Service, address: Address) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    # Each malformed request would be a line.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Config(
        make_app(service, key=address.key, is_local=address.is_local and address.key is None),
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Those that are too long are read, so that whoever sends them hears that they are.
        h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_DRAIN_SECONDS + 3 * _CUT_SECONDS,
    )


async def _close(pool: EnginePool, server: uvicorn.Server) -> None:
    """End the engines when the server is to stop, or none will answer again.

    Open answers have some time, unless it is to stop at once; those that are cut are told so.
    """
    # signal → uvicorn takes no more connections → at most 120 s for open answers → engines end, the
    # answers that are left end with an error → at most 5 s to send that → `force_exit`
    while not (server.should_exit or pool.has_failed):
        await asyncio.sleep(_POLL_SECONDS)
    server.should_exit = True
    end = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < end and not server.force_exit:
        await asyncio.sleep(_POLL_SECONDS)
    await pool.close()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_CUT_SECONDS)
    server.force_exit = True
