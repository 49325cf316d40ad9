"""Responses of OpenAI's Responses API: output items, and the events of a stream."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from .answers import Piece, make_id, write_chat_logprobs
from .blocks import BlockKind, BlocksAnswer
from .errors import HttpError
from .forms import drop_none
from .messages import Begun, Delta, Ended

# For each kind of block, the common prefix of its ``.delta`` and ``.done`` events.
_EVENT_PREFIXES = {
    "reasoning": "response.reasoning_text",
    "content": "response.output_text",
    "tool": "response.function_call_arguments",
}
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponseAnswer(BlocksAnswer):
    """A response object while it is generated.

    Parameters
    ----------
    model : str
        The model's name for clients.
    settings : mapping
        The settings of the request, which the response repeats.
    has_logprobs : bool
        Include log-probabilities.
    """

    def __init__(self, model: str, settings: Mapping[str, Any], *, has_logprobs: bool) -> None:
        super().__init__()
        self._has_logprobs = has_logprobs
        self._numbers = count()
        self._output: list[dict[str, Any]] = []
        self._response: dict[str, Any] = {
            "id": make_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "output": self._output,
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "max_tool_calls")),
            "usage": None,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **settings,
        }

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        return self._response

    def fail(self, error: HttpError) -> Iterator[Piece]:
        """See `Answer`."""
        code = _CODES.get(error.status, "server_error")
        self._response |= {"status": "failed", "error": {"code": code, "message": error.text}}
        yield self._make_response_event("response.failed")

    def _begin(self, event: Begun) -> Iterator[Piece]:
        """See `BlocksAnswer`; also show the values of fields that the request omitted."""
        self._response |= {**event.params, **drop_none(self._response)}
        yield self._make_response_event("response.created")
        yield self._make_response_event("response.in_progress")

    def _begin_block(self, kind: BlockKind, name: str) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        item: dict[str, Any]
        if kind == "tool":
            call = {"call_id": make_id("call_"), "name": name, "arguments": ""}
            item = {"type": "function_call", "id": make_id("fc_"), **call}
        elif kind == "reasoning":
            item = {"type": "reasoning", "id": make_id("rs_"), "summary": [], "content": []}
        else:
            item = {"type": "message", "id": make_id("msg_"), "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        yield self._make_index_event("response.output_item.added", item=copy.deepcopy(item))
        if kind == "tool":
            return
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        yield self._make_part_event("response.content_part.added", part=copy.deepcopy(part))

    def _extend_block(self, kind: BlockKind, delta: Delta) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        item, name = self._output[-1], f"{_EVENT_PREFIXES[kind]}.delta"
        if kind == "tool":
            item["arguments"] += delta.text
            yield self._make_item_event(name, delta=delta.text)
            return
        part = item["content"][0]
        part["text"] += delta.text
        if kind == "reasoning":
            yield self._make_part_event(name, delta=delta.text)
            return
        logprobs = write_chat_logprobs(delta.tokens)["content"] if self._has_logprobs else []
        part["logprobs"] += logprobs
        yield self._make_part_event(name, delta=delta.text, logprobs=logprobs)

    def _end_block(self, kind: BlockKind, *, is_whole: bool) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        item, name = self._output[-1], f"{_EVENT_PREFIXES[kind]}.done"
        item["status"] = "completed" if is_whole else "incomplete"
        if kind == "tool":
            yield self._make_item_event(name, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if kind == "content" else {}
            yield self._make_part_event(name, text=part["text"], **logprobs)
            yield self._make_part_event("response.content_part.done", part=copy.deepcopy(part))
        yield self._make_index_event("response.output_item.done", item=copy.deepcopy(item))

    def _end(self, event: Ended) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        is_whole = event.finish != "length"
        if not self._output:  # an empty answer has one empty message
            yield from self._begin_block("content", "")
            yield from self._end_block("content", is_whole=is_whole)
        self._response["usage"] = {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.usage.shared_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens},
            "total_tokens": self.usage.prompt_tokens + self.usage.new_tokens,
        }
        self._response["completed_at"] = int(time.time()) if is_whole else None
        self._response["status"] = "completed" if is_whole else "incomplete"
        if not is_whole:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._make_response_event("response.completed" if is_whole else "response.incomplete")

    def _make_response_event(self, kind: str) -> Piece:
        """Return an event with a copy of the whole response."""
        return self._make_event(kind, response=copy.deepcopy(self._response))

    def _make_index_event(self, kind: str, **values: Any) -> Piece:
        """Return an event with the index of the last item."""
        return self._make_event(kind, output_index=len(self._output) - 1, **values)

    def _make_item_event(self, kind: str, **values: Any) -> Piece:
        """Return an event with the index and the id of the last item."""
        return self._make_index_event(kind, item_id=self._output[-1]["id"], **values)

    def _make_part_event(self, kind: str, **values: Any) -> Piece:
        """Return an event of the last item's only content part."""
        return self._make_item_event(kind, content_index=0, **values)

    def _make_event(self, kind: str, **values: Any) -> Piece:
        """Return an event with the next sequence number."""
        return {"type": kind, "sequence_number": next(self._numbers), **values}
