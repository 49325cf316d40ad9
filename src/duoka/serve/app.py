"""The web application of the server: its routes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from .answers import ChatAnswer, CompletionAnswer
from .anthropic import add_messages
from .errors import VERSION_HEADER, HttpError, describe_invalid
from .limits import Gate, JsonRoute
from .messages import Prompt
from .requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import add_responses
from .service import Service, status_of
from .streams import respond

_CORS: Any = {"allow_private_network": True}
_CORS["expose_headers"] = ("x-request-id", "request-id", "retry-after")
_PAGE = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)


def make_app(service: Service, *, origins: Sequence[str] = (), **access: Any) -> FastAPI:
    """Create the FastAPI application of a service.

    `origins` are as in `Address`, and `access` are the parameters `key` and `is_local` of `Gate`.
    """
    app = FastAPI(openapi_url=None)
    app.router.route_class = JsonRoute
    for kind in (HttpError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_health(app, service)
    _add_models(app, service)
    _add_openai(app, service)
    add_responses(app, service)
    add_messages(app, service)
    _add_tokens(app, service)
    if _PAGE.is_dir():
        _add_page(app)
    # Not by `add_middleware`: the headers of unexpected errors would be missing.
    stack: ASGIApp = Gate(app.build_middleware_stack(), service.memory, **access)
    if origins:
        stack = CORSMiddleware(stack, origins, ("GET", "HEAD", "POST"), ("*",), **_CORS)
    app.middleware_stack = stack
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    """Add the routes for health, version, metrics and status."""
    pool = service.pool

    @app.get("/health")
    async def health() -> Response:
        """Return 503 if every engine has failed permanently, otherwise 200."""
        return Response(status_code=503 if pool.has_failed else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 if an engine is ready, otherwise 503."""
        return Response(status_code=200 if pool.is_ready else 503)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        """Return duoka's version."""
        return {"version": version("duoka")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/duoka/status")
    async def status() -> dict[str, Any]:
        """Return the state of the engines for the web page."""
        return status_of(service)


def _add_models(app: FastAPI, service: Service) -> None:
    """Add the routes of the served model, in OpenAI's or Anthropic's format."""

    @app.get("/v1/models")
    async def models(
        http: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        after_id: str = "",
        before_id: str = "",
    ) -> dict[str, Any]:
        """List the model's names and adapters; the parameters choose a page for Anthropic's API."""
        describe = partial(_describe_model, service, http)
        if VERSION_HEADER not in http.headers:
            return {"object": "list", "data": [*map(describe, service.names)]}
        names = service.names
        for cursor in (after_id, before_id):
            service.check_model(cursor)
        start = names.index(after_id) + 1 if after_id else 0
        names = names[start : names.index(before_id) if before_id else None]
        page = names[-limit:] if before_id and not after_id else names[:limit]
        ends: Sequence[str | None] = page or [None]
        about = {"has_more": len(page) < len(names), "first_id": ends[0], "last_id": ends[-1]}
        return {"data": [*map(describe, page)], **about}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, http: Request) -> dict[str, Any]:
        """Return the model or an adapter; 404 for another name."""
        service.check_model(name)
        return _describe_model(service, http, name)


def _describe_model(service: Service, http: Request, name: str) -> dict[str, Any]:
    """Return a model object; an adapter's has the model as `parent` in OpenAI's format."""
    limit = service.pool.context_tokens
    if VERSION_HEADER in http.headers:
        created = datetime.fromtimestamp(service.created, UTC).isoformat()
        about = {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {**about, "lifecycle": "active", "max_input_tokens": limit, "max_tokens": limit}
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "duoka",
        "max_model_len": limit,
        **({"parent": service.model} if name in service.adapters else {}),
    }


def _add_openai(app: FastAPI, service: Service) -> None:
    """Add the routes of OpenAI's chats and completions."""

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: ChatCompletionRequest, http: Request) -> Response:
        """Generate the answers to a chat."""
        has_usage = request.stream_options.include_usage
        options = {"has_logprobs": request.logprobs, "has_usage": has_usage}
        answer = ChatAnswer(request.model or service.model, request.n, **options)
        return await respond(service, request, [request.to_prompt()], answer, http)

    @app.post("/v1/completions")
    async def create_completion(request: CompletionRequest, http: Request) -> Response:
        """Generate completions of texts."""
        prompts, has_logprobs = request.to_prompts(), request.logprobs is not None
        prefixes = [""] * len(prompts)
        if request.has_prompt_logprobs:
            counted = [p.tokens or (await service.count(p)).tokens for p in prompts]
            prompts = [Prompt(tokens=ids, is_scored=True, field="prompt") for ids in counted]
            firsts = [Prompt(tokens=ids[:1], field="prompt") for ids in counted]
            prefixes = [(await service.count(p, "detokenize")).text for p in firsts]
        elif request.echo:
            prefixes = [p.text or (await service.count(p, "detokenize")).text for p in prompts]
        options = {"has_logprobs": has_logprobs, "has_usage": request.stream_options.include_usage}
        answer = CompletionAnswer(request.model or service.model, prefixes, request.n, **options)
        return await respond(service, request, prompts, answer, http)


def _add_tokens(app: FastAPI, service: Service) -> None:
    """Add the routes for tokenizing and detokenizing."""

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a text, or of a chat's prompt."""
        service.check_model(request.model)
        tokens = (await service.count(request.to_prompt())).tokens
        limit = service.pool.context_tokens
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        """Return the text of token ids."""
        service.check_model(request.model)
        prompt = Prompt(tokens=request.tokens, field="tokens")
        return {"prompt": (await service.count(prompt, "detokenize")).text}


def _add_page(app: FastAPI) -> None:
    """Add the web page and its files."""

    @app.get("/")
    async def page() -> Response:
        """Return the web page."""
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        content = (_PAGE / "index.html").read_text(encoding="utf-8")
        return Response(content, media_type="text/html", headers=headers)

    app.mount("/page", StaticFiles(directory=_PAGE))


async def _answer_error(request: Request, error: Exception) -> Response:
    """Convert an error to a response in the format of the requested API."""
    if isinstance(error, RequestValidationError):
        error = describe_invalid(error.errors(), error.body)
    answer = HttpError.of(error)
    headers = answer.headers
    if isinstance(error, HTTPException):  # raised by Starlette for an unknown path or method
        answer = HttpError(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
    body = answer.body_for(request.url.path, request.headers)
    return JSONResponse(body, answer.status, headers)
