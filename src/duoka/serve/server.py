"""The server: opens the engines, then answers requests until a signal ends it."""

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
from .limits import MOST_HEADER_BYTES
from .pool import EngineFailure, EnginePool
from .service import Service

# Seconds at shutdown for running requests to finish, and for the error events of requests that are
# cut off to be sent.
_DRAIN_SECONDS, _CUT_SECONDS = 120, 5
_POLL_SECONDS = 0.1
_MOST_CONNECTIONS = 1024


class _Server(uvicorn.Server):
    """A uvicorn server; SIGHUP (a closed terminal) stops the server like SIGTERM."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn."""
        # After its end, uvicorn raises the signals that it caught again, for the former handlers.
        with super().capture_signals(), handle_signals(self.handle_exit, (signal.SIGHUP,)):
            yield


def serve(service: Service, address: Address, *, on_ready: Callable[[Service, str], None]) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP; running requests may finish first.

    Parameters
    ----------
    service : Service
        The service, whose engines are opened and closed here.
    address : Address
    on_ready : callable
        Called with the service and its URL when the engines are ready and the server listens.

    Raises
    ------
    UsageError
        If the address isn't available; no engine is opened then.
    EngineFailure
        If an engine can't be opened, or all have failed permanently.
    """
    with address.bind() as bound:
        asyncio.run(_serve(service, address, bound, on_ready))


async def _serve(
    service: Service,
    address: Address,
    bound: socket.socket,
    on_ready: Callable[[Service, str], None],
) -> None:
    """Open the engines, run uvicorn on the bound socket, and close the engines; see `serve`."""
    pool = service.pool
    server = _Server(config(service, address))
    ending = asyncio.create_task(_close_at_end(pool, server))
    try:
        await pool.start()
        freeze_objects()
        bound.listen()  # before the URL is shown: clients may connect at once
        on_ready(service, format_url(*bound.getsockname()[:2]))
        await server.serve(sockets=[bound])
        if pool.has_failed:
            raise EngineFailure(f"the engine has ended: {pool.engines[0].reason}", 12)
    finally:
        # A second signal ends the server at once; don't log the requests that this cuts off.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        server.should_exit = server.force_exit = True
        await ending


def config(service: Service, address: Address) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    # Below ERROR, uvicorn logs a line for each malformed request.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return uvicorn.Config(
        make_app(service, **address.access),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Read headers up to twice the limit, so that `Gate` can answer them with an error.
        h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_DRAIN_SECONDS + 3 * _CUT_SECONDS,
    )


async def _close_at_end(pool: EnginePool, server: uvicorn.Server) -> None:
    """Wait until the server shall stop or all engines have failed; then close the engines.

    Running requests have time to finish, unless a second signal came; the others end with an error.
    """
    # signal → uvicorn accepts no more connections → at most 120 s for running requests → the
    # engines end, and remaining requests get an error → at most 5 s to send it → `force_exit`
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
