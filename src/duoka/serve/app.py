"""The server's application: what each address answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Send

from .answers import ChatAnswer, CompletionAnswer, Usage, collected, finish_reason
from .errors import HttpError
from .limits import SEND_SECONDS, Gate
from .messages import Ask, Count, Delta, Ended, Event, Prompt, Spell
from .metrics import Metrics
from .pool import Pool
from .requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)

T = TypeVar("T")
Events = AsyncGenerator[Event, None]
"""What comes of a request."""
_PAGE = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)
# What a request begins with, for the engine that has read it before.
_KEY_CHARACTERS = 1024
_CLOSED = 499
"""The status, for metrics alone, where a client has gone: nginx's."""


class Service:
    """What answers requests with the engines of a pool.

    Parameters
    ----------
    pool : Pool
    model : str
        Its name for clients.
    has_key : bool
        Whether they have to know a key.
    """

    def __init__(self, pool: Pool, model: str, *, has_key: bool = False) -> None:
        self.pool = pool
        self.model = model
        self.has_key = has_key
        self.metrics = Metrics(pool, model)

    def check_model(self, name: str) -> None:
        """Refuse the name of another model."""
        if name and name != self.model:
            raise HttpError(
                404,
                f"there is no model {name!r}; this is {self.model!r}",
                code="model_not_found",
                param="model",
            )

    async def ask(self, prompt: Prompt, request: Sampled) -> Events:
        """What comes of a request for answers to a prompt."""
        content = json.dumps(prompt.messages or prompt.text or prompt.tokens)
        ask = Ask(
            number=-1,
            prompt=prompt,
            params=request.params(),
            n=request.n or 1,
            is_streamed=request.stream,
        )
        tokens = len(content) // 4 + (request.most_new_tokens or 512)
        watch = self.metrics.watch()
        try:
            events = self.pool.ask(ask, tokens, content[:_KEY_CHARACTERS])
            async with aclosing(events):
                async for event in events:
                    watch.take(event)
                    yield event
        except HttpError as error:
            self.metrics.failed(error.status)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.failed(_CLOSED)
            raise


class Lines(StreamingResponse):
    """Events of a stream as server-sent ones; a client that takes nothing is let go."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse`."""

        async def timed(message: Any) -> None:
            await asyncio.wait_for(send(message), SEND_SECONDS)

        try:
            await super().stream_response(timed)
        except TimeoutError:
            return


