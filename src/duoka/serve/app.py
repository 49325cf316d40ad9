"""The server's application: what each address answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from .answers import ChatAnswer, CompletionAnswer, Usage, collected, finish_reason
from .anthropic import add_messages
from .errors import HttpError, invalid
from .limits import ClientLimits, Gate, JsonRoute
from .messages import Delta, Ended, Prompt
from .requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)
from .responses import add_responses
from .service import Events, Service, status_of
from .streams import awaited, streamed, unless_gone

_PAGE = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "It is refused; the body says why"},
    "5XX": {"description": "It can't be answered now; the body says why"},
}


def make_app(
    service: Service,
    *,
    key: str | None = None,
    is_local: bool = False,
    limits: ClientLimits | None = None,
) -> FastAPI:
    """The application of a service; see `Gate`."""
    app = FastAPI(
        title="duoka",
        version=version("duoka"),
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = JsonRoute
    app.add_middleware(
        Gate, memory=service.memory, limits=limits or ClientLimits(), key=key, is_local=is_local
    )
    app.add_exception_handler(HttpError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell)
    _add_health(app, service)
    _add_models(app, service)
    _add_chat(app, service)
    _add_completions(app, service)
    add_responses(app, service)
    add_messages(app, service)
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
        ready = next((e.capacity for e in service.pool.engines if e.capacity), None)
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
    async def chat(request: ChatCompletionRequest, http: Request) -> Response:
        """Answer a chat."""
        service.check_model(request.model)
        form, n = ChatAnswer(service.model), request.n or 1
        events = service.ask(request.prompt, request.params(), n, is_streamed=request.stream)
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
        sources = [
            service.ask(prompt, request.params(), n, is_streamed=request.stream)
            for prompt in prompts
        ]
        if not request.stream:
            usage = Usage()
            work = asyncio.gather(*(collected(events, n, usage) for events in sources))
            answers = await unless_gone(http, awaited(work))
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
        ready = service.pool.choose().capacity
        most = None if ready is None else ready.context_tokens
        tokens = list(await service.count(request.question))
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens."""
        service.check_model(request.model)
        prompt = Prompt(tokens=request.tokens, field="tokens")
        return {"prompt": await service.detokenize(prompt)}


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page."""
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        content = (_PAGE / "index.html").read_text(encoding="utf-8")
        return Response(content, media_type="text/html", headers=headers)

    app.mount("/page", StaticFiles(directory=_PAGE))


async def _text_of(service: Service, prompt: Prompt) -> str:
    """The text of a prompt."""
    if prompt.text is not None:
        return prompt.text
    return await service.detokenize(prompt)


def has_usage(request: Sampled) -> bool:
    """Whether a stream tells the tokens at its end."""
    return request.stream_options is not None and request.stream_options.include_usage


async def _tell(request: Request, error: Exception) -> Response:
    known = HttpError.of(error)
    return JSONResponse(known.body_for(request.url.path), known.status, known.headers)


async def _tell_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "it is asked for these"
    return await _tell(request, invalid(error.errors(), error.body))


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is asked for these"
    refused = HttpError(error.status_code, str(error.detail))
    body = refused.body_for(request.url.path)
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
