"""The engines of a server, one for each replica of the model."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from duoka.errors import MachineError

from .engine_client import EngineClient, not_ready
from .errors import HttpError
from .messages import EngineRequest, EngineSettings, Events

_MAX_KEYS = 4096
# A request goes to the engine that has its prefix cached, unless that engine has more than so many
# pending tokens more than the idlest one.
_SLACK_TOKENS = 8192


class EngineFailure(MachineError):
    """An engine can't be opened, or all have failed; `exit_code` is for the server."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


class EnginePool:
    """The supervised engines of a server, with a limit on queued requests.

    Parameters
    ----------
    settings : sequence of EngineSettings
        One for each engine.
    max_queue : int
        The most requests that may wait in addition to the running ones.
    """

    def __init__(self, settings: Sequence[EngineSettings], max_queue: int) -> None:
        self.engines = [EngineClient(engine, number) for number, engine in enumerate(settings)]
        self._max_queue = max_queue
        self._tasks: list[asyncio.Task[None]] = []
        self._replicas: OrderedDict[str, int] = OrderedDict()

    async def start(self) -> None:
        """Start all engines, and wait until they are ready.

        Raises
        ------
        EngineFailure
            If an engine can't be opened.
        """
        self._tasks = [asyncio.create_task(engine.run()) for engine in self.engines]
        for engine in self.engines:
            while engine.state != "ready":
                if engine.state != "starting":
                    raise EngineFailure(engine.reason or "it has ended", engine.exit_code)
                engine.changed.clear()
                await engine.changed.wait()

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        """True if at least one engine is ready."""
        return any(engine.state == "ready" for engine in self.engines)

    @property
    def has_failed(self) -> bool:
        """True if all engines have failed permanently."""
        return all(engine.state == "failed" for engine in self.engines)

    @property
    def context_tokens(self) -> int | None:
        """The most tokens of a request, prompt and generated; None until an engine was ready."""
        capacities = (engine.capacity for engine in self.engines)
        return next((capacity.context_tokens for capacity in capacities if capacity), None)

    @property
    def num_open(self) -> int:
        """The number of running and queued requests."""
        return sum(engine.num_open for engine in self.engines)

    def choose(self, key: str = "") -> EngineClient:
        """Choose the engine for a request; `key` is the beginning of its prompt.

        Raises
        ------
        HttpError
            If no engine is ready.
        """
        # Prefix affinity: the engine that last computed this key has its pages, which saves
        # prefill. If its pending tokens exceed the idlest engine's by the slack, the idlest one is
        # chosen.
        ready = [engine for engine in self.engines if engine.state == "ready"]
        if not ready:
            raise not_ready(self.engines[0].reason)
        idlest = min(ready, key=lambda engine: engine.open_tokens)
        engine = next((e for e in ready if e.replica == self._replicas.get(key)), idlest)
        if engine.open_tokens > idlest.open_tokens + _SLACK_TOKENS:
            engine = idlest
        if key:
            self._replicas[key] = engine.replica
            self._replicas.move_to_end(key)
            if len(self._replicas) > _MAX_KEYS:
                self._replicas.popitem(last=False)
        return engine

    def submit(self, request: EngineRequest, tokens: int, key: str = "") -> Events:
        """Submit a request to an engine; yield its events as `EngineClient.submit` does.

        Raises
        ------
        HttpError
            If too many requests are queued, or no engine is ready.
        """
        engine = self.choose(key)
        ready = (e.capacity for e in self.engines if e.state == "ready")
        limit = sum(capacity.sequences for capacity in ready if capacity) + self._max_queue
        if self.num_open >= limit:
            text = f"{self.num_open} requests are running or queued; the limit is {limit}"
            raise HttpError(429, text, code="queue_full", retry_after=5)
        return engine.submit(request, tokens)
