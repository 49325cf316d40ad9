"""The service behind all API routes: runs requests on the engines of a pool."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from importlib.metadata import version
from typing import Any, Literal

from .errors import CLOSED, HttpError
from .limits import RequestMemory
from .messages import Counted, EngineRequest, Events, Prompt
from .metrics import Metrics
from .pool import EnginePool
from .remote_images import RemoteImages

# The characters of a prompt by which the pool finds the engine that has its prefix cached.
_KEY_CHARACTERS = 1024


class Service:
    """Runs requests on the engines of a pool, and counts them in the metrics.

    Parameters
    ----------
    pool : EnginePool
    model : str or sequence of str
        The model's name for clients, or its names.
    fetches_images : bool
        Whether images of requests are downloaded from http(s) URLs.
    """

    def __init__(
        self, pool: EnginePool, model: str | Sequence[str], *, fetches_images: bool = False
    ) -> None:
        self.pool = pool
        self._models = [model] if isinstance(model, str) else [*model]
        self.model = self._models[0]
        plans = [engine.settings.plan for engine in pool.engines[:1]]
        self.adapters = [name for plan in plans for name, _ in plan.workload.adapters]
        self.names = [*self._models, *self.adapters]
        self.created = int(time.time())
        backend = [version("duoka"), *((plan.fingerprint, plan.workload) for plan in plans)]
        self.fingerprint = f"fp_{hashlib.sha256(repr(backend).encode()).hexdigest()[:12]}"
        self.metrics = Metrics(pool, self.model)
        self.memory = RequestMemory()
        self._images = RemoteImages(self.memory) if fetches_images else None

    def check_model(self, name: str) -> None:
        """Raise HttpError (404) for the name of another model; an empty name is accepted."""
        if name not in ("", *self.names):
            models = " or ".join(map(repr, self._models))
            adapters = "".join(f", or with an adapter {other!r}" for other in self.adapters)
            text = f"there is no model {name!r}; this is {models}{adapters}"
            raise HttpError(404, text, code="model_not_found", param="model")

    async def submit(
        self, prompt: Prompt, params: Mapping[str, Any], n: int = 1, model: str = ""
    ) -> Events:
        """Run `n` generations from a prompt; yield their events.

        `model` is the name of the model or of an adapter.
        """
        adapter = model if model in self.adapters else None
        content = ascii(prompt.messages or prompt.text or prompt.tokens)
        tokens = len(content) // 4 + n * (params.get("max_new_tokens") or 512)
        watch = self.metrics.watch()
        try:
            async with self._fetch_images(prompt) as ready:
                request = EngineRequest(prompt=ready, params=params, n=n, adapter=adapter)
                key = f"{adapter} {content}"[:_KEY_CHARACTERS]
                events = self.pool.submit(request, tokens, key)
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
        """Return the token ids of a prompt, or the text of a prompt's token ids."""
        async with self._fetch_images(prompt) as ready:
            request = EngineRequest(task=task, prompt=ready)
            async with aclosing(self.pool.submit(request, 0)) as events:
                counted = await anext(events)
        assert isinstance(counted, Counted), "nothing else comes of it"
        return counted

    def _fetch_images(self, prompt: Prompt) -> AbstractAsyncContextManager[Prompt]:
        """Return a context manager; its value is the prompt with downloaded images, if allowed."""
        return nullcontext(prompt) if self._images is None else self._images.put_into(prompt)


def status_of(service: Service) -> dict[str, Any]:
    """Return the state of the service and its engines, for the web page."""
    engines = service.pool.engines
    plan = engines[0].settings.plan
    statuses = [engine.status for engine in engines if engine.status is not None]
    free_pages = sum(status.free_pages for status in statuses)
    pages = {"total": sum(status.pages for status in statuses), "free": free_pages}
    return {
        "model": service.model,
        "version": version("duoka"),
        "context_tokens": service.pool.context_tokens or plan.workload.context_tokens,
        "sequences": sum(e.capacity.sequences for e in engines if e.capacity),
        "images": plan.workload.images,
        "switches_thinking": any(status.switches_thinking for status in statuses),
        "engines": [_engine_status(engine) for engine in engines],
        "running": sum(status.running for status in statuses),
        "waiting": sum(status.waiting for status in statuses),
        "pages": pages if statuses else None,
        "tokens_per_second": service.metrics.tokens_per_second,
    }


def _engine_status(engine: Any) -> dict[str, Any]:
    """Return the state of an engine; measured values are None until its first status."""
    plan, status = engine.settings.plan, engine.status
    reserved_bytes = {} if status is None else status.reserved_bytes
    busy_shares = {} if status is None else status.busy_shares
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
                "reserved_bytes": reserved_bytes.get(stage.device),
                "weights_bytes": stage.weight_bytes,
                "kv_cache_bytes": stage.kv_cache_bytes,
                "busy_share": busy_shares.get(stage.device),
            }
            for stage in plan.forecast.devices
        ],
    }
