"""Convert the turns of a request to chat messages for the model, with decoded images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from PIL.Image import Image

from duoka.base.images import WEB_FORMATS, decode_data_url, decode_image
from duoka.base.units import format_count
from duoka.errors import UsageError
from duoka.models.text.answer_reader import Tags
from duoka.models.text.messages import ChatMessage, read_tool_call

from .messages import Turn


@dataclass
class ChatMessages:
    """Converts the turns of one request to chat messages; holds the state of the conversion.

    Parameters
    ----------
    reasoning : Tags, optional
        The tags around the model's reasoning. The reasoning of earlier answers is put between them
        into the content, from which the chat template may drop it; without tags it is omitted.
    most_images : int, optional
        The most images of the request; None if the model takes no images.
    """

    reasoning: Tags | None = None
    most_images: int | None = None
    _num_images: int = field(default=0, init=False)
    _call_ids: set[str] = field(default_factory=set, init=False)

    def read(self, turns: Sequence[Turn]) -> list[ChatMessage]:
        """Convert the turns; a UsageError names the number of the refused message."""
        chat: list[ChatMessage] = []
        for number, turn in enumerate(turns):
            try:
                chat.append(self._read_turn(turn))
            except UsageError as error:
                raise UsageError(f"messages[{number}]: {error}", hint=error.hint) from error
        return chat

    def _read_turn(self, turn: Turn) -> ChatMessage:
        """Convert a turn; check its images and tool calls."""
        if turn.images and turn.role != "user":
            hint = "supported are text, and image_url for users"
            raise UsageError('a part of its content is of type "image_url"', hint=hint)
        if turn.role == "tool":
            if turn.call_id not in self._call_ids:
                raise UsageError(
                    f"it is the result of the call {json.dumps(turn.call_id)[:80]}, which no "
                    "earlier message contains",
                    hint="include the assistant's message with its calls",
                )
            return ChatMessage(role="observation", content=turn.content, call_id=turn.call_id)
        content = turn.content
        if turn.reasoning and self.reasoning is not None:
            begin, end = self.reasoning
            content = f"{begin}\n{turn.reasoning}\n{end}\n\n{content}"
        calls = [replace(read_tool_call(call["function"]), id=call["id"]) for call in turn.calls]
        self._call_ids.update(call.id for call in calls)
        return ChatMessage(
            role=turn.role,
            content=content,
            images=tuple(map(self._read_image, turn.images)),
            calls=tuple(calls),
        )

    # Check the number before decoding: an image of a few hundred bytes can decode to a gigabyte.

    def _read_image(self, url: str) -> Image:
        """Decode the image of a data URL; raise UsageError if the image is invalid or too many."""
        if self.most_images is None:
            raise UsageError("this model takes no images", hint="omit the images")
        if self._num_images == self.most_images:
            raise UsageError(
                f"the plan has memory for {format_count(self.most_images, 'image')}, and the "
                "request has more",
                hint="send fewer images, or plan with a larger --images",
            )
        self._num_images += 1
        content = decode_data_url(url)
        if content is None:
            raise UsageError(
                f"an image is at {url[:60]!r}; only images in the request are accepted",
                hint="send it as data:image/png;base64,…, or start duoka serve with "
                "--allow-image-urls to download http and https URLs",
            )
        return decode_image(content, f"image {self._num_images}", WEB_FORMATS)


def join_systems(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join the system messages to one, at the beginning of the chat."""
    texts = [message.content for message in messages if message.role == "system"]
    system = ChatMessage(role="system", content="\n\n".join(texts))
    return [*([system] if texts else ()), *(turn for turn in messages if turn.role != "system")]
