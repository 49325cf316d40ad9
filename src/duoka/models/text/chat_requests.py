"""What clients of OpenAI's servers send → the messages of a chat.

Anthropic's form is made one of OpenAI's before (`serve.anthropic`).

Everything is as strangers wrote it. What a model can't be told is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from PIL.Image import Image

from duoka.base.images import MOST_BYTES, WEB_FORMATS, decode_image
from duoka.base.units import format_count
from duoka.errors import UsageError

from .answer_reader import MOST_CALLS, Tags
from .messages import ChatMessage, Role, ToolCall, read_tool_call, refuse_half_pairs

MOST_MESSAGES = 4096
MOST_IMAGES = 64
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_ROLES: dict[object, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "observation",
}
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass
class ChatMessages:
    """The messages of one request.

    Parameters
    ----------
    reasoning : Tags, optional
        What the model writes around its reasoning. What it has reasoned in earlier answers is
        written so, and the template chooses what it needs of it; otherwise it is left out.
    takes_images : bool
    most_images : int
        None of more is decoded.
    """

    reasoning: Tags | None = None
    takes_images: bool = True
    most_images: int = MOST_IMAGES
    _num_images: int = field(default=0, init=False)
    _call_ids: set[str] = field(default_factory=set, init=False)

    def openai(self, messages: object) -> list[ChatMessage]:
        """Read the messages of OpenAI's chat completions.

        Raises
        ------
        UsageError
            For what a chat can't have, with the number of the message.
        """
        if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
            raise UsageError(
                f"messages must be a list of 1 to {MOST_MESSAGES}",
                hint='as [{"role": "user", "content": "Hello"}]',
            )
        chat: list[ChatMessage] = []
        for number, said in enumerate(messages):
            try:
                if not isinstance(said, Mapping):
                    raise UsageError(f"it is {_shown(said)}, which is no object")
                chat.append(self._message(said))
            except UsageError as error:
                raise UsageError(f"messages[{number}]: {error}", hint=error.hint) from error
        return chat

    def _message(self, said: Mapping[str, Any]) -> ChatMessage:
        role = _ROLES.get(said.get("role")) if isinstance(said.get("role"), str) else None
        if role is None:
            known = ", ".join(map(str, _ROLES))
            raise UsageError(f"its role is {_shown(said.get('role'))}", hint=f"roles: {known}")
        keys = {"user": set[str](), "system": set[str](), "observation": {"tool_call_id", "name"}}
        assistants = {"tool_calls", "reasoning_content", "reasoning"}
        _refuse_unknown(said, {"role", "content"} | keys.get(role, assistants), f"a {role} message")
        content, images = self._openai_content(said.get("content"), role)
        calls = tuple(map(self._openai_call, _listed(said.get("tool_calls"), "tool_calls")))
        if role == "observation":
            return self._result(said.get("tool_call_id"), content)
        if said.get("content") is None and not calls:
            raise UsageError("it has no content")
        if role == "assistant":
            thought = said.get("reasoning_content") or said.get("reasoning")
            return self._answer(content, thought, calls)
        return ChatMessage(role=role, content=content, images=images)

    def _openai_content(self, content: object, role: Role) -> tuple[str, tuple[Image, ...]]:
        if not isinstance(content, list):
            return ("" if content is None else _text_of(content, "its content")), ()
        texts, images = [], []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" or (kind == "refusal" and role == "assistant"):
                _refuse_unknown(part, {"type", kind}, "a part of its content")
                texts.append(_text_of(part.get(kind), "a part of its content"))
            elif kind == "image_url" and role == "user":
                _refuse_unknown(part, {"type", "image_url"}, "a part of its content")
                images.append(self._openai_image(part.get("image_url")))
            else:
                raise UsageError(
                    f"a part of its content is of type {_shown(kind)}",
                    hint="text, and image_url for users, are known",
                )
        return "".join(texts), tuple(images)

    def _openai_image(self, image: object) -> Image:
        self._refuse_images()
        if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
            raise UsageError("an image has no url", hint='{"url": "data:image/png;base64,…"}')
        _refuse_unknown(image, {"url", "detail"}, "an image")
        if image.get("detail") not in (None, "auto", "low", "high"):
            raise UsageError(f"an image's detail is {_shown(image['detail'])}", hint="leave it out")
        url = image["url"]
        match = _DATA_URL.match(url)
        if match is None:
            raise _remote(url)
        return self._image(url[match.end() :])

    def _openai_call(self, call: object) -> ToolCall:
        if not isinstance(call, Mapping) or call.get("type", "function") != "function":
            raise UsageError(f"a call is {_shown(call)}, which is no function's")
        _refuse_unknown(call, {"id", "type", "function", "index"}, "a call")
        return self._call(call.get("id"), call.get("function"))

    def _answer(self, content: str, thought: object, calls: tuple[ToolCall, ...]) -> ChatMessage:
        if len(calls) > MOST_CALLS:
            raise UsageError(f"it calls {len(calls)} tools; at most {MOST_CALLS} are read")
        if thought not in _EMPTY:
            text = _text_of(thought, "its reasoning")
            if self.reasoning is not None:
                begin, end = self.reasoning
                content = f"{begin}\n{text}\n{end}\n\n{content}"
        return ChatMessage(
            role="assistant",
            content=content,
            tool_call=calls[0] if calls else None,
            further_calls=calls[1:],
        )

    def _call(self, number: object, function: object) -> ToolCall:
        if not isinstance(number, str) or not _ID.fullmatch(number):
            raise UsageError(f"a call's id is {_shown(number)}", hint="as it was given: call_…")
        self._call_ids.add(number)
        return replace(read_tool_call(function), id=number)

    def _result(self, number: object, content: str) -> ChatMessage:
        if not isinstance(number, str) or number not in self._call_ids:
            raise UsageError(
                f"it is the result of the call {_shown(number)}, which no message before it made",
                hint="send the assistant's message with its calls, too",
            )
        return ChatMessage(role="observation", content=content, call_id=number)

    def _image(self, content: str) -> Image:
        if len(content) > (MOST_BYTES * 4) // 3 + 4:
            raise UsageError(f"an image is larger than {MOST_BYTES} bytes", hint="make it smaller")
        try:
            decoded = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError(f"an image is no base64: {error}") from error
        return decode_image(decoded, f"image {self._num_images}", WEB_FORMATS)

    def _refuse_images(self) -> None:
        if not self.takes_images:
            raise UsageError("this model takes no images", hint="leave the images out")
        if self._num_images == self.most_images:
            raise UsageError(
                f"there is memory for {format_count(self.most_images, 'image')}, "
                "and there are more",
                hint="leave some out, or plan with a larger --images",
            )
        self._num_images += 1


def _remote(url: str) -> UsageError:
    return UsageError(
        f"an image is at {url[:60]!r}; images are taken from the request alone",
        hint="send it as data:image/png;base64,…; what is at http or https addresses, duoka serve "
        "fetches with --allow-image-urls",
    )


def _text_of(content: object, what: str) -> str:
    """A text."""
    if not isinstance(content, str):
        raise UsageError(f"{what} is {_shown(content)}, which is no text")
    refuse_half_pairs(content, what)
    return content


def _listed(value: object, what: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise UsageError(f"{what} is {_shown(value)}, which is no list")
    return value or []


def _refuse_unknown(said: Mapping[str, Any], known: set[str], what: str) -> None:
    """Raise UsageError for a field that says something and isn't read."""
    unknown = [key for key, value in said.items() if key not in known and value not in _EMPTY]
    if unknown:
        raise UsageError(
            f"{what} has a field that isn't read: {str(unknown[0])[:80]!r}",
            hint=f"known are {', '.join(sorted(known))}",
        )


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, default=str)[:80]
