"""Answers in OpenAI's form: whole, or piece by piece."""

from __future__ import annotations

import time
import uuid
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .messages import Begun, Delta, Ended, Event, Token


@dataclass(slots=True)
class Usage:
    """The tokens of a request."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0
    num_sources: int = 0
    """Prompts whose answers have begun to be told."""

    def take(self, event: Event) -> None:
        """Count what comes."""
        if isinstance(event, Begun):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, Ended):
            self.new_tokens += event.new_tokens
            self.shared_tokens = max(self.shared_tokens, event.shared_tokens)

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.shared_tokens},
        }


@dataclass(slots=True)
class AnswerChoice:
    """One answer, put together."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": []})
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    finish: str = "stop"

    def take(self, event: Event) -> None:
        """Add what comes."""
        if isinstance(event, Ended):
            self.finish = finish_reason(event)
        elif isinstance(event, Delta):
            self.tokens += event.tokens
            if event.kind in ("content", "reasoning"):
                self.texts[event.kind].append(event.text)
                return
            if event.kind == "tool_name":
                self.calls[event.call] = new_call(event.text)
            else:
                self.calls[event.call]["function"]["arguments"] += event.text

    @property
    def content(self) -> str:
        """What was said."""
        return "".join(self.texts["content"])

    @property
    def reasoning(self) -> str:
        """What was thought."""
        return "".join(self.texts["reasoning"])

    @property
    def message(self) -> dict[str, Any]:
        """The message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [*self.calls.values()]
            message["content"] = self.content or None
        return message


async def collected(events: AsyncIterator[Event], n: int, usage: Usage) -> list[AnswerChoice]:
    """All answers to a request, when they have ended."""
    choices = [AnswerChoice() for _ in range(n)]
    async for event in events:
        usage.take(event)
        if isinstance(event, Delta | Ended):
            choices[event.choice].take(event)
    return choices


def finish_reason(event: Ended) -> str:
    """OpenAI's word for why an answer has ended."""
    return "stop" if event.finish == "cancelled" else event.finish


def new_id(prefix: str) -> str:
    """A name of its own for what is answered."""
    return f"{prefix}{uuid.uuid4().hex}"


def new_call(name: str) -> dict[str, Any]:
    """A call of a tool, without arguments yet."""
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": ""}}


class ChatAnswer:
    """The forms of what is answered to a chat."""

    def __init__(self, model: str) -> None:
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model}

    def whole(
        self, choices: Sequence[AnswerChoice], usage: Usage, *, logprobs: bool
    ) -> dict[str, Any]:
        """All of it."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": number,
                    "message": choice.message,
                    "logprobs": chat_logprobs(choice.tokens) if logprobs else None,
                    "finish_reason": choice.finish,
                }
                for number, choice in enumerate(choices)
            ],
            "usage": usage.to_dict(),
        }

    def first(self, n: int) -> list[dict[str, Any]]:
        """What each answer begins with."""
        return [self._chunk(number, {"role": "assistant", "content": ""}) for number in range(n)]

    def piece(self, event: Delta | Ended, *, logprobs: bool) -> dict[str, Any]:
        """More of an answer, or its end."""
        if isinstance(event, Ended):
            return self._chunk(event.choice, {}, finish=finish_reason(event))
        logprobs_form = chat_logprobs(event.tokens) if logprobs else None
        if event.kind == "content":
            delta: dict[str, Any] = {"content": event.text}
        elif event.kind == "reasoning":
            delta = {"reasoning_content": event.text}
        elif event.kind == "tool_name":
            delta = {"tool_calls": [{"index": event.call, **new_call(event.text)}]}
        else:
            call = {"index": event.call, "function": {"arguments": event.text}}
            delta = {"tool_calls": [call]}
        return self._chunk(event.choice, delta, logprobs=logprobs_form)

    def last(self, usage: Usage) -> dict[str, Any]:
        """The tokens, after all answers."""
        head = {**self._head, "object": "chat.completion.chunk"}
        return {**head, "choices": [], "usage": usage.to_dict()}

    def _chunk(
        self, number: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


class CompletionAnswer:
    """The forms of what is answered to a text that goes on."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Of each answer how many characters there are, and the bytes of the next one.
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._decoders: defaultdict[int, IncrementalDecoder] = defaultdict(
            partial(getincrementaldecoder("utf-8"), "replace")
        )

    def whole(
        self, choices: Sequence[tuple[str, AnswerChoice]], usage: Usage, *, logprobs: bool
    ) -> dict[str, Any]:
        """All of it; each answer with what stands before it."""
        return {
            **self._head,
            "choices": [
                {
                    "index": number,
                    "text": before + choice.content,
                    "logprobs": self._logprobs(number, choice.tokens) if logprobs else None,
                    "finish_reason": choice.finish,
                }
                for number, (before, choice) in enumerate(choices)
            ],
            "usage": usage.to_dict(),
        }

    def piece(
        self, number: int, text: str, tokens: Sequence[Token], finish: str | None, *, logprobs: bool
    ) -> dict[str, Any]:
        """More of an answer, or its end."""
        logprobs_form = self._logprobs(number, tokens) if logprobs and tokens else None
        choice = {"index": number, "text": text, "logprobs": logprobs_form, "finish_reason": finish}
        return {**self._head, "choices": [choice]}

    def last(self, usage: Usage) -> dict[str, Any]:
        """The tokens, after all answers."""
        return {**self._head, "choices": [], "usage": usage.to_dict()}

    def _logprobs(self, number: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(self._decoders[number].decode(token.data))
        return {
            "tokens": [_spelled(token.text, token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_spelled(text, data): logprob for text, data, logprob in token.likeliest}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _spelled(text: str, data: bytes) -> str:
    """A token as completions have it, which tell no bytes: what is no text is written out."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Log-probabilities as chats have them."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)}
                for text, data, logprob in token.likeliest
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
