"""The ids and the log of requests.

The log has a line for each request at the level INFO, without its prompt, query and key.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from .answers import Usage, make_id
from .errors import CLOSED

_LOG = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[!-~]{1,128}")


@contextmanager
def log_request(scope: Scope, send: Send) -> Iterator[tuple[Scope, Send]]:
    """Yield a request's scope and `send` for the application; log the request at the end.

    HEAD becomes GET, whose body the server doesn't send then. `send` adds the request's id, its own
    `x-request-id` or a new one, to the response, under the names of OpenAI and of Anthropic.
    `respond` sets the model and the token counts in the scope's state.
    """
    request_id = Headers(scope=scope).get("x-request-id", "")
    request_id = request_id if _SANE_ID.fullmatch(request_id) else make_id("req_")
    begin, status, is_open = time.monotonic(), CLOSED, True

    async def send_with_id(message: Message) -> None:
        nonlocal status, is_open
        if message["type"] == "http.response.start":
            status, headers = message["status"], MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = request_id
        else:
            is_open = message.get("more_body", False)
        await send(message)

    state = dict(scope.get("state", {}))
    try:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        yield {**scope, "state": state, "method": method}, send_with_id
    finally:
        usage: Usage = state.get("usage", Usage())
        line = (
            f"{(scope.get('client') or '-')[0]} {scope['method']} {quote(scope['path'])[:200]} "
            f"{CLOSED if is_open else status} id={request_id} model={state.get('model', '-')} "
            f"prompt_tokens={usage.prompt_tokens} "
            f"completion_tokens={usage.new_tokens or usage.streamed_tokens} "
            f"seconds={time.monotonic() - begin:.3f}"
        )
        _LOG.info(line)