def make_app(service: Service, *, key: str | None = None) -> FastAPI:
    """The application of a service; with a key only for who has it."""
    app = FastAPI(title="duoka", version=version("duoka"), docs_url=None, redoc_url=None)
    app.add_middleware(Gate, key=key)
    app.add_exception_handler(HttpError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_defect)
    _add_health(app, service)
    _add_models(app, service)
    _add_chat(app, service)
    _add_completions(app, service)
    _add_tokens(app, service)
    if _PAGE.is_dir():
        _add_page(app)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    pool = service.pool

    @app.get("/health")
    async def health() -> Response:
        """Whether the server is alive, or ever will be again."""
        return Response(status_code=503 if pool.has_failed else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether an engine answers now."""
        return Response(status_code=200 if pool.is_ready else 503)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        """Duoka's version."""
        return {"version": version("duoka")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/duoka/status")
    async def status() -> dict[str, Any]:
        """How the engines are, for the page."""
        return status_of(service)


def _add_models(app: FastAPI, service: Service) -> None:
    def described() -> dict[str, Any]:
        ready = next((e.ready for e in service.pool.engines if e.ready), None)
        most = None if ready is None else ready.context_tokens
        return {
            "id": service.model,
            "object": "model",
            "created": 0,
            "owned_by": "duoka",
            "max_model_len": most,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        service.check_model(name)
        return described()


def _add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Answer a chat."""
        service.check_model(request.model)
        form, n = ChatAnswer(service.model), request.n or 1
        events = service.ask(request.prompt, request)
        has_logprobs = bool(request.logprobs)
        if not request.stream:
            usage = Usage()
            choices = await unless_gone(http, collected(events, n, usage))
            return JSONResponse(form.whole(choices, usage, logprobs=has_logprobs))

        async def pieces(events: Events, usage: Usage) -> AsyncIterator[Any]:
            for piece in form.first(n):
                yield piece
            async for event in events:
                usage.take(event)
                if isinstance(event, Delta | Ended):
                    yield form.piece(event, logprobs=has_logprobs)
            if has_usage(request):
                yield form.last(usage)

        return await streamed([events], pieces)


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        service.check_model(request.model)
        form, n = CompletionAnswer(service.model), request.n or 1
        prompts, has_logprobs = request.prompts, request.top is not None
        befores = [(await _text_of(service, prompt)) if request.echo else "" for prompt in prompts]
        sources = [service.ask(prompt, request) for prompt in prompts]
        if not request.stream:
            usage = Usage()
            work = asyncio.gather(*(collected(events, n, usage) for events in sources))
            answers = await unless_gone(http, _awaited(work))
            choices = [
                (before, choice)
                for before, several in zip(befores, answers, strict=True)
                for choice in several
            ]
            return JSONResponse(form.whole(choices, usage, logprobs=has_logprobs))

        async def pieces(events: Events, usage: Usage) -> AsyncIterator[Any]:
            at = usage.num_sources * n
            before = befores[usage.num_sources]
            usage.num_sources += 1
            for number in range(n if before else 0):
                yield form.piece(at + number, before, (), None, logprobs=has_logprobs)
            async for event in events:
                usage.take(event)
                if isinstance(event, Delta):
                    number = at + event.choice
                    yield form.piece(number, event.text, event.tokens, None, logprobs=has_logprobs)
                elif isinstance(event, Ended):
                    end = finish_reason(event)
                    yield form.piece(at + event.choice, "", (), end, logprobs=has_logprobs)
            if has_usage(request) and usage.num_sources == len(sources):
                yield form.last(usage)

        return await streamed(sources, pieces)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text, or of a chat's prompt."""
        service.check_model(request.model)
        engine = service.pool.choose()
        counted = await engine.count(Count(number=-1, prompt=request.question))
        most = engine.ready.context_tokens if engine.ready else None
        tokens = list(counted.tokens)
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens."""
        service.check_model(request.model)
        spelled = await service.pool.choose().count(Spell(number=-1, tokens=request.tokens))
        return {"prompt": spelled.text}


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page."""
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        content = (_PAGE / "index.html").read_text(encoding="utf-8")
        return Response(content, media_type="text/html", headers=headers)

    app.mount("/page", StaticFiles(directory=_PAGE))


async def streamed(
    sources: Sequence[Events],
    pieces: Callable[[Events, Usage], AsyncIterator[Any]],
    *,
    named: bool = False,
) -> Response:
    """A stream of the events of some requests, one after another.

    What can't be begun is an error with a status of its own; what fails later is told in the
    stream. With `named` each piece is an event with its type as its name, as Anthropic has it.
    """
    begun: list[Events] = []
    try:
        for events in sources:
            begun.append(_resumed(await anext(events), events))
    except BaseException:
        for events in (*begun, *sources):
            await events.aclose()
        raise

    async def lines() -> AsyncIterator[str]:
        usage = Usage()
        async with AsyncExitStack() as stack:
            for events in begun:
                await stack.enter_async_context(aclosing(events))
            try:
                for events in begun:
                    async for piece in pieces(events, usage):
                        yield _line(piece, named=named)
            except HttpError as error:
                yield _line({"type": "error", **error.body} if named else error.body, named=named)
                return
        if not named:
            yield "data: [DONE]\n\n"

    return Lines(lines(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def _line(piece: dict[str, Any], *, named: bool) -> str:
    data = f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    return f"event: {piece['type']}\n{data}" if named else data


async def _resumed(first: Event, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What work comes to; it is ended where the client has gone."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(_CLOSED, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _awaited(work: asyncio.Future[T]) -> T:
    return await work


async def _text_of(service: Service, prompt: Prompt) -> str:
    """The text of a prompt."""
    if prompt.text is not None:
        return prompt.text
    spelled = await service.pool.choose().count(Spell(number=-1, tokens=prompt.tokens or ()))
    return spelled.text


def has_usage(request: Sampled) -> bool:
    """Whether a stream tells the tokens at its end."""
    return request.stream_options is not None and request.stream_options.include_usage


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError), "it is asked for these"
    return JSONResponse(error.body, error.status, error.headers)


async def _tell_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "it is asked for these"
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(where) or None
    is_unknown = first["type"] == "extra_forbidden"
    text = f"{param} is unknown here" if is_unknown else f"{param or 'the body'}: {first['msg']}"
    code = "unknown_parameter" if is_unknown else None
    refused = HttpError(400, text, code=code, param=param)
    return JSONResponse(refused.body, 400)


async def _tell_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is asked for these"
    refused = HttpError(error.status_code, str(error.detail))
    return JSONResponse(refused.body, error.status_code, dict(error.headers or {}))


async def _tell_defect(_: Request, error: Exception) -> Response:
    refused = HttpError(500, f"a defect of duoka's: {type(error).__name__}", code="internal_error")
    return JSONResponse(refused.body, 500)


def status_of(service: Service) -> dict[str, Any]:
    """How the engines are, for people."""
    engines = service.pool.engines
    plan = engines[0].begin.plan
    known = [engine.status for engine in engines if engine.status is not None]
    ready = next((engine.ready for engine in engines if engine.ready), None)
    return {
        "model": service.model,
        "version": version("duoka"),
        "context_tokens": plan.workload.context_tokens if ready is None else ready.context_tokens,
        "sequences": sum(e.ready.sequences for e in engines if e.ready),
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
    plan, status = engine.begin.plan, engine.status
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
                "busy_share": engine.busy_shares.get(stage.device),
            }
            for stage in plan.forecast.devices
        ],
    }
