"""The service behind all API forms: requests answered with the engines of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from importlib.metadata import version
from typing import Any, Literal

from .errors import HttpError
from .limits import RequestMemory
from .messages import Counted, EngineRequest, Event, Prompt
from .metrics import Metrics
from .pool import EnginePool
from .remote_images import RemoteImages

Events = AsyncGenerator[Event, None]
"""The events of a request."""
# The beginning of a request, to find the engine that has its pages.
_KEY_CHARACTERS = 1024
CLOSED = 499
"""The status of a request whose client has gone, as of nginx; for metrics alone."""


class Service:
    """Answers requests with the engines of a pool.

    Parameters
    ----------
    pool : EnginePool
    model : str
        The model's name for clients.
    has_key : bool
        Whether clients have to send a key.
    fetches_images : bool
        Whether images are fetched from addresses in requests.
    """

    def __init__(
        self, pool: EnginePool, model: str, *, has_key: bool = False, fetches_images: bool = False
    ) -> None:
        self.pool = pool
        self.model = model
        self.has_key = has_key
        self.metrics = Metrics(pool, model)
        self.memory = RequestMemory()
        self._images = RemoteImages(self.memory) if fetches_images else None

    def check_model(self, name: str) -> None:
        """Refuse the name of another model."""
        if name and name != self.model:
            raise HttpError(
                404,
                f"there is no model {name!r}; this is {self.model!r}",
                code="model_not_found",
                param="model",
            )

    async def submit(self, prompt: Prompt, params: Mapping[str, Any], n: int = 1) -> Events:
        """Yield the events of a request for `n` answers to a prompt."""
        content = ascii(prompt.messages or prompt.text or prompt.tokens)
        tokens = len(content) // 4 + (params.get("max_new_tokens") or 512)
        watch = self.metrics.watch()
        try:
            async with self._fetch_images(prompt) as ready:
                request = EngineRequest(prompt=ready, params=params, n=n)
                events = self.pool.submit(request, tokens, content[:_KEY_CHARACTERS])
                async with aclosing(events):
                    async for event in events:
                        watch.take(event)
                        yield event
        except HttpError as error:
            self.metrics.failed(error.status)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.failed(CLOSED)
            raise

    async def count(
        self, prompt: Prompt, task: Literal["tokenize", "detokenize"] = "tokenize"
    ) -> Counted:
        """Return the tokens of a prompt, or the text of its tokens."""
        async with self._fetch_images(prompt) as ready:
            request = EngineRequest(task=task, prompt=ready)
            async with aclosing(self.pool.submit(request, 0)) as events:
                counted = await anext(events)
        assert isinstance(counted, Counted), "nothing else comes of it"
        return counted

    def _fetch_images(self, prompt: Prompt) -> AbstractAsyncContextManager[Prompt]:
        """Put the images at addresses into a prompt."""
        return nullcontext(prompt) if self._images is None else self._images.put_into(prompt)


def status_of(service: Service) -> dict[str, Any]:
    """Return the state of the engines as JSON, for people."""
    engines = service.pool.engines
    plan = engines[0].settings.plan
    known = [engine.status for engine in engines if engine.status is not None]
    return {
        "model": service.model,
        "version": version("duoka"),
        "context_tokens": service.pool.context_tokens or plan.workload.context_tokens,
        "sequences": sum(e.capacity.sequences for e in engines if e.capacity),
        "images": plan.workload.images,
        "engines": [_engine_status(engine) for engine in engines],
        "running": sum(status.running for status in known),
        "waiting": sum(status.waiting for status in known),
        "pages": {
            "total": sum(status.pages for status in known),
            "free": sum(status.free_pages for status in known),
        }
        if known
        else None,
        "tokens_per_second": service.metrics.tokens_per_second,
    }


def _engine_status(engine: Any) -> dict[str, Any]:
    plan, status = engine.settings.plan, engine.status
    return {
        "replica": engine.replica,
        "state": engine.state,
        "reason": engine.reason,
        "devices": [
            {
                "name": stage.device,
                "gpu": plan.fleet.device(stage.device).product or None,
                "budget_bytes": stage.budget_bytes,
                "forecast_bytes": stage.reserved_bytes,
                "reserved_bytes": None
                if status is None
                else status.reserved_bytes.get(stage.device),
                "weights_bytes": stage.weight_bytes,
                "kv_cache_bytes": stage.kv_cache_bytes,
                "busy_share": None if status is None else status.busy_shares.get(stage.device),
            }
            for stage in plan.forecast.devices
        ],
    }
