"""Responses of Anthropic's Messages API: a message of blocks, and the events of its stream."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from .answers import Piece, make_id
from .blocks import BlockKind, BlocksAnswer
from .errors import HttpError
from .messages import Begun, Delta, Ended

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# For each kind of block: the field to which a delta adds, and the type of the delta.
_DELTAS = {
    "content": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "tool": ("partial_json", "input_json_delta"),
}
# Clients expect a signature of reasoning; it isn't checked when they send it back.
_SIGNATURE = "unsigned"
# The key under which arguments are returned that are not a JSON object.
_NO_JSON = "INVALID_JSON"


class MessageAnswer(BlocksAnswer):
    """The response message while it is generated; `model` is the model's name for clients."""

    ping = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, model: str) -> None:
        super().__init__()
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self._message: dict[str, Any] = {
            "id": make_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        return self._message

    def fail(self, error: HttpError) -> Iterator[Piece]:
        """See `Answer`."""
        yield error.anthropic_body

    def _begin(self, event: Begun) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        self._message["usage"] = self._count_usage()
        yield {"type": "message_start", "message": copy.deepcopy(self._message)}

    def _begin_block(self, kind: BlockKind, name: str) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "tool":
            block = {"type": "tool_use", "id": make_id("toolu_"), "name": name, "input": {}}
            self._arguments = ""
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._blocks.append(block)
        yield self._make_event("content_block_start", content_block=copy.deepcopy(block))

    def _extend_block(self, kind: BlockKind, delta: Delta) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        name, change = _DELTAS[kind]
        if kind == "tool":
            self._arguments += delta.text
        else:
            self._blocks[-1][name] += delta.text
        if delta.text:
            yield self._make_event("content_block_delta", delta={"type": change, name: delta.text})

    def _end_block(self, kind: BlockKind, *, is_whole: bool) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        if kind == "tool":
            self._blocks[-1]["input"] = _parse_arguments(self._arguments)
        elif kind == "reasoning":
            self._blocks[-1]["signature"] = _SIGNATURE
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._make_event("content_block_delta", delta=delta)
        yield self._make_event("content_block_stop")

    def _end(self, event: Ended) -> Iterator[Piece]:
        """See `BlocksAnswer`."""
        reason = "end_turn" if event.stop_text is None else "stop_sequence"
        end = {"stop_reason": _REASONS.get(event.finish, reason), "stop_sequence": event.stop_text}
        self._message |= {**end, "usage": self._count_usage()}
        yield {"type": "message_delta", "delta": end, "usage": self._count_usage()}
        yield {"type": "message_stop"}

    def _count_usage(self) -> dict[str, Any]:
        """Return Anthropic's `usage` object: cached tokens are not part of `input_tokens`."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.shared_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.shared_tokens,
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _make_event(self, kind: str, **values: Any) -> Piece:
        """Return an event of the last block."""
        return {"type": kind, "index": len(self._blocks) - 1, **values}


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; invalid (cut) JSON is returned under one key."""
    try:
        content = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {_NO_JSON: arguments}
