"""The engines of a server: one for each copy of the model, behind one address."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from .engine_client import EngineClient, not_ready
from .errors import HttpError
from .messages import Ask, Begin, Event

_MOST_KEYS = 4096
# A request goes where its beginning was read before, unless that one has so many tokens more to do.
_SLACK_TOKENS = 8192


class EngineLost(Exception):
    """No engine can be opened; `code` is the exit code that says why."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class EnginePool:
    """Engines that are kept there, and a bound on what waits for them.

    Parameters
    ----------
    begins : sequence of Begin
        What each engine is opened with.
    max_queue : int
        Requests that may wait beside those that are answered.
    """

    def __init__(self, begins: Sequence[Begin], max_queue: int) -> None:
        self.engines = [EngineClient(begin, number) for number, begin in enumerate(begins)]
        self._max_queue = max_queue
        self._tasks: list[asyncio.Task[None]] = []
        self._replicas: OrderedDict[str, int] = OrderedDict()

    async def start(self) -> None:
        """Open all engines, and wait until they answer.

        Raises
        ------
        EngineLost
            If one can't be opened.
        """
        self._tasks = [asyncio.create_task(engine.run()) for engine in self.engines]
        for engine in self.engines:
            while engine.state != "ready":
                if engine.state != "starting":
                    raise EngineLost(engine.reason or "it has ended", engine.exit_code)
                engine.changed.clear()
                await engine.changed.wait()

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    @property
    def is_ready(self) -> bool:
        """Whether an engine answers."""
        return any(engine.state == "ready" for engine in self.engines)

    @property
    def has_failed(self) -> bool:
        """Whether none will ever answer again."""
        return all(engine.state == "failed" for engine in self.engines)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(engine.num_open for engine in self.engines)

    def choose(self, key: str = "") -> EngineClient:
        """The engine for a request, by what it begins with.

        Raises
        ------
        HttpError
            If none answers now.
        """
        ready = [engine for engine in self.engines if engine.state == "ready"]
        if not ready:
            raise not_ready(self.engines[0].reason)
        best = min(ready, key=lambda engine: engine.open_tokens)
        known = next((e for e in ready if e.replica == self._replicas.get(key)), best)
        chosen = known if known.open_tokens <= best.open_tokens + _SLACK_TOKENS else best
        if key:
            self._replicas[key] = chosen.replica
            self._replicas.move_to_end(key)
            if len(self._replicas) > _MOST_KEYS:
                self._replicas.popitem(last=False)
        return chosen

    def ask(self, ask: Ask, tokens: int, key: str = "") -> AsyncGenerator[Event, None]:
        """What comes of a request that may take so many tokens; see `EngineClient.ask`.

        Raises
        ------
        HttpError
            If too many wait already, or no engine answers now.
        """
        engine = self.choose(key)
        room = sum(e.ready.sequences for e in self.engines if e.ready and e.state == "ready")
        if self.num_open >= room + self._max_queue:
            raise HttpError(
                429,
                f"{self.num_open} requests are on their way or wait; at most "
                f"{room + self._max_queue} can",
                code="queue_full",
                retry_after=5,
            )
        return engine.ask(ask, tokens)
